"""Scores that the kernels collect for every lane and layer, and what they are weighed against."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.kernels import ops
from vegas_runtime.kernels.budgets import kv_budgets
from vegas_runtime.policies.base import Collection

# Scores come in units of so many tokens (`ops.verify_attention`).
_UNIT: Final = 64


class CollectedScores:
    """Buffers of one policy's scores, by full-attention layer ("place") and lane.

    Rows `two` are collected exactly: a byte per row and entry, to which `select` applies each
    row's true normaliser. Other rows are summed in the pass against a normaliser known beforehand,
    in bfloat16.

    Args:
        collection: what to collect: softmax weights of rows known before acceptance is.
        config: knobs in force.
        num_layers: full-attention layers.
        num_lanes: requests that may run at once.
        num_heads: query heads.
        num_kv_heads: KV heads.
        lane_size: tokens a lane holds.
        device: of the cache.
    """

    def __init__(
        self,
        collection: Collection,
        config: SpeculationConfig,
        *,
        num_layers: int,
        num_lanes: int,
        num_heads: int,
        num_kv_heads: int,
        lane_size: int,
        device: torch.device,
    ) -> None:
        self._collection, self._config = collection, config
        self._is_exact = collection.rows == "two"
        self._num_lists = num_kv_heads if collection.scope == "kv_head" else 1
        self._list_size = min(config.kv_budget(lane_size), lane_size)
        lanes = (num_layers, num_lanes)
        units, width = -(-lane_size // _UNIT), 2 * (num_heads // num_kv_heads)
        shape: tuple[int, ...] = (*lanes, num_kv_heads, units * _UNIT)
        if self._is_exact:
            shape = (*lanes, num_kv_heads, units, width, _UNIT)
        dtype = torch.uint8 if self._is_exact else torch.bfloat16
        # Zeros: what a lane never wrote may be looked at, and must not be NaN.
        self._scores = torch.zeros(shape, dtype=dtype, device=device)
        self._hints = torch.zeros(*lanes, num_heads, device=device)
        # Of the first and the last row; and rows of each lane's last verify pass.
        self._true = torch.zeros(*lanes, 2, num_heads, device=device)
        self._num_rows = torch.zeros(num_lanes, dtype=torch.int32, device=device)

    def begin(self, lanes: slice, num_rows: int) -> None:
        """A verify pass over lanes begins."""
        self._num_rows[lanes] = num_rows

    def learn(self, place: int, lanes: slice, lse: Tensor, *, step: int) -> None:
        """Take in the normalisers [B, H] of a pass of one row.

        Args:
            place: layer, counted among the full-attention ones.
            lanes: the pass's lanes.
            lse: natural logarithms, sinks included.
            step: which draft step it is since the last verify pass, from 0.
        """
        # The mean over the steps is nearer to every row than any one step is (bench_hint.py).
        self._hints[place, lanes].lerp_(lse, 1.0 / (step + 1))

    def target(
        self, place: int, lanes: slice, num_rows: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`score`, `hint` and `rows` that make `ops.verify_attention` collect a layer's scores."""
        mask = None
        if not self._is_exact:
            bits = sum(1 << row for row in self._collection.row_indices(num_rows))
            mask = torch.full_like(self._num_rows[lanes], bits)
        return self._scores[place, lanes], self._hints[place, lanes], mask

    def normalise(self, place: int, lanes: slice, lse: Tensor) -> None:
        """Keep the true normalisers of a pass's rows [B * S, H] for exact scores."""
        if self._is_exact:
            rows = lse.view(lanes.stop - lanes.start, -1, lse.shape[1])
            self._true[place, lanes] = rows[:, [0, -1]]

    def move(self, source: int, target: int) -> None:
        """One lane's request goes on in another."""
        for buffer in (self._scores, self._hints, self._true):
            buffer[:, target] = buffer[:, source]
        self._num_rows[target] = self._num_rows[source]

    def select(
        self, candidates: Tensor, block_table: Tensor, block_size: int
    ) -> tuple[Tensor, Tensor]:
        """The best entries of the first B lanes, in every layer.

        Args:
            candidates: [B] int32, scored entries.
            block_table: [lanes, blocks] int32.
            block_size: tokens per block.

        Returns:
            Slots [layers, B, 1 or Hkv, capacity] int32, and the counts used of each list [B].
        """
        layers, batch = self._scores.shape[0], candidates.shape[0]
        budgets = kv_budgets(
            candidates,
            sparsity_ratio=self._config.sparsity_ratio,
            num_speculative_tokens=self._config.num_speculative_tokens,
            min_tokens=self._config.min_tokens,
        )
        lists = (layers, batch, self._num_lists)
        entries = self._scores.shape[3] * (_UNIT if self._is_exact else 1)
        slots = torch.empty(*lists, self._list_size, dtype=torch.int32, device=candidates.device)
        counts = torch.empty_like(candidates)
        starts = torch.zeros(batch + 1, dtype=torch.int32, device=candidates.device)
        torch.cumsum(self._num_rows[:batch], 0, dtype=torch.int32, out=starts[1:])
        ops.select(
            self._scores[:, :batch],
            candidates=candidates,
            budgets=budgets,
            keys=torch.empty(*lists, entries, dtype=torch.int16, device=candidates.device),
            slots=slots,
            counts=counts,
            block_table=block_table[:batch],
            block_size=block_size,
            reference=self._hints[:, :batch].contiguous() if self._is_exact else None,
            lse=self._true[:, :batch].contiguous() if self._is_exact else None,
            query_start=starts if self._is_exact else None,
        )
        return slots, counts
