"""Profiles in the repository: each still reads, and its records still lead to its decisions."""

from __future__ import annotations

from pathlib import Path

import pytest

from vegas_runtime.profile import load_profile
from vegas_tune.gate import replay_decisions

PROFILES = sorted((Path(__file__).parent.parent / "profiles").glob("**/profile.yaml"))


def test_there_is_one() -> None:
    assert PROFILES


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.parent.name)
def test_a_shipped_profile_replays_to_its_own_decision(path: Path) -> None:
    verdict = replay_decisions(load_profile(path), path.parent)
    assert verdict.status == "ok", verdict.why
