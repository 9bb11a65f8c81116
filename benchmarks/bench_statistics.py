"""The estimators and the gate on series whose truth is known.

A simulated pass fills its batch over 90 s, keeps it full for the plateau, and drains for 120 s, as
in a server under load. Step times carry AR(1) noise of 0.6 from second to second; the first
seconds of the full batch run slower (cold caches, clocks). Requests that finish are replaced, which
puts prompt steps into the plateau.

The gate is simulated with 1.5 % noise of each pass, 3 % between engine starts and 2 % drift over a
comparison, in pairs taken forth and back.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from benchmarks.results_file import Row, write_rows
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.records import Run, StepRecord
from vegas_tune.gate import LEAST_MARGIN, NOISE_MARGIN, Status
from vegas_tune.measure import Measurement, mean_ratio, measure
from vegas_tune.plan import DEFAULT_LOOKS, FAMILY_ALPHA
from vegas_tune.recheck import CHECK_LOOKS, compare_pairs

PLATEAUS_S = (600.0, 180.0, 60.0)
RAMP_S, DRAIN_S = 90.0, 120.0
BATCH, GAMMA, AGREEMENT = 16, 4, 0.8
NOISE_CV, CORRELATION = 0.05, 0.6
COLD, COLD_S = 0.3, 3.0
REQUEST_S, PREFILL_S = 60.0, 0.3

PASS_CV, RESTART_CV, DRIFT = 0.015, 0.03, 0.02
SPEEDUP = 1.4


# --------------------------------------------------------------------------- simulated passes


@dataclass(frozen=True)
class Series:
    """What one kind of simulated pass looks like; times in seconds."""

    plateau_s: float
    step_s: float

    @property
    def truth(self) -> float:
        """Decode throughput of a full, warm batch, tokens per second."""
        kept = sum(AGREEMENT**i for i in range(1, GAMMA + 1))
        return BATCH * (1 + kept) / self.step_s

    def simulate(self, random: np.random.Generator) -> Run:
        """One pass."""
        count = math.ceil((RAMP_S + self.plateau_s + DRAIN_S) / self.step_s)
        pace = iter((1 + NOISE_CV * _correlated(random, count, CORRELATION**self.step_s)).tolist())
        steps: list[StepRecord] = []
        for lanes in range(1, BATCH):
            self._stretch(random, pace, steps, lanes, RAMP_S / (BATCH - 1), waiting=BATCH)
        self._stretch(random, pace, steps, BATCH, self.plateau_s, waiting=BATCH, is_full=True)
        for lanes in range(BATCH - 1, 0, -1):
            self._stretch(random, pace, steps, lanes, DRAIN_S / (BATCH - 1), waiting=0)
        return Run(
            config=SpeculationConfig(num_speculative_tokens=GAMMA, sparsity_ratio=0.05),
            batch_size=BATCH,
            steps=tuple(steps),
            elapsed_s=sum(step.duration_s for step in steps),
        )

    def _stretch(
        self,
        random: np.random.Generator,
        pace: Iterator[float],
        steps: list[StepRecord],
        lanes: int,
        length_s: float,
        *,
        waiting: int,
        is_full: bool = False,
    ) -> None:
        """Append steps of one batch size; a full batch starts cold and replaces its requests."""
        clock_s = 0.0
        while clock_s < length_s:
            cold = 1 + COLD * math.exp(-clock_s / COLD_S) if is_full else 1.0
            time_s = self.step_s * next(pace, 1.0) * cold
            is_admitting = is_full and random.random() < BATCH * self.step_s / REQUEST_S
            if is_admitting:
                time_s += PREFILL_S
            agrees = random.random((lanes, GAMMA)) < AGREEMENT
            steps.append(
                _step(
                    kind="prefill" if is_admitting else "decode",
                    kept=np.cumprod(agrees, axis=1).sum(axis=1).tolist(),
                    waiting=waiting,
                    time_s=time_s,
                )
            )
            clock_s += time_s


def _step(*, kind: str, kept: list[int], waiting: int, time_s: float) -> StepRecord:
    return StepRecord.from_dict(
        {
            "kind": kind,
            "num_running": len(kept),
            "num_waiting": waiting,
            "request_ids": tuple(range(len(kept))),
            "num_draft_tokens": (GAMMA,) * len(kept),
            "num_accepted_tokens": tuple(kept),
            "num_emitted_tokens": tuple(count + 1 for count in kept),
            "draft_s": 0.5 * time_s,
            "select_s": 0.0,
            "verify_s": 0.5 * time_s,
            "other_s": 0.0,
        }
    )


def _correlated(random: np.random.Generator, count: int, rho: float) -> np.ndarray:
    values = random.standard_normal(count)
    scale = math.sqrt(1 - rho**2)
    for index in range(1, count):
        values[index] = rho * values[index - 1] + scale * values[index]
    return values


def whole_run_rate(run: Run) -> float:
    """What dividing all tokens by all time gives: the usual figure, for comparison."""
    return sum(sum(step.num_emitted_tokens) for step in run.steps) / run.elapsed_s


@dataclass(frozen=True, kw_only=True)
class SteadyResult:
    """Counts over simulated passes; biases are means, fractions of the truth."""

    bias: float
    whole_run_bias: float
    coverage: float
    unsteady: float
    half_width: float


def steady_result(series: Series, num_runs: int, seed: int) -> SteadyResult:
    """Measure simulated passes with the sweep's own estimator."""
    random = np.random.default_rng([seed, round(series.plateau_s), round(100 * series.step_s)])
    found: list[Measurement] = []
    whole = []
    for _ in range(num_runs):
        run = series.simulate(random)
        whole.append(whole_run_rate(run) / series.truth - 1)
        measurement = measure(run)
        if isinstance(measurement, Measurement):
            found.append(measurement)
    rates = [one.decode_tok_s for one in found]
    return SteadyResult(
        bias=fmean(rate.est / series.truth - 1 for rate in rates),
        whole_run_bias=fmean(whole),
        coverage=fmean(rate.low <= series.truth <= rate.high for rate in rates),
        unsteady=1 - len(found) / num_runs,
        half_width=fmean(rate.half_width for rate in rates),
    )


