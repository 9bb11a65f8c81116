"""The same drafts again without the work of choosing: what selection costs, measured.

A run is recorded: what every draft step was told to read. Played back, each step is handed the
same lists for nothing: no scores are collected, no page bounds kept, no policy asked. What remains
is what any sparse drafting does, packing and attention included, over the same entries. So the
drafts, and with them every token and every step, are the same, and the difference in time is the
cost of selection (the paper's Figure 10b).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.engine.kv_cache import KVCache
from vegas_runtime.engine.model import DecoderModel
from vegas_runtime.engine.paged import AttentionChoice, PagedAttention
from vegas_runtime.engine.selection import Selector
from vegas_runtime.errors import BackendError
from vegas_runtime.policies import KVSelection, Needs


@dataclass(kw_only=True)
class SelectionTape:
    """What the draft steps of one run read, in the order they asked.

    Attributes:
        config: the setting of the run.
        selections: one per question; None where everything was read.
    """

    config: SpeculationConfig
    selections: list[KVSelection | None] = field(default_factory=list)


class RecordingSelector(Selector):
    """Chooses as ever, and keeps what it chose.

    Args:
        config: see `Selector`.
        cache: see `Selector`.
        model: see `Selector`.
        choice: see `Selector`.
        tape: where to; of the same setting.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        cache: KVCache,
        model: DecoderModel,
        choice: AttentionChoice,
        tape: SelectionTape,
    ) -> None:
        super().__init__(config, cache, model, choice)
        self._tape = tape.selections

    def _choose(self, committed: Tensor, drafted: int) -> KVSelection | None:
        return self._kept(super()._choose(committed, drafted))

    def _choose_in_place(self, paged: PagedAttention, prefix: Tensor) -> None:
        super()._choose_in_place(paged, prefix)
        self._kept(paged.chosen())

    def _choose_at_layer(
        self, layer: int, query: Tensor, committed: Tensor, lens: Tensor, num_pages: int
    ) -> KVSelection | None:
        return self._kept(super()._choose_at_layer(layer, query, committed, lens, num_pages))

    def _kept(self, chosen: KVSelection | None) -> KVSelection | None:
        """Keep a copy: a policy's answer may live in buffers that the next one overwrites."""
        if chosen is None:
            self._tape.append(None)
            return None
        copied = KVSelection(
            positions=chosen.positions.clone(), tail_starts=chosen.tail_starts.clone()
        )
        self._tape.append(copied)
        return chosen


class ReplayingSelector(Selector):
    """Hands out what a tape holds; collects and chooses nothing.

    Args:
        config: the tape's setting.
        cache: see `Selector`.
        model: see `Selector`.
        choice: see `Selector`.
        tape: a recorded run over the same prompts with the same random numbers.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        cache: KVCache,
        model: DecoderModel,
        choice: AttentionChoice,
        tape: SelectionTape,
    ) -> None:
        super().__init__(config, cache, model, choice)
        self._tape = iter(tape.selections)

    def _what_to_keep(self) -> Needs:
        """How the policy is asked, but nothing of what it would be handed."""
        return replace(
            super()._what_to_keep(),
            collection=None,
            prompt_rows=0,
            page_size=0,
            dense_first_phase=False,
        )

    def _choose(self, committed: Tensor, drafted: int) -> KVSelection | None:
        return self._next()

    def _choose_at_layer(
        self, layer: int, query: Tensor, committed: Tensor, lens: Tensor, num_pages: int
    ) -> KVSelection | None:
        return self._next()

    def _next(self) -> KVSelection | None:
        try:
            return next(self._tape)
        except StopIteration:
            raise BackendError(
                "a played-back run asked for more selections than were recorded, so it is not "
                "the run that was recorded."
            ) from None
