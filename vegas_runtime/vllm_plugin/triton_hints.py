"""Triton: what fused collection needs besides the kernel itself.

The fused kernel weighs logits against *hints*, normalisers known before the pass; a wrong one
changes scores only. The best known normalisers of a request are kept by batch row together with
the request they belong to, and found again by the request's persistent index: rows of a batch
change places between steps.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from vegas_runtime.vllm_plugin.triton_score import decode, encode

_BLOCK: Final = 2048
_EXACT_BLOCK: Final = 1024
# Rows whose mean is kept: on SmolLM2 hints from a mean rank nearer to exact scores than the last
# row's do (0.992 against 0.989 of the exact list's attention mass at 7 %, rows two; 0.989 against
# 0.985, all rows).
_KEPT_ROWS = tl.constexpr(8)
_LOG2E = tl.constexpr(1.4426950408889634)
# Adding and taking away 1.5 * 2^23 rounds a float32 to a whole number, ties to even, as the
# collecting kernels round a hint to whole octaves.
_ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def _recall_kernel(
    request_ids,
    row_of,
    owners,
    normalisers,
    hints,
    normalisers_layer,
    hints_layer,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    request = tl.load(request_ids + b).to(tl.int32)
    row = tl.load(row_of + request, mask=request >= 0, other=0)
    is_known = (request >= 0) & (tl.load(owners + row) == request)
    # Another request's normalisers are a better guess than none: heads differ more than texts do.
    row = tl.where(is_known, row, 0)
    heads = tl.arange(0, BLOCK)
    live = heads < HEADS
    value = tl.load(normalisers + layer * normalisers_layer + row * HEADS + heads, mask=live)
    value = tl.where(tl.abs(value) < 1e30, value, 0.0)
    tl.store(hints + layer * hints_layer + b * HEADS + heads, value, mask=live)


@triton.jit(do_not_specialize=["batch"])
def _own_kernel(request_ids, row_of, owners, batch):
    row = tl.program_id(0)
    if row >= batch:
        tl.store(owners + row, -1)
        return
    request = tl.load(request_ids + row).to(tl.int32)
    tl.store(owners + row, request)
    tl.store(row_of + request, row, mask=request >= 0)


def recall(
    request_ids: Tensor, *, row_of: Tensor, owners: Tensor, normalisers: Tensor, hints: Tensor
) -> None:
    """Fetch each request's last known normalisers, then give the rows to this step's requests.

    Args:
        request_ids: [B] integer persistent index of each batch row's request, -1 for padding.
        row_of: [requests] int32 row at which a request's normalisers were last kept; updated.
        owners: [max B] int32 request that a row belongs to, -1 for none; updated.
        normalisers: [layers, max B, H] float32 by row; of unknown requests row 0 stands in.
        hints: [layers, max B, H] float32, written for rows 0..B-1; always finite.
    """
    B, (layers, rows, H) = request_ids.shape[0], normalisers.shape
    if B == 0:
        return
    _recall_kernel[(B, layers)](
        *(request_ids, row_of, owners, normalisers, hints),
        *(normalisers.stride(0), hints.stride(0)),
        HEADS=H,
        BLOCK=triton.next_power_of_2(H),
        num_warps=1,
    )
    _own_kernel[(rows,)](request_ids, row_of, owners, B, num_warps=1)


@triton.jit
def _keep(lse, query_start, kept, b, heads, num_heads, lse_row, lse_head):
    """Mean normalisers of request `b`'s newest rows; nothing for padding."""
    begin = tl.load(query_start + b)
    end = tl.load(query_start + b + 1)
    rows = tl.minimum(end - begin, _KEPT_ROWS)
    live = heads < tl.where(rows > 0, num_heads, 0)
    total = tl.zeros(heads.shape, tl.float32)
    for row in range(0, rows):
        source = lse + (end - 1 - row).to(tl.int64) * lse_row + heads * lse_head
        total += tl.load(source, mask=live, other=0.0)
    tl.store(kept + b * num_heads + heads, total / tl.maximum(rows, 1), mask=live)


@triton.jit
def _keep_kernel(lse, query_start, kept, num_heads, lse_row, lse_head, BLOCK_H: tl.constexpr):
    heads = tl.arange(0, BLOCK_H)
    _keep(lse, query_start, kept, tl.program_id(0), heads, num_heads, lse_row, lse_head)


def keep(lse: Tensor, query_start: Tensor, kept: Tensor) -> None:
    """Keep the mean normalisers of each request's newest 8 rows.

    Args:
        lse: [T, H] float32, any strides.
        query_start: [B + 1] int32.
        kept: [B, H] float32, written; padding is left alone.
    """
    B, H = kept.shape
    if B > 0:
        _keep_kernel[(B,)](
            *(lse, query_start, kept, H, lse.stride(0), lse.stride(1)),
            BLOCK_H=triton.next_power_of_2(H),
            num_warps=1,
        )


