"""What was rejected or not tried is in the profile and in its report, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killable_sweep import BLOCKS, small_plan
from synthetic import PLATEAU, SyntheticEngine

from profiles import make_profile
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import BackendError
from vegas_runtime.profile import Profile, dump_profile, parse_profile
from vegas_tune.laboratory import Laboratory
from vegas_tune.outcomes import Failed
from vegas_tune.plan import GAMMA, Point
from vegas_tune.progress import SweepProgress
from vegas_tune.publish import build_profile, gpu_warnings
from vegas_tune.report import render_markdown
from vegas_tune.study import RunFolder
from vegas_tune.sweep import run_sweep

PLAN = small_plan()
Fault = Callable[[SpeculationConfig, int], None]


def _published(folder: Path, fault: Fault, *more: Failed) -> Profile:
    engine = SyntheticEngine(PLATEAU, faults=fault)
    with RunFolder.open(folder, PLAN) as store:
        result = run_sweep(PLAN, Laboratory(PLAN, engine, BLOCKS, store=store))
        return build_profile(
            result,
            engine.info,
            BLOCKS,
            {"name": "stdlib", "batch_size": 8, "n_prompts": 8, "prompts_sha256": "0" * 64},
            artifacts={},
            created="2026-01-01T00:00:00Z",
            rejected=(*store.rejected, *more),
        )


def _once(kind: Exception) -> Fault:
    """Fails the third pass, and only the first time."""
    seen: list[int] = []

    def fault(config: SpeculationConfig, num_passes: int) -> None:
        if num_passes == 3 and not seen:
            seen.append(num_passes)
            raise kind

    return fault


def test_a_window_that_was_measured_again_is_told_with_its_reason(tmp_path: Path) -> None:
    profile = _published(tmp_path, _once(BackendError("a step took twice as long")))
    assert profile.curves.rejected is not None
    (window,) = profile.curves.rejected
    assert (window.failure.kind, window.attempt) == ("engine", 0)
    assert window.failure.message == "a step took twice as long"
    again = [
        each
        for each in (*profile.curves.sparsity, *profile.curves.gamma)
        if (each.num_speculative_tokens, each.sparsity_ratio)
        == (window.num_speculative_tokens, window.sparsity_ratio)
    ]
    assert again, "the point itself was measured in the end"
    assert all(each.status == "ok" for each in again)
    text = render_markdown(profile)
    assert "1 window rejected and measured again." in text
    assert "a step took twice as long" in text
    assert parse_profile(dump_profile(profile)) == profile, "and it survives the file"


def test_many_rejected_windows_are_counted_and_the_first_of_them_listed(tmp_path: Path) -> None:
    config = SpeculationConfig(num_speculative_tokens=3, sparsity_ratio=0.05)
    more = [
        Failed(
            point=Point(step=GAMMA, config=config, block=0, replicate=number, max_tokens=1),
            attempt=0,
            cost_s=1.0,
            kind="thermal",
            reason=f"hot {number}",
        )
        for number in range(40)
    ]
    profile = _published(tmp_path, lambda *_: None, *more)
    assert len(profile.curves.rejected or ()) == 30
    text = render_markdown(profile)
    assert "40 windows rejected and measured again. The first 30:" in text
    assert "hot 29" in text
    assert "hot 30" not in text


def test_settings_dropped_for_want_of_memory_are_told(tmp_path: Path) -> None:
    def too_big(config: SpeculationConfig, _: int) -> None:
        if config.num_speculative_tokens >= PLAN.gammas[-1]:
            raise MemoryError("no room")

    profile = _published(tmp_path, too_big)
    dropped = profile.curves.dropped or ()
    assert len(dropped) >= 1
    assert {each.failure.kind for each in dropped if each.failure} == {"dominated"}
    assert {each.num_speculative_tokens for each in dropped} == {PLAN.gammas[-1]}
    text = render_markdown(profile)
    assert "not tried, because they need more memory than others" in text
    assert "ran out of memory." in text


def test_nothing_rejected_says_nothing(tmp_path: Path) -> None:
    profile = _published(tmp_path, lambda *_: None)
    assert profile.curves.rejected is None
    assert profile.curves.dropped is None
    assert "rejected" not in render_markdown(profile)
    assert "rejected" not in profile.to_dict()["curves"]


def test_a_point_that_was_tried_again_says_so_while_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = SyntheticEngine(PLATEAU, faults=_once(BackendError("a step took twice as long")))
    with RunFolder.open(tmp_path, PLAN) as store:
        lab = Laboratory(PLAN, engine, BLOCKS, store=store)
        run_sweep(PLAN, lab, SweepProgress("again"))
    lines = capsys.readouterr().err.splitlines()
    assert sum("gamma" in line and line.endswith("   try 2") for line in lines) == 1


# ------------------------------------------------------------------ the GPU


def _on_gpu(**other: Any) -> Profile:
    values = make_profile().to_dict()
    values["match"]["device"] = {"kind": "cuda", "class": "NVIDIA H200"}
    values["protocol"]["other"] = other
    return Profile.model_validate({**values, "profile_id": "unsealed"})


def test_a_gpu_that_was_not_watched_is_said() -> None:
    (warning,) = gpu_warnings(_on_gpu())
    assert "was not recorded" in warning
    assert "doctor" in warning
    on_cpu = make_profile(match={"device": {"kind": "cpu", "class": "AMD EPYC"}})
    assert gpu_warnings(on_cpu) == []


def test_others_on_the_gpu_and_rejected_windows_are_said() -> None:
    gpu = {"foreign_processes": 2, "throttled_windows": 0}
    (warning,) = gpu_warnings(_on_gpu(gpu=gpu))
    assert "up to 2 processes of others" in warning
    (warning,) = gpu_warnings(_on_gpu(gpu={"foreign_processes": None, "throttled_windows": 3}))
    assert "3 windows were rejected" in warning
    assert gpu_warnings(_on_gpu(gpu={"foreign_processes": 0, "throttled_windows": 0})) == []
