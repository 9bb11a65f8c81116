"""Records in, figures with intervals out. Pure functions; nothing here knows an engine.

Throughput is counted over the steps in which the whole batch decodes, and its interval comes from
batch means, because neighbouring steps are correlated. Accepted tokens get a bootstrap over
requests, because iterations of one request are correlated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from scipy.special import stdtrit

from vegas_runtime import metrics
from vegas_runtime.records import Run, StepRecord
from vegas_tune.steady import (
    WARMUP_STEPS,
    FloatArray,
    Unsteady,
    neighbour_correlation,
    steady_steps,
)

PHASES: Final = ("draft_s", "select_s", "verify_s", "other_s")

# Means of 20 batches; what correlation remains between them widens the interval. Coverage of an
# AR(0.6) series of one-second steps: 95 % at 600 steps, 94 % at 60 (85 % without the widening; the
# formula for independent steps 67 %).
NUM_BATCHES: Final = 20
# Fewer batches say too little about their correlation to correct for it.
_MIN_BATCHES_TO_CORRECT: Final = 16

NUM_RESAMPLES: Final = 1000
_BOOTSTRAP_SEED: Final = 20_260_129


def significant(value: float) -> float:
    """Six significant digits: what is kept of a figure, so that a replay reaches the same text."""
    return float(f"{value:.6g}")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure and its 95 % interval.

    Attributes:
        est: the estimate.
        low: lower end of the interval, at most `est`.
        high: upper end, at least `est`.
        n: independent observations behind it (batches, requests or pairs).
    """

    est: float
    low: float
    high: float
    n: int

    @property
    def half_width(self) -> float:
        """Half the interval's width over the estimate; infinite when the estimate is 0."""
        return (self.high - self.low) / 2 / self.est if self.est else math.inf

    def scaled(self, factor: float) -> Estimate:
        """The same figure in another unit; `factor` is positive."""
        return Estimate(
            est=self.est * factor, low=self.low * factor, high=self.high * factor, n=self.n
        )

    def shifted(self, by: float) -> Estimate:
        """The same figure with a constant added."""
        return Estimate(est=self.est + by, low=self.low + by, high=self.high + by, n=self.n)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, six significant digits, in the profile's own keys."""
        return {
            "est": significant(self.est),
            "low": significant(self.low),
            "high": significant(self.high),
            "n": self.n,
        }


class Counts(NamedTuple):
    """Raw counters of one request."""

    num_accepted_tokens: int
    num_drafts: int


# By request: its index in a pass, or (block, index) over several.
RequestCounts = Mapping[Any, Counts]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """All figures of one pass.

    Attributes:
        decode_tok_s: decode throughput, tokens per second.
        accepted: accepted drafts per verification, bonus token excluded; None at gamma 0.
        survival: P(the first i drafts were all accepted), i = 1..gamma.
        phases: seconds per iteration, by phase (`PHASES`).
        counts: accepted tokens and drafts per request index.
        num_steps: steady steps behind the throughput.
    """

    decode_tok_s: Estimate
    accepted: Estimate | None
    survival: tuple[float, ...]
    phases: Mapping[str, Estimate]
    counts: Mapping[int, Counts]
    num_steps: int


def measure(run: Run) -> Measurement | Unsteady:
    """All figures of one pass, or why there are none."""
    steps = steady_steps(run)
    if isinstance(steps, Unsteady):
        return steps
    counts = request_counts(run)
    return Measurement(
        decode_tok_s=decode_tok_s(steps),
        accepted=accepted([counts]) if counts else None,
        survival=survival([run]),
        phases=phase_times(steps),
        counts=counts,
        num_steps=len(steps),
    )


def decode_tok_s(steps: Sequence[StepRecord]) -> Estimate:
    """Decode throughput over steady steps, tokens per second, interval by batch means.

    Args:
        steps: as `steady_steps` returns them, at least two.
    """
    tokens = np.array([sum(step.num_emitted_tokens) for step in steps], dtype=float)
    durations = np.array([step.duration_s for step in steps])
    return _ratio_by_batch_means(tokens, durations)


