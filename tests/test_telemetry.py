from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic import PLATEAU, SyntheticEngine, make_blocks

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.gpu_memory import first_device
from vegas_runtime.protocol import PromptBlock
from vegas_runtime.records import Run
from vegas_tune import telemetry
from vegas_tune.evidence import outcome_from_row, outcome_to_row
from vegas_tune.outcomes import RETRIED_KINDS, Failed, Measured
from vegas_tune.performer import Performer
from vegas_tune.plan import GAMMA, Point
from vegas_tune.publish import _watched
from vegas_tune.telemetry import (
    NvmlGpu,
    Sample,
    Telemetry,
    Watch,
    own_processes,
    reason_names,
    watch_for,
)

BLOCKS = make_blocks(1)
COOL = Sample(
    sm_clock_mhz=1980.0, power_w=650.0, temperature_c=61.0, reasons=("software power cap",),
    pids=(os.getpid(),),
)  # fmt: skip


class Card:
    """Answers with the given samples, the last one for ever."""

    def __init__(self, *samples: Sample) -> None:
        self._left = list(samples)

    def sample(self) -> Sample:
        return self._left.pop(0) if len(self._left) > 1 else self._left[0]


class Slow(SyntheticEngine):
    """Takes real time, so that a watch can read."""

    def run(self, block: PromptBlock, **options: Any) -> Run:
        time.sleep(0.05)
        return super().run(block, **options)


def _perform(*samples: Sample) -> Measured | Failed:
    return _perform_on(*[Card(*samples)] if samples else [])


def _perform_on(*cards: Card) -> Measured | Failed:
    config = SpeculationConfig(num_speculative_tokens=3, sparsity_ratio=0.05)
    point = Point(step=GAMMA, config=config, block=0, replicate=0, max_tokens=400)
    watch = Watch(*cards, every_s=0.01)
    return Performer(Slow(PLATEAU), BLOCKS, watch=watch).perform(point, 0, 1e6)


# ------------------------------------------------------------------ windows


def test_a_measurement_says_what_the_gpu_did() -> None:
    warm = replace(COOL, sm_clock_mhz=1900.0, temperature_c=70.0, power_w=700.0)
    outcome = _perform(COOL, warm)
    assert isinstance(outcome, Measured)
    assert outcome.telemetry is not None
    assert outcome.telemetry["num_samples"] >= 2
    assert outcome.telemetry["sm_clock_mhz"][0] == 1900.0
    assert outcome.telemetry["temperature_c"][2] == 70.0
    assert outcome.telemetry["num_foreign"] == 0
    # A power cap is how the card runs under load.
    assert outcome.telemetry["reasons"] == ["software power cap"]


@pytest.mark.parametrize(
    "reason",
    ["hardware thermal slowdown", "software thermal slowdown", "hardware power brake"],
)
def test_a_window_with_throttling_is_rejected_and_kept_with_its_reason(reason: str) -> None:
    hot = replace(COOL, reasons=(reason,), temperature_c=93.0, sm_clock_mhz=900.0)
    outcome = _perform(COOL, hot)
    assert isinstance(outcome, Failed)
    assert outcome.kind == "thermal"
    assert outcome.kind in RETRIED_KINDS
    assert reason in outcome.reason
    assert "93 C" in outcome.reason
    assert "900 MHz" in outcome.reason
    assert outcome.telemetry is not None
    assert reason in outcome.telemetry["reasons"]


def test_a_window_is_rejected_by_any_gpu_of_a_split_model_and_names_the_slowest() -> None:
    braked = replace(COOL, reasons=("hardware power brake",), sm_clock_mhz=1200.0)
    hot = replace(
        COOL, reasons=("hardware thermal slowdown",), temperature_c=93.0, sm_clock_mhz=900.0
    )
    warm = replace(COOL, temperature_c=95.0)
    for cards, which in (((COOL, hot), 2), ((hot, braked), 1), ((warm, braked, hot), 3)):
        outcome = _perform_on(*map(Card, cards))
        assert isinstance(outcome, Failed)
        assert outcome.kind == "thermal"
        assert outcome.reason.startswith(
            f"GPU {which} of {len(cards)} was slowed down (hardware th"
        )
        assert "93 C" in outcome.reason
        assert "900 MHz" in outcome.reason
    assert isinstance(_perform_on(Card(COOL), Card(warm)), Measured)


