from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from killable_sweep import BLOCKS, small_plan
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from synthetic import PLATEAU, SyntheticEngine

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import BackendError, StorageError, UsageError
from vegas_tune.evidence import unpack_records
from vegas_tune.laboratory import Laboratory
from vegas_tune.outcomes import Failed
from vegas_tune.plan import GAMMA, SPARSITY, STEPS, Plan, Point
from vegas_tune.study import RunFolder
from vegas_tune.sweep import SweepResult, run_sweep

PLAN = small_plan()


def _sweep(folder: Path, plan: Plan = PLAN, **engine: Any) -> tuple[SweepResult, Laboratory]:
    with RunFolder.open(folder, plan) as store:
        lab = Laboratory(plan, SyntheticEngine(PLATEAU, **engine), BLOCKS, store=store)
        return run_sweep(plan, lab), lab


def _decisions(result: SweepResult) -> str:
    return json.dumps([decision.to_dict() for decision in result.decisions])


def _trials(folder: Path) -> list[optuna.trial.FrozenTrial]:
    storage = JournalStorage(JournalFileBackend(str(folder / "study.journal")))
    studies = [optuna.load_study(study_name=step, storage=storage) for step in STEPS]
    return [trial for study in studies for trial in study.trials]


def _complete(folder: Path) -> Counter[str]:
    return Counter(
        trial.user_attrs["key"] for trial in _trials(folder) if trial.state is TrialState.COMPLETE
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SweepResult]:
    folder = tmp_path_factory.mktemp("run")
    return folder, _sweep(folder)[0]


# ------------------------------------------------------------------ kill -9


