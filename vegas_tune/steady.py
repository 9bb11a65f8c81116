"""Which steps of a pass count: the batch is full, the queue is not empty, nothing moves.

Where a batch is full is known from the engine, step by step, so ramp and drain need no guessing.
What is left to decide is how much of the full batch's time is still warm-up (caches, clocks,
compilation), and whether the rest is level. Both look at step times alone: how many tokens a step
yields is the text's doing, varies without any fault of the machine, and is part of the figure, by
which no window may be picked.

Sources: MSER-5 (White 1997) for the warm-up, Mann-Kendall with an autocorrelation correction (Hamed
and Rao 1998, here for one lag) for the trend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from vegas_runtime.records import Run, StepRecord

# The first full step drafts with KV entries chosen from the prompt instead of from a verification,
# and finds cold caches: it is neither the acceptance nor the speed of decoding.
WARMUP_STEPS: Final = 1
# Below this no spread can be seen; at gamma 15 a short pass has few steps, each of many tokens.
MIN_STEADY_STEPS: Final = 3
# A step time that doubles half-way is another process or throttling, not decoding. Growing
# contexts and 15 % noise stay far below.
LEVEL_SHIFT: Final = 2.0
MIN_STEPS_FOR_SHIFT: Final = 8
# Ten groups of five: fewer cannot tell a warm-up or a trend from noise.
MIN_STEPS_FOR_TREND: Final = 50
SETTLE_GROUP: Final = 5
# A trend is one when it is both sure and large: contexts that grow slow decoding a little, and a
# long pass makes any slope significant.
TREND_LEVEL: Final = 0.01
TREND_FLOOR: Final = 0.05
TREND_GROUPS: Final = 20

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Unsteady:
    """A pass that yields no figure, and why.

    Attributes:
        kind: `unsteady`, or `nan` when a recorded time is not a number.
        reason: one sentence for the user.
    """

    kind: str
    reason: str


def steady_steps(run: Run) -> tuple[StepRecord, ...] | Unsteady:
    """The steps in which the target batch decodes and no prompt text is processed.

    Where any request ever waited, only steps with a waiting queue count: behind them the engine
    may be running dry. The first `WARMUP_STEPS` are left out, and from `MIN_STEPS_FOR_TREND` on
    whatever else is warm-up.

    Returns:
        At least `MIN_STEADY_STEPS` steps in order of time, or `Unsteady`.
    """
    full = [s for s in run.steps if s.kind == "decode" and s.num_running == run.batch_size]
    has_queue = any(step.num_waiting for step in run.steps)
    queued = [step for step in full if step.num_waiting] if has_queue else full
    steady = tuple(queued[WARMUP_STEPS:])
    if len(steady) < MIN_STEADY_STEPS:
        return Unsteady(kind="unsteady", reason=_too_few(run, len(full), len(queued), len(steady)))
    durations = [step.duration_s for step in steady]
    if not all(math.isfinite(time) and time > 0 for time in durations):
        return Unsteady(kind="nan", reason="a step's recorded time is not a positive number.")
    if len(steady) >= MIN_STEPS_FOR_TREND:
        settled = _settled(steady)
        if isinstance(settled, Unsteady):
            return settled
        steady = settled
        moved = _level_shift(steady) or _trend(steady)
    else:
        moved = _level_shift(steady)
    return steady if moved is None else Unsteady(kind="unsteady", reason=moved)


def _too_few(run: Run, num_full: int, num_queued: int, num_steady: int) -> str:
    prefill = sum(step.kind == "prefill" for step in run.steps)
    parts = [
        f"{prefill} processed prompt text",
        f"{len(run.steps) - prefill - num_full} ran fewer than {run.batch_size} requests",
    ]
    if num_queued < num_full:
        parts.append(f"in {num_full - num_queued} no request was waiting any more")
    parts.append(f"the first {WARMUP_STEPS} warms up")
    return (
        f"{num_steady} steady steps of {len(run.steps)}, {MIN_STEADY_STEPS} are needed: "
        f"{', '.join(parts)}."
    )


# --------------------------------------------------------------------------- warm-up and trend


def step_times(steps: Sequence[StepRecord], num_groups: int) -> FloatArray:
    """Mean step time of contiguous groups of steps, in order, seconds.

    Args:
        steps: at least `num_groups` of them.
        num_groups: how many.
    """
    edges = np.linspace(0, len(steps), num_groups + 1).astype(int)
    totals = np.add.reduceat([step.duration_s for step in steps], edges[:-1])
    means: FloatArray = totals / np.diff(edges)
    return means


def _settled(steps: tuple[StepRecord, ...]) -> tuple[StepRecord, ...] | Unsteady:
    """The steps without their warm-up: the start that leaves the mean known best (MSER-5)."""
    num_groups = len(steps) // SETTLE_GROUP
    times = step_times(steps[: num_groups * SETTLE_GROUP], num_groups)
    # At most half may go; a minimum beyond that means that nothing has settled yet.
    starts = range(num_groups - SETTLE_GROUP)
    errors = [float(times[start:].var()) / (num_groups - start) for start in starts]
    start = int(np.argmin(errors))
    if start <= num_groups // 2:
        return steps[start * SETTLE_GROUP :]
    head, tail = times[: num_groups // 2], times[start:]
    change = float(tail.mean() / head.mean())
    if abs(change - 1) < TREND_FLOOR or _may_be_equal(head, tail):
        # A quiet end in a series that is level all the same: nothing needs to go. Where requests
        # arrive, every few steps take twice as long, and which groups hold them is chance.
        return steps
    return Unsteady(
        kind="unsteady",
        reason="decoding had not settled half-way through the pass: a step at its end took "
        f"{change:.2f} times as long as in its first half. If that is warm-up, measure more "
        "tokens; contexts that grow much and a machine that heats up look the same.",
    )


def _may_be_equal(one: FloatArray, other: FloatArray) -> bool:
    """Whether chance may have made the difference of two groups' means, at `TREND_LEVEL`."""
    spread = math.sqrt(float(one.var(ddof=1)) / len(one) + float(other.var(ddof=1)) / len(other))
    if spread == 0:
        return False
    return 2 * float(ndtr(-abs(float(one.mean() - other.mean())) / spread)) > TREND_LEVEL


