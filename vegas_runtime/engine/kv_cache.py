"""Preallocated KV cache: ragged lengths, exact roll-back, saved prefills, compact draft copies.

transformers' growing cache copies every key at each token (3 GB a step at 16 requests x 4K of
SmolLM2). Here a lane (one request's place) is written in place, and rolling back is forgetting
a length: what lies beyond it is never read and is overwritten by the next write.

    KVCache     all tokens of every lane; lane-major, so one request is one contiguous slab
    DraftCache  the selected tokens of every lane, copied together once per selection,
                then the tail, then the drafts
    SavedPrefill  one lane's content, to be restored for another run

Both caches stand behind transformers' `Cache` interface: the model calls `update` per layer and
attends to what it returns; which columns a row may see is the pass's business (`attention.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from vegas_runtime.policies.base import KVSelection

# A lane is a block of a paged cache to the kernels, and blocks are whole tiles (`ops`).
LANE_UNIT: Final = 16


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """Sizes of one model's cache.

    Attributes:
        num_kv_heads: per layer; layers may differ.
        head_dims: per layer.
        sliding_windows: per layer; None where every key is visible.
    """

    num_kv_heads: tuple[int, ...]
    head_dims: tuple[int, ...]
    sliding_windows: tuple[int | None, ...]

    @property
    def num_layers(self) -> int:
        """Attention layers."""
        return len(self.num_kv_heads)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers that see every key: the ones a policy selects for."""
        return tuple(i for i, window in enumerate(self.sliding_windows) if window is None)


@dataclass(frozen=True, kw_only=True)
class SavedPrefill:
    """One prompt's cached keys and values, all but its last token.

    Attributes:
        prompt: token ids; the last one is not cached, it is row 0 of the first pass.
        keys: per layer [Hkv, len(prompt) - 1, D].
        values: per layer, likewise.
        queries: by full-attention layer [H, R, D] of the cached rows at the prompt's end, at
            most `MAX_PROMPT_ROWS` - 1 of them; empty for a prompt of one token. One prefill
            serves every policy, so they are kept for the policies that ask.
    """

    prompt: tuple[int, ...]
    keys: list[Tensor]
    values: list[Tensor]
    queries: Mapping[int, Tensor]


