"""The tuner's engine over vLLM itself: what it calls exists, and a pass of each arm on the CPU."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from collections import Counter
from typing import Any

import pytest
from fake_vllm import capacity, checkpoint
from script_runs import report_of

from vegas_runtime.config import SamplingConfig
from vegas_runtime.protocol import ON_V1_RUNNER, STOCK_METHODS, StockMethod
from vegas_runtime.records import Run, StepRecord
from vegas_runtime.vllm_plugin.engine_options import engine_options
from vegas_runtime.vllm_plugin.host import sampling_params
from vegas_runtime.vllm_plugin.recording import STEP_ATTRIBUTE

pytest.importorskip("vllm", reason="vLLM is not installed (extra `vllm`)")
pytestmark = pytest.mark.vllm


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def _fields(struct: Any) -> set[str]:
    if dataclasses.is_dataclass(struct):
        return {field.name for field in dataclasses.fields(struct)}
    return set(struct.__struct_fields__)


# ------------------------------------------------------------------ contracts


@pytest.mark.parametrize("is_stock", [True, False])
def test_every_engine_option_exists(is_stock: bool) -> None:
    from vllm.engine.arg_utils import EngineArgs

    options = engine_options(checkpoint(), capacity(), is_stock=is_stock)
    assert set(options) <= _fields(EngineArgs)


def test_methods_of_vllm_s_own_are_known_to_it_and_run_where_it_is_said() -> None:
    from types import SimpleNamespace
    from typing import get_args

    from vllm.config import VllmConfig
    from vllm.config.speculative import SpeculativeMethod
    from vllm.engine.arg_utils import EngineArgs

    drafting = StockMethod(name="ngram", num_speculative_tokens=3)
    options = engine_options(checkpoint(), capacity(), is_stock=True, drafting=drafting)
    assert set(options) <= _fields(EngineArgs)

    def known(kind: Any) -> set[str]:
        parts = get_args(kind)
        return {kind} if isinstance(kind, str) else {name for part in parts for name in known(part)}

    parallel = SimpleNamespace(
        distributed_executor_backend=None, pipeline_parallel_size=1, use_ubatching=False
    )
    on_v1 = set()
    for name in STOCK_METHODS:
        assert name in known(SpeculativeMethod)
        method = SimpleNamespace(method=name, parallel_drafting=False)
        config = SimpleNamespace(speculative_config=method, parallel_config=parallel)
        if VllmConfig._get_v2_model_runner_unsupported_features(config):  # type: ignore[arg-type]
            on_v1.add(name)
    assert on_v1 == set(ON_V1_RUNNER)


def test_sampling_is_accepted_by_vllm() -> None:
    from vllm import SamplingParams

    drawn = SamplingConfig(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.1
    )
    params = SamplingParams(**sampling_params(drawn, seed=2**55, max_tokens=9), detokenize=False)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.95)
    assert (params.min_p, params.repetition_penalty) == (0.05, 1.1)
    assert (params.seed, params.max_tokens) == (2**55, 9)
    greedy = SamplingParams(**sampling_params(SamplingConfig(), seed=1, max_tokens=9))
    assert (greedy.temperature, greedy.seed) == (0.0, None)


def test_the_front_door_is_where_it_was() -> None:
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.core_client import SyncMPClient
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.llm_engine import LLMEngine

    assert {"engine_args", "usage_context"} <= _parameters(LLMEngine.from_engine_args)
    assert UsageContext.OPENAI_API_SERVER
    wanted = {"request_id", "prompt", "params", "supported_tasks"}
    assert wanted <= _parameters(InputProcessor.process_inputs)
    assert _parameters(SyncMPClient.call_utility) == {"self", "method", "args"}
    for name in ("get_output", "add_request", "abort_requests", "shutdown"):
        assert callable(getattr(SyncMPClient, name))
    assert callable(LLMEngine.get_supported_tasks)


def test_outputs_hold_what_records_are_made_of() -> None:
    from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.metrics.stats import PrefillStats, SchedulerStats

    wanted = {"request_id", "new_token_ids", "new_logprobs", "finish_reason", "events"}
    assert wanted | {"prefill_stats"} <= _fields(EngineCoreOutput)
    assert {"outputs", "scheduler_stats", "timestamp"} <= _fields(EngineCoreOutputs)
    assert {"num_running_reqs", "num_waiting_reqs"} <= _fields(SchedulerStats)
    assert {"num_prompt_tokens", "num_cached_tokens"} <= _fields(PrefillStats)
    assert EngineCoreEventType.SCHEDULED


def test_finish_reasons_are_the_words_that_are_looked_for() -> None:
    from vllm.v1.engine import FinishReason

    words = {str(reason) for reason in FinishReason}
    assert {"stop", "length", "abort", "error"} <= words


def test_the_scheduler_is_what_the_recorder_wraps() -> None:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput

    arguments = ["self", "scheduler_output", "model_runner_output"]
    assert list(inspect.signature(Scheduler.update_from_output).parameters) == arguments
    assert callable(Scheduler.schedule)
    assert callable(Scheduler.get_request_counts)
    wanted = {"num_scheduled_tokens", "total_num_scheduled_tokens", "scheduled_spec_decode_tokens"}
    assert wanted <= _fields(SchedulerOutput)
    assert {"req_id_to_index", "sampled_token_ids"} <= _fields(ModelRunnerOutput)


def test_a_step_s_number_travels_to_workers_in_other_processes() -> None:
    from vllm.v1.core.sched.output import SchedulerOutput

    order = SchedulerOutput.make_empty()
    setattr(order, STEP_ATTRIBUTE, 41)
    assert getattr(pickle.loads(pickle.dumps(order)), STEP_ATTRIBUTE) == 41


def test_plugins_are_chosen_by_name() -> None:
    from vllm import envs

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "")
        assert envs.environment_variables["VLLM_PLUGINS"]() == [""]


# ------------------------------------------------------------------ a pass of each arm


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    return report_of("vllm_engine_scenarios.py", str(folder), timeout_s=500)


@pytest.fixture(scope="module")
def stock(arms: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = arms["stock"]
    return found


@pytest.fixture(scope="module")
def plugin(arms: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = arms["plugin"]
    return found


def _steps(run: dict[str, Any]) -> tuple[StepRecord, ...]:
    return Run.from_dict(run).steps


def test_both_arms_keep_the_batch_full_and_find_every_prompt_cached(
    stock: dict[str, Any], plugin: dict[str, Any]
) -> None:
    for run in (stock["plain"], plugin["plain"], plugin["full"], plugin["sparse"]):
        steps = _steps(run)
        assert {step.kind for step in steps} == {"decode"}
        assert {step.num_running for step in steps[1:]} == {4}
        assert min(step.num_waiting for step in steps) > 0
        # 32 of 33 tokens: all whole blocks.
        assert run["num_cached_tokens"] / run["num_prompt_tokens"] == pytest.approx(32 / 33)


def test_settings_are_read_back_from_the_engine(plugin: dict[str, Any]) -> None:
    assert plugin["full"]["config"]["num_speculative_tokens"] == 3
    assert plugin["sparse"]["config"]["sparsity_ratio"] == 0.25
    assert plugin["plain"]["config"]["num_speculative_tokens"] == 0
    assert {step.num_running for step in _steps(plugin["two_at_a_time"])[1:]} == {2}


def test_every_draft_is_accepted_when_nothing_is_left_out(plugin: dict[str, Any]) -> None:
    pairs = [
        pair
        for step in _steps(plugin["full"])
        for pair in zip(step.num_draft_tokens, step.num_accepted_tokens, strict=True)
    ]
    assert (3, 3) in pairs
    assert {drafted - accepted for drafted, accepted in pairs} == {0}


def test_a_sparse_setting_drafts_as_many_as_it_was_told_and_loses_some(
    plugin: dict[str, Any],
) -> None:
    steps = _steps(plugin["sparse"])
    drafted = {count for step in steps for count in step.num_draft_tokens}
    # A request's first step has nothing drafted for it yet.
    assert drafted == {0, 2}
    accepted = sum(sum(step.num_accepted_tokens) for step in steps)
    assert accepted < sum(sum(step.num_draft_tokens) for step in steps)


def test_drafted_greedy_text_is_stock_s(stock: dict[str, Any], plugin: dict[str, Any]) -> None:
    ours = [one["token_ids"] for one in plugin["greedy"]]
    assert ours == [one["token_ids"] for one in stock["greedy"]]
    best = [[row[0][0] for row in one["top_logprobs"]] for one in stock["greedy"]]
    assert best == ours


def test_each_arm_says_what_it_is(stock: dict[str, Any], plugin: dict[str, Any]) -> None:
    assert stock["info"]["runtime"]["attention_path"] == "stock"
    assert plugin["info"]["runtime"]["attention_path"] == "plain+plain"
    assert plugin["info"]["max_num_speculative_tokens"] == 3


@pytest.mark.parametrize("name", ["ngram", "draft_model"])
def test_what_vllm_s_own_method_accepts_is_what_its_scheduler_counts(
    name: str, arms: dict[str, Any]
) -> None:
    report = arms[name]
    run = Run.from_dict(report["run"])
    assert run.config.algorithm == name
    assert run.num_cached_tokens > 0
    counted = [
        (drafted, kept)
        for step in run.steps
        for drafted, kept in zip(step.num_draft_tokens, step.num_accepted_tokens, strict=True)
        if drafted
    ]
    said = [(drafted, kept) for drafted, kept in report["said"]]
    # As many every time: what a method has no draft for it fills up.
    assert {drafted for drafted, _ in [*counted, *said]} == {3}
    # Left out are the step that times begin with, and of each request what its prompt's last row
    # was padded with and what its limit may have cut.
    num_requests = sum(not all(step.num_draft_tokens) for step in run.steps)
    assert 0 < len(said) - len(counted) <= 4 + 2 * 4 + 2 * num_requests
    assert Counter(counted) - Counter(said) == Counter()
    if name == "draft_model":
        # It is the target itself, and both take the likeliest token.
        assert {kept for _, kept in counted} == {3}
    else:
        assert len({kept for _, kept in counted}) > 1
