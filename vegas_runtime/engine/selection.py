"""What lanes read while drafting: the policy's door into the loop.

The loop says what happened to its lanes (`admitted`, `verified`, `accepted`, `moved`); the
selector keeps what the policy declared it needs, asks the policy, and makes of its answer what a
draft pass attends to:

    packed    selected entries, copied side by side into a `DraftCache` once per selection
    paged     slots of selected entries, read in place by the kernels (`paged.py`)
    narrow    a function that a pass over the main cache asks at each layer, for policies that
              select by the draft step's own query
    neither   everything
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.engine.attention import AttentionPass, Narrow, make_window
from vegas_runtime.engine.kv_cache import (
    DraftCache,
    KVCache,
    SavedPrefill,
    take_columns,
    with_tail,
)
from vegas_runtime.engine.lane_state import PageBounds, PromptSelections
from vegas_runtime.engine.model import DecoderModel
from vegas_runtime.engine.paged import AttentionChoice, PagedAttention, why_not_kernels
from vegas_runtime.kernels.reference import ScoreSpec, Window
from vegas_runtime.policies import KVSelection, Needs, SelectionInput, make_policy
from vegas_runtime.policies.base import EARLY_ROWS, MAX_PROMPT_ROWS

# Columns to spare, so that a context growing by some tokens does not reallocate.
PACKED_SLACK: Final = 64


class Selector:
    """Asks one policy on behalf of every lane of a cache.

    Args:
        config: names the policy, and its knobs.
        cache: holds the lanes.
        model: what runs.
        choice: see `paged.why_not_kernels`.

    Attributes:
        paged: attends and reads in place, where the kernels run.
        policy: who is asked.
        packed: the draft cache in use, once there is one.

    Raises:
        ConfigError: an unknown policy, or a switch that it lacks.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        cache: KVCache,
        model: DecoderModel,
        choice: AttentionChoice = "auto",
    ) -> None:
        self.config, self.cache = config, cache
        self.policy = make_policy(config)
        self.packed: DraftCache | None = None
        self._needs = needs = self._what_to_keep()
        assert needs.prompt_rows <= MAX_PROMPT_ROWS
        lanes, device = cache.keys[0].shape[0], cache.keys[0].device
        self._prefix = torch.zeros(lanes, dtype=torch.int64, device=device)
        # Lanes none of whose drafts has been verified yet.
        self._undrafted = torch.zeros(lanes, dtype=torch.bool, device=device)
        self._bounds = PageBounds(cache, needs.page_size) if needs.page_size else None
        self._prompted = PromptSelections(self.policy, cache) if needs.prompt_rows else None
        self.paged: PagedAttention | None = None
        if why_not_kernels(model, config, choice) is None:
            self.paged = PagedAttention(model, config, needs, cache)
        elif needs.collection is not None:
            heads = cache.shape.num_kv_heads[0] if needs.collection.scope == "kv_head" else 1
            self._scores = torch.zeros(
                len(cache.shape.full_layers), lanes, heads, cache.capacity, device=device
            )

    def _what_to_keep(self) -> Needs:
        """What is kept for choosing: what the policy declares, nothing without drafts."""
        return self.policy.needs if self.config.num_speculative_tokens else Needs()

    # -- what happened to the lanes -----------------------------------------------------------

    def admitted(self, lanes: slice) -> None:
        """Lanes were given to new requests."""
        self._undrafted[lanes] = True
        if self._bounds is not None:
            self._bounds.forget(lanes.start, [0] * (lanes.stop - lanes.start))

    def moved(self, source: int, target: int) -> None:
        """One lane's request goes on in another."""
        for state in (self._prefix, self._undrafted):
            state[target] = state[source]
        if self.paged is not None:
            self.paged.moved(source, target)
        elif self._needs.collection is not None:
            self._scores[:, target] = self._scores[:, source]
        for kept in (self._bounds, self._prompted):
            if kept is not None:
                kept.move(source, target)

    def verified(self, lanes: slice, prefix: Tensor, num_drafts: int, this: AttentionPass) -> None:
        """A verify pass that `collecting` was asked for has run.

        Args:
            lanes: its lanes.
            prefix: [B] int64, tokens committed before it.
            num_drafts: per lane; 0 in a request's first pass.
            this: the pass.
        """
        self._prefix[lanes] = prefix
        if num_drafts:
            self._undrafted[lanes] = False
        if self._bounds is not None:
            self._bounds.forget(lanes.start, prefix.tolist())
        if this.score is not None and this.score.reduce_rows:
            self._store_scores(this.scores, lanes)

    def accepted(self, lanes: slice, num_accepted: Tensor, this: AttentionPass) -> None:
        """So many drafts [B] of that pass stood: reduce the rows that waited for it."""
        collection = self._needs.collection
        if collection is None or this.score is None or this.score.reduce_rows:
            return
        reduced = {
            layer: _reduce_rows(rows, num_accepted, collection.rows)
            for layer, rows in this.scores.items()
        }
        self._store_scores(reduced, lanes)

    def prefilled(self, lanes: slice, prompts: Sequence[SavedPrefill], this: AttentionPass) -> None:
        """The first pass over new requests has run; choose for policies that choose then."""
        if self._prompted is None:
            return
        for place, saved in enumerate(prompts):
            last = {layer: queries[place] for layer, queries in this.queries.items()}
            self._prompted.choose(lanes.start + place, saved, last)

    def _store_scores(self, scores: dict[int, Tensor], lanes: slice) -> None:
        """Keep reduced scores [B, Hd, N] by layer for the coming selection."""
        for place, layer in enumerate(self.cache.shape.full_layers):
            own = scores[layer]
            self._scores[place, lanes, :, : own.shape[-1]] = own

    # -- what a pass must collect ---------------------------------------------------------------

    def score(self, num_rows: int) -> ScoreSpec | None:
        """Scores to read off a verify pass of so many rows per lane."""
        collection = self._needs.collection
        if collection is None or self.paged is not None:
            return None
        return ScoreSpec(
            rows=tuple(collection.row_indices(num_rows)),
            metric=collection.metric,
            per_kv_head=collection.scope == "kv_head",
            reduce_rows=collection.rows in EARLY_ROWS,
        )

    def num_queries(self, num_rows: int) -> int:
        """Last rows whose queries a verify pass must keep: the prompt's last, for some policies."""
        return int(self._prompted is not None and num_rows == 1)

    # -- what a draft pass reads ----------------------------------------------------------------

    @property
    def selects_by_query(self) -> bool:
        """Whether each draft pass takes `narrow` instead of a packed selection."""
        return self._needs.query

    @property
    def selects_each_step(self) -> bool:
        """Whether a packed selection serves one draft step only."""
        return self._needs.per_draft_step

    def select(
        self, committed: Tensor, drafted: int, before: KVSelection | None
    ) -> KVSelection | None:
        """Ask the policy and pack what it chose, unless it chose the same as before.

        Args:
            committed: [B] int64, tokens committed now.
            drafted: tokens drafted since.
            before: what is packed.

        Returns:
            What is packed now, or None: nothing is, and drafts read everything, or in place.
        """
        if self.paged is not None and self.paged.collects:
            self._choose_in_place(self.paged, self._prefix[: committed.shape[0]])
            return None
        selection = self._choose(committed, drafted)
        if self.paged is not None:
            self.paged.read(selection)
            return None
        if selection is None or (before is not None and _same(selection, before)):
            return selection
        tail = int((committed + self.config.num_speculative_tokens - selection.tail_starts).max())
        width = selection.positions.shape[-1] + tail
        if self.packed is None or self.packed.width < width:
            self.packed = DraftCache(
                self.cache,
                width=width + PACKED_SLACK,
                max_drafts=self.config.num_speculative_tokens,
                write_through=self.selects_each_step,
            )
        self.packed.gather(selection, committed + drafted)
        self.packed.gather_windows(committed + drafted)
        return selection

    def _choose_in_place(self, paged: PagedAttention, prefix: Tensor) -> None:
        """The policy's rule in one operation, from scores that the kernels collected to slots."""
        paged.select(prefix)

    def _choose(self, committed: Tensor, drafted: int) -> KVSelection | None:
        batch = committed.shape[0]
        must_be_dense = self._undrafted[:batch] if self._needs.dense_first_phase else None
        if must_be_dense is not None and bool(must_be_dense.all()):
            return None
        if self._prompted is not None:
            return self._prompted.of_lanes(batch)
        selection = self.policy.select(
            SelectionInput(
                prefix_lens=self._prefix[:batch],
                committed_lens=committed,
                current_lens=committed + drafted,
                scores=self._scores[:, :batch] if self._needs.collection is not None else None,
            )
        )
        if selection is None or must_be_dense is None:
            return selection
        # Nothing selected and all of it tail: a lane that reads everything beside sparse ones.
        return KVSelection(
            positions=selection.positions.masked_fill(must_be_dense[:, None, None], -1),
            tail_starts=selection.tail_starts.masked_fill(must_be_dense, 0),
        )

    def narrow(self, committed: Tensor, drafted: int, book: Callable[[str], None]) -> Narrow:
        """What makes a draft pass ask the policy at each layer, with the layer's own query.

        Such a pass writes its drafts into the main cache, where later steps may pick them, and
        reads copies of what was picked.

        Args:
            committed: [B] int64, tokens committed now.
            drafted: tokens drafted since.
            book: told `draft` or `select` when such work ends.
        """
        lens, num_pages = committed + drafted, 0
        if self._bounds is not None:
            counts = lens.tolist()
            self._bounds.extend(counts)
            num_pages = max(counts) // self._bounds.page_size
        book("select")

        def narrow(
            layer: int, query: Tensor, key: Tensor, value: Tensor
        ) -> tuple[Tensor, Tensor, Window] | None:
            book("draft")
            selection = self._choose_at_layer(layer, query, committed, lens, num_pages)
            narrowed = None
            if selection is not None:
                # The query's own token is cached already, and part of the tail.
                columns, counts = with_tail(selection.positions, selection.tail_starts, lens + 1)
                narrowed = (*take_columns(key, value, columns), make_window(counts[:, None]))
            book("select")
            return narrowed

        return narrow

    def _choose_at_layer(
        self, layer: int, query: Tensor, committed: Tensor, lens: Tensor, num_pages: int
    ) -> KVSelection | None:
        """Ask a policy that selects by the draft step's query [B, H, 1, D] of one layer."""
        batch, low, high = committed.shape[0], None, None
        if self._bounds is not None:
            low, high = self._bounds.of_layer(layer, batch, num_pages)
        return self.policy.select(
            SelectionInput(
                prefix_lens=self._prefix[:batch],
                committed_lens=committed,
                current_lens=lens,
                page_low=low,
                page_high=high,
                query=query[:, :, 0],
            )
        )


def _same(one: KVSelection, other: KVSelection) -> bool:
    return torch.equal(one.tail_starts, other.tail_starts) and torch.equal(
        one.positions, other.positions
    )


def _reduce_rows(rows: Tensor, num_accepted: Tensor, which: str) -> Tensor:
    """Sum the rows [B, R, Hd, N] that acceptance picked: row a, or rows 0..a."""
    index = torch.arange(rows.shape[1], device=rows.device)
    last = num_accepted[:, None]
    picked = index == last if which == "last_accepted" else index <= last
    return (rows * picked[:, :, None, None]).sum(dim=1)
