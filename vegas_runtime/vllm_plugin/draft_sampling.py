"""Samples drafts as the target samples, and keeps the distribution each was drawn from.

Verification accepts a draft with probability min(1, p / q) and draws a rejected one again from the
residual of p against q; the output is distributed like the target's only if q is what the draft
was drawn from. So one tensor serves both: `logits` holds every draft's processed logits before
temperature, Gumbel sampling divides them by the temperature, and so does vLLM's rejection sampler.

Penalties, top-k and top-p are applied to q because they are applied to p: a draft that p forbids is
always rejected. They need not be applied to the last token. A threshold that is right to 1/32 of a
logit keeps a token too many now and then, which p rejects; finding it takes one histogram instead
of a search, and a draft step's sampling a third of the time. What is not applied here (min-p, bias,
grammars) costs acceptance, never exactness.

    scale      logits of the pass -> float32, penalised, divided by the temperature; block maxima
    count      tokens by distance from the likeliest one, in steps of 1/32, of each block
    cut        top-k and top-p -> the distance up to which tokens are kept
    draw       q is stored; Gumbel noise; each block's best
    pick       the row's best
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
from torch import Tensor

from vegas_runtime.vllm_plugin.triton_sampling import (
    count_kernel,
    cut_kernel,
    draw_kernel,
    pick_kernel,
    scale_kernel,
)

# exp(FORBIDDEN / T) is 0 for every temperature vLLM takes; minus infinity times 0 would be NaN.
FORBIDDEN: Final = -1e30
# Sampling parameter, its dtype, the value that leaves logits as they are (None: the vocabulary).
_FIELDS: Final = (
    ("temperature", torch.float32, 1.0),
    ("top_k", torch.int32, None),
    ("top_p", torch.float32, 1.0),
    ("seeds", torch.int64, 0),
    ("repetition_penalty", torch.float32, 1.0),
    ("frequency_penalty", torch.float32, 0.0),
    ("presence_penalty", torch.float32, 0.0),
)
_BLOCK: Final = 4096  # vocabulary entries of one program
_BINS: Final = 512
_BINS_PER_LOGIT: Final = 32  # 512 bins reach 16 logits down, a probability of 1e-7


class DraftSampler:
    """Draws each draft step's tokens.

    Args:
        max_requests: request states, and rows of the largest batch.
        logits: [max_requests, drafts, vocabulary] float32, written: the rejection sampler's q.
        use_fp64: draw the noise in float64, as the target's sampler is configured to.
    """

    def __init__(self, *, max_requests: int, logits: Tensor, use_fp64: bool) -> None:
        device, vocab_size = logits.device, logits.shape[2]
        self.logits = logits
        self._use_fp64 = use_fp64
        # vLLM rotates the storage of its sampling states; captured kernels need one that stays.
        self._states = {
            name: torch.full(
                (max_requests,),
                vocab_size if neutral is None else neutral,
                dtype=dtype,
                device=device,
            )
            for name, dtype, neutral in _FIELDS
        }
        self._num_blocks = triton.cdiv(vocab_size, _BLOCK)
        blocks = (max_requests, self._num_blocks)
        self._scaled = torch.empty(max_requests, vocab_size, device=device)
        self._maxima = torch.empty(blocks, device=device)
        self._histogram = torch.empty(*blocks, _BINS, dtype=torch.int32, device=device)
        self._cut = torch.empty(max_requests, device=device)
        value_dtype = torch.float64 if use_fp64 else torch.float32
        self._best_value = torch.empty(blocks, dtype=value_dtype, device=device)
        self._best_token = torch.empty(blocks, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(max_requests, dtype=torch.int64, device=device)

    @property
    def num_bytes(self) -> int:
        """Device memory held, q included."""
        return self.logits.nbytes + self._scaled.nbytes + self._histogram.nbytes

    def load(self, sampler: Any) -> None:
        """Copy every request's sampling parameters.

        Args:
            sampler: the target's sampler.
        """
        for name, *_ in _FIELDS:
            is_penalty = name.endswith("penalty")
            owner = sampler.penalties_state if is_penalty else sampler.sampling_states
            self._states[name].copy_(getattr(owner, name).gpu)

    def sample(
        self, logits: Tensor, *, requests: Tensor, positions: Tensor, step: Tensor, penalties: Any
    ) -> Tensor:
        """Draw one token a row.

        Args:
            logits: [B, vocabulary] of the draft pass.
            requests: [B] int32 request state index, -1 for rows that draft nothing.
            positions: [B] int64 position of the token fed.
            step: [] int64 column of `self.logits` to write.
            penalties: the target's penalty state; its counts include the drafts so far.

        Returns:
            [B] int64. Rows of -1 hold any value.
        """
        states, (batch, vocab_size) = self._states, logits.shape
        bits, counts = penalties.prompt_bin_mask, penalties.output_bin_counts
        grid = (batch, self._num_blocks)
        padded = triton.next_power_of_2(self._num_blocks)
        scale_kernel[grid](
            logits,
            logits.stride(0),
            self._scaled,
            self._maxima,
            requests,
            states["temperature"],
            states["repetition_penalty"],
            states["frequency_penalty"],
            states["presence_penalty"],
            bits,
            bits.stride(0),
            counts,
            counts.stride(0),
            vocab_size,
            self._num_blocks,
            BLOCK=_BLOCK,
        )
        self._cut_off(requests, vocab_size, padded)
        draw_kernel[grid](
            self._scaled,
            self._maxima,
            self._cut,
            requests,
            states["temperature"],
            states["seeds"],
            positions,
            step,
            self.logits,
            self.logits.stride(0),
            self.logits.stride(1),
            self._best_value,
            self._best_token,
            vocab_size,
            self._num_blocks,
            FORBIDDEN=FORBIDDEN,
            BLOCK=_BLOCK,
            PADDED=padded,
            USE_FP64=self._use_fp64,
        )
        pick_kernel[(batch,)](
            self._best_value, self._best_token, self._tokens, self._num_blocks, PADDED=padded
        )
        return self._tokens[:batch]

    def _cut_off(self, requests: Tensor, vocab_size: int, padded: int) -> None:
        """Find how far below the likeliest token each row keeps others."""
        batch = requests.shape[0]
        count_kernel[(batch, self._num_blocks)](
            self._scaled,
            self._maxima,
            self._histogram,
            vocab_size,
            self._num_blocks,
            BLOCK=_BLOCK,
            PADDED=padded,
            BINS=_BINS,
            BINS_PER_LOGIT=_BINS_PER_LOGIT,
        )
        cut_kernel[(batch,)](
            self._histogram,
            requests,
            self._states["top_k"],
            self._states["top_p"],
            self._cut,
            self._num_blocks,
            vocab_size,
            BINS=_BINS,
            BINS_PER_LOGIT=_BINS_PER_LOGIT,
        )
