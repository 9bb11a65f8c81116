"""Triton: what the end of a prompt voted for (SnapKV), and lists that are held for a request.

    votes[t]  = sum over the last 32 prompt rows r and the heads h of a KV group of
                exp(scale * q[r, h] . k[t] - lse[r, h]), where t is not behind r
    pooled[t] = mean of votes[t - 2 .. t + 2], of zeros beyond either end
    code[t]   = E5M3(pooled[t])

A program of the first kernel takes `BLOCK_N` tokens of one prompt and KV head. Limit: memory
bandwidth (K once), and that a pass holds few prompts. `_hold_kernel` writes held positions as what
the draft attention reads, once per iteration: a few megabytes.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from vegas_runtime.policies.snapkv import POOL_WIDTH, PROMPT_ROWS
from vegas_runtime.vllm_plugin.triton_score import encode
from vegas_runtime.vllm_plugin.triton_select import Units

_LOG2E = tl.constexpr(1.4426950408889634)
_ROWS = tl.constexpr(PROMPT_ROWS)
_POOL = tl.constexpr(POOL_WIDTH)
_BLOCK_N: Final = 128
_BLOCK_M: Final = 32
_BLOCK: Final = 1024


@triton.jit
def _vote_kernel(
    q,
    k,
    lse,
    votes,
    block_table,
    prompt_lens,
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
    votes_request,
    votes_head,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    start = tl.program_id(0) * BLOCK_N
    b = tl.program_id(1)
    head = tl.program_id(2)
    end = tl.load(candidates + b)
    if start >= end:
        return
    tokens = start + tl.arange(0, BLOCK_N)
    inside = tokens < end
    blocks = tl.load(block_table + b * table_row + tokens // BLOCK_SIZE, mask=inside, other=0)
    base = blocks.to(tl.int64) * k_block + (tokens % BLOCK_SIZE) * k_token + head * k_head
    dims = tl.arange(0, BLOCK_D)
    real = dims < HEAD_DIM
    keys = tl.load(
        k + base[:, None] + dims[None, :], mask=inside[:, None] & real[None, :], other=0.0
    )
    first = tl.load(prompt_lens + b) - _ROWS
    total = tl.zeros([BLOCK_N], tl.float32)
    for group in range(0, _ROWS * GROUP, BLOCK_M):
        packed = group + tl.arange(0, BLOCK_M)
        position = first + packed // GROUP
        # A row before the prompt's start sees nothing and votes for nothing.
        live = (packed < _ROWS * GROUP) & (position >= 0)
        q_rows = b.to(tl.int64) * _ROWS + packed // GROUP
        q_heads = head * GROUP + packed % GROUP
        queries = tl.load(
            q + (q_rows * q_row + q_heads * q_head)[None, :] + dims[:, None],
            mask=live[None, :] & real[:, None],
            other=0.0,
        )
        source = lse + q_rows * lse_row + q_heads * lse_head
        norm = tl.load(source, mask=live, other=float("inf"))
        logits = tl.dot(keys, queries) * scale_log2
        weights = tl.exp2(logits - (norm * _LOG2E)[None, :])
        seen = live[None, :] & (tokens[:, None] <= position[None, :])
        total += tl.sum(tl.where(seen, weights, 0.0), axis=1)
    tl.store(votes + b * votes_request + head * votes_head + tokens, total, mask=inside)


@triton.jit
def _pool_kernel(
    votes,
    codes,
    candidates,
    votes_request,
    votes_head,
    codes_request,
    codes_head,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(1)
    head = tl.program_id(2)
    end = tl.load(candidates + b)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = votes + b * votes_request + head * votes_head
    total = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(_POOL):
        near = tokens + step - _POOL // 2
        total += tl.load(source + near, mask=(near >= 0) & (near < end), other=0.0)
    target = codes + b * codes_request + head * codes_head + tokens
    tl.store(target, encode(total / _POOL).to(tl.uint8), mask=tokens < end)


def rank_prompts(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    block_table: Tensor,
    prompt_lens: Tensor,
    candidates: Tensor,
    scale: float,
    votes: Tensor,
    codes: Tensor,
) -> None:
    """Code what the last 32 rows of each prompt voted for, apart by KV head.

    Args:
        q: [N * 32, H, D] queries of each prompt's last rows; those before its start are ignored.
        k: [blocks, block size, Hkv, D] view of the cache, unit stride in D.
        lse: [N * 32, H] float32 natural log of each row's sum over all it sees, any strides.
        block_table: [N, blocks] int32.
        prompt_lens: [N] int32 tokens.
        candidates: [N] int32 tokens that are voted for.
        scale: factor on query-key products, the one `lse` was taken with.
        votes: [N, Hkv, n] float32, written up to `candidates`.
        codes: [N, Hkv, n] uint8, likewise.
    """
    N, Hkv, group = candidates.shape[0], k.shape[2], q.shape[1] // k.shape[2]
    _vote_kernel[(triton.cdiv(codes.shape[2], _BLOCK_N), N, Hkv)](
        *(q, k, lse, votes, block_table, prompt_lens, candidates, scale * 1.4426950408889634),
        *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), k.stride(2)),
        *(lse.stride(0), lse.stride(1), block_table.stride(0), votes.stride(0), votes.stride(1)),
        BLOCK_SIZE=k.shape[1],
        GROUP=group,
        HEAD_DIM=q.shape[2],
        BLOCK_D=max(16, triton.next_power_of_2(q.shape[2])),
        BLOCK_M=_BLOCK_M,
        BLOCK_N=_BLOCK_N,
        num_warps=4,
    )
    _pool_kernel[(triton.cdiv(codes.shape[2], _BLOCK), N, Hkv)](
        *(votes, codes, candidates),
        *(votes.stride(0), votes.stride(1), codes.stride(0), codes.stride(1)),
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit
def _hold_kernel(
    request_ids,
    num_sampled,
    positions,
    held_counts,
    held_tails,
    block_table,
    lists,
    counts,
    tail_start,
    table_row,
    positions_layer,
    positions_request,
    positions_head,
    lists_layer,
    lists_request,
    lists_head,
    block_units,
    token_units,
    head_units,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    request = tl.load(request_ids + b)
    is_drafting = (request >= 0) & (tl.load(num_sampled + b) > 0)
    count = tl.load(held_counts + request, mask=is_drafting, other=0)
    if layer == 0:
        tl.store(counts + b, count)
        tl.store(tail_start + b, tl.load(held_tails + request, mask=is_drafting, other=0))
    source = positions + layer * positions_layer + request.to(tl.int64) * positions_request
    target = lists + layer * lists_layer + b.to(tl.int64) * lists_request
    for head in range(HEADS):
        for start in range(0, count, BLOCK):
            place = start + tl.arange(0, BLOCK)
            live = place < count
            position = tl.load(source + head * positions_head + place, mask=live, other=0)
            column = position // BLOCK_SIZE
            block = tl.load(block_table + b * table_row + column, mask=live, other=0)
            unit = block * block_units + position % BLOCK_SIZE * token_units + head * head_units
            tl.store(target + head * lists_head + place, unit, mask=live)


def hold_lists(
    *,
    request_ids: Tensor,
    num_sampled: Tensor,
    positions: Tensor,
    held_counts: Tensor,
    held_tails: Tensor,
    block_table: Tensor,
    block_size: int,
    units: Units,
    lists: Tensor,
    counts: Tensor,
    tail_start: Tensor,
) -> None:
    """Give each batch row the list that is held for its request.

    Args:
        request_ids: [B] int32 persistent request states, -1 for padding.
        num_sampled: [B] int32; who emitted nothing drafts nothing and gets an empty list.
        positions: [layers, requests, Hkv, width] int32 positions in each request's text.
        held_counts: [requests] int32 entries of a request's lists.
        held_tails: [requests] int32 first token of its tail.
        block_table: [B, blocks] int32.
        block_size: tokens per block.
        units: how list entries are addressed.
        lists: [layers, B, Hkv, width] int32, written.
        counts: [B] int32, written.
        tail_start: [B] int32, written.
    """
    if request_ids.shape[0] == 0:
        return
    _hold_kernel[(request_ids.shape[0], lists.shape[0])](
        *(request_ids, num_sampled, positions, held_counts, held_tails, block_table),
        *(lists, counts, tail_start, block_table.stride(0)),
        *positions.stride()[:3],
        *lists.stride()[:3],
        *(units.block, units.token, units.head),
        HEADS=lists.shape[2],
        BLOCK_SIZE=block_size,
        BLOCK=256,
        num_warps=1,
    )
