"""Attention through the kernels' operations, over the engine's own cache where it lies.

To `kernels.ops` a lane of the `KVCache` is one block of a paged cache, so nothing is packed or
copied: a verify pass collects scores as it attends, `select` turns them into slot lists for all
layers at once, and draft steps read these slots and the tail in place.

    exact    scores of the first and last row, each with its true normaliser: what the reference
             path computes, up to the rounding of one-byte codes. Used for the rows `two`.
    hint     scores of any rows, weighed while the pass runs against a normaliser from the draft
             steps before it. Used for the other rows: `benchmarks/bench_hint.py` measures the loss.

A request's first pass has no draft steps before it. It has one row, and runs twice: the first run
yields the normaliser of the second. Drafting comes right before verifying, always, so normalisers
are never older than one iteration, and roll-back or a request's move leaves none behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.engine.attention import LayerAttention
from vegas_runtime.engine.collected import CollectedScores
from vegas_runtime.engine.kv_cache import KVCache
from vegas_runtime.engine.model import DecoderModel
from vegas_runtime.errors import BackendError
from vegas_runtime.kernels import ops
from vegas_runtime.kernels.arguments import MAX_COLLECTED_ROWS, MAX_QUERIES
from vegas_runtime.policies import KVSelection, Needs, make_policy
from vegas_runtime.policies.base import EARLY_ROWS
from vegas_runtime.policies.vegas import VegasPolicy

AttentionChoice = Literal["auto", "kernels", "reference"]


def why_not_kernels(
    model: DecoderModel, config: SpeculationConfig, choice: AttentionChoice = "auto"
) -> str | None:
    """Why a decoder takes the reference path; None when it takes the kernels.

    Args:
        model: what runs.
        config: how it drafts.
        choice: `auto` takes the kernels where they run on the device and lose no precision;
            `kernels` takes the operations anywhere, on a CPU too (slow: for tests).

    Raises:
        BackendError: the kernels were asked for, and the model or setting needs more than they do.
    """
    if choice == "reference":
        return "the reference path was asked for"
    reason = _why_unsupported(model, config)
    if choice == "kernels":
        if reason is not None:
            raise BackendError(f"the kernels were asked for, but {reason}.")
        return None
    dtype, shape = model.model.dtype, model.shape
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{str(dtype).removeprefix('torch.')} keeps the exact reference path"
    group = model.num_heads // shape.num_kv_heads[0]
    query = torch.empty(0, model.num_heads, shape.head_dims[0], dtype=dtype, device=model.device)
    return ops.why_not_cuda(query, group=group) or reason


def _why_unsupported(model: DecoderModel, config: SpeculationConfig) -> str | None:
    """What of a model or setting no operation does, whatever the device."""
    shape, num_rows = model.shape, config.num_speculative_tokens + 1
    needs = make_policy(config).needs
    collection = needs.collection
    if model.has_softcap:
        return "the model caps its attention logits"
    if len({*shape.num_kv_heads}) > 1 or len({*shape.head_dims}) > 1:
        return "the model's layers differ in KV heads or head size"
    if num_rows > MAX_QUERIES:
        return f"{num_rows} rows are verified at once; the kernels take {MAX_QUERIES}"
    if needs.query:
        return f"`{config.algorithm}` selects anew at each layer of a draft step"
    if collection is None:
        return None
    if config.granularity != "token":
        return f"granularity `{config.granularity}` is selected on the reference path only"
    if collection.metric != "weight":
        return f"scores of metric `{collection.metric}` are read off the reference path only"
    if collection.rows not in EARLY_ROWS:
        return f"rows `{collection.rows}` are known only once drafts are accepted"
    if config.algorithm != VegasPolicy.name:
        return f"`{config.algorithm}` has a rule of its own; the kernels know Vegas's"
    collected = num_rows * (model.num_heads // shape.num_kv_heads[0])
    if collection.rows != "two" and collected > MAX_COLLECTED_ROWS:
        return (
            f"rows `{collection.rows}` of {num_rows} make {collected} rows per KV head; "
            f"the kernels collect {MAX_COLLECTED_ROWS}"
        )
    return None


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The rows of one forward pass: equally many for each of some lanes.

    Attributes:
        lanes: which lanes.
        num: rows per lane.
        lens: [B] int32, tokens cached, the rows' own included.
        starts: [B + 1] int32, first row of each lane.
        prefixes: schedules of `ops.build_schedule` by window, made when first asked for.
    """

    lanes: slice
    num: int
    lens: Tensor
    starts: Tensor
    prefixes: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, lanes: slice, lens: Tensor, num: int) -> Self:
        """Rows of lanes that hold `lens` [B] tokens."""
        ends = torch.arange(lens.shape[0] + 1, dtype=torch.int32, device=lens.device)
        return cls(lanes=lanes, num=num, lens=lens.int(), starts=ends * num)

    def prefix(self, window: int) -> Tensor:
        """The work of layers with this window, 0 for none."""
        if window not in self.prefixes:
            self.prefixes[window] = torch.empty_like(self.starts)
            ops.build_schedule(
                self.lens, self.prefixes[window], query_start=self.starts, window=window
            )
        return self.prefixes[window]