def _level_shift(steps: Sequence[StepRecord]) -> str | None:
    """Words on a step time that doubles or halves half-way."""
    if len(steps) < MIN_STEPS_FOR_SHIFT:
        return None
    durations = [step.duration_s for step in steps]
    half = len(steps) // 2
    shift = float(np.median(durations[half:]) / np.median(durations[:half]))
    if 1 / LEVEL_SHIFT < shift < LEVEL_SHIFT:
        return None
    return (
        f"the median step took {shift:.2g} times as long in the second half of the pass "
        "as in the first; another process, or throttling."
    )


def _trend(steps: Sequence[StepRecord]) -> str | None:
    """Words on a step time that rises or falls, surely and by more than `TREND_FLOOR`."""
    times = step_times(steps, min(TREND_GROUPS, len(steps) // SETTLE_GROUP))
    change = relative_trend(times)
    if abs(change) < TREND_FLOOR or trend_p_value(times) > TREND_LEVEL:
        return None
    return (
        f"steps became {abs(change):.0%} {'slower' if change > 0 else 'faster'} over the pass: "
        "contexts that grow much, a machine that heats up, or another process; "
        "measure fewer tokens at a time, or on a quiet machine."
    )


def relative_trend(values: FloatArray) -> float:
    """Change from start to end by the Theil-Sen line, over the median."""
    return theil_sen_slope(values) * (len(values) - 1) / float(np.median(values))


# Two lines each over a few dozen values; importing `scipy.stats` for them takes every process that
# measures or decides about a second.
def theil_sen_slope(values: FloatArray) -> float:
    """The median slope over all pairs of values, per place; of at least two."""
    early, late = np.triu_indices(len(values), 1)
    return float(np.median((values[late] - values[early]) / (late - early)))


def kendall_tau(values: FloatArray) -> float:
    """Kendall's tau-b between values and their places; NaN where all values are equal."""
    early, late = np.triu_indices(len(values), 1)
    rises = np.sign(values[late] - values[early])
    untied = int(np.count_nonzero(rises))
    if untied == 0:
        return math.nan
    return float(rises.sum()) / math.sqrt(len(rises)) / math.sqrt(untied)


def trend_p_value(values: FloatArray) -> float:
    """Mann-Kendall, two-sided, with the variance widened for correlation of neighbours."""
    count = len(values)
    order = np.arange(count)
    tau = kendall_tau(values)
    if not math.isfinite(tau):
        return 1.0
    residual = values - theil_sen_slope(values) * order
    residual = residual - residual.mean()
    rho = neighbour_correlation(residual)
    variance = 2 * (2 * count + 5) / (9 * count * (count - 1)) * (1 + rho) / (1 - rho)
    return 2 * float(ndtr(-abs(tau) / math.sqrt(variance)))


def neighbour_correlation(residual: FloatArray) -> float:
    """Correlation of neighbours, 0 to 0.8, of values whose mean was subtracted.

    Corrected for the bias of a short series (Kendall 1954); beyond 0.8 a series this short says
    nothing about its mean at all.
    """
    total = float(residual @ residual)
    if total == 0:
        return 0.0
    rho = float(residual[1:] @ residual[:-1]) / total
    return min(max(rho + (1 + 3 * rho) / len(residual), 0.0), 0.8)
