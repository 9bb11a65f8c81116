"""A real PostgreSQL server of Debian's packages, started and restarted by a test."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

_WHY_NOT = (
    "no PostgreSQL server here: `apt-get install postgresql` (its programs are looked for in "
    "/usr/lib/postgresql/*/bin)"
)


def programs() -> Path | None:
    """Where initdb and pg_ctl are; the newest version."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


class Server:
    """One cluster in a folder of its own, on a free port of the loopback address."""

    def __init__(self) -> None:
        found = programs()
        if found is None:
            pytest.skip(_WHY_NOT)
        pytest.importorskip("psycopg", reason="the driver is the extra `postgres`")
        self._programs = found
        self._folder = tempfile.TemporaryDirectory(prefix="vegas-pg-")
        self._data = Path(self._folder.name) / "data"
        # The server refuses to run as root; Debian's package brings a user for it.
        self._user = "postgres" if os.getuid() == 0 else None
        if self._user:
            shutil.chown(self._folder.name, self._user)
        self._run("initdb", "-D", str(self._data), "-U", "tuner", "-A", "trust", "-E", "UTF8")
        self._port = _free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://tuner@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        options = (
            f"-p {self._port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' "
            "-c fsync=off"
        )
        log = str(self._data / "log")
        self._run("pg_ctl", "-D", str(self._data), "-w", "-l", log, "-o", options, "start")

    def stop(self, mode: str = "fast") -> None:
        """`fast` cuts connections; `immediate` is a crash, with recovery at the next start."""
        self._run("pg_ctl", "-D", str(self._data), "-w", "-m", mode, "stop")

    def remove(self) -> None:
        """Stop it for good."""
        self.stop("immediate")
        self._folder.cleanup()

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self._programs / program), *arguments],
            user=self._user,
            cwd="/",
            stdin=subprocess.DEVNULL,
            # A started server would inherit the pipe and keep it open.
            stdout=subprocess.DEVNULL if "start" in arguments else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{program} failed: {done.stdout}"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
