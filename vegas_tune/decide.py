"""The rules: measurements in, decisions out. Pure functions.

Each rule errs on the side of asking for more data, and says when it had to decide without.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from scipy.special import ndtr, ndtri, stdtrit

from vegas_runtime.config import SpeculationConfig
from vegas_tune.measure import (
    Estimate,
    RequestCounts,
    mean_ratio,
    resample_weights,
    significant,
)
from vegas_tune.steady import FloatArray

# A plateau is a stretch: without this, two neighbouring ratios on a rising curve would be one.
PLATEAU_SPAN: Final = 1.5
# One-sided bound of the plateau rule, and its counterpart above.
PLATEAU_BOUND: Final = 0.10
# Of a gain's logarithm, how far the end of its interval may lie from it.
GAIN_SHARE: Final = 1 / 8
# How many degrees of freedom the within-pass intervals are worth beside the spread between passes.
_PRIOR_WEIGHT: Final = 4


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One decision of a sweep, in the keys of the profile.

    Attributes:
        step: name of the step.
        rule: name of the rule, changed whenever its meaning changes.
        chosen: what it chose, plain values.
        why: one sentence.
        alternatives: what it chose against, with figures.
        resolved: whether the data settled it; if not, a stated fallback decided.
        outcome: short word, e.g. `reached`, `not_reached`, `validated`.
        data: further figures.
    """

    step: str
    rule: str
    chosen: Any
    why: str
    resolved: bool
    alternatives: tuple[Mapping[str, Any], ...] = ()
    outcome: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, floats with six significant digits."""
        values: dict[str, Any] = plain_values(vars(self))
        return values


def plain_values(value: Any) -> Any:
    """JSON-like values of decisions: lists for tuples, six significant digits, no NaN."""
    if isinstance(value, Estimate):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    if isinstance(value, float):
        return significant(value) if math.isfinite(value) else None
    return value


def spending_levels(looks: Sequence[int], alpha: float) -> tuple[float, ...]:
    """Chance of error to allow at each of several looks, so that all together keep `alpha`.

    Little early, most of it at the last look (Lan and DeMets 1983 with the O'Brien-Fleming
    function): what is settled early must be clear, and the end is hardly dearer than one look.
    The parts add up to `alpha`, so the total holds however the looks are correlated.

    Args:
        looks: observations at each look, ascending.
        alpha: one-sided chance of error of all looks together.
    """
    threshold = float(ndtri(1 - alpha / 2))
    spent = [2 * float(ndtr(-threshold / math.sqrt(look / looks[-1]))) for look in looks]
    return tuple(after - before for before, after in itertools.pairwise([0.0, *spent]))


def is_look(looks: Sequence[int], before: int, after: int) -> bool:
    """Whether a look falls on the rounds just added; several places add several at a time."""
    return any(before < look <= after for look in looks)


# --------------------------------------------------------------------------- step 1: plateau


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """Where the number of accepted tokens stabilises.

    Attributes:
        relative: accepted tokens at each ratio over those at the largest, after the isotonic fit,
            with the one-sided 10 % bounds below and above.
        outcome: whether there is a plateau on the ladder.
        ratio: its start; None when it was not reached.
        resolved: whether the bounds settle it; if not, the estimates decided.
        undetermined: ratios that more data could move across the threshold.
    """

    relative: Mapping[float, Estimate]
    outcome: Literal["reached", "not_reached"]
    ratio: float | None
    resolved: bool
    undetermined: tuple[float, ...]


def find_plateau(counts: Mapping[float, RequestCounts], *, tolerance: float, seed: int) -> Plateau:
    """Smallest ratio that surely accepts within `tolerance` of what the largest ratio accepts.

    Isotonic fit over ratios; paired bootstrap over requests. A ratio is inside when its lower
    10 % bound is, outside when its upper one is not. The plateau is reached when a ratio at least
    `PLATEAU_SPAN` below the largest is inside: the largest is within any tolerance of itself,
    so it proves nothing.

    Args:
        counts: per ratio, counters by request; requests are paired with the largest ratio's.
        tolerance: accepted tokens that may be given up, a fraction.
        seed: seeds the bootstrap.
    """
    relative = _relative_acceptance(counts, seed)
    threshold = 1 - tolerance
    largest = max(relative)
    candidates = [r for r in sorted(relative) if r * PLATEAU_SPAN <= largest]
    inside = [ratio for ratio in candidates if relative[ratio].low >= threshold]
    likely = [ratio for ratio in candidates if relative[ratio].est >= threshold]
    below = [ratio for ratio in candidates if ratio < (inside[0] if inside else largest)]
    undetermined = tuple(ratio for ratio in below if relative[ratio].high >= threshold)
    # Settled when the bounds and the estimates name the same start, or the same absence of one.
    resolved = likely[:1] == inside[:1] if inside else not undetermined
    ratio = likely[0] if likely else None
    return Plateau(
        relative=relative,
        outcome="not_reached" if ratio is None else "reached",
        ratio=ratio,
        resolved=resolved,
        undetermined=() if resolved else undetermined,
    )


def _relative_acceptance(counts: Mapping[float, RequestCounts], seed: int) -> dict[float, Estimate]:
    ratios = sorted(counts)
    reference = counts[ratios[-1]]
    requests = sorted(reference)
    # See `plan._Curve`.
    from scipy.optimize import isotonic_regression

    weights = np.vstack([np.ones(len(requests)), resample_weights(len(requests), seed)])
    columns, sizes = [], []
    for ratio in ratios:
        shared = [request for request in requests if request in counts[ratio]]
        picked = weights[:, [requests.index(request) for request in shared]]
        # Both over the same requests: an easy text must not pass for a good ratio. A resample may
        # hold none of them, and a tiny ratio may accept nothing.
        with np.errstate(invalid="ignore", divide="ignore"):
            own = _mean_accepted(counts[ratio], shared, picked)
            columns.append(own / _mean_accepted(reference, shared, picked))
        sizes.append(float(sum(counts[ratio][request].num_drafts for request in shared)))
    table = np.nan_to_num(np.stack(columns, axis=1), nan=0.0, posinf=0.0)
    fitted = np.stack([isotonic_regression(row, weights=sizes).x for row in table])
    fitted /= np.maximum(fitted[:, -1:], np.finfo(float).tiny)
    lows, highs = np.percentile(
        fitted[1:], [100 * PLATEAU_BOUND, 100 * (1 - PLATEAU_BOUND)], axis=0
    )
    return {
        ratio: Estimate(
            est=float(est), low=min(float(low), float(est)), high=max(float(high), float(est)),
            n=len(requests),
        )
        for ratio, est, low, high in zip(ratios, fitted[0], lows, highs, strict=True)
    }  # fmt: skip


def _mean_accepted(
    counts: RequestCounts, requests: Sequence[Any], weights: FloatArray
) -> FloatArray:
    kept = np.array([counts[request].num_accepted_tokens for request in requests], dtype=float)
    drafts = np.array([counts[request].num_drafts for request in requests], dtype=float)
    mean: FloatArray = (weights @ kept) / (weights @ drafts)
    return mean


# --------------------------------------------------------------------------- steps 2 and 3: rates


class Cell(NamedTuple):
    """Throughput of one measurement: interleaved rounds share device, its state, and text."""

    round: Hashable
    config: SpeculationConfig
    log_rate: float
    log_se: float


class Rates:
    """Settings compared across interleaved rounds: log rate = setting + round + noise.

    A setting need not be in every round; settings that share none are compared through others.

    Attributes:
        log_rates: effect of each setting, up to a common constant.
        noise_cv: run-to-run coefficient of variation left after settings and rounds.
    """

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._configs = list(dict.fromkeys(cell.config for cell in cells))
        rounds = list(dict.fromkeys(cell.round for cell in cells))
        width = len(self._configs)
        design = np.zeros((len(cells), width + len(rounds) - 1))
        for row, cell in enumerate(cells):
            design[row, self._configs.index(cell.config)] = 1
            if cell.round != rounds[0]:
                design[row, width + rounds.index(cell.round) - 1] = 1
        observed = np.array([cell.log_rate for cell in cells])
        effects, _, rank, _ = np.linalg.lstsq(design, observed, rcond=None)
        residual = observed - design @ effects
        free = len(cells) - int(rank)
        within = float(np.mean([cell.log_se**2 for cell in cells]))
        # Two rounds leave few degrees of freedom; the within-pass intervals steady the variance.
        weight = free + _PRIOR_WEIGHT
        variance = (float(residual @ residual) + _PRIOR_WEIGHT * within) / weight
        self._quantile = float(stdtrit(weight, 0.975))
        self._covariance = variance * np.linalg.pinv(design.T @ design)
        self._rounds = {c: len({x.round for x in cells if x.config == c}) for c in self._configs}
        self.log_rates = dict(zip(self._configs, effects[:width].tolist(), strict=True))
        self.noise_cv = math.sqrt(variance)

    def __contains__(self, config: object) -> bool:
        return config in self.log_rates

    def leader(self, among: Sequence[SpeculationConfig] | None = None) -> SpeculationConfig:
        """The fastest setting by estimate; the first one on equality."""
        candidates = self._configs if among is None else [c for c in among if c in self.log_rates]
        return max(candidates, key=self.log_rates.__getitem__)

    def ranked(self) -> list[SpeculationConfig]:
        """All settings, fastest first."""
        return sorted(self._configs, key=lambda config: -self.log_rates[config])

    def ratio(self, one: SpeculationConfig, other: SpeculationConfig) -> Estimate:
        """Throughput of one setting over another's, with its 95 % interval."""
        log = self.log_rates[one] - self.log_rates[other]
        contrast = np.zeros(len(self._covariance))
        contrast[self._configs.index(one)] += 1
        contrast[self._configs.index(other)] -= 1
        spread = float(contrast @ self._covariance @ contrast)
        reach = self._quantile * math.sqrt(max(spread, 0.0))
        return Estimate(
            est=math.exp(log),
            low=math.exp(log - reach),
            high=math.exp(log + reach),
            n=min(self._rounds[one], self._rounds[other]),
        )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The cheapest setting that is as good as the fastest one.

    Attributes:
        chosen: the setting.
        leader: the fastest by estimate.
        relative: throughput of each candidate over the leader's.
        resolved: whether every other candidate is surely slower or surely tied.
    """

    chosen: SpeculationConfig
    leader: SpeculationConfig
    relative: Mapping[SpeculationConfig, Estimate]
    resolved: bool


def choose(rates: Rates, candidates: Sequence[SpeculationConfig], *, tolerance: float) -> Choice:
    """Take the cheapest candidate that ties with the fastest.

    A tie is an estimated loss of at most `tolerance`. An interval that includes 1 is not enough:
    on a noisy machine everything would tie, down to the smallest setting. Each candidate is
    compared with the leader itself, never along a chain, so that small losses cannot add up.

    Args:
        rates: the measured settings.
        candidates: cheapest first; those without a measurement are passed over.
        tolerance: throughput that may be given up, a fraction.
    """
    measured = [config for config in candidates if config in rates]
    leader = rates.leader(measured)
    relative = {config: rates.ratio(config, leader) for config in measured}
    is_clear = [
        against.high < 1 or against.low >= 1 - tolerance
        for config, against in relative.items()
        if config != leader
    ]
    return Choice(
        chosen=next(config for config in measured if relative[config].est >= 1 - tolerance),
        leader=leader,
        relative=relative,
        resolved=all(is_clear),
    )


# --------------------------------------------------------------------------- validation


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What the finalists' fresh measurements say.

    Attributes:
        status: `validated`, or `inconclusive` when the intervals settle nothing.
        selected: the setting to serve with.
        winner: the better finalist, whether or not it beats plain decoding.
        speedups: each finalist's throughput over plain decoding's, same rounds.
        between: the winner's throughput over the best other finalist's; None without another.
        is_clear_winner: whether that interval excludes 1.
        why: one sentence.
    """

    status: Literal["validated", "inconclusive"]
    selected: SpeculationConfig
    winner: SpeculationConfig
    speedups: Mapping[SpeculationConfig, Estimate]
    between: Estimate | None
    is_clear_winner: bool
    why: str


