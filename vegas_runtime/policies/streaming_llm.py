"""Sink block and recent blocks: MagicDec-Stream, as the paper's vLLM baseline runs it.

StreamingLLM (Xiao et al., 2024) used as a drafter (MagicDec, Sadhukhan et al., 2025). Positions
keep their own RoPE angles. Block granular: the first block of 16 tokens is the sink, and the
newest ceil(budget / 16) blocks are the window, counted anew at each draft step.
"""

from __future__ import annotations

import math
from typing import ClassVar, Final

import torch

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.policies.base import KVSelection, KVSelectionPolicy, Needs, SelectionInput

KV_BLOCK_SIZE: Final = 16


class StreamingLLMPolicy(KVSelectionPolicy):
    """Reads the first block and the newest blocks; scores nothing."""

    name: ClassVar[str] = "streaming_llm"

    def __init__(self, config: SpeculationConfig) -> None:
        super().__init__(config)
        self._refuse_switches()

    def _needs(self) -> Needs:
        return Needs(per_draft_step=True)

    def select(self, given: SelectionInput) -> KVSelection:
        """Sink positions not already inside the window; the window is the tail.

        The window holds `current_lens` + 1 tokens' newest blocks, the query's own included.
        """
        starts = [self._window_start(n) for n in given.current_lens.tolist()]
        sinks = [min(KV_BLOCK_SIZE, start) for start in starts]
        width = max(*sinks, 1)
        positions = torch.full((len(starts), 1, width), -1, dtype=torch.int64)
        for row, count in enumerate(sinks):
            positions[row, 0, :count] = torch.arange(count)
        device = given.current_lens.device
        return KVSelection(
            positions=positions.to(device), tail_starts=torch.tensor(starts, device=device)
        )

    def _window_start(self, current_len: int) -> int:
        """First position of the window for a query at position `current_len`."""
        num_tokens = current_len + 1
        asked = max(self.config.sparsity_ratio * num_tokens, self.config.min_tokens)
        num_blocks = math.ceil(asked / KV_BLOCK_SIZE)
        newest_block = (num_tokens - 1) // KV_BLOCK_SIZE
        return max(newest_block - num_blocks + 1, 0) * KV_BLOCK_SIZE
