"""A process group that runs vLLM, its pipe, its log, and its end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Final

from vegas_runtime.config import child_environment
from vegas_runtime.errors import BackendError, ConfigError
from vegas_runtime.gpu_memory import UNKNOWN, MemoryCheck, MemoryGuard, first_devices

Launch = Callable[[bool], "Child"]
Report = Callable[[str], None]

PLUGIN_GROUP: Final = "vllm.general_plugins"
PLUGIN_NAME: Final = "vegas"

_POLL_S: Final = 0.2
_CLOSE_TIMEOUT_S: Final = 30.0
_TERMINATE_S: Final = 10.0
_FREE_TIMEOUT_S: Final = 20.0
_LOG_TAIL_BYTES: Final = 200_000

# "... torch.OutOfMemoryError: CUDA out of memory. Tried ..." in one of vLLM's many prefixes.
_ERROR_LINE: Final = re.compile(r"\b((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): .+)")
# What vLLM says everywhere once the cause was said somewhere.
_CONSEQUENCES: Final = (
    "EngineDeadError", "Engine core initialization failed", "EngineGenerateError",
    "engine core encountered", "Engine process failed",
)  # fmt: skip


class Child:
    """One process group with an engine in it.

    Args:
        process: its leader, started in a session of its own.
        pipe: to the leader.
        log: where everything it prints goes; removed after a clean end.
        guard: knows the GPU memory that was in use before it started; None when not known.

    Attributes:
        guard: the same.
        is_healthy: whether it answers; an order that it could not carry out does not change that.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        pipe: Connection,
        log: Path,
        *,
        guard: MemoryGuard | None = None,
    ) -> None:
        self._process = process
        self._pipe = pipe
        self._log = log
        self.guard = guard
        self._memory = UNKNOWN
        self._started_s = time.monotonic()
        self._ended_s: float | None = None
        self.is_healthy = True

    @property
    def age_s(self) -> float:
        """How long it has lived, or had when it ended, seconds."""
        return (self._ended_s or time.monotonic()) - self._started_s

    @property
    def pid(self) -> int:
        """The leader's process id, which is the group's."""
        return self._process.pid

    def ask(
        self, order: str, /, *, timeout_s: float, quiet_s: float | None = None, **arguments: Any
    ) -> Any:
        """Give an order and wait for its reply.

        Args:
            order: its name.
            timeout_s: after this the process counts as hung.
            quiet_s: so it does after printing nothing for this long; None for orders that say
                nothing while they are carried out.
            arguments: the order's.

        Raises:
            ConfigError: the order cannot be carried out; the engine is as it was.
            BackendError: it failed, the process died, or no reply came in time.
        """
        try:
            self._pipe.send((order, arguments))
            self._await(order, timeout_s, quiet_s)
            kind, *rest = self._pipe.recv()
        except (EOFError, OSError) as error:
            self.is_healthy = False
            raise BackendError(self._death(order), hint=self._log_hint()) from error
        if kind == "done":
            return rest[0]
        failure, message, hint = rest
        if failure == "config":
            raise ConfigError(message, hint=hint)
        if failure == "backend":
            raise BackendError(message, hint=hint)
        self.is_healthy = False
        raise BackendError(
            f"vLLM failed at `{order}`: {self._cause() or message}", hint=self._log_hint()
        )

    def end(self, *, report: Report) -> MemoryCheck:
        """End the whole group and see that its GPU memory is free. Idempotent.

        Args:
            report: told when memory stays in use.

        Returns:
            What became of the memory; it is waited for a while.

        Raises:
            BackendError: processes of the group survive even SIGKILL.
        """
        if self._ended_s is not None:
            return self._memory
        if self.is_healthy:
            # What is asked politely releases shared memory and sockets as well.
            with contextlib.suppress(BackendError, ConfigError):
                self.ask("close", timeout_s=_CLOSE_TIMEOUT_S)
        self._pipe.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._is_gone(_TERMINATE_S if number == signal.SIGKILL else 0.5):
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
        if not self._is_gone(_TERMINATE_S):
            raise BackendError(
                f"processes of group {self.pid} do not end; they hold the GPU.",
                hint=f"End them by hand: kill -9 -- -{self.pid}",
            )
        if self.guard is not None:
            self._memory = self.guard.wait(_FREE_TIMEOUT_S)
        if self._memory.state == "held":
            report(f"WARNING: {self._memory.to_text('vLLM')}")
        self._ended_s = time.monotonic()
        if self.is_healthy:
            self._log.unlink(missing_ok=True)
        return self._memory

    def _await(self, order: str, timeout_s: float, quiet_s: float | None) -> None:
        started_s = spoken_s = time.monotonic()
        size = self._log_size()
        while not self._pipe.poll(_POLL_S):
            if self._process.poll() is not None:
                raise EOFError
            now_s, before = time.monotonic(), size
            size = self._log_size()
            if size != before:
                spoken_s = now_s
            is_quiet = quiet_s is not None and now_s - spoken_s > quiet_s
            if is_quiet or now_s - started_s > timeout_s:
                self.is_healthy = False
                how = (
                    f"has printed nothing for {quiet_s:.0f} s of" if is_quiet else "did not answer"
                )
                age_s = now_s - started_s
                raise BackendError(
                    f"vLLM {how} `{order}`, {age_s:.0f} s after it was asked; it hangs, and is "
                    f"ended. The last it said: {self._last_line()!r}.",
                    hint=self._log_hint(),
                )

    def _log_size(self) -> int:
        return self._log.stat().st_size if self._log.exists() else 0

    def _last_line(self) -> str:
        try:
            data = self._log.read_bytes()[-_LOG_TAIL_BYTES:]
        except OSError:
            return ""
        # A progress bar is one line of many carriage returns.
        lines = data.decode(errors="replace").replace("\r", "\n").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _is_gone(self, patience_s: float) -> bool:
        """Whether no process of the group is left, waiting a while for it."""
        limit_s = time.monotonic() + patience_s
        while True:
            self._process.poll()  # a dead leader counts until it is waited for
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                return True
            if time.monotonic() > limit_s:
                return False
            time.sleep(0.05)

    def _death(self, order: str) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        code = self._process.returncode
        how = "ended" if code is None else f"ended with code {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        cause = self._cause()
        return f"vLLM {how} during `{order}`" + (f": {cause}" if cause else ".")

    def _cause(self) -> str:
        """The error that began it, from the log."""
        try:
            data = self._log.read_bytes()[-_LOG_TAIL_BYTES:]
        except OSError:
            return ""
        return root_cause(data.decode(errors="replace"))

    def _log_hint(self) -> str:
        return f"Its log: {self._log}"