class _LayerBuffers(Cache):  # type: ignore[misc]  # transformers is untyped
    """Key and value buffers [lanes, Hkv, capacity, D] per layer, written row by row."""

    def __init__(
        self,
        shape: CacheShape,
        *,
        num_lanes: int,
        capacities: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(layers=[])
        self.shape = shape
        sizes = zip(shape.num_kv_heads, capacities, shape.head_dims, strict=True)
        # Zeros, not garbage: a masked key may be anything finite, but 0 * NaN is NaN.
        self.keys = [
            torch.zeros(num_lanes, heads, capacity, dim, dtype=dtype, device=device)
            for heads, capacity, dim in sizes
        ]
        self.values = [torch.zeros_like(key) for key in self.keys]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: every pass hands over its positions, so nothing may be derived from this."""
        return 0

    def _write(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Write keys [B, Hkv, S, D] at flat buffer rows [B * Hkv * S]."""
        dim = key.shape[-1]
        for buffer, new in ((self.keys[layer], key), (self.values[layer], value)):
            buffer.view(-1, dim).index_copy_(0, rows, new.reshape(-1, dim).to(buffer.dtype))


def _flat_rows(columns: Tensor, num_kv_heads: int, capacity: int, first_lane: int = 0) -> Tensor:
    """Flat buffer rows of columns [B, S] (the same for every head), as [B * Hkv * S]."""
    lanes = torch.arange(first_lane, first_lane + columns.shape[0], device=columns.device)
    heads = torch.arange(num_kv_heads, device=columns.device)
    base = (lanes[:, None] * num_kv_heads + heads) * capacity
    return (base[:, :, None] + columns[:, None, :]).reshape(-1)


class KVCache(_LayerBuffers):
    """Every token of every lane.

    Args:
        shape: sizes of the model's cache.
        num_lanes: requests that may run at once.
        capacity: tokens a lane must hold; rounded up to a multiple of `LANE_UNIT`.
        dtype: of keys and values.
        device: of the buffers.

    The invariant: of lane b only the first `committed` tokens mean anything, and the owner
    (`decoding.py`) keeps that count.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        num_lanes: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        capacity = -(-capacity // LANE_UNIT) * LANE_UNIT
        capacities = [capacity] * shape.num_layers
        super().__init__(
            shape, num_lanes=num_lanes, capacities=capacities, dtype=dtype, device=device
        )
        self.capacity = capacity
        self._first_lane = 0
        self._rows: dict[int, Tensor] = {}
        self._num_lanes = 0

    def begin(self, positions: Tensor, first_lane: int) -> None:
        """Aim the next forward pass.

        Args:
            positions: [B, S] int64, where each lane's new tokens go.
            first_lane: the pass covers lanes first_lane .. first_lane + B - 1.
        """
        self._first_lane, self._num_lanes = first_lane, positions.shape[0]
        self._rows = {
            heads: _flat_rows(positions, heads, self.capacity, first_lane)
            for heads in set(self.shape.num_kv_heads)
        }

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new tokens; return the lanes' whole buffers.

        Returns:
            Keys and values [B, Hkv, capacity, D].
        """
        rows = self._rows[key_states.shape[1]]
        self._write(layer_idx, rows, key_states, value_states)
        return self.lane_views(layer_idx)

    def lane_views(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the lanes that the current pass covers."""
        lanes = slice(self._first_lane, self._first_lane + self._num_lanes)
        return self.keys[layer][lanes], self.values[layer][lanes]

    def restore(self, lane: int, saved: SavedPrefill) -> None:
        """Put a saved prompt into a lane, bit for bit."""
        count = len(saved.prompt) - 1
        for buffers, kept in ((self.keys, saved.keys), (self.values, saved.values)):
            for buffer, content in zip(buffers, kept, strict=True):
                buffer[lane, :, :count] = content

    def move(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` tokens of one lane over another."""
        for buffer in (*self.keys, *self.values):
            buffer[target, :, :count] = buffer[source, :, :count]


class DraftCache(_LayerBuffers):
    """The selected tokens of every lane, packed together, and the drafts behind them.

    A lane's columns are: selected positions (ascending), tail, drafts. Sliding-window layers
    hold the newest window instead; they are never sparsified.

    Args:
        source: where tokens are copied from.
        width: most columns a full-attention layer needs, drafts included.
        max_drafts: draft steps before the next verification.
        write_through: also write drafts into `source`, at their positions, so that a later
            selection can pick them; verification overwrites them.
    """

    def __init__(
        self,
        source: KVCache,
        *,
        width: int,
        max_drafts: int,
        write_through: bool,
    ) -> None:
        shape = source.shape
        capacities = [
            width if window is None else window + 2 * max_drafts + 2
            for window in shape.sliding_windows
        ]
        super().__init__(
            shape,
            num_lanes=source.keys[0].shape[0],
            capacities=capacities,
            dtype=source.keys[0].dtype,
            device=source.keys[0].device,
        )
        self.source = source
        self.width = width
        self.write_through = write_through
        # Per layer kind (a window, or None for full attention): columns in use, and the
        # position that column 0 of a sliding layer holds.
        self.counts: dict[int | None, Tensor] = {}
        self.window_starts: dict[int, Tensor] = {}
        self._rows: dict[tuple[int | None, int], Tensor] = {}

    def gather(self, selection: KVSelection, lens: Tensor) -> None:
        """Copy what the full-attention layers draft with.

        Args:
            selection: for all full-attention layers; positions [layers, B, 1 or Hkv, K], or
                without the first dimension when all layers share one list.
            lens: [B] int64, tokens cached per lane; the tail ends there.
        """
        positions = selection.positions
        columns, counts = with_tail(positions, selection.tail_starts, lens)
        self.counts[None] = counts
        for place, layer in enumerate(self.shape.full_layers):
            self._copy(layer, columns[place] if columns.dim() == 4 else columns)

    def gather_windows(self, lens: Tensor) -> None:
        """Copy the newest window of every sliding-window layer."""
        for window in {w for w in self.shape.sliding_windows if w is not None}:
            starts = (lens - window).clamp(min=0)
            width = int((lens - starts).max())
            columns = starts[:, None] + torch.arange(width, device=lens.device)
            columns = torch.where(columns < lens[:, None], columns, 0)[:, None]
            self.counts[window], self.window_starts[window] = lens - starts, starts
            for layer, own in enumerate(self.shape.sliding_windows):
                if own == window:
                    self._copy(layer, columns)

    def _copy(self, layer: int, columns: Tensor) -> None:
        """Copy source positions [B, 1 or Hkv, N] of one layer to its first N columns."""
        lanes, _, width = columns.shape
        source = (self.source.keys[layer], self.source.values[layer])
        picked = take_columns(*source, columns)
        for target, content in zip((self.keys[layer], self.values[layer]), picked, strict=True):
            target[:lanes, :, :width] = content

    def begin(self, positions: Tensor) -> None:
        """Aim the next draft step: one new column per lane.

        Args:
            positions: [B, 1] int64, the new tokens' positions in the text.
        """
        self._rows = {}
        for layer, heads in enumerate(self.shape.num_kv_heads):
            window = self.shape.sliding_windows[layer]
            if (window, heads) not in self._rows:
                columns = self.counts[window][:, None]
                capacity = self.keys[layer].shape[2]
                self._rows[window, heads] = _flat_rows(columns, heads, capacity)
        for window, counts in self.counts.items():
            self.counts[window] = counts + 1
        if self.write_through:
            self.source.begin(positions, 0)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append one draft token; return the layer's packed keys and values."""
        window = self.shape.sliding_windows[layer_idx]
        rows = self._rows[window, key_states.shape[1]]
        self._write(layer_idx, rows, key_states, value_states)
        if self.write_through:
            self.source.update(key_states, value_states, layer_idx)
        lanes = key_states.shape[0]
        return self.keys[layer_idx][:lanes], self.values[layer_idx][:lanes]


def take_columns(keys: Tensor, values: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Copy columns [B, 1 or Hkv, N] of the first lanes' buffers [lanes, Hkv, capacity, D].

    Returns:
        Keys and values [B, Hkv, N, D].
    """
    _, heads, capacity, dim = keys.shape
    lanes, _, width = columns.shape
    lane_heads = torch.arange(lanes * heads, device=columns.device).view(lanes, heads, 1)
    rows = (lane_heads * capacity + columns).reshape(-1)
    # Flat rows: index_select copies whole rows, gather would look up each number.
    taken = [buffer.view(-1, dim).index_select(0, rows) for buffer in (keys, values)]
    return taken[0].view(lanes, heads, width, dim), taken[1].view(lanes, heads, width, dim)


def with_tail(positions: Tensor, tail_starts: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """Append each lane's tail right behind its selected positions.

    Args:
        positions: [..., B, Hd, K], padded with -1 behind `selected` entries.
        tail_starts: [B].
        lens: [B]; the tail is tail_starts .. lens - 1.

    Returns:
        Columns [..., B, Hd, N] (padding reads position 0), and the columns in use [B].
    """
    selected = (positions >= 0).sum(-1)
    per_lane = selected.amax(dim=(*range(selected.dim() - 2), -1))
    assert bool((selected == per_lane[:, None]).all()), "layers and heads differ in budget"
    counts = per_lane + lens - tail_starts
    width = int(counts.max())
    place = torch.arange(width, device=positions.device)
    tail = tail_starts[:, None] + place - per_lane[:, None]
    known = positions.new_zeros(*positions.shape[:-1], width)
    keep = min(positions.shape[-1], width)
    known[..., :keep] = positions[..., :keep]
    columns = torch.where((place < per_lane[:, None])[:, None], known, tail[:, None])
    return torch.where((place < counts[:, None])[:, None], columns, 0), counts