def validate(
    rounds: Sequence[Mapping[SpeculationConfig, float]],
    finalists: Sequence[SpeculationConfig],
    plain: SpeculationConfig,
    *,
    level: float,
    precision: float,
    tie_tolerance: float,
    gamma_tie_tolerance: float,
) -> Validation:
    """Judge finalists against plain decoding and each other by paired t intervals.

    Args:
        rounds: log throughput by setting, complete rounds only, at least two.
        finalists: settings that draft, cheapest first; at least one.
        plain: the gamma 0 setting.
        level: two-sided confidence of every interval, corrected for repeated looks.
        precision: largest relative half-width that counts as settled; for a large gain an eighth
            of its logarithm, since no decision hangs on more.
        tie_tolerance: throughput that may be given up for a cheaper finalist.
        gamma_tie_tolerance: that may be given up for one that drafts fewer tokens.
    """

    def against(one: SpeculationConfig, other: SpeculationConfig) -> Estimate:
        return mean_ratio([logs[one] - logs[other] for logs in rounds], level)

    speedups = {config: against(config, plain) for config in finalists}
    fastest = max(finalists, key=lambda config: fmean(logs[config] for logs in rounds))

    def is_equal(config: SpeculationConfig) -> bool:
        # A loss beyond the tolerance is not equality, even while noise hides it.
        drafts_fewer = config.num_speculative_tokens < fastest.num_speculative_tokens
        tolerance = gamma_tie_tolerance if drafts_fewer else tie_tolerance
        loss = against(config, fastest)
        return loss.est >= 1 - tolerance and loss.low <= 1 <= loss.high

    winner = next(config for config in finalists if config == fastest or is_equal(config))
    others = [config for config in finalists if config != winner]
    between = None
    if others:
        best = max(others, key=lambda config: fmean(logs[config] for logs in rounds))
        between = against(winner, best)
    is_clear = between is None or not between.low <= 1 <= between.high
    speedup = speedups[winner]
    gain = f"{speedup.est:.3f}x plain decoding [{speedup.low:.3f}, {speedup.high:.3f}]"
    common: dict[str, Any] = {
        "winner": winner, "speedups": speedups, "between": between, "is_clear_winner": is_clear,
    }  # fmt: skip
    widest = max(precision, abs(math.log(speedup.est)) * GAIN_SHARE)
    if speedup.half_width > widest:
        told = "drafting pays, by how much " if speedup.low > 1 else ""
        return Validation(
            status="inconclusive",
            selected=winner,
            why=f"{gain} is wider than +-{widest:.0%}: {told}this machine is too noisy to tell.",
            **common,
        )
    if speedup.low > 1:
        return Validation(status="validated", selected=winner, why=f"{gain}.", **common)
    if max(estimate.high for estimate in speedups.values()) < 1 + tie_tolerance:
        why = f"the best setting reaches {gain}: drafting does not pay here."
        return Validation(status="validated", selected=plain, why=why, **common)
    return Validation(
        status="inconclusive",
        selected=winner if speedup.est > 1 else plain,
        why=f"{gain} includes 1: a gain is neither shown nor excluded.",
        **common,
    )