@triton.jit
def _sum_kernel(
    scores,
    candidates,
    codes,
    lse,
    query_start,
    kept,
    scores_request,
    scores_head,
    codes_request,
    num_heads,
    lse_row,
    lse_head,
    HKV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(1)
    start = tl.program_id(0) * BLOCK
    if start == 0:
        heads = tl.arange(0, BLOCK_H)
        _keep(lse, query_start, kept, b, heads, num_heads, lse_row, lse_head)
    end = tl.load(candidates + b)
    if start >= end:
        return
    tokens = start + tl.arange(0, BLOCK)
    # Rows are padded to whole blocks of 64, so a masked load would only cost vector width.
    inside = tokens < (end + 63) // 64 * 64
    total = tl.zeros([BLOCK], tl.float32)
    for head in tl.static_range(HKV):
        source = scores + b.to(tl.int64) * scores_request + head * scores_head + tokens
        total += decode(tl.load(source, mask=inside, other=0).to(tl.int32))
    target = codes + b.to(tl.int64) * codes_request + tokens
    tl.store(target, encode(total).to(tl.uint8), mask=inside)


def sum_heads(
    scores: Tensor,
    *,
    candidates: Tensor,
    codes: Tensor,
    lse: Tensor,
    query_start: Tensor,
    kept: Tensor,
) -> None:
    """One code per token from one per KV head; keeps normalisers on the way.

    Args:
        scores: [B, Hkv, n] uint8, n a multiple of 64.
        candidates: [B] int32.
        codes: [B, 1, n] uint8, written up to the next multiple of 64.
        lse: [T, H] float32, any strides.
        query_start: [B + 1] int32.
        kept: [B, H] float32, written as by `keep`.
    """
    B, Hkv, n = scores.shape
    H = kept.shape[1]
    if B == 0:
        return
    _sum_kernel[(triton.cdiv(n, _BLOCK), B)](
        *(scores, candidates, codes, lse, query_start, kept),
        *(scores.stride(0), scores.stride(1), codes.stride(0), H, lse.stride(0), lse.stride(1)),
        HKV=Hkv,
        BLOCK_H=triton.next_power_of_2(H),
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit
def _sum_exact_kernel(
    scores,
    candidates,
    rows,
    codes,
    hints,
    lse,
    query_start,
    kept,
    scores_request,
    scores_head,
    codes_request,
    codes_head,
    num_heads,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_HEAD: tl.constexpr,
):
    b = tl.program_id(1)
    start = tl.program_id(0) * BLOCK
    if start == 0:
        heads = tl.arange(0, BLOCK_H)
        _keep(lse, query_start, kept, b, heads, num_heads, num_heads, 1)
    end = tl.load(candidates + b)
    if start >= end:
        return
    first = tl.load(query_start + b).to(tl.int64)
    last = tl.load(query_start + b + 1).to(tl.int64) - 1
    # A single row is stored as the first; a prompt's last chunk counts its last row alone.
    is_first_counted = (tl.load(rows + b) > 1) | (first == last)
    # Stored order within a unit of 64 tokens; `paged.exact_positions` says where a token lies.
    stored = start + tl.arange(0, BLOCK)
    within = stored % 64
    tokens = stored // 64 * 64 + within // 16 * 2 + within // 4 % 4 * 16 + within // 2 % 2 * 8
    tokens += within % 2
    inside = stored < (end + 63) // 64 * 64
    unit = stored // 64 * (2 * GROUP * 64) + within
    total = tl.zeros([BLOCK], tl.float32)
    for head in range(HKV):
        for packed in range(2 * GROUP):
            q_head = head * GROUP + packed % GROUP
            is_last = packed >= GROUP
            octave = tl.load(hints + b * num_heads + q_head) * _LOG2E + _ROUNDING - _ROUNDING
            norm = tl.load(lse + tl.where(is_last, last, first) * num_heads + q_head) * _LOG2E
            live = tl.where(is_last, last > first, is_first_counted)
            factor = tl.where(live, tl.exp2(tl.minimum(octave - norm, 120.0)), 0.0)
            source = scores + b.to(tl.int64) * scores_request + head * scores_head
            code = tl.load(source + unit + packed * 64, mask=inside, other=0).to(tl.int32)
            total += decode(code) * factor
        if PER_HEAD:
            target = codes + b.to(tl.int64) * codes_request + head * codes_head
            tl.store(target + tokens, encode(total).to(tl.uint8), mask=inside)
            total = tl.zeros([BLOCK], tl.float32)
    if not PER_HEAD:
        target = codes + b.to(tl.int64) * codes_request
        tl.store(target + tokens, encode(total).to(tl.uint8), mask=inside)


def sum_exact(
    scores: Tensor,
    *,
    candidates: Tensor,
    rows: Tensor,
    codes: Tensor,
    hints: Tensor,
    lse: Tensor,
    query_start: Tensor,
    kept: Tensor,
) -> None:
    """One code per token from those of the first and last row, each with its true normaliser.

    Args:
        scores: [B, Hkv, n / 64, 2 G, 64] uint8 of `ops.verify_attention`.
        candidates: [B] int32.
        rows: [B] int32 rows of the verify block; 1 counts the last row alone.
        codes: [B, 1 or Hkv, n] uint8, written up to the next multiple of 64.
        hints: [B, H] float32 that the scores are relative to.
        lse: [T, H] float32 contiguous.
        query_start: [B + 1] int32.
        kept: [B, H] float32, written as by `keep`.
    """
    B, Hkv, units, packed, _ = scores.shape
    H = kept.shape[1]
    if B == 0:
        return
    _sum_exact_kernel[(triton.cdiv(units * 64, _EXACT_BLOCK), B)](
        *(scores, candidates, rows, codes, hints, lse, query_start, kept),
        *(scores.stride(0), scores.stride(1), codes.stride(0), codes.stride(1), H),
        HKV=Hkv,
        GROUP=packed // 2,
        BLOCK_H=triton.next_power_of_2(H),
        BLOCK=_EXACT_BLOCK,
        PER_HEAD=codes.shape[1] > 1,
        num_warps=4,
    )
