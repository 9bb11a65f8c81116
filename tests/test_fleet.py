from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from board_points import measured, point
from fleet_sweep import grid_plan
from postgres import Server

from benchmarks.grid import GRID_FILE
from vegas_runtime.errors import BackendError, GpuMemoryError
from vegas_runtime.gpu_memory import MemoryCheck, MemoryGuard
from vegas_runtime.replay import ReplayEngine
from vegas_tune import fleet
from vegas_tune.bench import Bench, Silent
from vegas_tune.board import Board
from vegas_tune.fleet import FleetLab, LocalWorkers, pin_gpus, remote_blocks, worker_command
from vegas_tune.laboratory import Laboratory, MemoryStore
from vegas_tune.outcomes import Failed, Measured, Outcome
from vegas_tune.plan import GAMMA, VALIDATE, Plan, Point
from vegas_tune.storage import open_storage
from vegas_tune.study import RunFolder
from vegas_tune.sweep import run_sweep
from vegas_tune.worker import Pulse, run_worker

PLACES = 2


# ------------------------------------------------------------------ places, without processes


class Places:
    """Several recorded engines side by side; the second one is slower by a constant."""

    def __init__(self, plan: Plan, pace: tuple[float, ...] = (1.0, 1.25)) -> None:
        self.spent_s = 0.0
        self._labs = []
        for _ in pace:
            engine = ReplayEngine.open(GRID_FILE)
            self._labs.append(Laboratory(plan, engine, engine.blocks, store=MemoryStore()))
        self._pace = pace

    def measure(self, which: Point) -> Outcome:
        return self.measure_places([which])[0]

    def measure_places(self, points: Any) -> tuple[Outcome, ...]:
        return tuple(self._slowed(which, which.place) for which in points)

    def _slowed(self, which: Point, place: int) -> Outcome:
        outcome = self._labs[place].measure(which)
        assert isinstance(outcome, Measured)
        pace = self._pace[place]
        steps = tuple(
            replace(
                step, draft_s=step.draft_s * pace, verify_s=step.verify_s * pace,
                select_s=step.select_s * pace, other_s=step.other_s * pace,
            )
            for step in outcome.run.steps
        )  # fmt: skip
        return replace(outcome, run=replace(outcome.run, steps=steps), where=f"card {place}")


def test_every_device_measures_every_contrast() -> None:
    plan = grid_plan(PLACES)
    result = run_sweep(plan, Places(plan))
    asked = Counter(
        (one.point.step, one.point.config, one.point.replicate) for one in result.measured()
    )
    assert set(asked.values()) == {PLACES}
    assert result.num_rounds >= plan.looks[0]
    assert result.num_rounds % PLACES == 0


def test_a_slower_card_does_not_decide() -> None:
    # 25 % between cards, none of it in the ratios: within cards, all comparisons are the same.
    plan = grid_plan(PLACES)
    even, uneven = (run_sweep(plan, Places(plan, pace)) for pace in ((1.0, 1.0), (1.0, 1.25)))
    assert uneven.selected == even.selected
    assert uneven.noise_floor_cv == pytest.approx(even.noise_floor_cv, rel=1e-3)


def test_settings_measured_on_two_cards_are_not_one_comparison() -> None:
    plan = grid_plan(1)
    settings = [plan.config(3, 0.07), plan.plain]
    cards = iter(["one", "another"])

    class Moved(Places):
        def measure_places(self, points: Any) -> tuple[Outcome, ...]:
            (outcome,) = super().measure_places(points)
            return (replace(outcome, where=next(cards)),)

    bench = Bench(plan, Moved(plan, (1.0,)), Silent())
    bench.open_round(plan.search_blocks)
    # The worker was replaced half-way through the round, by one on another card.
    assert bench.compare(VALIDATE, settings, is_backwards=False) == []


# ------------------------------------------------------------------ processes


@pytest.fixture(scope="module")
def reference() -> str:
    plan = grid_plan(PLACES)
    result = run_sweep(plan, Places(plan, (1.0, 1.0)))
    return json.dumps([decision.to_dict() for decision in result.decisions])


