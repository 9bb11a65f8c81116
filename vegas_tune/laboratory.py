"""Where measurements come from: an engine and a store, or a store alone.

A sweep asks for points and cannot tell fresh results from stored ones. Resuming, replaying and
the gate's first tier are therefore one mechanism: the same program over the same results.

Time is counted only in recorded costs, so that a replay takes the same budget decisions as the
run it replays. A budget is for everything: of a sweep that was resumed, each call's loading of the
model is charged to what that call measured first. A call that ended before that costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Protocol

from vegas_runtime.backend import Engine, PromptBlock, Restarting
from vegas_runtime.errors import BackendError, GpuMemoryError, StorageError
from vegas_runtime.records import Run
from vegas_tune.measure import Measurement, measure
from vegas_tune.plan import Plan, Point
from vegas_tune.steady import Unsteady, steady_steps
from vegas_tune.telemetry import Watch, watch_for

MAX_RETRIES: Final = 2
# Failures of the machine rather than of the setting; anything else would only fail again.
RETRIED_KINDS: Final = frozenset({"engine", "unsteady", "nan", "thermal"})

_OOM_TEXTS: Final = ("out of memory", "can't allocate memory", "cannot allocate memory")


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


class Lab(Protocol):
    """What a sweep needs."""

    @property
    def spent_s(self) -> float:
        """Sum of the costs of all results asked for so far."""

    def measure(self, point: Point) -> Outcome:
        """The result of a point; retries are behind it, their costs are counted."""

    def measure_places(self, points: Sequence[Point]) -> tuple[Outcome, ...]:
        """The results of points that are measured at the same time, each at its own place.

        Retries are behind it, their costs are counted.
        """


class StoppableLab(Lab, Protocol):
    """A laboratory that measures, and can be asked to stop."""

    def stop_soon(self) -> None:
        """Raise KeyboardInterrupt once the measurement in progress is stored."""


class Store(Protocol):
    """Where a laboratory keeps its results."""

    def find(self, point: Point, attempt: int) -> Outcome | None:
        """The stored result."""

    def begin(self, point: Point, attempt: int) -> None:
        """Note that a measurement starts."""

    def finish(self, outcome: Outcome) -> None:
        """Keep a result for good; when this returns, it survives anything.

        Raises:
            StorageError: it could not be kept.
        """

    def abandon(self, point: Point, attempt: int, kind: str) -> None:
        """Note that a started measurement will have no result."""


class MemoryStore:
    """Keeps results for the life of the process: simulations and tests."""

    def __init__(self, outcomes: Iterable[Outcome] = ()) -> None:
        self.outcomes: dict[tuple[str, int], Outcome] = {}
        for outcome in outcomes:
            self.finish(outcome)

    def find(self, point: Point, attempt: int) -> Outcome | None:
        """See `Store`."""
        found = self.outcomes.get((point.key, attempt))
        return found if found is not None and found.point == point else None

    def begin(self, point: Point, attempt: int) -> None:
        """See `Store`."""

    def finish(self, outcome: Outcome) -> None:
        """See `Store`."""
        self.outcomes[outcome.point.key, outcome.attempt] = outcome

    def abandon(self, point: Point, attempt: int, kind: str) -> None:
        """See `Store`."""


def is_final(outcome: Outcome) -> bool:
    """Whether a point is not tried again after this."""
    return isinstance(outcome, Measured) or not _is_tried_again(outcome.kind, outcome.attempt)


def _is_tried_again(kind: str, attempt: int) -> bool:
    return kind in RETRIED_KINDS and attempt < MAX_RETRIES


def _restarts_s(engine: Engine) -> float:
    return engine.restarts_s if isinstance(engine, Restarting) else 0.0


def settled(store: Store, point: Point) -> Outcome | None:
    """What a point came to, from a store; None while that is open."""
    attempt = 0
    while (outcome := store.find(point, attempt)) is not None:
        if is_final(outcome):
            return outcome
        attempt += 1
    return None


def attempts(point: Point, result: Callable[[Point, int], Outcome]) -> list[Outcome]:
    """Try until it works, fails for good, or has been retried often enough."""
    tried = [result(point, 0)]
    while not is_final(tried[-1]):
        tried.append(result(point, len(tried)))
    return tried


def cost_side_by_side(tried: Iterable[Sequence[Outcome]]) -> float:
    """Time that points on devices of their own take together, with their retries: the longest."""
    return max(sum(outcome.cost_s for outcome in one) for one in tried)


class RecordedLab:
    """Answers from records alone.

    Args:
        outcomes: everything the recorded run measured.
    """

    def __init__(self, outcomes: Iterable[Outcome]) -> None:
        self._store = MemoryStore(outcomes)
        self.spent_s = 0.0

    def measure_places(self, points: Sequence[Point]) -> tuple[Outcome, ...]:
        """The recorded results.

        Raises:
            StorageError: one is not among the records.
        """
        tried = [attempts(point, self._recorded) for point in points]
        self.spent_s += cost_side_by_side(tried)
        return tuple(one[-1] for one in tried)

    def measure(self, point: Point) -> Outcome:
        """The recorded result of one point.

        Raises:
            StorageError: it is not among the records.
        """
        return self.measure_places([point])[0]

    def _recorded(self, point: Point, attempt: int) -> Outcome:
        outcome = self._store.find(point, attempt)
        if outcome is None:
            raise StorageError(
                f"the records hold no measurement {point.key!r} (attempt {attempt}), which the "
                "sweep asks for at this place: records are missing, or were changed."
            )
        return outcome


class Laboratory:
    """Answers from a store, and measures what is not in it.

    Args:
        plan: gives the budget.
        engine: what measures.
        blocks: the workload, as in the plan.
        store: where results are kept.
        load_s: time already spent, e.g. loading the model; see `Performer`.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        blocks: Sequence[PromptBlock],
        *,
        store: Store | None = None,
        load_s: float = 0.0,
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._blocks = blocks
        self._performer = Performer(engine, blocks, load_s=load_s, run=self._run)
        self._store: Store = MemoryStore() if store is None else store
        self._stops_soon = False
        self.spent_s = 0.0
        self.num_fresh = 0

    def stop_soon(self) -> None:
        """Raise KeyboardInterrupt once the measurement in progress is stored."""
        self._stops_soon = True

    def measure(self, point: Point) -> Outcome:
        """The stored result, or a fresh one, stored before it is returned.

        Raises:
            StorageError: the result could not be kept.
        """
        return attempts(point, self._find_or_measure)[-1]

    def measure_places(self, points: Sequence[Point]) -> tuple[Outcome, ...]:
        """See `Lab`: one engine is one place."""
        (point,) = points
        return (self.measure(point),)

    def _run(self, point: Point, deadline_s: float) -> Run:
        return run_point(self._engine, self._blocks, point, deadline_s)

    def _find_or_measure(self, point: Point, attempt: int) -> Outcome:
        stored = self._store.find(point, attempt)
        if stored is not None:
            self.spent_s += stored.cost_s
            return stored
        if self._stops_soon:
            raise KeyboardInterrupt
        self._store.begin(point, attempt)
        try:
            limit_s = self._plan.budget_s - self.spent_s
            outcome = self._performer.perform(point, attempt, limit_s)
        except KeyboardInterrupt:
            self._store.abandon(point, attempt, "interrupted")
            raise
        self._store.finish(outcome)
        self.num_fresh += 1
        self.spent_s += outcome.cost_s
        return outcome


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
        is_retried = failure is not None and _is_tried_again(failure[0], attempt)
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
