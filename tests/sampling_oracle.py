"""What sampled tokens should look like: transformers' own processors, and a chi-square test."""

from __future__ import annotations

from typing import Final

import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from vegas_runtime.config import SamplingConfig

# Seeds are fixed, so a test that passes once passes always; the rate says how likely a correct
# implementation was to fail when the seed was chosen.
FALSE_ALARM_RATE: Final = 1e-4


def transformers_distribution(config: SamplingConfig, logits: Tensor, history: Tensor) -> Tensor:
    """Probabilities [B, V] by the processors `generate` builds, in its order.

    Args:
        config: how tokens are drawn; not greedy.
        logits: [B, V].
        history: [B, T] text so far.
    """
    processors = LogitsProcessorList()
    if config.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    processors.append(TemperatureLogitsWarper(config.temperature))
    if config.top_k:
        processors.append(TopKLogitsWarper(top_k=config.top_k))
    if config.top_p < 1:
        processors.append(TopPLogitsWarper(top_p=config.top_p))
    if config.min_p > 0:
        processors.append(MinPLogitsWarper(min_p=config.min_p))
    scores: Tensor = processors(history, logits)
    return scores.softmax(dim=-1)


def chi_square_p_value(outcomes: Tensor, probabilities: Tensor) -> float:
    """P-value of outcomes [n] int64 under probabilities [K]; 0 when one of them is impossible.

    Bins that expect fewer than five are pooled, as the chi-square approximation wants.
    """
    expected = probabilities.double() / probabilities.double().sum() * len(outcomes)
    observed = torch.bincount(outcomes, minlength=len(expected)).double()
    if bool((observed[expected == 0] > 0).any()):
        return 0.0
    rare = expected < 5
    observed = torch.cat((observed[~rare], observed[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    possible = expected > 0
    if int(possible.sum()) < 2:
        return 1.0
    return float(chisquare(observed[possible], expected[possible]).pvalue)
