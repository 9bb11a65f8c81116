"""Triton: one byte per cached token, the weight that the collected query rows pay to it.

    code[t] = E5M3(sum over rows r and heads h of exp(scale * q[r, h] . k[t] - lse[r, h]))

Full attention has run and left `lse`, so one pass over K suffices: V is not read, and of the
verify block only the collected rows are multiplied. Candidates end at row 0's own token, so every
row sees every one of them and nothing is masked. A program scores `BLOCK_N` tokens of one request
and walks over the KV heads, and over the collected rows `BLOCK_M` at a time, so that the set of
rows can change between replays of a graph. Limit: memory bandwidth (K once).

Codes are those of `kernels.paged.encode_scores`.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

_CODE_SHIFT = tl.constexpr(20)
_HALF_STEP = tl.constexpr(1 << 19)
_CODE_OFFSET = tl.constexpr(127 * 8 - 192)
_LOG2E = tl.constexpr(1.4426950408889634)
_BLOCK_N: Final = 128
_BLOCK_M: Final = 16


@triton.jit
def encode(weights):
    """Float32 weights as one-byte codes, held in int32."""
    bits = weights.to(tl.int32, bitcast=True)
    codes = ((bits + _HALF_STEP) >> _CODE_SHIFT) - _CODE_OFFSET
    return tl.minimum(tl.maximum(codes, 0), 255)


@triton.jit
def decode(codes):
    """The float32 weights that codes, held in int32, stand for."""
    return ((codes + _CODE_OFFSET) << _CODE_SHIFT).to(tl.float32, bitcast=True)


@triton.jit
def _score_kernel(
    q,
    k,
    lse,
    codes,
    block_table,
    query_start,
    rows,
    row_sets,
    candidates,
    scale_log2,
    q_row,
    q_head,
    k_block,
    k_token,
    k_head,
    lse_row,
    lse_head,
    table_row,
    codes_request,
    codes_head,
    BLOCK_SIZE: tl.constexpr,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PER_HEAD: tl.constexpr,
):
    start = tl.program_id(0) * BLOCK_N
    b = tl.program_id(1)
    end = tl.load(candidates + b)
    if start >= end:
        return
    tokens = start + tl.arange(0, BLOCK_N)
    inside = tokens < end
    blocks = tl.load(block_table + b * table_row + tokens // BLOCK_SIZE, mask=inside, other=0)
    base = blocks.to(tl.int64) * k_block + (tokens % BLOCK_SIZE) * k_token

    # Intervals between collected rows: rows 0 and last; the middle too; every one.
    last = tl.load(rows + b) - 1
    row_set = tl.load(row_sets)
    steps = tl.where(row_set == 2, last, tl.minimum(row_set + 1, last))
    packed_rows = (steps + 1) * GROUP
    first_row = (tl.load(query_start + b + 1) - 1 - last).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    real = dims < HEAD_DIM

    total = tl.zeros([BLOCK_N], tl.float32)
    for head in range(HKV):
        keys = tl.load(
            k + (base + head * k_head)[:, None] + dims[None, :],
            mask=inside[:, None] & real[None, :],
            other=0.0,
        )
        for group in range(0, packed_rows, BLOCK_M):
            packed = group + tl.arange(0, BLOCK_M)
            live = packed < packed_rows
            q_rows = first_row + packed // GROUP * last // tl.maximum(steps, 1)
            q_heads = head * GROUP + packed % GROUP
            queries = tl.load(
                q + (q_rows * q_row + q_heads * q_head)[None, :] + dims[:, None],
                mask=live[None, :] & real[:, None],
                other=0.0,
            )
            source = lse + q_rows * lse_row + q_heads * lse_head
            norm = tl.load(source, mask=live, other=float("inf"))
            logits = tl.dot(keys, queries) * scale_log2
            total += tl.sum(tl.exp2(logits - (norm * _LOG2E)[None, :]), axis=1)
        if PER_HEAD:
            target = codes + b * codes_request + head * codes_head + tokens
            tl.store(target, encode(total).to(tl.uint8), mask=inside)
            total = tl.zeros([BLOCK_N], tl.float32)
    if not PER_HEAD:
        tl.store(codes + b * codes_request + tokens, encode(total).to(tl.uint8), mask=inside)


def score(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    block_table: Tensor,
    query_start: Tensor,
    rows: Tensor,
    candidates: Tensor,
    scale: float,
    row_set: Tensor,
    codes: Tensor,
) -> None:
    """Score the candidates of each request.

    Args:
        q: [T, H, D] queries of all requests.
        k: [blocks, block size, Hkv, D] view of the cache, unit stride in D.
        lse: [T, H] float32 natural log, any strides.
        block_table: [B, blocks] int32.
        query_start: [B + 1] int32 first row of each request in q.
        rows: [B] int32, rows at the end of a request's range that form its verify block.
        candidates: [B] int32 tokens to score; 0 leaves a request out.
        scale: factor on query-key products.
        row_set: [1] int32 index into `methods.ROW_SETS`: rows whose weights are summed.
        codes: [B, 1 or Hkv, n] uint8, written up to `candidates`; 1 sums over all heads.
    """
    B, Hkv, group = candidates.shape[0], k.shape[2], q.shape[1] // k.shape[2]
    if B == 0:
        return
    _score_kernel[(triton.cdiv(codes.shape[2], _BLOCK_N), B)](
        *(q, k, lse, codes, block_table, query_start, rows, row_set, candidates),
        scale * 1.4426950408889634,
        *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), k.stride(2)),
        *(lse.stride(0), lse.stride(1), block_table.stride(0), codes.stride(0), codes.stride(1)),
        BLOCK_SIZE=k.shape[1],
        HKV=Hkv,
        GROUP=group,
        HEAD_DIM=q.shape[2],
        BLOCK_D=max(16, triton.next_power_of_2(q.shape[2])),
        BLOCK_M=_BLOCK_M,
        BLOCK_N=_BLOCK_N,
        PER_HEAD=codes.shape[1] > 1,
        num_warps=4,
    )
