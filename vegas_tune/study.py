"""The run folder: every measurement kept, found again, never made twice.

    plan.json           what the run measures; another plan is refused
    records/<key>.z     one file per measurement, whole or absent: the truth
    study.journal       Optuna's journal, one study per step: the same, for its dashboard
    lock                held while a process uses the folder

A measurement is written to its record first and told to Optuna then. Whatever stops the process in
between, opening the folder again brings the journal in line with the records.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from vegas_runtime.errors import StorageError, UsageError
from vegas_runtime.records import read_json_lines, replace_file, write_json_lines
from vegas_tune.evidence import outcome_from_row, outcome_to_row, pack_records
from vegas_tune.outcomes import Failed, Measured, Outcome, is_final
from vegas_tune.plan import Plan, Point
from vegas_tune.trials import (
    DISTRIBUTIONS,
    METRICS,
    STUDIES,
    facts_of,
    given_up,
    params_of,
    value_of,
)

_Key = tuple[str, int]

_PLAN_FILE: Final = "plan.json"


class RunFolder:
    """A `Store` on disk. Use `open`, and close it (it is a context manager)."""

    def __init__(self, path: Path, plan: Plan, lock: int) -> None:
        self._path = path
        self._plan = plan
        self._lock: int | None = lock
        self._outcomes: dict[_Key, Outcome] = {}
        self._running: dict[_Key, int] = {}
        self._studies: dict[str, optuna.Study] = {}

    @classmethod
    def open(cls, path: Path, plan: Plan) -> Self:
        """Start a run in a folder, or resume the one in it.

        Args:
            path: the folder; made when absent.
            plan: what will be measured; only the budget may differ from the folder's.

        Raises:
            StorageError: the folder cannot be used, or another process uses it.
            UsageError: it holds a run of another plan.
        """
        try:
            (path / "records").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(path, error) from error
        folder = cls(path, plan, _acquire(path))
        try:
            check_plan(path, plan)
            keep_plan(path, plan)
            folder._load_records()
            _repair_journal(path / "study.journal")
            folder._open_studies()
            folder._reconcile()
        except BaseException:
            folder.close()
            raise
        return folder

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes use the folder. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    @property
    def num_stored(self) -> int:
        """Measurements kept so far, failed ones included."""
        return len(self._outcomes)

    @property
    def rejected(self) -> tuple[Failed, ...]:
        """Tries that were rejected and made again, by name of their point."""
        return tuple(
            outcome
            for _, outcome in sorted(self._outcomes.items())
            if isinstance(outcome, Failed) and not is_final(outcome)
        )

    # ------------------------------------------------------------------ as a store

    def find(self, point: Point, attempt: int) -> Outcome | None:
        """The stored result of a point; see `Store`."""
        found = self._outcomes.get((point.key, attempt))
        return found if found is not None and found.point == point else None

    def begin(self, point: Point, attempt: int) -> None:
        """Enqueue and claim a trial; see `Store`.

        Raises:
            StorageError: the journal cannot be written.
        """
        study = self._studies[point.step]
        with self._writing():
            study.enqueue_trial(params_of(point), user_attrs=self._attributes(point, attempt))
            trial = study.ask(fixed_distributions=DISTRIBUTIONS)
        assert trial.user_attrs["key"] == point.key, "a trial of another point was waiting"
        self._running[point.key, attempt] = trial.number

    def finish(self, outcome: Outcome) -> None:
        """Keep a result: the record first, then the trial; see `Store`.

        Raises:
            StorageError: the folder is full or cannot be written.
        """
        key = (outcome.point.key, outcome.attempt)
        write_json_lines(self._record_path(*key), [outcome_to_row(outcome)])
        self._outcomes[key] = outcome
        with self._writing():
            self._tell(outcome.point.step, self._running.pop(key), outcome)

    def abandon(self, point: Point, attempt: int, kind: str) -> None:
        """End the trial of a measurement that will have no result; see `Store`."""
        number = self._running.pop((point.key, attempt))
        with self._writing():
            self._void(point.step, number, kind)

    def pack(self, path: Path) -> str:
        """Write all records and the plan as one file, the profile's evidence.

        Returns:
            SHA-256 of the file.

        Raises:
            StorageError: it cannot be written.
        """
        return pack_records(path, self._plan, self._outcomes.values())

    # ------------------------------------------------------------------ opening

    def _load_records(self) -> None:
        for path in sorted((self._path / "records").glob("*.z")):
            try:
                rows = list(read_json_lines(path))
                outcome = outcome_from_row(rows[0] if len(rows) == 1 else {})
            except StorageError as error:
                raise StorageError(
                    f"{path} cannot be used: {error.message}",
                    hint="Delete this file to measure the point again.",
                ) from error
            self._outcomes[outcome.point.key, outcome.attempt] = outcome

    def _open_studies(self) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with self._writing():
            backend = JournalFileBackend(str(self._path / "study.journal"))
            self._storage = storage = JournalStorage(backend)
            for step in STUDIES:
                study = optuna.create_study(
                    study_name=step,
                    storage=storage,
                    direction="maximize",
                    # Never asked: every trial is enqueued with all its parameters.
                    sampler=optuna.samplers.RandomSampler(seed=0),
                    load_if_exists=True,
                )
                if not study.metric_names:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                        study.set_metric_names([METRICS.get(step, "decode_tok_s")])
                self._studies[step] = study

    def _reconcile(self) -> None:
        """Bring the journal in line with the records; end what a dead process left running."""
        with self._writing():
            for step, study in self._studies.items():
                while any(trial.state is TrialState.WAITING for trial in _trials(study)):
                    study.ask(fixed_distributions=DISTRIBUTIONS)
                trials = _trials(study)
                for trial in trials:
                    if trial.state is not TrialState.RUNNING:
                        continue
                    found = self._outcomes.get(_key_of(trial))
                    if found is not None:
                        self._tell(step, trial.number, found)
                    else:
                        self._void(step, trial.number, "killed")
                told = {_key_of(trial) for trial in trials if not _is_void(trial)}
                for key, outcome in self._outcomes.items():
                    if outcome.point.step == step and key not in told:
                        study.add_trial(self._as_trial(outcome))
        self._give_up_on_killers()

    def _give_up_on_killers(self) -> None:
        """Record a failure where measuring has ended the process again and again."""
        for study in self._studies.values():
            killed: dict[_Key, list[FrozenTrial]] = {}
            for trial in _trials(study):
                if _is_void(trial) and trial.user_attrs["failure"] == "killed":
                    killed.setdefault(_key_of(trial), []).append(trial)
            for key, trials in killed.items():
                point = Point.from_dict(trials[-1].user_attrs["point"])
                outcome = given_up(point, key[1], len(trials))
                if outcome is None or key in self._outcomes:
                    continue
                write_json_lines(self._record_path(*key), [outcome_to_row(outcome)])
                self._outcomes[key] = outcome

    # ------------------------------------------------------------------ small things

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _unusable(self._path / "study.journal", error) from error

    def _tell(self, step: str, number: int, outcome: Outcome) -> None:
        self._set_attributes(step, number, facts_of(outcome))
        if isinstance(outcome, Measured):
            self._studies[step].tell(number, value_of(outcome))
        else:
            self._studies[step].tell(number, state=TrialState.FAIL)

    def _void(self, step: str, number: int, kind: str) -> None:
        self._set_attributes(step, number, {"failure": kind, "void": True})
        self._studies[step].tell(number, state=TrialState.FAIL)

    def _set_attributes(self, step: str, number: int, attributes: dict[str, Any]) -> None:
        study_id = self._storage.get_study_id_from_name(step)
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, number)
        for name, value in attributes.items():
            self._storage.set_trial_user_attr(trial_id, name, value)

    def _record_path(self, key: str, attempt: int) -> Path:
        return self._path / "records" / f"{key}.a{attempt}.z"

    def _attributes(self, point: Point, attempt: int) -> dict[str, Any]:
        return {
            "key": point.key,
            "attempt": attempt,
            "block": point.block,
            "replicate": point.replicate,
            "point": point.to_dict(),
            "plan": self._plan.identity,
        }

    def _as_trial(self, outcome: Outcome) -> FrozenTrial:
        is_measured = isinstance(outcome, Measured)
        return create_trial(
            state=TrialState.COMPLETE if is_measured else TrialState.FAIL,
            value=value_of(outcome) if isinstance(outcome, Measured) else None,
            params=params_of(outcome.point),
            distributions=DISTRIBUTIONS,
            user_attrs=self._attributes(outcome.point, outcome.attempt) | facts_of(outcome),
        )


def check_plan(folder: Path, plan: Plan) -> None:
    """Refuse a folder that holds a run of another plan; only the budget may differ.

    Raises:
        StorageError: the folder's plan cannot be read.
        UsageError: it is another one.
    """
    path = folder / _PLAN_FILE
    try:
        before = Plan.from_dict(json.loads(path.read_bytes())) if path.exists() else None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StorageError(
            f"{path} cannot be read: {error}; it says what the records in the folder are of.",
            hint="Choose another folder, or start over with --new.",
        ) from error
    if before is not None and before.identity != plan.identity:
        name, old, new = _first_difference(before.to_dict(), plan.to_dict())
        raise UsageError(
            f"{folder} holds a run of another plan: `{name}` was {old!r}, now it is {new!r}. Its "
            "measurements answer another question.",
            hint="Give the same options to resume, choose another folder, or start over "
            "with --new.",
        )


def keep_plan(folder: Path, plan: Plan) -> None:
    """Write down what the run in a folder measures.

    Raises:
        StorageError: it cannot be written.
    """
    replace_file(folder / _PLAN_FILE, json.dumps(plan.to_dict(), indent=1).encode())


@contextlib.contextmanager
def folder_lock(path: Path) -> Iterator[None]:
    """Keep other processes out of a folder, which is made when absent.

    Raises:
        StorageError: the folder cannot be used, or another process uses it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error
    lock = _acquire(path)
    try:
        yield
    finally:
        os.close(lock)


