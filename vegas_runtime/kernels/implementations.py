"""The operations' schemas on the reference path: `paged.py`, request by request, in place.

Used for CPU tensors, and for CUDA tensors where the kernels cannot run. Reads lengths back, so it
cannot be captured in a graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vegas_runtime.kernels import paged

_TILE = 16
_UNIT = 64


def build_schedule(
    seq_lens: Tensor,
    query_start: Tensor | None,
    counts: Tensor | None,
    tail_start: Tensor | None,
    window: int,
    prefix: Tensor,
) -> None:
    """See `ops.build_schedule`."""
    lens = seq_lens.long()
    if counts is not None and tail_start is not None:
        tail = torch.where(lens > tail_start, lens - tail_start // _TILE * _TILE, 0)
        tiles = -(-counts.long() // _TILE) - (-tail // _TILE)
        units = torch.where(lens > 0, -(-tiles * _TILE // _UNIT), 0)
    else:
        assert query_start is not None
        queries = query_start.long().diff()
        first = (lens - queries - window + 1).clamp(min=0) if window > 0 else lens * 0
        units = -(-(lens - first // _TILE * _TILE) // _UNIT)
        units = torch.where((lens > 0) & (queries > 0), units, 0)
    prefix[0] = 0
    prefix[1:] = units.cumsum(0)


def verify_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    prefix: Tensor,
    max_queries: int,
    scale: float,
    window: int,
    sinks: Tensor | None,
    hint: Tensor | None,
    rows: Tensor | None,
    path: int,
    out: Tensor,
    lse: Tensor,
    score: Tensor | None,
    partials: Tensor,
    counters: Tensor,
) -> None:
    """See `ops.verify_attention`."""
    Hkv = k.shape[2]
    starts = query_start.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        begin, end = starts[b], starts[b + 1]
        if begin == end or length == 0:
            continue
        keys = paged.gather_tokens(k, block_table[b], length).float()
        values = paged.gather_tokens(v, block_table[b], length).float()
        done = paged.verify_request(
            q[begin:end].float(), keys, values, scale=scale, window=window, sinks=sinks
        )
        out[begin:end] = done.out
        lse[begin:end] = done.lse
        if score is None:
            continue
        assert hint is not None
        if score.dim() == 5:
            units = -(-length // _UNIT)
            score[b, :, :units] = paged.exact_scores(done.logits, hint[b], Hkv)
            continue
        score[b, :, : -(-length // _TILE) * _TILE] = 0  # the kernels write whole tiles
        mask = None if rows is None else int(rows[b])
        asked = {0, end - begin - 1} if mask is None else _bits(mask)
        collected = sorted(row for row in asked if row < end - begin)
        weights = paged.hint_scores(done.logits, hint[b], collected, Hkv)
        coded = paged.encode_scores(weights) if score.dtype == torch.uint8 else weights
        score[b, :, :length] = coded


def _bits(mask: int) -> set[int]:
    return {i for i in range(32) if mask >> i & 1}


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    counts: Tensor,
    block_table: Tensor,
    tail_start: Tensor,
    seq_lens: Tensor,
    prefix: Tensor,
    scale: float,
    sinks: Tensor | None,
    overlap: bool,
    out: Tensor,
    lse: Tensor,
    partials: Tensor,
    counters: Tensor,
) -> None:
    """See `ops.sparse_attention`."""
    starts, used = tail_start.tolist(), counts.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        listed = slots[b, :, : used[b]]
        chosen = listed[0] if listed.shape[0] == 1 else listed.T
        keys, values = (
            torch.cat(
                (
                    paged.gather_slots(cache, chosen),
                    paged.gather_tokens(cache, block_table[b], length)[starts[b] :],
                )
            ).float()
            for cache in (k, v)
        )
        visible = torch.ones(1, keys.shape[0], dtype=torch.bool, device=q.device)
        done = paged.attend(q[b : b + 1].float(), keys, values, visible, scale=scale, sinks=sinks)
        out[b] = done.out[0]
        lse[b] = done.lse[0]


def select(
    score: Tensor,
    candidates: Tensor,
    budgets: Tensor,
    sinks: int,
    recent: int,
    block_table: Tensor | None,
    block_size: int,
    reference: Tensor | None,
    lse: Tensor | None,
    query_start: Tensor | None,
    keys: Tensor,
    slots: Tensor,
    counts: Tensor,
) -> None:
    """See `ops.select`."""
    R, _, heads, capacity = slots.shape
    per_head = heads == score.shape[2]
    queries = None if query_start is None else query_start.long().diff()
    ranked = paged.selection_keys(
        score, per_head=per_head, reference=reference, lse=lse, queries=queries
    )
    if keys.shape == ranked.shape:
        keys.copy_(ranked.to(torch.int32).to(torch.int16))
    asked = budgets.tolist()
    for b, n in enumerate(candidates.tolist()):
        forced_low = min(sinks, n)
        forced_high = min(recent, n - forced_low)
        budget = min(max(asked[b], forced_low + forced_high), n, capacity)
        counts[b] = budget
        for layer in range(R):
            for head in range(heads):
                picked = paged.pick_row(
                    ranked[layer, b, head, :n], budget, sinks=forced_low, recent=forced_high
                )
                if block_table is not None:
                    blocks = block_table[b][picked // block_size].long()
                    picked = blocks * block_size + picked % block_size
                slots[layer, b, head, :budget] = picked.to(torch.int32)
