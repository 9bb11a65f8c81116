"""How many KV entries each request keeps, computed where its length is."""

from __future__ import annotations

import torch
from torch import Tensor

from vegas_runtime.errors import UsageError


def kv_budgets(
    candidates: Tensor,
    *,
    sparsity_ratio: Tensor | float,
    num_speculative_tokens: Tensor | int,
    min_tokens: Tensor | int,
) -> Tensor:
    """Every request's `SpeculationConfig.kv_budget`, to the entry.

    No synchronisation, so it can be captured in a CUDA graph; knobs given as tensors are read at
    each replay, numbers are fixed by the capture.

    Args:
        candidates: [B] int32 scored entries, L + 1; budgets of empty requests are 0.
        sparsity_ratio: fraction kept, in (0, 1]; a tensor must be float64, [1] or [B].
        num_speculative_tokens: tokens drafted per iteration; a tensor is [1] or [B], integer.
        min_tokens: floor of a budget; a tensor is [1] or [B], integer.

    Returns:
        [B] int32, at most `candidates`.

    Raises:
        UsageError: a ratio tensor that is not float64.
    """
    if isinstance(sparsity_ratio, Tensor) and sparsity_ratio.dtype != torch.float64:
        raise UsageError(
            f"`sparsity_ratio` is {sparsity_ratio.dtype}; rounded like that it can add an entry to "
            "a budget. float64 is needed."
        )
    asked = torch.ceil((candidates + num_speculative_tokens).double() * sparsity_ratio)
    return torch.minimum(asked.clamp(min=min_tokens), candidates).to(torch.int32)
