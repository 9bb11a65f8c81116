"""The gate's second and third tier: measure again what a profile rests on, and compare."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from scipy.special import stdtrit

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import WorkloadError
from vegas_runtime.protocol import Engine, PromptBlock
from vegas_tune.bench import counts_by_request
from vegas_tune.decide import spending_levels
from vegas_tune.gate import LEAST_MARGIN, NOISE_MARGIN, Status, Verdict, judge, recorded_result
from vegas_tune.laboratory import Laboratory
from vegas_tune.measure import Counts, Estimate, RequestCounts, pool
from vegas_tune.outcomes import Failed, Measured
from vegas_tune.plan import FAMILY_ALPHA, VALIDATE, Plan, Point
from vegas_tune.steady import FloatArray
from vegas_tune.sweep import SweepResult

CHECK: Final = "check"
# Pairs after which the speed-up is judged. More than validation takes: the profile's own doubt
# cannot be reduced here any more, so that of the check must be small beside it.
CHECK_LOOKS: Final = (6, 10, 16, 24, 36)


def check_acceptance(
    folder: Path, engine: Engine, blocks: Sequence[PromptBlock], *, budget_s: float
) -> Verdict:
    """Measure accepted tokens again at the profile's setting, on the recorded text.

    Where plain decoding was selected, the best setting that drafts is measured instead: it still
    guards the code.

    Args:
        folder: where the profile's records lie.
        engine: what to measure on.
        blocks: the recorded workload, made again.
        budget_s: time for it, prefill included.

    Raises:
        StorageError: the records are missing or damaged.
        WorkloadError: the blocks hold other text than the recorded ones.
    """
    result = recorded_result(folder)
    _check_text(result.plan, blocks)
    config = drafting_setting(result)
    if config is None:
        return _acceptance("inconclusive", "the recorded sweep validated no setting that drafts.")
    recorded = _distinct(result, config)
    margin = max(LEAST_MARGIN, NOISE_MARGIN * _acceptance_cv(recorded))
    measured: list[Measured] = []
    verdict = _acceptance("inconclusive", "nothing was measured.")
    looks = _looks(recorded)
    lab = _laboratory(result.plan, engine, blocks, budget_s)
    for start, end in zip([0, *looks], looks, strict=False):
        for one in recorded[start:end]:
            outcome = lab.measure(_again(one.point))
            if isinstance(outcome, Failed):
                return _acceptance("inconclusive", f"a measurement failed: {outcome.reason}")
            measured.append(outcome)
        new, old = (pool(counts_by_request(side)) for side in (measured, recorded[:end]))
        if not any(one.num_accepted_tokens for one in new.values()):
            return _acceptance("regressed", "not a single draft was accepted.")
        ratio = paired_acceptance(new, old, level=1 - FAMILY_ALPHA / len(looks))
        if ratio is None:
            return _acceptance("inconclusive", "too few requests accepted anything to compare.")
        verdict = _acceptance(judge(ratio, margin), _gate_words(ratio, margin), ratio, margin)
        if verdict.status != "inconclusive":
            break
    return verdict


def drafting_setting(result: SweepResult) -> SpeculationConfig | None:
    """The selected setting, or the better finalist where plain decoding was selected."""
    if result.selected.num_speculative_tokens:
        return result.selected
    return result.validation.winner if result.validation is not None else None


def paired_acceptance(
    measured: RequestCounts, recorded: RequestCounts, *, level: float
) -> Estimate | None:
    """Accepted tokens per iteration, measured over recorded, over the same requests.

    Jackknife over requests on the log ratio, with the t quantile: a bootstrap of a handful of
    requests is too sure of itself.

    Returns:
        None with fewer than three requests, or where a side accepts nothing without one of them.
    """
    requests = sorted(set(measured) & set(recorded))
    if len(requests) < 3:
        return None
    new, old = _table(measured, requests), _table(recorded, requests)
    # Row i of the sums leaves request i out; the last row is the whole.
    sums = [np.vstack([side.sum(axis=0) - side, side.sum(axis=0)]) for side in (new, old)]
    if any((side <= 0).any() for side in sums):
        return None
    logs = np.log(sums[0][:, 0] / sums[0][:, 1]) - np.log(sums[1][:, 0] / sums[1][:, 1])
    count, whole, left_out = len(requests), float(logs[-1]), logs[:-1]
    spread = (count - 1) / count * float(((left_out - left_out.mean()) ** 2).sum())
    reach = float(stdtrit(count - 1, 0.5 + level / 2)) * math.sqrt(spread)
    return Estimate(
        est=math.exp(whole), low=math.exp(whole - reach), high=math.exp(whole + reach), n=count
    )


def _table(counts: RequestCounts, requests: Iterable[Any]) -> FloatArray:
    rows: list[Counts] = [counts[request] for request in requests]
    return np.array(rows, dtype=float)


def _distinct(result: SweepResult, config: SpeculationConfig) -> list[Measured]:
    """Recorded passes at a setting, validation's first; greedy text repeats itself, once each."""
    same = [one for one in result.measured(VALIDATE) if one.point.config == config]
    same += [
        one
        for one in result.measured()
        if one.point.config == config and one.point.step != VALIDATE
    ]
    if not result.plan.is_greedy:
        return same
    by_block: dict[int, Measured] = {}
    for one in same:
        by_block.setdefault(one.point.block, one)
    return list(by_block.values())


