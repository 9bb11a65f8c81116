"""Validation: the finalists and plain decoding measured afresh, until a look settles it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from vegas_runtime.config import SpeculationConfig
from vegas_tune.bench import Bench
from vegas_tune.decide import Validation, is_look, validate
from vegas_tune.plan import VALIDATE, Plan

# Rounds with a failed measurement that are put up with.
MAX_BROKEN_ROUNDS: Final = 3


@dataclass(frozen=True, kw_only=True)
class Validated:
    """What the rounds came to.

    Attributes:
        status: `validated` where enough of them settle the choice.
        reason: one sentence on the status.
        selected: the setting to serve with; plain decoding is one.
        verdict: the rule's; None when fewer than two rounds were complete.
        num_rounds: complete rounds.
        is_held_out: whether they were on text that no choice was made on.
    """

    status: Literal["validated", "inconclusive"]
    reason: str
    selected: SpeculationConfig
    verdict: Validation | None
    num_rounds: int
    is_held_out: bool


def validate_afresh(plan: Plan, bench: Bench, finalists: Sequence[SpeculationConfig]) -> Validated:
    """Measure the finalists and plain decoding side by side, and judge them at each look.

    Args:
        plan: gives blocks, looks and levels.
        bench: measures, within the budget.
        finalists: settings that draft, cheapest first; none leaves plain decoding.
    """
    settings = [*finalists, plan.plain]
    blocks = bench.validation_blocks
    rounds: list[dict[SpeculationConfig, float]] = []
    verdict: Validation | None = None
    turn = num_broken = 0
    while finalists and len(rounds) < plan.looks[-1] and num_broken < MAX_BROKEN_ROUNDS:
        bench.open_round(blocks)
        if not bench.has_room_for(VALIDATE, settings):
            break
        found = bench.compare(VALIDATE, settings, is_backwards=turn % 2 == 1)
        if not found:
            num_broken += 1
            continue
        turn += 1
        rounds += found
        if is_look(plan.looks, len(rounds) - len(found), len(rounds)):
            verdict = _judge(plan, rounds, finalists)
            if _is_settled(verdict, plan):
                break
    # The end of the budget is a look too, in place of those that it cut off.
    if len(rounds) not in plan.looks and len(rounds) >= 2:
        verdict = _judge(plan, rounds, finalists)
    if verdict is not None and len(rounds) >= plan.looks[0]:
        status, reason = verdict.status, _why(plan, verdict, len(rounds))
    else:
        status, reason = "inconclusive", _why_not(plan, bench, finalists, len(rounds), num_broken)
    is_held_out = not {*blocks} & {*plan.search_blocks}
    if rounds and plan.is_held_out and not is_held_out:
        reason += " On the text of the search: preparing more would have taken too long."
    selected = plan.plain
    if verdict is not None:
        selected = verdict.selected
    elif finalists:
        selected = finalists[0]
    return Validated(
        status=status,
        reason=reason,
        selected=selected,
        verdict=verdict,
        num_rounds=len(rounds),
        is_held_out=is_held_out,
    )


def _judge(
    plan: Plan,
    rounds: Sequence[Mapping[SpeculationConfig, float]],
    finalists: Sequence[SpeculationConfig],
) -> Validation:
    return validate(
        rounds,
        finalists,
        plan.plain,
        level=plan.look_level,
        precision=plan.precision,
        tie_tolerance=plan.tie_tolerance,
        gamma_tie_tolerance=plan.gamma_tie_tolerance,
    )


def _is_settled(verdict: Validation, plan: Plan) -> bool:
    """Whether further rounds are not worth their time."""
    half_width = verdict.speedups[verdict.winner].half_width
    return verdict.status == "validated" and half_width <= plan.stop_precision


def _why(plan: Plan, verdict: Validation, num_rounds: int) -> str:
    """The verdict's reason, and the budget where that ended the rounds."""
    if verdict.status == "inconclusive" and num_rounds < plan.looks[-1]:
        return f"{verdict.why} The budget of {plan.budget_s:g} s allowed {num_rounds} rounds."
    return verdict.why


def _why_not(
    plan: Plan,
    bench: Bench,
    finalists: Sequence[SpeculationConfig],
    num_rounds: int,
    num_broken: int,
) -> str:
    """Why there is no verdict to go by."""
    if not finalists:
        cause = "the budget was spent first" if bench.is_budget_spent else "all failed"
        return f"no setting that drafts could be compared: {cause}."
    if num_broken >= MAX_BROKEN_ROUNDS:
        return f"{num_broken} validation rounds had a failed measurement."
    return (
        f"the budget of {plan.budget_s:g} s allowed {num_rounds} validation rounds; "
        f"{plan.looks[0]} are needed."
    )
