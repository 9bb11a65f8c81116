"""kill -9 on sweeps of the reference engine: nothing is lost, nothing is measured twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import optuna
import pytest
from checkpoints import save_checkpoint
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from vegas_runtime.profile import load_profile
from vegas_tune.evidence import unpack_records
from vegas_tune.gate import replay_decisions
from vegas_tune.plan import STEPS


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_checkpoint(folder / "model", "llama")
    words = "the quick brown fox jumps over a lazy dog while rain falls on the old mill"
    texts = [(" ".join(words.split()[n:] + words.split()) * 3)[n : n + 180] for n in range(8)]
    rows = [json.dumps({"text": text}) for text in texts]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def _killed_sweeps(tiny: Path, folder: Path, num_kills: int) -> None:
    script = Path(__file__).with_name("mortal_reference.py")
    done = subprocess.run(
        [
            sys.executable, str(script), str(folder), str(tiny / "model"),
            str(tiny / "prompts.jsonl"), str(num_kills), "5",
        ],
        capture_output=True, text=True, timeout=900, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["killed"] >= num_kills
    assert found["changed"] == []
    for run in map(Path, found["folders"]):
        _check(run)


def _check(run: Path) -> None:
    """The decision rests on the records as they are, and each point was measured once."""
    profile = load_profile(run / "profile.yaml")
    verdict = replay_decisions(profile, run)
    assert verdict.status == "ok", verdict.why
    _, outcomes = unpack_records(run / "records.npz")
    storage = JournalStorage(JournalFileBackend(str(run / "study.journal")))
    trials = [
        trial
        for step in STEPS
        for trial in optuna.load_study(study_name=step, storage=storage).trials
    ]
    complete = Counter(t.user_attrs["key"] for t in trials if t.state is TrialState.COMPLETE)
    assert set(complete.values()) == {1}
    assert set(complete) <= {outcome.point.key for outcome in outcomes}
    assert not any(trial.state is TrialState.RUNNING for trial in trials)


def test_kill_9_at_5_random_moments_loses_nothing(tiny: Path, tmp_path: Path) -> None:
    _killed_sweeps(tiny, tmp_path, 5)


@pytest.mark.slow
def test_kill_9_at_50_random_moments_loses_nothing(tiny: Path, tmp_path: Path) -> None:
    _killed_sweeps(tiny, tmp_path, 50)
