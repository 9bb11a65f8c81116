from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.bench_statistics import PLATEAUS_S, Series, gate_verdicts, steady_result
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.records import Run, StepRecord
from vegas_tune.measure import Measurement, measure
from vegas_tune.steady import (
    Unsteady,
    kendall_tau,
    neighbour_correlation,
    relative_trend,
    steady_steps,
    theil_sen_slope,
    trend_p_value,
)


def _step(duration_s: float, *, waiting: int = 3, lanes: int = 2, kept: int = 2) -> StepRecord:
    return StepRecord.from_dict(
        {
            "kind": "decode",
            "num_running": lanes,
            "num_waiting": waiting,
            "request_ids": tuple(range(lanes)),
            "num_draft_tokens": (3,) * lanes,
            "num_accepted_tokens": (kept,) * lanes,
            "num_emitted_tokens": (kept + 1,) * lanes,
            "draft_s": duration_s,
            "select_s": 0.0,
            "verify_s": 0.0,
            "other_s": 0.0,
        }
    )  # fmt: skip


def _run(steps: list[StepRecord]) -> Run:
    config = SpeculationConfig(num_speculative_tokens=3, sparsity_ratio=0.1)
    return Run(config=config, batch_size=2, steps=tuple(steps), elapsed_s=100.0)


def _noisy(count: int, pace: np.ndarray | float = 1.0, cv: float = 0.03) -> list[StepRecord]:
    noise = 1 + cv * np.random.default_rng(7).standard_normal(count)
    return [_step(float(time)) for time in pace * noise]


def _steady(steps: list[StepRecord]) -> tuple[StepRecord, ...]:
    found = steady_steps(_run(steps))
    assert not isinstance(found, Unsteady), found.reason
    return found


def _reason(steps: list[StepRecord]) -> str:
    found = steady_steps(_run(steps))
    assert isinstance(found, Unsteady)
    assert found.kind == "unsteady"
    return found.reason


# ------------------------------------------------------------------ which steps count


def test_steps_count_while_requests_wait() -> None:
    queued, dry = [_step(1.0)] * 8, [_step(5.0, waiting=0)] * 8
    assert {step.duration_s for step in _steady(queued + dry)} == {1.0}


def test_a_pass_that_never_had_a_queue_counts_full_steps() -> None:
    steps = [_step(1.0, waiting=0)] * 8 + [_step(9.0, waiting=0, lanes=1)]
    assert len(_steady(steps)) == 7


def test_a_queue_that_ran_dry_at_once_is_named() -> None:
    reason = _reason([_step(1.0)] * 2 + [_step(1.0, waiting=0)] * 20)
    assert "in 20 no request was waiting any more" in reason


# ------------------------------------------------------------------ warm-up


def test_the_warm_up_is_left_out_and_little_else() -> None:
    cold = 1 + 0.8 * np.exp(-np.arange(200) / 8)
    kept = _steady(_noisy(200, cold))
    # Five time constants: what is left of the warm-up there is 0.5 %, far inside the noise.
    assert 100 <= len(kept) <= 190
    assert np.mean([step.duration_s for step in kept]) == pytest.approx(1.0, abs=0.02)


def test_a_level_pass_keeps_most_of_its_steps() -> None:
    assert len(_steady(_noisy(200))) >= 100


def test_short_passes_keep_every_step_but_the_first() -> None:
    assert len(_steady(_noisy(40, 1 + 0.3 * np.exp(-np.arange(40) / 8)))) == 39


def test_a_pass_that_never_settles_is_a_result_not_a_number() -> None:
    reason = _reason(_noisy(200, np.where(np.arange(200) < 150, 1.6, 1.0)))
    assert "had not settled half-way" in reason
    assert "measure more tokens" in reason


# ------------------------------------------------------------------ trend


def test_arrivals_that_make_steps_longer_are_decoding_that_settled() -> None:
    # As stock vLLM decoded 128 requests on an H200: 7 ms a step, 5 ms more for each admission,
    # every fourth step on average, and a few steps of twice and four times that.
    flagged = 0
    for seed in range(150):
        random = np.random.default_rng(seed)
        times = 7.0 * (1 + 0.02 * random.standard_normal(256))
        times += 5.0 * (random.random(256) < 0.25)
        times += 20.0 * (random.random(256) < 0.01)
        flagged += isinstance(steady_steps(_run([_step(float(t)) for t in times / 1000])), Unsteady)
    # Two tests at 1 % each.
    assert flagged <= 7