@dataclass(frozen=True, kw_only=True)
class _SlotLists:
    """What draft steps read.

    Attributes:
        slots: [layers, B, 1 or Hkv, capacity] int32.
        counts: [B] int32, entries used of each list.
        tail_starts: [B] int32, from here on every token is read.
    """

    slots: Tensor
    counts: Tensor
    tail_starts: Tensor


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """One layer's call: rows [B * S, H, D] and where their results go."""

    index: int
    query: Tensor
    scale: float
    sinks: Tensor | None
    out: Tensor
    lse: Tensor

    @classmethod
    def of(cls, index: int, query: Tensor, scale: float, sinks: Tensor | None) -> Self:
        """A call with queries [B, H, S, D] as the model has them."""
        rows = query.transpose(1, 2).flatten(0, 1)
        return cls(
            index=index,
            query=rows,
            scale=scale,
            sinks=None if sinks is None else sinks.float(),
            out=torch.empty(rows.shape, dtype=rows.dtype, device=rows.device),
            lse=torch.empty(rows.shape[:2], dtype=torch.float32, device=rows.device),
        )

    def output(self, num_rows: int) -> Tensor:
        """The result as [B, S, H, D]."""
        return self.out.view(-1, num_rows, *self.out.shape[1:])


class PagedAttention:
    """Attends, collects and selects for every lane of a cache through `kernels.ops`.

    Args:
        model: what runs.
        config: how it drafts.
        needs: what the policy in force asks for.
        cache: holds the lanes.
    """

    def __init__(
        self, model: DecoderModel, config: SpeculationConfig, needs: Needs, cache: KVCache
    ) -> None:
        self._config, self._windows = config, model.shape.sliding_windows
        self._keys = [key.transpose(1, 2) for key in cache.keys]
        self._values = [value.transpose(1, 2) for value in cache.values]
        lanes, self._lane_size, num_kv_heads, head_dim = self._keys[0].shape
        self._blocks = torch.arange(lanes, dtype=torch.int32, device=model.device)[:, None]
        self._workspace = ops.make_workspace(
            model.device,
            batch=lanes,
            num_heads=model.num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        self._place = {layer: place for place, layer in enumerate(model.shape.full_layers)}
        self._reads: _SlotLists | None = None
        self._scores: CollectedScores | None = None
        if needs.collection is not None:
            self._scores = CollectedScores(
                needs.collection,
                config,
                num_layers=len(self._place),
                num_lanes=lanes,
                num_heads=model.num_heads,
                num_kv_heads=num_kv_heads,
                lane_size=self._lane_size,
                device=model.device,
            )

    def verify(self, lanes: slice, committed: Tensor, num_rows: int) -> LayerAttention:
        """What the layers of a verify pass call; it collects what the policy asked for.

        Args:
            lanes: the pass's lanes.
            committed: [B] int64, tokens committed before it.
            num_rows: rows per lane.
        """
        rows, scores = _Rows.of(lanes, committed + num_rows, num_rows), self._scores
        if scores is not None:
            scores.begin(lanes, num_rows)

        def attend(index: int, query: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
            layer, place = _Layer.of(index, query, scale, sinks), self._place.get(index)
            if scores is None or place is None:
                self._attend(layer, rows)
            else:
                if num_rows == 1:
                    # No draft step came before: this run's normaliser serves the next.
                    self._attend(layer, rows)
                    scores.learn(place, lanes, layer.lse, step=0)
                self._attend(layer, rows, *scores.target(place, lanes, num_rows))
                scores.normalise(place, lanes, layer.lse)
            return layer.output(num_rows)

        return attend

    def moved(self, source: int, target: int) -> None:
        """One lane's request goes on in another."""
        if self._scores is not None:
            self._scores.move(source, target)

    @property
    def collects(self) -> bool:
        """Whether it selects by scores of its own; otherwise a policy is asked."""
        return self._scores is not None

    def select(self, prefix: Tensor) -> None:
        """Turn the collected scores into what the coming draft steps read.

        Args:
            prefix: [B] int64, tokens committed before the verify pass that was scored.
        """
        assert self._scores is not None
        candidates = (prefix + 1).int()
        slots, counts = self._scores.select(candidates, self._blocks, self._lane_size)
        self._reads = _SlotLists(slots=slots, counts=counts, tail_starts=candidates)

    def chosen(self) -> KVSelection | None:
        """What draft steps read now, as positions; None for everything."""
        if self._reads is None:
            return None
        slots, counts = self._reads.slots, self._reads.counts[:, None, None]
        used = torch.arange(slots.shape[-1], device=slots.device) < counts
        return KVSelection(
            positions=torch.where(used, slots % self._lane_size, -1).long(),
            tail_starts=self._reads.tail_starts.long(),
        )

    def read(self, selection: KVSelection | None) -> None:
        """Let the coming draft steps read what a policy chose by itself; None for everything."""
        if selection is None:
            self._reads = None
            return
        positions = selection.positions
        if positions.dim() == 3:
            positions = positions.expand(len(self._place), *positions.shape)
        per_list = (positions >= 0).sum(-1)
        counts = per_list.amax(dim=(0, 2))
        assert bool((per_list == counts[:, None]).all()), "layers and heads differ in budget"
        lane_starts = self._blocks[: positions.shape[1], :, None] * self._lane_size
        self._reads = _SlotLists(
            slots=(positions + lane_starts).int(),
            counts=counts.int(),
            tail_starts=selection.tail_starts.int(),
        )

    def draft(self, positions: Tensor, step: int) -> LayerAttention:
        """What the layers of one draft step call.

        Args:
            positions: [B, 1] int64, where the lanes' newest tokens stand.
            step: which draft step since the last verify pass, from 0.
        """
        lanes, reads = slice(0, positions.shape[0]), self._reads
        rows = _Rows.of(lanes, positions[:, 0] + 1, 1)
        prefix = torch.empty_like(rows.starts)
        if reads is not None:
            ops.build_schedule(rows.lens, prefix, counts=reads.counts, tail_start=reads.tail_starts)

        def attend(index: int, query: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
            layer, place = _Layer.of(index, query, scale, sinks), self._place.get(index)
            if reads is None or place is None:
                self._attend(layer, rows)
            else:
                self._attend_sparsely(layer, rows, reads, reads.slots[place], prefix)
            if self._scores is not None and place is not None:
                self._scores.learn(place, lanes, layer.lse, step=step)
            return layer.output(1)

        return attend

    def _attend(
        self,
        layer: _Layer,
        rows: _Rows,
        score: Tensor | None = None,
        hint: Tensor | None = None,
        collected: Tensor | None = None,
    ) -> None:
        """Full attention or a sliding window's; what to collect is `CollectedScores.target`."""
        window = self._windows[layer.index] or 0
        ops.verify_attention(
            layer.query,
            self._keys[layer.index],
            self._values[layer.index],
            block_table=self._blocks[rows.lanes],
            seq_lens=rows.lens,
            query_start=rows.starts,
            prefix=rows.prefix(window),
            max_queries=rows.num,
            scale=layer.scale,
            out=layer.out,
            lse=layer.lse,
            workspace=self._workspace,
            window=window,
            sinks=layer.sinks,
            score=score,
            hint=hint,
            rows=collected,
        )

    def _attend_sparsely(
        self, layer: _Layer, rows: _Rows, reads: _SlotLists, slots: Tensor, prefix: Tensor
    ) -> None:
        """One row per lane over its slots and tail."""
        ops.sparse_attention(
            layer.query,
            self._keys[layer.index],
            self._values[layer.index],
            slots=slots,
            counts=reads.counts,
            block_table=self._blocks[rows.lanes],
            tail_start=reads.tail_starts,
            seq_lens=rows.lens,
            prefix=prefix,
            scale=layer.scale,
            out=layer.out,
            lse=layer.lse,
            workspace=self._workspace,
            sinks=layer.sinks,
        )
