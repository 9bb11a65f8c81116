from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from board_points import measured, point
from postgres import Server

from vegas_runtime.errors import StorageError, UsageError
from vegas_tune import owner, storage
from vegas_tune.board import Board
from vegas_tune.outcomes import Failed, Measured
from vegas_tune.plan import STEPS
from vegas_tune.storage import open_storage, patiently, shown
from vegas_tune.trials import given_up


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.remove()


@pytest.fixture(params=["journal", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "journal":
        return f"journal:{tmp_path / 'board.journal'}"
    return str(request.getfixturevalue("server").url)


def _board(url: str, run: str) -> Board:
    return Board.create(open_storage(url, num_workers=2), run)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return request.node.name


# ------------------------------------------------------------------ hand out, hand back


def test_a_measurement_goes_out_once_and_its_record_comes_back(url: str, run: str) -> None:
    asking, working = _board(url, run), _board(url, run)
    asking.post(point(1), 0, 60.0)
    asking.post(point(1), 0, 60.0)
    task = working.claim(place=0)
    assert task is not None
    assert (task.point, task.attempt, task.limit_s) == (point(1), 0, 60.0)
    assert working.claim() is None
    assert asking.find(point(1), 0) is None
    assert working.finish(task, measured(point(1)))
    assert asking.find(point(1), 0) == measured(point(1))
    assert asking.find(point(1), 1) is None


def test_what_is_done_is_not_asked_for_again(url: str, run: str) -> None:
    board = _board(url, run)
    for _ in range(2):
        board.post(point(1), 0, 60.0)
        task = board.claim()
        if task is not None:
            board.finish(task, measured(point(1)))
    assert board.num_finished() == 1
    assert board.claim() is None


def test_a_place_measures_what_it_is_asked(url: str, run: str) -> None:
    board = _board(url, run)
    board.post(point(1, place=1), 0, 60.0)
    assert board.claim(place=0) is None
    task = board.claim(place=1)
    assert task is not None
    assert task.point.place == 1


def test_a_failure_comes_back_as_one(url: str, run: str) -> None:
    board = _board(url, run)
    board.post(point(1), 0, 60.0)
    task = board.claim()
    assert task is not None
    failed = Failed(point=point(1), attempt=0, cost_s=2.0, kind="oom", reason="too big")
    assert board.finish(task, failed)
    assert board.find(point(1), 0) == failed
    assert board.num_lost(point(1), 0) == 0


def test_places_are_taken_once_and_offered_again(url: str, run: str) -> None:
    board = _board(url, run)
    board.offer_places(2)
    first, second = board.take_place(), board.take_place()
    assert first is not None
    assert second is not None
    assert {first[0], second[0]} == {0, 1}
    assert board.take_place() is None
    assert board.num_taken_places() == 2
    board.release(first[1])
    board.reap()
    again = board.take_place()
    assert again is not None
    assert again[0] == first[0]


def test_a_run_is_found_when_there_is_one(url: str, run: str) -> None:
    board = _board(url, run)
    shared = open_storage(url, num_workers=2)
    assert Board.find_run(shared, run).fact("request") is None
    board.set_fact("is_over", True)
    with pytest.raises(StorageError, match="no run named"):
        Board.find_run(shared, run)


# ------------------------------------------------------------------ the dead


def _dead_owner() -> dict[str, Any]:
    """A process of this host that has ended."""
    script = (
        "import json, sys; from vegas_tune.owner import this_process; "
        "json.dump(this_process(), sys.stdout)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def test_the_dead_are_told_from_the_living_and_from_strangers() -> None:
    assert owner.is_dead(owner.this_process()) is False
    assert owner.is_dead(_dead_owner()) is True
    assert owner.is_dead({**owner.this_process(), "boot": "before"}) is True
    # The number is in use again, by a process that started later.
    assert owner.is_dead({**owner.this_process(), "started": "1"}) is True
    assert owner.is_dead({**owner.this_process(), "host": "elsewhere"}) is None


def test_what_a_dead_worker_held_is_measured_again(
    url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = _board(url, run)
    dead = _dead_owner()
    for lost in (1, 2, 3):
        board.post(point(1), 0, 60.0)
        with monkeypatch.context() as patch:
            patch.setattr("vegas_tune.board.this_process", lambda: dead)
            task = board.claim()
        assert task is not None
        assert board.reap() == 1
        assert board.num_lost(point(1), 0) == lost
        # Whoever comes back from the dead finds its place taken.
        assert not board.finish(task, measured(point(1)))
        assert board.find(point(1), 0) is None
    assert given_up(point(1), 0, 2) is None
    failure = given_up(point(1), 0, 3)
    assert failure is not None
    assert (failure.kind, "3 times" in failure.reason) == ("killed", True)


def test_the_living_keep_what_they_hold(url: str, run: str) -> None:
    board = _board(url, run)
    board.post(point(1), 0, 60.0)
    task = board.claim()
    assert task is not None
    assert board.reap() == 0
    assert board.finish(task, measured(point(1)))


def test_a_heart_that_stopped_elsewhere_is_noticed(
    server: Server, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "HEARTBEAT_S", 1)
    monkeypatch.setattr(storage, "GRACE_S", 2)
    board = _board(server.url, run)
    board.post(point(1), 0, 60.0)
    far = {**owner.this_process(), "host": "elsewhere"}
    monkeypatch.setattr("vegas_tune.board.this_process", lambda: far)
    task = board.claim()
    assert task is not None
    assert board.reap() == 0
    deadline_s = time.monotonic() + 30
    while not board.reap():
        assert time.monotonic() < deadline_s
        time.sleep(0.3)
    assert board.num_lost(point(1), 0) == 1


# ------------------------------------------------------------------ two at once


def _compete(url: str, repeats: int, num_points: int = 6) -> None:
    """Two processes empty one board after the other; nothing is measured twice, nothing is left."""
    script = str(Path(__file__).with_name("claiming_worker.py"))
    prefix = f"compete-{os.getpid()}-"
    workers = [
        subprocess.Popen(
            [sys.executable, script, url, prefix, str(repeats), str(num_points)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    expected = Counter(point(number).key for number in range(num_points))
    shares = []
    for repeat in range(repeats):
        board = _board(url, f"{prefix}{repeat}")
        for number in range(num_points):
            board.post(point(number), 0, 60.0)
        board.set_fact("go", True)
        claimed: Counter[str] = Counter()
        for worker in workers:
            assert worker.stdout is not None
            mine = json.loads(worker.stdout.readline())
            claimed.update(mine)
            shares.append(len(mine))
        assert claimed == expected
    for worker in workers:
        worker.communicate(timeout=60)
        assert worker.returncode == 0
    # They did compete: neither of them emptied every board alone.
    assert min(sum(shares[0::2]), sum(shares[1::2])) > 0


def test_two_workers_never_measure_the_same_block_twice(url: str) -> None:
    _compete(url, repeats=20)


@pytest.mark.slow
def test_two_workers_never_measure_the_same_block_twice_in_200_repeats(server: Server) -> None:
    _compete(server.url, repeats=200)


# ------------------------------------------------------------------ the storage


def test_sqlite_is_for_one_worker(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'x.db'}"
    with pytest.raises(UsageError, match="cannot lock a row") as caught:
        open_storage(url, num_workers=2)
    assert "PostgreSQL" in caught.value.hint
    board = Board.create(open_storage(url, num_workers=1), "one")
    board.post(point(1), 0, 60.0)
    assert board.claim() is not None


def test_a_storage_of_another_kind_is_named() -> None:
    with pytest.raises(UsageError, match="no storage known here"):
        open_storage("redis://127.0.0.1", num_workers=1)


def test_a_server_that_is_not_there_is_named_without_its_password() -> None:
    pytest.importorskip("psycopg", reason="the driver is the extra `postgres`")
    with pytest.raises(StorageError, match="cannot reach") as caught:
        open_storage("postgresql+psycopg://me:secret@127.0.0.1:1/x", num_workers=2)
    assert "secret" not in f"{caught.value.message}{caught.value.hint}"
    assert shown("postgresql://me:secret@host/x") == "postgresql://me:***@host/x"


def test_a_lost_database_is_waited_for_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    class OperationalError(Exception):
        pass

    calls = []

    def flaky() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise RuntimeError("internal") from OperationalError("server closed the connection")
        return "done"

    monkeypatch.setattr(storage, "_FIRST_WAIT_S", 0.0)
    assert patiently(flaky) == "done"
    calls.clear()
    monkeypatch.setattr(storage, "PATIENCE_S", 0.0)
    with pytest.raises(StorageError, match="has not answered"):
        patiently(flaky)
    with pytest.raises(KeyError):
        patiently(lambda: {}["typo"])


def test_a_restarted_server_costs_nothing() -> None:
    own = Server()
    board = _board(own.url, "restart")
    board.post(point(1), 0, 60.0)
    own.stop("immediate")
    later = threading.Timer(1.0, own.start)
    later.start()
    try:
        task = None
        deadline_s = time.monotonic() + 30
        while task is None and time.monotonic() < deadline_s:
            task = board.claim()
        assert task is not None
        own.stop("immediate")
        later = threading.Timer(1.0, own.start)
        later.start()
        assert board.finish(task, measured(task.point))
        assert isinstance(board.find(point(1), 0), Measured)
    finally:
        later.join()
        own.remove()


def test_the_dashboard_opens_the_studies(url: str, run: str) -> None:
    dashboard = pytest.importorskip(
        "optuna_dashboard", reason="optuna-dashboard is not installed (extra `dev`)"
    )
    board = _board(url, run)
    board.post(point(1), 0, 60.0)
    task = board.claim()
    assert task is not None
    board.finish(task, measured(point(1)))
    app = dashboard.wsgi(open_storage(url, num_workers=1))
    answer: list[str] = []
    environ = {
        "REQUEST_METHOD": "GET", "PATH_INFO": "/api/studies", "SERVER_NAME": "x",
        "SERVER_PORT": "80", "wsgi.url_scheme": "http", "wsgi.input": None,
        "wsgi.errors": sys.stderr,
    }  # fmt: skip
    body = b"".join(app(environ, lambda status, headers, *_: answer.append(status)))
    assert answer == ["200 OK"]
    names = {study["study_name"] for study in json.loads(body)["study_summaries"]}
    assert {f"{run}/{step}" for step in STEPS} <= names
