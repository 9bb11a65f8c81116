from __future__ import annotations

import math
import random

import pytest

from vegas_runtime.metrics import (
    acceptance_length,
    acceptance_rate,
    accepted_per_iteration,
    decode_throughput,
    per_position_acceptance,
    survival,
    tpot_s,
    ttft_s,
)


def test_one_run_in_every_metric() -> None:
    # Four verifications of five drafts each.
    accepted = [5, 2, 0, 2]
    total = sum(accepted)
    assert acceptance_rate(total, 20) == pytest.approx(9 / 20)
    assert accepted_per_iteration(total, 4) == pytest.approx(9 / 4)
    assert acceptance_length(total, 4) == pytest.approx(9 / 4 + 1)
    assert survival(accepted, 5) == pytest.approx([3 / 4, 3 / 4, 1 / 4, 1 / 4, 1 / 4])
    assert per_position_acceptance(accepted, 5) == pytest.approx([3 / 4, 1, 1 / 3, 1, 1])
    assert decode_throughput(26, 2.0) == pytest.approx(13)


def test_survival_sums_to_accepted_per_iteration() -> None:
    accepted = random.Random(0).choices(range(8), k=200)
    assert sum(survival(accepted, 7)) == pytest.approx(accepted_per_iteration(sum(accepted), 200))


def test_survival_is_the_product_of_the_positions() -> None:
    accepted = random.Random(1).choices(range(5), k=500)
    positions = per_position_acceptance(accepted, 4)
    assert survival(accepted, 4) == pytest.approx([math.prod(positions[: i + 1]) for i in range(4)])


def test_a_position_never_reached_has_no_acceptance() -> None:
    positions = per_position_acceptance([1, 0, 1], 3)
    assert positions[:2] == pytest.approx([2 / 3, 0])
    assert math.isnan(positions[2])


def test_nothing_measured_is_nan_and_not_zero() -> None:
    assert math.isnan(acceptance_rate(0, 0))
    assert math.isnan(accepted_per_iteration(0, 0))
    assert math.isnan(acceptance_length(0, 0))
    assert all(math.isnan(value) for value in survival([], 3))
    assert all(math.isnan(value) for value in per_position_acceptance([], 3))
    assert survival([], 0) == []
    assert survival([0, 0], 0) == []


def test_times() -> None:
    assert ttft_s(2.0, 2.75) == pytest.approx(0.75)
    assert tpot_s(10.0, 1.0, 10) == pytest.approx(1.0)
    assert math.isnan(tpot_s(1.0, 1.0, 1))
