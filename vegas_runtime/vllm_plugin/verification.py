"""Full attention of a verify step, with one score byte per token and list left behind.

    fused     one pass, with hints or exact: `fused.py`
    fa3       the engine's own FlashAttention-3 call, which also returns the normalisers; a second
              pass over K scores the collected rows
    triton    the same two passes in Triton: any GPU from sm_80 on

The last two score with the true normalisers, so they agree up to rounding; fused collection
weighs against normalisers known beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from vegas_runtime.vllm_plugin.geometry import AttentionShape, Limits
from vegas_runtime.vllm_plugin.triton_attention import TritonAttention
from vegas_runtime.vllm_plugin.triton_score import score


@dataclass(frozen=True, kw_only=True)
class StepLengths:
    """Lengths of the requests of one verify step, all [B] int32 on the device.

    Attributes:
        rows: rows of the verify block; 0 for padding.
        candidates: tokens that are scored.
        counts: entries that will be kept.
        tail_start: first token that could not be scored.
        row_mask: bit i is set where row i of the request's range is collected.
    """

    rows: Tensor
    candidates: Tensor
    counts: Tensor
    tail_start: Tensor
    row_mask: Tensor

    def part(self, first: int, batch: int) -> StepLengths:
        """Requests first .. first + batch - 1."""
        chosen = slice(first, first + batch)
        return StepLengths(
            rows=self.rows[chosen],
            candidates=self.candidates[chosen],
            counts=self.counts[chosen],
            tail_start=self.tail_start[chosen],
            row_mask=self.row_mask[chosen],
        )


@dataclass(frozen=True, kw_only=True)
class EngineCall:
    """What the engine's own FlashAttention call takes besides tensors of the step.

    Attributes:
        max_len: longest context of the batch, or of the engine in a captured graph.
        scheduler_metadata: work split computed ahead, or None.
        num_splits: most splits of a request; 0 leaves it to the kernel.
    """

    max_len: int
    scheduler_metadata: Tensor | None = None
    num_splits: int = 0


class VerifyPath(Protocol):
    """One way to run full attention and to score.

    Attributes:
        num_bytes: memory held.
    """

    @property
    def num_bytes(self) -> int:
        """Memory held."""

    def begin_step(
        self, *, seq_lens: Tensor, query_start: Tensor, request_ids: Tensor | None
    ) -> None:
        """Once per verify step, before its first layer."""

    def remember(self, layer: int, lse: Tensor, query_start: Tensor, *, first: int) -> None:
        """Take note of normalisers [T, H] that came from elsewhere."""

    def draft_lse(self, layer: int, batch: int) -> Tensor:
        """Where a layer's draft attention may leave its normalisers: [batch, H] float32."""

    def verify(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        lengths: StepLengths,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start: Tensor,
        max_queries: int,
        out: Tensor,
        codes: Tensor | None,
        sinks: Tensor | None,
        call: EngineCall,
    ) -> Tensor:
        """Attention into out [T, H, D]; codes [B, 1 or Hkv, n] up to each request's candidates.

        Returns:
            [T, H] float32 normalisers, natural log, any strides; good until the next layer.
        """


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How scores are read off.

    Attributes:
        row_set: [1] int32 on the device, index into `methods.ROW_SETS`: rows that are summed.
        scale: factor on query-key products.
    """

    row_set: Tensor
    scale: float

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        lse: Tensor,
        *,
        lengths: StepLengths,
        block_table: Tensor,
        query_start: Tensor,
        codes: Tensor,
    ) -> None:
        """Score the candidates of each request; lse is [T, H], any strides."""
        score(
            q,
            k,
            lse,
            block_table=block_table,
            query_start=query_start,
            rows=lengths.rows,
            candidates=lengths.candidates,
            scale=self.scale,
            row_set=self.row_set,
            codes=codes,
        )


class _ExactScoring:
    """What paths that score with the true normalisers share: they need nothing beforehand."""

    def __init__(self, shape: AttentionShape, limits: Limits, device: torch.device) -> None:
        self._draft_lse = torch.zeros((limits.max_batch, shape.num_heads), device=device)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._draft_lse.nbytes

    def begin_step(
        self, *, seq_lens: Tensor, query_start: Tensor, request_ids: Tensor | None
    ) -> None:
        """See `VerifyPath.begin_step`."""

    def remember(self, layer: int, lse: Tensor, query_start: Tensor, *, first: int) -> None:
        """See `VerifyPath.remember`."""

    def draft_lse(self, layer: int, batch: int) -> Tensor:
        """See `VerifyPath.draft_lse`; nobody reads it here."""
        return self._draft_lse[:batch]


class FlashVerify(_ExactScoring):
    """FlashAttention-3, then a pass over K.

    Args:
        shape: the layers.
        limits: the largest step.
        scoring: reads scores off.
        attend: the engine's `flash_attn_varlen_func`.
        device: where.
    """

    def __init__(
        self,
        shape: AttentionShape,
        limits: Limits,
        *,
        scoring: Scoring,
        attend: Any,
        device: torch.device,
    ) -> None:
        super().__init__(shape, limits, device)
        self._scale = shape.scale
        self._scoring = scoring
        self._attend = attend

    def verify(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        lengths: StepLengths,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start: Tensor,
        max_queries: int,
        out: Tensor,
        codes: Tensor | None,
        sinks: Tensor | None,
        call: EngineCall,
    ) -> Tensor:
        """See `VerifyPath.verify`."""
        done = self._attend(
            q=q,
            k=k,
            v=v,
            out=out,
            cu_seqlens_q=query_start,
            max_seqlen_q=max_queries,
            seqused_k=seq_lens,
            max_seqlen_k=call.max_len,
            softmax_scale=self._scale,
            causal=True,
            block_table=block_table,
            scheduler_metadata=call.scheduler_metadata,
            num_splits=call.num_splits,
            s_aux=None if sinks is None else sinks.bfloat16(),
            return_softmax_lse=True,
            fa_version=3,
        )
        lse: Tensor = done[1].T
        if codes is not None:
            self._scoring(
                q,
                k,
                lse,
                lengths=lengths,
                block_table=block_table,
                query_start=query_start,
                codes=codes,
            )
        return lse


class TritonVerify(_ExactScoring):
    """Triton attention, then a pass over K.

    Args:
        shape: the layers.
        limits: the largest step.
        scoring: reads scores off.
        units: multiprocessors of the device.
        device: where.
    """

    def __init__(
        self,
        shape: AttentionShape,
        limits: Limits,
        *,
        scoring: Scoring,
        units: int,
        device: torch.device,
    ) -> None:
        super().__init__(shape, limits, device)
        self._scale = shape.scale
        self._scoring = scoring
        tokens = limits.max_batch * limits.max_rows
        self._lse = torch.zeros((tokens, shape.num_heads), device=device)
        self._triton = TritonAttention(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_batch=limits.max_batch,
            max_rows=limits.max_rows,
            units=units,
            device=device,
        )

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return super().num_bytes + self._lse.nbytes + self._triton.num_bytes

    def verify(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        lengths: StepLengths,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start: Tensor,
        max_queries: int,
        out: Tensor,
        codes: Tensor | None,
        sinks: Tensor | None,
        call: EngineCall,
    ) -> Tensor:
        """See `VerifyPath.verify`."""
        lse = self._lse[: q.shape[0]]
        self._triton.attend(
            q,
            k,
            v,
            block_table=block_table,
            seq_lens=seq_lens,
            query_start=query_start,
            max_queries=max_queries,
            scale=self._scale,
            out=out,
            lse=lse,
            sinks=sinks,
        )
        if codes is not None:
            self._scoring(
                q,
                k,
                lse,
                lengths=lengths,
                block_table=block_table,
                query_start=query_start,
                codes=codes,
            )
        return lse
