"""What some policies need per lane beside the KV cache itself, kept up to date with it.

    PageBounds        elementwise bounds of the cached keys, page by page (Quest)
    PromptSelections  what was chosen once, after a request's prefill (SnapKV)

Lanes come, go and move with their requests; the owner (`decoding.py`) says when.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vegas_runtime.engine.kv_cache import KVCache, SavedPrefill
from vegas_runtime.policies import KVSelection, KVSelectionPolicy, SelectionInput


class PageBounds:
    """Minimum and maximum of the keys in each full page of each full-attention layer.

    The invariant: of lane b the first `_num_current[b]` pages agree with the cache. Rolling back
    is forgetting the pages from the first rewritten token on; extending computes what is full
    and not current. A page that drafts have filled is therefore bounded by the drafts' keys
    while they stand, and anew once a verify pass has replaced them.

    Args:
        cache: whose keys are bounded.
        page_size: tokens in a page.
    """

    def __init__(self, cache: KVCache, page_size: int) -> None:
        self.cache, self.page_size = cache, page_size
        num_pages = cache.capacity // page_size
        self._low: dict[int, Tensor] = {}
        for layer in cache.shape.full_layers:
            lanes, heads, _, dim = cache.keys[layer].shape
            self._low[layer] = cache.keys[layer].new_zeros(lanes, heads, num_pages, dim)
        self._high = {layer: torch.zeros_like(low) for layer, low in self._low.items()}
        self._num_current = [0] * cache.keys[0].shape[0]

    def forget(self, first_lane: int, lens: list[int]) -> None:
        """Say that lanes `first_lane` and up keep only their first `lens` tokens."""
        for lane, length in enumerate(lens, start=first_lane):
            self._num_current[lane] = min(self._num_current[lane], length // self.page_size)

    def extend(self, lens: list[int]) -> None:
        """Bound every page that the first `lens` tokens of each lane fill."""
        size = self.page_size
        for lane, length in enumerate(lens):
            start, stop = self._num_current[lane], length // size
            if start >= stop:
                continue
            for layer, low in self._low.items():
                keys = self.cache.keys[layer][lane, :, start * size : stop * size]
                pages = keys.view(keys.shape[0], stop - start, size, keys.shape[-1])
                low[lane, :, start:stop] = pages.amin(dim=2)
                self._high[layer][lane, :, start:stop] = pages.amax(dim=2)
            self._num_current[lane] = stop

    def of_layer(self, layer: int, num_lanes: int, num_pages: int) -> tuple[Tensor, Tensor]:
        """Minima and maxima [B, Hkv, P, D] of the first lanes' first pages."""
        low, high = self._low[layer], self._high[layer]
        return low[:num_lanes, :, :num_pages], high[:num_lanes, :, :num_pages]

    def move(self, source: int, target: int) -> None:
        """Copy one lane's bounds over another's."""
        count = self._num_current[source]
        for bounds in (*self._low.values(), *self._high.values()):
            bounds[target, :, :count] = bounds[source, :, :count]
        self._num_current[target] = count


class PromptSelections:
    """One selection per lane, held for the life of its request.

    Args:
        policy: declares `Needs.prompt_rows`.
        cache: holds the prompts.
    """

    def __init__(self, policy: KVSelectionPolicy, cache: KVCache) -> None:
        self.policy, self.cache = policy, cache
        num_layers, num_lanes = len(cache.shape.full_layers), cache.keys[0].shape[0]
        heads, device = cache.shape.num_kv_heads[0], cache.keys[0].device
        self._positions = torch.full((num_layers, num_lanes, heads, 1), -1, device=device)
        self._tail_starts = torch.zeros(num_lanes, dtype=torch.int64, device=device)

    def choose(self, lane: int, saved: SavedPrefill, last: Mapping[int, Tensor]) -> None:
        """Ask the policy about a prompt that is in the cache now, its last token included.

        Args:
            lane: where it is.
            saved: has the queries of the rows before the last.
            last: per full-attention layer, the last row's queries [H, 1, D].
        """
        length = len(saved.prompt)
        prefix = self._tail_starts.new_tensor([length - 1])
        for place, layer in enumerate(self.cache.shape.full_layers):
            earlier = [saved.queries[layer]] if layer in saved.queries else []
            rows = torch.cat([*earlier, last[layer]], dim=1)
            chosen = self.policy.select(
                SelectionInput(
                    prefix_lens=prefix,
                    committed_lens=prefix + 1,
                    current_lens=prefix + 1,
                    prompt_queries=rows[None, :, -self.policy.needs.prompt_rows :],
                    keys=self.cache.keys[layer][lane : lane + 1, :, :length],
                )
            )
            assert chosen is not None, "a selection that is held cannot be dense"
            self._put(place, lane, chosen)

    def _put(self, place: int, lane: int, chosen: KVSelection) -> None:
        width = chosen.positions.shape[-1]
        missing = width - self._positions.shape[-1]
        if missing > 0:
            self._positions = torch.nn.functional.pad(self._positions, (0, missing), value=-1)
        self._positions[place, lane] = -1
        self._positions[place, lane, :, :width] = chosen.positions[0]
        self._tail_starts[lane] = chosen.tail_starts[0]

    def of_lanes(self, num_lanes: int) -> KVSelection:
        """The first lanes' selections."""
        return KVSelection(
            positions=self._positions[:, :num_lanes], tail_starts=self._tail_starts[:num_lanes]
        )

    def move(self, source: int, target: int) -> None:
        """Copy one lane's selection over another's."""
        self._positions[:, target] = self._positions[:, source]
        self._tail_starts[target] = self._tail_starts[source]