# --------------------------------------------------------------------------- simulated gate


def gate_verdicts(
    truth: float, num_runs: int, seed: int, *, num_recorded: int = 16
) -> dict[Status, float]:
    """Shares of the speed-up gate's verdicts.

    Args:
        truth: the speed-up's true change since the profile was recorded; 1 is none.
        num_runs: comparisons.
        seed: of the noise.
        num_recorded: pairs behind the recorded speed-up.
    """
    random = np.random.default_rng([seed, round(1000 * truth), num_recorded])
    recorded_level = 1 - FAMILY_ALPHA / len(DEFAULT_LOOKS)
    counts: dict[Status, int] = {"ok": 0, "regressed": 0, "inconclusive": 0}
    for _ in range(num_runs):
        before = list(_rounds(random, (SPEEDUP, SPEEDUP, 1.0), num_recorded))
        status, _ = compare_pairs(
            (
                own - plain
                for own, plain in _rounds(random, (SPEEDUP * truth, 1.0), CHECK_LOOKS[-1])
            ),
            mean_ratio([own - plain for own, _, plain in before], recorded_level),
            margin=max(LEAST_MARGIN, NOISE_MARGIN * _noise_floor(before)),
            recorded_level=recorded_level,
        )
        counts[status] += 1
    return {status: count / num_runs for status, count in counts.items()}


def _rounds(
    random: np.random.Generator, speeds: Sequence[float], count: int
) -> Iterator[list[float]]:
    """Log rates of settings measured side by side in one engine start, every other round backwards.

    Args:
        random: the noise.
        speeds: true speed of each setting.
        count: rounds.
    """
    start = random.normal(0, RESTART_CV)
    width = len(speeds)
    for index in range(count):
        moments = (index * width + np.arange(width)) / (count * width)
        drift = DRIFT * (moments if index % 2 == 0 else moments[::-1])
        noise = random.normal(0, PASS_CV, width)
        yield (np.log(speeds) + start - drift + noise).tolist()


def _noise_floor(rounds: Sequence[Sequence[float]]) -> float:
    """Spread left after settings and rounds, as a sweep records it: an estimate like any other."""
    table = np.array(rounds)
    residual = table - table.mean(axis=0) - table.mean(axis=1, keepdims=True) + table.mean()
    return math.sqrt(float((residual**2).sum()) / ((len(table) - 1) * (table.shape[1] - 1)))


# --------------------------------------------------------------------------- figures


def main() -> None:
    """Simulate, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = [
        row
        for step_s in (1.0, 0.1)
        for plateau_s in PLATEAUS_S
        for row in _steady_rows(Series(plateau_s, step_s), args.runs, args.seed)
    ]
    rows += _gate_rows(args.runs, args.seed)
    for row in rows:
        print(row)
    print(write_rows("statistics", rows))


def _steady_rows(series: Series, num_runs: int, seed: int) -> list[Row]:
    result = steady_result(series, num_runs, seed)
    case = (
        f"plateau {series.plateau_s:g} s, steps of {series.step_s:g} s, AR({CORRELATION:g}) per "
        f"second, {num_runs} passes"
    )
    return [
        _row("steady_bias_pct", case, result.bias, "% of the true throughput"),
        _row("whole_run_bias_pct", case, result.whole_run_bias, "% of the true throughput"),
        _share("interval_coverage_pct", case, result.coverage, num_runs, "% of 95 % intervals"),
        _share("unsteady_pct", case, result.unsteady, num_runs, "% of passes"),
        _row("interval_half_width_pct", case, result.half_width, "% of the throughput"),
    ]


def _gate_rows(num_runs: int, seed: int) -> list[Row]:
    rows = []
    for num_recorded in (16, 10, 6):
        shares = {
            truth: gate_verdicts(truth, num_runs, seed, num_recorded=num_recorded)
            for truth in (1.0, 0.98, 0.95, 0.92)
        }
        case = (
            f"{num_recorded} recorded pairs, looks after {', '.join(map(str, CHECK_LOOKS))}, "
            f"{num_runs} comparisons"
        )
        rows += [
            _share("gate_false_alarm_pct", case, shares[1.0]["regressed"], num_runs, "%"),
            _share("gate_ok_pct", case, shares[1.0]["ok"], num_runs, "%"),
            _share("gate_alarm_at_minus2_pct", case, shares[0.98]["regressed"], num_runs, "%"),
            _share("gate_power_at_minus5_pct", case, shares[0.95]["regressed"], num_runs, "%"),
            _share("gate_missed_at_minus5_pct", case, shares[0.95]["ok"], num_runs, "%"),
            _share("gate_power_at_minus8_pct", case, shares[0.92]["regressed"], num_runs, "%"),
        ]
    return rows


def _row(claim: str, case: str, value: float, unit: str) -> Row:
    return Row(claim=claim, case=case, value=round(100 * value, 2), low=None, high=None, unit=unit)


def _share(claim: str, case: str, share: float, count: int, unit: str) -> Row:
    """A share with its Wilson interval."""
    z = 1.96
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    reach = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
    return Row(
        claim=claim,
        case=case,
        value=round(100 * share, 2),
        low=round(100 * max(centre - reach, 0.0), 2),
        high=round(100 * min(centre + reach, 1.0), 2),
        unit=unit,
    )


if __name__ == "__main__":
    main()
