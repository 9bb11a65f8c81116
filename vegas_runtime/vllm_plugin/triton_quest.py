"""Triton: bounds of each page's keys, and the pages that a draft step's own query picks.

    u[h, P] = scale * sum over d of max(q[h, d] * M[P, d], q[h, d] * m[P, d])
    votes[P] = mean over the list's heads of the softmax of u[h, P] over the competing pages

The definition is `policies/quest.py`'s. Competing are the full pages before the query's own one;
the page that holds the query is the tail. Four kernels:

1. `_bounds_kernel`: a program per written token and KV head; the one that wrote a page's last
   token reads the page and bounds it. Limit: the launch, as one token in sixteen ends a page.
2. `_lengths_kernel`: a program per request counts pages, once per draft step.
3. `_score_kernel`: a program takes `SCORED_PAGES` pages of one KV head at a time and writes u of
   its group's heads with what a softmax needs of the part. Limit: reading the bounds, two entries
   a page. Short contexts in an engine for long ones would drown in programs that have no page, so
   their number is cut and each goes on to the pages behind the others'.
4. `_select_kernel`: a program per list adds the votes up in registers, bisects over their bits for
   the k-th largest, and writes the tokens of what is kept, lowest page first among equals.

A physical page is block * pages per block + place in the block; a page's bounds lie side by side,
minimum first. All lengths are read on the device and grids follow the largest context, so every
call can be captured.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from vegas_runtime.policies.topk import PAGE_SIZE
from vegas_runtime.vllm_plugin.triton_select import Units, places

_PAGE = tl.constexpr(PAGE_SIZE)
_LOG2E: Final = 1.4426950408889634
SCORED_PAGES: Final = 64  # of one program at a time
# Programs that scoring aims at, and the fewest for one request and KV head.
_PROGRAMS: Final = 4096
_FEWEST_PROGRAMS: Final = 8
# Votes of one list that a program holds in registers; also what two packed counts can tell apart.
MAX_PAGES: Final = 32768


@triton.jit(do_not_specialize=["num_pages"])
def _bounds_kernel(
    k,
    slots,
    is_needed,
    bounds,
    num_pages,
    k_block,
    k_token,
    k_head,
    EVERY: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    page = row
    if not EVERY:
        slot = tl.load(slots + row).to(tl.int64)
        is_last = (slot >= 0) & (slot % _PAGE == _PAGE - 1)
        page = tl.where(is_last & (tl.load(is_needed) != 0), slot // _PAGE, -1)
    if (page < 0) | (page >= num_pages):
        return
    tokens = tl.arange(0, _PAGE)
    dims = tl.arange(0, BLOCK_D)
    real = dims < HEAD_DIM
    first = page // BLOCK_PAGES * k_block + page % BLOCK_PAGES * _PAGE * k_token
    source = k + first + head * k_head + tokens[:, None] * k_token + dims[None, :]
    keys = tl.load(source, mask=real[None, :] & (tokens[:, None] >= 0), other=0.0).to(tl.float32)
    target = bounds + (page * HEADS + head) * 2 * HEAD_DIM + dims
    tl.store(target, tl.min(keys, axis=0).to(bounds.dtype.element_ty), mask=real)
    tl.store(target + HEAD_DIM, tl.max(keys, axis=0).to(bounds.dtype.element_ty), mask=real)


def bound_written(k: Tensor, *, slots: Tensor, is_needed: Tensor, bounds: Tensor) -> None:
    """Bound every page whose last token was just written.

    A page can compete only once its last token is written, and every write of that token comes
    here; so a page that competes is bounded by the keys that stand in it, whatever was rolled
    back or reused before.

    Args:
        k: [blocks, block size, Hkv, D] view of one layer's K, the new tokens in it.
        slots: [T] int64 slots written, negative for none.
        is_needed: [1] int32; 0 leaves the bounds as they are.
        bounds: [pages, Hkv, 2, D] in the dtype of K, minima then maxima; written.
    """
    if slots.shape[0] > 0:
        _bound(k, slots, is_needed, bounds, programs=slots.shape[0], every=False)


def bound_every_page(k: Tensor, *, bounds: Tensor) -> None:
    """Bound every page of a layer from what the cache holds.

    Args:
        k: as in `bound_written`.
        bounds: likewise; pages that are not full get bounds that nobody reads.
    """
    _bound(k, bounds, bounds, bounds, programs=bounds.shape[0], every=True)


def _bound(
    k: Tensor, slots: Tensor, is_needed: Tensor, bounds: Tensor, *, programs: int, every: bool
) -> None:
    _, block_size, heads, dim = k.shape
    _bounds_kernel[(programs, heads)](
        *(k, slots, is_needed, bounds, bounds.shape[0], *k.stride()[:3]),
        EVERY=every,
        BLOCK_PAGES=block_size // PAGE_SIZE,
        HEADS=heads,
        HEAD_DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=1,
    )


@triton.jit
def _lengths_kernel(
    seq_lens,
    ratio,
    min_tokens,
    num_drafts,
    counts,
    tail_start,
    used,
    capacity,
    LISTS: tl.constexpr,
):
    b = tl.program_id(0)
    length = tl.load(seq_lens + b)
    current = tl.maximum(length - 1, 0)
    others = current // _PAGE
    # Double precision, as the policy's Python counts.
    entries = (current + tl.load(num_drafts) + 1).to(tl.float64)
    asked = tl.ceil(tl.load(ratio) * entries).to(tl.int32)
    asked = tl.maximum(asked, tl.load(min_tokens))
    pages = tl.maximum(asked // _PAGE - 1, 0)
    pages = tl.where(asked > current, others, tl.minimum(pages, others))
    count = tl.minimum(pages, capacity // _PAGE) * _PAGE
    tl.store(counts + b, count)
    tl.store(tail_start + b, others * _PAGE)
    for i in range(LISTS):
        tl.store(used + b * LISTS + i, tl.where(length > 0, count + length - others * _PAGE, 0))


def page_lengths(
    *,
    seq_lens: Tensor,
    ratio: Tensor,
    min_tokens: Tensor,
    num_drafts: Tensor,
    capacity: int,
    counts: Tensor,
    tail_start: Tensor,
    used: Tensor,
) -> None:
    """What one draft step reads: so many tokens on chosen pages, then the query's own page.

    Args:
        seq_lens: [B] int32 tokens cached, the draft step's own included; 0 for padding.
        ratio: float64[1], fraction of entries kept.
        min_tokens: int32[1].
        num_drafts: int32[1] tokens drafted in this iteration.
        capacity: entries a list holds, tail not counted.
        counts: [B] int32, written: entries on chosen pages.
        tail_start: [B] int32, written: first token of the query's page.
        used: [B * lists per request] int32, written: entries in all.
    """
    B = seq_lens.shape[0]
    if B == 0:
        return
    _lengths_kernel[(B,)](
        *(seq_lens, ratio, min_tokens, num_drafts, counts, tail_start, used, capacity),
        LISTS=used.shape[0] // B,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["table_row"])
def _score_kernel(
    q,
    bounds,
    block_table,
    counts,
    tail_start,
    scores,
    parts,
    scale_log2,
    q_row,
    q_head,
    table_row,
    scores_request,
    scores_head,
    parts_request,
    parts_head,
    BLOCK_PAGES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    head = tl.program_id(1)
    b = tl.program_id(2)
    others = tl.load(tail_start + b) // _PAGE
    wanted = tl.load(counts + b) // _PAGE
    # Nothing to choose: no page, or all of them.
    if (tl.program_id(0) * BLOCK_P >= others) | (wanted >= others) | (wanted <= 0):
        return
    dims = tl.arange(0, BLOCK_D)
    real = dims < HEAD_DIM
    member = tl.arange(0, BLOCK_G)
    own = member < GROUP
    q_heads = head * GROUP + member
    queries = tl.load(
        q + b.to(tl.int64) * q_row + q_heads[:, None] * q_head + dims[None, :],
        mask=own[:, None] & real[None, :],
        other=0.0,
    )
    nothing = tl.zeros_like(queries)
    above = tl.where(queries > 0, queries, nothing)
    below = tl.where(queries < 0, queries, nothing)
    for chunk in range(tl.program_id(0), tl.cdiv(others, BLOCK_P), tl.num_programs(0)):
        pages = chunk * BLOCK_P + tl.arange(0, BLOCK_P)
        live = pages < others
        block = tl.load(block_table + b * table_row + pages // BLOCK_PAGES, mask=live, other=0)
        page = block.to(tl.int64) * BLOCK_PAGES + pages % BLOCK_PAGES
        wide = live[:, None] & real[None, :]
        source = bounds + ((page * HEADS + head) * 2 * HEAD_DIM)[:, None] + dims[None, :]
        low = tl.load(source, mask=wide, other=0.0)
        high = tl.load(source + HEAD_DIM, mask=wide, other=0.0)
        upper = tl.dot(above, tl.trans(high), input_precision="ieee")
        lower = tl.dot(below, tl.trans(low), input_precision="ieee")
        logits = (upper + lower) * scale_log2
        target = scores + b.to(tl.int64) * scores_request + q_heads[:, None] * scores_head
        tl.store(target + pages[None, :], logits, mask=own[:, None] & live[None, :])
        logits = tl.where(live[None, :], logits, float("-inf"))
        highest = tl.max(logits, axis=1)
        weight = tl.sum(tl.exp2(logits - highest[:, None]), axis=1)
        part = parts + b.to(tl.int64) * parts_request + q_heads * parts_head + chunk * 2
        tl.store(part, highest, mask=own)
        tl.store(part + 1, weight, mask=own)


def score_pages(
    q: Tensor,
    *,
    bounds: Tensor,
    block_table: Tensor,
    block_size: int,
    counts: Tensor,
    tail_start: Tensor,
    scale: float,
    scores: Tensor,
    parts: Tensor,
) -> None:
    """Bound every competing page's logits, head by head, where a request has pages to choose from.

    Args:
        q: [B, H, D], one row a request.
        bounds: [pages, Hkv, 2, D] of the layer.
        block_table: [B, blocks] int32.
        block_size: tokens per block, a multiple of 16.
        counts: [B] int32 entries on chosen pages.
        tail_start: [B] int32 first token of the query's page.
        scale: factor on query-key products.
        scores: [B, H, P] float32, written: base-2 logits of the competing pages.
        parts: [B, H, P / 64, 2] float32, written: highest logit of 64 pages, and the sum of
            2^(logit - highest).
    """
    B, H, D = q.shape
    if B == 0:
        return
    heads = bounds.shape[1]
    programs = min(parts.shape[2], max(_FEWEST_PROGRAMS, _PROGRAMS // (B * heads)))
    _score_kernel[(programs, heads, B)](
        *(q, bounds, block_table, counts, tail_start, scores, parts, scale * _LOG2E),
        *(q.stride(0), q.stride(1), block_table.stride(0)),
        *(*scores.stride()[:2], *parts.stride()[:2]),
        BLOCK_PAGES=block_size // PAGE_SIZE,
        HEADS=heads,
        GROUP=H // heads,
        BLOCK_G=max(16, triton.next_power_of_2(H // heads)),
        HEAD_DIM=D,
        BLOCK_D=triton.next_power_of_2(D),
        BLOCK_P=SCORED_PAGES,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["table_row", "num_parts"])
def _select_kernel(
    scores,
    parts,
    norms,
    block_table,
    seq_lens,
    counts,
    tail_start,
    lists,
    table_row,
    scores_request,
    scores_head,
    parts_request,
    parts_head,
    lists_request,
    lists_head,
    block_units,
    token_units,
    head_units,
    VOTERS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LISTS: tl.constexpr,
    WITH_TAIL: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(seq_lens + b)
    if length <= 0:
        return
    tail = tl.load(tail_start + b)
    count = tl.load(counts + b)
    others = tail // _PAGE
    wanted = count // _PAGE
    pages = tl.arange(0, BLOCK)
    live = pages < others
    votes = tl.zeros([BLOCK], tl.float32)
    if (wanted > 0) & (wanted < others):
        # Every head's normaliser first: left in memory, it is a scalar to the loop below.
        part = tl.arange(0, BLOCK_C)[None, :]
        voter = tl.arange(0, BLOCK_V)
        own = norms + (b * LISTS + head) * VOTERS
        place = parts + b.to(tl.int64) * parts_request + part * 2
        place += (head * VOTERS + voter)[:, None] * parts_head
        is_part = (part < tl.cdiv(others, BLOCK_P)) & (voter < VOTERS)[:, None]
        highest = tl.load(place, mask=is_part, other=-1e30)
        weight = tl.load(place + 1, mask=is_part, other=0.0)
        top = tl.max(highest, axis=1)
        total = tl.sum(weight * tl.exp2(highest - top[:, None]), axis=1)
        norm = top + tl.log2(tl.where(voter < VOTERS, total, 1.0))
        tl.store(own + voter, norm, mask=voter < VOTERS)
        tl.debug_barrier()
        source = scores + b.to(tl.int64) * scores_request + head * VOTERS * scores_head + pages
        for i in range(VOTERS):
            logits = tl.load(source + i * scores_head, mask=live, other=float("-inf"))
            votes += tl.exp2(logits - tl.load(own + i))
    # Of floats that are not negative the bits rank as the values do; a mean of weights is below 2.
    keys = (votes / VOTERS).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    keys = tl.where(live, keys, -1)
    threshold = wanted * 0
    for bit in tl.static_range(30):
        higher = threshold + (0x20000000 >> bit)
        enough = tl.sum((keys >= higher).to(tl.int32), axis=0) >= wanted
        threshold = tl.where(enough, higher, threshold)
    above = tl.sum((keys > threshold).to(tl.int32), axis=0)
    keep, place = places(keys, threshold, wanted - above)
    keep = keep & live
    block = tl.load(block_table + b * table_row + pages // BLOCK_PAGES, mask=keep, other=0)
    unit = block * block_units + pages % BLOCK_PAGES * _PAGE * token_units + head * head_units
    target = lists + b.to(tl.int64) * lists_request + head * lists_head
    for token in tl.static_range(_PAGE):
        tl.store(target + place * _PAGE + token, unit + token * token_units, mask=keep)
    if WITH_TAIL:
        offsets = tl.arange(0, _PAGE)
        position = tail + offsets
        column = tail // (_PAGE * BLOCK_PAGES)
        block = tl.load(block_table + b * table_row + column)
        unit = block * block_units + position % (_PAGE * BLOCK_PAGES) * token_units
        unit += head * head_units
        tl.store(target + count + offsets, unit, mask=position < length)


def select_pages(
    *,
    scores: Tensor,
    parts: Tensor,
    norms: Tensor,
    block_table: Tensor,
    block_size: int,
    seq_lens: Tensor,
    counts: Tensor,
    tail_start: Tensor,
    units: Units,
    with_tail: bool,
    lists: Tensor,
) -> None:
    """Write the entries of each list's best pages, ascending; of equal ones the lowest.

    Args:
        scores: [B, H, P] of `score_pages`; P at most `MAX_PAGES`.
        parts: [B, H, P / 64, 2] likewise.
        norms: [B * H] float32, written: base-2 normalisers.
        block_table: [B, blocks] int32.
        block_size: tokens per block, a multiple of 16.
        seq_lens: [B] int32 tokens cached; 0 for padding, which is left alone.
        counts: [B] int32 entries on chosen pages, a multiple of 16.
        tail_start: [B] int32 first token of the query's page.
        units: what is written for an entry.
        with_tail: the query's page follows up to the last cached token.
        lists: [B, 1 or Hkv, width] int32, written.
    """
    B, H, P = scores.shape
    if B == 0:
        return
    heads, block = lists.shape[1], triton.next_power_of_2(P)
    _select_kernel[(B, heads)](
        *(scores, parts, norms, block_table, seq_lens, counts, tail_start, lists),
        *(block_table.stride(0), *scores.stride()[:2], *parts.stride()[:2], *lists.stride()[:2]),
        *(units.block, units.token, units.head),
        VOTERS=H // heads,
        BLOCK_V=triton.next_power_of_2(H // heads),
        LISTS=heads,
        WITH_TAIL=with_tail,
        BLOCK_PAGES=block_size // PAGE_SIZE,
        BLOCK_P=SCORED_PAGES,
        BLOCK_C=triton.next_power_of_2(parts.shape[2]),
        BLOCK=block,
        num_warps=min(max(block // 256, 2), 16),
    )
