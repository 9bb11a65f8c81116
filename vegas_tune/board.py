"""Measurements to be made, handed to workers and handed back, as Optuna trials.

One study per step, as in a run folder, named `RUN/STEP`. A measurement that is asked for is a
waiting trial; a worker claims it by setting it running, which a storage grants exactly once. The
record travels in the trial. Who works where is a trial as well: `RUN/places` has one per device.

One process posts and reaps (the sweep), any number claim and finish (the workers).
"""

from __future__ import annotations

import base64
import json
import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import optuna
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.trial import FrozenTrial, TrialState, create_trial

from vegas_runtime.errors import StorageError
from vegas_tune.evidence import outcome_from_row, outcome_to_row
from vegas_tune.outcomes import Measured, Outcome
from vegas_tune.owner import is_dead, this_process
from vegas_tune.plan import Point
from vegas_tune.storage import is_connection_loss, patiently
from vegas_tune.trials import DISTRIBUTIONS, METRICS, STUDIES, facts_of, params_of, value_of

_RECORD: Final = "vegas:record"
# A claim is signed within moments, or within the longest pause of `patiently` after an outage.
_UNOWNED_S: Final = 20.0
_FINISHED: Final = (TrialState.COMPLETE, TrialState.FAIL)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A claimed measurement.

    Attributes:
        trial_id: the storage's number of its trial.
        point: what to measure.
        attempt: how often it was tried before.
        limit_s: time it may take.
    """

    trial_id: int
    point: Point
    attempt: int
    limit_s: float


class Board:
    """One run's measurements in a shared storage. Every call waits for a lost database.

    Args:
        storage: see `storage.open_storage`.
        run: name of the run; several may share a storage.
    """

    def __init__(self, storage: BaseStorage, run: str) -> None:
        self._storage = storage
        self._run = run
        self._study_ids: dict[str, int] = {}
        self._unowned_since: dict[str, float] = {}

    @classmethod
    def create(cls, storage: BaseStorage, run: str) -> Self:
        """Make the run's studies, or find them."""
        board = cls(storage, run)
        for name in (*STUDIES, "places"):
            board._study_ids[name] = patiently(board._make_study, name)
        return board

    @classmethod
    def find_run(cls, storage: BaseStorage, run: str | None, *, wait_s: float = 0.0) -> Self:
        """The board of a run that somebody else created.

        Args:
            storage: where.
            run: its name; None when there is one that is not over.
            wait_s: how long to wait for it.

        Raises:
            StorageError: there is none, or several without a name given.
        """
        deadline_s = time.monotonic() + wait_s
        while True:
            open_runs = patiently(_open_runs, storage)
            found = [name for name in open_runs if run in (None, name)]
            if len(found) == 1:
                return cls.create(storage, found[0])
            if len(found) > 1:
                raise StorageError(
                    f"{len(found)} runs are open in this storage: {', '.join(found)}.",
                    hint="Say which one with --run.",
                )
            if time.monotonic() > deadline_s:
                raise StorageError(
                    f"no run {f'named {run!r} ' if run else ''}is open in this storage.",
                    hint="Start `vegas-tune sweep --storage ...` first.",
                )
            time.sleep(0.5)

    @staticmethod
    def is_over(storage: BaseStorage, run: str) -> bool:
        """Whether a run of this name has ended, and nobody goes on with it."""
        return any(
            study.study_name == f"{run}/places" and bool(study.user_attrs.get("is_over"))
            for study in patiently(storage.get_all_studies)
        )

    # ------------------------------------------------------------------ facts of the run

    def set_fact(self, name: str, value: Any) -> None:
        """Keep a plain value with the run."""
        patiently(lambda: self._storage.set_study_user_attr(self._study_ids["places"], name, value))

    def fact(self, name: str) -> Any:
        """A value kept with `set_fact`, else None."""
        attrs = patiently(self._storage.get_study_user_attrs, self._study_ids["places"])
        return attrs.get(name)

    def facts(self, prefix: str) -> list[Any]:
        """Every value kept under a name that begins so."""
        attrs = patiently(self._storage.get_study_user_attrs, self._study_ids["places"])
        return [value for name, value in sorted(attrs.items()) if name.startswith(prefix)]

    # ------------------------------------------------------------------ the sweep's side

    def post(self, point: Point, attempt: int, limit_s: float) -> None:
        """Ask for a measurement, unless it is waiting, running or done already."""

        def post_once() -> None:
            # One look at all of them: between two, a running one could end and be asked for again.
            if not any(
                _is_of(trial, point, attempt)
                and (not trial.state.is_finished() or _RECORD in trial.system_attrs)
                for trial in self._trials(point.step)
            ):
                attrs = {
                    "key": point.key, "attempt": attempt, "block": point.block,
                    "replicate": point.replicate, "place": point.place,
                    "point": point.to_dict(), "limit_s": limit_s,
                }  # fmt: skip
                self._study(point.step).enqueue_trial(params_of(point), user_attrs=attrs)

        patiently(post_once)

    def find(self, point: Point, attempt: int) -> Outcome | None:
        """The result of a measurement, once a worker has handed it back."""
        for trial in reversed(patiently(self._trials, point.step, *_FINISHED)):
            if _is_of(trial, point, attempt) and _RECORD in trial.system_attrs:
                outcome = outcome_from_row(_unpacked(trial.system_attrs[_RECORD]))
                return outcome if outcome.point == point else None
        return None

    def num_lost(self, point: Point, attempt: int) -> int:
        """How often a worker ended while it made this measurement."""
        return sum(
            trial.state is TrialState.FAIL and _RECORD not in trial.system_attrs
            for trial in patiently(self._trials, point.step)
            if _is_of(trial, point, attempt)
        )

    def num_finished(self) -> int:
        """Measurements handed back."""
        return sum(
            _RECORD in trial.system_attrs
            for step in STUDIES
            for trial in patiently(self._trials, step, *_FINISHED)
        )

    def reap(self) -> int:
        """Fail what dead workers hold, so that it can be posted again; how many that were.

        A worker on this host is dead when its process is; one elsewhere when its heartbeat stops.
        """
        lost = 0
        for name in (*STUDIES, "places"):
            for trial in patiently(self._trials, name, TrialState.RUNNING):
                if self._has_lost_its_owner(trial) and self._fail(trial):
                    lost += 1
            lost += patiently(self._fail_stale, name)
        self._offer_free_places()
        return lost

    def offer_places(self, count: int) -> None:
        """Let workers take places 0 to `count` - 1."""
        self.set_fact("num_places", count)
        self._offer_free_places()

    def num_taken_places(self) -> int:
        """Places with a living worker, as far as is known."""
        return len(patiently(self._trials, "places", TrialState.RUNNING))

    # ------------------------------------------------------------------ the worker's side

    def take_place(self) -> tuple[int, int] | None:
        """A free place and the trial that holds it; None when all are taken."""
        task = self._claim("places", lambda trial: True)
        return None if task is None else (task.user_attrs["place"], task.trial_id)

    def holds(self, trial_id: int) -> bool:
        """Whether a claimed trial is still ours: nobody took us for dead."""
        trial = patiently(self._storage.get_trial, trial_id)
        return trial.state is TrialState.RUNNING

    def claim(self, place: int | None = None) -> Task | None:
        """Take a waiting measurement; None when there is none.

        Args:
            place: only those of this place; None takes any.
        """
        for step in STUDIES:
            claimed = self._claim(
                step, lambda trial: place is None or trial.user_attrs["place"] == place
            )
            if claimed is not None:
                attrs = claimed.user_attrs
                self._show_params(step, claimed.trial_id)
                return Task(
                    trial_id=claimed.trial_id,
                    point=Point.from_dict(attrs["point"]),
                    attempt=attrs["attempt"],
                    limit_s=attrs["limit_s"],
                )
        return None

    def beat(self, *trial_ids: int) -> None:
        """Say that the holder of these trials lives; nothing to do where no heartbeat is kept."""
        if isinstance(self._storage, BaseHeartbeat):
            for trial_id in trial_ids:
                self._storage.record_heartbeat(trial_id)

    def finish(self, task: Task, outcome: Outcome) -> bool:
        """Hand back a result.

        Returns:
            False when we had been taken for dead, so that it is measured anew: it is not kept.
        """

        def hand_back() -> bool:
            trial = self._storage.get_trial(task.trial_id)
            if trial.state.is_finished():
                # Ours, when the connection broke between the commit and its confirmation.
                return _RECORD in trial.system_attrs
            for name, value in facts_of(outcome).items():
                self._storage.set_trial_user_attr(task.trial_id, name, value)
            self._storage.set_trial_system_attr(task.trial_id, _RECORD, _packed(outcome))
            if isinstance(outcome, Measured):
                self._storage.set_trial_state_values(
                    task.trial_id, TrialState.COMPLETE, [value_of(outcome)]
                )
            else:
                self._storage.set_trial_state_values(task.trial_id, TrialState.FAIL)
            return True

        try:
            return patiently(hand_back)
        except UpdateFinishedTrialError:
            return False

    def release(self, trial_id: int) -> None:
        """Give back a place."""
        self._fail_id(trial_id)

    # ------------------------------------------------------------------ trials

    def _make_study(self, name: str) -> int:
        study = optuna.create_study(
            study_name=f"{self._run}/{name}",
            storage=self._storage,
            direction="maximize",
            # Never asked: every trial is enqueued with all its parameters.
            sampler=optuna.samplers.RandomSampler(seed=0),
            load_if_exists=True,
        )
        if name in STUDIES and not study.metric_names:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                study.set_metric_names([METRICS.get(name, "decode_tok_s")])
        return self._storage.get_study_id_from_name(study.study_name)

    def _study(self, name: str) -> optuna.Study:
        return optuna.load_study(study_name=f"{self._run}/{name}", storage=self._storage)

    def _trials(self, name: str, *states: TrialState) -> list[FrozenTrial]:
        return self._storage.get_all_trials(
            self._study_ids[name], deepcopy=False, states=states or None
        )

    def _trial_id(self, name: str, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_ids[name], number)

    def _claim(self, name: str, wanted: Callable[[FrozenTrial], bool]) -> _Claimed | None:
        waiting = patiently(self._trials, name, TrialState.WAITING)
        for trial in waiting:
            if not wanted(trial):
                continue
            trial_id = patiently(self._trial_id, name, trial.number)
            try:
                granted = self._storage.set_trial_state_values(trial_id, TrialState.RUNNING)
            except UpdateFinishedTrialError:
                continue
            except Exception as error:
                if not is_connection_loss(error):
                    raise
                # Whether it was granted is unclear, and a second try would be refused. The sweep
                # reaps what nobody owns.
                return None
            if granted:
                owner = this_process()
                patiently(self._storage.set_trial_user_attr, trial_id, "owner", owner)
                patiently(self.beat, trial_id)
                return _Claimed(trial_id, trial.user_attrs)
        return None

    def _show_params(self, step: str, trial_id: int) -> None:
        """Give the trial the parameters it was enqueued with, for plots."""

        def suggest() -> None:
            trial = optuna.Trial(self._study(step), trial_id)
            for name, distribution in DISTRIBUTIONS.items():
                if isinstance(distribution, IntDistribution):
                    trial.suggest_int(name, distribution.low, distribution.high)
                else:
                    assert isinstance(distribution, FloatDistribution)
                    trial.suggest_float(name, distribution.low, distribution.high, log=True)

        patiently(suggest)

    def _has_lost_its_owner(self, trial: FrozenTrial) -> bool:
        owner = trial.user_attrs.get("owner")
        if owner is not None:
            return is_dead(owner) is True
        # Claimed by a process that ended, or lost its connection, before it could say who it is.
        key = f"{trial.user_attrs.get('key', 'place')}/{trial.number}"
        since = self._unowned_since.setdefault(key, time.monotonic())
        return time.monotonic() - since > _UNOWNED_S

    def _fail(self, trial: FrozenTrial) -> bool:
        name = "places" if "point" not in trial.user_attrs else trial.user_attrs["point"]["step"]
        return self._fail_id(patiently(self._trial_id, name, trial.number))

    def _fail_id(self, trial_id: int) -> bool:
        def fail() -> bool:
            self._storage.set_trial_user_attr(trial_id, "failure", "killed")
            return self._storage.set_trial_state_values(trial_id, TrialState.FAIL)

        try:
            return patiently(fail)
        except UpdateFinishedTrialError:
            return False

    def _fail_stale(self, name: str) -> int:
        before = len(self._trials(name, TrialState.RUNNING))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            optuna.storages.fail_stale_trials(self._study(name))
        return before - len(self._trials(name, TrialState.RUNNING))

    def _offer_free_places(self) -> None:
        def offer() -> None:
            held = {
                trial.user_attrs["place"]
                for trial in self._trials("places", TrialState.WAITING, TrialState.RUNNING)
            }
            for place in range(self.fact("num_places") or 0):
                if place not in held:
                    self._storage.create_new_trial(
                        self._study_ids["places"],
                        create_trial(state=TrialState.WAITING, user_attrs={"place": place}),
                    )

        patiently(offer)


@dataclass(frozen=True)
class _Claimed:
    trial_id: int
    user_attrs: Mapping[str, Any]


def _is_of(trial: FrozenTrial, point: Point, attempt: int) -> bool:
    attrs = trial.user_attrs
    return attrs.get("key") == point.key and attrs.get("attempt") == attempt


def _open_runs(storage: BaseStorage) -> list[str]:
    return [
        study.study_name.removesuffix("/places")
        for study in storage.get_all_studies()
        if study.study_name.endswith("/places") and not study.user_attrs.get("is_over")
    ]


def _packed(outcome: Outcome) -> str:
    text = json.dumps(outcome_to_row(outcome), separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _unpacked(text: str) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    return row
