"""Triton: verify rows set aside until acceptance is known, and what is read with them then.

`_keep_rows_kernel` runs in every verify pass of an engine that may want its rows later, and ends at
once while no method in force does. `_accepted_kernel` runs once per iteration, behind the accept
test. Limit of both: launches; what they move is a few megabytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from vegas_runtime.vllm_plugin.triton_steps import competing


@triton.jit
def _keep_rows_kernel(
    is_kept,
    q,
    lse,
    query_start,
    given_rows,
    kept_q,
    kept_lse,
    q_row,
    q_head,
    lse_row,
    lse_head,
    max_rows,
    HAS_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    if tl.load(is_kept) == 0:
        return
    b = tl.program_id(0)
    row = tl.program_id(1)
    end = tl.load(query_start + b + 1)
    span = end - tl.load(query_start + b)
    own = tl.minimum(tl.load(given_rows + b), span) if HAS_ROWS else span
    if row >= tl.minimum(own, max_rows):
        return
    source = (end - own + row).to(tl.int64)
    target = b.to(tl.int64) * max_rows + row
    place = tl.arange(0, BLOCK)
    live = place < HEADS * HEAD_DIM
    head = place // HEAD_DIM
    value = tl.load(q + source * q_row + head * q_head + place % HEAD_DIM, mask=live)
    tl.store(kept_q + target * HEADS * HEAD_DIM + place, value, mask=live)
    heads = tl.arange(0, BLOCK_H)
    norm = tl.load(lse + source * lse_row + heads * lse_head, mask=heads < HEADS)
    tl.store(kept_lse + target * HEADS + heads, norm, mask=heads < HEADS)


def keep_rows(
    q: Tensor,
    lse: Tensor,
    *,
    query_start: Tensor,
    rows: Tensor | None,
    is_kept: Tensor,
    kept_q: Tensor,
    kept_lse: Tensor,
) -> None:
    """Set the verify rows of each request aside.

    Args:
        q: [T, H, D], any row and head strides.
        lse: [T, H] float32 natural log, any strides.
        query_start: [B + 1] int32 first row of each request in q.
        rows: [B] int32 rows of each verify block, at the end of the request's range; None for
            every row.
        is_kept: [1] int32; 0 leaves everything alone.
        kept_q: [B, max rows, H, D] contiguous, written up to each request's rows.
        kept_lse: [B, max rows, H] float32 contiguous, likewise.
    """
    B, max_rows, H, D = kept_q.shape
    if B == 0:
        return
    _keep_rows_kernel[(B, max_rows)](
        *(is_kept, q, lse, query_start, query_start if rows is None else rows, kept_q, kept_lse),
        *(q.stride(0), q.stride(1), lse.stride(0), lse.stride(1), max_rows),
        HAS_ROWS=rows is not None,
        HEADS=H,
        HEAD_DIM=D,
        BLOCK=triton.next_power_of_2(H * D),
        BLOCK_H=triton.next_power_of_2(H),
        num_warps=4,
    )


@dataclass(frozen=True, kw_only=True)
class LateRule:
    """What a method that waits for acceptance reads off the rows kept for it.

    Attributes:
        rows: `last` sums row a alone (a drafts accepted), `accepted` rows 0..a, `all` every one.
        counts_tail: SparseSpec's budget, of the text committed now and with the tail in it, and
            its first drafts, which read everything; else DESIGN's rule (decision 2).
    """

    rows: str
    counts_tail: bool = False


@triton.jit
def _accepted_kernel(
    seq_lens,
    query_start,
    given_rows,
    num_sampled,
    budgets,
    request_ids,
    is_prompt,
    in_pages,
    has_drafted,
    ratio,
    min_tokens,
    ends,
    rows,
    candidates,
    counts,
    tail_start,
    max_rows,
    capacity,
    ROWS: tl.constexpr,
    COUNTS_TAIL: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    b = tl.program_id(0)
    span = tl.load(query_start + b + 1) - tl.load(query_start + b)
    own = tl.minimum(tl.load(given_rows + b), span) if HAS_ROWS else span
    length = tl.load(seq_lens + b)
    emitted = tl.load(num_sampled + b)
    own = tl.where((length > 0) & (emitted > 0), tl.minimum(own, length), 0)
    accepted = tl.minimum(emitted, own) - 1
    first = accepted if ROWS == "last" else 0
    last = own - 1 if ROWS == "all" else accepted
    scored = tl.where(own > 0, length - own + 1, 0)
    scored, count = competing(scored, tl.load(budgets + b), capacity, in_pages)
    if COUNTS_TAIL:
        request = tl.load(request_ids + b)
        is_request = (request >= 0) & (length > 0)
        before = tl.load(has_drafted + request, mask=is_request, other=0)
        known = tl.where(tl.load(is_prompt + b) != 0, 0, before)
        known = tl.where(own > 1, 1, known)
        tl.store(has_drafted + request, known, mask=is_request)
        committed = length - own + accepted + 1
        recent = accepted + 2
        scored = tl.where((own > 0) & (known > 0), tl.maximum(committed - recent, 0), 0)
        # Double precision, as the policy's Python counts.
        asked = tl.ceil(tl.load(ratio) * committed.to(tl.float64)).to(tl.int32)
        asked = tl.maximum(asked, tl.load(min_tokens))
        count = tl.minimum(tl.minimum(asked - recent, scored), capacity)
    tl.store(ends + b + 1, b * max_rows + last + 1)
    tl.store(rows + b, last - first + 1)
    tl.store(candidates + b, scored)
    tl.store(counts + b, tl.maximum(count, 0))
    tl.store(tail_start + b, scored)


def accepted_lengths(
    rule: LateRule,
    *,
    seq_lens: Tensor,
    query_start: Tensor,
    given_rows: Tensor | None,
    num_sampled: Tensor,
    budgets: Tensor,
    request_ids: Tensor,
    is_prompt: Tensor,
    in_pages: Tensor,
    has_drafted: Tensor,
    ratio: Tensor,
    min_tokens: Tensor,
    max_rows: int,
    capacity: int,
    ends: Tensor,
    rows: Tensor,
    candidates: Tensor,
    counts: Tensor,
    tail_start: Tensor,
) -> None:
    """Lengths of one iteration's selection, once it is known what was accepted.

    Args:
        rule: the method's.
        seq_lens: [B] int32 tokens cached by the verify pass, its own included; 0 for padding.
        query_start: [B + 1] int32 of that pass.
        given_rows: as `keep_rows`'s.
        num_sampled: [B] int32 tokens the request emitted; 0 for an incomplete prompt.
        budgets: [B] int32 entries to keep, where the rule does not say.
        request_ids: [B] int32 persistent request states, -1 for padding.
        is_prompt: [B] int32, not 0 where the pass computed prompt tokens of the request.
        in_pages: [1] int32, not 0 while whole pages of 16 tokens compete.
        has_drafted: [requests] int32 by request state, updated where the rule asks for it: 1 once
            a pass over drafts of the request has run.
        ratio: float64[1], fraction of entries kept.
        min_tokens: int32[1].
        max_rows: rows kept of a request.
        capacity: entries a list holds.
        ends: [B + 1] int32, written from 1 on: behind the last row that is summed, in rows kept.
        rows: [B] int32, written: rows that are summed.
        candidates: [B] int32, written: tokens that compete, 0 for who drafts nothing.
        counts: [B] int32, written: entries that will be kept.
        tail_start: [B] int32, written: first token behind the candidates.
    """
    if seq_lens.shape[0] == 0:
        return
    _accepted_kernel[(seq_lens.shape[0],)](
        *(seq_lens, query_start, query_start if given_rows is None else given_rows),
        *(num_sampled, budgets, request_ids, is_prompt, in_pages, has_drafted, ratio, min_tokens),
        *(ends, rows, candidates, counts, tail_start, max_rows, capacity),
        ROWS=rule.rows,
        COUNTS_TAIL=rule.counts_tail,
        HAS_ROWS=given_rows is not None,
        num_warps=1,
    )
