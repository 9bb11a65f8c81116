"""Where measurements come from: an engine and a store, or a store alone.

A sweep asks for points and cannot tell fresh results from stored ones. Resuming, replaying and
the gate's first tier are therefore one mechanism: the same program over the same results.

Time is counted only in recorded costs, so that a replay takes the same budget decisions as the
run it replays. A budget is for everything: of a sweep that was resumed, each call's loading of the
model is charged to what that call measured first. A call that ended before that costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from vegas_runtime.errors import StorageError
from vegas_runtime.protocol import Engine, PromptBlock
from vegas_runtime.records import Run
from vegas_tune.outcomes import Outcome, attempts, is_final
from vegas_tune.performer import Performer, run_point
from vegas_tune.plan import Plan, Point


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


def settled(store: Store, point: Point) -> Outcome | None:
    """What a point came to, from a store; None while that is open."""
    attempt = 0
    while (outcome := store.find(point, attempt)) is not None:
        if is_final(outcome):
            return outcome
        attempt += 1
    return None


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