def _sweep(url: str, folder: Path) -> subprocess.Popen[str]:
    script = str(Path(__file__).with_name("fleet_sweep.py"))
    return subprocess.Popen(
        [sys.executable, script, url, str(folder), str(PLACES)], stdout=subprocess.PIPE, text=True
    )


def _worker(url: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        worker_command(url, folder.name, device="cpu"), stderr=subprocess.PIPE, text=True
    )


@contextmanager
def _workers(url: str, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    processes = [_worker(url, folder) for _ in range(PLACES)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            _bury(process)


def _bury(process: subprocess.Popen[str]) -> None:
    """Wait for a dead process and close its pipes, once."""
    if not all(pipe is None or pipe.closed for pipe in (process.stdout, process.stderr)):
        process.communicate()


def _wait(sweep: subprocess.Popen[str]) -> str:
    out, _ = sweep.communicate(timeout=300)
    assert sweep.returncode == 0
    return out


def _is_once(url: str, folder: Path) -> bool:
    """Whether every measurement was handed back once."""
    board = Board.create(open_storage(url, num_workers=1), folder.name)
    records = list((folder / "records").glob("*.z"))
    return board.num_finished() == len(records) > 0


def test_two_workers_over_a_journal_decide_like_one_process(tmp_path: Path, reference: str) -> None:
    folder, url = tmp_path / "run", f"journal:{tmp_path / 'board.journal'}"
    sweep = _sweep(url, folder)
    with _workers(url, folder) as workers:
        assert _wait(sweep) == reference
        for worker in workers:
            _, told = worker.communicate(timeout=60)
            assert worker.returncode == 0
            assert "measuring 4-validate" in told
    assert _is_once(url, folder)
    assert _sweep_again(url, folder) == reference


def _sweep_again(url: str, folder: Path) -> str:
    """A finished run answers from its folder; no worker is there any more."""
    return _wait(_sweep(url, folder))


def test_a_restarted_database_changes_nothing(tmp_path: Path, reference: str) -> None:
    server = Server()
    try:
        folder = tmp_path / "run"
        sweep = _sweep(server.url, folder)
        with _workers(server.url, folder):
            for mode in ("immediate", "fast"):
                _wait_for_records(folder, sweep, more=4)
                server.stop(mode)
                time.sleep(1.0)
                server.start()
            assert _wait(sweep) == reference
        assert _is_once(server.url, folder)
    finally:
        server.remove()


def _wait_for_records(folder: Path, sweep: subprocess.Popen[str], *, more: int) -> None:
    before = len(list((folder / "records").glob("*.z")))
    deadline_s = time.monotonic() + 240
    while len(list((folder / "records").glob("*.z"))) < before + more:
        assert sweep.poll() is None, "the sweep ended before the server was restarted"
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def _killed_now_and_then(url: str, folder: Path, num_kills: int, seed: int) -> tuple[str, int]:
    """A sweep whose processes are killed at random moments; what it decides, and how many were."""
    chance = random.Random(seed)
    killed = 0
    sweep = _sweep(url, folder)
    with _workers(url, folder) as workers:
        for _ in range(num_kills):
            time.sleep(chance.uniform(0.3, 2.5))
            victim = chance.choice([sweep, *workers])
            if victim.poll() is None:
                victim.send_signal(signal.SIGKILL)
                _bury(victim)
                killed += 1
            if sweep.poll() not in (None, 0):
                _bury(sweep)
                sweep = _sweep(url, folder)
            for number, worker in enumerate(workers):
                if worker.poll() is not None:
                    _bury(worker)
                    workers[number] = _worker(url, folder)
            if sweep.poll() == 0:
                break
        return _wait(sweep), killed


def test_kill_9_at_random_moments_changes_nothing(tmp_path: Path, reference: str) -> None:
    folder, url = tmp_path / "run", f"journal:{tmp_path / 'board.journal'}"
    decided, killed = _killed_now_and_then(url, folder, num_kills=5, seed=1)
    assert decided == reference
    assert killed > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kill_9_at_50_random_moments_changes_nothing(tmp_path: Path, reference: str) -> None:
    killed = 0
    for number in itertools.count():
        if killed >= 50:
            break
        folder = tmp_path / f"run{number}"
        url = f"journal:{tmp_path / f'board{number}.journal'}"
        decided, more = _killed_now_and_then(url, folder, num_kills=5, seed=number)
        assert decided == reference
        killed += more


# ------------------------------------------------------------------ the parts


def test_stopping_soon_asks_for_nothing_more(tmp_path: Path) -> None:
    plan = grid_plan(1)
    board = Board.create(open_storage(f"journal:{tmp_path / 'b'}", num_workers=1), "stop")
    with RunFolder.open(tmp_path / "run", plan) as store:
        lab = FleetLab(plan, board, store)
        lab.stop_soon()
        with pytest.raises(KeyboardInterrupt):
            lab.measure(point(1))
    assert board.claim() is None


def test_a_worker_that_ends_again_and_again_is_an_error_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no GPU'); raise SystemExit(3)"]
    with (
        LocalWorkers(command, 1, pin=pin_gpus, log=tmp_path) as workers,
        pytest.raises(BackendError, match="ended 4 times") as caught,
    ):
        _tend_for(workers, seconds=60)
    assert "worker-0.log" in caught.value.hint
    assert (tmp_path / "worker-0.log").read_text().count("no GPU") == 4


def _tend_for(workers: LocalWorkers, seconds: float) -> None:
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        workers.tend()
        time.sleep(0.05)


def test_workers_are_ended_with_what_they_started(tmp_path: Path) -> None:
    script = "import subprocess, time; p = subprocess.Popen(['sleep', '600']); "
    script += "print(p.pid, flush=True); time.sleep(600)"
    with LocalWorkers([sys.executable, "-c", script], 1, pin=pin_gpus, log=tmp_path) as workers:
        workers.tend()
        log = tmp_path / "worker-0.log"
        deadline_s = time.monotonic() + 60
        while not log.read_text().strip():
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        child = int(log.read_text())
        os.kill(child, 0)
    assert _has_ended(child)


def _has_ended(pid: int) -> bool:
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.05)
    return False


class _Card:
    """A GPU whose memory in use is set by the test."""

    def __init__(self) -> None:
        self.used = 1 << 30

    def guard(self, _: Mapping[str, str]) -> MemoryGuard:
        return MemoryGuard(0, used=lambda _: self.used)


def test_a_worker_is_not_started_again_before_its_gpu_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "FREE_S", 0.5)
    card = _Card()
    command = [sys.executable, "-c", "print('began', flush=True); import time; time.sleep(600)"]
    with LocalWorkers(command, 1, pin=pin_gpus, log=tmp_path, guard=card.guard) as workers:
        workers.tend()
        (first,) = workers.pids
        card.used = 9 << 30
        os.kill(first, signal.SIGKILL)
        while workers.pids:
            time.sleep(0.02)
        workers.tend()
        assert workers.pids == [], "it would find too little memory"
        card.used = 1 << 30
        workers.tend()
        (second,) = workers.pids
        assert second != first
        card.used = 9 << 30
        os.kill(second, signal.SIGKILL)
        with pytest.raises(GpuMemoryError, match=r"8\.0 GiB .*worker 0 was started"):
            _tend_for(workers, seconds=20)
        card.used = 1 << 30
    assert workers.memory == {0: MemoryCheck(state="free")}


