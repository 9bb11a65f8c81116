"""What became of a point: measured or failed, and whether it is tried again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from vegas_runtime.records import Run
from vegas_tune.measure import Measurement, measure
from vegas_tune.plan import Point

MAX_RETRIES: Final = 2
# Failures of the machine rather than of the setting; anything else would only fail again.
RETRIED_KINDS: Final = frozenset({"engine", "unsteady", "nan", "thermal"})


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A finished measurement.

    Attributes:
        point: what was asked for.
        attempt: 0, or how often it was tried before.
        cost_s: engine time since the previous measurement ended, preparation included.
        run: the records.
        where: device it was measured on; empty in a run of one engine.
        telemetry: what the GPU did meanwhile, `telemetry.Telemetry.to_dict()`; None unwatched.
        load_s: of the cost, what came before any preparation: loading the model, starting vLLM.
            Above 0 this is the first result of that start.
    """

    point: Point
    attempt: int
    cost_s: float
    run: Run
    where: str = ""
    telemetry: Mapping[str, Any] | None = None
    load_s: float = 0.0

    @property
    def preparation_s(self) -> float:
        """What setting up the block took, its prefill where it was new, seconds."""
        return self.cost_s - self.load_s - self.run.elapsed_s

    @cached_property
    def figures(self) -> Measurement:
        """All figures of the records; they are steady, or this would be a `Failed`."""
        figures = measure(self.run)
        assert isinstance(figures, Measurement)
        return figures


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A measurement that yields no figure.

    Attributes:
        point: what was asked for.
        attempt: 0, or how often it was tried before.
        cost_s: engine time since the previous measurement ended.
        kind: `oom`, `timeout`, `nan`, `engine`, `gpu_memory`, `unsteady`, `mismatch`, `thermal`,
            `hang` or `killed`.
        reason: one sentence for the user.
        where: device it was tried on; empty in a run of one engine.
        telemetry: what the GPU did meanwhile; None unwatched.
        load_s: of the cost, what starting the engine took; see `Measured`.
    """

    point: Point
    attempt: int
    cost_s: float
    kind: str
    reason: str
    where: str = ""
    telemetry: Mapping[str, Any] | None = None
    load_s: float = 0.0


Outcome = Measured | Failed


def is_final(outcome: Outcome) -> bool:
    """Whether a point is not tried again after this."""
    return isinstance(outcome, Measured) or not is_tried_again(outcome.kind, outcome.attempt)


def is_tried_again(kind: str, attempt: int) -> bool:
    """Whether a point that failed so, at this attempt, is measured once more."""
    return kind in RETRIED_KINDS and attempt < MAX_RETRIES


def attempts(point: Point, result: Callable[[Point, int], Outcome]) -> list[Outcome]:
    """Try until it works, fails for good, or has been retried often enough."""
    tried = [result(point, 0)]
    while not is_final(tried[-1]):
        tried.append(result(point, len(tried)))
    return tried
