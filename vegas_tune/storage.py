"""Where several processes share one sweep: a journal file on one host, PostgreSQL between hosts.

    journal:PATH                     a file; workers on this host
    postgresql+psycopg://USER@HOST/DB    a server; workers on any host, watched by heartbeats

Optuna keeps both; `optuna-dashboard` opens both.
"""

from __future__ import annotations

import re
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

from vegas_runtime.errors import StorageError, UsageError

HEARTBEAT_S: Final = 15
# A worker this long without a heartbeat is taken for dead, and its measurement is made again.
GRACE_S: Final = 60
# How long a lost database is waited for: a restart takes seconds, a reboot minutes.
PATIENCE_S: Final = 300.0

_FIRST_WAIT_S: Final = 0.2
_LONGEST_WAIT_S: Final = 5.0
_TABLE_TRIES: Final = 20

P = ParamSpec("P")
T = TypeVar("T")


def open_storage(url: str, *, num_workers: int) -> BaseStorage:
    """Open a shared storage.

    Args:
        url: as the module says; `sqlite:///PATH` too, for a single worker.
        num_workers: processes that will take measurements from it.

    Raises:
        UsageError: an unknown kind of URL, a missing driver, or SQLite with several workers.
        StorageError: it cannot be reached.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    kind = url.partition(":")[0].partition("+")[0]
    if kind == "journal":
        return _journal(Path(url.removeprefix("journal:")))
    if kind == "sqlite" and num_workers > 1:
        raise UsageError(
            f"--storage is {shown(url)} with {num_workers} workers; two of them would now and then "
            "claim the same measurement, because SQLite cannot lock a row.",
            hint="Use journal:PATH on one host, or PostgreSQL.",
        )
    if kind not in ("postgresql", "mysql", "sqlite"):
        raise UsageError(
            f"--storage is {shown(url)!r}, which is no storage known here.",
            hint="Use journal:PATH or postgresql+psycopg://USER@HOST/DATABASE.",
        )
    return _database(url)


def _journal(path: Path) -> BaseStorage:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return JournalStorage(JournalFileBackend(str(path)))
    except OSError as error:
        raise StorageError(
            f"cannot use {path}: {error.strerror or error}.", hint="Name another file."
        ) from error


def _database(url: str) -> BaseStorage:
    def connect() -> BaseStorage:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            storage = RDBStorage(
                url,
                # A connection that a restarted server has cut is replaced, not handed out.
                engine_kwargs={"pool_pre_ping": True},
                heartbeat_interval=HEARTBEAT_S,
                grace_period=GRACE_S,
            )
        weakref.finalize(storage, storage.engine.dispose)
        # Optuna's cache over it: finished trials, records and all, are read once.
        return optuna.storages.get_storage(storage)

    try:
        return _tables_made_by_one(connect)
    except ImportError as error:
        raise UsageError(
            f"the driver of {shown(url)} is not installed: {error}.",
            hint="Install it with: pip install 'vegas-tune[postgres]'",
        ) from error
    except Exception as error:
        if not is_connection_loss(error):
            raise
        raise StorageError(
            f"cannot reach {shown(url)}: {_first_line(error)}",
            hint="Check that the server runs and that the URL names a database and a user of it.",
        ) from error


def _tables_made_by_one(connect: Callable[[], BaseStorage]) -> BaseStorage:
    """Connect; where several processes make the tables of an empty database, one of them wins."""
    from sqlalchemy.exc import IntegrityError, ProgrammingError

    for _ in range(_TABLE_TRIES):
        try:
            return connect()
        except (IntegrityError, ProgrammingError) as error:
            lost = error
            time.sleep(_FIRST_WAIT_S)
    raise lost


def patiently(call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call, and call again while the database cannot be reached.

    Args:
        call: may be carried out twice: a connection that breaks during a commit does not say
            whether the commit was made.
        *args: for the call.
        **options: for the call.

    Raises:
        StorageError: it was away for too long.
    """
    started_s, wait_s = time.monotonic(), _FIRST_WAIT_S
    while True:
        try:
            return call(*args, **options)
        except Exception as error:
            if not is_connection_loss(error):
                raise
            if time.monotonic() - started_s > PATIENCE_S:
                raise StorageError(
                    f"the database has not answered for {PATIENCE_S:.0f} s: {_first_line(error)}",
                    hint="What was measured is kept; start the server, then run the same command "
                    "again.",
                ) from error
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def is_connection_loss(error: BaseException | None) -> bool:
    """Whether an error, or what led to it, is a database that is away rather than a mistake."""
    # By name: the driver and SQLAlchemy are there only where a database is used.
    names = {"OperationalError", "InterfaceError", "DBAPIError", "AdminShutdown"}
    seen = 0
    while error is not None and seen < 5:
        if type(error).__name__ in names:
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def shown(url: str) -> str:
    """A URL without its password."""
    return re.sub(r"(://[^:/@]+):[^@]*@", r"\1:***@", url)


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return str(cause).splitlines()[0] if str(cause) else type(cause).__name__
