"""A measurement as an Optuna trial says it: the same on a board and in a run folder."""

from __future__ import annotations

from typing import Any, Final

from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

from vegas_runtime.config import MAX_SPECULATIVE_TOKENS
from vegas_tune.outcomes import MAX_RETRIES, Failed, Measured, Outcome
from vegas_tune.plan import SPARSITY, STEPS, STOCK, Point

# One study each; stock vLLM first, because that engine is there first.
STUDIES: Final = (STOCK, *STEPS)
# Wide enough for any plan, so that every step's plots share their axes.
DISTRIBUTIONS: Final[dict[str, BaseDistribution]] = {
    "num_speculative_tokens": IntDistribution(0, MAX_SPECULATIVE_TOKENS),
    "sparsity_ratio": FloatDistribution(1e-4, 1.0, log=True),
}
METRICS: Final = {SPARSITY: "accepted_per_iteration"}


def params_of(point: Point) -> dict[str, Any]:
    """A point's parameters, as its trial has them."""
    config = point.config
    return {
        "num_speculative_tokens": config.num_speculative_tokens,
        "sparsity_ratio": config.sparsity_ratio,
    }


def facts_of(outcome: Outcome) -> dict[str, Any]:
    """What a finished trial says beside its value."""
    facts: dict[str, Any] = {"cost_s": outcome.cost_s}
    if outcome.where:
        facts["where"] = outcome.where
    if isinstance(outcome, Failed):
        facts |= {"failure": outcome.kind, "reason": outcome.reason}
    return facts


def value_of(measured: Measured) -> float:
    """What the step maximises; accepted tokens do not exist in plain decoding."""
    figures = measured.figures
    if measured.point.step != SPARSITY:
        return figures.decode_tok_s.est
    return figures.accepted.est if figures.accepted is not None else 0.0


def given_up(point: Point, attempt: int, times: int) -> Failed | None:
    """The result of a measurement that has ended its process too often; None before that."""
    if times <= MAX_RETRIES:
        return None
    return Failed(
        point=point,
        attempt=attempt,
        cost_s=0.0,
        kind="killed",
        reason=f"the process ended {times} times while measuring this.",
    )
