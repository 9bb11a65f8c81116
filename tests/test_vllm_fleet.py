"""`sweep --storage` on vLLM, on fake engines: every worker runs both arms on its own device."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import Clock, InlineChild
from test_request import options
from test_vllm_sweep import model

from vegas_runtime.errors import GpuMemoryError, UsageError
from vegas_runtime.gpu_memory import MemoryCheck
from vegas_runtime.profile import load_profile
from vegas_runtime.protocol import Capacity
from vegas_runtime.vllm_plugin.engine import VllmEngine
from vegas_runtime.vllm_plugin.engine_options import Checkpoint
from vegas_tune import fleet_tune, worker_arms
from vegas_tune.board import Board
from vegas_tune.evidence import unpack_records
from vegas_tune.gate import replay_decisions
from vegas_tune.outcomes import Measured
from vegas_tune.plan import GAMMA, STOCK
from vegas_tune.progress import SweepProgress
from vegas_tune.request import SweepRequest
from vegas_tune.stock import PASSES
from vegas_tune.storage import open_storage
from vegas_tune.sweep_outcome import SweepOutcome
from vegas_tune.worker import run_worker

__all__ = ["model"]

NUM_WORKERS = 2


class Cards:
    """A fake GPU for each thread that opens engines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.starts: list[tuple[str, str]] = []
        self.splits: set[int] = set()
        self._clocks: dict[str, Clock] = {}
        self._open: Counter[str] = Counter()
        self._lock = threading.Lock()
        monkeypatch.setattr(worker_arms, "open_vllm", self.open)

    def open(
        self, checkpoint: Checkpoint, capacity: Capacity, *, is_stock: bool = False, **_: Any
    ) -> VllmEngine:
        card = threading.current_thread().name
        with self._lock:
            clock = self._clocks.setdefault(card, Clock())
            self.starts.append((card, "stock" if is_stock else "plugin"))
            self.splits.add(capacity.tensor_parallel_size)
            number = len(self.starts)
        cards = self

        class Child(InlineChild):
            def ask(self, order: str, /, **arguments: Any) -> Any:
                if order == "open":
                    cards._open[card] += 1
                    assert cards._open[card] == 1, "two engines on one GPU"
                return super().ask(order, **arguments)

            def end(self, **arguments: Any) -> MemoryCheck:
                cards._open[card] -= 1
                return super().end(**arguments)

        def launch(_: bool) -> Any:
            return Child(clock, seed=number)

        return VllmEngine(checkpoint, capacity, is_stock=is_stock, launch=launch, clock=clock)


def _request(model: Path, folder: Path) -> SweepRequest:
    """For a model split over two GPUs."""
    return SweepRequest.from_options(
        options(
            model=str(model / "model"),
            backend="vllm",
            workload=str(model / "prompts.jsonl"),
            batch=4,
            waiting=2,
            blocks=2,
            max_new_tokens=64,
            min_tokens=4,
            gammas="2,4",
            ratios="0.05,0.1,0.3",
            temperature=0.6,
            budget="6000s",
            run_dir=folder / "run",
            tensor_parallel_size=2,
        )
    )


def _sweep(model: Path, folder: Path, *, num_threads: int = NUM_WORKERS) -> SweepOutcome:
    request = _request(model, folder)
    url = f"journal:{folder / 'board.journal'}"
    errors: list[BaseException] = []

    def work() -> None:
        try:
            run_worker(url, report=lambda _: None)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, name=f"card-{number}", daemon=True)
        for number in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    outcome = fleet_tune.run(request, SweepProgress("again"), storage=url, num_workers=NUM_WORKERS)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not errors, errors
    return outcome


