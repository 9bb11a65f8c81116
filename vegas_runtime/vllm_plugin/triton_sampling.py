"""Kernels of the draft sampler; `draft_sampling` says what each is for.

A row is one request's; programs of a row take blocks of the vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax, spec_step_seed


@triton.jit
def scale_kernel(
    logits_ptr,
    logits_stride,
    scaled_ptr,
    maxima_ptr,
    requests_ptr,
    temperature_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    prompt_bits_ptr,
    prompt_bits_stride,
    counts_ptr,
    counts_stride,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
):
    """Penalties, then the temperature; the maximum of each block."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocab_size
    # Idle rows borrow the first request's parameters; nobody looks at what they draw.
    request = tl.maximum(tl.load(requests_ptr + row), 0).to(tl.int64)
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=is_token, other=float("-inf"))
    logits = logits.to(tl.float32)
    repetition = tl.load(repetition_ptr + request)
    frequency = tl.load(frequency_ptr + request)
    presence = tl.load(presence_ptr + request)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        count = tl.load(counts_ptr + request * counts_stride + token, mask=is_token, other=0)
        word = tl.load(
            prompt_bits_ptr + request * prompt_bits_stride + token // 32, mask=is_token, other=0
        )
        is_seen = (((word >> (token % 32)) & 1) != 0) | (count > 0)
        penalised = tl.where(logits > 0, logits / repetition, logits * repetition)
        logits = tl.where(is_seen, penalised, logits)
        logits -= frequency * count + presence * (count > 0).to(tl.float32)
    temperature = tl.load(temperature_ptr + request)
    logits = logits / tl.where(temperature == 0.0, 1.0, temperature)
    tl.store(scaled_ptr + row * vocab_size + token, logits, mask=is_token)
    best = tl.max(tl.where(is_token, logits, float("-inf")), axis=0)
    tl.store(maxima_ptr + row * num_blocks + tl.program_id(1), best)


@triton.jit
def _row_maximum(maxima_ptr, row, num_blocks, PADDED: tl.constexpr):
    block = tl.arange(0, PADDED)
    maxima = tl.load(
        maxima_ptr + row * num_blocks + block, mask=block < num_blocks, other=float("-inf")
    )
    return tl.max(maxima, axis=0)


@triton.jit
def count_kernel(
    scaled_ptr,
    maxima_ptr,
    histogram_ptr,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    BINS: tl.constexpr,
    BINS_PER_LOGIT: tl.constexpr,
):
    """Tokens of a block by distance from the likeliest of the row."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    best = _row_maximum(maxima_ptr, row, num_blocks, PADDED)
    logits = tl.load(
        scaled_ptr + row * vocab_size + token, mask=token < vocab_size, other=float("-inf")
    )
    # The last bin holds everything too far down to matter, and what a NaN left behind.
    distance = tl.maximum(tl.minimum((best - logits) * BINS_PER_LOGIT, BINS - 1.0), 0.0)
    counted = tl.histogram(distance.to(tl.int32), BINS)
    place = (row * num_blocks + tl.program_id(1)) * BINS
    tl.store(histogram_ptr + place + tl.arange(0, BINS), counted)


@triton.jit
def cut_kernel(
    histogram_ptr,
    requests_ptr,
    top_k_ptr,
    top_p_ptr,
    cut_ptr,
    num_blocks,
    vocab_size,
    BINS: tl.constexpr,
    BINS_PER_LOGIT: tl.constexpr,
):
    """How far below the likeliest token top-k and top-p keep others."""
    row = tl.program_id(0).to(tl.int64)
    request = tl.maximum(tl.load(requests_ptr + row), 0)
    bins = tl.arange(0, BINS)
    counted = tl.zeros((BINS,), tl.int32)
    for block in range(num_blocks):
        counted += tl.load(histogram_ptr + (row * num_blocks + block) * BINS + bins)
    top_k = tl.load(top_k_ptr + request)
    top_p = tl.load(top_p_ptr + request)
    # A bin is kept while what lies above it is still too few tokens, and too little mass of those
    # that top-k keeps. Mass is taken from the middle of each bin, but the likeliest token's is 1.
    before = tl.cumsum(counted, axis=0) - counted
    in_top_k = (before < top_k) & (bins < BINS - 1)
    middle = tl.exp(-(bins + 0.5) / BINS_PER_LOGIT)
    mass = tl.where(in_top_k, counted * middle + tl.where(bins == 0, 1.0 - middle, 0.0), 0.0)
    mass_before = tl.cumsum(mass, axis=0) - mass
    is_kept = in_top_k & (mass_before < top_p * tl.sum(mass, axis=0))
    num_kept = tl.sum(is_kept.to(tl.int32), axis=0)
    # With all bins in, so is what lies beyond them.
    is_all = (num_kept == BINS - 1) | ((top_k >= vocab_size) & (top_p >= 1.0))
    tl.store(cut_ptr + row, tl.where(is_all, float("inf"), num_kept / BINS_PER_LOGIT))


@triton.jit
def draw_kernel(
    scaled_ptr,
    maxima_ptr,
    cut_ptr,
    requests_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    step_ptr,
    q_ptr,
    q_stride_request,
    q_stride_step,
    best_value_ptr,
    best_token_ptr,
    vocab_size,
    num_blocks,
    FORBIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    USE_FP64: tl.constexpr,
):
    """Store q, add the noise, and find the best of a block."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocab_size
    owner = tl.load(requests_ptr + row).to(tl.int64)
    request = tl.maximum(owner, 0)
    temperature = tl.load(temperature_ptr + request)
    best = _row_maximum(maxima_ptr, row, num_blocks, PADDED)
    scaled = tl.load(scaled_ptr + row * vocab_size + token, mask=is_token, other=float("-inf"))
    is_kept = best - scaled < tl.load(cut_ptr + row)
    # What is stored is what is sampled: both sides divide this value by the temperature.
    logits = tl.where(is_kept, scaled * tl.where(temperature == 0.0, 1.0, temperature), FORBIDDEN)
    step = tl.load(step_ptr)
    q_ptr += request * q_stride_request + step * q_stride_step
    tl.store(q_ptr + token, logits, mask=is_token & (owner >= 0))
    value, index = gumbel_noised_argmax(
        tl.where(is_token, logits, float("-inf")),
        token,
        is_token,
        spec_step_seed(tl.load(seeds_ptr + request), step),
        tl.load(positions_ptr + row),
        temperature,
        IS_DRAFTING=True,
        USE_FP64=USE_FP64,
    )
    place = row * num_blocks + tl.program_id(1)
    tl.store(best_value_ptr + place, value)
    tl.store(best_token_ptr + place, tl.program_id(1) * BLOCK + index)


@triton.jit
def pick_kernel(best_value_ptr, best_token_ptr, tokens_ptr, num_blocks, PADDED: tl.constexpr):
    """The best of a row."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    is_block = block < num_blocks
    values = tl.load(best_value_ptr + row * num_blocks + block, mask=is_block, other=float("-inf"))
    winner = tl.minimum(tl.argmax(values, axis=0), num_blocks - 1)
    tl.store(tokens_ptr + row, tl.load(best_token_ptr + row * num_blocks + winner))
