"""Whether memory came back: NVML first, the driver's tool without it, and never a guess."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vegas_runtime import gpu_memory
from vegas_runtime.errors import BackendError, GpuMemoryError
from vegas_runtime.gpu_memory import (
    UNKNOWN,
    MemoryCheck,
    MemoryGuard,
    first_device,
    first_devices,
    used_bytes,
    worst,
)

GIB = 1 << 30
FREE = MemoryCheck(state="free")
HELD = MemoryCheck(state="held", held_bytes=3 * GIB)


def _guard(*used: int | None) -> MemoryGuard:
    """A guard that finds these amounts in turn, the last of them for ever."""
    found: Iterator[int | None] = itertools.chain(used, itertools.repeat(used[-1]))
    return MemoryGuard(0, used=lambda _: next(found))


@pytest.mark.parametrize(
    ("used", "check"),
    [
        pytest.param((2 * GIB, 2 * GIB), FREE, id="as-before"),
        pytest.param((2 * GIB, GIB), FREE, id="less-than-before"),
        pytest.param((2 * GIB, 2 * GIB + gpu_memory.SLACK_BYTES), FREE, id="within-the-slack"),
        pytest.param((2 * GIB, 5 * GIB), HELD, id="held"),
        pytest.param((None, 5 * GIB), UNKNOWN, id="not-known-before"),
        pytest.param((2 * GIB, None), UNKNOWN, id="not-known-now"),
    ],
)
def test_memory_is_free_held_or_unknown(used: tuple[int | None, ...], check: MemoryCheck) -> None:
    assert _guard(*used).look() == check


def test_memory_that_comes_back_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "_POLL_S", 0.0)
    assert _guard(GIB, 9 * GIB, 9 * GIB, GIB).wait(30) == FREE
    assert _guard(GIB, 4 * GIB).wait(0.01) == HELD


def test_held_memory_is_a_typed_refusal_and_the_rest_is_none() -> None:
    with pytest.raises(GpuMemoryError, match=r"3\.0 GiB of GPU memory more than before vLLM"):
        HELD.refuse_held("vLLM")
    FREE.refuse_held("vLLM")
    UNKNOWN.refuse_held("vLLM")
    assert issubclass(GpuMemoryError, BackendError)
    assert "cannot be told" in UNKNOWN.to_text("vLLM")
    assert "free again" in FREE.to_text("vLLM")


def test_the_worst_check_speaks_for_all() -> None:
    assert worst(FREE, UNKNOWN, HELD) == HELD
    assert worst(FREE, UNKNOWN) == UNKNOWN
    assert worst(FREE) == FREE
    assert worst(MemoryCheck(state="held", held_bytes=2 * GIB), HELD) == HELD


@pytest.mark.parametrize(
    ("now", "check"),
    [
        pytest.param({0: GIB, "GPU-5f": 2 * GIB}, FREE, id="all-free"),
        pytest.param({0: GIB, "GPU-5f": 5 * GIB}, HELD, id="second-held"),
        pytest.param({0: 3 * GIB, "GPU-5f": 5 * GIB}, HELD, id="most-held"),
        pytest.param({0: None, "GPU-5f": 5 * GIB}, HELD, id="held-beside-unknown"),
        pytest.param({0: GIB, "GPU-5f": None}, UNKNOWN, id="second-unknown"),
    ],
)
def test_every_device_of_a_guard_is_looked_at(now: dict[Any, int | None], check: Any) -> None:
    used: dict[Any, int | None] = {0: GIB, "GPU-5f": 2 * GIB}
    guard = MemoryGuard(0, "GPU-5f", used=lambda device: used[device])
    used.update(now)
    assert guard.look() == check


# ------------------------------------------------------------------ who tells


class FakeNvml:
    """The calls of `pynvml` that are made, on two cards."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken
        self.num_open = 0

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetHandleByUUID": lambda name: {"GPU-5f": 1}[name],
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=(handle + 1) * GIB),
            "nvmlInit": self._init,
            "nvmlShutdown": self._shutdown,
        }
        return answers[name]

    def _init(self) -> None:
        if self.broken:
            raise self.NVMLError("driver not loaded")
        self.num_open += 1

    def _shutdown(self) -> None:
        self.num_open -= 1


def test_nvml_tells_by_number_and_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert used_bytes(0) == GIB
    assert used_bytes("GPU-5f") == 2 * GIB
    assert nvml.num_open == 0, "nothing is left open"


@pytest.mark.parametrize("module", [None, FakeNvml(broken=True)], ids=["missing", "no-driver"])
def test_without_nvml_the_drivers_tool_tells(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    asked: list[tuple[str, str]] = []

    def tool(query: str, *, device: str) -> str:
        asked.append((query, device))
        return "1024"

    monkeypatch.setattr(gpu_memory, "nvidia_smi", tool)
    assert used_bytes("GPU-5f") == GIB
    assert asked == [("memory.used", "GPU-5f")]
    monkeypatch.setattr(gpu_memory, "nvidia_smi", lambda *_, **__: None)
    assert used_bytes(0) is None
    monkeypatch.setattr(gpu_memory, "nvidia_smi", lambda *_, **__: "[N/A]")
    assert used_bytes(0) is None


def test_names_of_nvml_exist() -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is the extra `gpu`")
    for name in ("nvmlDeviceGetMemoryInfo", "nvmlShutdown", "nvmlInit", "NVMLError"):
        assert hasattr(pynvml, name), name


def test_the_first_device_is_the_first_that_may_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", " 2, GPU-5f")
    assert first_device() == 2
    assert first_devices(2) == (2, "GPU-5f")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert first_devices(3) == (0, 1, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5f")
    assert first_devices(2) == ("GPU-5f",), "no more than may be seen"
    assert MemoryGuard(used=lambda device: 1 if device == "GPU-5f" else None).look() == FREE
