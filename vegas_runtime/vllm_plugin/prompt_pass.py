"""A pass over the last rows of prompts, for methods that choose by them.

Prefilling computes these rows too, but not where a prefix cache hit leaves only the last block to
compute, and in two steps where a chunk ends between them. So a request's last prompt rows run
again once, when it drafts for the first time: 32 rows, their attention over the whole prompt.
Nothing is written to the KV cache, which holds these tokens already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vegas_runtime.policies.snapkv import PROMPT_ROWS
from vegas_runtime.vllm_plugin.attention import PromptMetadata
from vegas_runtime.vllm_plugin.prompt_lists import PROMPTS_PER_PASS, PromptLists

# input ids [T] int32, positions [T] int64, metadata, slots [T] int64 -> run through the model.
RunModel = Callable[[Tensor, Tensor, PromptMetadata, Tensor], Any]


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Requests whose lists are to be chosen.

    Attributes:
        states: [N] their persistent states.
        lens: [N] tokens of their prompts.
        block_table: [N, blocks] int32 on the device.
    """

    states: np.ndarray
    lens: np.ndarray
    block_table: Tensor


def choose_by_prompts(
    prompts: Prompts,
    lists: PromptLists,
    *,
    token_ids: Tensor,
    run_model: RunModel,
    num_drafts: int,
) -> None:
    """Run the last rows of prompts, a few prompts at a time; attention fills the lists.

    Args:
        prompts: whose.
        lists: filled.
        token_ids: [requests, longest text] int32 by persistent state, readable from the device.
        run_model: runs rows through the model.
        num_drafts: tokens drafted per iteration.
    """
    device = prompts.block_table.device
    rows = np.arange(-PROMPT_ROWS, 0, dtype=np.int64)
    for first in range(0, len(prompts.states), PROMPTS_PER_PASS):
        chosen = slice(first, first + PROMPTS_PER_PASS)
        states, lens = prompts.states[chosen].astype(np.int64), prompts.lens[chosen]
        # Rows before a prompt's start stand at its first token and are ignored.
        positions = async_tensor_h2d(
            np.maximum(lens[:, None] + rows, 0).ravel(), device=device, dtype=torch.int64
        )
        seq_lens = async_tensor_h2d(lens, device=device, dtype=torch.int32)
        own = async_tensor_h2d(states, device=device, dtype=torch.int64)
        lists.begin(own, seq_lens, num_drafts=num_drafts)
        lists.hold(states)
        starts = torch.arange(len(states) + 1, dtype=torch.int32, device=device) * PROMPT_ROWS
        run_model(
            token_ids[own.repeat_interleave(PROMPT_ROWS), positions].int(),
            positions,
            PromptMetadata(
                block_table=prompts.block_table[chosen],
                seq_lens=seq_lens,
                query_start=starts,
                max_len=int(lens.max()),
            ),
            torch.full_like(positions, -1),
        )
