from __future__ import annotations

import math

import numpy as np
import pytest
from synthetic import PLATEAU, SyntheticEngine, make_blocks

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.records import Run, StepRecord
from vegas_tune.measure import (
    Counts,
    Estimate,
    Measurement,
    accepted,
    decode_tok_s,
    mean_ratio,
    measure,
    phase_times,
    pool,
    position_acceptance,
    request_counts,
    survival,
)
from vegas_tune.performer import rounded
from vegas_tune.steady import Unsteady, steady_steps


def _step(
    duration_s: float = 1.0,
    *,
    accepted: tuple[int, ...] = (2, 2),
    drafted: int = 3,
    kind: str = "decode",
    ids: tuple[int, ...] | None = None,
) -> StepRecord:
    lanes = len(accepted)
    return StepRecord.from_dict(
        {
            "kind": kind,
            "num_running": lanes,
            "num_waiting": 0,
            "request_ids": ids or tuple(range(lanes)),
            "num_draft_tokens": (drafted,) * lanes,
            "num_accepted_tokens": accepted,
            "num_emitted_tokens": tuple(count + 1 for count in accepted),
            "draft_s": 0.6 * duration_s,
            "select_s": 0.0,
            "verify_s": 0.4 * duration_s,
            "other_s": 0.0,
        }
    )


def _run(steps: list[StepRecord], batch_size: int = 2, gamma: int = 3) -> Run:
    config = SpeculationConfig(num_speculative_tokens=gamma, sparsity_ratio=0.1)
    return Run(config=config, batch_size=batch_size, steps=tuple(steps), elapsed_s=10.0)


def test_steady_steps_are_full_decode_steps_without_the_warm_up() -> None:
    slow = _step(50.0)
    steps = [
        _step(9.0, kind="prefill"),
        slow,
        _step(1.0),
        _step(1.1),
        _step(5.0, accepted=(2,)),
        _step(1.2),
    ]
    steady = steady_steps(_run(steps))
    assert not isinstance(steady, Unsteady)
    assert [step.duration_s for step in steady] == pytest.approx([1.0, 1.1, 1.2])


def test_too_few_steady_steps_say_where_they_went() -> None:
    steps = [_step(kind="prefill"), _step(), _step(), _step(accepted=(1,))]
    result = steady_steps(_run(steps))
    assert isinstance(result, Unsteady)
    assert result.kind == "unsteady"
    assert "1 steady steps of 4" in result.reason
    assert "1 processed prompt text" in result.reason
    assert "1 ran fewer than 2 requests" in result.reason


@pytest.mark.parametrize("time", [math.nan, math.inf, 0.0, -1.0])
def test_impossible_times_are_not_measured(time: float) -> None:
    result = steady_steps(_run([_step(), _step(), _step(), _step(time)]))
    assert isinstance(result, Unsteady)
    assert result.kind == "nan"


def test_a_step_time_that_doubles_half_way_is_not_steady() -> None:
    calm = [_step(1.0)] * 12
    assert not isinstance(steady_steps(_run(calm)), Unsteady)
    result = steady_steps(_run([_step(1.0)] * 6 + [_step(2.5)] * 6))
    assert isinstance(result, Unsteady)
    assert "2.5 times" in result.reason


def test_throughput_is_tokens_over_time() -> None:
    steps = [_step(2.0, accepted=(1, 3))] * 5
    estimate = decode_tok_s(steps)
    assert estimate.est == pytest.approx(6 / 2.0)
    assert estimate.low == estimate.high == pytest.approx(estimate.est)


def test_throughput_weighs_steps_by_their_time_not_by_their_number() -> None:
    estimate = decode_tok_s([_step(1.0, accepted=(0, 0)), _step(9.0, accepted=(3, 3))] * 4)
    assert estimate.est == pytest.approx((2 + 8) / 10)


def test_batch_means_cover_the_truth_where_steps_are_correlated() -> None:
    # AR(0.6), 600 steps: the formula for independent steps covered 67 % in design/tuning.md.
    random = np.random.default_rng(1)
    covered = independent = 0
    trials = 300
    for _ in range(trials):
        noise = random.standard_normal(600)
        for i in range(1, 600):
            noise[i] = 0.6 * noise[i - 1] + 0.8 * noise[i]
        durations = 1.0 + 0.05 * noise
        steps = [_step(float(d)) for d in durations]
        estimate = decode_tok_s(steps)
        truth = 6.0
        covered += estimate.low <= truth <= estimate.high
        reach = 1.96 * durations.std() / math.sqrt(600) * truth
        independent += abs(estimate.est - truth) <= reach
    # Binomial 99.9 % bounds of 93 % and of 67 % in 300 trials are +-5 and +-9 %.
    assert 0.88 <= covered / trials <= 0.98
    assert independent / trials < 0.78


def test_short_passes_keep_their_coverage() -> None:
    # Eight independent steps: pairs of steps and t quantiles.
    random = np.random.default_rng(2)
    trials = 1000
    covered = 0
    for durations in random.normal(1.0, 0.05, (trials, 8)):
        estimate = decode_tok_s([_step(float(d)) for d in durations])
        covered += estimate.low <= 6.0 <= estimate.high
    assert 0.92 <= covered / trials <= 0.98  # 95 % +- 3.5 binomial deviations, ratio bias aside


