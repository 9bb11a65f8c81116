"""Who holds a measurement: a process, named so that a later one cannot be taken for it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """Host, boot and process, plain values."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "boot": _boot_id(),
        "pid": pid,
        "started": _start_time(pid),
    }


def is_dead(owner: Mapping[str, Any]) -> bool | None:
    """Whether a process has ended; None when it ran on another host, which only it can say."""
    if owner.get("host") != socket.gethostname():
        return None
    if owner.get("boot") != _boot_id():
        return True
    # A process number is used again; a start time with it is not.
    return _start_time(int(owner["pid"])) != owner.get("started")


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """Clock ticks from boot to the start of a process; None where it is not there, or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in brackets may hold anything, brackets too.
    rest = text.rpartition(")")[2].split()
    return None if rest[0] in "ZX" else rest[19]
