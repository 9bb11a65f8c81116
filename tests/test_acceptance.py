from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from sampling_oracle import FALSE_ALARM_RATE, chi_square_p_value, transformers_distribution
from torch import Tensor

from vegas_runtime.config import SamplingConfig
from vegas_runtime.engine.acceptance import (
    TokenSampler,
    accept_greedy,
    accept_sampled,
    draw,
)

SAMPLINGS = [
    SamplingConfig(temperature=1.0),
    SamplingConfig(temperature=0.6),
    SamplingConfig(temperature=1.7, top_k=5),
    SamplingConfig(temperature=1.0, top_k=500),
    SamplingConfig(temperature=0.8, top_p=0.9),
    SamplingConfig(temperature=0.8, top_p=0.01),
    SamplingConfig(temperature=0.8, min_p=0.1),
    SamplingConfig(temperature=1.0, repetition_penalty=1.3),
    SamplingConfig(temperature=1.0, repetition_penalty=0.8),
    SamplingConfig(temperature=0.6, top_k=20, top_p=0.95),
    SamplingConfig(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.2),
    SamplingConfig(temperature=1.2, top_k=30, top_p=0.9, min_p=0.05, repetition_penalty=1.1),
]


def sampling_id(config: SamplingConfig) -> str:
    default = SamplingConfig().to_dict()
    changed = {k: v for k, v in config.to_dict().items() if v != default[k]}
    return ",".join(f"{key}={value}" for key, value in changed.items())


@pytest.mark.parametrize("config", SAMPLINGS, ids=sampling_id)
def test_distribution_is_transformers_own(config: SamplingConfig) -> None:
    random = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(40, 200, generator=random)
    history = torch.randint(0, 200, (40, 60), generator=random)
    sampler = TokenSampler(config)
    ours = sampler.distribution(logits, history if sampler.needs_history else None)
    expected = transformers_distribution(config, logits, history)
    assert torch.equal(ours > 0, expected > 0)
    # Softmax over k kept values or over a vocabulary of zeros and k values: rounding only.
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ours.sum(-1), torch.ones(40), rtol=1e-5, atol=0)


@pytest.mark.parametrize("config", SAMPLINGS, ids=sampling_id)
def test_leading_dimensions_are_independent_rows(config: SamplingConfig) -> None:
    random = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(3, 4, 50, generator=random)
    history = torch.randint(0, 50, (3, 4, 20), generator=random)
    sampler = TokenSampler(config)
    given = history if sampler.needs_history else None
    together = sampler.distribution(logits, given)
    for b, s in itertools.product(range(3), range(4)):
        alone = sampler.distribution(logits[b, s], None if given is None else given[b, s])
        # One row or twelve: the vectorised exponentials may round differently.
        torch.testing.assert_close(together[b, s], alone, rtol=1e-6, atol=1e-8)


def test_tokens_tied_at_rank_k_leave_exactly_k() -> None:
    sampler = TokenSampler(SamplingConfig(temperature=1.0, top_k=2))
    probabilities = sampler.distribution(torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]]), None)
    assert int((probabilities > 0).sum()) == 2
    assert probabilities[0, 0] == probabilities.max()


def test_padding_a_history_with_its_own_token_changes_nothing() -> None:
    sampler = TokenSampler(SamplingConfig(temperature=1.0, repetition_penalty=1.5))
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(2))
    short = torch.tensor([[4, 9, 9, 2]])
    long = torch.tensor([[4, 9, 9, 2, 4, 4, 4]])
    assert torch.equal(sampler.distribution(logits, short), sampler.distribution(logits, long))


def test_greedy_takes_the_likeliest_token_after_the_penalty() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0]])
    history = torch.tensor([[0, 2]])
    assert TokenSampler(SamplingConfig()).greedy(logits, None).tolist() == [0]
    penalised = TokenSampler(SamplingConfig(repetition_penalty=1.5))
    assert penalised.greedy(logits, history).tolist() == [1]


# -- draw ---------------------------------------------------------------------------------------


def test_draws_follow_the_probabilities() -> None:
    random = torch.Generator().manual_seed(3)
    probabilities = torch.rand(12, generator=random)
    probabilities[[0, 4, 11]] = 0
    count = 50_000
    tokens = draw(probabilities.expand(count, -1), torch.rand(count, generator=random))
    assert chi_square_p_value(tokens, probabilities) > FALSE_ALARM_RATE


@pytest.mark.parametrize("uniform", [0.0, 2**-30, 0.5, 1 - 2**-24, 1 - 2**-53])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 3.7])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float, scale: float) -> None:
    random = torch.Generator().manual_seed(4)
    probabilities = torch.rand(500, 64, generator=random) * scale
    probabilities[torch.rand(500, 64, generator=random) < 0.7] = 0
    probabilities[:, 0] = 0
    probabilities[:, -1] = 0
    probabilities[:, 33] = 1e-3 * scale
    tokens = draw(probabilities, torch.full((500,), uniform, dtype=torch.float64))
    assert bool((probabilities.gather(1, tokens[:, None]) > 0).all())


