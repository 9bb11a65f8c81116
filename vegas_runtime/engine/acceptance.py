"""Which drafts stand: speculative sampling that keeps the target's distribution exactly.

A draft x, drawn from q, is kept with probability min(1, p(x) / q(x)); the first one that is not
is replaced by a draw from the residual, max(p - q, 0) normalised; when all stand, one more token
is drawn from the target (the bonus). Leviathan et al. 2023, algorithm 1; Chen et al. 2023.

q must be the distribution the draft was really drawn from: penalties, temperature, top-k, top-p
and min-p included. So the same `TokenSampler` makes p and q.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from vegas_runtime.config import SamplingConfig


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Outcome of one verification.

    Attributes:
        num_accepted: [B] int64, leading drafts that stand.
        next_token: [B] int64, the token after them: residual draw or bonus.
    """

    num_accepted: Tensor
    next_token: Tensor


class TokenSampler:
    """Turns logits into the distribution that a sampling configuration asks for.

    The order is that of transformers' `generate`: repetition penalty, temperature, top-k, top-p,
    min-p, by transformers' own processors. Top-k comes first by selecting, so that sorting
    touches k values and not the vocabulary; among tokens tied at rank k only k are kept.
    """

    def __init__(self, config: SamplingConfig) -> None:
        self.config = config
        self._penalty = (
            RepetitionPenaltyLogitsProcessor(penalty=float(config.repetition_penalty))
            if config.repetition_penalty != 1.0
            else None
        )
        self._warpers: list[LogitsProcessor] = []
        if config.top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(top_p=config.top_p))
        if config.min_p > 0.0:
            self._warpers.append(MinPLogitsWarper(min_p=config.min_p))

    @property
    def needs_history(self) -> bool:
        """Whether the text so far changes the distribution."""
        return self._penalty is not None

    def greedy(self, logits: Tensor, history: Tensor | None) -> Tensor:
        """Likeliest tokens [...] of logits [..., V], after penalties."""
        return self._penalised(logits, history).argmax(dim=-1)

    def distribution(self, logits: Tensor, history: Tensor | None) -> Tensor:
        """Probabilities of the next token.

        Args:
            logits: [..., V].
            history: [..., T] token ids of the text so far, short ones padded with any token of
                the same text; None unless `needs_history`.

        Returns:
            [..., V] float32, rows sum to 1.
        """
        shape = logits.shape
        scores = self._penalised(logits, history).reshape(-1, shape[-1])
        if self.config.temperature != 1.0:
            warp = TemperatureLogitsWarper(temperature=float(self.config.temperature))
            scores = warp(None, scores)
        if 0 < self.config.top_k < shape[-1]:
            kept, tokens = scores.topk(self.config.top_k, dim=-1)
            probabilities = self._warped(kept)
            full = torch.zeros_like(scores).scatter_(-1, tokens, probabilities)
            return full.view(shape)
        return self._warped(scores).view(shape)

    def _warped(self, scores: Tensor) -> Tensor:
        """Softmax of scores [N, k] after top-p and min-p."""
        for warper in self._warpers:
            scores = warper(None, scores)
        return scores.softmax(dim=-1)

    def _penalised(self, logits: Tensor, history: Tensor | None) -> Tensor:
        """Logits in float32 after the repetition penalty, same shape."""
        logits = logits.float()
        if self._penalty is None:
            return logits
        assert history is not None
        flat: Tensor = self._penalty(
            history.reshape(-1, history.shape[-1]), logits.reshape(-1, logits.shape[-1])
        )
        return flat.view(logits.shape)


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Draw tokens by inverting the distribution function.

    Args:
        probabilities: [..., V], not all zero; need not sum to 1.
        uniforms: [...] in [0, 1).

    Returns:
        [...] int64 tokens, each of non-zero probability.
    """
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    # Just below the total, or rounding could pick a trailing token of probability zero.
    target = torch.minimum(uniforms[..., None].double() * total, total * (1 - 1e-15))
    return torch.searchsorted(cumulative, target, right=True)[..., 0]


def accept_greedy(drafts: Tensor, target_tokens: Tensor) -> Acceptance:
    """Keep the drafts that equal the target's likeliest tokens.

    Args:
        drafts: [B, gamma] int64.
        target_tokens: [B, gamma + 1] int64, likeliest token after each row.
    """
    gamma = drafts.shape[1]
    matches = (drafts == target_tokens[:, :gamma]).long()
    num_accepted = matches.cumprod(dim=1).sum(dim=1)
    return Acceptance(
        num_accepted=num_accepted,
        next_token=target_tokens.gather(1, num_accepted[:, None])[:, 0],
    )


def accept_sampled(
    drafts: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor
) -> Acceptance:
    """Speculative sampling.

    Args:
        drafts: [B, gamma] int64, drawn from `draft_probs`.
        draft_probs: [B, gamma, V], q.
        target_probs: [B, gamma + 1, V], p.
        uniforms: [B, gamma + 1] in [0, 1): one per accept test, the last for the final draw.
    """
    batch, gamma = drafts.shape
    chosen = drafts[..., None]
    q = draft_probs.gather(-1, chosen)[..., 0]
    p = target_probs[:, :gamma].gather(-1, chosen)[..., 0]
    stands = (uniforms[:, :gamma] * q < p).long()
    num_accepted = stands.cumprod(dim=1).sum(dim=1)
    lanes = torch.arange(batch, device=drafts.device)
    final = target_probs[lanes, num_accepted]
    rejected = num_accepted < gamma
    if gamma:
        refused = draft_probs[lanes, num_accepted.clamp(max=gamma - 1)]
        residual = (final - refused).clamp(min=0)
        # p = q up to rounding leaves no residual; then p itself is the right draw.
        usable = rejected & (residual.sum(-1) > 0)
        final = torch.where(usable[:, None], residual, final)
    return Acceptance(num_accepted=num_accepted, next_token=draw(final, uniforms[:, gamma]))
