"""Lists of one shape, one per layer or one per KV head, and what ranks entries for them.

Methods of either shape may run in one engine. Draft attention is captured for one shape of lists,
so each shape has buffers, addressing and draft graphs of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vegas_runtime.vllm_plugin.draft_attention import DraftPath, block_pages
from vegas_runtime.vllm_plugin.draft_lists import DraftLists, make_lists
from vegas_runtime.vllm_plugin.geometry import AttentionShape, Limits
from vegas_runtime.vllm_plugin.methods import ListSource
from vegas_runtime.vllm_plugin.ranking import Ranking
from vegas_runtime.vllm_plugin.triton_select import Units
from vegas_runtime.vllm_plugin.triton_steps import append_tails, draft_lengths, window_lists
from vegas_runtime.vllm_plugin.verification import StepLengths


class Listing:
    """Lists, the ranking behind them, and how their entries are addressed.

    Args:
        shape: the layers.
        limits: the largest step.
        source: what lists are made from; those made from lengths alone are pages for all layers.
        per_head: one list per KV head.
        is_ranked: whether scores are ever ranked for them.
        in_pages: [1] int32 on the device, not 0 while whole pages compete.
        draft: reads them.
        lengths: of the largest step.
        device: where.

    Attributes:
        per_head: as given.
        lists: the buffers.
        ranking: None where nothing is ranked.
        block_pages: see `draft_attention.block_pages`; 0 unless lists are pages.
    """

    def __init__(
        self,
        shape: AttentionShape,
        limits: Limits,
        *,
        source: ListSource,
        per_head: bool,
        is_ranked: bool,
        in_pages: Tensor,
        draft: DraftPath,
        lengths: StepLengths,
        device: torch.device,
    ) -> None:
        self.per_head = per_head
        self._block_size, self._tail = shape.block_size, limits.tail
        heads = shape.num_kv_heads if per_head else 1
        self._draft = draft
        self.lists: DraftLists = make_lists(
            source,
            limits,
            device,
            num_layers=shape.num_layers,
            heads=heads,
            with_tail=draft.with_tail,
            counts=lengths.counts,
            tail_start=lengths.tail_start,
        )
        self.ranking: Ranking | None = None
        if is_ranked:
            self.ranking = Ranking(shape, limits, heads=heads, in_pages=in_pages, device=device)
        self.block_pages = 0
        self._units: Units | None = None

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self.lists.num_bytes + (0 if self.ranking is None else self.ranking.num_bytes)

    @property
    def units(self) -> Units:
        """How list entries are addressed in the bound cache."""
        assert self._units is not None, "bind() comes before the first step"
        return self._units

    def bind(self, k: Tensor) -> None:
        """Learn how a cache's entries are addressed; see `Collector.bind`."""
        self._units = self._draft.units(k, per_head=self.per_head)
        self.block_pages = block_pages(k) if self.lists.pages is not None else 0

    def begin_draft(
        self,
        seq_lens: Tensor,
        *,
        block_table: Tensor,
        window: Tensor,
        is_dense: bool,
        ratio: Tensor,
        min_tokens: Tensor,
    ) -> None:
        """Say what each request's next draft step reads of its lists, or list its window.

        Args:
            seq_lens: [B] int32 tokens cached, the draft step's own included; 0 for padding.
            block_table: [B, blocks] int32.
            window: [1] int32, 0 while selected lists are read.
            is_dense: nothing is left out.
            ratio: float64[1], fraction of entries kept (window only).
            min_tokens: int32[1] (window only).
        """
        lists = self.lists.first(seq_lens.shape[0])
        if lists.pages is not None:
            window_lists(
                seq_lens=seq_lens,
                ratio=ratio,
                min_tokens=min_tokens,
                dense=is_dense,
                block_table=block_table,
                block_size=self._block_size,
                block_pages=self.block_pages,
                slots=lists.entries[0],
                counts=lists.counts,
                tail_start=lists.tail_start,
                pages=lists.pages,
                used=lists.used,
            )
        else:
            draft_lengths(
                seq_lens=seq_lens,
                algorithm=window,
                ratio=ratio,
                min_tokens=min_tokens,
                block_table=block_table,
                block_size=self._block_size,
                units=self.units,
                with_tail=self._draft.with_tail,
                lists=lists.entries,
                counts=lists.counts,
                tail_start=lists.tail_start,
                used=lists.used,
            )

    def codes(self, layer: int, first: int, batch: int) -> Tensor | None:
        """Score codes [batch, 1 or Hkv, n] of a layer, or of the last one where one is kept."""
        return None if self.ranking is None else self.ranking.of_layer(layer, first, batch)

    def select_layer(
        self, layer: int, lengths: StepLengths, block_table: Tensor, *, first: int
    ) -> None:
        """Make a layer's lists, where codes of several are not kept.

        Args:
            layer: the layer scored last.
            lengths: of these requests.
            block_table: [B, blocks] int32 of these requests.
            first: index of the first of them in the step.
        """
        assert self.ranking is not None
        self.ranking.after_layer(
            layer,
            lengths=lengths,
            block_table=block_table,
            units=self.units,
            lists=self.lists.entries,
            first=first,
        )

    def select(self, lengths: StepLengths, block_table: Tensor) -> None:
        """Make every layer's lists, unless each was made behind its layer; as `select_layer`."""
        assert self.ranking is not None
        self.ranking.after_all(
            lengths=lengths,
            block_table=block_table,
            units=self.units,
            lists=self.lists.entries,
        )

    def append_tails(self, lengths: StepLengths, block_table: Tensor) -> None:
        """Write tails behind the lists, for draft attention that reads both as one."""
        if self._draft.with_tail:
            append_tails(
                counts=lengths.counts,
                tail_start=lengths.tail_start,
                block_table=block_table,
                block_size=self._block_size,
                units=self.units,
                length=self._tail,
                lists=self.lists.entries[:, : lengths.counts.shape[0]],
            )
