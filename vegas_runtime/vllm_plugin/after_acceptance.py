"""Lists that are made behind the accept test: of rows kept until then, or held for a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vegas_runtime.config import Rows
from vegas_runtime.vllm_plugin.geometry import AttentionShape, Limits
from vegas_runtime.vllm_plugin.late_rows import AcceptedStep, LateRows, rule_of
from vegas_runtime.vllm_plugin.listing import Listing
from vegas_runtime.vllm_plugin.prompt_lists import PromptLists
from vegas_runtime.vllm_plugin.switches import Switches
from vegas_runtime.vllm_plugin.verification import StepLengths


class AfterAcceptance:
    """What such methods need between a verify pass and its drafts.

    Args:
        shape: the layers.
        limits: the largest step.
        switches: methods that may be chosen, and the one in force.
        listings: lists by shape, written.
        lengths: of the largest step, written.
        ratio: float64[1] on the device, fraction of entries kept.
        min_tokens: int32[1] on the device.
        device: where.
    """

    def __init__(
        self,
        shape: AttentionShape,
        limits: Limits,
        *,
        switches: Switches,
        listings: Mapping[bool, Listing],
        lengths: StepLengths,
        ratio: Tensor,
        min_tokens: Tensor,
        device: torch.device,
    ) -> None:
        self._switches, self._listings, self._lengths = switches, listings, lengths
        self._capacity, self._device = limits.capacity, device
        controls = {"ratio": ratio, "min_tokens": min_tokens}
        self._late: LateRows | None = None
        if "accepted" in switches.sources:
            flags = {"is_kept": switches.kept, "in_pages": switches.in_pages}
            self._late = LateRows(shape, limits, **flags, **controls, device=device)
        self._prompts: PromptLists | None = None
        if "prompt" in switches.sources:
            self._prompts = PromptLists(shape, limits, **controls, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(own.num_bytes for own in (self._late, self._prompts) if own is not None)

    @property
    def prompt_lists(self) -> PromptLists:
        """What is held of every request."""
        assert self._prompts is not None
        return self._prompts

    def keep(
        self,
        layer: int,
        q: Tensor,
        lse: Tensor,
        *,
        query_start: Tensor,
        rows: Tensor | None,
        first: int,
    ) -> None:
        """Set a layer's verify rows aside; see `LateRows.keep`. `rows` are of the whole step."""
        if self._late is not None:
            own = slice(first, first + query_start.shape[0] - 1)
            self._late.keep(
                *(layer, q, lse),
                query_start=query_start,
                rows=None if rows is None else rows[own],
                first=first,
            )

    def forget(self) -> None:
        """The setting has changed: nothing that was chosen for a request's life holds any more."""
        for own in (self._late, self._prompts):
            if own is not None:
                own.forget()

    def make_lists(self, step: AcceptedStep) -> None:
        """Make the lists of a step, if the method in force has waited for it."""
        if self._switches.source == "accepted":
            self._score(self._switches.held, self._switches.held_rows, step)
        elif self._switches.source == "prompt":
            self._recall(step, self._listings[self._switches.per_head])

    def warm_up(self, keys: Sequence[Tensor]) -> None:
        """Compile what runs here for every method that may be chosen, on an idle request.

        Kernels are compiled anew for addresses that no 16 bytes divide, hence every layer.

        Args:
            keys: [blocks, block size, Hkv, D] view of each layer's K.
        """
        idle = torch.zeros(2, dtype=torch.int32, device=self._device)
        step = AcceptedStep(
            keys=keys,
            block_table=idle[None],
            seq_lens=idle[:1],
            query_start=idle,
            num_sampled=idle[:1],
            budgets=idle[:1],
            request_ids=idle[:1] - 1,
            is_prompt=idle[:1],
            rows=idle[:1],
        )
        for algorithm, rows in self._switches.late:
            self._score(algorithm, rows, step)
        if self._prompts is not None:
            self._prompts.warm_up(keys[0])
            self._recall(step, self._listings[True])

    def _score(self, algorithm: str, rows: Rows, step: AcceptedStep) -> None:
        assert self._late is not None
        self._late.choose(
            rule_of(algorithm, rows),
            step,
            capacity=self._capacity,
            lengths=self._lengths.part(0, step.batch),
            listing=self._listings[self._switches.is_per_head(algorithm)],
        )

    def _recall(self, step: AcceptedStep, listing: Listing) -> None:
        self.prompt_lists.recall(
            step,
            units=listing.units,
            lengths=self._lengths.part(0, step.batch),
            lists=listing.lists.first(step.batch),
        )
