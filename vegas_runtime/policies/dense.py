"""Keeps everything. The oracle: its drafts are the target's own, so all are accepted."""

from __future__ import annotations

from typing import ClassVar

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.policies.base import KVSelection, KVSelectionPolicy, Needs, SelectionInput


class DensePolicy(KVSelectionPolicy):
    """Drafts with full attention; `sparsity_ratio` and `min_tokens` have no effect."""

    name: ClassVar[str] = "dense"

    def __init__(self, config: SpeculationConfig) -> None:
        super().__init__(config)
        self._refuse_switches()

    def _needs(self) -> Needs:
        return Needs()

    def select(self, given: SelectionInput) -> KVSelection | None:
        """Every entry."""
        return None
