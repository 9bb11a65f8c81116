"""One worker: an engine on one device, which measures what the sweep asks its place for."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vegas_runtime.backend import (
    Capacity,
    Engine,
    PromptBlock,
    find_checkpoint,
    open_backend,
    open_vllm,
    resolve_backend,
)
from vegas_runtime.config import SamplingConfig, SpeculationConfig, visible_gpus
from vegas_runtime.errors import StorageError, WorkloadError
from vegas_tune.board import Board, Task
from vegas_tune.laboratory import Failed, Performer
from vegas_tune.plan import Plan
from vegas_tune.storage import GRACE_S, HEARTBEAT_S, is_connection_loss, open_storage
from vegas_tune.workload_spec import WorkloadSpec

if TYPE_CHECKING:
    from vegas_tune.workload import Workload

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

Report = Callable[[str], None]


@dataclass(frozen=True)
class Facts:
    """What a worker tells the sweep about its engine and its prompts, plain values.

    The sweep itself opens no engine and reads no text.

    Attributes:
        info: `EngineInfo`.
        workload: `Workload.describe()`.
        blocks: per block its hash, prompt lengths, batch size, output limit and sampling.
        mix: share of the prompts by kind.
        replays: times that the most used prompt is used.
    """

    info: dict[str, Any]
    workload: dict[str, Any]
    blocks: list[dict[str, Any]]
    mix: dict[str, float]
    replays: int


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
            killed could not end it.
        report: told what goes on.

    Returns:
        Measurements handed back.

    Raises:
        StorageError: no run or no place to take, or the place was given to another worker.
        WorkloadError: the text here is not the sweep's.
        VegasError: the engine cannot be opened.
    """
    # Optuna's SQLite refusal is the sweep's to make, which knows how many workers it wants.
    board = Board.find_run(open_storage(storage, num_workers=1), run, wait_s=60.0)
    place, place_trial = _take_place(board)
    report(f"worker: place {place}")
    with Pulse(board, place_trial, follow=follow) as pulse:
        engine, blocks = _open(board, model=model, data=data, device=device, report=report)
        try:
            return Worker(board, engine, blocks, place, place_trial, pulse, report).work()
        finally:
            engine.close()
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


def _open(
    board: Board, *, model: str | None, data: Path | None, device: str, report: Report
) -> tuple[Engine, Sequence[PromptBlock]]:
    """The engine and prompts that the run is about; the first worker tells the sweep of them."""
    request = {**board.fact("request")}
    request["model"] = model or request["model"]
    backend, reason = resolve_backend(request["backend"])
    report(f"backend: {reason}")
    if backend == "vllm":
        engine, workload = _open_vllm(request, data, report)
    else:
        engine, _ = open_backend(
            backend,
            model=request["model"],
            max_num_speculative_tokens=request["max_gamma"],
            dtype=request["dtype"],
            device=device,
            report=report,
        )
        if backend == "replay":
            return _replayed(board, engine)
        workload = _workload(request, data, engine.tokenizer, engine.info.model)
    _tell(board, engine, workload.blocks, workload)
    return engine, workload.blocks


def _open_vllm(
    request: Mapping[str, Any], data: Path | None, report: Report
) -> tuple[Engine, Workload]:
    """vLLM, sized for the prompts, which are therefore made first."""
    checkpoint = find_checkpoint(request["model"], dtype=request["dtype"], report=report)
    workload = _workload(request, data, checkpoint.tokenizer, checkpoint.facts)
    capacity = Capacity.of(
        workload.blocks,
        gammas=request["gammas"],
        ratios=request["ratios"],
        config=SpeculationConfig.from_dict(request["base"]),
    )
    return open_vllm(checkpoint, capacity, report=report), workload


def _workload(
    request: Mapping[str, Any], data: Path | None, tokenizer: Any, model: Mapping[str, Any]
) -> Workload:
    from vegas_tune.workload import build_workload

    values = dict(request["spec"])
    values["sampling"] = SamplingConfig(**values["sampling"])
    path = data or values["path"]
    values["path"] = Path(path) if path else None
    return build_workload(
        WorkloadSpec(**values), tokenizer, max_model_len=model.get("max_model_len")
    )


def _replayed(board: Board, engine: Engine) -> tuple[Engine, Sequence[PromptBlock]]:
    from vegas_runtime.replay import ReplayEngine

    assert isinstance(engine, ReplayEngine)
    _tell(board, engine, engine.blocks, None)
    return engine, engine.blocks


def _tell(
    board: Board, engine: Engine, blocks: Sequence[PromptBlock], workload: Workload | None
) -> None:
    """Tell the sweep of engine and prompts, unless another worker has."""
    if board.fact("facts") is not None:
        return
    facts = Facts(
        info=asdict(engine.info),
        workload={} if workload is None else workload.describe(),
        blocks=_block_facts(blocks),
        mix={} if workload is None else workload.mix,
        replays=1 if workload is None else workload.replays,
    )
    board.set_fact("facts", asdict(facts))


def _block_facts(blocks: Sequence[PromptBlock]) -> list[dict[str, Any]]:
    return [
        {
            "sha256": block.sha256,
            "prompt_lens": [len(prompt) for prompt in block.prompts],
            "batch_size": block.batch_size,
            "max_new_tokens": block.max_new_tokens,
            "sampling": block.sampling.to_dict(),
        }
        for block in blocks
    ]


class Worker:
    """Measures for one place; see `run_worker`."""

    def __init__(
        self,
        board: Board,
        engine: Engine,
        blocks: Sequence[PromptBlock],
        place: int,
        place_trial: int,
        pulse: Pulse,
        report: Report,
    ) -> None:
        self._board = board
        self._performer = Performer(engine, blocks, where=_where(engine))
        self._hashes = tuple(block.sha256 for block in blocks)
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
            with self._pulse.measuring(task):
                outcome = self._performer.perform(task.point, task.attempt, task.limit_s)
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
    def measuring(self, task: Task) -> Any:
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
                held = [self._place_trial] + ([task.trial_id] if task is not None else [])
                self._board.beat(*held)
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


def _where(engine: Engine) -> str:
    """Name of this device among the run's, without saying which host it is."""
    device = engine.info.device
    which = ",".join(visible_gpus() or ())
    text = f"{socket.gethostname()}/{device.get('class')}/{which}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]
