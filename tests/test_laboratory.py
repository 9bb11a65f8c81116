from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from synthetic import PLATEAU, SyntheticEngine, make_blocks

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import BackendError, StorageError
from vegas_runtime.protocol import PromptBlock
from vegas_runtime.records import Run
from vegas_tune.evidence import outcome_from_row, outcome_to_row
from vegas_tune.laboratory import Laboratory, MemoryStore, RecordedLab
from vegas_tune.outcomes import MAX_RETRIES, Failed, Measured
from vegas_tune.performer import classify
from vegas_tune.plan import GAMMA, Plan, Point, make_plan

BASE = SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0, min_tokens=32)
BLOCKS = make_blocks(3)
Fault = Callable[[SpeculationConfig, int], None]


def _plan(budget_s: float = 1e6) -> Plan:
    return make_plan(BASE, BLOCKS, budget_s=budget_s, tokens=300)


def _point(gamma: int = 4, *, block: int = 0, replicate: int = 0) -> Point:
    config = _plan().config(gamma, 0.05)
    return Point(step=GAMMA, config=config, block=block, replicate=replicate, max_tokens=300)


def _failing(error: BaseException, times: int = 10**6) -> Fault:
    remaining = [times]

    def fault(config: SpeculationConfig, num_passes: int) -> None:
        if remaining[0]:
            remaining[0] -= 1
            raise error

    return fault


def _lab(fault: Fault | None = None, budget_s: float = 1e6, **options: Any) -> Laboratory:
    engine = options.pop("engine", None) or SyntheticEngine(PLATEAU, faults=fault)
    return Laboratory(_plan(budget_s), engine, BLOCKS, **options)


def test_a_point_is_measured_once() -> None:
    engine = SyntheticEngine(PLATEAU)
    lab = _lab(engine=engine)
    first, second = lab.measure(_point()), lab.measure(_point())
    assert isinstance(first, Measured)
    assert second is first
    assert engine.num_passes == lab.num_fresh == 1


def test_costs_hold_everything_since_the_measurement_before() -> None:
    engine = SyntheticEngine(PLATEAU, prefill_s=7.0)
    lab = _lab(engine=engine, load_s=20.0)
    first, second = lab.measure(_point()), lab.measure(_point(3))
    assert isinstance(first, Measured)
    assert isinstance(second, Measured)
    assert first.cost_s == pytest.approx(20.0 + 7.0 + first.run.elapsed_s, abs=1e-5)
    assert second.cost_s == pytest.approx(second.run.elapsed_s, abs=1e-5)
    assert (first.load_s, second.load_s) == (20.0, 0.0)
    assert first.preparation_s == pytest.approx(7.0, abs=1e-5)
    assert second.preparation_s == pytest.approx(0.0, abs=1e-5)
    assert [outcome_from_row(outcome_to_row(one)) for one in (first, second)] == [first, second]
    assert lab.spent_s == pytest.approx(20.0 + engine.now_s(), abs=1e-5)


def test_a_start_is_charged_to_the_first_result_that_is_not_tried_again() -> None:
    store = MemoryStore()
    engine = SyntheticEngine(PLATEAU, prefill_s=7.0, faults=_failing(BackendError("died"), times=2))
    lab = _lab(engine=engine, store=store, load_s=20.0)
    measured = lab.measure(_point())
    assert isinstance(measured, Measured)
    first, second, third = store.outcomes.values()
    assert [one.load_s for one in (first, second, third)] == [0.0, 0.0, 20.0]
    assert [one.cost_s for one in (first, second)] == pytest.approx([7.0, 0.0], abs=1e-5)
    assert measured.preparation_s == pytest.approx(0.0, abs=1e-5)
    assert lab.spent_s == pytest.approx(20.0 + engine.now_s(), abs=1e-5)

    full = _lab(_failing(MemoryError("no room"), times=1), load_s=20.0)
    lost, after = full.measure(_point()), full.measure(_point(3))
    assert isinstance(lost, Failed)
    assert (lost.load_s, after.load_s) == (20.0, 0.0)
    assert outcome_from_row(outcome_to_row(lost)) == lost


def test_an_engine_s_restart_is_a_start() -> None:
    @dataclass
    class Mortal(SyntheticEngine):
        restarts_s: float = 0.0

        def configure(self, config: SpeculationConfig) -> None:
            super().configure(config)
            if self.num_passes == 1:
                self.restarts_s += 60.0
                self._clock_s += 60.0

    lab = _lab(engine=Mortal(PLATEAU, prefill_s=7.0), load_s=20.0)
    measured = [lab.measure(_point(gamma)) for gamma in (2, 3, 4)]
    assert [one.load_s for one in measured] == [20.0, 60.0, 0.0]
    for one, preparation_s in zip(measured, (7.0, 0.0, 0.0), strict=True):
        assert isinstance(one, Measured)
        assert one.preparation_s == pytest.approx(preparation_s, abs=1e-5)


def test_a_stored_result_costs_what_it_cost() -> None:
    store = MemoryStore()
    fresh = _lab(store=store)
    fresh.measure(_point())
    again = _lab(store=store)
    again.measure(_point())
    assert again.spent_s == fresh.spent_s > 0
    assert again.num_fresh == 0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "oom"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "oom"),
        (RuntimeError("device-side assert"), "engine"),
        (BackendError("the engine died"), "engine"),
        (TimeoutError("no answer"), "timeout"),
        (FloatingPointError("NaN in logits"), "nan"),
        (OSError("broken pipe"), "engine"),
    ],
)
def test_failures_are_told_apart(error: Exception, kind: str) -> None:
    assert classify(error)[0] == kind
    outcome = _lab(_failing(error)).measure(_point())
    assert isinstance(outcome, Failed)
    assert outcome.kind == kind
    assert outcome.reason


