"""Triton: each request's k highest codes as ascending units, lowest position first among equals.

A code is one byte, so eight comparisons with all of a row find the k-th largest exactly.

Contexts up to `WHOLE_ROW`: `_row_kernel`, one program per row (layer, request[, head]), which holds
the row in registers, bisects over the code and writes what is kept. Limit: integer instructions.

Longer ones in three passes over chunks, whose programs end at once beyond a request's candidates:

1. `_count_kernel`: a program counts the codes of one chunk of one row.
2. `_threshold_kernel`: a program per row adds the chunks up, finds the code of the k-th entry, and
   how many entries above and at it lie before each chunk.
3. `_write_kernel`: a program per chunk writes its kept entries where they belong.

Rows are padded to 64 codes and read in such units: a mask that may end at any byte would make
every load one byte wide. Only integer additions meet, so two runs agree. Batch sizes are not
specialised on: a captured graph of a new size must not meet the compiler.

Where pages of 16 tokens compete, each code is first replaced by that of its page's sum, so that the
highest codes are whole pages: equals stand side by side, and are taken from the lowest position.
Candidates and counts are whole pages then.

A *unit* is what the draft attention addresses an entry by: block * block_units + offset *
token_units + head * head_units. With block_units the block size and token_units 1 it is the slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from vegas_runtime.policies.topk import PAGE_SIZE
from vegas_runtime.vllm_plugin.triton_score import decode, encode

CHUNK: Final = 4096
WHOLE_ROW: Final = 16384
_PAGE = tl.constexpr(PAGE_SIZE)


@dataclass(frozen=True, kw_only=True)
class Units:
    """How draft attention addresses KV entries.

    Attributes:
        block: units from one block to the next.
        token: units from one token of a block to the next.
        head: units from one KV head of a token to the next; 0 where lists hold no heads.
    """

    block: int
    token: int = 1
    head: int = 0


@triton.jit
def places(values, threshold, quota):
    """Which values are kept, and how many kept ones lie before each: [keep, place].

    Of the values at the threshold the first `quota` are kept. At most 32,768 values, so that both
    running counts fit into one scan.
    """
    above = (values > threshold).to(tl.int32)
    equal = (values == threshold).to(tl.int32)
    packed = above + (equal << 16)
    before = tl.cumsum(packed, axis=0) - packed
    equal_before = before >> 16
    keep = (above > 0) | ((equal > 0) & (equal_before < quota))
    return keep, (before & 0xFFFF) + tl.minimum(equal_before, tl.maximum(quota, 0))


@triton.jit
def _competing(codes, inside, in_pages, SIZE: tl.constexpr):
    """Codes as they compete, -1 outside: each one's own, or that of its page's sum."""
    values = codes.to(tl.int32)
    if tl.load(in_pages) != 0:
        weights = tl.where(inside, decode(values), 0.0)
        sums = tl.sum(tl.reshape(weights, [SIZE // _PAGE, _PAGE]), axis=1)
        spread = tl.broadcast_to(sums[:, None], [SIZE // _PAGE, _PAGE])
        values = encode(tl.reshape(spread, [SIZE]))
    return tl.where(inside, values, -1)


@triton.jit(do_not_specialize=["batch", "table_row"])
def _row_kernel(
    codes,
    candidates,
    counts,
    in_pages,
    block_table,
    lists,
    codes_layer,
    codes_request,
    codes_head,
    table_row,
    lists_layer,
    lists_request,
    lists_head,
    batch,
    block_units,
    token_units,
    head_units,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    head = row % HEADS
    b = row // HEADS % batch
    layer = (row // HEADS // batch).to(tl.int64)
    end = tl.load(candidates + b)
    wanted = tl.load(counts + b)
    if wanted <= 0:
        return
    tokens = tl.arange(0, BLOCK)
    source = codes + layer * codes_layer + b.to(tl.int64) * codes_request + head * codes_head
    padded = tl.load(source + tokens, mask=tokens < (end + 63) // 64 * 64, other=0)
    values = _competing(padded, tokens < end, in_pages, BLOCK)
    threshold = wanted * 0
    for bit in tl.static_range(8):
        higher = threshold + (128 >> bit)
        enough = tl.sum((values >= higher).to(tl.int32), axis=0) >= wanted
        threshold = tl.where(enough, higher, threshold)
    above = tl.sum((values > threshold).to(tl.int32), axis=0)
    keep, place = places(values, threshold, wanted - above)
    block = tl.load(block_table + b * table_row + tokens // BLOCK_SIZE, mask=keep, other=0)
    unit = block * block_units + tokens % BLOCK_SIZE * token_units + head * head_units
    target = lists + layer * lists_layer + b.to(tl.int64) * lists_request + head * lists_head
    tl.store(target + place, unit, mask=keep)


@triton.jit(do_not_specialize=["batch"])
def _count_kernel(
    codes,
    candidates,
    in_pages,
    histograms,
    codes_layer,
    codes_request,
    codes_head,
    batch,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    b = row // HEADS % batch
    left = tl.load(candidates + b) - chunk * CHUNK
    if left <= 0:
        return
    source = (
        codes
        + (row // HEADS // batch).to(tl.int64) * codes_layer
        + b.to(tl.int64) * codes_request
        + (row % HEADS) * codes_head
        + chunk * CHUNK
    )
    offsets = tl.arange(0, CHUNK)
    padded = tl.load(source + offsets, mask=offsets < (left + 63) // 64 * 64, other=0)
    values = tl.maximum(_competing(padded, offsets < left, in_pages, CHUNK), 0)
    bins = tl.arange(0, 256)
    counts = tl.histogram(values, 256)
    # Offsets behind the last candidate were counted as zeros.
    counts -= tl.where(bins == 0, CHUNK - tl.minimum(left, CHUNK), 0)
    place = row.to(tl.int64) * tl.num_programs(1) + chunk
    tl.store(histograms + place * 256 + bins, counts)


@triton.jit(do_not_specialize=["batch", "max_chunks"])
def _threshold_kernel(
    histograms,
    candidates,
    counts,
    plan,
    batch,
    max_chunks,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    b = row // HEADS % batch
    end = tl.load(candidates + b)
    if end <= 0:
        return
    wanted = tl.load(counts + b)
    chunks = tl.cdiv(end, CHUNK)
    bins = tl.arange(0, 256)
    first = row.to(tl.int64) * max_chunks
    total = tl.zeros([256], tl.int32)
    for chunk in range(chunks):
        total += tl.load(histograms + (first + chunk) * 256 + bins)
    below = tl.cumsum(total, axis=0)  # entries with this code or a lower one
    at_least = end - below + total
    threshold = tl.max(tl.where(at_least >= wanted, bins, 0), axis=0)
    above = tl.sum(tl.where(bins > threshold, total, 0), axis=0)
    quota = wanted - above

    above_before = above * 0
    equal_before = above * 0
    for chunk in range(chunks):
        own = tl.load(histograms + (first + chunk) * 256 + bins)
        target = plan + (first + chunk) * 4
        tl.store(target, threshold)
        tl.store(target + 1, quota)
        tl.store(target + 2, above_before)
        tl.store(target + 3, equal_before)
        above_before += tl.sum(tl.where(bins > threshold, own, 0), axis=0)
        equal_before += tl.sum(tl.where(bins == threshold, own, 0), axis=0)


@triton.jit(do_not_specialize=["batch", "table_row"])
def _write_kernel(
    codes,
    candidates,
    in_pages,
    plan,
    block_table,
    lists,
    codes_layer,
    codes_request,
    codes_head,
    table_row,
    lists_layer,
    lists_request,
    lists_head,
    batch,
    block_units,
    token_units,
    head_units,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    head = row % HEADS
    b = row // HEADS % batch
    layer = (row // HEADS // batch).to(tl.int64)
    left = tl.load(candidates + b) - chunk * CHUNK
    if left <= 0:
        return
    own = plan + (row.to(tl.int64) * tl.num_programs(1) + chunk) * 4
    threshold = tl.load(own)
    quota = tl.load(own + 1)
    above_before = tl.load(own + 2)
    equal_before = tl.load(own + 3)

    offsets = tl.arange(0, CHUNK)
    source = codes + layer * codes_layer + b.to(tl.int64) * codes_request + head * codes_head
    in_row = offsets < (left + 63) // 64 * 64
    padded = tl.load(source + chunk * CHUNK + offsets, mask=in_row, other=0)
    values = _competing(padded, offsets < left, in_pages, CHUNK)
    keep, place = places(values, threshold, quota - equal_before)
    place += above_before + tl.minimum(equal_before, quota)
    tokens = chunk * CHUNK + offsets
    block = tl.load(block_table + b * table_row + tokens // BLOCK_SIZE, mask=keep, other=0)
    unit = block * block_units + tokens % BLOCK_SIZE * token_units + head * head_units
    target = lists + layer * lists_layer + b.to(tl.int64) * lists_request + head * lists_head
    tl.store(target + place, unit, mask=keep)


class Selector:
    """Top-k of codes with its scratch memory.

    Args:
        rows: most rows (layers x requests x lists each) of one call.
        max_len: longest context.
        in_pages: [1] int32 on the device, not 0 while whole pages compete.
        device: where.
    """

    def __init__(self, *, rows: int, max_len: int, in_pages: Tensor, device: torch.device) -> None:
        self._max_len, self._in_pages = max_len, in_pages
        self._chunks = 0 if max_len <= WHOLE_ROW else -(-max_len // CHUNK)
        self._histograms = torch.empty((rows * self._chunks, 256), dtype=torch.int32, device=device)
        self._plan = torch.empty((rows * self._chunks, 4), dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._histograms.nbytes + self._plan.nbytes

    def select(
        self,
        codes: Tensor,
        *,
        candidates: Tensor,
        counts: Tensor,
        block_table: Tensor,
        block_size: int,
        units: Units,
        lists: Tensor,
    ) -> None:
        """Write each row's `counts` best entries.

        Args:
            codes: [R, B, 1 or Hkv, n] uint8, n and strides multiples of 64.
            candidates: [B] int32 scored entries; at most `max_len`.
            counts: [B] int32 entries kept, 0 <= counts <= candidates.
            block_table: [B, blocks] int32.
            block_size: tokens per block.
            units: what is written for an entry.
            lists: [R, B, 1 or Hkv, capacity] int32, written up to `counts`.
        """
        R, B, heads, _ = codes.shape
        rows = R * B * heads
        if rows == 0:
            return
        sources = codes.stride()[:3]
        targets = (block_table.stride(0), *lists.stride()[:3])
        addressing = (B, units.block, units.token, units.head)
        if self._chunks == 0:
            block = max(triton.next_power_of_2(self._max_len), PAGE_SIZE)
            _row_kernel[(rows,)](
                *(codes, candidates, counts, self._in_pages, block_table, lists),
                *(*sources, *targets, *addressing),
                HEADS=heads,
                BLOCK_SIZE=block_size,
                BLOCK=block,
                num_warps=min(max(block // 1024, 1), 16),
            )
            return
        shared = {"HEADS": heads, "CHUNK": CHUNK}
        grid = (rows, self._chunks)
        _count_kernel[grid](
            *(codes, candidates, self._in_pages, self._histograms, *sources, B),
            **shared,
            num_warps=4,
        )
        _threshold_kernel[(rows,)](
            *(self._histograms, candidates, counts, self._plan, B, self._chunks),
            **shared,
            num_warps=4,
        )
        _write_kernel[grid](
            *(codes, candidates, self._in_pages, self._plan, block_table, lists),
            *(*sources, *targets, *addressing),
            BLOCK_SIZE=block_size,
            **shared,
            num_warps=8,
        )