def root_cause(log: str) -> str:
    """The last error a log names that is not a mere consequence of another; empty without any."""
    found = ""
    for line in log.splitlines():
        match = _ERROR_LINE.search(line)
        if match is not None and not any(word in line for word in _CONSEQUENCES):
            found = match[1].strip()
    return found


def launch_host(
    is_stock: bool,
    *,
    num_gpus: int = 1,
    is_alone: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Child:
    """Start the process of `host` in a session of its own; it opens an engine when told to.

    Args:
        is_stock: keep this project's plugin from being loaded.
        num_gpus: see `launch`.
        is_alone: see `launch`.
        environment: see `launch`.
    """
    command = [sys.executable, "-m", "vegas_runtime.vllm_plugin.host"]
    return launch(
        command, is_stock=is_stock, num_gpus=num_gpus, is_alone=is_alone, environment=environment
    )


def launch(
    command: list[str],
    *,
    is_stock: bool,
    num_gpus: int = 1,
    is_alone: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Child:
    """Start a command that serves a pipe, as `host` does.

    Args:
        command: the pipe's file descriptor is appended to it.
        is_stock: keep this project's plugin from being loaded.
        num_gpus: how many it uses, the first that this process may use.
        is_alone: no other engine starts or ends meanwhile, so that what is in use afterwards tells
            whether the memory came back.
        environment: variables that differ from this process's.
    """
    changes = dict(environment or {})
    if is_stock:
        changes["VLLM_PLUGINS"] = other_plugins()
    handle, name = tempfile.mkstemp(prefix="vegas-vllm-", suffix=".log")
    guard = MemoryGuard(*first_devices(num_gpus)) if is_alone else None
    ours, theirs = Pipe()
    with os.fdopen(handle, "wb") as log, theirs:
        process = subprocess.Popen(
            [*command, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env=child_environment(changes),
        )
    return Child(process, ours, Path(name), guard=guard)


def other_plugins() -> str:
    """The value of `VLLM_PLUGINS` that loads every installed plugin but this project's."""
    names = {entry.name for entry in metadata.entry_points(group=PLUGIN_GROUP)}
    return ",".join(sorted(names - {PLUGIN_NAME}))
