"""Which of a profile's points make a curve, which point was chosen, and what was predicted."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import ValidationError

from vegas_runtime.profile import DecisionRecord, Estimate, Point, Profile

SPARSITY_STEP: Final = 1
GAMMA_STEP: Final = 2
REFINE_STEP: Final = 3
VALIDATION_STEP: Final = 4


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points in which one knob varies and the other stays.

    Attributes:
        points: drafting points with a figure, in the order of the knob that varies.
        fixed: value of the knob that stays (gamma or sparsity ratio); None without points.
        plain: plain decoding, measured in the same step; None when it was not.
        decision: what was chosen on this curve; None when nothing was.
        chosen: the point that the decision names; None when it is not on the curve.
        predicted: tokens per second expected at points, by (gamma, ratio).
        num_left_out: points with a figure that differ in the knob that stays.
    """

    points: tuple[Point, ...] = ()
    fixed: float | None = None
    plain: Point | None = None
    decision: DecisionRecord | None = None
    chosen: Point | None = None
    predicted: Mapping[tuple[int, float], float] = field(default_factory=dict)
    num_left_out: int = 0


def sparsity_curve(profile: Profile) -> Curve:
    """Step 1: accepted tokens against the sparsity ratio, at a large gamma."""
    decision = _first(profile, SPARSITY_STEP)
    wanted = _real(decision.data.get("num_speculative_tokens")) if decision else None
    return _curve(
        [point for point in profile.curves.sparsity if point.accepted_per_iteration is not None],
        decision,
        fixed=_gamma,
        varies=_ratio,
        wanted=wanted,
    )


def gamma_curve(profile: Profile) -> Curve:
    """Step 2: decode throughput against gamma, at one sparsity ratio."""
    decision = _first(profile, GAMMA_STEP)
    points = [point for point in profile.curves.gamma if point.decode_tok_s is not None]
    return _curve(points, decision, fixed=_ratio, varies=_gamma)


def refine_curve(profile: Profile) -> Curve:
    """Step 3: decode throughput against the sparsity ratio, at one gamma."""
    decision = _first(profile, REFINE_STEP)
    points = [point for point in profile.curves.refine if point.decode_tok_s is not None]
    return _curve(points, decision, fixed=_gamma, varies=_ratio)


def all_points(profile: Profile) -> list[tuple[int, Point]]:
    """Every point with the number of the step that asked for it, in the file's order."""
    curves = profile.curves
    steps = (
        (SPARSITY_STEP, curves.sparsity),
        (GAMMA_STEP, curves.gamma),
        (REFINE_STEP, curves.refine),
        (VALIDATION_STEP, curves.validation),
    )
    return [(step, point) for step, points in steps for point in points]


def step_number(step: Any) -> int | None:
    """Number of a decision's step: `2` and `2-gamma` are both step 2."""
    found = re.match(r"\d+", str(step))
    return int(found[0]) if found else None


def conditional_acceptance(profile: Profile) -> list[float]:
    """P(draft i accepted | all before it were), i = 1..gamma; the paper's Figure 4."""
    survival = [estimate.est for estimate in profile.results.survival] if profile.results else []
    before = [1.0, *survival]
    return [now / then if then else math.nan for then, now in zip(before, survival, strict=False)]


def validated_speedup(profile: Profile, point: Point) -> Estimate | None:
    """A validated setting's throughput over plain decoding's, from the paired rounds.

    The point itself may hold it; a sweep writes it with its last decision.
    """
    if point.speedup_vs_gamma0 is not None:
        return point.speedup_vs_gamma0
    for decision in profile.decisions:
        if step_number(decision.step) != VALIDATION_STEP:
            continue
        for alternative in decision.alternatives:
            if not isinstance(alternative, Mapping):
                continue
            gamma = _real(alternative.get("num_speculative_tokens"))
            ratio = _real(alternative.get("sparsity_ratio"))
            if (gamma, ratio) == (point.num_speculative_tokens, point.sparsity_ratio):
                with suppress(ValidationError):
                    return Estimate.model_validate(alternative.get("speedup_vs_gamma0"))
    return None


def _curve(
    points: Iterable[Point],
    decision: DecisionRecord | None,
    *,
    fixed: Callable[[Point], float],
    varies: Callable[[Point], float],
    wanted: float | None = None,
) -> Curve:
    measured = [point for point in points if point.status == "ok"]
    drafting = [point for point in measured if point.num_speculative_tokens > 0]
    plain = [point for point in measured if point.num_speculative_tokens == 0]
    values = Counter(fixed(point) for point in drafting)
    if not values:
        return Curve(plain=plain[0] if plain else None, decision=decision)
    stays = wanted if wanted in values else max(values, key=lambda value: (values[value], value))
    kept = sorted((point for point in drafting if fixed(point) == stays), key=varies)
    named = _named_point(decision)
    return Curve(
        points=tuple(kept),
        fixed=stays,
        plain=plain[0] if plain else None,
        decision=decision,
        chosen=next((p for p in kept if _is_named(p, varies, named)), None),
        predicted=_predicted(decision),
        num_left_out=len(drafting) - len(kept),
    )


def _first(profile: Profile, step: int) -> DecisionRecord | None:
    """The first decision of a step: later ones look at another knob once more."""
    return next((d for d in profile.decisions if step_number(d.step) == step), None)


def _named_point(decision: DecisionRecord | None) -> Mapping[str, Any] | float | None:
    chosen = decision.chosen if decision else None
    if isinstance(chosen, Mapping):
        return chosen
    return _real(chosen)


def _is_named(
    point: Point, varies: Callable[[Point], float], named: Mapping[str, Any] | float | None
) -> bool:
    """Whether a decision's choice is this point; a bare number names the knob that varies."""
    if named is None:
        return False
    if not isinstance(named, Mapping):
        return varies(point) == named
    key = "num_speculative_tokens" if varies is _gamma else "sparsity_ratio"
    return _real(named.get(key)) == varies(point)


def _predicted(decision: DecisionRecord | None) -> dict[tuple[int, float], float]:
    found: dict[tuple[int, float], float] = {}
    for alternative in decision.alternatives if decision else ():
        if not isinstance(alternative, Mapping):
            continue
        gamma = _real(alternative.get("num_speculative_tokens"))
        ratio = _real(alternative.get("sparsity_ratio"))
        rate = _real(alternative.get("predicted_tok_s"))
        if gamma is not None and ratio is not None and rate is not None:
            found[int(gamma), ratio] = rate
    return found


def _gamma(point: Point) -> float:
    return point.num_speculative_tokens


def _ratio(point: Point) -> float:
    return point.sparsity_ratio


def _real(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None
