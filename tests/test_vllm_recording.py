from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm import FAST, Clock, FakeEngineCore, FakeRequest

from vegas_runtime.vllm_plugin import recording
from vegas_runtime.vllm_plugin.recording import EngineStep, join_times, to_records


def _core(**options: Any) -> tuple[FakeEngineCore, Clock]:
    clock = Clock()
    values = {"max_num_seqs": 4, "gammas": (0, 4), "max_ratio": 0.5} | options
    return FakeEngineCore(FAST, clock, **values), clock


def _draft(core: FakeEngineCore, gamma: int = 4) -> None:
    core.vegas_configure({"num_speculative_tokens": gamma, "sparsity_ratio": 0.1})


def _add(core: FakeEngineCore, ids: Iterable[str], *, tokens: int = 40, prompt: int = 33) -> None:
    for index, request in enumerate(ids):
        core.scheduler.add_request(FakeRequest(request, (index,) * prompt, tokens, 0))


def _run(core: FakeEngineCore) -> None:
    while any(core.scheduler.get_request_counts()):
        core.step()


def _step(**changes: Any) -> EngineStep:
    values: dict[str, Any] = {
        "number": 0,
        "duration_s": 0.01,
        "num_running": 2,
        "num_waiting": 1,
        "num_context_tokens": 0,
        "request_ids": ["a", "b"],
        "num_draft_tokens": [4, 4],
        "num_accepted_tokens": [3, 0],
        "num_emitted_tokens": [4, 1],
    }
    return EngineStep(**(values | changes))


# ------------------------------------------------------------------ on the scheduler


def test_every_emitted_token_is_in_exactly_one_record() -> None:
    core, _ = _core()
    _draft(core)
    core.vegas_start_recording()
    _add(core, "abcdefg")
    _run(core)
    steps = [EngineStep.from_dict(row) for row in core.vegas_drain_records()]
    emitted = dict.fromkeys("abcdefg", 0)
    for step in steps:
        for request, count in zip(step.request_ids, step.num_emitted_tokens, strict=True):
            emitted[request] += count
    assert emitted == dict.fromkeys("abcdefg", 40)


def test_accepted_counts_stand_beside_what_was_drafted_and_may_exceed_a_cut_emission() -> None:
    core, _ = _core()
    _draft(core)
    core.vegas_start_recording()
    _add(core, "abc")
    _run(core)
    rows = [
        row
        for step in core.vegas_drain_records()
        for row in zip(
            step["num_draft_tokens"],
            step["num_accepted_tokens"],
            step["num_emitted_tokens"],
            strict=True,
        )
    ]
    assert all(drafted in (0, 4) and accepted <= drafted for drafted, accepted, _ in rows)
    assert all(emitted <= accepted + 1 for _, accepted, emitted in rows)
    assert any(emitted < accepted + 1 for _, accepted, emitted in rows), "no limit ever cut"


def test_wall_times_of_a_busy_engine_add_up_to_the_time_that_passed() -> None:
    core, clock = _core()
    core.vegas_start_recording()
    _add(core, "abcde")
    start_s = clock()
    _run(core)
    durations = [step["duration_s"] for step in core.vegas_drain_records()]
    assert sum(durations) == pytest.approx(clock() - start_s)


def test_idle_time_belongs_to_no_step() -> None:
    core, clock = _core()
    core.vegas_start_recording()
    _add(core, "a")
    _run(core)
    while core._in_flight:
        core.step()
    clock.now_s += 100.0
    _add(core, "b")
    _run(core)
    assert max(step["duration_s"] for step in core.vegas_drain_records()) < 1.0


def test_phase_times_reach_the_step_they_are_of() -> None:
    core, _ = _core()
    _draft(core)
    core.vegas_start_recording()
    _add(core, "abcd")
    _run(core)
    for row in core.vegas_drain_records():
        step = EngineStep.from_dict(row)
        assert step.phases_s["draft_s"] == pytest.approx(4 * FAST.draft_s(0.1), rel=0.2)
        assert sum(step.phases_s.values()) == pytest.approx(step.duration_s, rel=0.1)


def test_a_waiting_queue_and_a_full_batch_are_seen() -> None:
    core, _ = _core(max_num_seqs=3)
    core.vegas_start_recording()
    _add(core, "abcdefgh")
    _run(core)
    rows = core.vegas_drain_records()
    assert {row["num_running"] for row in rows[:20]} == {3}
    assert rows[0]["num_waiting"] == 5


