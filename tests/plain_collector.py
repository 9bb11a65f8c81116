"""The collector's contract in plain PyTorch, request by request: what a worker's steps must do."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.vllm_plugin.methods import DraftKind


class PlainCollector:
    """Selects with `torch.topk` semantics, lowest position first, and attends over a gather."""

    path = draft_path = "plain"
    reason = draft_reason = "tests"
    num_bytes = 0
    collects = True
    pages = None
    list_shape = DraftKind(per_head=False, by_query=False)
    list_shapes = (list_shape,)
    reads_prompts = False
    waits = True
    slowed_by: ClassVar[dict[str, str]] = {}

    def __init__(self, *, shape: Any, limits: Any, config: SpeculationConfig, **_: Any) -> None:
        self.shape, self.limits = shape, limits
        self.algorithm, self.rows = config.algorithm, config.rows
        self.granularity = config.granularity
        self.steps = self.draft_steps = 0
        self.kept: list[float] = []

    def set_algorithm(self, algorithm: str) -> None:
        self.algorithm = algorithm

    def set_rows(self, rows: str) -> None:
        self.rows = rows

    def set_granularity(self, granularity: str) -> None:
        assert granularity == "token", "tokens alone are ranked here"

    def forget(self) -> None:
        pass

    def check_budget(self, sparsity_ratio: float, min_tokens: int) -> None:
        pass

    def bind(self, k: Tensor) -> None:
        wanted = (self.shape.block_size, self.shape.num_kv_heads, self.shape.head_dim)
        assert k.shape[1:] == wanted, (k.shape, wanted)

    def begin_step(
        self,
        *,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start: Tensor,
        budgets: Tensor,
        rows: Tensor,
        request_ids: Tensor,
    ) -> None:
        self.steps += 1
        batch = seq_lens.shape[0]
        assert rows.shape == request_ids.shape == budgets.shape == (batch,)
        assert query_start.shape == (batch + 1,)
        assert block_table.shape[0] == batch
        self.step_rows = rows.tolist()
        self.lengths, self.budgets = seq_lens.tolist(), budgets.tolist()
        self.lists: list[list[Tensor]] = [[] for _ in range(self.shape.num_layers)]
        for length, count, budget in zip(self.lengths, self.step_rows, self.budgets, strict=True):
            assert 0 < budget <= length - count + 1

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
        **_: Any,
    ) -> None:
        starts = query_start.tolist()
        for request, length in enumerate(seq_lens.tolist()):
            rows = slice(starts[request], starts[request + 1])
            assert 1 <= rows.stop - rows.start <= max_queries <= self.limits.max_rows
            keys, values = (gather(c, block_table[request], range(length)) for c in (k, v))
            weights = self._weights(q[rows], keys)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, self._spread(values)).to(out.dtype)
            self._keep(layer, request, weights)

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
        starts = query_start.tolist()
        assert lse.shape == (self.shape.num_heads, q.shape[0])
        for index in range(block_table.shape[0]):
            length = self.lengths[first + index]
            keys = gather(k, block_table[index], range(length))
            weights = self._weights(q[starts[index] : starts[index + 1]], keys)
            self._keep(layer, first + index, weights)

    def end_step(self, *, block_table: Tensor) -> None:
        assert all(len(lists) == len(self.lengths) for lists in self.lists)

    def accepted(self, step: Any) -> None:
        assert len(step.keys) == self.shape.num_layers
        assert step.rows.tolist() == self.step_rows[: step.batch]
        assert step.seq_lens.tolist() == self.lengths[: step.batch]
        assert min(step.request_ids.tolist()) >= 0
        drafted = zip(step.rows.tolist(), step.is_prompt.tolist(), strict=True)
        assert all(rows == 1 or not is_prompt for rows, is_prompt in drafted)
        emitted = zip(step.num_sampled.tolist(), self.step_rows, strict=True)
        assert all(0 <= count <= rows for count, rows in emitted)

    def begin_draft(self, *, block_table: Tensor, seq_lens: Tensor, request_ids: Tensor) -> None:
        self.draft_steps += 1

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
        sinks: Any = None,
    ) -> None:
        for request, length in enumerate(seq_lens.tolist()):
            if length == 0:
                out[request] = float("nan")
                continue
            chosen = self.lists[layer][request]
            candidates = self.lengths[request] - self.step_rows[request] + 1
            positions = sorted({*chosen.tolist(), *range(candidates, length)})
            self.kept.append(len(positions) / length)
            keys, values = (gather(c, block_table[request], positions) for c in (k, v))
            weights = self._softmax(q[request : request + 1], keys)
            mixed = torch.einsum("hqk,khd->qhd", weights, self._spread(values))
            out[request] = mixed[0].to(out.dtype)

    def _keep(self, layer: int, request: int, weights: Tensor) -> None:
        count = self.step_rows[request]
        candidates = self.lengths[request] - count + 1
        block = weights[:, -count:]
        score = (block[:, 0] + block[:, -1]).sum(0)[:candidates]
        if self.algorithm == "streaming_llm":
            score = torch.arange(candidates, dtype=torch.float32)
            score[:16] += candidates
        best = score.sort(descending=True, stable=True).indices[: self.budgets[request]]
        assert len(self.lists[layer]) == request
        self.lists[layer].append(best)

    def _spread(self, heads: Tensor) -> Tensor:
        group = self.shape.num_heads // self.shape.num_kv_heads
        return heads.float().repeat_interleave(group, 1)

    def _logits(self, q: Tensor, keys: Tensor) -> Tensor:
        return torch.einsum("qhd,khd->hqk", q.float(), self._spread(keys)) * self.shape.scale

    def _softmax(self, q: Tensor, keys: Tensor) -> Tensor:
        return self._logits(q, keys).softmax(-1)

    def _weights(self, q: Tensor, keys: Tensor) -> Tensor:
        logits = self._logits(q, keys)
        last = torch.arange(keys.shape[0] - q.shape[0], keys.shape[0])
        hidden = torch.arange(keys.shape[0])[None] > last[:, None]
        return logits.masked_fill(hidden[None], -math.inf).softmax(-1)


def gather(cache: Tensor, blocks: Tensor, positions: Any) -> Tensor:
    """Cached rows at the given positions of one request."""
    index = torch.as_tensor(list(positions))
    size = cache.shape[1]
    return cache[blocks[index // size].long(), index % size]