def test_a_machine_that_slows_down_all_the_time_is_not_steady() -> None:
    assert "times as long as in its first half" in _reason(_noisy(200, np.linspace(1, 1.4, 200)))
    # Slow enough not to look like a warm-up.
    assert "slower over the pass" in _reason(_noisy(200, np.linspace(1, 1.1, 200)))


def test_text_that_becomes_easier_is_no_fault_of_the_machine() -> None:
    steps = [_step(1.0) if index < 60 else _step(1.0, kept=3) for index in range(120)]
    _steady(steps)


def test_a_sure_but_small_trend_is_decoding() -> None:
    # Contexts grow: 3 % over the pass is significant and no fault.
    _steady(_noisy(400, np.linspace(1.0, 1.03, 400), cv=0.005))


def test_correlated_noise_is_hardly_ever_called_a_trend() -> None:
    random = np.random.default_rng(3)
    alarms = 0
    trials = 500
    for _ in range(trials):
        values = random.standard_normal(20)
        for index in range(1, 20):
            values[index] = 0.5 * values[index - 1] + values[index]
        alarms += trend_p_value(1 + 0.05 * values) < 0.01
    # 1 % nominal; the correlation of 20 values is itself an estimate. Without the correction: 8 %.
    assert alarms / trials <= 0.035


def test_a_trend_in_noise_is_found() -> None:
    values = 1 + np.linspace(0, 0.2, 20) + 0.02 * np.random.default_rng(4).standard_normal(20)
    assert trend_p_value(values) < 0.001
    assert relative_trend(values) == pytest.approx(0.2 / 1.1, abs=0.03)


def test_slope_and_tau_are_scipy_s() -> None:
    from scipy.stats import kendalltau, theilslopes

    random = np.random.default_rng(6)
    for count in (2, 3, 10, 20, 21):
        for values in (random.standard_normal(count), random.integers(0, 3, count).astype(float)):
            assert theil_sen_slope(values) == theilslopes(values).slope
            tau = kendalltau(np.arange(count), values).statistic
            # The order of two divisions is not the same.
            assert kendall_tau(values) == pytest.approx(tau, rel=1e-14, nan_ok=True)
    assert math.isnan(kendall_tau(np.ones(5)))


def test_equal_values_have_no_trend_and_no_correlation() -> None:
    assert trend_p_value(np.ones(20)) == 1.0
    assert neighbour_correlation(np.zeros(20)) == 0.0


def test_the_correlation_of_neighbours_is_estimated_without_much_bias() -> None:
    random = np.random.default_rng(5)
    found = []
    for _ in range(400):
        values = random.standard_normal(40)
        for index in range(1, 40):
            values[index] = 0.5 * values[index - 1] + values[index]
        found.append(neighbour_correlation(values - values.mean()))
    # Standard error of the mean 0.007; uncorrected it would be 0.44.
    assert np.mean(found) == pytest.approx(0.5, abs=0.03)


# ------------------------------------------------------------------ figures on known truth


@pytest.mark.parametrize("plateau_s", PLATEAUS_S)
def test_steady_throughput_is_unbiased_and_its_interval_honest(plateau_s: float) -> None:
    # The same with 1,000 passes: benchmarks/results/statistics.json.
    result = steady_result(Series(plateau_s, 1.0), num_runs=200, seed=1)
    assert abs(result.bias) < 0.02
    assert result.whole_run_bias < -0.15
    # 90 to 97 % in the long run; 200 passes add +-4 %.
    assert 0.88 <= result.coverage <= 0.99
    # 1 % of level passes are called unsteady, and measured again.
    assert result.unsteady <= 0.05


def test_the_gate_rarely_alarms_and_finds_a_loss_of_five_per_cent() -> None:
    same, less = gate_verdicts(1.0, 300, seed=1), gate_verdicts(0.95, 300, seed=1)
    assert same["regressed"] < 0.02
    assert same["ok"] > 0.9
    # 80 % in the long run; 300 comparisons add +-4 %.
    assert less["regressed"] >= 0.76
    assert less["ok"] < 0.02


def test_a_measurement_comes_from_the_steady_steps_alone() -> None:
    figures = measure(_run([*_noisy(60), *[_step(7.0, waiting=0)] * 30]))
    assert isinstance(figures, Measurement)
    assert figures.decode_tok_s.est == pytest.approx(6.0, rel=0.02)
