"""The kernels' operations over a paged KV cache, in plain PyTorch: the oracle of csrc/.

Written for reading, not for speed: one request at a time. Every function computes in the dtype it
is given, so that tests can ask for float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# A score code is an unsigned float: 5 exponent bits, 3 mantissa bits (csrc/include/schedule.h).
_CODE_SHIFT = 20
_CODE_OFFSET = 127 * 8 - 192
_FORCED_KEY = 1 << 20
_LOG2E = 1.4426950408889634
UNIT = 64


def encode_scores(weights: Tensor) -> Tensor:
    """Weights as one-byte codes: 192 is 1.0, 255 is 240, steps are 1/8 of a power of two.

    Args:
        weights: float32; NaN and what is not positive become 0.

    Returns:
        uint8, same shape.
    """
    bits = weights.float().nan_to_num(nan=0.0, posinf=3e38, neginf=0.0).clamp(min=0.0)
    codes = ((bits.view(torch.int32) + (1 << 19)) >> _CODE_SHIFT) - _CODE_OFFSET
    return codes.clamp(0, 255).to(torch.uint8)


def decode_scores(codes: Tensor) -> Tensor:
    """The float32 weights that uint8 codes stand for."""
    return ((codes.to(torch.int32) + _CODE_OFFSET) << _CODE_SHIFT).view(torch.float32)


def packed_queries(queries: int) -> list[int]:
    """Order of a request's queries in the packed rows: first, last, then the rest."""
    return list(range(queries)) if queries <= 2 else [0, queries - 1, *range(1, queries - 1)]


def gather_tokens(cache: Tensor, block_table: Tensor, count: int) -> Tensor:
    """The first `count` tokens of a request.

    Args:
        cache: [blocks, block size, Hkv, D] view, any strides.
        block_table: [blocks of the request] physical blocks.
        count: tokens.

    Returns:
        [count, Hkv, D].
    """
    used = block_table[: math.ceil(count / cache.shape[1])].long()
    return cache[used].flatten(0, 1)[:count]


