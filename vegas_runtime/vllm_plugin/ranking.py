"""One score byte per candidate, and the lists of the entries with the highest ones.

Codes of all layers are kept where they fit in `_CODES_SHARE` of the device's memory: thirty small
selections cost three launches each, one large one costs three in all. Where they do not fit, each
layer selects at once.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from vegas_runtime.vllm_plugin.geometry import AttentionShape, Limits
from vegas_runtime.vllm_plugin.triton_select import Selector, Units
from vegas_runtime.vllm_plugin.verification import StepLengths

_CODES_SHARE: Final = 0.02


class Ranking:
    """Codes of a step's candidates and their selection.

    Args:
        shape: the layers.
        limits: the largest step.
        heads: lists per request and layer.
        in_pages: [1] int32 on the device, not 0 while whole pages compete.
        device: where.

    Attributes:
        codes: [layers or 1, B, heads, n] uint8.
    """

    def __init__(
        self,
        shape: AttentionShape,
        limits: Limits,
        *,
        heads: int,
        in_pages: Tensor,
        device: torch.device,
    ) -> None:
        self._block_size = shape.block_size
        layers, B = shape.num_layers, limits.max_batch
        if layers * B * heads * limits.padded_len > _CODES_SHARE * _device_bytes(device):
            layers = 1
        self._is_whole = layers == shape.num_layers
        size = (layers, B, heads, limits.padded_len)
        self.codes = torch.zeros(size, dtype=torch.uint8, device=device)
        self._selector = Selector(
            rows=layers * B * heads, max_len=limits.max_len, in_pages=in_pages, device=device
        )

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self.codes.nbytes + self._selector.num_bytes

    def of_layer(self, layer: int, first: int, batch: int) -> Tensor:
        """[batch, heads, n] codes of a layer's requests, or the only layer's where one is kept."""
        return self.codes[layer if self.codes.shape[0] > 1 else 0, first : first + batch]

    def after_layer(
        self,
        layer: int,
        *,
        lengths: StepLengths,
        block_table: Tensor,
        units: Units,
        lists: Tensor,
        first: int,
    ) -> None:
        """Select for one layer where codes of several are not kept.

        Args:
            layer: the layer scored last.
            lengths: of these requests.
            block_table: [B, blocks] int32 of these requests.
            units: how list entries are addressed.
            lists: [layers, B, heads, width] int32 of all requests, written.
            first: index of the first of these requests.
        """
        if not self._is_whole:
            self._select(slice(layer, layer + 1), lengths, block_table, units, lists, first=first)

    def after_all(
        self,
        *,
        lengths: StepLengths,
        block_table: Tensor,
        units: Units,
        lists: Tensor,
    ) -> None:
        """Select for every layer, after the last one, unless each has; as `after_layer`."""
        if self._is_whole:
            self._select(slice(None), lengths, block_table, units, lists, first=0)

    def _select(
        self,
        layers: slice,
        lengths: StepLengths,
        block_table: Tensor,
        units: Units,
        lists: Tensor,
        *,
        first: int,
    ) -> None:
        B = block_table.shape[0]
        self._selector.select(
            self.codes[:, first : first + B],
            candidates=lengths.candidates,
            counts=lengths.counts,
            block_table=block_table,
            block_size=self._block_size,
            units=units,
            lists=lists[layers, first : first + B],
        )


def _device_bytes(device: torch.device) -> float:
    """Memory of a GPU; elsewhere no limit."""
    if device.type != "cuda":
        return float("inf")
    return float(torch.cuda.get_device_properties(device).total_memory)
