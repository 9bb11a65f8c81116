"""Verification-guided top-k: the method this project exists for.

Vegas (section 3.2-3.3 of the paper): per layer, keep the KV entries with the largest total
attention weight over the chosen rows of the verify block. The objective is additive over
entries, so the exact maximiser is the top-k of the column sums.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from vegas_runtime.kernels.reference import varlen_topk
from vegas_runtime.policies.base import (
    Collection,
    KVSelection,
    KVSelectionPolicy,
    Needs,
    SelectionInput,
)
from vegas_runtime.policies.topk import best_pages


class VegasPolicy(KVSelectionPolicy):
    """Top-k of the attention that the verify pass paid to each KV entry.

    Switches: `rows` (which query rows are summed; `two` is the paper's Collect-2-Query, first
    draft token's and bonus token's row), `metric`, `scope` and `granularity` (`token` is the
    paper's; with `page`, tokens beside those attended to come along, which drafts further on in
    the same passage want next). No forced sinks and no forced recent window: they must win.
    """

    name: ClassVar[str] = "vegas"

    def _needs(self) -> Needs:
        config = self.config
        return Needs(
            collection=Collection(rows=config.rows, metric=config.metric, scope=config.scope)
        )

    def select(self, given: SelectionInput) -> KVSelection:
        """Top-k over candidates 0..L by score, lowest position first among equals."""
        assert given.scores is not None
        lens = given.prefix_lens
        if self.config.granularity == "page":
            return best_pages(given.scores, lens, self.config)
        budgets = [self.config.kv_budget(length) for length in lens.tolist()]
        shape = given.scores.shape[:-1]
        positions = varlen_topk(
            given.scores,
            (lens + 1)[:, None].expand(shape),
            torch.tensor(budgets, device=lens.device)[:, None].expand(shape),
        )
        return KVSelection(positions=positions, tail_starts=lens + 1)