def phase_times(steps: Sequence[StepRecord]) -> dict[str, Estimate]:
    """Mean seconds per iteration by phase, interval by batch means."""
    ones = np.ones(len(steps))
    return {
        phase: _ratio_by_batch_means(np.array([getattr(step, phase) for step in steps]), ones)
        for phase in PHASES
    }


def request_counts(run: Run) -> dict[int, Counts]:
    """Accepted tokens and drafts of each request; empty at gamma 0.

    The warm-up steps are left out. Steps of a batch that is no longer full count: how many
    requests run beside it does not change what a request accepts.
    """
    accepted_sum: Counter[int] = Counter()
    drafts: Counter[int] = Counter()
    for request, _, kept in _verifications(run):
        drafts[request] += 1
        accepted_sum[request] += kept
    return {request: Counts(accepted_sum[request], count) for request, count in drafts.items()}


def pool(counts: Iterable[RequestCounts]) -> dict[Any, Counts]:
    """Sum of the counters of each request over several passes."""
    total: dict[Any, Counts] = {}
    for one in counts:
        for request, (kept, drafts) in one.items():
            before = total.get(request, Counts(0, 0))
            total[request] = Counts(before.num_accepted_tokens + kept, before.num_drafts + drafts)
    return total


def accepted(counts: Iterable[RequestCounts]) -> Estimate:
    """Accepted drafts per verification, bonus token excluded, bootstrap over requests.

    Args:
        counts: of one or more passes; the same request in several passes is one request.

    Raises:
        ValueError: no request drafted anything.
    """
    values = list(pool(counts).values())
    if not values:
        raise ValueError("no request drafted anything")
    kept = np.array([value.num_accepted_tokens for value in values], dtype=float)
    drafts = np.array([value.num_drafts for value in values], dtype=float)
    weights = resample_weights(len(values), _BOOTSTRAP_SEED)
    low, high = np.percentile((weights @ kept) / (weights @ drafts), [2.5, 97.5])
    est = metrics.accepted_per_iteration(int(kept.sum()), int(drafts.sum()))
    return Estimate(est=est, low=min(float(low), est), high=max(float(high), est), n=len(values))


def survival(runs: Iterable[Run]) -> tuple[float, ...]:
    """P(the first i drafts were all accepted), i = 1..gamma, pooled over passes of one setting.

    Iterations cut short at a request's end (fewer than gamma drafts) are left out, as is the
    warm-up.
    """
    kept: list[int] = []
    gamma = 0
    for run in runs:
        gamma = run.config.num_speculative_tokens
        kept.extend(count for _, drafted, count in _verifications(run) if drafted == gamma)
    return tuple(metrics.survival(kept, gamma)) if kept else ()


def position_acceptance(passes: Iterable[tuple[int, Run]]) -> tuple[Estimate, ...]:
    """P(draft i accepted, once drafts 1..i-1 were), i = 1, 2, ..., bootstrap over requests.

    Iterations with fewer than gamma drafts and the warm-up are left out, as in `survival`.

    Args:
        passes: block index and records of each pass, all at one setting.

    Returns:
        One estimate per position, up to the first that no iteration reached.
    """
    reached: dict[tuple[int, int], FloatArray] = {}
    for block, run in passes:
        gamma = run.config.num_speculative_tokens
        for request, drafted, kept in _verifications(run):
            if drafted == gamma:
                own = reached.setdefault((block, request), np.zeros(gamma + 1))
                own[: kept + 1] += 1
    if not reached:
        return ()
    counts = np.stack(list(reached.values()))
    weights = resample_weights(len(counts), _BOOTSTRAP_SEED)
    total, samples = counts.sum(axis=0), weights @ counts
    estimates = []
    for i in range(1, counts.shape[1]):
        if not total[i - 1]:
            break
        # A resample without any request that got this far says nothing of this position.
        known = samples[:, i - 1] > 0
        low, high = np.percentile(samples[known, i] / samples[known, i - 1], [2.5, 97.5])
        est = float(total[i] / total[i - 1])
        estimates.append(
            Estimate(est=est, low=min(float(low), est), high=max(float(high), est), n=len(counts))
        )
    return tuple(estimates)


