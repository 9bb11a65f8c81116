"""Pages that the last accepted token attended to: SpecExtend, layer-wise.

SpecExtend (Cha et al., 2025) picks chunks for a small drafter from the target's last layer. This
is the paper's adaptation to self-speculation (its section 5.1; `algorithms.md` section 4.4): at
every layer, by that layer's own weights A, once per iteration,

    c[P] = mean over j in page P, mean over heads h, of A[a, h, j]

where row a is the last accepted one. Any of the gamma + 1 rows may turn out to be it, so an
engine collects them all. The paper leaves the page size open; 16 is the serving engines'.

Equal budget, tail not counted: see `topk.best_pages`. It is `vegas` with rows `last_accepted` and
granularity `page`.
"""

from __future__ import annotations

from typing import ClassVar

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.policies.base import (
    Collection,
    KVSelection,
    KVSelectionPolicy,
    Needs,
    SelectionInput,
)
from vegas_runtime.policies.topk import best_pages


class SpecExtendPolicy(KVSelectionPolicy):
    """Reads the pages with the largest mean weight in the last accepted row."""

    name: ClassVar[str] = "spec_extend"

    def __init__(self, config: SpeculationConfig) -> None:
        super().__init__(config)
        self._refuse_switches()

    def _needs(self) -> Needs:
        return Needs(collection=Collection(rows="last_accepted"))

    def select(self, given: SelectionInput) -> KVSelection:
        """Top pages among those that candidates 0..L fill."""
        assert given.scores is not None
        return best_pages(given.scores, given.prefix_lens, self.config)
