"""Carrying out one measurement on an engine, and saying what became of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from vegas_runtime.errors import BackendError, GpuMemoryError
from vegas_runtime.protocol import Engine, PromptBlock, Restarting
from vegas_runtime.records import Run
from vegas_tune.outcomes import RETRIED_KINDS, Failed, Measured, Outcome, is_tried_again
from vegas_tune.plan import Point
from vegas_tune.steady import Unsteady, steady_steps
from vegas_tune.telemetry import Watch, watch_for

_OOM_TEXTS: Final = ("out of memory", "can't allocate memory", "cannot allocate memory")


class Performer:
    """Carries out measurements on an engine and says what became of them.

    Args:
        engine: what measures.
        blocks: the workload.
        where: device it runs on; settings of a round are compared on one device only.
        load_s: time already spent, e.g. loading the model. Like that of starting the engine again,
            it is charged to the first result after it that is not tried again, so that none of it
            is lost behind a retry.
        run: makes the pass, from a point and a deadline; `run_point` by default.
        watch: of the device; of the engine's GPUs by default.
    """

    def __init__(
        self,
        engine: Engine,
        blocks: Sequence[PromptBlock],
        *,
        where: str = "",
        load_s: float = 0.0,
        run: Callable[[Point, float], Run] | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._engine = engine
        self._watch = watch or watch_for(engine.info)
        self._run = run or (lambda point, deadline: run_point(engine, blocks, point, deadline))
        self._where = where
        self._load_s = load_s
        self._mark_s = engine.now_s() - load_s

    def perform(self, point: Point, attempt: int, limit_s: float) -> Outcome:
        """Measure a point.

        Args:
            point: what to measure.
            attempt: how often it was tried before.
            limit_s: time it may take, counted from the end of the measurement before.
        """
        deadline_s = self._mark_s + limit_s
        restarts_s = _restarts_s(self._engine)
        failure: tuple[str, str] | None = None
        with self._watch.window() as window:
            try:
                run = rounded(self._run(point, deadline_s))
            except (MemoryError, RuntimeError, OSError, ArithmeticError, BackendError) as error:
                failure = classify(error)
        seen = window.summary()
        if failure is None and window.objection is not None:
            failure = "thermal", window.objection
        failure = failure or _objection(point, run)
        now_s = self._engine.now_s()
        load_s = self._load_s + _restarts_s(self._engine) - restarts_s
        if failure is not None and failure[0] in RETRIED_KINDS and now_s >= deadline_s:
            failure = "timeout", f"the budget ended during the measurement ({failure[1]})"
        is_retried = failure is not None and is_tried_again(failure[0], attempt)
        self._load_s = load_s if is_retried else 0.0
        # Rounded here, so that a stored cost and a live one lead to the same decision.
        cost_s = round(now_s - self._load_s - self._mark_s, 6)
        self._mark_s = now_s - self._load_s
        common: dict[str, Any] = {
            "point": point, "attempt": attempt, "cost_s": cost_s, "where": self._where,
            "telemetry": None if seen is None else seen.to_dict(),
            "load_s": 0.0 if is_retried else round(load_s, 6),
        }  # fmt: skip
        if failure is None:
            return Measured(**common, run=run)
        return Failed(**common, kind=failure[0], reason=failure[1])


def run_point(
    engine: Engine, blocks: Sequence[PromptBlock], point: Point, deadline_s: float
) -> Run:
    """Set the engine to a point and make one pass."""
    block = blocks[point.block]
    engine.configure(point.config)
    engine.prepare(block)
    return engine.run(
        block, replicate=point.replicate, max_tokens=point.max_tokens, deadline_s=deadline_s
    )


def _objection(point: Point, run: Run) -> tuple[str, str] | None:
    """Why a pass that ended is no measurement of the point."""
    if run.config != point.config:
        differing = [
            f"{name} is {value!r}, not {getattr(point.config, name)!r}"
            for name, value in run.config.to_dict().items()
            if value != getattr(point.config, name)
        ]
        return "mismatch", f"the engine ran another setting: {', '.join(differing)}."
    steps = steady_steps(run)
    return (steps.kind, steps.reason) if isinstance(steps, Unsteady) else None


def classify(error: BaseException) -> tuple[str, str]:
    """Kind and reason of a failure inside an engine."""
    text = str(error) or type(error).__name__
    lowered = text.lower()
    if isinstance(error, MemoryError) or any(known in lowered for known in _OOM_TEXTS):
        return "oom", text
    if isinstance(error, GpuMemoryError):
        return "gpu_memory", text
    if isinstance(error, TimeoutError):
        return "timeout", text
    if isinstance(error, ArithmeticError):
        return "nan", text
    return "engine", text


def rounded(run: Run) -> Run:
    """A run as its records read back: `Run.from_dict(run.to_dict())`, at a fraction of the cost.

    Decisions are taken on this, so that a replay of the records cannot differ from the run.
    """
    steps = tuple(
        replace(
            step,
            draft_s=round(step.draft_s, 6),
            select_s=round(step.select_s, 6),
            verify_s=round(step.verify_s, 6),
            other_s=round(step.other_s, 6),
        )
        for step in run.steps
    )
    return replace(run, steps=steps, elapsed_s=round(run.elapsed_s, 6))


def _restarts_s(engine: Engine) -> float:
    return engine.restarts_s if isinstance(engine, Restarting) else 0.0