def test_every_device_is_held_against_stock_on_itself(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = Cards(monkeypatch)
    outcome = _sweep(model, tmp_path)
    assert Counter(cards.starts) == {
        (f"card-{number}", arm): starts
        for number in range(NUM_WORKERS)
        for arm, starts in (("stock", 2), ("plugin", 1))
    }
    profile = load_profile(outcome.path)
    assert profile.backend == "vllm"
    assert profile.match.runtime.attention_path == "fused+kernel", "not stock's"
    results = profile.results
    assert results is not None
    assert results.speedup_vs_stock is not None
    # The fake's plugin costs nothing at gamma 0, so both ratios must say the same.
    assert results.speedup_vs_stock.est == pytest.approx(results.speedup_vs_gamma0.est, rel=0.04)
    facts = profile.protocol.to_facts() if profile.protocol else {}
    assert facts["places"] == NUM_WORKERS
    assert (facts["engine_starts"], facts["stock_engine_starts"]) == (2, 4)
    assert facts["gpu_minutes"] > 2 * 6 * 40 / 60, "six starts of 40 s on two GPUs each, and more"
    assert cards.splits == {2}
    assert profile.match.device.tp == 2
    assert len(facts["stock_tok_s"]) == 2 * PASSES * NUM_WORKERS
    assert "2 starts of the tuned engine, 4 of stock vLLM" in outcome.to_text()

    _, outcomes = unpack_records(outcome.path.parent / "records.npz")
    stock = [one for one in outcomes if one.point.step == STOCK]
    assert all(isinstance(one, Measured) for one in stock)
    assert Counter(one.point.place for one in stock) == dict.fromkeys(
        range(NUM_WORKERS), 2 * PASSES
    )
    # The budget holds every start, those of stock its own.
    starts = Counter((one.point.place, one.point.step == STOCK) for one in outcomes if one.load_s)
    assert starts == {
        (place, is_stock): count
        for place in range(NUM_WORKERS)
        for is_stock, count in ((True, 2), (False, 1))
    }
    # Stock is evidence; the decisions rest on the sweep's own measurements and costs.
    assert replay_decisions(profile, outcome.path.parent).status == "ok"


def test_the_same_command_again_needs_no_worker(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = Cards(monkeypatch)
    first = _sweep(model, tmp_path)
    num_starts = len(cards.starts)
    again = _sweep(model, tmp_path, num_threads=0)
    assert len(cards.starts) == num_starts
    assert again.profile.results == first.profile.results


def test_a_worker_starts_nothing_on_fewer_gpus_than_the_sweep_s_split(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = Cards(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    board = Board.create(open_storage(f"journal:{tmp_path / 'b'}", num_workers=1), "run")
    facts = fleet_tune._request_facts(_request(model, tmp_path))
    given: Mapping[str, Any] = {"model": None, "data": None, "device": "auto"}
    for changes, words in (
        ({}, "split over 2 GPUs, which takes 2, .* may use 1"),
        ({"backend": "reference"}, "size is 2, and only vLLM"),
    ):
        board.set_fact("request", facts | changes)
        with pytest.raises(UsageError, match=words):
            worker_arms.open_arms(board, **given, report=lambda _: None)
    assert cards.starts == []


def test_local_workers_share_out_the_gpus_in_groups(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Mapping[str, str]] = []

    def started(
        _: list[str], count: int, *, pin: Callable[[int], Mapping[str, str]], **__: Any
    ) -> Any:
        seen.extend(pin(number) for number in range(count))
        raise KeyboardInterrupt

    monkeypatch.setattr(fleet_tune, "LocalWorkers", started)
    request = _request(model, tmp_path)

    def sweep(num_workers: int) -> None:
        fleet_tune.run(request, SweepProgress("again"), storage=None, num_workers=num_workers)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-5f,2,0,1")
    with pytest.raises(UsageError, match="3 workers are each split over 2 GPUs, which takes 6"):
        sweep(3)
    assert not (tmp_path / "run").exists()
    with pytest.raises(KeyboardInterrupt):
        sweep(2)
    assert [one["CUDA_VISIBLE_DEVICES"] for one in seen] == ["7,GPU-5f", "2,0"]


def test_an_arm_is_not_started_on_memory_that_the_other_left(tmp_path: Path) -> None:
    clock, started = Clock(), []

    def start(is_stock: bool) -> VllmEngine:
        from fake_vllm import inline_engine

        engine, children = inline_engine(clock, is_stock=is_stock)
        children[0].memory = MemoryCheck(state="held", held_bytes=8 << 30)
        started.append(is_stock)
        return engine

    board = Board.create(open_storage(f"journal:{tmp_path / 'b'}", num_workers=1), "run")
    arms = worker_arms.VllmArms(start, (), board)
    arms.performer(STOCK)
    arms.performer(STOCK)
    assert started == [True], "one that is open is used again"
    with pytest.raises(GpuMemoryError, match=r"8\.0 GiB"):
        arms.performer(GAMMA)
    assert started == [True]
