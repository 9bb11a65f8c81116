"""The lists that draft steps read, as buffers of fixed size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vegas_runtime.policies.streaming_llm import KV_BLOCK_SIZE
from vegas_runtime.vllm_plugin.geometry import Limits
from vegas_runtime.vllm_plugin.methods import ListSource


@dataclass(frozen=True, kw_only=True)
class DraftLists:
    """What the draft steps of one iteration read.

    Attributes:
        entries: [layers or 1, B, 1 or Hkv, width] int32 units of the listed entries; one layer's
            worth where all layers read the same.
        counts: [B] int32 entries used of each list.
        tail_start: [B] int32 first token of the tail.
        pages: [B, n] int32 pages of 16 tokens, list and tail together, or None: entries are pages.
        used: [B * lists] int32 tokens that a page list holds at this draft step.
    """

    entries: Tensor
    counts: Tensor
    tail_start: Tensor
    pages: Tensor | None
    used: Tensor

    def first(self, batch: int) -> DraftLists:
        """The lists of the first `batch` requests."""
        per_request = self.used.shape[0] // self.counts.shape[0]
        return DraftLists(
            entries=self.entries[:, :batch],
            counts=self.counts[:batch],
            tail_start=self.tail_start[:batch],
            pages=None if self.pages is None else self.pages[:batch],
            used=self.used[: batch * per_request],
        )

    def of_layer(self, layer: int) -> Tensor:
        """[B, 1 or Hkv, width] entries of a layer."""
        return self.entries[layer if self.entries.shape[0] > 1 else 0]

    @property
    def num_bytes(self) -> int:
        """Memory held by all but the step's lengths."""
        tensors = (self.entries, self.used, self.pages)
        return sum(t.nbytes for t in tensors if t is not None)


def make_lists(
    source: ListSource,
    limits: Limits,
    device: torch.device,
    *,
    num_layers: int,
    heads: int,
    with_tail: bool,
    counts: Tensor,
    tail_start: Tensor,
) -> DraftLists:
    """Lists for the largest step.

    Args:
        source: what they are made from.
        limits: the largest step.
        device: where.
        num_layers: layers that draft sparsely.
        heads: lists per request and layer.
        with_tail: the tail follows in the list.
        counts: [B] int32 of the step's lengths.
        tail_start: likewise.
    """
    B = limits.max_batch
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    pages = None
    if source in ("scores", "query"):
        # A window, if switched to, rounds up to whole pages at both ends, after a page of sinks.
        room = max(limits.tail, 3 * KV_BLOCK_SIZE) if with_tail else 0
        width = max(limits.capacity + room, KV_BLOCK_SIZE)
        # What a query picks is read at once, so that every layer may write the same list.
        layers = 1 if source == "query" else num_layers
        entries = torch.zeros((layers, B, heads, width), **ints)
    else:
        most = limits.max_len if source == "everything" else limits.capacity
        pages = torch.zeros((B, 2 + -(-most // KV_BLOCK_SIZE)), **ints)
        entries = torch.zeros((1, B, 1, KV_BLOCK_SIZE), **ints)
    used = torch.zeros(B * heads, **ints)
    return DraftLists(entries=entries, counts=counts, tail_start=tail_start, pages=pages, used=used)
