"""Triton: attention over a paged cache for GPUs without FlashAttention-3, dense or listed.

    entries of a request = its list (slots), then every token from `tail_start` on
    row i of S sees all entries but the last S - 1 - i

Dense attention has an empty list and a tail that starts at 0; a draft step has one row. A program
takes up to `BLOCK_M` packed rows (query row, head of a KV group) of one KV head over one of
`SPLITS` equal parts of the entries; a second kernel merges the parts. Limit: memory bandwidth, and
for lists the latency of the gather.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_BLOCK_N: Final = 64
_MAX_SPLITS: Final = 16
_WAVES: Final = 4  # programs per SM that splitting aims at


@triton.jit(do_not_specialize=["num_rows", "table_row"])
def _attend_kernel(
    q,
    k,
    v,
    partials,
    partial_lse,
    slots,
    counts,
    tail_start,
    block_table,
    seq_lens,
    query_start,
    scale_log2,
    q_row,
    q_head,
    k_block,
    k_token,
    k_head,
    slots_request,
    slots_head,
    table_row,
    num_rows,
    LISTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    M_BLOCKS: tl.constexpr,
):
    b = tl.program_id(0) // M_BLOCKS
    head = tl.program_id(1)
    split = tl.program_id(2)
    begin = tl.load(query_start + b)
    rows = tl.load(query_start + b + 1) - begin
    packed = tl.program_id(0) % M_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    if tl.program_id(0) % M_BLOCKS * BLOCK_M >= rows * GROUP:
        return
    length = tl.load(seq_lens + b)
    count = 0
    tail = 0
    if LISTED:
        # Padding has length 0 and keeps whatever its list held.
        count = tl.where(length > 0, tl.load(counts + b), 0)
        tail = tl.where(length > 0, tl.load(tail_start + b), 0)
    total = count + length - tail
    share = tl.cdiv(tl.cdiv(total, SPLITS), BLOCK_N) * BLOCK_N
    low = split * share
    high = tl.minimum(low + share, total)

    row = packed // GROUP
    q_heads = head * GROUP + packed % GROUP
    live = row < rows
    seen = total - rows + 1 + row
    dims = tl.arange(0, BLOCK_D)
    real = dims < HEAD_DIM
    q_rows = (begin + row).to(tl.int64)
    queries = tl.load(
        q + (q_rows * q_row + q_heads * q_head)[:, None] + dims[None, :],
        mask=live[:, None] & real[None, :],
        other=0.0,
    )
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(low, high, BLOCK_N):
        entry = start + tl.arange(0, BLOCK_N)
        inside = entry < high
        position = tail + entry - count
        if LISTED:
            listed = inside & (entry < count)
            source = slots + b.to(tl.int64) * slots_request + head * slots_head + entry
            slot = tl.load(source, mask=listed, other=0)
            dense = inside & (entry >= count)
            block = tl.load(
                block_table + b * table_row + position // BLOCK_SIZE, mask=dense, other=0
            )
            block = tl.where(listed, slot // BLOCK_SIZE, block)
            offset = tl.where(listed, slot % BLOCK_SIZE, position % BLOCK_SIZE)
        else:
            block = tl.load(
                block_table + b * table_row + position // BLOCK_SIZE, mask=inside, other=0
            )
            offset = position % BLOCK_SIZE
        base = block.to(tl.int64) * k_block + offset * k_token + head * k_head
        wanted = inside[:, None] & real[None, :]
        keys = tl.load(k + base[:, None] + dims[None, :], mask=wanted, other=0.0)
        logits = tl.dot(queries, tl.trans(keys)) * scale_log2
        visible = inside[None, :] & (entry[None, :] < seen[:, None])
        logits = tl.where(visible, logits, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(logits, axis=1))
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        probabilities = tl.exp2(logits - shift[:, None])
        decay = tl.exp2(highest - shift)
        weight = weight * decay + tl.sum(probabilities, axis=1)
        stored = tl.load(v + base[:, None] + dims[None, :], mask=wanted, other=0.0)
        values = values * decay[:, None] + tl.dot(probabilities.to(stored.dtype), stored)
        highest = new_highest

    place = split * num_rows * HEADS + q_rows * HEADS + q_heads
    divisor = tl.where(weight > 0.0, weight, 1.0)
    own_lse = tl.where(weight > 0.0, highest + tl.log2(divisor), float("-inf"))
    tl.store(partial_lse + place, own_lse, mask=live)
    scaled = values / divisor[:, None]
    target = partials + place[:, None] * HEAD_DIM + dims[None, :]
    tl.store(target, scaled, mask=live[:, None] & real[None, :])


@triton.jit(do_not_specialize=["batch", "num_rows"])
def _merge_kernel(
    partials,
    partial_lse,
    out,
    lse,
    sinks,
    query_start,
    batch,
    num_rows,
    out_row,
    out_head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if row >= tl.load(query_start + batch):
        return
    dims = tl.arange(0, BLOCK_D)
    real = dims < HEAD_DIM
    highest = float("-inf")
    if HAS_SINKS:
        highest = tl.load(sinks + head).to(tl.float32) * _LOG2E
    for split in range(SPLITS):
        place = split * num_rows * HEADS + row * HEADS + head
        highest = tl.maximum(highest, tl.load(partial_lse + place))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weight = 0.0
    if HAS_SINKS:
        weight += tl.exp2(tl.load(sinks + head).to(tl.float32) * _LOG2E - shift)
    values = tl.zeros([BLOCK_D], tl.float32)
    for split in range(SPLITS):
        place = split * num_rows * HEADS + row * HEADS + head
        share = tl.exp2(tl.load(partial_lse + place) - shift)
        weight += share
        values += share * tl.load(partials + place * HEAD_DIM + dims, mask=real, other=0.0)
    divisor = tl.where(weight > 0.0, weight, 1.0)
    values = values / divisor
    target = out + row * out_row + head * out_head + dims
    tl.store(target, values.to(out.dtype.element_ty), mask=real)
    own_lse = tl.where(weight > 0.0, (shift + tl.log2(divisor)) * _LN2, float("-inf"))
    tl.store(lse + row * HEADS + head, own_lse)


@dataclass(frozen=True, kw_only=True)
class ListedEntries:
    """What a draft step reads before the tail.

    Attributes:
        slots: [B, 1 or Hkv, capacity] int32, block * block size + offset.
        counts: [B] int32 entries used of each list.
        tail_start: [B] int32 first token of the dense tail.
    """

    slots: Tensor
    counts: Tensor
    tail_start: Tensor


class TritonAttention:
    """Paged attention with its scratch memory.

    Args:
        num_heads: H.
        num_kv_heads: Hkv.
        head_dim: D.
        max_batch: most requests of a call.
        max_rows: most query rows of a request.
        units: multiprocessors of the device.
        device: where.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_batch: int,
        max_rows: int,
        units: int,
        device: torch.device,
    ) -> None:
        self._num_kv_heads = num_kv_heads
        self._units = units
        self._max_rows = max_rows
        most = max(b * self._splits(b) for b in range(1, max_batch + 1)) * max_rows
        self._partials = torch.zeros((most, num_heads, head_dim), device=device)
        self._partial_lse = torch.zeros((most, num_heads), device=device)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._partials.nbytes + self._partial_lse.nbytes

    def _splits(self, batch: int) -> int:
        wanted = -(-_WAVES * self._units // (batch * self._num_kv_heads))
        return max(1, min(wanted, _MAX_SPLITS))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start: Tensor,
        max_queries: int,
        scale: float,
        out: Tensor,
        lse: Tensor,
        sinks: Tensor | None = None,
        listed: ListedEntries | None = None,
    ) -> None:
        """Attention of each request's newest rows over its cache, or over its list and tail.

        Args:
            q: [T, H, D].
            k: [blocks, block size, Hkv, D] view, unit stride in D.
            v: likewise, same strides.
            block_table: [B, blocks] int32.
            seq_lens: [B] int32; 0 for padding.
            query_start: [B + 1] int32.
            max_queries: most rows of a request; at most the constructor's `max_rows`.
            scale: factor on query-key products.
            out: [T, H, D], written up to query_start[B].
            lse: [T, H] float32 contiguous, natural log, sinks included; written likewise.
            sinks: [H] logits of the denominator, or None.
            listed: what is read before the tail; None for all tokens.
        """
        assert max_queries <= self._max_rows
        B, Hkv = seq_lens.shape[0], k.shape[2]
        T, H, D = q.shape
        if B == 0 or T == 0:
            return
        splits, group = self._splits(B), H // Hkv
        block_m = max(16, min(64, triton.next_power_of_2(max_queries * group)))
        m_blocks = triton.cdiv(max_queries * group, block_m)
        slots = block_table if listed is None else listed.slots
        _attend_kernel[(B * m_blocks, Hkv, splits)](
            *(q, k, v, self._partials, self._partial_lse, slots),
            *((seq_lens, seq_lens) if listed is None else (listed.counts, listed.tail_start)),
            *(block_table, seq_lens, query_start),
            scale * 1.4426950408889634,
            *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), k.stride(2)),
            slots.stride(0),
            0 if listed is None or slots.shape[1] == 1 else slots.stride(1),
            *(block_table.stride(0), T),
            LISTED=listed is not None,
            BLOCK_SIZE=k.shape[1],
            HEADS=H,
            GROUP=group,
            HEAD_DIM=D,
            BLOCK_D=max(16, triton.next_power_of_2(D)),
            BLOCK_M=block_m,
            BLOCK_N=_BLOCK_N,
            SPLITS=splits,
            M_BLOCKS=m_blocks,
            num_warps=4,
        )
        _merge_kernel[(T, H)](
            *(self._partials, self._partial_lse, out, lse, lse if sinks is None else sinks),
            *(query_start, B, T, out.stride(0), out.stride(1)),
            HEADS=H,
            HEAD_DIM=D,
            BLOCK_D=max(16, triton.next_power_of_2(D)),
            SPLITS=splits,
            HAS_SINKS=sinks is not None,
            num_warps=1,
        )