def test_the_only_possible_token_is_drawn() -> None:
    probabilities = torch.zeros(3, 5)
    probabilities[torch.arange(3), torch.tensor([0, 2, 4])] = 0.25
    uniforms = torch.tensor([0.999999, 0.0, 0.5])
    assert draw(probabilities, uniforms).tolist() == [0, 2, 4]


# -- accepting ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafts", "target", "accepted", "token"),
    [
        ([5, 6, 7], [5, 6, 7, 8], 3, 8),
        ([5, 6, 7], [5, 6, 1, 8], 2, 1),
        ([5, 6, 7], [2, 6, 7, 8], 0, 2),
        ([5, 6, 7], [5, 2, 7, 8], 1, 2),
        ([], [9], 0, 9),
    ],
)
def test_greedy_keeps_the_leading_matches(
    drafts: list[int], target: list[int], accepted: int, token: int
) -> None:
    outcome = accept_greedy(torch.tensor([drafts], dtype=torch.int64), torch.tensor([target]))
    assert outcome.num_accepted.tolist() == [accepted]
    assert outcome.next_token.tolist() == [token]


def simplex(seed: int, *shape: int, zeros: float = 0.0) -> Tensor:
    """Random distributions over the last dimension, a share of the entries zero."""
    random = torch.Generator().manual_seed(seed)
    weights = torch.rand(*shape, generator=random) ** 2
    weights[torch.rand(*shape, generator=random) < zeros] = 0
    weights[..., 0] += 1e-3
    return weights / weights.sum(-1, keepdim=True)


VOCABULARY = 6


def first_token_rows(p: Tensor, q: Tensor, grid: int) -> Tensor:
    """The exact distribution of the first emitted token for gamma 1, on a grid of uniforms.

    Every draft x is tried with weight q(x), every accept test and every final draw with the
    midpoints of `grid` equal cells of [0, 1): what is left to chance is a sum.
    """
    cells = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    emitted = torch.zeros(VOCABULARY, dtype=torch.float64)
    pairs = torch.cartesian_prod(cells, cells)
    for token in range(VOCABULARY):
        if q[token] == 0:
            continue
        count = len(pairs)
        outcome = accept_sampled(
            torch.full((count, 1), token),
            q.expand(count, 1, -1),
            torch.stack((p, torch.full_like(p, 1 / VOCABULARY))).expand(count, 2, -1),
            pairs,
        )
        first = torch.where(outcome.num_accepted > 0, token, outcome.next_token)
        emitted += q[token].double() * torch.bincount(first, minlength=VOCABULARY) / count
    return emitted


def one_hot(token: int) -> Tensor:
    return torch.eye(VOCABULARY)[token]


PAIRS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "random": lambda: (simplex(0, VOCABULARY), simplex(1, VOCABULARY)),
    "far-apart": lambda: (simplex(2, VOCABULARY) ** 4, simplex(3, VOCABULARY) ** 4),
    "equal": lambda: (simplex(4, VOCABULARY), simplex(4, VOCABULARY)),
    "q-has-zeros": lambda: (simplex(5, VOCABULARY), simplex(6, VOCABULARY, zeros=0.6)),
    "p-has-zeros": lambda: (simplex(7, VOCABULARY, zeros=0.6), simplex(8, VOCABULARY)),
    "disjoint": lambda: (
        torch.tensor([0.2, 0.3, 0.5, 0, 0, 0]),
        torch.tensor([0, 0, 0, 0.1, 0.1, 0.8]),
    ),
    "certain-draft": lambda: (simplex(9, VOCABULARY), one_hot(2)),
    "certain-target": lambda: (one_hot(3), simplex(10, VOCABULARY)),
}


def pair(name: str) -> tuple[Tensor, Tensor]:
    p, q = PAIRS[name]()
    return p / p.sum(), q / q.sum()


@pytest.mark.parametrize("name", PAIRS)
def test_first_token_has_the_target_distribution_exactly(name: str) -> None:
    p, q = pair(name)
    grid = 400
    emitted = first_token_rows(p, q, grid)
    # A threshold inside a cell is off by at most half a cell. There is one per accept test and
    # one between any two neighbours of the final draw.
    assert float((emitted - p.double()).abs().max()) <= 3 / grid
    assert float(emitted.sum()) == pytest.approx(1, abs=1e-6)
    if name != "equal":
        # The test can fail: p and q are further apart than the grid is coarse.
        assert float((p - q).abs().max()) > 0.05


def prefix_distribution(p: Tensor, prefix: tuple[int, ...]) -> Tensor:
    """A target whose next token depends on the text: its distribution [V] after `prefix`."""
    shift = sum((place + 1) * (token + 1) for place, token in enumerate(prefix))
    return p.roll(shift % VOCABULARY)