def _run_process(folder: Path, log: Path, *doom: str) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).with_name("killable_sweep.py")
    return subprocess.run(
        [sys.executable, str(script), str(folder), str(log), *doom],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_kill_9_in_every_step_changes_nothing(
    undisturbed: tuple[Path, SweepResult], tmp_path: Path
) -> None:
    _, reference = undisturbed
    folder, log = tmp_path / "run", tmp_path / "passes.log"
    dooms = []
    for step, when in zip(STEPS, ("running", "recorded", "begun", "running"), strict=True):
        keys = [outcome.point.key for outcome in reference.outcomes if outcome.point.step == step]
        dooms.append((keys[len(keys) // 2], when))
    for key, when in dooms:
        killed = _run_process(folder, log, key, when)
        assert killed.returncode == -9, killed.stderr
    finished = _run_process(folder, log)
    assert finished.returncode == 0, finished.stderr

    assert finished.stdout == _decisions(reference)
    # Every measurement exactly once, whether the process died before, during or after it.
    asked = Counter(outcome.point.key for outcome in reference.outcomes)
    assert set(asked.values()) == {1}
    assert _complete(folder) == asked
    assert {trial.state for trial in _trials(folder)} == {TrialState.COMPLETE, TrialState.FAIL}
    # Passes started: one each, and one more for each that died half-way.
    started = Counter(log.read_text().split())
    again = {key.partition(".")[2] for key, when in dooms if when == "running"}
    assert {key for key, count in started.items() if count > 1} == again
    assert started.total() == len(reference.outcomes) + len(again)
    failures = [trial for trial in _trials(folder) if trial.state is TrialState.FAIL]
    assert [trial.user_attrs["failure"] for trial in failures] == ["killed"] * 3


# ------------------------------------------------------------------ resume


def test_a_finished_run_is_read_not_repeated(undisturbed: tuple[Path, SweepResult]) -> None:
    folder, reference = undisturbed
    again, lab = _sweep(folder)
    assert _decisions(again) == _decisions(reference)
    assert lab.num_fresh == 0


def test_more_budget_goes_on_with_the_same_measurements(tmp_path: Path) -> None:
    short = Plan.from_dict(PLAN.to_dict() | {"budget_s": 60.0})
    first, before = _sweep(tmp_path, short)
    assert first.status == "inconclusive"
    second, after = _sweep(tmp_path, PLAN)
    assert second.status == "validated"
    assert after.num_fresh == len(second.outcomes) - before.num_fresh


def test_another_plan_is_refused(undisturbed: tuple[Path, SweepResult]) -> None:
    folder, _ = undisturbed
    other = Plan.from_dict(PLAN.to_dict() | {"tokens": 999})
    with pytest.raises(UsageError, match="`tokens` was 800, now it is 999"):
        RunFolder.open(folder, other)


def test_a_second_process_is_locked_out(tmp_path: Path) -> None:
    with (
        RunFolder.open(tmp_path, PLAN),
        pytest.raises(StorageError, match=f"in use by another process .pid {os.getpid()}"),
    ):
        RunFolder.open(tmp_path, PLAN)
    RunFolder.open(tmp_path, PLAN).close()


def test_an_interrupt_saves_what_was_measured(
    undisturbed: tuple[Path, SweepResult], tmp_path: Path
) -> None:
    def interrupt(config: SpeculationConfig, num_passes: int) -> None:
        if num_passes == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _sweep(tmp_path, faults=interrupt)
    assert _complete(tmp_path).total() == 9
    interrupted = [trial for trial in _trials(tmp_path) if trial.state is TrialState.FAIL]
    assert [trial.user_attrs["failure"] for trial in interrupted] == ["interrupted"]
    result, lab = _sweep(tmp_path)
    assert _decisions(result) == _decisions(undisturbed[1])
    assert lab.num_fresh == len(result.outcomes) - 9


# ------------------------------------------------------------------ what Optuna sees


def test_the_journal_mirrors_the_records(undisturbed: tuple[Path, SweepResult]) -> None:
    folder, result = undisturbed
    trials = _trials(folder)
    assert len(trials) == len(result.outcomes)
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * len(trials)
    by_key = {trial.user_attrs["key"]: trial for trial in trials}
    for measured in result.measured():
        trial = by_key[measured.point.key]
        config = measured.point.config
        assert trial.params == {
            "num_speculative_tokens": config.num_speculative_tokens,
            "sparsity_ratio": config.sparsity_ratio,
        }
        assert trial.user_attrs["block"] == measured.point.block
        assert trial.user_attrs["replicate"] == measured.point.replicate
        assert trial.user_attrs["cost_s"] == measured.cost_s
        figures = measured.figures
        if measured.point.step != SPARSITY:
            assert trial.value == figures.decode_tok_s.est
        elif figures.accepted is not None:
            assert trial.value == figures.accepted.est


def test_failures_are_failed_trials_with_a_reason(tmp_path: Path) -> None:
    def fault(config: SpeculationConfig, num_passes: int) -> None:
        if config.num_speculative_tokens == 15:
            raise MemoryError("no room for the verified block")

    result, _ = _sweep(tmp_path, faults=fault)
    failed = [trial for trial in _trials(tmp_path) if trial.state is TrialState.FAIL]
    assert {trial.user_attrs["failure"] for trial in failed} == {"oom"}
    assert failed[0].user_attrs["reason"] == "no room for the verified block"
    assert len(failed) == len(result.failures)
    assert all(trial.value is None for trial in failed)


def test_studies_are_named_for_their_metric(undisturbed: tuple[Path, SweepResult]) -> None:
    folder, _ = undisturbed
    storage = JournalStorage(JournalFileBackend(str(folder / "study.journal")))
    names = {
        step: optuna.load_study(study_name=step, storage=storage).metric_names for step in STEPS
    }
    assert names[SPARSITY] == ["accepted_per_iteration"]
    assert names[GAMMA] == ["decode_tok_s"]


# ------------------------------------------------------------------ damage


def _copied(folder: Path, to: Path) -> Path:
    (to / "records").mkdir(parents=True)
    for path in [folder / "plan.json", folder / "study.journal", *folder.glob("records/*.z")]:
        (to / path.relative_to(folder)).write_bytes(path.read_bytes())
    return to


def _cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3 + 7]


def _scribbled(data: bytes) -> bytes:
    half = data.index(b"\n", len(data) // 2) + 1
    return data[:half] + b"\x00\x00 not json\n" + data[half:]


def _unended(data: bytes) -> bytes:
    return data + b'{"op_code":5,"trial'


def _emptied(data: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [_cut, _scribbled, _unended, _emptied])
def test_a_damaged_journal_is_rebuilt_from_the_records(
    undisturbed: tuple[Path, SweepResult], tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    folder, reference = undisturbed
    folder = _copied(folder, tmp_path / "run")
    journal = folder / "study.journal"
    before = _complete(folder)
    damaged = damage(journal.read_bytes())
    journal.write_bytes(damaged)
    result, lab = _sweep(folder)
    assert _decisions(result) == _decisions(reference)
    assert lab.num_fresh == 0
    assert _complete(folder) == before
    if damaged:
        assert journal.with_suffix(".journal.damaged").read_bytes() == damaged


def _cut_at(folder: Path, scratch: Path, missing: int) -> None:
    """Open a finished run whose journal lost its last bytes."""
    copy = _copied(folder, scratch / f"cut{missing}")
    journal = copy / "study.journal"
    os.truncate(journal, journal.stat().st_size - missing)
    with RunFolder.open(copy, PLAN) as store:
        assert store.num_stored == _complete(folder).total()
    assert _complete(copy) == _complete(folder), missing
    shutil.rmtree(copy)


def test_a_journal_cut_anywhere_near_its_end_is_rebuilt(
    undisturbed: tuple[Path, SweepResult], tmp_path: Path
) -> None:
    # Every byte: the slow test below.
    for missing in range(1, 1025, 61):
        _cut_at(undisturbed[0], tmp_path, missing)


@pytest.mark.slow
def test_a_journal_cut_at_every_byte_of_its_last_kilobyte_is_rebuilt(
    undisturbed: tuple[Path, SweepResult], tmp_path: Path
) -> None:
    for missing in range(1, 1025):
        _cut_at(undisturbed[0], tmp_path, missing)


def test_a_lost_journal_is_rebuilt_and_a_dead_lock_is_lifted(
    undisturbed: tuple[Path, SweepResult], tmp_path: Path
) -> None:
    folder, _ = undisturbed
    copy = _copied(folder, tmp_path / "run")
    (copy / "study.journal").unlink()
    (copy / "study.journal.lock").symlink_to("study.journal")  # left by a killed append
    _, lab = _sweep(copy)
    assert lab.num_fresh == 0
    assert _complete(copy) == _complete(folder)


def test_a_damaged_record_is_named(undisturbed: tuple[Path, SweepResult], tmp_path: Path) -> None:
    folder = _copied(undisturbed[0], tmp_path / "run")
    victim = sorted((folder / "records").glob("2-gamma*.z"))[0]
    victim.write_bytes(victim.read_bytes()[:-9])
    with pytest.raises(StorageError, match=victim.name) as caught:
        RunFolder.open(folder, PLAN)
    assert "Delete this file" in caught.value.hint
    victim.unlink()
    _, lab = _sweep(folder)
    assert lab.num_fresh == 1


def test_a_damaged_plan_is_named(undisturbed: tuple[Path, SweepResult], tmp_path: Path) -> None:
    folder = _copied(undisturbed[0], tmp_path / "run")
    (folder / "plan.json").write_text('{"base": ')
    with pytest.raises(StorageError, match=r"plan\.json"):
        RunFolder.open(folder, PLAN)


# ------------------------------------------------------------------ full, read-only, crashing


def test_a_full_disk_loses_nothing_that_was_stored(
    undisturbed: tuple[Path, SweepResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = os.fsync, [0]

    def full(descriptor: int) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    stored = 0
    # A measurement writes some ten times: these limits fall on each of them, and on the plan.
    for limit in (0, *range(20, 30)):
        room[0] = limit
        with pytest.raises(StorageError, match="No space left on device") as caught:
            _sweep(tmp_path)
        assert "Free some space" in caught.value.hint
        now = len(list((tmp_path / "records").glob("*.z")))
        assert now >= stored
        stored = now
        assert not list((tmp_path / "records").glob(".*"))
    assert stored >= 10
    monkeypatch.setattr(os, "fsync", real)
    result, lab = _sweep(tmp_path)
    assert _decisions(result) == _decisions(undisturbed[1])
    assert lab.num_fresh == len(result.outcomes) - stored


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot use"):
        RunFolder.open(tmp_path / "file" / "run", PLAN)


def test_a_read_only_folder_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Permissions do not bind every user that runs tests, so the system's answer is given here.
    def refuse(path: Any, flags: int, mode: int = 0o777) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match="Read-only file system"):
        RunFolder.open(tmp_path, PLAN)


def test_a_point_that_kills_the_process_again_and_again_is_given_up(tmp_path: Path) -> None:
    point = Point(step=GAMMA, config=PLAN.config(3, 0.05), block=0, replicate=0, max_tokens=9)
    for _ in range(3):
        folder = RunFolder.open(tmp_path, PLAN)
        assert folder.find(point, 0) is None
        folder.begin(point, 0)
        folder.close()  # as a dead process leaves it: claimed, without a result
    for _ in range(2):
        with RunFolder.open(tmp_path, PLAN) as folder:
            found = folder.find(point, 0)
            assert isinstance(found, Failed)
            assert found.kind == "killed"
            assert "3 times" in found.reason
    given_up = [trial for trial in _trials(tmp_path) if not trial.user_attrs.get("void")]
    assert [trial.user_attrs["failure"] for trial in given_up] == ["killed"]


# ------------------------------------------------------------------ evidence


def test_the_packed_records_hold_plan_and_every_outcome(tmp_path: Path) -> None:
    def fault(config: SpeculationConfig, num_passes: int) -> None:
        if num_passes == 3:
            engine.num_passes += 1
            raise BackendError("died once")

    engine = SyntheticEngine(PLATEAU, faults=fault)
    with RunFolder.open(tmp_path, PLAN) as store:
        result = run_sweep(PLAN, Laboratory(PLAN, engine, BLOCKS, store=store))
        first = store.pack(tmp_path / "records.npz")
        assert store.pack(tmp_path / "again.npz") == first
        assert store.num_stored == len(result.outcomes) + 1
    plan, outcomes = unpack_records(tmp_path / "records.npz")
    assert plan == PLAN
    assert sum(isinstance(outcome, Failed) for outcome in outcomes) == 1
    assert {outcome.point.key for outcome in outcomes} == {
        outcome.point.key for outcome in result.outcomes
    }
