"""What GPUs did during a measurement: clocks, power, temperature, and why they were slowed down.

Read through NVML (package `nvidia-ml-py`, extra `gpu`) twice a second. A window in which the card
was slowed down by heat or by its power brake is no measurement of a setting. A power cap in
software is: it is how the card runs under load, for every setting alike.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, Self

from vegas_runtime.gpu_memory import first_devices
from vegas_runtime.protocol import EngineInfo

SAMPLE_EVERY_S: Final = 0.5

# NVML's clock event reasons (nvml.h), by bit.
_REASONS: Final[Mapping[int, str]] = {
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
}
REJECTED: Final = frozenset(
    {
        "hardware slowdown",
        "software thermal slowdown",
        "hardware thermal slowdown",
        "hardware power brake",
    }
)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The card at one moment.

    Attributes:
        sm_clock_mhz: clock of its multiprocessors.
        power_w: power drawn.
        temperature_c: of the chip.
        reasons: why its clock is not higher, by name.
        pids: processes that compute on it, as the driver numbers them.
    """

    sm_clock_mhz: float
    power_w: float
    temperature_c: float
    reasons: tuple[str, ...]
    pids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """The cards over one window: smallest, mean and largest of each figure of a card.

    Attributes:
        num_samples: readings taken.
        sm_clock_mhz: clock of its multiprocessors.
        power_w: power drawn.
        temperature_c: of the chip.
        reasons: every reason met for a lower clock.
        num_foreign: processes of others met on the cards; None where it cannot be told, as in a
            container, whose process numbers are not the driver's.
    """

    num_samples: int
    sm_clock_mhz: tuple[float, float, float]
    power_w: tuple[float, float, float]
    temperature_c: tuple[float, float, float]
    reasons: tuple[str, ...]
    num_foreign: int | None

    @classmethod
    def of(cls, samples: Sequence[Sample], own_pids: frozenset[int]) -> Self:
        """Summary of at least one sample.

        Args:
            samples: in order of time.
            own_pids: processes that belong to the measurement.
        """
        met = {pid for sample in samples for pid in sample.pids}
        return cls(
            num_samples=len(samples),
            sm_clock_mhz=_spread([sample.sm_clock_mhz for sample in samples]),
            power_w=_spread([sample.power_w for sample in samples]),
            temperature_c=_spread([sample.temperature_c for sample in samples]),
            reasons=tuple(sorted({name for sample in samples for name in sample.reasons})),
            num_foreign=len(met - own_pids) if met & own_pids else None,
        )

    def objection(self, whose: str = "the GPU") -> str | None:
        """Why this window does not count; None when it does.

        Args:
            whose: what to call the card.
        """
        bad = sorted(REJECTED.intersection(self.reasons))
        if not bad:
            return None
        return (
            f"{whose} was slowed down ({', '.join(bad)}; up to {self.temperature_c[2]:.0f} C, "
            f"clock down to {self.sm_clock_mhz[0]:.0f} MHz): let it cool, or improve its cooling."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON reads them back."""
        return {
            "num_samples": self.num_samples,
            "sm_clock_mhz": list(self.sm_clock_mhz),
            "power_w": list(self.power_w),
            "temperature_c": list(self.temperature_c),
            "reasons": list(self.reasons),
            "num_foreign": self.num_foreign,
        }


class Gpu(Protocol):
    """A card that can be read."""

    def sample(self) -> Sample:
        """The card now."""


class Watch:
    """Reads cards in the background while a measurement runs.

    Args:
        gpus: the cards; without any, nothing is watched.
        every_s: time between readings.
    """

    def __init__(self, *gpus: Gpu, every_s: float = SAMPLE_EVERY_S) -> None:
        self._gpus = gpus
        self._every_s = every_s

    @contextmanager
    def window(self) -> Iterator[Window]:
        """Watch for as long as the context lasts."""
        window = Window(len(self._gpus))
        if not self._gpus:
            yield window
            return
        stop = threading.Event()
        thread = threading.Thread(
            target=self._read, args=(window, stop), name="gpu-watch", daemon=True
        )
        thread.start()
        try:
            yield window
        finally:
            stop.set()
            thread.join()

    def _read(self, window: Window, stop: threading.Event) -> None:
        is_last = False
        while True:
            for gpu, samples in zip(self._gpus, window.samples, strict=True):
                samples.append(gpu.sample())
            if is_last:
                return
            # The cards at the end belong to the window as well.
            is_last = stop.wait(self._every_s)


class Window:
    """What was read so far.

    Args:
        num_gpus: how many cards are watched.

    Attributes:
        samples: of each card, in order of time.
    """

    def __init__(self, num_gpus: int) -> None:
        self.samples: list[list[Sample]] = [[] for _ in range(num_gpus)]

    def summary(self) -> Telemetry | None:
        """Summary of all cards' samples; None without any."""
        every = [sample for samples in self.samples for sample in samples]
        return Telemetry.of(every, own_processes()) if every else None

    @property
    def objection(self) -> str | None:
        """Why the window does not count, by the slowest of the cards that were slowed down."""
        count = len(self.samples)
        found: list[tuple[float, str]] = []
        for number, samples in enumerate(self.samples, start=1):
            if not samples:
                # Reading this card failed.
                continue
            card = Telemetry.of(samples, frozenset())
            why = card.objection("the GPU" if count == 1 else f"GPU {number} of {count}")
            if why is not None:
                found.append((card.sm_clock_mhz[0], why))
        return min(found)[1] if found else None


# --------------------------------------------------------------------------- NVML


def watch_for(info: EngineInfo) -> Watch:
    """A watch of the cards that an engine runs on; of nothing on a CPU or without NVML.

    `vegas-tune doctor` says whether NVML is there; a record without telemetry was not watched.
    """
    if info.backend == "replay" or info.device.get("kind") != "cuda":
        return Watch()
    try:
        return Watch(*map(NvmlGpu, first_devices(info.device.get("tp", 1))))
    except (ImportError, OSError, RuntimeError):
        return Watch()


class NvmlGpu:
    """A card read through NVML.

    Args:
        device: number or UUID.

    Raises:
        ImportError: `nvidia-ml-py` is not installed.
        RuntimeError: there is no driver, or no such card.
    """

    def __init__(self, device: int | str) -> None:
        import pynvml

        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = (
                pynvml.nvmlDeviceGetHandleByIndex(device)
                if isinstance(device, int)
                else pynvml.nvmlDeviceGetHandleByUUID(device)
            )
        except pynvml.NVMLError as error:
            raise RuntimeError(f"NVML does not answer: {error}") from error

    def sample(self) -> Sample:
        """See `Gpu`."""
        nvml, handle = self._nvml, self._handle
        bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        return Sample(
            sm_clock_mhz=float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            power_w=nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            temperature_c=float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            reasons=reason_names(bits),
            pids=tuple(
                process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            ),
        )


def reason_names(bits: int) -> tuple[str, ...]:
    """NVML's clock event reasons by name; idling and set clocks are no slowdown."""
    return tuple(name for bit, name in _REASONS.items() if bits & bit)


def own_processes() -> frozenset[int]:
    """This process, those it descends from, and those that descend from it."""
    parents = _parents()
    own = {os.getpid()}
    while True:
        children = {pid for pid, parent in parents.items() if parent in own} - own
        if not children:
            break
        own |= children
    # A worker's engine may be the parent of the process that measures.
    above = parents.get(os.getpid(), 0)
    while above > 1:
        own.add(above)
        above = parents.get(above, 0)
    return frozenset(own)


def _parents() -> dict[int, int]:
    """Parent of each process of this host."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(text.rpartition(")")[2].split()[1])
    return parents


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    mean = sum(values) / len(values)
    return round(min(values), 3), round(mean, 3), round(max(values), 3)