def test_memory_that_workers_leave_behind_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "FREE_S", 0.3)
    card, told = _Card(), []
    with LocalWorkers(
        ["sleep", "600"], 2, pin=pin_gpus, log=tmp_path, guard=card.guard, report=told.append
    ) as workers:
        workers.tend()
        card.used = 5 << 30
    held = MemoryCheck(state="held", held_bytes=4 << 30)
    assert workers.memory == {0: held, 1: held}
    assert [line.split(":")[0] for line in told] == ["WARNING", "WARNING"]
    assert "before worker 1 was started" in told[1]


def test_a_worker_ends_with_the_sweep_that_started_it(tmp_path: Path) -> None:
    url = f"journal:{tmp_path / 'b'}"
    board = Board.create(open_storage(url, num_workers=1), "orphan")
    board.set_fact(
        "request",
        {
            "backend": "replay", "model": str(GRID_FILE), "dtype": "auto", "max_gamma": 4,
            "tensor_parallel_size": 1,
        },
    )  # fmt: skip
    board.offer_places(1)
    script = (
        "import subprocess; from vegas_tune.fleet import worker_command; "
        f"p = subprocess.Popen(worker_command({url!r}, 'orphan', device='cpu')); "
        "print(p.pid, flush=True); p.wait()"
    )
    sweep = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert sweep.stdout is not None
    worker = int(sweep.stdout.readline())
    deadline_s = time.monotonic() + 60
    while board.fact("facts") is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    sweep.kill()
    sweep.communicate()
    assert _has_ended(worker)
    assert board.reap() == 1


