"""What the end of the prompt attended to, chosen once: MagicDec-SnapKV.

SnapKV (Li et al., 2024) used as a drafter (MagicDec, Sadhukhan et al., 2025); `algorithms.md`
section 4.2. Per layer and KV head: softmax each of the last 32 prompt rows over the prompt, sum
the rows, average over 5 neighbouring keys, sum over the head's group; keep the top B - 32 keys
before those 32, and the 32 themselves. Never refreshed: what is generated later is the tail.

The softmax is over plain causal logits: no attention sinks, no soft cap. The neighbours' average
ends where the last 32 begin; beyond either end it counts zeros.

Equal budget: B is `SpeculationConfig.kv_budget` at the prompt's length, the last 32 prompt tokens
counted. The tail is not, and here it grows with the output.
"""

from __future__ import annotations

from typing import ClassVar, Final

import torch
from torch import Tensor
from torch.nn import functional

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.policies.base import KVSelection, KVSelectionPolicy, Needs, SelectionInput
from vegas_runtime.policies.topk import top_entries

PROMPT_ROWS: Final = 32
POOL_WIDTH: Final = 5


class SnapKVPolicy(KVSelectionPolicy):
    """Reads the prompt's most voted keys, its last 32, and everything generated since.

    Attributes:
        scale_logits: whether logits are scaled by 1/sqrt(D) before the softmax, as attention
            does; MagicDec's code does not, so neither does this by default.
    """

    name: ClassVar[str] = "snapkv"
    scale_logits: ClassVar[bool] = False

    def __init__(self, config: SpeculationConfig) -> None:
        super().__init__(config)
        self._refuse_switches()

    def _needs(self) -> Needs:
        return Needs(prompt_rows=PROMPT_ROWS)

    def select(self, given: SelectionInput) -> KVSelection:
        """Top-k by pooled votes, lowest position first among equals."""
        return self.choose(self.pooled(given), given.prefix_lens)

    def pooled(self, given: SelectionInput) -> Tensor:
        """Votes for what lies before the last prompt rows, each the mean of its neighbourhood.

        Returns:
            [..., B, Hkv, Lmax] float32.
        """
        lens = given.prefix_lens
        votes = self._votes(given)
        places = torch.arange(votes.shape[-1], device=votes.device)
        window = self._budget(lens).clamp(max=PROMPT_ROWS)
        hidden = places >= (lens + 1 - window)[:, None]
        return functional.avg_pool1d(
            votes.masked_fill(hidden[:, None], 0).flatten(0, -2)[:, None],
            POOL_WIDTH,
            stride=1,
            padding=POOL_WIDTH // 2,
        ).view(votes.shape)

    def choose(self, pooled: Tensor, prefix_lens: Tensor) -> KVSelection:
        """The largest pooled votes before the last prompt rows, and these.

        Args:
            pooled: [..., B, Hkv, L] float32.
            prefix_lens: [B] int64, position of each prompt's last token.
        """
        budget = self._budget(prefix_lens)
        window = budget.clamp(max=PROMPT_ROWS)
        candidates = prefix_lens + 1 - window
        return KVSelection(
            positions=top_entries(pooled, candidates, budget - window), tail_starts=candidates
        )

    def _budget(self, lens: Tensor) -> Tensor:
        budgets = [self.config.kv_budget(length) for length in lens.tolist()]
        return torch.tensor(budgets, device=lens.device)

    def _votes(self, given: SelectionInput) -> Tensor:
        """Softmax weights summed over rows and each KV head's group, [..., B, Hkv, Lmax]."""
        assert given.prompt_queries is not None
        assert given.keys is not None
        keys = given.keys.float()
        shape = given.prompt_queries.shape
        grouped = (*shape[:-3], keys.shape[-3], shape[-3] // keys.shape[-3], *shape[-2:])
        queries = given.prompt_queries.float().reshape(grouped)
        logits = queries @ keys.unsqueeze(-3).mT
        if self.scale_logits:
            logits *= keys.shape[-1] ** -0.5
        last = given.prefix_lens[:, None, None]
        num_rows, num_keys = logits.shape[-2:]
        rows = last + torch.arange(1 - num_rows, 1, device=keys.device)[:, None]
        places = torch.arange(num_keys, device=keys.device)
        hidden = (places > rows)[:, None, None]
        weights = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        # A row before the prompt's start sees nothing and votes for nothing.
        votes: Tensor = weights.masked_fill(hidden, 0).sum(dim=(-3, -2))
        return votes
