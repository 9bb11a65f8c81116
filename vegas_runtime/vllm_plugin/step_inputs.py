"""What the host tells captured steps: how to draft, and which rows of the batch are collected."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vegas_runtime.kernels.budgets import kv_budgets


class StepInputs:
    """Persistent tensors that verification reads; graphs captured over them follow their values.

    Args:
        max_requests: rows of the largest batch.
        max_rows: verification rows of a request, drafts and one more.
        num_layers: layers that draft sparsely.
        device: where verification runs.

    Attributes:
        ratio: [1] float64 fraction of KV entries kept while drafting.
        min_tokens: [1] int32 floor of a budget.
        rows: [max_requests] int32 rows at the end of a request's range that are collected.
        request_ids: [max_requests] int32 request state index, -1 for padding.
        is_prompt: [max_requests] int32, 1 where the step computes prompt tokens.
        can_collect: whether verification is ever scored; window methods need no scores.
        is_collecting: whether the step being prepared is scored.
    """

    def __init__(
        self, *, max_requests: int, max_rows: int, num_layers: int, device: torch.device
    ) -> None:
        self.max_rows = max_rows
        self.can_collect = True
        self.num_layers = num_layers
        self.is_collecting = False
        self.ratio = torch.ones(1, dtype=torch.float64, device=device)
        self.min_tokens = torch.ones(1, dtype=torch.int32, device=device)
        state = torch.empty(3, max_requests, dtype=torch.int32, device=device)
        self.rows, self.request_ids, self.is_prompt = state
        self.reset()
        # Two of each: the copy of one step may still run while the next one is prepared.
        self._staged = [
            torch.empty(3, max_requests, dtype=torch.int32, pin_memory=device.type == "cuda")
            for _ in range(2)
        ]
        self._packed = torch.empty(3, max_requests, dtype=torch.int32, device=device)
        self._turn = 0

    @property
    def num_bytes(self) -> int:
        """Device memory held."""
        state = (self.rows, self.request_ids, self.is_prompt)
        return sum(tensor.nbytes for tensor in (self.ratio, self.min_tokens, *state, self._packed))

    def reset(self) -> None:
        """One row of every request, and no request known: what graphs are captured from."""
        self.rows.fill_(1)
        self.request_ids.fill_(-1)
        self.is_prompt.fill_(0)

    def load(
        self, request_ids: np.ndarray, num_drafts: np.ndarray | None, is_prompt: np.ndarray
    ) -> None:
        """Describe the batch of the step that is prepared.

        Args:
            request_ids: [B] request state index of each batch row.
            num_drafts: [B] drafts each row verifies, None for none at all.
            is_prompt: [B] whether the step computes prompt tokens of the request.
        """
        batch = len(request_ids)
        self._turn ^= 1
        staged = self._staged[self._turn].numpy()
        staged[0, :batch] = 1 if num_drafts is None else num_drafts + 1
        staged[0, batch:] = 0
        staged[1, :batch] = request_ids
        staged[1, batch:] = -1
        staged[2, :batch] = is_prompt
        staged[2, batch:] = 0
        self._packed.copy_(self._staged[self._turn], non_blocking=True)
        self.rows.copy_(self._packed[0])
        self.request_ids.copy_(self._packed[1])
        self.is_prompt.copy_(self._packed[2])

    def budgets(self, seq_lens: Tensor, rows: Tensor) -> Tensor:
        """KV entries each request keeps while drafting (DESIGN decision 2).

        Args:
            seq_lens: [B] int32 tokens cached, verification rows included; 0 for padding.
            rows: [B] int32 of those that are verification rows.

        Returns:
            [B] int32.
        """
        candidates = torch.minimum(seq_lens - rows + 1, seq_lens)
        return kv_budgets(
            candidates,
            sparsity_ratio=self.ratio,
            num_speculative_tokens=(rows - 1).clamp_(min=0),
            min_tokens=self.min_tokens,
        )