def test_a_worker_of_a_sweep_that_is_over_does_not_wait_for_another(tmp_path: Path) -> None:
    url = f"journal:{tmp_path / 'b'}"
    Board.create(open_storage(url, num_workers=1), "over").set_fact("is_over", True)
    told: list[str] = []
    assert run_worker(url, run="over", follow=os.getpid(), report=told.append) == 0
    # One that somebody starts before the sweep waits a minute for it, and then fails.
    assert told == ["worker: the run is over"]


def test_a_worker_sees_one_of_the_gpus_that_may_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-77")
    assert pin_gpus(1) == {"CUDA_VISIBLE_DEVICES": "GPU-77"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert pin_gpus(1) == {"CUDA_VISIBLE_DEVICES": "1"}


def test_a_worker_of_a_split_model_sees_and_guards_its_own_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-77,0,2")
    assert pin_gpus(0, size=2) == {"CUDA_VISIBLE_DEVICES": "4,GPU-77"}
    assert pin_gpus(1, size=2) == {"CUDA_VISIBLE_DEVICES": "0,2"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert pin_gpus(1, size=3) == {"CUDA_VISIBLE_DEVICES": "3,4,5"}

    used: dict[int | str, int] = {4: 1 << 30, "GPU-77": 1 << 30}
    monkeypatch.setattr("vegas_runtime.gpu_memory.used_bytes", lambda device: used[device])
    guard = fleet.guard_of({"CUDA_VISIBLE_DEVICES": "4,GPU-77"})
    used["GPU-77"] = 5 << 30
    assert guard.look() == MemoryCheck(state="held", held_bytes=4 << 30)


def test_blocks_known_by_hash_make_the_same_plan() -> None:
    engine = ReplayEngine.open(GRID_FILE)
    from vegas_tune.worker_arms import _block_facts

    blocks = remote_blocks(_block_facts(engine.blocks))
    assert [block.sha256 for block in blocks] == [block.sha256 for block in engine.blocks]
    assert [len(p) for p in blocks[0].prompts] == [len(p) for p in engine.blocks[0].prompts]


def test_a_hang_is_handed_back_as_one_and_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board.create(open_storage(f"journal:{tmp_path / 'b'}", num_workers=1), "hang")
    board.offer_places(1)
    taken = board.take_place()
    assert taken is not None
    board.post(point(1), 0, 0.0)
    task = board.claim()
    assert task is not None
    ended: list[int] = []
    monkeypatch.setattr("vegas_tune.worker.HANG_GRACE_S", 0.1)
    monkeypatch.setattr("vegas_tune.worker.os._exit", ended.append)
    with Pulse(board, taken[1]) as pulse, pulse.measuring(task):
        deadline_s = time.monotonic() + 30
        while not ended:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    found = board.find(point(1), 0)
    assert isinstance(found, Failed)
    assert (found.kind, found.point) == ("hang", point(1))
    assert not board.finish(task, measured(point(1))) or board.find(point(1), 0) == found


def test_points_of_one_place_keep_their_names() -> None:
    assert point(1).key == f"{GAMMA}.g3.s0.05.b0.r1"
    assert point(1, place=2).key == f"{GAMMA}.g3.s0.05.b0.r1.p2"