def test_figures_are_of_all_gpus_of_a_split_model() -> None:
    other = replace(COOL, sm_clock_mhz=1500.0, power_w=300.0, temperature_c=80.0)
    seen = _perform_on(Card(COOL), Card(other)).telemetry
    assert seen is not None
    assert seen["sm_clock_mhz"] == [1500.0, 1740.0, 1980.0]
    assert seen["temperature_c"] == [61.0, 70.5, 80.0]
    assert seen["num_samples"] % 2 == 0


def test_the_evidence_holds_it_and_reads_back() -> None:
    for outcome in (_perform(COOL), _perform()):
        assert outcome_from_row(outcome_to_row(outcome)) == outcome
    assert "telemetry" not in outcome_to_row(_perform())


def test_foreign_processes_are_noticed_where_ours_are_seen() -> None:
    own = frozenset({10, 11})
    with_other = replace(COOL, pids=(10, 99))
    assert Telemetry.of([with_other], own).num_foreign == 1
    # In a container the driver's numbers are not ours: nothing can be told.
    assert Telemetry.of([replace(COOL, pids=(4711,))], own).num_foreign is None


def test_our_processes_are_this_one_its_children_and_those_above() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        own = own_processes()
    finally:
        child.communicate()
    assert {os.getpid(), os.getppid(), child.pid} <= own
    assert 1 not in own


# ------------------------------------------------------------------ NVML


class FakeNvml(SimpleNamespace):
    """The calls of `pynvml` that are made, on a card of known state."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:  # noqa: N802
        if self.broken:
            raise self.NVMLError("driver not loaded")

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlDeviceGetHandleByIndex": ("index", 0),
            "nvmlDeviceGetHandleByUUID": ("uuid", 0),
            "nvmlDeviceGetCurrentClocksEventReasons": 0x40 | 0x1,
            "nvmlDeviceGetClockInfo": 1755,
            "nvmlDeviceGetPowerUsage": 512_300,
            "nvmlDeviceGetTemperature": 83,
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7)],
        }
        return lambda *_: answers[name]


def test_a_card_is_read_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(broken=False))
    assert NvmlGpu(0).sample() == Sample(
        sm_clock_mhz=1755.0,
        power_w=512.3,
        temperature_c=83.0,
        reasons=("hardware thermal slowdown",),
        pids=(7,),
    )


def test_without_a_driver_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(broken=True))
    with pytest.raises(RuntimeError, match="driver not loaded"):
        NvmlGpu(0)
    info = SyntheticEngine(PLATEAU).info
    on_gpu = replace(info, device={"kind": "cuda"})
    for engine in (info, on_gpu, replace(on_gpu, backend="replay")):
        with watch_for(engine).window() as window:
            pass
        assert window.summary() is None


def test_an_engine_s_cards_are_watched_from_the_first_that_may_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int | str] = []

    class Named(Card):
        def __init__(self, device: int | str) -> None:
            asked.append(device)
            super().__init__(COOL)

    monkeypatch.setattr(telemetry, "NvmlGpu", Named)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5f,1")
    info = SyntheticEngine(PLATEAU).info
    for device, cards in (({"kind": "cuda"}, [3]), ({"kind": "cuda", "tp": 2}, [3, "GPU-5f"])):
        asked.clear()
        with watch_for(replace(info, device=device)).window() as window:
            pass
        assert asked == cards
        assert [len(samples) > 0 for samples in window.samples] == [True] * len(cards)


def test_the_card_is_the_first_that_may_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert first_device() == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert first_device() == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5f")
    assert first_device() == "GPU-5f"


def test_idling_is_no_slowdown() -> None:
    assert reason_names(0x1 | 0x2) == ()
    assert reason_names(0x80 | 0x4) == ("software power cap", "hardware power brake")


def test_every_name_of_nvmls_that_is_used_exists() -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is the extra `gpu`")
    text = Path(sys.modules[NvmlGpu.__module__].__file__ or "").read_text()
    names = {word for word in text.replace("(", " ").replace(".", " ").split() if "nvml" in word}
    called = {name for name in names if name.startswith("nvmlDevice") or name == "nvmlInit"}
    assert len(called) >= 7
    for name in called:
        assert hasattr(pynvml, name), name


def test_a_profile_says_what_the_gpu_did_over_the_whole_run() -> None:
    cool = _perform(COOL)
    hot = _perform(replace(COOL, reasons=("hardware thermal slowdown",), temperature_c=93.0))
    watched = _watched([cool, hot, _perform()])["gpu"]
    assert watched["temperature_c"] == [61.0, 93.0]
    assert watched["throttled_windows"] == 1
    assert watched["foreign_processes"] == 0
    assert _watched([_perform()]) == {}
