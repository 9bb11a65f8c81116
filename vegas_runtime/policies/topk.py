"""The largest scores as lists of positions: of single entries, and of whole pages.

What the methods share beyond `varlen_topk`: a budget of zero, and pages as the unit.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.kernels.reference import varlen_topk
from vegas_runtime.policies.base import KVSelection

PAGE_SIZE: Final = 16


def top_entries(scores: Tensor, candidates: Tensor, budget: Tensor) -> Tensor:
    """Positions of each request's highest scores; a request may keep nothing.

    Args:
        scores: [..., B, Hd, L] float32; NaN counts as lowest.
        candidates: [B] int64; entries from there on are ignored.
        budget: [B] int64, 0 <= budget <= candidates.

    Returns:
        [..., B, Hd, K] int64 positions, ascending, padded with -1, K at least 1; ties go to
        the lowest position.
    """
    shape = scores.shape[:-1]
    if scores.shape[-1] == 0:
        return torch.full((*shape, 1), -1, dtype=torch.int64, device=scores.device)
    counts = [count[:, None].expand(shape) for count in (candidates, budget)]
    positions = varlen_topk(scores, *(count.clamp(min=1) for count in counts))
    return positions.masked_fill(counts[1][..., None] == 0, -1)


def top_pages(scores: Tensor, candidates: Tensor, budget: Tensor) -> Tensor:
    """Positions of every token in each request's highest-scoring pages.

    Args:
        scores: [..., B, Hd, P] float32, one per page of `PAGE_SIZE` tokens.
        candidates: [B] int64, pages that may be picked, all of them full.
        budget: [B] int64, pages to pick, 0 <= budget <= candidates.

    Returns:
        [..., B, Hd, K] int64 positions, ascending, padded with -1.
    """
    pages = top_entries(scores, candidates, budget)[..., None]
    tokens = pages * PAGE_SIZE + torch.arange(PAGE_SIZE, device=pages.device)
    return torch.where(pages < 0, -1, tokens).flatten(-2)


def best_pages(scores: Tensor, lens: Tensor, config: SpeculationConfig) -> KVSelection:
    """The pages of highest mean score among those that candidates 0..L fill.

    Equal budget: floor(B / 16) pages, B being `SpeculationConfig.kv_budget`. Pages are read whole,
    so the page in which the tail starts belongs to the tail: up to 15 scored tokens that need not
    win a place.

    Args:
        scores: [..., B, Hd, L] float32.
        lens: [B] int64, L of each request.
        config: gives the budget.
    """
    full_pages = (lens + 1) // PAGE_SIZE
    budgets = [config.kv_budget(length) // PAGE_SIZE for length in lens.tolist()]
    num_pages = scores.shape[-1] // PAGE_SIZE
    shape = (*scores.shape[:-1], num_pages, PAGE_SIZE)
    pages = scores[..., : num_pages * PAGE_SIZE].reshape(shape)
    return KVSelection(
        positions=top_pages(
            pages.mean(dim=-1),
            full_pages,
            torch.tensor(budgets, device=lens.device).minimum(full_pages),
        ),
        tail_starts=full_pages * PAGE_SIZE,
    )