def test_nothing_of_the_time_before_start_or_after_drain_is_recorded() -> None:
    core, _ = _core()
    _add(core, "a")
    _run(core)
    core.vegas_start_recording()
    _add(core, "b")
    _run(core)
    first = core.vegas_drain_records()
    _add(core, "c")
    _run(core)
    assert {request for step in first for request in step["request_ids"]} == {"b"}
    assert core.vegas_drain_records() == []


def test_draining_what_was_never_started_is_empty() -> None:
    core, _ = _core()
    assert core.vegas_drain_records() == []


def test_starting_twice_wraps_the_scheduler_once() -> None:
    core, _ = _core()
    core.vegas_start_recording()
    core.vegas_start_recording()
    _add(core, "a", tokens=5)
    _run(core)
    emitted = [sum(step["num_emitted_tokens"]) for step in core.vegas_drain_records()]
    assert sum(emitted) == 5


def test_warm_up_orders_carry_no_number() -> None:
    core, _ = _core()
    order = core.scheduler.schedule()
    assert not hasattr(order, recording.STEP_ATTRIBUTE)


def test_a_prompt_in_chunks_is_context_and_a_full_prefix_hit_is_less_than_a_block() -> None:
    core, _ = _core()
    core.vegas_start_recording()
    _add(core, "a", prompt=1200, tokens=3)
    _run(core)
    contexts = [step["num_context_tokens"] for step in core.vegas_drain_records()]
    assert [context >= 16 for context in contexts][:3] == [True, True, True]
    core.vegas_start_recording()
    _add(core, "b", prompt=1200, tokens=3)
    _run(core)
    contexts = [step["num_context_tokens"] for step in core.vegas_drain_records()]
    assert max(contexts) == 15


# ------------------------------------------------------------------ translation


def test_records_name_prompts_by_their_place_and_leave_out_strangers() -> None:
    records = to_records([_step()], {"b": 7}, block_size=16)
    assert records[0].request_ids == (7,)
    assert records[0].num_accepted_tokens == (0,)
    assert records[0].num_running == 2


def test_a_step_of_strangers_alone_is_left_out() -> None:
    assert to_records([_step()], {"x": 0}, block_size=16) == []


@pytest.mark.parametrize(("context", "kind"), [(0, "decode"), (15, "decode"), (16, "prefill")])
def test_up_to_a_block_of_prompt_text_is_decoding(context: int, kind: str) -> None:
    step = _step(num_context_tokens=context)
    assert to_records([step], {"a": 0}, block_size=16)[0].kind == kind


@pytest.mark.parametrize("verify_s", [0.001, 0.004, 0.5])
def test_phases_add_up_to_the_wall_time(verify_s: float) -> None:
    phases = {"verify_s": verify_s, "draft_s": 0.002, "select_s": 0.001, "sample_s": 0.0005}
    record = to_records([_step(phases_s=phases)], {"a": 0}, block_size=16)[0]
    assert record.duration_s == pytest.approx(0.01)
    assert min(record.draft_s, record.select_s, record.verify_s, record.other_s) >= 0
    assert record.draft_s / record.verify_s == pytest.approx(0.002 / verify_s)


def test_without_phase_times_a_step_is_its_forward_pass() -> None:
    record = to_records([_step()], {"a": 0}, block_size=16)[0]
    assert (record.verify_s, record.draft_s, record.other_s) == (0.01, 0.0, 0.0)


def test_times_join_by_number_and_not_by_order() -> None:
    steps = [_step(number=3), _step(number=4), _step(number=5)]
    times = [{"step": 5, "verify_s": 5.0}, {"step": 3, "verify_s": 3.0}]
    joined = join_times(steps, times)
    assert [step.phases_s for step in joined] == [{"verify_s": 3.0}, {}, {"verify_s": 5.0}]


def test_rows_survive_plain_transport() -> None:
    step = _step(phases_s={"verify_s": 0.001})
    assert EngineStep.from_dict(step.to_dict()) == step


def test_outputs_without_tokens_are_no_rows() -> None:
    core, _ = _core()
    core.vegas_start_recording()
    order = core.scheduler.schedule()
    assert order.total_num_scheduled_tokens == 0
    results = SimpleNamespace(sampled_token_ids=[], req_id_to_index={})
    core.scheduler.update_from_output(order, results)
    assert core.vegas_drain_records() == []