def test_accepted_tokens_count_drafts_not_requests() -> None:
    estimate = accepted([{0: Counts(30, 10), 1: Counts(0, 5)}])
    assert estimate.est == pytest.approx(2.0)
    assert estimate.low <= estimate.est <= estimate.high
    assert estimate.n == 2


def test_the_same_request_in_two_passes_is_one_request() -> None:
    once = {(0, i): Counts(i, 10) for i in range(5)}
    pooled = pool([once, once])
    assert pooled[0, 3] == Counts(6, 20)
    assert accepted([once, once]) == accepted([once])


def test_accepted_interval_covers_requests_that_differ() -> None:
    random = np.random.default_rng(3)
    covered = 0
    trials = 200
    for _ in range(trials):
        chance = random.beta(8, 4, 24)
        counts = {i: Counts(int(random.binomial(700, p)), 100) for i, p in enumerate(chance)}
        estimate = accepted([counts])
        covered += estimate.low <= 7 * 8 / 12 <= estimate.high
    assert 0.86 <= covered / trials <= 0.99  # percentile bootstrap of 24 requests: about 93 %


def test_accepting_nothing_at_all_is_an_error_in_the_caller() -> None:
    with pytest.raises(ValueError, match="no request"):
        accepted([{}])


def test_request_counts_leave_the_warm_up_out_and_keep_the_tail() -> None:
    steps = [
        _step(accepted=(3, 3)),
        _step(accepted=(1, 2)),
        _step(accepted=(2,), ids=(1,)),
        _step(accepted=(0, 0), drafted=0),
    ]
    assert request_counts(_run(steps)) == {0: Counts(1, 1), 1: Counts(4, 2)}


def test_position_acceptance_counts_only_iterations_that_got_there() -> None:
    steps = [_step(accepted=(0, 0))] + [_step(accepted=(3, 1)), _step(accepted=(0, 2))] * 2
    values = position_acceptance([(0, _run(steps))])
    # Without the warm-up the drafts accepted are 3, 1, 0 and 2, twice.
    assert [value.est for value in values] == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert all(value.low <= value.est <= value.high for value in values)
    assert {value.n for value in values} == {2}


def test_position_acceptance_ends_where_no_iteration_got() -> None:
    steps = [_step(accepted=(3, 3))] + [_step(accepted=(1, 0))] * 4
    assert [value.est for value in position_acceptance([(0, _run(steps))])] == [0.5, 0.0]
    assert position_acceptance([(0, _run(steps, gamma=5))]) == ()
    assert position_acceptance([]) == ()


def test_position_acceptance_resamples_requests_and_not_iterations() -> None:
    """Two texts, one easy and one hard: the interval spans both, however long they are."""
    steps = [_step(accepted=(3, 0))] * 400
    first, *_ = position_acceptance([(0, _run(steps))])
    assert (first.low, first.est, first.high) == (0.0, 0.5, 1.0)


def test_survival_ignores_drafts_cut_short() -> None:
    steps = [
        _step(accepted=(0, 0)),
        _step(accepted=(3, 1)),
        _step(accepted=(1, 1), drafted=1),
        _step(accepted=(2, 0)),
    ]
    assert survival([_run(steps)]) == pytest.approx((0.75, 0.5, 0.25))


def test_phase_times_are_per_iteration() -> None:
    phases = phase_times([_step(1.0), _step(3.0), _step(2.0), _step(2.0)])
    assert phases["draft_s"].est == pytest.approx(1.2)
    assert phases["verify_s"].est == pytest.approx(0.8)
    assert phases["select_s"].est == 0.0


def test_plain_decoding_has_no_acceptance() -> None:
    run = _run([_step(accepted=(0, 0), drafted=0)] * 6, gamma=0)
    figures = measure(run)
    assert isinstance(figures, Measurement)
    assert figures.accepted is None
    assert figures.survival == ()
    assert figures.num_steps == 5


def test_mean_ratio_is_geometric() -> None:
    estimate = mean_ratio([math.log(2.0), math.log(0.5)])
    assert estimate.est == pytest.approx(1.0)
    assert estimate.low * estimate.high == pytest.approx(1.0)


def test_an_estimate_is_written_with_six_digits() -> None:
    estimate = Estimate(est=1 / 3, low=1 / 7, high=2 / 3, n=4)
    assert estimate.to_dict() == {"est": 0.333333, "low": 0.142857, "high": 0.666667, "n": 4}
    assert estimate.scaled(1000).est == pytest.approx(1000 / 3)


def test_a_rounded_run_is_what_its_record_reads_back() -> None:
    engine = SyntheticEngine(PLATEAU)
    engine.configure(SpeculationConfig(num_speculative_tokens=4, sparsity_ratio=0.05))
    run = engine.run(make_blocks(1)[0], replicate=0, max_tokens=300, deadline_s=1e9)
    assert rounded(run) == Run.from_dict(run.to_dict())
    assert rounded(run) != run
