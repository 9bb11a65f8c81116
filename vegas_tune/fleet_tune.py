"""`sweep --workers N` and `sweep --storage URL` from end to end: the same sweep, other hands."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vegas_runtime.errors import BackendError, UsageError
from vegas_runtime.gpu_memory import UNKNOWN, MemoryCheck, worst
from vegas_tune.board import Board
from vegas_tune.fleet import (
    FleetLab,
    LocalWorkers,
    engine_info,
    pin_gpus,
    remote_blocks,
    worker_command,
)
from vegas_tune.plan import Plan, gamma_ladder
from vegas_tune.request import SweepRequest
from vegas_tune.split import check_gpus
from vegas_tune.stock import StockFigures
from vegas_tune.storage import open_storage, shown
from vegas_tune.study import RunFolder
from vegas_tune.sweep import run_sweep
from vegas_tune.sweep_outcome import SweepOutcome, publish_run
from vegas_tune.tune import (
    first_interrupt_finishes,
    plan_sweep,
    run_folder,
    usable_ratios,
)
from vegas_tune.worker_arms import TUNED_INFO, use_of
from vegas_tune.workload import Workload

if TYPE_CHECKING:
    from vegas_tune.progress import SweepProgress

BOARD_FILE: Final = "board.journal"
_FACTS_WAIT_S: Final = 3600.0
_POLL_S: Final = 0.2


def run(
    request: SweepRequest, progress: SweepProgress, *, storage: str | None, num_workers: int
) -> SweepOutcome:
    """Carry out a sweep with several workers, resuming what an earlier call left.

    Args:
        request: what to tune.
        progress: told what goes on.
        storage: shared with workers that somebody starts with `vegas-tune worker`; None starts
            them here, one per GPU or group of GPUs, over a journal file in the run's folder.
        num_workers: devices that measure; each measures every point.

    Raises:
        VegasError: as the exit codes say.
        KeyboardInterrupt: interrupted; everything measured is kept.
    """
    if num_workers < 1:
        raise UsageError(f"--workers is {num_workers}; at least 1 is needed.")
    if storage is None:
        check_gpus(request.tensor_parallel_size, num_engines=num_workers)
    with progress:
        return _run(request, progress, storage, num_workers)


def _run(
    request: SweepRequest, progress: SweepProgress, storage: str | None, num_workers: int
) -> SweepOutcome:
    # The folder is named before the plan is known: the plan needs a worker's facts.
    folder = run_folder(request, identity(request, num_workers=num_workers))
    folder.mkdir(parents=True, exist_ok=True)
    url = storage or f"journal:{folder / BOARD_FILE}"
    board = Board.create(open_storage(url, num_workers=num_workers), folder.name)
    progress.note(f"run folder: {folder}; storage: {shown(url)}")
    board.set_fact("request", _request_facts(request))
    board.set_fact("is_over", False)
    board.reap()
    board.offer_places(num_workers)
    with ExitStack() as stack:
        workers, tend = _hands(stack, request, progress, board, folder, url, storage, num_workers)
        facts = _wait_for_facts(board, tend)
        plan = _plan(request, facts, num_workers)
        with RunFolder.open(folder, plan) as store:
            board.set_fact("plan", plan.to_dict())
            lab = FleetLab(plan, board, store, lambda: tend(lab.num_fresh + other.num_fresh))
            # Stock vLLM has a budget of its own: decisions rest on what the sweep itself spends.
            other = FleetLab(plan, board, store, lambda: tend(lab.num_fresh + other.num_fresh))
            stock = None
            if facts["info"]["backend"] == "vllm":
                stock = StockFigures(plan, store, lambda: nullcontext(other), progress)
            with first_interrupt_finishes(_Together(lab, other), progress):
                if stock is not None:
                    stock.measure("before")
                result = run_sweep(plan, lab, progress)
                if stock is not None:
                    stock.measure("after")
            board.set_fact("is_over", True)
            memory = _end(stack, workers)
            info = engine_info(board.fact(TUNED_INFO) or facts["info"])
            return publish_run(
                result,
                info,
                remote_blocks(facts["blocks"]),
                facts["workload"],
                store,
                f"{info.backend} on {num_workers} workers",
                progress,
                stock=stock,
                use=use_of(board, memory),
            )


class _Together:
    """Laboratories that stop together."""

    def __init__(self, *labs: FleetLab) -> None:
        self._labs = labs

    def stop_soon(self) -> None:
        """See `tune.Stoppable`."""
        for lab in self._labs:
            lab.stop_soon()


def _end(stack: ExitStack, workers: LocalWorkers | None) -> MemoryCheck:
    """Let the workers started here end, and look for what they left on their GPUs."""
    if workers is not None:
        workers.leave()
    stack.close()
    return worst(*workers.memory.values()) if workers and workers.memory else UNKNOWN


def identity(request: SweepRequest, **more: Any) -> str:
    """Hash over what is asked for, but for the time allowed and where it is kept.

    Args:
        request: what is asked for.
        **more: what else makes another run of it.
    """
    values = asdict(request) | more
    for name in ("budget_s", "run_dir", "new"):
        del values[name]
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _hands(
    stack: ExitStack,
    request: SweepRequest,
    progress: SweepProgress,
    board: Board,
    folder: Path,
    url: str,
    storage: str | None,
    num_workers: int,
) -> tuple[LocalWorkers | None, Callable[[int], None]]:
    """Start workers here, or say how to start them elsewhere; those, and what to do meanwhile."""
    if storage is None:
        workers = stack.enter_context(
            LocalWorkers(
                worker_command(url, folder.name, device=request.device),
                num_workers,
                pin=functools.partial(pin_gpus, size=request.tensor_parallel_size),
                log=folder,
                report=progress.note,
            )
        )
        return workers, workers.tend
    size = request.tensor_parallel_size
    each = "one per GPU" if size == 1 else f"each where it sees {size} GPUs that no other uses"
    progress.note(
        f"start {num_workers} workers, {each}: vegas-tune worker --storage {shown(url)} "
        f"--run {folder.name}"
    )

    def tend(num_done: int) -> None:
        missing = num_workers - board.num_taken_places()
        if missing > 0:
            progress.waiting(f"waiting for {missing} of {num_workers} workers")

    return None, tend


def _wait_for_facts(board: Board, tend: Callable[[int], None]) -> Mapping[str, Any]:
    """What the first worker tells of its engine and prompts."""
    started_s, tended_s = time.monotonic(), -math.inf
    while (facts := board.fact("facts")) is None:
        now_s = time.monotonic()
        if now_s - started_s > _FACTS_WAIT_S:
            raise BackendError(f"no worker was ready within {_FACTS_WAIT_S / 60:.0f} minutes.")
        if now_s - tended_s > 1.0:
            tended_s = now_s
            board.reap()
            tend(0)
        time.sleep(_POLL_S)
    found: Mapping[str, Any] = facts
    return found


def _plan(request: SweepRequest, facts: Mapping[str, Any], places: int) -> Plan:
    blocks = remote_blocks(facts["blocks"])
    workload = Workload(
        spec=request.spec, blocks=blocks, replays=facts["replays"], mix=facts["mix"], source={}
    )
    plan = plan_sweep(request, facts["info"]["model"], blocks, usable_ratios(request, workload))
    return Plan.from_dict({**plan.to_dict(), "places": places})


def _request_facts(request: SweepRequest) -> dict[str, Any]:
    """What a worker needs to open the engine and make the prompts."""
    spec = asdict(request.spec)
    spec["path"] = str(request.spec.path.resolve()) if request.spec.path else None
    return {
        "model": request.model,
        "backend": request.backend,
        "dtype": request.dtype,
        "max_gamma": max(request.gammas or (request.max_gamma,)),
        "gammas": list(request.gammas or gamma_ladder(request.max_gamma)),
        "ratios": list(request.ratios),
        "base": request.base.to_dict(),
        "tensor_parallel_size": request.tensor_parallel_size,
        "spec": spec,
    }