def test_faults_of_the_machine_are_retried_at_most_twice() -> None:
    engine = SyntheticEngine(PLATEAU, faults=_failing(BackendError("died"), times=MAX_RETRIES))
    store = MemoryStore()
    outcome = _lab(engine=engine, store=store).measure(_point())
    assert isinstance(outcome, Measured)
    assert outcome.attempt == MAX_RETRIES
    assert sorted(attempt for _, attempt in store.outcomes) == [0, 1, 2]

    dead = _lab(_failing(BackendError("died"))).measure(_point())
    assert isinstance(dead, Failed)
    assert dead.attempt == MAX_RETRIES


def test_faults_of_the_setting_are_not_retried() -> None:
    outcome = _lab(_failing(MemoryError(), times=1)).measure(_point())
    assert isinstance(outcome, Failed)
    assert outcome.attempt == 0


def test_retries_are_paid_for_too() -> None:
    engine = SyntheticEngine(PLATEAU, prefill_s=3.0)

    def fault(config: SpeculationConfig, num_passes: int) -> None:
        if engine.now_s() < 10:
            engine._clock_s += 4.0
            raise BackendError("died")

    engine.faults = fault
    lab = _lab(engine=engine)
    lab.measure(_point())
    assert lab.spent_s == pytest.approx(engine.now_s(), abs=1e-5)


def test_a_bug_in_an_engine_is_not_swallowed() -> None:
    with pytest.raises(KeyError):
        _lab(_failing(KeyError("typo"))).measure(_point())


def test_an_engine_that_runs_another_setting_is_caught() -> None:
    class Deaf(SyntheticEngine):
        def configure(self, config: SpeculationConfig) -> None:
            super().configure(config.replace(sparsity_ratio=0.5))

    outcome = _lab(engine=Deaf(PLATEAU)).measure(_point())
    assert isinstance(outcome, Failed)
    assert outcome.kind == "mismatch"
    assert "sparsity_ratio is 0.5, not 0.05" in outcome.reason


def test_a_pass_with_too_few_steps_is_a_failure_not_a_number() -> None:
    class Short(SyntheticEngine):
        def run(
            self, block: PromptBlock, *, replicate: int, max_tokens: int, deadline_s: float
        ) -> Run:
            return super().run(block, replicate=replicate, max_tokens=1, deadline_s=deadline_s)

    outcome = _lab(engine=Short(PLATEAU)).measure(_point())
    assert isinstance(outcome, Failed)
    assert outcome.kind == "unsteady"


def test_the_budget_cuts_a_measurement_off() -> None:
    engine = SyntheticEngine(PLATEAU, prefill_s=0.0)
    lab = _lab(engine=engine, budget_s=0.5)
    outcome = lab.measure(_point())
    assert isinstance(outcome, Failed)
    assert outcome.kind == "timeout"
    assert outcome.attempt == 0
    assert engine.now_s() < 1.5  # the budget and the step in progress


def test_the_deadline_leaves_the_load_time_out() -> None:
    deadlines: list[float] = []

    class Watched(SyntheticEngine):
        def run(
            self, block: PromptBlock, *, replicate: int, max_tokens: int, deadline_s: float
        ) -> Run:
            deadlines.append(deadline_s)
            return super().run(
                block, replicate=replicate, max_tokens=max_tokens, deadline_s=deadline_s
            )

    engine = Watched(PLATEAU)
    lab = _lab(engine=engine, budget_s=100.0, load_s=40.0)
    lab.measure(_point())
    lab.measure(_point(3))
    assert deadlines == pytest.approx([60.0, 60.0], abs=1e-4)


def test_an_interrupt_is_passed_on_and_noted() -> None:
    class Noting(MemoryStore):
        abandoned: str = ""

        def abandon(self, point: Point, attempt: int, kind: str) -> None:
            self.abandoned = f"{point.key} {attempt} {kind}"

    store = Noting()
    lab = _lab(_failing(KeyboardInterrupt(), times=1), store=store)
    with pytest.raises(KeyboardInterrupt):
        lab.measure(_point())
    assert store.abandoned == f"{_point().key} 0 interrupted"
    assert isinstance(lab.measure(_point()), Measured)


def test_stop_soon_keeps_the_measurement_in_progress() -> None:
    store = MemoryStore()
    engine = SyntheticEngine(PLATEAU)
    lab = _lab(engine=engine, store=store)
    engine.faults = lambda config, num_passes: lab.stop_soon()
    lab.measure(_point())
    with pytest.raises(KeyboardInterrupt):
        lab.measure(_point(3))
    assert list(store.outcomes) == [(_point().key, 0)]
    assert isinstance(lab.measure(_point()), Measured)


def test_records_answer_like_the_run_they_are_of() -> None:
    store = MemoryStore()
    lab = _lab(_failing(BackendError("died"), times=1), store=store)
    outcomes = [lab.measure(_point()), lab.measure(_point(3))]
    recorded = RecordedLab(store.outcomes.values())
    assert [recorded.measure(_point()), recorded.measure(_point(3))] == outcomes
    assert recorded.spent_s == lab.spent_s


def test_a_missing_record_is_named() -> None:
    with pytest.raises(StorageError, match=r"2-gamma\.g4\.s0\.05\.b0\.r0"):
        RecordedLab([]).measure(_point())


def test_a_record_of_another_length_is_not_taken() -> None:
    store = MemoryStore()
    _lab(store=store).measure(_point())
    longer = Point.from_dict(_point().to_dict() | {"max_tokens": 999})
    assert store.find(longer, 0) is None
