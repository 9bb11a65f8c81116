"""What is here: the machine, torch, the cache folder. Looks, and judges nothing.

torch is asked in a process of its own: a broken build may end the process that imports it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from vegas_runtime.config import cache_dir
from vegas_runtime.engine.packaged import SMOLLM2, packaged_state
from vegas_runtime.machine import cpu_name, has_nvidia_driver, memory_bytes
from vegas_tune.wording import line

_MEMINFO: Final = Path("/proc/meminfo")
_PROBE_TIMEOUT_S: Final = 180
_PROBE: Final = (
    "import sys; sys.path[:] = sys.argv[1:]; from vegas_tune.surroundings import print_probe; "
    "print_probe()"
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine without torch.

    Attributes:
        python: version and path-free name of the interpreter.
        platform: operating system.
        cpu: market name.
        num_cores: cores this process may use.
        memory_bytes: usable memory; None when not known.
        available_bytes: of it, what is free now.
        has_nvidia_driver: whether there is an NVIDIA driver.
    """

    python: str
    platform: str
    cpu: str
    num_cores: int
    memory_bytes: int | None
    available_bytes: int | None
    has_nvidia_driver: bool


@dataclass(frozen=True, kw_only=True)
class Torch:
    """What torch says, asked in a process of its own.

    Attributes:
        version: None when it could not be imported.
        build: `CPU`, or `CUDA 13.0`.
        threads: threads it computes with.
        device: the device a model would run on, as `machine.device_facts` describes it.
        driver: NVIDIA driver; None without one.
        has_native_bfloat16: whether the CPU multiplies bfloat16 itself; None when not known.
        kernels: which implementation of the attention operations would run, as
            `kernels.build.Kernels`: path, reason, fix.
        error: why it could not be asked; empty when it could.
    """

    version: str | None = None
    build: str = ""
    threads: int | None = None
    device: dict[str, Any] | None = None
    driver: str | None = None
    has_native_bfloat16: bool | None = None
    kernels: dict[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def has_cuda(self) -> bool:
        """Whether torch sees a CUDA device."""
        return self.device is not None and self.device.get("kind") == "cuda"


@dataclass(frozen=True, kw_only=True)
class Cache:
    """The folder for fetched and converted models.

    Attributes:
        path: where it is, `~` for the home folder.
        size_bytes: what is in it.
        free_bytes: what its disk has left.
        is_writable: whether something can be put there.
        packaged_model: `ready` to load, `fetched` but not converted yet, or `absent`.
    """

    path: str
    size_bytes: int
    free_bytes: int
    is_writable: bool
    packaged_model: Literal["ready", "fetched", "absent"]


def look_at_machine() -> Machine:
    """Processor, memory and system, without torch."""
    return Machine(
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        platform=f"{platform.system()} {platform.machine()}",
        cpu=cpu_name(),
        num_cores=_num_cores(),
        memory_bytes=memory_bytes(),
        available_bytes=_available_bytes(),
        has_nvidia_driver=has_nvidia_driver(),
    )


def _num_cores() -> int:
    """Cores this process may use; all of them where the system has no such limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _available_bytes() -> int | None:
    """Memory free for a new process; None where the system does not tell."""
    try:
        fields = dict(row.split(":", 1) for row in _MEMINFO.read_text().splitlines() if ":" in row)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return None
    total = memory_bytes()
    return available if total is None else min(available, total)


def probe_torch() -> Torch:
    """Ask torch in a process of its own."""
    if importlib.util.find_spec("torch") is None:
        return Torch(error="not installed")
    command = [sys.executable, "-c", _PROBE, *sys.path]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Torch(error=f"importing it took more than {_PROBE_TIMEOUT_S} s")
    except OSError as error:
        return Torch(error=f"a second Python process could not be started: {error}")
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
        return Torch(error=line(last[0]))
    return Torch(**json.loads(done.stdout.splitlines()[-1]))


def print_probe() -> None:
    """What `probe_torch` runs in its process: print `Torch`'s fields as one line of JSON."""
    import torch

    from vegas_runtime.engine.loading import cpu_has_bfloat16
    from vegas_runtime.kernels import build
    from vegas_runtime.machine import device_facts, runtime_facts

    device = device_facts()
    cuda = torch.version.cuda
    values = {
        "version": torch.__version__,
        "build": f"CUDA {cuda}" if cuda else "CPU",
        "threads": torch.get_num_threads(),
        "device": device,
        "driver": runtime_facts(device["kind"]).get("driver"),
        "has_native_bfloat16": cpu_has_bfloat16(),
        "kernels": asdict(build.load(may_compile=False)),
    }
    sys.stdout.write(json.dumps(values) + "\n")


def look_at_cache() -> Cache:
    """The cache folder as it is; it is not made."""
    folder = cache_dir()
    nearest = _nearest(folder)
    return Cache(
        path=_at_home(folder),
        size_bytes=_size_bytes(folder),
        free_bytes=shutil.disk_usage(nearest).free,
        is_writable=_is_writable(nearest),
        packaged_model=packaged_state(SMOLLM2),
    )


def _nearest(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    # Unlike Path.exists, os.path.exists says no where it may not look.
    return next(each for each in (folder, *folder.absolute().parents) if os.path.exists(each))


def _is_writable(folder: Path) -> bool:
    """Whether a file can be made there: permission bits say nothing of a read-only disk."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _size_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(root) / name).lstat().st_size
            except OSError:
                # Another process cleaned up behind itself, or it is not ours to see.
                continue
    return total


def _at_home(folder: Path) -> str:
    """A path with `~` for the home folder, so that it can be shown to others."""
    try:
        return f"~/{folder.absolute().relative_to(Path.home())}"
    except ValueError:
        return str(folder)