def gather_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """Tokens by slot: [n] or [n, Hkv] slots give [n, Hkv, D]."""
    size, heads = cache.shape[1], cache.shape[2]
    slots = slots.long()
    if slots.dim() == 1:
        return cache[slots // size, slots % size]
    return cache[slots // size, slots % size, torch.arange(heads, device=cache.device)]


@dataclass(frozen=True, kw_only=True)
class RequestAttention:
    """One request's attention.

    Attributes:
        out: [S, H, D].
        lse: [S, H] natural log, sink included; -inf where a row sees nothing.
        logits: [S, H, N] scaled, -inf where hidden.
    """

    out: Tensor
    lse: Tensor
    logits: Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, scale: float, sinks: Tensor | None
) -> RequestAttention:
    """Softmax attention of one request.

    Args:
        q: [S, H, D].
        k: [N, Hkv, D].
        v: [N, Hkv, D].
        visible: [S, N] bool.
        scale: factor on query-key products.
        sinks: [H] logits of the denominator only, or None.
    """
    S, H, D = q.shape
    N, Hkv = k.shape[:2]
    grouped = q.view(S, Hkv, H // Hkv, D)
    logits = torch.einsum("shgd,nhd->shgn", grouped, k).reshape(S, H, N) * scale
    logits = logits.masked_fill(~visible[:, None], -math.inf)
    with_sink = logits
    if sinks is not None:
        column = sinks.to(logits.dtype)[None, :, None].expand(S, H, 1)
        with_sink = torch.cat((logits, column), dim=-1)
    elif N == 0:
        with_sink = logits.new_full((S, H, 1), -math.inf)
    lse = torch.logsumexp(with_sink, dim=-1)
    weights = torch.exp(logits - lse[..., None]).nan_to_num(nan=0.0)
    out = torch.einsum("shgn,nhd->shgd", weights.view(S, Hkv, H // Hkv, N), v)
    return RequestAttention(out=out.reshape(S, H, D), lse=lse, logits=logits)


def verify_request(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, sinks: Tensor | None
) -> RequestAttention:
    """Causal attention of a request's newest S tokens over its N cached ones.

    Args:
        q: [S, H, D]; row i stands at position N - S + i.
        k: [N, Hkv, D].
        v: [N, Hkv, D].
        scale: factor on query-key products.
        window: tokens a row sees, itself included; 0 for all.
        sinks: [H] or None.
    """
    S, N = q.shape[0], k.shape[0]
    columns = torch.arange(N, device=q.device)
    high = N - S + 1 + torch.arange(S, device=q.device)[:, None]
    visible = columns < high
    if window > 0:
        visible &= columns >= high - window
    return attend(q, k, v, visible, scale=scale, sinks=sinks)


def hint_scores(logits: Tensor, hint: Tensor, rows: list[int], num_kv_heads: int) -> Tensor:
    """Weights against a known normaliser, summed over rows and the heads of a KV group.

    Args:
        logits: [S, H, N].
        hint: [H] natural-log normalisers.
        rows: queries to sum; none gives zeros.
        num_kv_heads: Hkv.

    Returns:
        [Hkv, N].
    """
    weights = torch.exp((logits[rows] - hint[:, None]).clamp(max=83.0)).nan_to_num(nan=0.0)
    group = logits.shape[1] // num_kv_heads
    return weights.view(len(rows), num_kv_heads, group, logits.shape[-1]).sum(dim=(0, 2))


def octaves(lse: Tensor) -> Tensor:
    """What exact codes are relative to: natural-log normalisers as whole powers of two."""
    return torch.round(lse.float() * _LOG2E)


def exact_positions(device: torch.device) -> Tensor:
    """[64] int64 where exact scores of a unit keep token t (csrc/include/schedule.h)."""
    t = torch.arange(UNIT, device=device)
    return (t >> 1 & 3) * 16 + (t >> 4) * 4 + (t >> 3 & 1) * 2 + (t & 1)


def exact_scores(logits: Tensor, reference: Tensor, num_kv_heads: int) -> Tensor:
    """Codes of the first and last query's weights relative to a reference normaliser.

    Args:
        logits: [S, H, N].
        reference: [H] natural-log normalisers near the true ones (codes saturate at 240 times),
            rounded to whole octaves.
        num_kv_heads: Hkv.

    Returns:
        [Hkv, ceil(N / 64), 2 G, 64] uint8: first query's heads, then the last query's; tokens of a
        unit in the order of `exact_positions`.
    """
    S, H, N = logits.shape
    group, units = H // num_kv_heads, -(-N // UNIT)
    rows = packed_queries(S)[:2]
    octave = octaves(reference)[:, None].to(logits.dtype)
    weights = torch.exp2((logits[rows] * _LOG2E - octave).clamp(max=120.0))
    codes = encode_scores(weights).view(len(rows), num_kv_heads, group, N)
    padded = codes.new_zeros(2, num_kv_heads, group, units * UNIT)
    padded[: len(rows), ..., :N] = codes
    tokens = padded.view(2, num_kv_heads, group, units, UNIT).permute(1, 3, 0, 2, 4)
    stored = torch.empty_like(tokens)
    stored[..., exact_positions(logits.device)] = tokens
    return stored.reshape(num_kv_heads, units, 2 * group, UNIT)


def selection_keys(
    score: Tensor,
    *,
    per_head: bool,
    reference: Tensor | None = None,
    lse: Tensor | None = None,
    queries: Tensor | None = None,
) -> Tensor:
    """What entries are ranked by: the leading 16 bits of the float32 score, as integers.

    Args:
        score: [R, B, Hkv, N] uint8 codes or bfloat16, or [R, B, Hkv, N / 64, W, 64] exact codes.
        per_head: keep the KV heads apart.
        reference: exact: [R, B, H] what the codes are relative to.
        lse: exact: [R, B, 2, H] true normalisers of the first and last query.
        queries: exact: [B] rows of each request.

    Returns:
        [R, B, 1 or Hkv, N] int64.
    """
    weights = score.float() if score.dtype == torch.bfloat16 else decode_scores(score)
    if score.dim() == 6:
        assert reference is not None
        assert lse is not None
        assert queries is not None
        weights = _apply_lse(weights, reference, lse, queries)
    if not per_head:
        # One addition after the other, as the kernel does: the order decides the last bit.
        total = torch.zeros_like(weights[:, :, 0])
        for head in range(weights.shape[2]):
            total = total + weights[:, :, head]
        weights = total[:, :, None]
    return (weights.contiguous().view(torch.int32) >> 16).long()


def _apply_lse(stored: Tensor, reference: Tensor, lse: Tensor, queries: Tensor) -> Tensor:
    """Sum exact weights [R, B, Hkv, units, W, 64] over rows, each with 2^(reference - lse)."""
    R, B, Hkv, _, W, _ = stored.shape
    weights = stored[..., exact_positions(stored.device)].transpose(-1, -2).flatten(3, 4)
    factor = torch.exp2(octaves(reference)[:, :, None] - _LOG2E * lse)  # [R, B, 2, H]
    real = torch.arange(2, device=lse.device) < queries.clamp(max=2)[:, None]
    factor = torch.where(real[None, :, :, None], factor, 0.0)
    factors = factor.view(R, B, 2, Hkv, W // 2).permute(0, 1, 3, 2, 4).flatten(3)
    total = torch.zeros_like(weights[..., 0])
    for row in range(W):
        total = total + weights[..., row] * factors[:, :, :, None, row]
    return total


def pick_row(keys: Tensor, budget: int, *, sinks: int, recent: int) -> Tensor:
    """The `budget` best of one row's candidates.

    Args:
        keys: [n] integers, one per candidate; higher is kept, lowest position wins ties.
        budget: entries kept, forced ones included.
        sinks: first entries kept in any case.
        recent: last entries kept in any case.

    Returns:
        [budget] int64 positions, ascending.
    """
    keys = keys.clone()
    keys[:sinks] = _FORCED_KEY
    if recent > 0:
        keys[-recent:] = _FORCED_KEY
    order = torch.sort(keys, descending=True, stable=True).indices
    return order[:budget].sort().values
