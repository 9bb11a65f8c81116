"""Quest's state on a worker: bounds of every page of the KV cache, and each draft step's pages.

Bounds belong to physical pages, not to requests, so that shared, moved, preempted and reused blocks
need no care: whoever writes a page's last token has the page bounded (`triton_quest`), in prefill,
verification and drafting alike. While another method is in force nothing is bounded; switching to
Quest bounds the whole cache once.

Two entries a page of sixteen tokens: the bounds take a sixteenth of the KV cache's memory. They
are made with the cache, once its size is known; `geometry.cache_share` leaves room for them before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vegas_runtime.errors import ConfigError
from vegas_runtime.policies.topk import PAGE_SIZE
from vegas_runtime.vllm_plugin.draft_lists import DraftLists
from vegas_runtime.vllm_plugin.geometry import AttentionShape, Limits
from vegas_runtime.vllm_plugin.triton_quest import (
    MAX_PAGES,
    SCORED_PAGES,
    bound_every_page,
    bound_written,
    page_lengths,
    score_pages,
    select_pages,
)
from vegas_runtime.vllm_plugin.triton_select import Units


class QuestPages:
    """Bounds, and the scratch memory of one layer's selection.

    Args:
        shape: the layers that draft sparsely.
        limits: the largest step.
        device: where.
        is_in_force: int32[1] on the device; 0 leaves the bounds alone.
        ratio: float64[1] on the device, fraction of entries kept.
        min_tokens: int32[1] on the device.

    Raises:
        ConfigError: contexts of more pages than one selection can rank, or blocks that are no
            whole number of pages.
    """

    def __init__(
        self,
        shape: AttentionShape,
        limits: Limits,
        device: torch.device,
        *,
        is_in_force: Tensor,
        ratio: Tensor,
        min_tokens: Tensor,
    ) -> None:
        most = MAX_PAGES * PAGE_SIZE
        if limits.max_len > most:
            raise ConfigError(
                f"`algorithm` is 'quest' and contexts reach {limits.max_len} tokens; its selection "
                f"ranks at most {MAX_PAGES} pages, which is {most} tokens.",
                hint="Lower `max_model_len`, or use algorithm 'vegas'.",
            )
        if shape.block_size % PAGE_SIZE != 0:
            raise ConfigError(
                f"`algorithm` is 'quest' and KV blocks hold {shape.block_size} tokens; its pages "
                f"of {PAGE_SIZE} tokens do not fit into them.",
                hint=f"Set `--block-size` to a multiple of {PAGE_SIZE}.",
            )
        self._shape, self._capacity = shape, limits.capacity
        self._ratio, self._min_tokens = ratio, min_tokens
        self._expected = limits.max_rows - 1
        self._num_drafts = torch.full((1,), self._expected, dtype=torch.int32, device=device)
        parts = -(-limits.max_len // (PAGE_SIZE * SCORED_PAGES))
        size = (limits.max_batch, shape.num_heads, parts)
        self._scores = torch.zeros((*size[:2], parts * SCORED_PAGES), device=device)
        self._parts = torch.zeros((*size, 2), device=device)
        self._norms = torch.zeros(size[0] * size[1], device=device)
        self._is_in_force = is_in_force
        self._bounds: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Memory held, the bounds once there is a cache."""
        held = self._scores.nbytes + self._parts.nbytes + self._norms.nbytes
        return held + (0 if self._bounds is None else self._bounds.nbytes)

    def expect(self, num_drafts: int) -> None:
        """Size budgets for an iteration of so many drafted tokens, which captured steps read."""
        if num_drafts != self._expected:
            self._expected = num_drafts
            self._num_drafts.fill_(num_drafts)

    def bind(self, k: Tensor) -> None:
        """Make bounds for a new, empty cache.

        Args:
            k: [blocks, block size, Hkv, D] view of any layer's K.
        """
        blocks, block_size, heads, dim = k.shape
        pages = blocks * block_size // PAGE_SIZE
        self._bounds = None  # freed before the next ones are made
        self._bounds = k.new_zeros(self._shape.num_layers, pages, heads, 2, dim)

    @property
    def is_bound(self) -> bool:
        """Whether there is a cache yet."""
        return self._bounds is not None

    def bounds(self, layer: int) -> Tensor:
        """[pages, Hkv, 2, D] of a layer: minima, then maxima, in the dtype of the cache."""
        assert self._bounds is not None, "bind() comes before the first step"
        return self._bounds[layer]

    def written(self, layer: int, k: Tensor, slots: Tensor) -> None:
        """Follow tokens that were just written to a layer's cache.

        Args:
            layer: index among the layers that draft sparsely.
            k: [blocks, block size, Hkv, D] view of the layer's K.
            slots: [T] int64, negative for none.
        """
        if self.is_bound:
            bound_written(k, slots=slots, is_needed=self._is_in_force, bounds=self.bounds(layer))

    def rebuild(self, keys: Sequence[Tensor]) -> None:
        """Bound whatever the cache holds, for a method that nobody followed the cache for.

        Args:
            keys: [blocks, block size, Hkv, D] view of each layer's K.
        """
        for layer, k in enumerate(keys):
            bound_every_page(k, bounds=self.bounds(layer))

    def begin_draft(self, seq_lens: Tensor, lists: DraftLists) -> None:
        """Say how much each request reads, once per draft step.

        Args:
            seq_lens: [B] int32 tokens cached, the draft step's own included; 0 for padding.
            lists: of these requests; counts, tails and used lengths are written.
        """
        page_lengths(
            seq_lens=seq_lens,
            ratio=self._ratio,
            min_tokens=self._min_tokens,
            num_drafts=self._num_drafts,
            capacity=self._capacity,
            counts=lists.counts,
            tail_start=lists.tail_start,
            used=lists.used,
        )

    def select(
        self,
        layer: int,
        q: Tensor,
        *,
        block_table: Tensor,
        seq_lens: Tensor,
        units: Units,
        with_tail: bool,
        lists: DraftLists,
    ) -> None:
        """Pick a layer's pages for the draft step's queries, and list their entries.

        Args:
            layer: as in `written`.
            q: [B, H, D], one row a request.
            block_table: [B, blocks] int32.
            seq_lens: [B] int32, as in `begin_draft`.
            units: how entries are addressed.
            with_tail: the query's own page follows in the list.
            lists: as in `begin_draft`; the layer's entries are written.
        """
        B, block_size = q.shape[0], self._shape.block_size
        scores, parts = self._scores[:B], self._parts[:B]
        score_pages(
            q,
            bounds=self.bounds(layer),
            block_table=block_table,
            block_size=block_size,
            counts=lists.counts,
            tail_start=lists.tail_start,
            scale=self._shape.head_dim**-0.5,
            scores=scores,
            parts=parts,
        )
        select_pages(
            scores=scores,
            parts=parts,
            norms=self._norms,
            block_table=block_table,
            block_size=block_size,
            seq_lens=seq_lens,
            counts=lists.counts,
            tail_start=lists.tail_start,
            units=units,
            with_tail=with_tail,
            lists=lists.of_layer(layer),
        )
