"""The half of a collector that draft steps use: which lists they read, and attention over them."""

from __future__ import annotations

from torch import Tensor

from vegas_runtime.vllm_plugin.collector_parts import CollectorParts
from vegas_runtime.vllm_plugin.methods import DraftKind
from vegas_runtime.vllm_plugin.switches import Switches
from vegas_runtime.vllm_plugin.triton_select import Units


class Drafting:
    """Draft steps over the lists in use, and over the tails.

    Args:
        parts: the paths taken, and every buffer.
        switches: the method in force.
        ratio: float64[1] on the device, fraction of entries kept; read where lengths decide.
        min_tokens: int32[1] on the device, likewise.

    Attributes:
        pages: Quest's bounds, None where no method needs them.
    """

    def __init__(
        self, parts: CollectorParts, switches: Switches, *, ratio: Tensor, min_tokens: Tensor
    ) -> None:
        self._attention, self._verify = parts.draft, parts.verify
        self._listings, self.pages = parts.listings, parts.pages
        self._switches, self._ratio, self._min_tokens = switches, ratio, min_tokens
        self.use_lists(switches.kind)

    @property
    def list_shapes(self) -> tuple[DraftKind, ...]:
        """What drafts are captured for: shapes of lists, and whether the query lists pages."""
        return self._switches.kinds

    @property
    def list_shape(self) -> DraftKind:
        """That of the next draft step."""
        return self._kind

    @property
    def units(self) -> Units:
        """How entries of the lists in use are addressed in the bound cache."""
        return self._listing.units

    def use_lists(self, kind: DraftKind) -> None:
        """Let draft steps run as one of `list_shapes`."""
        self._kind, self._listing = kind, self._listings[kind.per_head]

    def begin_draft(
        self, *, block_table: Tensor, seq_lens: Tensor, request_ids: Tensor | None = None
    ) -> None:
        """Prepare a draft step, before its first layer.

        Args:
            block_table: [B, blocks] int32.
            seq_lens: [B] int32 tokens cached, the draft step's own included; 0 for padding.
            request_ids: as in `Collector.begin_step`.
        """
        B = seq_lens.shape[0]
        listing = self._listing
        lists = listing.lists.first(B)
        if self._kind.by_query:
            assert self.pages is not None
            self.pages.begin_draft(seq_lens, lists)
        else:
            listing.begin_draft(
                seq_lens,
                block_table=block_table,
                window=self._switches.window,
                is_dense=self._switches.source == "everything",
                ratio=self._ratio,
                min_tokens=self._min_tokens,
            )
        self._attention.begin(lists, seq_lens)

    def draft(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        block_table: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """A draft step's attention: each request's list and tail.

        Args:
            layer: as in `Collector.verify`.
            q: [B, H, D], one row a request.
            k: as in `Collector.verify`.
            v: likewise.
            block_table: [B, blocks] int32.
            seq_lens: [B] int32, as in `begin_draft`.
            out: [B, H, D], written; undefined for padding.
            sinks: [H] or None.
        """
        B = seq_lens.shape[0]
        lists = self._listing.lists.first(B)
        if self._kind.by_query:
            assert self.pages is not None
            self.pages.select(
                layer,
                q,
                block_table=block_table,
                seq_lens=seq_lens,
                units=self.units,
                with_tail=self._attention.with_tail,
                lists=lists,
            )
        self._attention.attend(
            q,
            k,
            v,
            entries=lists.of_layer(layer),
            lists=lists,
            block_table=block_table,
            seq_lens=seq_lens,
            out=out,
            lse=self._verify.draft_lse(layer, B),
            sinks=sinks,
        )

    def selected(self, layer: int, batch: int) -> tuple[Tensor, Tensor]:
        """Entries [batch, 1 or Hkv, width] of a layer's lists and their counts [batch].

        Entries are units of the draft attention (`Units`); for looking at, not for the hot path.
        """
        lists = self._listing.lists.first(batch)
        return lists.of_layer(layer), lists.counts

    def codes(self, layer: int, batch: int) -> Tensor | None:
        """Score codes [batch, 1 or Hkv, n] of a layer, or of the last one where one is kept."""
        return self._listing.codes(layer, 0, batch)
