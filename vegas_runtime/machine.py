"""What this machine is, in the words of a profile's `match` section, without loading a model.

What cannot be found out is left out: a missing fact is "not compared", a guess would be a mismatch.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from vegas_runtime import __version__
from vegas_runtime.config import visible_gpus

_PACKAGES: Final = ("torch", "transformers", "vllm")
_CPUINFO: Final = Path("/proc/cpuinfo")
_DRIVER: Final = Path("/proc/driver/nvidia/version")
_MEMORY_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_NVIDIA_SMI_TIMEOUT_S: Final = 10


def device_facts(kind: str | None = None) -> dict[str, Any]:
    """The device a model would run on.

    Args:
        kind: `cpu` describes the CPU even where there is a GPU; otherwise the first visible CUDA
            device is described, and the CPU where there is none.

    Returns:
        kind, class and count; memory_gib (usable, so a container's limit counts); for CUDA also
        sm, and power_limit_w where the driver tells.
    """
    if kind != "cpu" and has_nvidia_driver():
        facts = _cuda_facts()
        if facts:
            return facts
    facts = {"kind": "cpu", "class": cpu_name(), "count": 1}
    memory = memory_bytes()
    return facts | ({"memory_gib": round(memory / 2**30, 1)} if memory else {})


def runtime_facts(kind: str | None = None) -> dict[str, Any]:
    """Versions of what would run, and torch's threads where torch is loaded already.

    Args:
        kind: the kind of device that is meant, as `device_facts` found it. For `cuda` torch is
            imported, to ask for its CUDA version; for `cpu` CUDA and driver are left out.
    """
    facts: dict[str, Any] = {"vegas_runtime": __version__}
    for package in _PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if kind == "cuda":
        import torch  # noqa: F401 - asked below
    loaded = sys.modules.get("torch")
    if loaded is not None:
        facts["threads"] = loaded.get_num_threads()
        if kind != "cpu" and loaded.version.cuda:
            driver = driver_version()
            facts |= {"cuda": loaded.version.cuda} | ({"driver": driver} if driver else {})
    return facts


def has_nvidia_driver() -> bool:
    """Whether asking torch for CUDA devices can be worth its import time."""
    return _DRIVER.exists() or shutil.which("nvidia-smi") is not None


def num_gpus() -> int | None:
    """GPUs this process may use, found without loading CUDA; None where nothing tells."""
    names = visible_gpus()
    if names is not None:
        return len(names)
    listed = nvidia_smi("index")
    return len(listed.splitlines()) if listed else None


def driver_version() -> str | None:
    """Version of the NVIDIA driver, e.g. `595.91`; None when it is not known."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", _DRIVER.read_text())
    except OSError:
        found = None
    return found[1] if found else nvidia_smi("driver_version", device="0")


def cpu_name() -> str:
    """The CPU's market name, or the nearest to one that the system knows."""
    fields: dict[str, str] = {}
    try:
        text = _CPUINFO.read_text(errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        key, separator, value = line.partition(":")
        if separator:
            fields.setdefault(key.strip(), " ".join(value.split()))
    if fields.get("model name"):
        return fields["model name"]
    # Arm kernels give codes instead of a name; they still tell one design from another.
    if "CPU implementer" in fields and "CPU part" in fields:
        return f"{platform.machine()} {fields['CPU implementer']} {fields['CPU part']}"
    return platform.processor() or platform.machine() or "unknown"


def memory_bytes() -> int | None:
    """Memory that processes here can use: the machine's, or the container's limit if lower."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    for path in _MEMORY_LIMITS:
        try:
            total = min(total, int(path.read_text()))
        except (OSError, ValueError):
            # No such cgroup version, or the word "max".
            continue
    return total


def _cuda_facts() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    facts: dict[str, Any] = {
        "kind": "cuda",
        "class": properties.name,
        "sm": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "count": torch.cuda.device_count(),
    }
    limit = nvidia_smi("power.limit", device=f"GPU-{properties.uuid}")
    if limit and re.fullmatch(r"\d+(\.\d+)?", limit):
        facts["power_limit_w"] = float(limit)
    return facts


def nvidia_smi(query: str, *, device: str | None = None) -> str | None:
    """A value that only the driver's own tool tells; None where it does not.

    Args:
        query: a field of `--query-gpu`.
        device: number or UUID; by default all of the machine's, one a line.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    if device is not None:
        command += ["-i", device]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
