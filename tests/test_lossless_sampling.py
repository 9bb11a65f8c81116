"""Sampled text has the target's distribution, end to end; and the check notices when it has not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import pytest
import torch
from sampling_oracle import FALSE_ALARM_RATE, chi_square_p_value, transformers_distribution
from tiny_decoding import Decoded, decode, tiny_model, tiny_oracle
from tiny_models import tiny_prompt
from torch import Tensor

from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.engine import decoding
from vegas_runtime.engine.acceptance import (
    Acceptance,
    TokenSampler,
    accept_sampled,
    draw,
)
from vegas_runtime.engine.attention import windows_for_positions
from vegas_runtime.engine.decoding import Decoder
from vegas_runtime.engine.model import prefill
from vegas_runtime.kernels.reference import Window
from vegas_runtime.policies.sparse_spec import SparseSpecPolicy

VOCABULARY: Final = 128
PROMPT: Final = tiny_prompt(72, seed=3)
# The first token comes from the prompt's own pass; the others meet drafts, accepted or not.
NUM_TOKENS: Final = 3
NUM_SAMPLES: Final = 4096
LANES: Final = 2048

# A narrower initialisation than usual, so that about 16 tokens survive top-p, not about 6.
NARROW: Final[dict[str, Any]] = {"initializer_range": 0.15}

PLAIN: Final = SamplingConfig(temperature=0.6, top_p=0.95, top_k=20)
PENALISED: Final = SamplingConfig(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.2)
VEGAS: Final = SpeculationConfig(num_speculative_tokens=3, sparsity_ratio=0.3, min_tokens=4)
SAMPLINGS = pytest.mark.parametrize(
    "sampling", [PLAIN, PENALISED], ids=["no-penalty", "repetition-penalty"]
)


@dataclass(frozen=True, kw_only=True)
class ExactTexts:
    """Every text of three tokens that can follow the prompt, and its probability.

    Attributes:
        texts: [K, 3] token ids.
        probabilities: [K] float64.
    """

    texts: Tensor
    probabilities: Tensor


@cache
def exact_texts(architecture: str, sampling: SamplingConfig) -> ExactTexts:
    """Enumerate texts, by transformers' model and processors alone."""
    oracle = tiny_oracle(architecture, **NARROW)
    texts = torch.tensor([PROMPT])
    probabilities = torch.ones(1, dtype=torch.float64)
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            logits = torch.cat(
                [
                    oracle(ids, attention_mask=torch.ones_like(ids), logits_to_keep=1).logits[:, -1]
                    for ids in torch.split(texts, 512)
                ]
            )
        following = transformers_distribution(sampling, logits, texts).double()
        row, token = following.nonzero(as_tuple=True)
        texts = torch.cat((texts[row], token[:, None]), dim=1)
        probabilities = probabilities[row] * following[row, token]
    return ExactTexts(texts=texts[:, len(PROMPT) :], probabilities=probabilities)


def sample(architecture: str, config: SpeculationConfig, sampling: SamplingConfig) -> Decoded:
    """Many independent requests for the same prompt, each with its own random numbers."""
    model = tiny_model(architecture, **NARROW)
    saved = prefill(model, PROMPT)
    return decode(
        model,
        [PROMPT] * NUM_SAMPLES,
        config,
        max_new_tokens=NUM_TOKENS,
        lanes=LANES,
        sampling=sampling,
        saved=[saved] * NUM_SAMPLES,
    )


def p_value(decoded: Decoded, exact: ExactTexts) -> float:
    """How likely texts this far from the exact distribution are, when it is right.

    Two chi-square tests, on the third token alone and on whole texts; the smaller p-value counts,
    doubled because there are two.
    """
    outputs = torch.tensor(decoded.outputs)
    last = torch.zeros(VOCABULARY, dtype=torch.float64)
    last.scatter_add_(0, exact.texts[:, -1], exact.probabilities)
    code = VOCABULARY ** torch.arange(NUM_TOKENS)
    known = (exact.texts * code).sum(-1)
    order = known.argsort()
    place = torch.searchsorted(known[order], (outputs * code).sum(-1)).clamp(max=len(known) - 1)
    whole = order[place]
    if not torch.equal(exact.texts[whole], outputs):
        return 0.0  # a text that cannot be
    both = (
        chi_square_p_value(outputs[:, -1], last),
        chi_square_p_value(whole, exact.probabilities),
    )
    return min(1.0, 2 * min(both))


