"""A draft step's attention: one row a request over its selected entries and the unscored tail.

    kernel    `ops.sparse_attention`: list and tail apart, one launch
    fa3       FlashAttention-3 on a view of the cache with pages of one entry; list and tail are one
              page list, written once per iteration, and only its used length moves
    triton    gather in Triton: any GPU from sm_80 on

All three read the same lists. FlashAttention-3 has no head axis in its page table, so a list per
KV head makes every (request, KV head) a request of its own with one KV head.
"""

from __future__ import annotations

import math
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from vegas_runtime.errors import ConfigError
from vegas_runtime.kernels import ops
from vegas_runtime.policies.streaming_llm import KV_BLOCK_SIZE
from vegas_runtime.vllm_plugin.draft_lists import DraftLists
from vegas_runtime.vllm_plugin.geometry import AttentionShape, Limits
from vegas_runtime.vllm_plugin.triton_attention import ListedEntries, TritonAttention
from vegas_runtime.vllm_plugin.triton_select import Units

# Splits that FlashAttention-3 may make in a captured graph, as vLLM's own default.
GRAPH_SPLITS: Final = 32


class DraftPath(Protocol):
    """One way to run a draft step's attention.

    Attributes:
        with_tail: lists hold the tail too; else it is read through the block table.
        num_bytes: memory held.
    """

    with_tail: bool
    num_bytes: int

    def units(self, k: Tensor, *, per_head: bool) -> Units:
        """How lists must address entries of a cache with the strides of `k`."""

    def begin(self, lists: DraftLists, seq_lens: Tensor) -> None:
        """Once per draft step, before the first layer and after its lengths are known."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        entries: Tensor,
        lists: DraftLists,
        block_table: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        lse: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """Attention of one layer: q [B, H, D] into out [B, H, D]; lse [B, H] where it is known."""


class KernelDraft:
    """The compiled kernel."""

    with_tail = False

    def __init__(self, shape: AttentionShape, limits: Limits, device: torch.device) -> None:
        self._scale = shape.scale
        self._prefix = torch.zeros(limits.max_batch + 1, dtype=torch.int32, device=device)
        self._workspace = ops.make_workspace(
            device,
            batch=limits.max_batch,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
        )
        self.num_bytes = (
            self._workspace.partials.nbytes + self._workspace.counters.nbytes + self._prefix.nbytes
        )

    def units(self, k: Tensor, *, per_head: bool) -> Units:
        """Slots; a list per head needs no more."""
        return Units(block=k.shape[1])

    def begin(self, lists: DraftLists, seq_lens: Tensor) -> None:
        """Count the work of each request."""
        ops.build_schedule(
            seq_lens,
            self._prefix[: seq_lens.shape[0] + 1],
            counts=lists.counts,
            tail_start=lists.tail_start,
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        entries: Tensor,
        lists: DraftLists,
        block_table: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        lse: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """See `DraftPath.attend`; writes `lse`."""
        ops.sparse_attention(
            q,
            k,
            v,
            slots=entries,
            counts=lists.counts,
            block_table=block_table,
            tail_start=lists.tail_start,
            seq_lens=seq_lens,
            prefix=self._prefix[: seq_lens.shape[0] + 1],
            scale=self._scale,
            out=out,
            lse=lse,
            workspace=self._workspace,
            sinks=sinks,
        )


class FlashDraft:
    """FlashAttention-3 over pages of one entry, or of 16 tokens where lists are made of those.

    Args:
        shape: the layers.
        limits: the largest step.
        device: where.
        attend: vLLM's `flash_attn_varlen_func`.
        num_splits: most splits of a request's entries; 1 makes the order of sums its own.
    """

    with_tail = True

    def __init__(
        self,
        shape: AttentionShape,
        limits: Limits,
        device: torch.device,
        *,
        attend: Any,
        num_splits: int = GRAPH_SPLITS,
    ) -> None:
        self._scale = shape.scale
        self._attend = attend
        self._num_splits = num_splits
        starts = limits.max_batch * shape.num_kv_heads + 1
        self._starts = torch.arange(starts, dtype=torch.int32, device=device)
        self.num_bytes = self._starts.nbytes

    def units(self, k: Tensor, *, per_head: bool) -> Units:
        """Pages of `entry_pages`.

        Raises:
            ConfigError: blocks of this cache are no whole number of tokens apart.
        """
        unit = _page_stride(k, per_head=per_head)
        block, token, head = (k.stride(i) for i in range(3))
        if block % unit != 0:
            raise ConfigError(
                f"KV blocks lie {block} elements apart and tokens {token}; FlashAttention-3 can "
                "read single entries only where the first is a multiple of the second.",
                hint="Set `sparse_attn_draft_attention` to 'triton'.",
            )
        return Units(block=block // unit, token=token // unit, head=head // unit if per_head else 0)

    def begin(self, lists: DraftLists, seq_lens: Tensor) -> None:
        """Nothing: only used lengths move, and they are there."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        entries: Tensor,
        lists: DraftLists,
        block_table: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        lse: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """See `DraftPath.attend`; `lse` is left alone."""
        B, H, D = q.shape
        if lists.pages is not None:
            pages, keys, values = lists.pages, token_pages(k), token_pages(v)
        else:
            per_head = entries.shape[1] > 1
            keys, values = entry_pages(k, per_head=per_head), entry_pages(v, per_head=per_head)
            pages = entries.reshape(-1, entries.shape[-1])
        rows = lists.used.shape[0]
        per_row = (rows, H * B // rows, D)
        self._attend(
            q=q.reshape(per_row),
            k=keys,
            v=values,
            out=out.view(per_row),
            cu_seqlens_q=self._starts[: rows + 1],
            max_seqlen_q=1,
            seqused_k=lists.used,
            max_seqlen_k=pages.shape[1] * keys.shape[1],
            softmax_scale=self._scale,
            causal=True,
            block_table=pages,
            num_splits=self._num_splits,
            s_aux=None if sinks is None else sinks.bfloat16(),
            fa_version=3,
        )


class TritonDraft:
    """The portable gather."""

    with_tail = False

    def __init__(self, shape: AttentionShape, limits: Limits, device: torch.device) -> None:
        self._scale = shape.scale
        self._starts = torch.arange(limits.max_batch + 1, dtype=torch.int32, device=device)
        self._triton = TritonAttention(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_batch=limits.max_batch,
            max_rows=1,
            units=multiprocessors(device),
            device=device,
        )
        self.num_bytes = self._triton.num_bytes + self._starts.nbytes

    def units(self, k: Tensor, *, per_head: bool) -> Units:
        """Slots; a list per head needs no more."""
        return Units(block=k.shape[1])

    def begin(self, lists: DraftLists, seq_lens: Tensor) -> None:
        """Nothing: the kernel reads list and tail lengths itself."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        entries: Tensor,
        lists: DraftLists,
        block_table: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        lse: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """See `DraftPath.attend`; writes `lse`."""
        self._triton.attend(
            q,
            k,
            v,
            block_table=block_table,
            seq_lens=seq_lens,
            query_start=self._starts[: seq_lens.shape[0] + 1],
            max_queries=1,
            scale=self._scale,
            out=out,
            lse=lse,
            sinks=sinks,
            listed=ListedEntries(slots=entries, counts=lists.counts, tail_start=lists.tail_start),
        )


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere, where kernels are interpreted."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _page_stride(cache: Tensor, *, per_head: bool) -> int:
    """Elements from one page of a single entry to the next."""
    if not per_head:
        return cache.stride(1)
    return math.gcd(*(cache.stride(i) for i in range(3)))


def entry_pages(cache: Tensor, *, per_head: bool) -> Tensor:
    """A view with pages of one entry; page numbers are `FlashDraft.units`.

    Args:
        cache: [blocks, block size, Hkv, D] view of K or V.
        per_head: a page is one KV head of one token.

    Returns:
        [pages, 1, Hkv or 1, D].
    """
    blocks, block_size, heads, dim = cache.shape
    page = _page_stride(cache, per_head=per_head)
    block, token, head = (cache.stride(i) for i in range(3))
    if per_head:
        span = (blocks - 1) * block + (block_size - 1) * token + (heads - 1) * head
        size, strides = (span // page + 1, 1, 1, dim), (page, page, page, 1)
    else:
        size = ((blocks - 1) * (block // page) + block_size, 1, heads, dim)
        strides = (page, page, head, 1)
    return cache.as_strided(size, strides, cache.storage_offset())


def token_pages(cache: Tensor) -> Tensor:
    """A view with pages of 16 tokens, `block_pages` of which lie between blocks.

    Args:
        cache: [blocks, block size, Hkv, D] view of K or V.

    Returns:
        [pages, 16, Hkv, D].
    """
    blocks, block_size, heads, dim = cache.shape
    page = KV_BLOCK_SIZE * cache.stride(1)
    size = (blocks - 1) * block_pages(cache) + block_size // KV_BLOCK_SIZE
    return cache.as_strided(
        (size, KV_BLOCK_SIZE, heads, dim),
        (page, cache.stride(1), cache.stride(2), 1),
        cache.storage_offset(),
    )


def block_pages(cache: Tensor) -> int:
    """Page numbers of `token_pages` from one block to the next.

    Raises:
        ConfigError: blocks of this cache are no whole number of pages apart.
    """
    page = KV_BLOCK_SIZE * cache.stride(1)
    if cache.stride(0) % page != 0 or cache.shape[1] % KV_BLOCK_SIZE != 0:
        raise ConfigError(
            f"KV blocks of {cache.shape[1]} tokens lie {cache.stride(0)} elements apart and tokens "
            f"{cache.stride(1)}; pages of {KV_BLOCK_SIZE} tokens do not fit between them.",
            hint="Set `sparse_attn_draft_attention` to 'triton'.",
        )
    return cache.stride(0) // page
