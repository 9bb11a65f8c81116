"""One worker: an engine on one device, which measures what the sweep asks its place for."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from vegas_runtime.errors import StorageError, WorkloadError
from vegas_tune.board import Board, Task
from vegas_tune.outcomes import Failed
from vegas_tune.plan import Plan
from vegas_tune.storage import GRACE_S, HEARTBEAT_S, is_connection_loss, open_storage
from vegas_tune.worker_arms import Arms, Report, open_arms

# Looking for work: at once after work was found, then ever more rarely.
FIRST_POLL_S: Final = 0.01
LAST_POLL_S: Final = 0.5
# Beyond its limit a measurement ends at the engine's next step; this long after, there is none.
HANG_GRACE_S: Final = 120.0
# A worker that waits this long for a run to start, or for the next question, asks no more.
PATIENCE_S: Final = 3600.0
# Longer than it takes to notice that a worker on another host died.
PLACE_WAIT_S: Final = 2.0 * GRACE_S
_HUNG, _ORPHANED = 70, 71


def run_worker(
    storage: str,
    *,
    run: str | None = None,
    model: str | None = None,
    data: Path | None = None,
    device: str = "auto",
    follow: int | None = None,
    report: Report,
) -> int:
    """Take a place in a run and measure for it until the run is over.

    Args:
        storage: as the sweep was given.
        run: name of the run; not needed while there is only one.
        model: where the model lies here, if not where the sweep says.
        data: where the workload's file lies here, if not where the sweep says.
        device: where the engine runs.
        follow: number of a process to end with: the sweep that started this worker. One that was
            killed could not end it. Where its run is over already, nothing is waited for.
        report: told what goes on.

    Returns:
        Measurements handed back.

    Raises:
        StorageError: no run or no place to take, or the place was given to another worker.
        WorkloadError: the text here is not the sweep's.
        VegasError: the engine cannot be opened.
    """
    # Optuna's SQLite refusal is the sweep's to make, which knows how many workers it wants.
    shared = open_storage(storage, num_workers=1)
    if follow is not None and run is not None and Board.is_over(shared, run):
        report("worker: the run is over")
        return 0
    board = Board.find_run(shared, run, wait_s=60.0)
    place, place_trial = _take_place(board)
    report(f"worker: place {place}")
    with Pulse(board, place_trial, follow=follow) as pulse:
        arms = open_arms(board, model=model, data=data, device=device, report=report)
        try:
            return Worker(board, arms, place, place_trial, pulse, report).work()
        finally:
            arms.close()
            board.release(place_trial)


def _take_place(board: Board) -> tuple[int, int]:
    """A place, once one is free: that of a worker which died is offered again after a while."""
    deadline_s = time.monotonic() + PLACE_WAIT_S
    while (taken := board.take_place()) is None:
        if time.monotonic() > deadline_s:
            raise StorageError(
                "every place of the run has a worker already.",
                hint="Start the sweep with --workers N for N of them.",
            )
        time.sleep(LAST_POLL_S)
    return taken


class Worker:
    """Measures for one place; see `run_worker`."""

    def __init__(
        self,
        board: Board,
        arms: Arms,
        place: int,
        place_trial: int,
        pulse: Pulse,
        report: Report,
    ) -> None:
        self._board = board
        self._arms = arms
        self._hashes = tuple(block.sha256 for block in arms.blocks)
        self._place = place
        self._place_trial = place_trial
        self._pulse = pulse
        self._report = report

    def work(self) -> int:
        """Until the run is over; how many measurements were handed back.

        Raises:
            StorageError: the place was given to another worker.
            WorkloadError: the text here is not the sweep's.
        """
        self._wait_for_plan()
        done = 0
        poll_s = FIRST_POLL_S
        idle_since_s = time.monotonic()
        while True:
            task = self._board.claim(self._place)
            if task is None:
                if self._board.fact("is_over"):
                    return done
                self._check_place(idle_since_s)
                time.sleep(poll_s)
                poll_s = min(1.5 * poll_s, LAST_POLL_S)
                continue
            poll_s = FIRST_POLL_S
            self._report(f"measuring {task.point.key}")
            with self._pulse.holding(task):
                # May start an engine: part of the cost, not of the time after which one hangs.
                performer = self._arms.performer(task.point.step)
                with self._pulse.measuring(task):
                    outcome = performer.perform(task.point, task.attempt, task.limit_s)
                done += self._board.finish(task, outcome)
            idle_since_s = time.monotonic()

    def _check_place(self, idle_since_s: float) -> None:
        """Raise where waiting on makes no sense."""
        if not self._board.holds(self._place_trial):
            raise StorageError(
                f"place {self._place} was given to another worker, because this one had shown no "
                "sign of life.",
                hint="Start it again; it takes a place that is free.",
            )
        if time.monotonic() - idle_since_s > PATIENCE_S:
            raise StorageError(
                f"nothing was asked for in {PATIENCE_S:.0f} s; the sweep is gone.",
                hint="Resume it, and start the worker again.",
            )

    def _wait_for_plan(self) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while (values := self._board.fact("plan")) is None:
            if time.monotonic() > deadline_s:
                raise StorageError(f"the sweep made no plan in {PATIENCE_S:.0f} s.")
            time.sleep(LAST_POLL_S)
        if Plan.from_dict(values).block_sha256 != self._hashes:
            raise WorkloadError(
                "the prompts here are not those of the sweep: another file, tokenizer or release.",
                hint="Use the same model, data and vegas-tune on every host.",
            )


class Pulse:
    """Heartbeats in the background, and the end of a measurement that hangs.

    An engine that hangs cannot be interrupted from inside its process. So the result is handed
    back as a failure, and the process ends; whoever started it starts another.

    Args:
        board: where heartbeats go.
        place_trial: the trial that holds the worker's place.
        follow: process to end with.
    """

    def __init__(self, board: Board, place_trial: int, *, follow: int | None = None) -> None:
        self._board = board
        self._follow = follow
        self._place_trial = place_trial
        self._task: Task | None = None
        self._held: Task | None = None
        self._started_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @contextlib.contextmanager
    def holding(self, task: Task) -> Iterator[None]:
        """Show that a claimed measurement is in somebody's hands."""
        self._held = task
        try:
            yield
        finally:
            self._held = None

    @contextlib.contextmanager
    def measuring(self, task: Task) -> Iterator[None]:
        """Watch a measurement while it runs."""
        self._started_s, self._task = time.monotonic(), task
        try:
            yield
        finally:
            self._task = None

    def _beat(self) -> None:
        next_beat_s = 0.0
        while not self._stop.wait(0.5):
            task = self._task
            if task is not None and self._hangs(task):
                self._give_up(task)
            if self._follow is not None and os.getppid() != self._follow:
                # What it held is posted again once it is noticed that its process is gone.
                os._exit(_ORPHANED)
            if time.monotonic() < next_beat_s:
                continue
            next_beat_s = time.monotonic() + HEARTBEAT_S
            try:
                held = {one.trial_id for one in (task, self._held) if one is not None}
                self._board.beat(self._place_trial, *held)
            except Exception as error:
                # The database is away; the beat after its return counts as well.
                if not is_connection_loss(error):
                    raise

    def _hangs(self, task: Task) -> bool:
        return time.monotonic() - self._started_s > task.limit_s + HANG_GRACE_S

    def _give_up(self, task: Task) -> None:
        waited_s = time.monotonic() - self._started_s
        reason = (
            f"the engine gave no sign of life for {waited_s:.0f} s; {task.limit_s:.0f} s were "
            "allowed. Its process was ended."
        )
        outcome = Failed(
            point=task.point, attempt=task.attempt, cost_s=waited_s, kind="hang", reason=reason
        )
        self._board.finish(task, outcome)
        os._exit(_HUNG)