@SAMPLINGS
@pytest.mark.parametrize(
    ("architecture", "algorithm"),
    [
        ("gpt_oss", "vegas"),
        ("gpt_oss", "streaming_llm"),
        ("gpt_oss", "quest"),
        ("gpt_oss", "spec_extend"),
        ("gpt_oss", "snapkv"),
        ("qwen3", "vegas"),
    ],
)
def test_sampled_texts_have_the_exact_distribution(
    architecture: str, algorithm: str, sampling: SamplingConfig
) -> None:
    decoded = sample(architecture, VEGAS.replace(algorithm=algorithm), sampling)
    assert p_value(decoded, exact_texts(architecture, sampling)) > FALSE_ALARM_RATE
    assert set(decoded.all_accepted) == {0, 1, 2, 3}


@SAMPLINGS
def test_sampled_texts_of_sparse_spec_have_the_exact_distribution(
    sampling: SamplingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its dense first phase, which would last for all three tokens."""
    own = SparseSpecPolicy._needs
    monkeypatch.setattr(
        SparseSpecPolicy, "_needs", lambda policy: replace(own(policy), dense_first_phase=False)
    )
    decoded = sample("gpt_oss", VEGAS.replace(algorithm="sparse_spec"), sampling)
    assert p_value(decoded, exact_texts("gpt_oss", sampling)) > FALSE_ALARM_RATE
    assert set(decoded.all_accepted) == {0, 1, 2, 3}


def test_dense_drafts_are_all_accepted_when_sampling() -> None:
    decoded = sample("gpt_oss", VEGAS.replace(algorithm="dense"), PENALISED)
    assert p_value(decoded, exact_texts("gpt_oss", PENALISED)) > FALSE_ALARM_RATE
    counts = decoded.all_accepted
    # p and q come from passes of four rows and of one: float32 rounding, 1e-5 at most.
    assert sum(counts) > (1 - 1e-3) * 3 * len(counts)


def test_plain_sampling_passes_the_same_check() -> None:
    decoded = sample("gpt_oss", VEGAS.replace(num_speculative_tokens=0), PLAIN)
    assert p_value(decoded, exact_texts("gpt_oss", PLAIN)) > FALSE_ALARM_RATE


# -- planted bugs: the same check must fail ---------------------------------------------------


def accept_without_residual(
    drafts: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor
) -> Acceptance:
    """After a rejection, draws from the target instead of the residual."""
    right = accept_sampled(drafts, draft_probs, target_probs, uniforms)
    lanes = torch.arange(len(drafts))
    wrong = draw(target_probs[lanes, right.num_accepted], uniforms[:, -1])
    return Acceptance(num_accepted=right.num_accepted, next_token=wrong)


def accept_with_uniform_q(
    drafts: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor
) -> Acceptance:
    """Takes drafts for uniformly drawn."""
    uniform = torch.full_like(draft_probs, 1 / VOCABULARY)
    return accept_sampled(drafts, uniform, target_probs, uniforms)


@SAMPLINGS
@pytest.mark.parametrize("bug", [accept_without_residual, accept_with_uniform_q])
def test_a_wrong_accept_test_is_noticed(
    bug: Any, sampling: SamplingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "accept_sampled", bug)
    decoded = sample("gpt_oss", VEGAS, sampling)
    assert p_value(decoded, exact_texts("gpt_oss", sampling)) < FALSE_ALARM_RATE


def test_a_draft_distribution_without_the_penalty_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The authors' release recomputes q without penalties; drafts were drawn with them."""
    unpenalised = TokenSampler(PLAIN)
    reported: list[Tensor] = []
    own_distribution, own_draft = TokenSampler.distribution, Decoder._draft

    def distribution(self: TokenSampler, logits: Tensor, history: Tensor | None) -> Tensor:
        if logits.dim() == 2:  # a draft step; verification has a dimension for its rows
            reported.append(unpenalised_distribution(logits))
        return own_distribution(self, logits, history)

    def unpenalised_distribution(logits: Tensor) -> Tensor:
        return own_distribution(unpenalised, logits, None)

    def draft(self: Decoder, *args: Any) -> tuple[Tensor, Tensor | None]:
        reported.clear()
        drafts, _ = own_draft(self, *args)
        return drafts, torch.stack(reported, dim=1)

    monkeypatch.setattr(TokenSampler, "distribution", distribution)
    monkeypatch.setattr(Decoder, "_draft", draft)
    decoded = sample("gpt_oss", VEGAS, PENALISED)
    assert p_value(decoded, exact_texts("gpt_oss", PENALISED)) < FALSE_ALARM_RATE


def test_drafts_that_see_the_future_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification whose rows see one column too many scores stale keys."""
    own = windows_for_positions

    def shifted(positions: Tensor, sliding: tuple[int | None, ...]) -> dict[int | None, Window]:
        ahead = positions + 1 if positions.shape[1] > 1 else positions
        return own(ahead, sliding)

    monkeypatch.setattr(decoding, "windows_for_positions", shifted)
    decoded = sample("gpt_oss", VEGAS, PLAIN)
    assert p_value(decoded, exact_texts("gpt_oss", PLAIN)) < FALSE_ALARM_RATE
