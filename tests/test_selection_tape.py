"""The same drafts with and without choosing: same tokens, same steps, and no work of choosing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from test_reference_engine import NEVER, SAMPLED, block, loaded

import vegas_runtime.engine.attention as attention_module
from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.engine.lane_state import PageBounds
from vegas_runtime.engine.reference import ReferenceEngine
from vegas_runtime.errors import BackendError
from vegas_runtime.policies import POLICIES
from vegas_runtime.protocol import SelectionRecorder
from vegas_runtime.records import Run

BASE = SpeculationConfig(num_speculative_tokens=4, sparsity_ratio=0.4, min_tokens=4)
SETTINGS = [
    *(BASE.replace(algorithm=name) for name in POLICIES),
    BASE.replace(rows="last_accepted"),
    BASE.replace(rows="accepted_only", scope="kv_head", metric="logit"),
    BASE.replace(algorithm="quest", scope="kv_head"),
]


def name_of(config: SpeculationConfig) -> str:
    return f"{config.algorithm}-{config.rows}-{config.scope}"


@pytest.fixture
def engine() -> Iterator[ReferenceEngine]:
    opened = ReferenceEngine(loaded(), max_num_speculative_tokens=8)
    yield opened
    opened.close()


class Work:
    """Counts the work of choosing while a run goes on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = self.scored = self.bounded = 0
        for policy in POLICIES.values():
            monkeypatch.setattr(policy, "select", self._counting("asked", policy.select))
        monkeypatch.setattr(PageBounds, "extend", self._counting("bounded", PageBounds.extend))
        original = attention_module.attention

        def attention(*args: Any, **kwargs: Any) -> Any:
            self.scored += kwargs["score"] is not None
            return original(*args, **kwargs)

        monkeypatch.setattr(attention_module, "attention", attention)

    def _counting(self, name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            setattr(self, name, getattr(self, name) + 1)
            return original(*args, **kwargs)

        return call

    def take(self) -> tuple[int, int, int]:
        counts = self.asked, self.scored, self.bounded
        self.asked = self.scored = self.bounded = 0
        return counts


def without_times(run: Run) -> list[Any]:
    untimed = {"draft_s": 0.0, "select_s": 0.0, "verify_s": 0.0, "other_s": 0.0}
    return [replace(step, **untimed) for step in run.steps]


@pytest.mark.parametrize("sampling", [SamplingConfig(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("config", SETTINGS, ids=name_of)
def test_a_recorded_run_comes_again_without_the_work_of_choosing(
    engine: ReferenceEngine,
    config: SpeculationConfig,
    sampling: SamplingConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine.configure(config)
    given = block(sampling=sampling, max_new_tokens=12)
    usual = engine.run(given, replicate=3, max_tokens=30, deadline_s=NEVER)
    work = Work(monkeypatch)
    recorded = engine.record_selections(given, replicate=3, max_tokens=30, deadline_s=NEVER)
    needs = POLICIES[config.algorithm](config).needs
    asked, scored, bounded = work.take()
    assert asked > 0
    assert (scored > 0, bounded > 0) == (needs.collection is not None, needs.page_size > 0)
    # Twice: a tape is read from its start each time.
    for _ in range(2):
        again = engine.run_recorded(deadline_s=NEVER)
        assert work.take() == (0, 0, 0)
        assert again.outputs_sha256 == recorded.outputs_sha256 == usual.outputs_sha256
        assert without_times(again) == without_times(recorded) == without_times(usual)


def test_the_reference_engine_records(engine: ReferenceEngine) -> None:
    assert isinstance(engine, SelectionRecorder)


def test_nothing_is_played_back_that_was_not_recorded(engine: ReferenceEngine) -> None:
    engine.configure(BASE)
    with pytest.raises(BackendError, match="no run at the setting in force"):
        engine.run_recorded(deadline_s=NEVER)
    engine.record_selections(block(), replicate=0, max_tokens=20, deadline_s=NEVER)
    engine.configure(BASE.replace(sparsity_ratio=0.5))
    with pytest.raises(BackendError, match="no run at the setting in force"):
        engine.run_recorded(deadline_s=NEVER)


def test_a_playback_that_took_another_course_is_no_measurement(
    engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.configure(BASE)
    recorded = engine.record_selections(block(), replicate=0, max_tokens=20, deadline_s=NEVER)
    assert len(recorded.steps) > 3
    # The clock is looked at once when a run starts and once after each step.
    looks = itertools.count()
    monkeypatch.setattr(engine, "now_s", lambda: float(next(looks)))
    with pytest.raises(BackendError, match=f"differ .* after 3 of {len(recorded.steps)} steps"):
        engine.run_recorded(deadline_s=3.0)
