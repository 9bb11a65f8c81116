"""Bookkeeping of the draft loop on the device: where each request stands, what it drafted.

A draft step is one captured graph that is replayed; the step's number lives on the device. Row b
of every tensor is row b of the batch. Rows that draft nothing (padding, prompts not yet complete)
read token 0, write no KV and are never looked at. A row whose next position would leave its KV
blocks or the model's context goes on drafting from its last position without writing: the
scheduler verifies no draft there, and its distribution stays finite.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor

from vegas_runtime.vllm_plugin.triton_drafts import (
    advance_kernel,
    begin_kernel,
    forget_kernel,
    record_kernel,
)

_BLOCK: Final = 128  # rows of one program


class DraftSteps:
    """The draft loop's persistent tensors, and the four kernels that move them on.

    Args:
        max_requests: rows of the largest batch.
        max_drafts: steps of the longest loop.
        vocab_size: token ids are below it.
        device: where drafts run.

    Attributes:
        input_ids: [max_requests] int32 token each row is fed in this step.
        positions: [max_requests] int64 its position.
        seq_lens: [max_requests] int32 tokens cached, this one included; 0 for rows that are idle.
        slots: [max_requests] int64 KV slot written, -1 for none.
        active: [max_requests] int32 request state index, -1 for rows that draft nothing.
        step: [] int64 number of the step, from 0.
        drafts: [max_requests, max_drafts] int64 tokens drafted.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_drafts: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.vocab_size = vocab_size

        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(max_requests, dtype=dtype, device=device)

        self.input_ids = zeros(torch.int32)
        self.positions = zeros(torch.int64)
        self.seq_lens = zeros(torch.int32)
        self.slots = torch.full_like(self.positions, -1)
        self.active = torch.full_like(self.seq_lens, -1)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.drafts = torch.zeros(max_requests, max_drafts, dtype=torch.int64, device=device)
        self._first = zeros(torch.int32)
        self._limit = zeros(torch.int32)

    def begin(
        self,
        *,
        request_ids: Tensor,
        num_sampled: Tensor,
        num_computed: Tensor,
        num_blocks: Tensor,
        block_size: int,
        max_len: int,
        padded: int,
    ) -> None:
        """Place every row at its first draft.

        Args:
            request_ids: [B] request state index.
            num_sampled: [B] int32 tokens the verification emitted; 0 for an incomplete prompt.
            num_computed: [requests] int32 tokens whose KV is committed, by request.
            num_blocks: [requests] int32 KV blocks the request owns.
            block_size: tokens of a block.
            max_len: the model's context.
            padded: rows the draft graph runs; those from B on are idle.
        """
        begin_kernel[(triton.cdiv(padded, _BLOCK),)](
            request_ids,
            num_sampled,
            num_computed,
            num_blocks,
            self._first,
            self._limit,
            self.active,
            self.step,
            request_ids.shape[0],
            padded,
            block_size,
            max_len,
            BLOCK=_BLOCK,
        )

    def advance(
        self, batch: int, *, last_sampled: Tensor, block_table: Tensor, block_size: int
    ) -> None:
        """Feed each row the token before, at the next position.

        Args:
            batch: rows of the step.
            last_sampled: [requests, 1] int64 newest token of each request.
            block_table: [batch, blocks] int32.
            block_size: tokens of a block.
        """
        advance_kernel[(triton.cdiv(batch, _BLOCK),)](
            self.active,
            self._first,
            self._limit,
            self.step,
            last_sampled,
            self.drafts,
            self.drafts.stride(0),
            block_table,
            block_table.stride(0),
            self.input_ids,
            self.positions,
            self.seq_lens,
            self.slots,
            batch,
            block_size,
            self.vocab_size,
            BLOCK=_BLOCK,
        )

    def record(self, tokens: Tensor, *, output_counts: Tensor) -> None:
        """Note what each row drafted, count it for penalties, and go on to the next step.

        Args:
            tokens: [B] int64.
            output_counts: [requests, vocabulary] int32 tokens generated so far; `forget` takes
                the drafts out again.
        """
        record_kernel[(triton.cdiv(tokens.shape[0], _BLOCK),)](
            self.active,
            self.step,
            tokens,
            self.drafts,
            self.drafts.stride(0),
            output_counts,
            output_counts.stride(0),
            tokens.shape[0],
            self.vocab_size,
            BLOCK=_BLOCK,
        )
        self.step += 1

    def forget(self, batch: int, num_drafts: int, *, output_counts: Tensor) -> None:
        """Take the drafts back out of the penalties' counts: verification adds its own."""
        forget_kernel[(triton.cdiv(batch, _BLOCK),)](
            self.active,
            self.drafts,
            self.drafts.stride(0),
            output_counts,
            output_counts.stride(0),
            batch,
            num_drafts,
            self.vocab_size,
            BLOCK=_BLOCK,
        )