@pytest.mark.parametrize("gamma", [1, 3])
@pytest.mark.parametrize("name", PAIRS)
def test_emitted_texts_have_the_target_distribution(name: str, gamma: int) -> None:
    """All tokens up to the third, against the product of the target's conditionals.

    Where fewer than three come out of one verification, the rest is drawn from the target, as
    later iterations would.
    """
    p, q = pair(name)
    count, depth = 40_000, 3
    random = torch.Generator().manual_seed(100 + gamma)
    texts = [*itertools.product(range(VOCABULARY), repeat=depth)]
    prefixes = [
        prefix
        for length in range(max(gamma, depth) + 1)
        for prefix in itertools.product(range(VOCABULARY), repeat=length)
    ]
    row_of = {prefix: row for row, prefix in enumerate(prefixes)}
    target_rows = torch.stack([prefix_distribution(p, prefix) for prefix in prefixes])
    draft_rows = torch.stack([prefix_distribution(q, prefix) for prefix in prefixes])
    child = torch.tensor(
        [[row_of.get((*prefix, token), 0) for token in range(VOCABULARY)] for prefix in prefixes]
    )

    nodes = [torch.zeros(count, dtype=torch.int64)]
    drafts = torch.zeros(count, gamma, dtype=torch.int64)
    for i in range(gamma):
        drafts[:, i] = draw(draft_rows[nodes[-1]], torch.rand(count, generator=random))
        nodes.append(child[nodes[-1], drafts[:, i]])
    path = torch.stack(nodes, dim=1)
    outcome = accept_sampled(
        drafts,
        draft_rows[path[:, :gamma]],
        target_rows[path],
        torch.rand(count, gamma + 1, generator=random),
    )

    text = torch.zeros(count, depth, dtype=torch.int64)
    node = torch.zeros(count, dtype=torch.int64)
    for i in range(depth):
        later = draw(target_rows[node], torch.rand(count, generator=random))
        draft = drafts[:, min(i, gamma - 1)]
        token = torch.where(outcome.num_accepted > i, draft, later)
        text[:, i] = torch.where(outcome.num_accepted == i, outcome.next_token, token)
        node = child[node, text[:, i]]

    weights = torch.ones(len(texts), dtype=torch.float64)
    for place, each in enumerate(texts):
        for i in range(depth):
            weights[place] *= float(prefix_distribution(p, each[:i])[each[i]])
    codes = (text * torch.tensor([VOCABULARY**2, VOCABULARY, 1])).sum(-1)
    assert chi_square_p_value(codes, weights) > FALSE_ALARM_RATE
    if name in ("random", "far-apart", "q-has-zeros", "p-has-zeros"):
        seen = set(outcome.num_accepted.tolist())
        assert seen == set(range(gamma + 1))


def test_equal_distributions_accept_every_draft() -> None:
    random = torch.Generator().manual_seed(5)
    p = simplex(11, 500, 5, 32)
    drafts = draw(p[:, :4], torch.rand(500, 4, generator=random))
    outcome = accept_sampled(drafts, p[:, :4], p, torch.rand(500, 5, generator=random))
    assert outcome.num_accepted.tolist() == [4] * 500


def test_disjoint_supports_reject_at_once_and_draw_the_target() -> None:
    p, q = pair("disjoint")
    drafts = torch.full((100, 2), 5)
    uniforms = torch.rand(100, 3, generator=torch.Generator().manual_seed(6))
    uniforms[0, :2] = 0
    outcome = accept_sampled(drafts, q.expand(100, 2, -1), p.expand(100, 3, -1), uniforms)
    assert outcome.num_accepted.tolist() == [0] * 100
    assert set(outcome.next_token.tolist()) <= {0, 1, 2}


def test_rejected_draft_is_resampled_from_the_residual() -> None:
    p = torch.tensor([[[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]]])
    q = torch.tensor([[[0.9, 0.1, 0.0, 0.0]]])
    # 0.9 q(0) = 0.81 is above p(0) = 0.5; the residual is all on token 1, wherever the draw falls.
    for final in (0.0, 0.3, 0.99):
        outcome = accept_sampled(torch.tensor([[0]]), q, p, torch.tensor([[0.9, final]]))
        assert (outcome.num_accepted.item(), outcome.next_token.item()) == (0, 1)


def test_bonus_token_comes_from_the_row_behind_the_drafts() -> None:
    p = torch.zeros(1, 3, 4)
    p[0, 0, 1] = p[0, 1, 2] = p[0, 2, 3] = 1
    outcome = accept_sampled(torch.tensor([[1, 2]]), p[:, :2], p, torch.rand(1, 3))
    assert (outcome.num_accepted.item(), outcome.next_token.item()) == (2, 3)


def test_without_drafts_the_target_is_sampled() -> None:
    p = simplex(12, 1, 1, 8).expand(20_000, 1, 8)
    uniforms = torch.rand(20_000, 1, generator=torch.Generator().manual_seed(7))
    outcome = accept_sampled(
        torch.zeros(20_000, 0, dtype=torch.int64), p.new_zeros(20_000, 0, 8), p, uniforms
    )
    assert chi_square_p_value(outcome.next_token, p[0, 0]) > FALSE_ALARM_RATE
    assert int(outcome.num_accepted.max()) == 0
