"""Full attention and scores in one pass over the cache: `ops.verify_attention`.

Exact scores keep the first and last row's heads apart, one byte each, and get their true
normalisers afterwards; that takes rows `two`. Hint scores are weights against a normaliser known
beforehand, summed over any rows: one byte per token and KV head, and up to 1 % less attention mass
kept. Either way a layer's scores are reduced to one code per token right after its attention.

`Normalisers` keeps what is known of each request: the mean over the last verification's rows. On
real text that ranks as well as the mean over the draft steps in between, and better than the last
draft step or any single row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vegas_runtime.errors import UsageError
from vegas_runtime.kernels import ops
from vegas_runtime.vllm_plugin.geometry import AttentionShape, Limits
from vegas_runtime.vllm_plugin.triton_hints import keep, recall, sum_exact, sum_heads
from vegas_runtime.vllm_plugin.verification import EngineCall, StepLengths


class Normalisers:
    """Each request's last known normalisers, layer by layer.

    A prompt's last chunk and every verify step renew them. State of a request that is gone is
    recognised by its owner and never used for another, except that a request nothing is known of
    borrows row 0's.

    Args:
        shape: the layers.
        limits: the largest step.
        device: where.

    Attributes:
        hints: [layers, B, H] float32, natural log, of this step's requests.
        known: [layers, B, H] float32 by batch row of the last step.
    """

    def __init__(self, shape: AttentionShape, limits: Limits, device: torch.device) -> None:
        size = (shape.num_layers, limits.max_batch, shape.num_heads)
        self.hints = torch.zeros(size, device=device)
        self.known = torch.zeros(size, device=device)
        requests = max(limits.max_requests, limits.max_batch)
        self._row_of = torch.zeros(requests, dtype=torch.int32, device=device)
        self._owners = torch.full((limits.max_batch,), -1, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        tensors = (self.hints, self.known, self._row_of, self._owners)
        return sum(t.nbytes for t in tensors)

    def begin_step(self, request_ids: Tensor) -> None:
        """Fetch the hints of a step's requests and hand them the rows."""
        recall(
            request_ids,
            row_of=self._row_of,
            owners=self._owners,
            normalisers=self.known,
            hints=self.hints,
        )


class FusedVerify:
    """The compiled kernel that collects while it attends.

    Args:
        shape: the layers.
        limits: the largest step.
        per_head: one list per KV head.
        exact: collect exact scores, of rows `two` alone.
        device: where.
    """

    def __init__(
        self,
        shape: AttentionShape,
        limits: Limits,
        *,
        per_head: bool,
        exact: bool,
        device: torch.device,
    ) -> None:
        self._scale = shape.scale
        self.normalisers = Normalisers(shape, limits, device)
        self._exact = exact
        self._draft_lse = torch.zeros((limits.max_batch, shape.num_heads), device=device)
        # Codes of the kernel itself are what selection ranks.
        self._is_direct = not exact and (per_head or shape.num_kv_heads == 1)
        tokens = limits.max_batch * limits.max_rows
        self._lse = torch.zeros((tokens, shape.num_heads), device=device)
        self._prefix = torch.zeros(limits.max_batch + 1, dtype=torch.int32, device=device)
        self._scores = torch.zeros(
            self._score_size(shape, limits), dtype=torch.uint8, device=device
        )
        self._workspace = ops.make_workspace(
            device,
            batch=limits.max_batch,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
        )

    def _score_size(self, shape: AttentionShape, limits: Limits) -> tuple[int, ...]:
        outer = (limits.max_batch, 0 if self._is_direct else shape.num_kv_heads)
        if not self._exact:
            return (*outer, limits.padded_len)
        group = shape.num_heads // shape.num_kv_heads
        return (*outer, limits.padded_len // 64, 2 * group, 64)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        workspace = (self._workspace.partials, self._workspace.counters)
        tensors = (self._lse, self._draft_lse, self._prefix, self._scores, *workspace)
        return self.normalisers.num_bytes + sum(t.nbytes for t in tensors)

    def begin_step(
        self, *, seq_lens: Tensor, query_start: Tensor, request_ids: Tensor | None
    ) -> None:
        """See `VerifyPath.begin_step`.

        Raises:
            UsageError: no request ids.
        """
        if request_ids is None:
            raise UsageError(
                "`begin_step` got no `request_ids`; fused collection finds each request's "
                "normalisers by them."
            )
        self.normalisers.begin_step(request_ids)
        ops.build_schedule(seq_lens, self._prefix[: seq_lens.shape[0] + 1], query_start=query_start)

    def remember(self, layer: int, lse: Tensor, query_start: Tensor, *, first: int) -> None:
        """See `VerifyPath.remember`."""
        batch = query_start.shape[0] - 1
        keep(lse, query_start, self.normalisers.known[layer, first : first + batch])

    def draft_lse(self, layer: int, batch: int) -> Tensor:
        """See `VerifyPath.draft_lse`; nobody reads it."""
        return self._draft_lse[:batch]

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
        B, T = seq_lens.shape[0], q.shape[0]
        lse, known = self._lse[:T], self.normalisers.known[layer, :B]
        score = codes if self._is_direct else self._scores[:B]
        ops.verify_attention(
            q,
            k,
            v,
            block_table=block_table,
            seq_lens=seq_lens,
            query_start=query_start,
            prefix=self._prefix[: B + 1],
            max_queries=max_queries,
            scale=self._scale,
            out=out,
            lse=lse,
            workspace=self._workspace,
            sinks=sinks,
            score=None if codes is None else score,
            hint=None if codes is None else self.normalisers.hints[layer, :B],
            rows=None if codes is None or self._exact else lengths.row_mask,
        )
        if codes is None or self._is_direct:
            keep(lse, query_start, known)
        elif self._exact:
            sum_exact(
                self._scores[:B],
                candidates=lengths.candidates,
                rows=lengths.rows,
                codes=codes,
                hints=self.normalisers.hints[layer, :B],
                lse=lse,
                query_start=query_start,
                kept=known,
            )
        else:
            sum_heads(
                self._scores[:B],
                candidates=lengths.candidates,
                codes=codes,
                lse=lse,
                query_start=query_start,
                kept=known,
            )
        return lse