def _looks(recorded: Sequence[Measured]) -> list[int]:
    """After which passes to look: once every block was met, and at the end."""
    blocks = {one.point.block for one in recorded}
    met = next(
        end
        for end in range(1, len(recorded) + 1)
        if {one.point.block for one in recorded[:end]} == blocks
    )
    return sorted({met, len(recorded)})


def _acceptance_cv(recorded: Sequence[Measured]) -> float:
    """Spread of accepted tokens between recorded passes over one block; 0 where none repeats."""
    by_block: dict[int, list[float]] = {}
    for one in recorded:
        if one.figures.accepted is not None and one.figures.accepted.est > 0:
            by_block.setdefault(one.point.block, []).append(math.log(one.figures.accepted.est))
    repeated = [np.asarray(logs) for logs in by_block.values() if len(logs) > 1]
    free = sum(len(logs) - 1 for logs in repeated)
    if not free:
        return 0.0
    return math.sqrt(sum(float(((logs - logs.mean()) ** 2).sum()) for logs in repeated) / free)


def _acceptance(
    status: Status, why: str, ratio: Estimate | None = None, margin: float | None = None
) -> Verdict:
    return Verdict(tier="acceptance", status=status, why=why, ratio=ratio, margin=margin)


def check_speedup(
    folder: Path, engine: Engine, blocks: Sequence[PromptBlock], *, budget_s: float
) -> Verdict:
    """Measure the speed-up over plain decoding again, in interleaved rounds.

    Args:
        folder: where the profile's records lie.
        engine: on a device of the profile's class.
        blocks: the recorded workload, made again.
        budget_s: time for it, prefill included.

    Raises:
        StorageError: the records are missing or damaged.
        WorkloadError: the blocks hold other text than the recorded ones.
    """
    result = recorded_result(folder)
    plan = result.plan
    _check_text(plan, blocks)
    config = drafting_setting(result)
    if config is None or result.validation is None:
        return _speedup("inconclusive", "the recorded sweep validated no setting that drafts.")
    recorded = result.validation.speedups[config]
    margin = max(LEAST_MARGIN, NOISE_MARGIN * result.noise_floor_cv)
    lab = _laboratory(plan, engine, blocks, budget_s)
    # The text that the recorded speed-up is of.
    validated = sorted({one.point.block for one in result.measured(VALIDATE)})
    try:
        status, ratio = compare_pairs(
            (_paired_log(lab, plan, config, validated, at) for at in range(CHECK_LOOKS[-1])),
            recorded,
            margin=margin,
            recorded_level=plan.look_level,
        )
    except _PairError as error:
        return _speedup("inconclusive", f"a measurement failed: {error}")
    return _speedup(status, _gate_words(ratio, margin), ratio, margin)