def _acquire(path: Path) -> int:
    """Lock the folder for this process; the system frees it however the process ends."""
    try:
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(lock, 20).decode(errors="replace").strip()
        os.close(lock)
        raise StorageError(
            f"{path} is in use by another process{f' (pid {holder})' if holder else ''}; two "
            "would disturb each other's timing and records.",
            hint="Wait for it to end, or choose another folder.",
        ) from error
    with contextlib.suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _repair_journal(path: Path) -> None:
    """Keep the readable beginning of a journal that was cut off or damaged.

    Optuna appends behind a cut line and fails on it later. What is lost here comes back from the
    records. Its own lock is a link that a killed process leaves behind.
    """
    try:
        Path(f"{path}.lock").unlink(missing_ok=True)
        data = path.read_bytes() if path.exists() else b""
        good = 0
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n") or not _is_entry(line):
                break
            good += len(line)
        if good < len(data):
            replace_file(path.with_suffix(".journal.damaged"), data)
            replace_file(path, data[:good])
    except OSError as error:
        raise _unusable(path, error) from error


def _is_entry(line: bytes) -> bool:
    try:
        return "op_code" in json.loads(line)
    except (ValueError, TypeError):
        return False


def _unusable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot use {path}: {error.strerror or error}; measurements would be lost.",
        hint="Free some space or choose another folder, then run the same command again.",
    )


def _first_difference(old: dict[str, Any], new: dict[str, Any]) -> tuple[str, Any, Any]:
    name = next(key for key in new if key != "budget_s" and old.get(key) != new[key])
    return name, old.get(name), new[name]


def _trials(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False)


def _key_of(trial: FrozenTrial) -> _Key:
    return trial.user_attrs.get("key", ""), trial.user_attrs.get("attempt", 0)


def _is_void(trial: FrozenTrial) -> bool:
    """Whether a trial stands for no outcome: its process ended, or the user stopped it."""
    return bool(trial.user_attrs.get("void"))
