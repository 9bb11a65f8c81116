"""Triton: what one iteration needs once, not per layer: lengths, tails, pages, windows.

One program per request; nothing here depends on a score.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from vegas_runtime.policies.streaming_llm import KV_BLOCK_SIZE
from vegas_runtime.policies.topk import PAGE_SIZE
from vegas_runtime.vllm_plugin.triton_select import Units

_PAGE = tl.constexpr(KV_BLOCK_SIZE)
_SCORED_PAGE = tl.constexpr(PAGE_SIZE)
_WINDOW_BLOCK: Final = 128


@triton.jit
def competing(scored, budget, capacity, in_pages):
    """Tokens that compete and how many of them are kept: whole pages where pages compete."""
    count = tl.minimum(tl.minimum(budget, scored), capacity)
    if tl.load(in_pages) != 0:
        scored = scored // _SCORED_PAGE * _SCORED_PAGE
        count = tl.minimum(count // _SCORED_PAGE * _SCORED_PAGE, scored)
    return scored, count


@triton.jit
def _step_kernel(
    seq_lens,
    query_start,
    given_rows,
    budgets,
    algorithm,
    row_set,
    in_pages,
    rows,
    candidates,
    counts,
    tail_start,
    row_mask,
    capacity,
    HAS_ROWS: tl.constexpr,
):
    b = tl.program_id(0)
    span = tl.load(query_start + b + 1) - tl.load(query_start + b)
    own = tl.minimum(tl.load(given_rows + b), span) if HAS_ROWS else span
    length = tl.load(seq_lens + b)
    is_scored = (length > 0) & (own > 0) & (tl.load(algorithm) == 0)
    own = tl.where(is_scored, tl.minimum(own, length), 0)
    scored = tl.where(own > 0, length - own + 1, 0)
    scored, count = competing(scored, tl.load(budgets + b), capacity, in_pages)
    tl.store(rows + b, own)
    tl.store(candidates + b, scored)
    tl.store(counts + b, tl.maximum(count, 0))
    tl.store(tail_start + b, scored)
    last = own - 1
    chosen = tl.load(row_set)
    steps = tl.where(chosen == 2, last, tl.minimum(chosen + 1, last))
    mask = 0
    if span <= 32:
        for i in range(0, steps + 1):
            mask |= 1 << (span - own + i * last // tl.maximum(steps, 1))
    tl.store(row_mask + b, mask)


def step_lengths(
    *,
    seq_lens: Tensor,
    query_start: Tensor,
    given_rows: Tensor | None,
    budgets: Tensor,
    algorithm: Tensor,
    row_set: Tensor,
    in_pages: Tensor,
    capacity: int,
    rows: Tensor,
    candidates: Tensor,
    counts: Tensor,
    tail_start: Tensor,
    row_mask: Tensor,
) -> None:
    """Lengths of one verify step: candidates are the tokens up to row 0's own, or whole pages.

    Args:
        seq_lens: [B] int32 tokens cached, the step's included; 0 for padding.
        query_start: [B + 1] int32.
        given_rows: [B] int32 rows of the verify block, or None for every row.
        budgets: [B] int32 entries to keep.
        algorithm: [1] int32; unless 0, nothing is scored.
        row_set: [1] int32 index into `methods.ROW_SETS`.
        in_pages: [1] int32, not 0 while whole pages of 16 tokens compete.
        capacity: entries a list holds.
        rows: [B] int32, written; 0 for padding and where nothing is scored.
        candidates: [B] int32, written.
        counts: [B] int32, written: entries that will be kept.
        tail_start: [B] int32, written: first token that could not be scored.
        row_mask: [B] int32, written: bit i for row i of the request's range, if collected; ranges
            of more than 32 rows have none.
    """
    if seq_lens.shape[0] == 0:
        return
    _step_kernel[(seq_lens.shape[0],)](
        *(seq_lens, query_start, query_start if given_rows is None else given_rows, budgets),
        *(algorithm, row_set, in_pages, rows, candidates, counts, tail_start, row_mask, capacity),
        HAS_ROWS=given_rows is not None,
        num_warps=1,
    )


@triton.jit
def _tail_kernel(
    counts,
    tail_start,
    block_table,
    lists,
    table_row,
    table_width,
    lists_layer,
    lists_request,
    lists_head,
    block_units,
    token_units,
    head_units,
    length,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + b)
    offsets = tl.arange(0, BLOCK)
    position = tl.load(tail_start + b) + offsets
    column = position // BLOCK_SIZE
    wanted = (offsets < length) & (column < table_width)
    block = tl.load(block_table + b * table_row + column, mask=wanted, other=0)
    unit = block * block_units + position % BLOCK_SIZE * token_units
    for head in range(HEADS):
        target = lists + layer * lists_layer + b.to(tl.int64) * lists_request + head * lists_head
        tl.store(target + count + offsets, unit + head * head_units, mask=wanted)


def append_tails(
    *,
    counts: Tensor,
    tail_start: Tensor,
    block_table: Tensor,
    block_size: int,
    units: Units,
    length: int,
    lists: Tensor,
) -> None:
    """Write the units of each request's next tokens behind its list, for every layer.

    Args:
        counts: [B] int32 entries of each list.
        tail_start: [B] int32 first token written.
        block_table: [B, blocks] int32.
        block_size: tokens per block.
        units: how entries are addressed.
        length: tokens written; those beyond the table are left out.
        lists: [layers, B, 1 or Hkv, capacity + length] int32.
    """
    B = counts.shape[0]
    if B == 0 or length == 0:
        return
    _tail_kernel[(B, lists.shape[0])](
        *(counts, tail_start, block_table, lists, block_table.stride(0), block_table.shape[1]),
        *lists.stride()[:3],
        *(units.block, units.token, units.head, length),
        HEADS=lists.shape[2],
        BLOCK_SIZE=block_size,
        BLOCK=triton.next_power_of_2(length),
        num_warps=1,
    )


@triton.jit
def _window_start(length, ratio, min_tokens):
    """First page of StreamingLLM's window over `length` tokens, the query's included."""
    # Double precision, as the policy's Python counts.
    asked = tl.load(ratio) * length.to(tl.float64)
    asked = tl.maximum(asked, tl.load(min_tokens).to(tl.float64))
    pages = tl.ceil(asked / _PAGE).to(tl.int32)
    return tl.maximum((length - 1) // _PAGE - pages + 1, 0)


@triton.jit
def _draft_kernel(
    seq_lens,
    algorithm,
    ratio,
    min_tokens,
    block_table,
    lists,
    counts,
    tail_start,
    used,
    table_row,
    lists_layer,
    lists_request,
    lists_head,
    width,
    block_units,
    token_units,
    head_units,
    WITH_TAIL: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0)
    layer = tl.program_id(1)
    length = tl.load(seq_lens + b)
    if tl.load(algorithm) == 0:
        if layer > 0:
            return
        entries = tl.load(counts + b) + length - tl.load(tail_start + b)
        entries = tl.where(length > 0, tl.minimum(entries, width), 0)
        for head in range(HEADS):
            tl.store(used + b * HEADS + head, entries)
        return
    start = _window_start(length, ratio, min_tokens) * _PAGE
    sinks = tl.where((start > 0) & (length > 0), _PAGE, 0)
    entries = tl.where(length > 0, tl.minimum(sinks + length - start, width), 0)
    if layer == 0:
        for head in range(HEADS):
            tl.store(used + b * HEADS + head, entries)
        if not WITH_TAIL:
            tl.store(counts + b, sinks)
            tl.store(tail_start + b, tl.where(length > 0, start, 0))
    if not WITH_TAIL:
        entries = sinks
    target = lists + layer.to(tl.int64) * lists_layer + b.to(tl.int64) * lists_request
    for base in range(0, entries, BLOCK):
        entry = base + tl.arange(0, BLOCK)
        position = tl.where(entry < sinks, entry, start + entry - sinks)
        live = entry < entries
        source = block_table + b * table_row + position // BLOCK_SIZE
        block = tl.load(source, mask=live, other=0)
        unit = block * block_units + position % BLOCK_SIZE * token_units
        for head in range(HEADS):
            tl.store(target + head * lists_head + entry, unit + head * head_units, mask=live)


def draft_lengths(
    *,
    seq_lens: Tensor,
    algorithm: Tensor,
    ratio: Tensor,
    min_tokens: Tensor,
    block_table: Tensor,
    block_size: int,
    units: Units,
    with_tail: bool,
    lists: Tensor,
    counts: Tensor,
    tail_start: Tensor,
    used: Tensor,
) -> None:
    """What one draft step reads: the selected lists and their tails, or StreamingLLM's window.

    Scored lists stay as they are and only `used` moves. A window is written for every layer,
    whose lists the captured draft attention reads whatever the algorithm.

    Args:
        seq_lens: [B] int32 tokens cached, the draft step's own included; 0 for padding.
        algorithm: [1] int32: 0 for selected lists, else the window.
        ratio: float64[1], fraction of entries kept (window only).
        min_tokens: int32[1] (window only).
        block_table: [B, blocks] int32.
        block_size: tokens per block.
        units: how entries are addressed.
        with_tail: the tail follows in the list; else the draft attention reads it from
            `tail_start` on.
        lists: [layers, B, 1 or Hkv, width] int32.
        counts: [B] int32; written for a window without its tail.
        tail_start: [B] int32; likewise.
        used: [B * lists per request] int32, written: entries in all.
    """
    if seq_lens.shape[0] == 0:
        return
    _draft_kernel[(seq_lens.shape[0], lists.shape[0])](
        *(seq_lens, algorithm, ratio, min_tokens, block_table, lists, counts, tail_start, used),
        block_table.stride(0),
        *lists.stride()[:3],
        *(lists.shape[3], units.block, units.token, units.head),
        WITH_TAIL=with_tail,
        HEADS=lists.shape[2],
        BLOCK_SIZE=block_size,
        BLOCK=_WINDOW_BLOCK if with_tail else KV_BLOCK_SIZE,
        num_warps=1,
    )


@triton.jit
def _window_kernel(
    seq_lens,
    ratio,
    min_tokens,
    block_table,
    slots,
    counts,
    tail_start,
    pages,
    used,
    table_row,
    slots_request,
    pages_row,
    max_pages,
    block_pages,
    DENSE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0)
    length = tl.load(seq_lens + b)
    newest = (length - 1) // _PAGE
    start = newest * 0 if DENSE else _window_start(length, ratio, min_tokens)
    sinks = tl.where((start > 0) & (length > 0), 1, 0)
    tl.store(counts + b, sinks * _PAGE)
    tl.store(tail_start + b, tl.where(length > 0, start * _PAGE, 0))
    first = tl.load(block_table + b * table_row)
    offsets = tl.arange(0, _PAGE)
    tl.store(slots + b * slots_request + offsets, first * BLOCK_SIZE + offsets)

    tl.store(used + b, tl.where(length > 0, sinks * _PAGE + length - start * _PAGE, 0))
    num_pages = tl.where(length > 0, tl.minimum(sinks + newest - start + 1, max_pages), 0)
    for base in range(0, num_pages, BLOCK):
        page = base + tl.arange(0, BLOCK)
        logical = tl.where(page < sinks, 0, start + page - sinks)
        live = page < num_pages
        source = block_table + b * table_row + logical * _PAGE // BLOCK_SIZE
        block = tl.load(source, mask=live, other=0)
        within = logical * _PAGE % BLOCK_SIZE // _PAGE
        tl.store(pages + b * pages_row + page, block * block_pages + within, mask=live)


def window_lists(
    *,
    seq_lens: Tensor,
    ratio: Tensor,
    min_tokens: Tensor,
    dense: bool,
    block_table: Tensor,
    block_size: int,
    block_pages: int,
    slots: Tensor,
    counts: Tensor,
    tail_start: Tensor,
    pages: Tensor,
    used: Tensor,
) -> None:
    """StreamingLLM's list of one draft step for all layers, as pages of 16 tokens and as slots.

    Args:
        seq_lens: [B] int32, the draft step's token included; 0 for padding.
        ratio: float64[1], fraction of entries kept.
        min_tokens: int32[1].
        dense: read everything instead.
        block_table: [B, blocks] int32.
        block_size: tokens per block, a multiple of 16.
        block_pages: page numbers from one block to the next.
        slots: [B, 1, 16] int32, written: the sink block.
        counts: [B] int32, written: 16, or 0 where the window holds the sink block.
        tail_start: [B] int32, written: the window's first token.
        pages: [B, max_pages] int32, written: the sink's page, then the window's.
        used: [B] int32, written: tokens on those pages.
    """
    if seq_lens.shape[0] == 0:
        return
    _window_kernel[(seq_lens.shape[0],)](
        *(seq_lens, ratio, min_tokens, block_table, slots, counts, tail_start, pages, used),
        *(block_table.stride(0), slots.stride(0), pages.stride(0), pages.shape[1], block_pages),
        DENSE=dense,
        BLOCK_SIZE=block_size,
        BLOCK=_WINDOW_BLOCK,
        num_warps=1,
    )