def compare_pairs(
    logs: Iterable[float],
    recorded: Estimate,
    *,
    margin: float,
    recorded_level: float,
) -> tuple[Status, Estimate]:
    """Judge a speed-up against the recorded one, at each of `CHECK_LOOKS` until it is settled.

    Each bound is one-sided; `FAMILY_ALPHA` is spent over the looks, most of it at the last.

    Args:
        logs: log speed-up of each pair, measured as they are taken from it.
        recorded: the recorded speed-up, its t interval over `n` pairs.
        margin: loss that is put up with, a fraction.
        recorded_level: two-sided confidence of the recorded interval.

    Returns:
        The verdict, and measured over recorded at the look that gave it.
    """
    seen: list[float] = []
    levels = spending_levels(CHECK_LOOKS, FAMILY_ALPHA)
    spending = dict(zip(CHECK_LOOKS, levels, strict=True))
    for log in itertools.islice(logs, CHECK_LOOKS[-1]):
        seen.append(log)
        if len(seen) not in spending:
            continue
        ratio = against_recorded(
            seen, recorded, level=1 - 2 * spending[len(seen)], recorded_level=recorded_level
        )
        status = judge(ratio, margin)
        if status != "inconclusive":
            break
    return status, ratio


class _PairError(Exception):
    """A pair without a ratio; the text says why."""


def _paired_log(
    lab: Laboratory, plan: Plan, config: SpeculationConfig, blocks: Sequence[int], index: int
) -> float:
    """Log speed-up of one pair; every other pair the other way round.

    Raises:
        _PairError: one of the two could not be measured.
    """
    block = blocks[index % len(blocks)]
    rates: dict[SpeculationConfig, float] = {}
    for setting in (config, plan.plain) if index % 2 == 0 else (plan.plain, config):
        point = Point(
            step=CHECK,
            config=setting,
            block=block,
            replicate=index,
            max_tokens=plan.validation_tokens,
        )
        outcome = lab.measure(point)
        if isinstance(outcome, Failed):
            raise _PairError(outcome.reason)
        rates[setting] = outcome.figures.decode_tok_s.est
    return math.log(rates[config] / rates[plan.plain])


def against_recorded(
    logs: Sequence[float], recorded: Estimate, *, level: float, recorded_level: float
) -> Estimate:
    """Speed-up measured now over the recorded one, both uncertain.

    Args:
        logs: log speed-up of each pair measured now.
        recorded: the recorded speed-up, its t interval over `n` pairs.
        level: two-sided confidence of the result.
        recorded_level: two-sided confidence of the recorded interval.
    """
    values = np.asarray(logs, dtype=float)
    now_free, recorded_free = len(values) - 1, recorded.n - 1
    now_variance = float(values.var(ddof=1)) / len(values)
    reach = math.log(recorded.high / recorded.low) / 2
    recorded_variance = (reach / float(stdtrit(recorded_free, 0.5 + recorded_level / 2))) ** 2
    variance = now_variance + recorded_variance
    # Welch and Satterthwaite: two noises of unlike size, each known from few pairs.
    free = variance**2 / (now_variance**2 / now_free + recorded_variance**2 / recorded_free or 1.0)
    log = float(values.mean()) - math.log(recorded.est)
    reach = float(stdtrit(max(free, 1.0), 0.5 + level / 2)) * math.sqrt(variance)
    return Estimate(
        est=math.exp(log), low=math.exp(log - reach), high=math.exp(log + reach), n=len(logs)
    )


def _speedup(
    status: Status, why: str, ratio: Estimate | None = None, margin: float | None = None
) -> Verdict:
    return Verdict(tier="speedup", status=status, why=why, ratio=ratio, margin=margin)


def _check_text(plan: Plan, blocks: Sequence[PromptBlock]) -> None:
    found = tuple(block.sha256 for block in blocks)
    if found != plan.block_sha256:
        raise WorkloadError(
            "the prompts at hand are not those the profile was measured on, so a difference in "
            "figures would say nothing about the code.",
            hint="Use the recorded workload, or tune again here.",
        )


def _laboratory(
    plan: Plan, engine: Engine, blocks: Sequence[PromptBlock], budget_s: float
) -> Laboratory:
    limited: Mapping[str, Any] = plan.to_dict() | {"budget_s": budget_s}
    return Laboratory(Plan.from_dict(limited), engine, blocks)


def _again(point: Point) -> Point:
    return Point(
        step=CHECK,
        config=point.config,
        block=point.block,
        replicate=point.replicate,
        max_tokens=point.max_tokens,
    )


def _gate_words(ratio: Estimate, margin: float) -> str:
    return (
        f"{ratio.est:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] of what was recorded; a loss of "
        f"{margin:.1%} is put up with."
    )
