"""A sweep over several devices: this process asks and decides, workers measure.

Every device measures every point. Settings are compared on one device at a time, and the devices
are blocks of the comparison: cards of one type differ by a few per cent, so setting A on one is
never held against setting B on another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from vegas_runtime.config import SamplingConfig, child_environment, visible_gpus
from vegas_runtime.errors import BackendError
from vegas_runtime.gpu_memory import MemoryCheck, MemoryGuard, as_device
from vegas_runtime.protocol import EngineInfo, PromptBlock
from vegas_tune.board import Board
from vegas_tune.laboratory import Store, cost_side_by_side
from vegas_tune.outcomes import Outcome, is_final
from vegas_tune.plan import Plan, Point
from vegas_tune.trials import given_up

FIRST_POLL_S: Final = 0.01
LAST_POLL_S: Final = 0.25
_TEND_EVERY_S: Final = 1.0
# A worker that ends this often without a measurement in between has a reason that will not go away.
MAX_STARTS: Final = 4
_TERM_S: Final = 20.0
# How long the memory of an ended worker's GPU is waited for.
FREE_S: Final = 20.0
# How long workers may take to close their engines once the run is over.
LEAVE_S: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class RemoteBlock(PromptBlock):
    """A block whose text only the workers hold; its prompts here are zeros of the same lengths."""

    known_sha256: str

    @cached_property
    def sha256(self) -> str:
        """Hash as a worker computed it."""
        return self.known_sha256


def remote_blocks(facts: Sequence[Mapping[str, Any]]) -> tuple[RemoteBlock, ...]:
    """The blocks that a worker told of."""
    return tuple(
        RemoteBlock(
            index=index,
            prompts=tuple((0,) * length for length in block["prompt_lens"]),
            batch_size=block["batch_size"],
            max_new_tokens=block["max_new_tokens"],
            sampling=SamplingConfig(**block["sampling"]),
            known_sha256=block["sha256"],
        )
        for index, block in enumerate(facts)
    )


def engine_info(facts: Mapping[str, Any]) -> EngineInfo:
    """The engine that a worker told of."""
    return EngineInfo(**facts)


class FleetLab:
    """Answers from a store, and asks workers for what is not in it.

    Args:
        plan: gives budget and places.
        board: where workers are asked.
        store: where results are kept; what a worker hands back is there before it is used.
        tend: called about once a second while waiting.
    """

    def __init__(
        self, plan: Plan, board: Board, store: Store, tend: Callable[[], None] = lambda: None
    ) -> None:
        self._plan = plan
        self._board = board
        self._store = store
        self._tend = tend
        self._tended_s = 0.0
        self._posted: set[tuple[str, int]] = set()
        self._stops_soon = False
        self.spent_s = 0.0
        self.num_fresh = 0

    def stop_soon(self) -> None:
        """Raise KeyboardInterrupt once the measurements in progress are stored."""
        self._stops_soon = True

    def measure(self, point: Point) -> Outcome:
        """The result of one point."""
        return self.measure_places([point])[0]

    def measure_places(self, points: Sequence[Point]) -> tuple[Outcome, ...]:
        """The results of points measured at the same time; see `Lab`.

        Raises:
            StorageError: a result could not be kept, or the database stayed away.
        """
        tried: list[list[Outcome]] = [[] for _ in points]
        poll_s = FIRST_POLL_S
        while True:
            waiting = False
            for point, outcomes in zip(points, tried, strict=True):
                while not outcomes or not is_final(outcomes[-1]):
                    outcome = self._look_for(point, len(outcomes))
                    if outcome is None:
                        waiting = True
                        break
                    outcomes.append(outcome)
            if not waiting:
                break
            self._wait(poll_s)
            poll_s = min(1.5 * poll_s, LAST_POLL_S)
        self.spent_s += cost_side_by_side(tried)
        return tuple(outcomes[-1] for outcomes in tried)

    def _look_for(self, point: Point, attempt: int) -> Outcome | None:
        """A stored result, or one that came in; what is neither is asked for."""
        stored = self._store.find(point, attempt)
        if stored is not None:
            return stored
        found = self._board.find(point, attempt)
        if found is None:
            if (point.key, attempt) in self._posted:
                return None
            found = given_up(point, attempt, self._board.num_lost(point, attempt))
        if found is None:
            if self._stops_soon:
                raise KeyboardInterrupt
            self._board.post(point, attempt, self._plan.budget_s - self.spent_s)
            self._posted.add((point.key, attempt))
            return None
        self._store.begin(point, attempt)
        self._store.finish(found)
        self.num_fresh += 1
        return found

    def _wait(self, poll_s: float) -> None:
        if time.monotonic() - self._tended_s >= _TEND_EVERY_S:
            self._tended_s = time.monotonic()
            if self._board.reap():
                # Ask again for what the dead have left undone.
                self._posted.clear()
            self._tend()
        time.sleep(poll_s)


def guard_of(environment: Mapping[str, str]) -> MemoryGuard:
    """A guard of the GPUs that a process with this environment sees."""
    return MemoryGuard(*map(as_device, environment["CUDA_VISIBLE_DEVICES"].split(",")))


class LocalWorkers:
    """Worker processes on this host, one per place, each in a process group of its own.

    The first `tend` starts them: a run that is over already has nothing to ask them.

    Args:
        command: what to run; the same for each.
        count: how many.
        pin: environment of each, by its number: which devices it sees.
        log: folder of their output.
        guard: notes the memory in use on the devices that a worker sees.
        report: told when something of theirs is left behind.

    Attributes:
        memory: what became of each worker's GPU memory, by its number, once all have ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        *,
        pin: Callable[[int], Mapping[str, str]],
        log: Path,
        guard: Callable[[Mapping[str, str]], MemoryGuard] = guard_of,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._command = list(command)
        self._pin = pin
        self._log = log
        self._report = report
        self._guards = {number: guard(pin(number)) for number in range(count)}
        self._waiting_since_s: dict[int, float] = {}
        self.memory: dict[int, MemoryCheck] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._starts = dict.fromkeys(range(count), 0)
        self._num_done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            _signal_group(process, signal.SIGTERM)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TERM_S)
            # What the worker started itself, e.g. an engine's own process, goes with it.
            _signal_group(process, signal.SIGKILL)
            process.wait()
        self._verify_gone()

    @property
    def pids(self) -> list[int]:
        """The living ones."""
        return [process.pid for process in self._processes.values() if process.poll() is None]

    def leave(self, patience_s: float = LEAVE_S) -> None:
        """Let the workers of a run that is over end by themselves, engines and all."""
        deadline_s = time.monotonic() + patience_s
        while self.pids and time.monotonic() < deadline_s:
            time.sleep(0.05)

    def tend(self, num_done: int = 0) -> None:
        """Start what is not running.

        Args:
            num_done: measurements handed back so far; when more, earlier ends are forgiven.

        Raises:
            BackendError: one has ended too often.
            GpuMemoryError: what one used of its GPU has not come back.
        """
        if num_done > self._num_done:
            self._num_done = num_done
            self._starts = dict.fromkeys(self._starts, 1)
        for number, starts in self._starts.items():
            process = self._processes.get(number)
            if process is not None and process.poll() is None:
                continue
            if process is not None:
                _signal_group(process, signal.SIGKILL)
                if not self._is_free(number):
                    continue
            if starts >= MAX_STARTS:
                raise BackendError(
                    f"worker {number} has ended {starts} times without a measurement in between.",
                    hint=f"Read {self._file(number)}; --workers 1 shows the fault directly.",
                )
            self._starts[number] += 1
            with self._file(number).open("ab") as output:
                self._processes[number] = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=child_environment(self._pin(number)),
                    start_new_session=True,
                )

    def _is_free(self, number: int) -> bool:
        """Whether an ended worker's GPU can take another; its memory is freed a little later.

        Raises:
            GpuMemoryError: it was waited for long enough.
        """
        check = self._guards[number].look()
        if check.state != "held":
            self._waiting_since_s.pop(number, None)
            return True
        since_s = self._waiting_since_s.setdefault(number, time.monotonic())
        if time.monotonic() - since_s > FREE_S:
            check.refuse_held(f"worker {number}")
        return False

    def _verify_gone(self) -> None:
        """Look for what the workers may have left behind: processes, and memory of their GPUs."""
        for number, process in self._processes.items():
            limit_s = time.monotonic() + FREE_S
            while _has_group(process) and time.monotonic() < limit_s:
                time.sleep(0.05)
            if _has_group(process):
                self._report(f"WARNING: processes of worker {number} (group {process.pid}) live on")
            check = self.memory[number] = self._guards[number].wait(FREE_S)
            if check.state == "held":
                self._report(f"WARNING: {check.to_text(f'worker {number}')}")

    def _file(self, number: int) -> Path:
        return self._log / f"worker-{number}.log"


def worker_command(storage: str, run: str, *, device: str) -> list[str]:
    """The command that starts a worker of this installation, which ends with this process."""
    return [
        sys.executable, "-m", "vegas_tune.cli", "worker",
        "--storage", storage, "--run", run, "--device", device, "--follow", str(os.getpid()),
    ]  # fmt: skip


def pin_gpus(number: int, *, size: int = 1) -> dict[str, str]:
    """Let a worker see its own GPUs: the n-th group of those this process may use.

    Args:
        number: of the worker, from 0.
        size: GPUs of each.
    """
    names = visible_gpus() or ()
    group = range(number * size, (number + 1) * size)
    seen = [names[place] if place < len(names) else str(place) for place in group]
    return {"CUDA_VISIBLE_DEVICES": ",".join(seen)}


def _has_group(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process of the group that a worker led is left."""
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal the group that a worker leads: nobody else's processes are in it."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
