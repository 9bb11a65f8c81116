"""From the verify pass's attention to the lists that draft steps read.

One `Collector` per worker owns every buffer in between, all sized when it is made, so that each
call can be captured in a CUDA graph and replayed with other lengths:

    bind            once per KV cache: how entries are addressed
    begin_step      once per verify step: lengths, budgets, tails
      verify        per layer: full attention, and one score byte per token or the rows themselves
      collect       per layer, mixed batches: the same of rows whose attention someone else ran
    end_step        selection, all layers in one go
    accepted        once per iteration, behind the accept test: lists that had to wait for it
    begin_draft     once per draft step
      draft         per layer: one row a request over its list and tail

`methods.py` says what a method's lists come from, `switches.py` what a running engine may change,
`collector_parts.py` which paths are taken and what every buffer holds, `drafting.py` what draft
steps do with the lists.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vegas_runtime.config import Granularity, Rows, SpeculationConfig
from vegas_runtime.errors import ConfigError
from vegas_runtime.vllm_plugin.collector_parts import make_parts
from vegas_runtime.vllm_plugin.drafting import Drafting
from vegas_runtime.vllm_plugin.geometry import AttentionShape, Limits
from vegas_runtime.vllm_plugin.late_rows import AcceptedStep
from vegas_runtime.vllm_plugin.listing import Listing
from vegas_runtime.vllm_plugin.prompt_lists import PromptLists
from vegas_runtime.vllm_plugin.switches import Switches
from vegas_runtime.vllm_plugin.triton_steps import step_lengths
from vegas_runtime.vllm_plugin.verification import EngineCall


class Collector(Drafting):
    """Scores, selection and draft attention of one worker.

    Args:
        shape: the layers that draft sparsely.
        limits: the largest step.
        config: the method and its switches; ratio and floor are the device controls' business.
        device: where.
        ratio: float64[1] on the device, fraction of entries kept; read where lengths decide.
        min_tokens: int32[1] on the device, likewise.
        path: how scores are collected: `auto`, or a key of `paths.VERIFY_PATHS`.
        draft_path: how draft steps attend: `auto`, or a key of `paths.DRAFT_PATHS`.
        algorithms: methods that may be switched to, besides the one in `config`.
        rows: row sets that may be switched to; those known before acceptance always may.

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
        algorithms: Sequence[str] = (),
        rows: Sequence[Rows] = (),
    ) -> None:
        switches = Switches(config, device, algorithms=algorithms, rows=rows)
        self._limits = limits
        self._parts = parts = make_parts(
            shape,
            limits,
            switches,
            device=device,
            ratio=ratio,
            min_tokens=min_tokens,
            path=path,
            draft_path=draft_path,
        )
        super().__init__(parts, switches, ratio=ratio, min_tokens=min_tokens)
        self.path, self.reason = parts.path, parts.reason
        self.draft_path, self.draft_reason = parts.draft_path, parts.draft_reason
        self._scoring, self._lengths = parts.scoring, parts.lengths
        self._after = parts.after
        self.max_budget = limits.capacity
        self._given_rows: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        return self._parts.num_bytes

    @property
    def collects(self) -> bool:
        """Whether verify steps are ever scored, or their rows kept."""
        return self._switches.collects

    @property
    def algorithm(self) -> str:
        """The method in force, read from the device."""
        return self._switches.algorithm

    @property
    def rows(self) -> Rows:
        """The row set in force, read from the device."""
        return self._switches.rows

    @property
    def granularity(self) -> Granularity:
        """What competes for the budget, read from the device."""
        return self._switches.granularity

    @property
    def slowed_by(self) -> dict[str, str]:
        """What slows which of the methods that can be chosen; those at full speed are left out."""
        return self._switches.slowed_by

    @property
    def waits(self) -> bool:
        """Whether the method in force makes its lists behind the accept test."""
        return self._switches.source in ("accepted", "prompt")

    @property
    def reads_prompts(self) -> bool:
        """Whether the method in force chooses by the last rows of prompts."""
        return self._switches.source == "prompt"

    @property
    def prompt_lists(self) -> PromptLists:
        """What such a method holds of every request."""
        return self._after.prompt_lists

    def set_algorithm(self, algorithm: str) -> None:
        """Draft with another method from the next step on.

        Raises:
            ConfigError: this collector was not made for it.
        """
        is_new = algorithm != self._switches.held
        self._switches.set_algorithm(algorithm)
        self.use_lists(self._switches.kind)
        if is_new:
            self.forget()

    def set_rows(self, rows: Rows) -> None:
        """Sum other rows of the verify block from the next step on.

        Raises:
            ConfigError: a row set that this collector keeps no room for, or that its path lacks.
        """
        self._switches.set_rows(rows, path=self.path)

    def set_granularity(self, granularity: Granularity) -> None:
        """Let single tokens or whole pages compete from the next step on."""
        self._switches.set_granularity(granularity)

    def forget(self) -> None:
        """The setting has changed: nothing that was chosen for a request's life holds any more."""
        self._after.forget()

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
        """Learn how a cache's entries are addressed; only its strides and size are kept.

        Args:
            k: [blocks, block size, Hkv, D] view of any layer's K.

        Raises:
            ConfigError: the draft attention cannot read this layout.
        """
        for listing in self._listings.values():
            listing.bind(k)
        if self.pages is not None:
            self.pages.bind(k)

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
            algorithm=self._switches.unscored,
            row_set=self._switches.row_set,
            in_pages=self._switches.in_pages,
            capacity=self.max_budget,
            rows=lengths.rows,
            candidates=lengths.candidates,
            counts=lengths.counts,
            tail_start=lengths.tail_start,
            row_mask=lengths.row_mask,
        )
        self._given_rows = rows
        self._verify.begin_step(seq_lens=seq_lens, query_start=query_start, request_ids=request_ids)
        if self._scored is not None:
            self._scored.append_tails(lengths, block_table)

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
        lse = self._verify.verify(
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
        self._after.keep(*(layer, q, lse), query_start=query_start, rows=self._given_rows, first=0)
        self._select_layer(layer, block_table, first=0)

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
        if B == 0:
            return
        self._after.keep(
            *(layer, q, lse.T), query_start=query_start, rows=self._given_rows, first=first
        )
        codes = self._layer_codes(layer, first, B)
        if codes is None:
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
        self._select_layer(layer, block_table, first=first)

    def end_step(self, *, block_table: Tensor) -> None:
        """Select for every layer, after the last one.

        Args:
            block_table: [B, blocks] int32, all requests of `begin_step`.
        """
        if self._scored is not None:
            self._scored.select(self._lengths.part(0, block_table.shape[0]), block_table)

    def accepted(self, step: AcceptedStep) -> None:
        """Make the lists that had to wait for acceptance; nothing for other methods."""
        self._after.make_lists(step)

    def warm_up(self, keys: Sequence[Tensor]) -> None:
        """Compile what `accepted` runs for every method that may be chosen, on an idle request.

        Args:
            keys: [blocks, block size, Hkv, D] view of each layer's K.
        """
        self._after.warm_up(keys)

    @property
    def _scored(self) -> Listing | None:
        """The lists made of scores summed inside verification."""
        return self._listings[self._switches.scores_per_head] if self._switches.is_scored else None

    def _layer_codes(self, layer: int, first: int, batch: int) -> Tensor | None:
        return None if self._scored is None else self._scored.codes(layer, first, batch)

    def _select_layer(self, layer: int, block_table: Tensor, *, first: int) -> None:
        """Select for one layer where codes of several are not kept."""
        if self._scored is not None:
            lengths = self._lengths.part(first, block_table.shape[0])
            self._scored.select_layer(layer, lengths, block_table, first=first)
