"""Kernels of the draft loop's bookkeeping; `draft_steps` says what each is for."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["batch", "padded"])
def begin_kernel(
    request_ids_ptr,
    num_sampled_ptr,
    num_computed_ptr,
    num_blocks_ptr,
    first_ptr,
    limit_ptr,
    active_ptr,
    step_ptr,
    batch,
    padded,
    block_size,
    max_len,
    BLOCK: tl.constexpr,
):
    """Place every row at its first draft."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < padded
    is_request = row < batch
    request = tl.load(request_ids_ptr + row, mask=is_request, other=-1).to(tl.int32)
    sampled = tl.load(num_sampled_ptr + row, mask=is_request, other=0)
    is_active = (request >= 0) & (sampled > 0)
    computed = tl.load(num_computed_ptr + request, mask=is_active, other=0)
    blocks = tl.load(num_blocks_ptr + request, mask=is_active, other=0)
    tl.store(first_ptr + row, computed, mask=is_row)
    tl.store(limit_ptr + row, tl.minimum(blocks * block_size, max_len), mask=is_row)
    tl.store(active_ptr + row, tl.where(is_active, request, -1), mask=is_row)
    if tl.program_id(0) == 0:
        tl.store(step_ptr, 0)


@triton.jit(do_not_specialize=["batch"])
def advance_kernel(
    active_ptr,
    first_ptr,
    limit_ptr,
    step_ptr,
    last_sampled_ptr,
    drafts_ptr,
    drafts_stride,
    block_table_ptr,
    block_table_stride,
    input_ids_ptr,
    positions_ptr,
    seq_lens_ptr,
    slots_ptr,
    batch,
    block_size,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Feed each row the token before, at the next position."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < batch
    request = tl.load(active_ptr + row, mask=is_row, other=-1)
    is_active = request >= 0
    # One a lane: the interpreter cannot use a mask that is part scalar.
    step = tl.load(step_ptr + 0 * row)
    sampled = tl.load(last_sampled_ptr + request, mask=is_active & (step == 0), other=0)
    drafted = tl.load(
        drafts_ptr + row * drafts_stride + step - 1, mask=is_active & (step > 0), other=0
    )
    # A NaN in the logits may have produced any index; the embedding must not see it.
    token = tl.minimum(tl.maximum(tl.where(step == 0, sampled, drafted), 0), vocab_size - 1)
    wanted = tl.load(first_ptr + row, mask=is_row, other=0) + step
    limit = tl.load(limit_ptr + row, mask=is_row, other=0)
    position = tl.maximum(tl.minimum(wanted, limit - 1), 0)
    is_written = is_active & (wanted < limit)
    block = tl.load(
        block_table_ptr + row * block_table_stride + position // block_size,
        mask=is_written,
        other=0,
    ).to(tl.int64)
    slot = tl.where(is_written, block * block_size + position % block_size, -1)
    tl.store(input_ids_ptr + row, token.to(tl.int32), mask=is_row)
    tl.store(positions_ptr + row, position.to(tl.int64), mask=is_row)
    tl.store(seq_lens_ptr + row, tl.where(is_active, position + 1, 0), mask=is_row)
    tl.store(slots_ptr + row, slot, mask=is_row)


@triton.jit(do_not_specialize=["batch"])
def record_kernel(
    active_ptr,
    step_ptr,
    tokens_ptr,
    drafts_ptr,
    drafts_stride,
    counts_ptr,
    counts_stride,
    batch,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Store what each row drew, and count it for penalties."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < batch
    step = tl.load(step_ptr)
    token = tl.load(tokens_ptr + row, mask=is_row, other=0)
    tl.store(drafts_ptr + row * drafts_stride + step, token, mask=is_row)
    request = tl.load(active_ptr + row, mask=is_row, other=-1).to(tl.int64)
    is_counted = (request >= 0) & (token >= 0) & (token < vocab_size)
    count_ptr = counts_ptr + request * counts_stride + token
    count = tl.load(count_ptr, mask=is_counted, other=0)
    tl.store(count_ptr, count + 1, mask=is_counted)


@triton.jit(do_not_specialize=["batch", "num_drafts"])
def forget_kernel(
    active_ptr,
    drafts_ptr,
    drafts_stride,
    counts_ptr,
    counts_stride,
    batch,
    num_drafts,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Take the drafts out of the counts again."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < batch
    request = tl.load(active_ptr + row, mask=is_row, other=-1).to(tl.int64)
    for step in range(num_drafts):
        token = tl.load(drafts_ptr + row * drafts_stride + step, mask=is_row, other=-1)
        is_counted = (request >= 0) & (token >= 0) & (token < vocab_size)
        count_ptr = counts_ptr + request * counts_stride + token
        count = tl.load(count_ptr, mask=is_counted, other=0)
        tl.store(count_ptr, count - 1, mask=is_counted)
