"""Each operation in plain PyTorch: runs anywhere, and is the oracle of every faster path."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Window:
    """Columns each query row may see, as half-open ranges.

    Attributes:
        low: [B, S] int64 first visible column, or None for 0.
        high: [B, S] int64 one past the last visible column.
        min_high: smallest entry of `high`; columns below it need no upper mask.
        num_columns: largest entry of `high`; columns from there on are never read.
    """

    low: Tensor | None
    high: Tensor
    min_high: int
    num_columns: int


@dataclass(frozen=True, kw_only=True)
class ScoreSpec:
    """Scores to read off an attention pass.

    Attributes:
        rows: query rows to collect, ascending.
        metric: `weight` for softmax weights (sinks in the denominator), `logit` for raw
            query-key products without the scale.
        per_kv_head: average over each KV head's group instead of over all query heads.
        reduce_rows: sum over the rows; otherwise they are kept apart.
    """

    rows: tuple[int, ...]
    metric: str
    per_kv_head: bool
    reduce_rows: bool


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: Window,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    score: ScoreSpec | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Grouped-query attention over padded keys, optionally yielding KV scores in the same pass.

    Args:
        query: [B, H, S, D].
        key: [B, Hkv, N, D], same dtype; finite beyond each row's window too.
        value: [B, Hkv, N, D].
        scale: factor on query-key products.
        window: columns each row sees.
        sinks: [H] logits that join the softmax denominator only (gpt-oss), or None.
        softcap: logits become softcap * tanh(logits / softcap), or None.
        score: what to collect, or None.

    Returns:
        Output [B, S, H, D] in the query's dtype, and the collected scores, float32:
        [B, 1 or Hkv, N] when rows are summed, else [B, R, 1 or Hkv, N]. Weights are zero
        outside a row's window; logits are undefined there.
    """
    B, H, S, D = query.shape
    Hkv, N = key.shape[1], window.num_columns
    G = H // Hkv
    key, value = key[:, :, :N], value[:, :, :N]
    scaled = _scaled_products(query.reshape(B, Hkv, G * S, D), key, scale).view(B, Hkv, G, S, N)
    collected = None
    if score is not None and score.metric == "logit":
        collected = _collect(scaled, score) / scale
    if softcap is not None:
        scaled = softcap * torch.tanh(scaled / softcap)
    _mask_outside(scaled, window)
    visible = None
    if sinks is not None:
        # A sink only lengthens the denominator: p' = p * sigmoid(logsumexp - sink).
        lse = torch.logsumexp(scaled, dim=-1, keepdim=True)
        visible = torch.sigmoid(lse - sinks.float().view(1, Hkv, G, 1, 1))
    # In place on a CPU, out of whose cache a second tensor of this size would push the first.
    weights = torch.softmax(scaled, dim=-1, out=scaled if scaled.device.type == "cpu" else None)
    if visible is not None:
        weights.mul_(visible)
    if score is not None and score.metric == "weight":
        collected = _collect(weights, score)
    output = torch.matmul(weights.view(B, Hkv, G * S, N).to(value.dtype), value)
    return output.view(B, H, S, D).transpose(1, 2), collected


def _scaled_products(packed: Tensor, key: Tensor, scale: float) -> Tensor:
    """Query-key products times `scale`, [B, Hkv, R, N] float32, contiguous.

    Every pass over this tensor costs as much as the product itself on a CPU. So a scale that is a
    power of two goes into the query, which is exact; and with few rows in bfloat16 the keys stand
    on the left, up to 2.5 times faster there (oneDNN, AVX-512 BF16, 3 to 32 rows), and the result
    is turned round in the same pass that widens it.
    """
    is_exact = math.frexp(scale)[0] == 0.5
    if is_exact:
        packed = packed * scale
    if key.device.type == "cpu" and key.dtype == torch.bfloat16 and packed.shape[-2] <= 32:
        turned = torch.matmul(key, packed.transpose(-1, -2))
        products = turned.new_empty((*packed.shape[:-1], key.shape[-2]), dtype=torch.float32).copy_(
            turned.transpose(-1, -2)
        )
    else:
        products = torch.matmul(packed, key.transpose(-1, -2)).float()
    return products if is_exact else products.mul_(scale)


def _mask_outside(scaled: Tensor, window: Window) -> None:
    """Set logits [B, Hkv, G, S, N] outside each row's window to minus infinity, in place."""
    N, device = scaled.shape[-1], scaled.device
    if window.min_high < N:
        columns = torch.arange(window.min_high, N, device=device)
        hidden = columns >= window.high[:, :, None]
        scaled[..., window.min_high :].masked_fill_(hidden[:, None, None], float("-inf"))
    if window.low is not None:
        columns = torch.arange(N, device=device)
        hidden = columns < window.low[:, :, None]
        scaled.masked_fill_(hidden[:, None, None], float("-inf"))


def _collect(values: Tensor, score: ScoreSpec) -> Tensor:
    """Reduce [B, Hkv, G, S, N] to the asked rows and heads, float32."""
    picked = values[:, :, :, list(score.rows)].float()
    heads = picked.mean(dim=2)
    if not score.per_kv_head:
        heads = heads.mean(dim=1, keepdim=True)
    return heads.sum(dim=2) if score.reduce_rows else heads.transpose(1, 2)


def varlen_topk(scores: Tensor, context_lens: Tensor, kv_budget: Tensor) -> Tensor:
    """Pick each request's highest-scoring KV entries.

    Args:
        scores: [..., L] float32; higher is kept; NaN counts as lowest. Entries at or beyond
            `context_lens` are ignored.
        context_lens: [...] int64, valid entries per row, at least 1.
        kv_budget: [...] int64, 1 <= kv_budget <= context_lens.

    Returns:
        [..., max(kv_budget)] int64 positions, ascending, padded with -1; ties go to the lowest
        position.
    """
    length = scores.shape[-1]
    columns = torch.arange(length, device=scores.device)
    valid = columns < context_lens[..., None]
    ranked = torch.where(valid & ~scores.isnan(), scores, -torch.inf)
    width = int(kv_budget.max())
    # Everything above the k-th value is kept; equals fill up from the left. A stable sort
    # would say the same, and takes several times longer.
    threshold = ranked.topk(width, dim=-1).values.gather(-1, kv_budget[..., None] - 1)
    above = ranked > threshold
    equal = (ranked == threshold) & valid
    missing = kv_budget[..., None] - above.sum(-1, keepdim=True)
    keep = above | (equal & (equal.cumsum(-1) <= missing))
    flat = keep.reshape(-1, length)
    positions = torch.full((flat.shape[0], width), -1, dtype=torch.int64, device=scores.device)
    row, column = flat.nonzero(as_tuple=True)
    place = flat.cumsum(-1)[row, column] - 1
    positions[row, place] = column
    return positions.view(*keep.shape[:-1], width)
