"""Each KV head's most attended entries over all verified rows: SparseSpec's PillarAttn.

SparseSpec (Zhao et al., 2025); `algorithms.md` section 4.5. Per layer and KV head, entries are
ranked by their mean weight over the head's group and over every row of the verify block, accepted
or not. Each row sees every candidate, so the sum ranks as the mean does. A request's first draft
phase after its prefill is dense.

Equal budget: SparseSpec's own rule, B = max(floor, ceil(ratio * L')), L' being the length
committed now and the floor `min_tokens` (the paper's system uses 128). It counts the tail: of
n = a + 1 tokens just emitted, the last n + 1 committed keys are always read, and B - (n + 1) of
the others. The total is B at the first draft step and grows by one with each. `vegas` reads its
budget and the tail beside it, n tokens more at the same setting.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.policies.base import (
    Collection,
    KVSelection,
    KVSelectionPolicy,
    Needs,
    SelectionInput,
)
from vegas_runtime.policies.topk import top_entries


class SparseSpecPolicy(KVSelectionPolicy):
    """Top-k per KV head of the attention that the whole verify block paid."""

    name: ClassVar[str] = "sparse_spec"

    def __init__(self, config: SpeculationConfig) -> None:
        super().__init__(config)
        self._refuse_switches()

    def _needs(self) -> Needs:
        return Needs(collection=Collection(rows="all", scope="kv_head"), dense_first_phase=True)

    def select(self, given: SelectionInput) -> KVSelection:
        """Top-k over the first L' - (n + 1) keys, lowest position first among equals."""
        assert given.scores is not None
        num_recent = given.committed_lens - given.prefix_lens + 1
        candidates = (given.committed_lens - num_recent).clamp(min=0)
        budgets = [self._budget(length) for length in given.committed_lens.tolist()]
        budget = torch.tensor(budgets, device=candidates.device) - num_recent
        return KVSelection(
            positions=top_entries(
                given.scores, candidates, budget.clamp(min=0).minimum(candidates)
            ),
            tail_starts=candidates,
        )

    def _budget(self, committed_len: int) -> int:
        """Keys read at the first draft step, if there are so many."""
        return max(self.config.min_tokens, math.ceil(self.config.sparsity_ratio * committed_len))
