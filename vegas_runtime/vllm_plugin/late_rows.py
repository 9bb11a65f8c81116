"""Lists of methods whose rows are known only after acceptance.

A verify pass cannot sum what acceptance will choose, so queries and normalisers of every verify
row are set aside, layer by layer, and the rows that count are scored in a second pass over K once
the accept test has run. That pass is what such a method costs beside those that are scored inside
verification (SmolLM2, batch 256, 7.4K tokens, one H200: 0.2 ms a layer, a third of full
attention, by the prototype's score kernel); the rows kept cost 62 MB there at gamma 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from vegas_runtime.config import Rows
from vegas_runtime.vllm_plugin.geometry import AttentionShape, Limits
from vegas_runtime.vllm_plugin.listing import Listing
from vegas_runtime.vllm_plugin.methods import ROW_SETS
from vegas_runtime.vllm_plugin.triton_late import LateRule, accepted_lengths, keep_rows
from vegas_runtime.vllm_plugin.triton_score import score
from vegas_runtime.vllm_plugin.verification import StepLengths

_RULES: Final = {
    ("vegas", "last_accepted"): LateRule(rows="last"),
    ("vegas", "accepted_only"): LateRule(rows="accepted"),
    ("sparse_spec", None): LateRule(rows="all", counts_tail=True),
    ("spec_extend", None): LateRule(rows="last"),
}


def rule_of(algorithm: str, rows: Rows) -> LateRule:
    """What a method reads off the rows kept for it."""
    return _RULES[algorithm, rows if algorithm == "vegas" else None]


@dataclass(frozen=True, kw_only=True)
class AcceptedStep:
    """A verify step whose drafts have been tested; all tensors on the device.

    Attributes:
        keys: [blocks, block size, Hkv, D] view of each layer's K.
        block_table: [B, blocks] int32, as it was verified with.
        seq_lens: [B] int32 tokens cached by the verify pass, its own included; 0 for padding.
        query_start: [B + 1] int32 of that pass.
        num_sampled: [B] int32 tokens each request emitted; 0 for an incomplete prompt.
        budgets: [B] int32 entries to keep, where a method does not count its own.
        request_ids: [B] int32 persistent request states, -1 for padding.
        is_prompt: [B] int32, not 0 where the pass computed prompt tokens of the request.
        rows: [B] int32 rows of each verify block, or None for every row.
    """

    keys: Sequence[Tensor]
    block_table: Tensor
    seq_lens: Tensor
    query_start: Tensor
    num_sampled: Tensor
    budgets: Tensor
    request_ids: Tensor
    is_prompt: Tensor
    rows: Tensor | None = None

    @property
    def batch(self) -> int:
        """Requests, padding included."""
        return self.seq_lens.shape[0]


class LateRows:
    """Verify rows of one step, and their scores once acceptance is known.

    Args:
        shape: the layers.
        limits: the largest step.
        is_kept: [1] int32 on the device, 1 while rows are to be kept.
        in_pages: [1] int32 on the device, 1 while whole pages compete.
        ratio: float64[1] on the device, fraction of entries kept.
        min_tokens: int32[1] on the device.
        device: where.
    """

    def __init__(
        self,
        shape: AttentionShape,
        limits: Limits,
        *,
        is_kept: Tensor,
        in_pages: Tensor,
        ratio: Tensor,
        min_tokens: Tensor,
        device: torch.device,
    ) -> None:
        self._scale = shape.scale
        self._is_kept, self._in_pages = is_kept, in_pages
        self._ratio, self._min_tokens = ratio, min_tokens
        requests = max(limits.max_requests, limits.max_batch)
        self._has_drafted = torch.zeros(requests, dtype=torch.int32, device=device)
        size = (shape.num_layers, limits.max_batch, limits.max_rows, shape.num_heads)
        self._q = torch.zeros((*size, shape.head_dim), dtype=shape.dtype, device=device)
        self._lse = torch.zeros(size, device=device)
        self._ends = torch.zeros(limits.max_batch + 1, dtype=torch.int32, device=device)
        self._rows = torch.zeros(limits.max_batch, dtype=torch.int32, device=device)
        self._all_rows = torch.full((1,), ROW_SETS.index("all"), dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        tensors = (self._q, self._lse, self._ends, self._rows, self._all_rows, self._has_drafted)
        return sum(t.nbytes for t in tensors)

    def forget(self) -> None:
        """A method starts anew: no request's drafts count as verified."""
        self._has_drafted.zero_()

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
        """Set a layer's verify rows aside.

        Args:
            layer: index among the layers that draft sparsely.
            q: [T, H, D].
            lse: [T, H] float32 natural log, any strides.
            query_start: [B + 1] int32 rows of these requests in q.
            rows: [B] int32 rows of each verify block, or None for every row.
            first: index of the first of these requests in the step.
        """
        B = query_start.shape[0] - 1
        keep_rows(
            q,
            lse,
            query_start=query_start,
            rows=rows,
            is_kept=self._is_kept,
            kept_q=self._q[layer, first : first + B],
            kept_lse=self._lse[layer, first : first + B],
        )

    def choose(
        self,
        rule: LateRule,
        step: AcceptedStep,
        *,
        capacity: int,
        lengths: StepLengths,
        listing: Listing,
    ) -> None:
        """Score the rows that count, and select.

        Args:
            rule: the method's.
            step: what was verified and accepted.
            capacity: entries a list holds.
            lengths: of these requests, written.
            listing: has the lists, written up to these requests' counts.
        """
        B = step.batch
        accepted_lengths(
            rule,
            seq_lens=step.seq_lens,
            query_start=step.query_start,
            given_rows=step.rows,
            num_sampled=step.num_sampled,
            budgets=step.budgets,
            request_ids=step.request_ids,
            is_prompt=step.is_prompt,
            in_pages=self._in_pages,
            has_drafted=self._has_drafted,
            ratio=self._ratio,
            min_tokens=self._min_tokens,
            max_rows=self._q.shape[2],
            capacity=capacity,
            ends=self._ends[: B + 1],
            rows=self._rows[:B],
            candidates=lengths.candidates,
            counts=lengths.counts,
            tail_start=lengths.tail_start,
        )
        for layer, k in enumerate(step.keys):
            codes = listing.codes(layer, 0, B)
            assert codes is not None
            score(
                self._q[layer, :B].flatten(0, 1),
                k,
                self._lse[layer, :B].flatten(0, 1),
                block_table=step.block_table,
                query_start=self._ends[: B + 1],
                rows=self._rows[:B],
                candidates=lengths.candidates,
                scale=self._scale,
                row_set=self._all_rows,
                codes=codes,
            )
            listing.select_layer(layer, lengths, step.block_table, first=0)
        listing.select(lengths, step.block_table)
        listing.append_tails(lengths, step.block_table)
