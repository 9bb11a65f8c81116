"""What sizes the plugin's buffers: the attention layers' shape, and the largest step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from vegas_runtime.policies.topk import PAGE_SIZE


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The full-attention layers of a model, all alike, as one worker holds them.

    Attributes:
        num_layers: layers that draft sparsely.
        num_heads: H, query heads.
        num_kv_heads: Hkv.
        head_dim: D.
        dtype: of queries and cache.
        block_size: tokens per KV block.
        scale: factor on query-key products.
        sinks: whether layers have attention sinks.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    scale: float
    sinks: bool = False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest step.

    Attributes:
        max_batch: requests, padding included.
        max_len: tokens of a request, those drafted at its end included.
        max_rows: rows of a verify block: largest num_speculative_tokens + 1.
        max_ratio: largest fraction of KV entries kept that may be set.
        min_tokens: largest floor of the budget that may be set.
        max_requests: persistent request states; the largest id is below it.
    """

    max_batch: int
    max_len: int
    max_rows: int
    max_ratio: float
    min_tokens: int
    max_requests: int = 0

    @property
    def capacity(self) -> int:
        """Entries that a list must hold, tail not counted."""
        asked = max(math.ceil(self.max_ratio * self.max_len), self.min_tokens)
        return min(asked, self.max_len)

    @property
    def padded_len(self) -> int:
        """Tokens of a score row: whole units of 64, as kernels write them."""
        return -(-self.max_len // 64) * 64

    @property
    def tail(self) -> int:
        """Tokens that can follow the candidates while drafting: accepted ones and new drafts.

        Before them a page that candidates do not fill, where whole pages compete.
        """
        return PAGE_SIZE - 1 + 2 * (self.max_rows - 1)


def cache_share(available_bytes: int) -> int:
    """What of the memory for the KV cache is left for it when Quest's bounds come out of it too.

    Args:
        available_bytes: memory for both.
    """
    return available_bytes * PAGE_SIZE // (PAGE_SIZE + 1)


def with_bounds(cache_bytes: int) -> int:
    """The least memory of which `cache_share` is as much.

    Args:
        cache_bytes: size of the KV cache.
    """
    return -(-cache_bytes * (PAGE_SIZE + 1) // PAGE_SIZE)
