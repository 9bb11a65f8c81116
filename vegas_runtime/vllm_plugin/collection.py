"""From the verify pass's attention to the lists that draft steps read.

One `Collector` per worker owns every buffer in between, all sized when it is made, so that each
call can be captured in a CUDA graph and replayed with other lengths:

    bind            once per KV cache: how entries are addressed
    begin_step      once per verify step: lengths, budgets, tails
      verify        per layer: full attention and one score byte per token
      collect       per layer, mixed batches: scores of rows whose attention someone else ran
    end_step        selection, all layers in one go
    begin_draft     once per draft step
      draft         per layer: one row a request over its list and tail

Codes of all layers are kept until `end_step` where they fit in `_CODES_SHARE` of the device's
memory: thirty small selections cost three launches each, one large one costs three in all. Where
they do not fit, each layer selects at once.

`switches.py` says what a running engine may change, and what is refused.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from vegas_runtime.config import Rows, SpeculationConfig
from vegas_runtime.errors import ConfigError
from vegas_runtime.vllm_plugin import paths
from vegas_runtime.vllm_plugin.draft_attention import block_pages
from vegas_runtime.vllm_plugin.draft_lists import make_lists
from vegas_runtime.vllm_plugin.geometry import AttentionShape, Limits
from vegas_runtime.vllm_plugin.switches import Switches
from vegas_runtime.vllm_plugin.triton_select import Selector, Units
from vegas_runtime.vllm_plugin.triton_steps import (
    append_tails,
    draft_lengths,
    step_lengths,
    window_lists,
)
from vegas_runtime.vllm_plugin.verification import EngineCall, Scoring, StepLengths

# Of the device's memory that codes of all layers may take; beyond it each layer selects at once.
_CODES_SHARE: Final = 0.02


class Collector:
    """Scores, selection and draft attention of one worker.

    Args:
        shape: the layers that draft sparsely.
        limits: the largest step.
        config: the method and its switches; ratio and floor are the device controls' business.
        device: where.
        ratio: float64[1] on the device, fraction of entries kept; read by window lists.
        min_tokens: int32[1] on the device, likewise.
        path: how scores are collected: `auto`, or a key of `paths.VERIFY_PATHS`.
        draft_path: how draft steps attend: `auto`, or a key of `paths.DRAFT_PATHS`.

    Attributes:
        path: the collection path taken.
        reason: why that one.
        draft_path: the draft attention taken.
        draft_reason: why that one.
        max_budget: entries a list holds.
        num_bytes: memory held, for the engine's memory profile.

    Raises:
        ConfigError: a method, switch or path that cannot run here.
    """

    def __init__(
        self,
        *,
        shape: AttentionShape,
        limits: Limits,
        config: SpeculationConfig,
        device: torch.device,
        ratio: Tensor,
        min_tokens: Tensor,
        path: str = "auto",
        draft_path: str = "auto",
    ) -> None:
        self._switches = Switches(config, device)
        self._shape, self._limits, self._device = shape, limits, device
        self._ratio, self._min_tokens = ratio, min_tokens
        self._per_head = self.collects and config.scope == "kv_head"
        if self._per_head and shape.sinks:
            raise ConfigError(
                "`scope` is 'kv_head' and the model has attention sinks, which draft attention "
                "cannot combine yet.",
                hint="Use scope 'layer'.",
            )
        self._scoring = Scoring(row_set=self._switches.row_set, scale=shape.scale)
        self.path, self.reason = paths.choose_verify(
            path,
            shape,
            limits,
            device,
            rows=config.rows,
            is_scored=self.collects,
        )
        self._verify = paths.make_verify(
            self.path, shape, limits, device, scoring=self._scoring, per_head=self._per_head
        )
        self.draft_path, self.draft_reason = paths.choose_draft(draft_path, shape, limits, device)
        self._draft = paths.make_draft(self.draft_path, shape, limits, device)
        self.max_budget = limits.capacity
        self._units: Units | None = None
        self._block_pages = 0
        self._allocate()

    def _allocate(self) -> None:
        """Make every buffer."""
        shape, limits = self._shape, self._limits
        B, heads = limits.max_batch, shape.num_kv_heads if self._per_head else 1
        ints: dict[str, Any] = {"dtype": torch.int32, "device": self._device}
        rows, candidates, counts, tail_start, row_mask = torch.zeros((5, B), **ints)
        self._lengths = StepLengths(
            rows=rows,
            candidates=candidates,
            counts=counts,
            tail_start=tail_start,
            row_mask=row_mask,
        )
        self._lists = make_lists(
            self._switches.list_source,
            limits,
            self._device,
            num_layers=shape.num_layers,
            heads=heads,
            with_tail=self._draft.with_tail,
            counts=counts,
            tail_start=tail_start,
        )
        self._codes: Tensor | None = None
        self._selector: Selector | None = None
        if not self.collects:
            return
        layers = shape.num_layers
        if layers * B * heads * limits.padded_len > _CODES_SHARE * _device_bytes(self._device):
            layers = 1
        size = (layers, B, heads, limits.padded_len)
        self._codes = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._selector = Selector(
            rows=layers * B * heads, max_len=limits.max_len, device=self._device
        )

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        held = self._lists.num_bytes + 5 * self._lengths.rows.nbytes
        held += 0 if self._codes is None else self._codes.nbytes
        held += 0 if self._selector is None else self._selector.num_bytes
        return held + self._verify.num_bytes + self._draft.num_bytes

    @property
    def collects(self) -> bool:
        """Whether verify steps can be scored at all."""
        return self._switches.is_scored

    @property
    def algorithm(self) -> str:
        """The method in force, read from the device."""
        return self._switches.algorithm

    @property
    def rows(self) -> Rows:
        """The row set in force, read from the device."""
        return self._switches.rows

    def set_algorithm(self, algorithm: str) -> None:
        """Draft with another method from the next step on.

        Raises:
            ConfigError: this collector was not made for it.
        """
        self._switches.set_algorithm(algorithm)

    def set_rows(self, rows: Rows) -> None:
        """Sum other rows of the verify block from the next step on.

        Raises:
            ConfigError: a row set that is known only after acceptance, or that this path lacks.
        """
        self._switches.set_rows(rows, path=self.path)

    def check_budget(self, sparsity_ratio: float, min_tokens: int) -> None:
        """Refuse a setting whose lists would not fit.

        Raises:
            ConfigError: more entries than the buffers hold.
        """
        asked = Limits(
            max_batch=1,
            max_len=self._limits.max_len,
            max_rows=self._limits.max_rows,
            max_ratio=sparsity_ratio,
            min_tokens=min_tokens,
        ).capacity
        if asked > self.max_budget:
            raise ConfigError(
                f"Ratio {sparsity_ratio:g} with a floor of {min_tokens} keeps up to {asked} "
                f"entries of a context of {self._limits.max_len}; the lists made at start hold "
                f"{self.max_budget}.",
                hint="Start with a larger `sparse_attn_max_ratio`.",
            )

    def bind(self, k: Tensor) -> None:
        """Learn how a cache's entries are addressed; only its strides are kept.

        Args:
            k: [blocks, block size, Hkv, D] view of any layer's K.

        Raises:
            ConfigError: the draft attention cannot read this layout.
        """
        self._units = self._draft.units(k, per_head=self._per_head)
        self._block_pages = block_pages(k) if self._lists.pages is not None else 0

    def begin_step(
        self,
        *,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start: Tensor,
        budgets: Tensor,
        rows: Tensor | None = None,
        request_ids: Tensor | None = None,
    ) -> None:
        """Prepare a verify step, before its first layer.

        Args:
            block_table: [B, blocks] int32.
            seq_lens: [B] int32 tokens cached, the step's included; 0 for padding.
            query_start: [B + 1] int32; empty ranges are padding.
            budgets: [B] int32 entries to keep; cut to what is there and to `max_budget`.
            rows: [B] int32 rows of each verify block, at the end of the request's range: drafts
                + 1, or 1 for a prompt's last chunk. None: every row of the range.
            request_ids: [B] persistent request states, -1 for padding; the fused path needs
                them.
        """
        B = seq_lens.shape[0]
        lengths = self._lengths.part(0, B)
        step_lengths(
            seq_lens=seq_lens,
            query_start=query_start,
            given_rows=rows,
            budgets=budgets,
            algorithm=self._switches.algorithm_flag,
            row_set=self._switches.row_set,
            capacity=self.max_budget,
            rows=lengths.rows,
            candidates=lengths.candidates,
            counts=lengths.counts,
            tail_start=lengths.tail_start,
            row_mask=lengths.row_mask,
        )
        self._verify.begin_step(seq_lens=seq_lens, query_start=query_start, request_ids=request_ids)
        if self.collects and self._draft.with_tail:
            append_tails(
                counts=lengths.counts,
                tail_start=lengths.tail_start,
                block_table=block_table,
                block_size=self._shape.block_size,
                units=self.units,
                length=self._limits.tail,
                lists=self._lists.entries[:, :B],
            )

    def verify(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start: Tensor,
        max_queries: int,
        out: Tensor,
        max_len: int,
        scheduler_metadata: Tensor | None = None,
        num_splits: int = 0,
        sinks: Tensor | None = None,
    ) -> None:
        """Full attention of the step's first requests, scored.

        Args:
            layer: index among the layers that draft sparsely.
            q: [T, H, D].
            k: [blocks, block size, Hkv, D] view of the layer's K.
            v: likewise, same strides.
            block_table: [B', blocks] int32.
            seq_lens: [B'] int32; the first B' requests of `begin_step`.
            query_start: [B' + 1] int32.
            max_queries: most rows of a request.
            out: [T, H, D], written.
            max_len: longest context, for the engine's own kernel.
            scheduler_metadata: the engine's work split, or None.
            num_splits: likewise.
            sinks: [H] logits of the denominator, or None.
        """
        B = seq_lens.shape[0]
        self._verify.verify(
            layer,
            q,
            k,
            v,
            lengths=self._lengths.part(0, B),
            block_table=block_table,
            seq_lens=seq_lens,
            query_start=query_start,
            max_queries=max_queries,
            out=out,
            codes=self._layer_codes(layer, 0, B),
            sinks=sinks,
            call=EngineCall(
                max_len=max_len, scheduler_metadata=scheduler_metadata, num_splits=num_splits
            ),
        )
        self._select_at_once(layer, block_table, first=0)

    def collect(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        lse: Tensor,
        *,
        block_table: Tensor,
        query_start: Tensor,
        first: int,
    ) -> None:
        """Score requests whose full attention ran elsewhere.

        Args:
            layer: as in `verify`.
            q: [T, H, D].
            k: as in `verify`.
            lse: [H, T] float32 natural-log normalisers, as FlashAttention returns them.
            block_table: [B', blocks] int32 of these requests.
            query_start: [B' + 1] int32 rows of these requests in q.
            first: index of the first of them in `begin_step`.
        """
        B = block_table.shape[0]
        codes = self._layer_codes(layer, first, B)
        if codes is None or B == 0:
            return
        self._verify.remember(layer, lse.T, query_start, first=first)
        self._scoring(
            q,
            k,
            lse.T,
            lengths=self._lengths.part(first, B),
            block_table=block_table,
            query_start=query_start,
            codes=codes,
        )
        self._select_at_once(layer, block_table, first=first)

    def end_step(self, *, block_table: Tensor) -> None:
        """Select for every layer, after the last one.

        Args:
            block_table: [B, blocks] int32, all requests of `begin_step`.
        """
        if self._codes is not None and self._codes.shape[0] == self._shape.num_layers:
            self._select(slice(None), block_table, first=0)

    def begin_draft(
        self, *, block_table: Tensor, seq_lens: Tensor, request_ids: Tensor | None = None
    ) -> None:
        """Prepare a draft step, before its first layer.

        Args:
            block_table: [B, blocks] int32.
            seq_lens: [B] int32 tokens cached, the draft step's own included; 0 for padding.
            request_ids: as in `begin_step`.
        """
        B = seq_lens.shape[0]
        lists = self._lists.first(B)
        if lists.pages is not None:
            window_lists(
                seq_lens=seq_lens,
                ratio=self._ratio,
                min_tokens=self._min_tokens,
                dense=self._switches.list_source == "everything",
                block_table=block_table,
                block_size=self._shape.block_size,
                block_pages=self._block_pages,
                slots=lists.entries[0],
                counts=lists.counts,
                tail_start=lists.tail_start,
                pages=lists.pages,
                used=lists.used,
            )
        else:
            draft_lengths(
                seq_lens=seq_lens,
                algorithm=self._switches.algorithm_flag,
                ratio=self._ratio,
                min_tokens=self._min_tokens,
                block_table=block_table,
                block_size=self._shape.block_size,
                units=self.units,
                with_tail=self._draft.with_tail,
                lists=lists.entries,
                counts=lists.counts,
                tail_start=lists.tail_start,
                used=lists.used,
            )
        self._draft.begin(lists, seq_lens)

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
            layer: as in `verify`.
            q: [B, H, D], one row a request.
            k: as in `verify`.
            v: likewise.
            block_table: [B, blocks] int32.
            seq_lens: [B] int32, as in `begin_draft`.
            out: [B, H, D], written; undefined for padding.
            sinks: [H] or None.
        """
        B = seq_lens.shape[0]
        lists = self._lists.first(B)
        self._draft.attend(
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
        lists = self._lists.first(batch)
        return lists.of_layer(layer), lists.counts

    def codes(self, layer: int, batch: int) -> Tensor | None:
        """Score codes [batch, 1 or Hkv, n] of a layer, or of the last one where one is kept."""
        return self._layer_codes(layer, 0, batch)

    @property
    def units(self) -> Units:
        """How list entries are addressed in the bound cache."""
        assert self._units is not None, "bind() comes before the first step"
        return self._units

    def _layer_codes(self, layer: int, first: int, batch: int) -> Tensor | None:
        if self._codes is None:
            return None
        kept = self._codes[layer if self._codes.shape[0] > 1 else 0]
        return kept[first : first + batch]

    def _select_at_once(self, layer: int, block_table: Tensor, *, first: int) -> None:
        """Select for one layer where codes of several are not kept."""
        if self._codes is not None and self._codes.shape[0] < self._shape.num_layers:
            self._select(slice(layer, layer + 1), block_table, first=first)

    def _select(self, layers: slice, block_table: Tensor, *, first: int) -> None:
        assert self._codes is not None
        assert self._selector is not None
        B = block_table.shape[0]
        lengths = self._lengths.part(first, B)
        self._selector.select(
            self._codes[:, first : first + B],
            candidates=lengths.candidates,
            counts=lengths.counts,
            block_table=block_table,
            block_size=self._shape.block_size,
            units=self.units,
            lists=self._lists.entries[layers, first : first + B],
        )


def _device_bytes(device: torch.device) -> float:
    """Memory of a GPU; elsewhere no limit."""
    if device.type != "cuda":
        return float("inf")
    return float(torch.cuda.get_device_properties(device).total_memory)
