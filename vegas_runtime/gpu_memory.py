"""Whether memory of GPUs came back after the processes that used it had ended.

The driver frees a dead process's memory late, and an engine that hangs in the driver may keep it.
The next engine must not meet it, so it is looked for: through NVML (extra `gpu`), else through
`nvidia-smi`, and where there is neither nothing is claimed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from vegas_runtime.config import visible_gpus
from vegas_runtime.errors import GpuMemoryError
from vegas_runtime.machine import nvidia_smi

# Other processes of a desktop come and go; an engine that was not freed holds gigabytes.
SLACK_BYTES: Final = 1 << 30
_POLL_S: Final = 0.25

Device = int | str


@dataclass(frozen=True, kw_only=True)
class MemoryCheck:
    """What became of a GPU's memory.

    Attributes:
        state: `free` when no more is in use than before, `held` when more is, `unknown` where the
            driver does not tell.
        held_bytes: in use beyond what was before; 0 unless held.
    """

    state: Literal["free", "held", "unknown"]
    held_bytes: int = 0

    def to_text(self, whose: str) -> str:
        """One sentence for the user.

        Args:
            whose: what used the memory before.
        """
        if self.state == "unknown":
            return f"whether the GPU memory of {whose} is free again cannot be told here."
        if self.state == "free":
            return f"the GPU memory of {whose} is free again."
        return (
            f"{self.held_bytes / 2**30:.1f} GiB of GPU memory more than before {whose} was started "
            "are in use after it ended: it was not freed, or another process took it."
        )

    def refuse_held(self, whose: str) -> None:
        """Refuse to go on where memory is held.

        Raises:
            GpuMemoryError: it is.
        """
        if self.state == "held":
            raise GpuMemoryError(
                self.to_text(whose),
                hint="nvidia-smi lists who holds it; run the same command again once it is free.",
            )


UNKNOWN: Final = MemoryCheck(state="unknown")


def worst(*checks: MemoryCheck) -> MemoryCheck:
    """The check that is most to worry about: most bytes held, then unknown, then free."""
    order = ("held", "unknown", "free")
    return min(checks, key=lambda check: (order.index(check.state), -check.held_bytes))


class MemoryGuard:
    """Notes what is in use before a process starts, and finds whether it came back.

    Args:
        devices: numbers or UUIDs; the first that this process may use by default.
        used: tells the bytes in use on a device; None where that is not known.
    """

    def __init__(
        self, *devices: Device, used: Callable[[Device], int | None] | None = None
    ) -> None:
        self._used = used or used_bytes
        self._before = {device: self._used(device) for device in devices or first_devices(1)}

    def look(self) -> MemoryCheck:
        """The memory now, of the device where it is worst."""
        return worst(*(self._look(device, before) for device, before in self._before.items()))

    def _look(self, device: Device, before: int | None) -> MemoryCheck:
        used = None if before is None else self._used(device)
        if before is None or used is None:
            return UNKNOWN
        if used <= before + SLACK_BYTES:
            return MemoryCheck(state="free")
        return MemoryCheck(state="held", held_bytes=used - before)

    def wait(self, patience_s: float) -> MemoryCheck:
        """The memory once it is free, or after that many seconds."""
        limit_s = time.monotonic() + patience_s
        while (check := self.look()).state == "held" and time.monotonic() < limit_s:
            time.sleep(_POLL_S)
        return check


def first_device() -> Device:
    """The first GPU this process may use: its number, or its UUID."""
    return first_devices(1)[0]


def first_devices(count: int) -> tuple[Device, ...]:
    """The first GPUs this process may use, fewer where it may not use as many."""
    names = visible_gpus()
    return tuple(map(as_device, names[:count])) if names else tuple(range(count))


def as_device(name: str) -> Device:
    """A device as `CUDA_VISIBLE_DEVICES` names it."""
    return int(name) if name.isdigit() else name


def used_bytes(device: Device) -> int | None:
    """GPU memory in use by whatever process; None where nothing tells."""
    try:
        return _nvml_used_bytes(device)
    except (ImportError, RuntimeError):
        used = nvidia_smi("memory.used", device=str(device))
        return int(used) << 20 if used and used.isdecimal() else None


def _nvml_used_bytes(device: Device) -> int:
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            handle: Any = (
                pynvml.nvmlDeviceGetHandleByIndex(device)
                if isinstance(device, int)
                else pynvml.nvmlDeviceGetHandleByUUID(device)
            )
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise RuntimeError(f"NVML does not answer: {error}") from error
