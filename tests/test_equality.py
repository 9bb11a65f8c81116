from __future__ import annotations

import numpy as np
import pytest

from benchmarks.equality import compare_samples, first_difference, is_more_often

WEIGHTS = np.array([0.5, 0.2, 0.1, 0.1, 0.05, *[0.05 / 200] * 200])


def _draw(random: np.random.Generator, weights: np.ndarray, n: int) -> list[int]:
    drawn = random.choice(len(weights), size=n, p=weights / weights.sum())
    return [int(token) for token in drawn]


def test_equal_distributions_alarm_as_often_as_stated() -> None:
    random = np.random.default_rng(0)
    alarms = sum(
        compare_samples(_draw(random, WEIGHTS, 2000), _draw(random, WEIGHTS, 2000)).alarms(0.05)
        for _ in range(400)
    )
    # 5 % of 400 are 20; three standard deviations of a binomial are 13.
    assert 7 <= alarms <= 33


@pytest.mark.parametrize("power", [0.9, 1.1])
def test_a_slightly_wrong_temperature_is_found_with_20_000_samples(power: float) -> None:
    random = np.random.default_rng(1)
    ours, theirs = _draw(random, WEIGHTS, 20_000), _draw(random, WEIGHTS**power, 20_000)
    assert compare_samples(ours, theirs).alarms(0.001)


def test_rare_tokens_are_counted_together() -> None:
    random = np.random.default_rng(2)
    test = compare_samples(_draw(random, WEIGHTS, 1000), _draw(random, WEIGHTS, 1000))
    assert test.num_categories == 6
    assert test.n == (1000, 1000)


def test_one_token_is_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="always holds the same"):
        compare_samples([7] * 100, [7] * 100)


def test_unequal_samples_are_compared_by_share() -> None:
    random = np.random.default_rng(3)
    test = compare_samples(_draw(random, WEIGHTS, 4000), _draw(random, WEIGHTS, 1000))
    assert not test.alarms(0.001)


@pytest.mark.parametrize(
    ("count", "control", "is_more"), [(3, 3, False), (20, 2, True), (0, 9, False)]
)
def test_more_often_than_the_control_is_one_sided(count: int, control: int, is_more: bool) -> None:
    assert (is_more_often(count, 64, control, 64) < 0.01) == is_more


def test_first_difference_is_where_outputs_part() -> None:
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) is None
