"""Lists chosen once, by the end of a request's prompt, and held for its life (SnapKV).

They are positions in the text, kept by the request's persistent state, so that neither a batch row
that moves nor blocks that change places touch them. Which states have a list is known on the host:
a state whose prompt is computed loses it, because another request took it or one that was
preempted came back, and a change of the setting takes all. Lists are made when a request drafts
next, from the same prompt rows.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from vegas_runtime.kernels.budgets import kv_budgets
from vegas_runtime.policies.snapkv import PROMPT_ROWS, SnapKVPolicy
from vegas_runtime.vllm_plugin.draft_lists import DraftLists
from vegas_runtime.vllm_plugin.geometry import AttentionShape, Limits
from vegas_runtime.vllm_plugin.late_rows import AcceptedStep
from vegas_runtime.vllm_plugin.triton_prompts import hold_lists, rank_prompts
from vegas_runtime.vllm_plugin.triton_select import Selector, Units
from vegas_runtime.vllm_plugin.verification import StepLengths

# Prompts of one pass over their last rows: few arrive in one step, and memory grows with them.
PROMPTS_PER_PASS: Final = 8


class PromptLists:
    """What is held of every request's prompt.

    Args:
        shape: the layers.
        limits: the largest step.
        ratio: float64[1] on the device, fraction of entries kept.
        min_tokens: int32[1] on the device.
        device: where.

    Attributes:
        vote_scale: factor on query-key products before the softmax of the votes.
        codes: [N, Hkv, n] uint8 of the layer chosen last; for looking at.
    """

    def __init__(
        self,
        shape: AttentionShape,
        limits: Limits,
        *,
        ratio: Tensor,
        min_tokens: Tensor,
        device: torch.device,
    ) -> None:
        self._ratio, self._min_tokens = ratio, min_tokens
        self._block_size, self._num_heads = shape.block_size, shape.num_heads
        self.vote_scale = shape.scale if SnapKVPolicy.scale_logits else 1.0
        requests, heads = max(limits.max_requests, limits.max_batch), shape.num_kv_heads
        width, N = limits.capacity, PROMPTS_PER_PASS
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._positions = torch.zeros((shape.num_layers, requests, heads, width), **ints)
        self._counts, self._tails = torch.zeros((2, requests), **ints)
        self._chosen = torch.zeros((1, N, heads, width), **ints)
        self._votes = torch.zeros((N, heads, limits.padded_len), device=device)
        self.codes = torch.zeros((N, heads, limits.padded_len), dtype=torch.uint8, device=device)
        # Single tokens compete here, whatever other methods let compete.
        self._never = torch.zeros(1, **ints)
        self._selector = Selector(
            rows=N * heads, max_len=limits.max_len, in_pages=self._never, device=device
        )
        # Blocks in the order of the text: what is selected are positions.
        blocks = -(-limits.padded_len // shape.block_size)
        self._in_order = torch.arange(blocks, **ints).expand(N, blocks).contiguous()
        self._held: set[int] = set()
        self._states: Tensor
        self._candidates, self._kept = torch.zeros((2, N), **ints)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        tensors = (
            *(self._positions, self._counts, self._tails, self._chosen, self._votes, self.codes),
            *(self._in_order, self._candidates, self._kept, self._never),
        )
        return sum(t.nbytes for t in tensors) + self._selector.num_bytes

    def forget(self) -> None:
        """Make every list again when its request drafts next."""
        self._held.clear()

    def drop(self, states: np.ndarray) -> None:
        """Prompts of these states are computed: what is held of them was another text's."""
        self._held.difference_update(states.tolist())

    def missing(self, states: np.ndarray, can_draft: np.ndarray) -> list[int]:
        """Batch rows whose request will draft and has no list.

        Args:
            states: [B] each row's persistent state.
            can_draft: [B] whether its prompt is complete.
        """
        return [
            row
            for row, state in enumerate(states.tolist())
            if can_draft[row] and state not in self._held
        ]

    def hold(self, states: np.ndarray) -> None:
        """Note that these states have lists from now on."""
        self._held.update(states.tolist())

    def begin(self, states: Tensor, prompt_lens: Tensor, *, num_drafts: int) -> None:
        """Prepare a pass over the last rows of prompts, before its first layer.

        Args:
            states: [N] int64 persistent states, at most `PROMPTS_PER_PASS`.
            prompt_lens: [N] int32 tokens of each prompt.
            num_drafts: tokens drafted per iteration; part of the budget's rule.
        """
        N = states.shape[0]
        budget = kv_budgets(
            prompt_lens,
            sparsity_ratio=self._ratio,
            num_speculative_tokens=num_drafts,
            min_tokens=self._min_tokens,
        )
        window = budget.clamp(max=PROMPT_ROWS)
        self._states = states
        torch.sub(prompt_lens, window, out=self._candidates[:N])
        torch.sub(budget, window, out=self._kept[:N])
        self._counts[self._states] = self._kept[:N]
        self._tails[self._states] = self._candidates[:N]

    def choose(
        self, layer: int, q: Tensor, k: Tensor, lse: Tensor, *, block_table: Tensor, lens: Tensor
    ) -> None:
        """Choose one layer's lists.

        Args:
            layer: index among the layers that draft sparsely.
            q: [N * 32, H, D] queries of each prompt's last rows.
            k: [blocks, block size, Hkv, D] view of the layer's K.
            lse: [N * 32, H] float32 natural log, any strides, taken with `vote_scale`.
            block_table: [N, blocks] int32.
            lens: [N] int32 tokens of each prompt.
        """
        N = lens.shape[0]
        rank_prompts(
            *(q, k, lse),
            block_table=block_table,
            prompt_lens=lens,
            candidates=self._candidates[:N],
            scale=self.vote_scale,
            votes=self._votes[:N],
            codes=self.codes[:N],
        )
        self._selector.select(
            self.codes[None, :N],
            candidates=self._candidates[:N],
            counts=self._kept[:N],
            block_table=self._in_order[:N],
            block_size=self._block_size,
            units=Units(block=self._block_size),
            lists=self._chosen[:, :N],
        )
        self._positions[layer].index_copy_(0, self._states, self._chosen[0, :N])

    def recall(
        self, step: AcceptedStep, *, units: Units, lengths: StepLengths, lists: DraftLists
    ) -> None:
        """Give each row of a step the list of its request.

        Args:
            step: what was verified and accepted.
            units: how list entries are addressed.
            lengths: of these requests, written.
            lists: of these requests, written.
        """
        hold_lists(
            request_ids=step.request_ids,
            num_sampled=step.num_sampled,
            positions=self._positions,
            held_counts=self._counts,
            held_tails=self._tails,
            block_table=step.block_table,
            block_size=self._block_size,
            units=units,
            lists=lists.entries,
            counts=lengths.counts,
            tail_start=lengths.tail_start,
        )

    def warm_up(self, k: Tensor) -> None:
        """Compile what chooses, on a prompt of one token.

        Args:
            k: [blocks, block size, Hkv, D] view of a layer's K.
        """
        one = torch.ones(1, dtype=torch.int32, device=k.device)
        q = torch.zeros((PROMPT_ROWS, self._num_heads, k.shape[-1]), dtype=k.dtype, device=k.device)
        self.begin(one.long() - 1, one, num_drafts=1)
        lse = torch.zeros(q.shape[:2], device=k.device)
        self.choose(0, q, k, lse, block_table=one[None] - 1, lens=one)