def _verifications(run: Run) -> Iterator[tuple[int, int, int]]:
    """Request, drafted and accepted tokens of every verification of drafts after the warm-up."""
    for step in [step for step in run.steps if step.kind == "decode"][WARMUP_STEPS:]:
        for request, drafted, kept in zip(
            step.request_ids, step.num_draft_tokens, step.num_accepted_tokens, strict=True
        ):
            if drafted:
                yield request, drafted, kept


def resample_weights(count: int, seed: int, num_resamples: int = NUM_RESAMPLES) -> FloatArray:
    """How often each of `count` items occurs in each bootstrap sample.

    Returns:
        [num_resamples, count] float64; rows sum to `count`.
    """
    random = np.random.default_rng(seed)
    return random.multinomial(count, np.full(count, 1 / count), num_resamples).astype(float)


def mean_ratio(logs: Sequence[float], level: float = 0.95) -> Estimate:
    """Geometric mean of paired ratios with its t interval.

    Args:
        logs: log ratio of each pair, at least two.
        level: two-sided confidence.
    """
    values = np.asarray(logs, dtype=float)
    mean = float(values.mean())
    reach = float(
        stdtrit(len(values) - 1, 0.5 + level / 2) * values.std(ddof=1) / math.sqrt(len(values))
    )
    return Estimate(
        est=math.exp(mean), low=math.exp(mean - reach), high=math.exp(mean + reach), n=len(values)
    )


def unpaired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Ratio of the geometric means of two groups that were not measured side by side.

    Welch's interval on the logarithms: the groups may be of unequal size and spread.

    Args:
        numerators: positive figures, at least two.
        denominators: the same of the other group.
    """
    return blocked_ratio([(numerators, denominators)])


def blocked_ratio(blocks: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Estimate:
    """Geometric mean over blocks (devices, say) of each block's `unpaired_ratio`.

    Only what varies within a block widens the interval: that blocks differ is no noise of the
    ratio.

    Args:
        blocks: numerators and denominators of each, positive, at least two of either.
    """
    log_ratio = variance = freedom = 0.0
    for pair in blocks:
        top, bottom = (np.log(group) for group in pair)
        log_ratio += float(top.mean() - bottom.mean()) / len(blocks)
        for group in (top, bottom):
            share = float(group.var(ddof=1)) / len(group) / len(blocks) ** 2
            variance += share
            freedom += share**2 / (len(group) - 1)
    reach = 0.0
    if variance > 0:
        reach = float(stdtrit(variance**2 / freedom, 0.975)) * math.sqrt(variance)
    return Estimate(
        est=math.exp(log_ratio),
        low=math.exp(log_ratio - reach),
        high=math.exp(log_ratio + reach),
        n=sum(min(map(len, pair)) for pair in blocks),
    )


def _ratio_by_batch_means(numerator: FloatArray, denominator: FloatArray) -> Estimate:
    """sum(numerator) / sum(denominator) with the t interval of a ratio over contiguous batches."""
    count = len(numerator)
    # Short passes: pairs of steps where that leaves at least four, else single steps.
    num_batches = min(NUM_BATCHES, count // 2) if count >= 2 * 4 else count
    edges = np.linspace(0, count, num_batches + 1).astype(int)[:-1]
    top = np.add.reduceat(numerator, edges)
    bottom = np.add.reduceat(denominator, edges)
    est = float(numerator.sum() / denominator.sum())
    residual = top - est * bottom
    variance = num_batches / (num_batches - 1) * float(residual @ residual)
    if num_batches >= _MIN_BATCHES_TO_CORRECT:
        rho = neighbour_correlation(residual)
        variance *= (1 + rho) / (1 - rho)
    reach = float(stdtrit(num_batches - 1, 0.975)) * math.sqrt(variance) / float(bottom.sum())
    return Estimate(est=est, low=max(est - reach, 0.0), high=est + reach, n=num_batches)
