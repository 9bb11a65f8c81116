from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import fake_vllm
import pytest
from fake_vllm import (
    BLOCK_SIZE,
    FAST,
    NUM_KV_TOKENS,
    Clock,
    capacity,
    checkpoint,
    inline_engine,
    launch_fake,
)

from vegas_runtime import backend
from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.errors import BackendError, ConfigError, GpuMemoryError, UsageError
from vegas_runtime.gpu_memory import MemoryCheck, MemoryGuard
from vegas_runtime.protocol import Capacity, PromptBlock, StockMethod
from vegas_runtime.records import Run, StepRecord
from vegas_runtime.vllm_plugin import child as child_module
from vegas_runtime.vllm_plugin import engine as engine_module
from vegas_runtime.vllm_plugin.child import Child, other_plugins, root_cause
from vegas_runtime.vllm_plugin.config import ALGORITHMS_KEY, ROWS_KEY, translate
from vegas_runtime.vllm_plugin.core import CoreFacts, CoreOutput, Emission
from vegas_runtime.vllm_plugin.driving import request_seed
from vegas_runtime.vllm_plugin.engine import MAX_STARTS, VllmEngine
from vegas_runtime.vllm_plugin.engine_options import (
    control_values,
    declared_besides,
    engine_options,
)
from vegas_runtime.vllm_plugin.host import sampling_params
from vegas_runtime.vllm_plugin.unrecorded import steps_of_outputs
from vegas_tune.laboratory import Laboratory
from vegas_tune.measure import Measurement, measure
from vegas_tune.outcomes import RETRIED_KINDS, Measured, Outcome
from vegas_tune.performer import classify
from vegas_tune.plan import VALIDATE, Point, make_plan

SETTING = SpeculationConfig(num_speculative_tokens=4, sparsity_ratio=0.1, min_tokens=32)
PLAIN = SETTING.replace(num_speculative_tokens=0)


def _block(index: int = 0, *, batch_size: int = 8, count: int = 12, length: int = 200) -> Any:
    return PromptBlock(
        index=index,
        prompts=tuple((index, place, *range(length - 2)) for place in range(count)),
        batch_size=batch_size,
        max_new_tokens=64,
        sampling=SamplingConfig(temperature=0.6, seed=3),
    )


def _run(engine: VllmEngine, block: PromptBlock | None = None, *, tokens: int = 3000) -> Run:
    deadline_s = engine.now_s() + 60
    return engine.run(block or _block(), replicate=0, max_tokens=tokens, deadline_s=deadline_s)


def _figures(run: Run) -> Measurement:
    figures = measure(run)
    assert isinstance(figures, Measurement), figures
    return figures


def _decode(run: Run) -> list[StepRecord]:
    return [step for step in run.steps if step.kind == "decode"]


# ------------------------------------------------------------------ a steady batch


@pytest.mark.parametrize("gamma", [0, 2, 8])
def test_the_batch_is_always_full_and_someone_always_waits(gamma: int) -> None:
    engine, _ = inline_engine()
    engine.configure(SETTING.replace(num_speculative_tokens=gamma))
    run = _run(engine)
    assert {step.num_running for step in run.steps} == {8}
    assert min(step.num_waiting for step in run.steps) > 0
    assert {step.kind for step in run.steps} == {"decode"}


def test_endings_are_spread_from_the_start() -> None:
    engine, _ = inline_engine()
    engine.configure(PLAIN)
    run = _run(engine, tokens=8 * 64 * 3)
    alive = [len(step.request_ids) for step in _decode(run)]
    # Eight requests of 64 tokens: one ends every eighth step, and never two together.
    assert min(alive) >= 7


@pytest.mark.parametrize(("gamma", "ratio"), [(0, 0.1), (4, 0.05), (8, 0.5)])
def test_measured_throughput_and_acceptance_are_the_engine_s(gamma: int, ratio: float) -> None:
    engine, _ = inline_engine()
    engine.configure(SETTING.replace(num_speculative_tokens=gamma, sparsity_ratio=ratio))
    figures = _figures(_run(engine, tokens=20_000))
    p = FAST.agreement(ratio)
    accepted = sum(p**i for i in range(1, gamma + 1))
    seconds = FAST.verify_s(gamma) + FAST.other_s + 0.0001 + 15e-6 * 0.1
    if gamma:
        seconds += gamma * FAST.draft_s(ratio) + FAST.select_s
        assert figures.accepted is not None
        assert figures.accepted.est == pytest.approx(accepted, rel=0.03)
        assert figures.survival[0] == pytest.approx(p, abs=0.02)
    # A request's place is taken for one step that yields its first token, for those that yield the
    # others (the last of them is cut, by half of it on average), and, as vLLM schedules ahead, for
    # one that is under way when it turns out to have ended.
    num_steps = 1 + 63 / (1 + accepted) + 0.5 * (gamma > 0) + (gamma > 0)
    assert figures.decode_tok_s.est == pytest.approx(8 * 64 / (num_steps * seconds), rel=0.05)


def test_phases_of_an_iteration_are_those_of_the_gpu() -> None:
    engine, _ = inline_engine()
    engine.configure(SETTING)
    phases = _figures(_run(engine)).phases
    assert phases["draft_s"].est == pytest.approx(4 * FAST.draft_s(0.1), rel=0.03)
    assert phases["verify_s"].est == pytest.approx(FAST.verify_s(4), rel=0.03)
    assert phases["select_s"].est == pytest.approx(FAST.select_s, rel=0.03)


def test_a_closed_pass_has_the_same_requests_from_start_to_end() -> None:
    engine, _ = inline_engine()
    engine.configure(SETTING)
    run = engine.run_closed(_block(), replicate=0, deadline_s=engine.now_s() + 60)
    steps = _decode(run)
    assert len(steps) > 4
    assert {step.request_ids for step in steps} == {tuple(range(8))}
    assert {step.num_running for step in steps} == {8}
    assert min(step.num_waiting for step in steps) > 0
    assert isinstance(measure(run), Measurement)
    stock, _ = inline_engine(is_stock=True)
    closed = stock.run_closed(_block(), replicate=0, deadline_s=stock.now_s() + 60)
    assert {len(step.request_ids) for step in _decode(closed)} == {8}


def test_fewer_requests_than_the_engine_takes_are_kept_running() -> None:
    engine, children = inline_engine()
    engine.configure(SETTING)
    run = _run(engine, _block(batch_size=3))
    assert {step.num_running for step in run.steps} == {3}
    core = children[0].core
    assert core is not None
    assert core.engine_core.setting["max_num_running"] == 3
    assert engine.config == SETTING


def test_a_pass_ends_at_its_tokens_or_its_deadline() -> None:
    engine, _ = inline_engine()
    engine.configure(PLAIN)
    short = _run(engine, tokens=400)
    assert 400 <= sum(sum(step.num_emitted_tokens) for step in short.steps) < 450
    start_s = engine.now_s()
    late = engine.run(_block(), replicate=0, max_tokens=10**9, deadline_s=start_s + 0.5)
    assert engine.now_s() - start_s == pytest.approx(0.5, abs=0.05)
    assert late.elapsed_s == pytest.approx(0.5, abs=0.05)


def test_a_deadline_before_the_first_step_is_an_error() -> None:
    engine, _ = inline_engine()
    with pytest.raises(BackendError, match="deadline came before the first decode step"):
        engine.run(_block(), replicate=0, max_tokens=10, deadline_s=engine.now_s() - 1)
    assert engine.num_starts == 1
    _run(engine, tokens=50)
    assert engine.num_starts == 1, "the engine was well, and must not be started again"


def test_passes_do_not_see_each_other_s_requests() -> None:
    engine, children = inline_engine()
    engine.configure(SETTING)
    first, second = _run(engine, tokens=500), _run(engine, tokens=500)
    core = children[0].core
    assert core is not None
    assert core.engine_core.scheduler.get_request_counts() == (0, 0)
    for run in (first, second):
        spent = sum(step.duration_s for step in run.steps)
        assert spent == pytest.approx(run.elapsed_s, rel=0.1)


# ------------------------------------------------------------------ prefill ahead


def test_prompts_are_prefilled_once_and_found_by_every_pass() -> None:
    engine, _ = inline_engine()
    run = _run(engine)
    hits = run.num_cached_tokens / run.num_prompt_tokens
    # All whole blocks but the last token's.
    assert hits == pytest.approx((200 - 1) // BLOCK_SIZE * BLOCK_SIZE / 200)
    start_s = engine.now_s()
    engine.prepare(_block())
    assert engine.now_s() == start_s


def test_hits_survive_a_record_s_round_trip() -> None:
    engine, _ = inline_engine()
    run = _run(engine, tokens=200)
    assert Run.from_dict(run.to_dict()).num_cached_tokens == run.num_cached_tokens > 0
    older = {k: v for k, v in run.to_dict().items() if not k.startswith("num_")}
    assert Run.from_dict(older).num_prompt_tokens == 0


def test_blocks_that_push_each_other_out_are_prefilled_again() -> None:
    engine, _ = inline_engine()
    large = [_block(index, count=20, length=4000) for index in range(3)]
    assert sum(len(prompt) for block in large for prompt in block.prompts) > NUM_KV_TOKENS
    for block in large:
        engine.prepare(block)
    start_s = engine.now_s()
    engine.prepare(large[2])
    assert engine.now_s() == start_s
    engine.prepare(large[0])
    assert engine.now_s() > start_s


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (_block(count=60, length=4000), "tokens of KV cache"),
        (_block(length=8150), "tokens of context"),
        (_block(batch_size=9), "9 requests are to run"),
    ],
)
def test_what_does_not_fit_is_said_before_it_runs(block: PromptBlock, message: str) -> None:
    engine, children = inline_engine()
    with pytest.raises(ConfigError, match=message):
        engine.prepare(block)
    _run(engine, tokens=50)
    assert len(children) == 1, "a refusal must not cost an engine start"


# ------------------------------------------------------------------ control


def test_a_setting_is_read_back_from_the_engine() -> None:
    engine, children = inline_engine()
    engine.configure(SETTING)
    assert engine.config == SETTING
    core = children[0].core
    assert core is not None
    in_force = core.engine_core.setting
    assert {name: in_force[name] for name in SETTING.to_dict()} == SETTING.to_dict()


@pytest.mark.parametrize(
    "stuck", [{"sparsity_ratio": 0.07}, {"num_speculative_tokens": 2}, {"algorithm": "quest"}]
)
def test_an_engine_that_runs_something_else_is_caught(stuck: dict[str, Any]) -> None:
    engine, children = inline_engine()
    core = children[0].core
    assert core is not None
    core.engine_core._stuck = stuck
    name, value = next(iter(stuck.items()))
    with pytest.raises(BackendError, match=f"`{name}` is {value!r} there and"):
        engine.configure(SETTING)
    assert engine.config != SETTING


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_speculative_tokens": 3}, "was started for 0, 2, 4, 6, 8"),
        ({"num_speculative_tokens": 16}, "was started for 0, 2, 4, 6, 8"),
        ({"sparsity_ratio": 0.6}, "at most 0.5"),
    ],
)
def test_what_was_not_declared_is_refused(changes: dict[str, Any], message: str) -> None:
    engine, _ = inline_engine()
    with pytest.raises(ConfigError, match=message):
        engine.configure(SETTING.replace(**changes))


def test_plain_decoding_sets_nothing_but_gamma() -> None:
    plain = SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0)
    assert control_values(plain, 8) == {"num_speculative_tokens": 0, "max_num_running": 8}
    engine, _ = inline_engine()
    engine.configure(plain)
    assert engine.config == plain


def test_the_engine_says_what_it_is() -> None:
    engine, _ = inline_engine()
    info = engine.info
    assert (info.backend, info.max_num_speculative_tokens) == ("vllm", 8)
    assert info.runtime["attention_path"] == "fused+kernel"
    assert info.device["class"] == "Fake GPU"
    assert info.model["id"] == "fake/model"


def test_generation_completes_every_prompt_in_order() -> None:
    engine, _ = inline_engine()
    engine.configure(SETTING)
    prompts = [(place, *range(50)) for place in range(30)]
    done = engine.generate(prompts, max_new_tokens=9, sampling=SamplingConfig())
    assert [len(one.token_ids) for one in done] == [9] * 30
    assert {one.finish_reason for one in done} == {"length"}


# ------------------------------------------------------------------ stock


def test_stock_is_measured_from_its_outputs_alone() -> None:
    clock = Clock()
    stock, _ = inline_engine(clock, is_stock=True)
    plugin, _ = inline_engine(clock)
    plugin.configure(PLAIN)
    run = _run(stock, tokens=10_000)
    assert {step.num_running for step in run.steps} == {8}
    assert run.num_cached_tokens > 0
    own, other = _figures(run).decode_tok_s, _figures(_run(plugin, tokens=10_000)).decode_tok_s
    assert own.est == pytest.approx(other.est, rel=0.02)


def test_stock_runs_fewer_requests_than_it_was_started_for() -> None:
    clock = Clock()
    stock, _ = inline_engine(clock, is_stock=True)
    plugin, _ = inline_engine(clock)
    plugin.configure(PLAIN)
    block = _block(batch_size=4)
    run = _run(stock, block, tokens=4000)
    assert max(step.num_running for step in run.steps) == 4, "nobody beyond the batch"
    assert {step.num_waiting for step in run.steps} == {0}
    full = [step for step in run.steps if step.num_running == 4]
    assert len(full) > 0.9 * len(run.steps)
    own = _figures(run).decode_tok_s
    assert own.est == pytest.approx(
        _figures(_run(plugin, block, tokens=4000)).decode_tok_s.est, rel=0.03
    )


def test_stock_drafts_nothing_and_keeps_its_batch() -> None:
    stock, _ = inline_engine(is_stock=True)
    assert stock.info.runtime["attention_path"] == "stock"
    assert stock.info.max_num_speculative_tokens == 0
    with pytest.raises(ConfigError, match="was started for 0"):
        stock.configure(SETTING)
    with pytest.raises(ConfigError, match="16 requests are to run; the engine was started for 8"):
        _run(stock, _block(batch_size=16))


NGRAM = StockMethod(name="ngram", num_speculative_tokens=4, options={"prompt_lookup_max": 5})


def test_what_vllm_s_own_method_accepts_is_told_from_its_outputs() -> None:
    engine, _ = inline_engine(is_stock=True, drafting=NGRAM)
    assert engine.info.max_num_speculative_tokens == 4
    engine.configure(NGRAM.config)
    run = _run(engine, tokens=20_000)
    assert run.config == NGRAM.config
    figures = _figures(run)
    p = FAST.agreement(1.0)
    # What its last step cut short is left out; two errors of 8 requests' mean over 6000 drafts.
    assert figures.accepted is not None
    assert figures.accepted.est == pytest.approx(sum(p**i for i in range(1, 5)), rel=0.02)
    assert len(figures.survival) == 4
    drafted = {count for step in run.steps for count in step.num_draft_tokens}
    assert drafted == {0, 4}


def test_vllm_s_own_method_cannot_change_while_it_runs() -> None:
    engine, children = inline_engine(is_stock=True, drafting=NGRAM)
    for other in (NGRAM.config.replace(num_speculative_tokens=2), PLAIN, SETTING):
        with pytest.raises(ConfigError, match="4 by vLLM's own 'ngram'"):
            engine.configure(other)
    assert engine.config == NGRAM.config
    assert len(children) == 1


def test_a_first_token_and_a_cut_last_step_verify_nothing() -> None:
    def output(end_s: float, **fields: Any) -> CoreOutput:
        emission = Emission(request_id="a", **fields)
        return CoreOutput(end_s=end_s, emissions=[emission], num_running=1, num_waiting=0)

    outputs = [
        output(0.0, token_ids=[0]),
        output(1.0, token_ids=[1], num_prompt_tokens=9, num_cached_tokens=8),
        output(2.0, token_ids=[2, 3, 4]),
        output(3.0, token_ids=[5]),
        output(4.0, token_ids=[6, 7], finish_reason="length"),
    ]
    steps = steps_of_outputs(outputs, 3)
    assert [step.num_draft_tokens for step in steps] == [[0], [3], [3], [0]]
    assert [step.num_accepted_tokens for step in steps] == [[0], [2], [0], [0]]
    assert [step.num_emitted_tokens for step in steps] == [[1], [3], [1], [2]]


def test_a_prompt_computed_in_chunks_marks_every_step_since_its_admission() -> None:
    def output(end_s: float, *emissions: Emission) -> CoreOutput:
        return CoreOutput(end_s=end_s, emissions=list(emissions), num_running=2, num_waiting=0)

    running = Emission(request_id="a", token_ids=[1])
    first = Emission(
        request_id="b", token_ids=[2], num_prompt_tokens=100, num_cached_tokens=0, scheduled_s=1.5
    )
    outputs = [output(1.0, running), output(2.0, running), output(3.0, running, first)]
    steps = steps_of_outputs([*outputs, output(4.0, running)])
    assert [step.num_context_tokens for step in steps] == [99, 99, 0]
    assert [step.duration_s for step in steps] == [1.0, 1.0, 1.0]


# ------------------------------------------------------------------ translation


def test_both_arms_get_the_same_options_but_the_plugin_s() -> None:
    size = capacity(max_model_len=777, batch_size=5)
    stock = engine_options(checkpoint(), size, is_stock=True)
    plugin = engine_options(checkpoint(), size, is_stock=False)
    speculative = plugin.pop("speculative_config")
    assert plugin == stock
    assert stock["max_num_seqs"] == 5
    assert stock["max_model_len"] == 777
    assert stock["dtype"] == "bfloat16"
    assert speculative["method"] == "sparse_attn"
    assert speculative["num_speculative_tokens"] == 8
    assert speculative["sparse_attn_num_speculative_tokens_set"] == [0, 2, 4, 6, 8]
    assert speculative["sparse_attn_max_ratio"] == 0.5
    assert speculative["sparse_attn_ratio"] <= 0.5


def test_quest_s_bounds_take_nothing_from_a_cache_of_a_given_size() -> None:
    quest = capacity().config.replace(algorithm="quest")
    for also, memory in (((), 1600), ((quest,), 1700)):
        size = capacity(kv_cache_bytes=1600, also=also)
        options = engine_options(checkpoint(), size, is_stock=False)
        assert options["kv_cache_memory_bytes"] == memory
        assert engine_options(checkpoint(), size, is_stock=True)["kv_cache_memory_bytes"] == 1600


def test_methods_to_be_switched_to_are_declared_at_the_start() -> None:
    base = capacity().config
    bases = (base, base.replace(algorithm="spec_extend"), base.replace(rows="last_accepted"))
    declared = declared_besides(capacity(also=bases))
    assert declared == {
        ALGORITHMS_KEY: ["spec_extend", "streaming_llm"],
        ROWS_KEY: ["last_accepted"],
    }
    assert declared_besides(capacity()) == {}
    speculative = engine_options(checkpoint(), capacity(also=bases), is_stock=False)[
        "speculative_config"
    ]
    _, settings = translate(speculative, model="m")
    assert set(settings.algorithms) == {"spec_extend", "streaming_llm"}
    assert settings.rows == ("last_accepted",)


def test_the_window_is_what_selecting_is_measured_against() -> None:
    engine, _ = inline_engine()
    window = engine.without_selection(SETTING)
    assert window == SETTING.replace(algorithm="streaming_llm")
    assert window is not None
    engine.configure(window)
    assert engine.without_selection(window) is None
    assert engine.without_selection(PLAIN) is None
    stock, _ = inline_engine(is_stock=True, drafting=NGRAM)
    assert stock.without_selection(NGRAM.config) is None


def test_vllm_s_own_method_gets_its_keys_and_the_graphs_its_batch_takes() -> None:
    size = capacity(batch_size=256)
    stock = engine_options(checkpoint(), size, is_stock=True)
    options = engine_options(checkpoint(), size, is_stock=True, drafting=NGRAM)
    sizes = options.pop("cudagraph_capture_sizes")
    assert max(sizes) == 256 * 5
    assert options.pop("speculative_config") == {
        "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5,
    }  # fmt: skip
    assert options == stock
    head = StockMethod(name="eagle3", num_speculative_tokens=2, model="/heads/one")
    assert head.to_vllm()["model"] == "/heads/one"


def test_sampling_is_vllm_s_own_words() -> None:
    drawn = SamplingConfig(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.2, seed=1
    )
    assert sampling_params(drawn, seed=9, max_tokens=7) == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.2,
        "seed": 9, "max_tokens": 7,
    }  # fmt: skip
    assert sampling_params(SamplingConfig(), seed=9, max_tokens=7)["seed"] is None


def test_every_request_of_every_repetition_has_its_own_seed() -> None:
    seeds = {request_seed(s, r, i) for s in range(3) for r in range(3) for i in range(50)}
    assert len(seeds) == 450
    assert max(seeds) < 2**63


def test_capacity_is_read_off_the_workload() -> None:
    size = Capacity.of(
        [_block(length=100), _block(1, batch_size=4, length=300)],
        gammas=[4, 2],
        ratios=[0.1, 0.02],
        config=PLAIN,
    )
    assert (size.batch_size, size.max_model_len) == (8, 364)
    assert size.gammas == (0, 2, 4)
    assert size.max_ratio == 0.1


@pytest.mark.parametrize(
    "changes",
    [{"batch_size": 0}, {"gammas": (2, 4)}, {"gammas": (0, 4, 2)}, {"max_ratio": 1.5}],
)
def test_a_capacity_that_means_nothing_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        capacity(**changes)


def test_the_stock_arm_loads_every_plugin_but_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        metadata.EntryPoint(name, f"{name}:register", "vllm.general_plugins")
        for name in ("zebra", "vegas", "lora")
    ]
    monkeypatch.setattr(child_module.metadata, "entry_points", lambda group: entries)
    assert other_plugins() == "lora,zebra"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("", ""),
        ("INFO all is well\n", ""),
        (
            "(EngineCore pid=3) ERROR torch.OutOfMemoryError: CUDA out of memory.\n"
            "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n",
            "torch.OutOfMemoryError: CUDA out of memory.",
        ),
        (
            "ValueError: To serve at least one request 9 GiB are needed\n"
            "RuntimeError: Engine core initialization failed. See root cause above.\n",
            "ValueError: To serve at least one request 9 GiB are needed",
        ),
    ],
)
def test_the_cause_is_found_in_the_log(log: str, cause: str) -> None:
    assert root_cause(log) == cause


# ------------------------------------------------------------------ a process of its own


@contextmanager
def _process_engine(*arguments: str) -> Iterator[VllmEngine]:
    engine = VllmEngine(checkpoint(), capacity(), launch=launch_fake(*arguments))
    try:
        yield engine
    finally:
        engine.close()


def _group(engine: VllmEngine) -> int:
    assert engine._child is not None
    return engine._child.pid


def _is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


# A pass of the fake takes virtual time; its process cannot share a virtual clock with this one,
# so deadlines here are real and far away.
def _pass(engine: VllmEngine) -> Run:
    return engine.run(_block(), replicate=0, max_tokens=600, deadline_s=engine.now_s() + 1e4)


def test_an_engine_in_its_own_process_measures_and_leaves_nothing_behind() -> None:
    with _process_engine() as engine:
        engine.configure(SETTING)
        _figures(_pass(engine))
        group = _group(engine)
        assert group != os.getpgid(0)
        log = engine._child._log  # type: ignore[union-attr]
        assert log.exists()
    assert _is_gone(group)
    assert not log.exists()
    engine.close()
    with pytest.raises(BackendError, match="closed"):
        engine.configure(SETTING)


def test_a_killed_engine_is_an_error_with_its_signal_and_the_next_pass_starts_another() -> None:
    with _process_engine() as engine:
        engine.configure(SETTING)
        group = _group(engine)
        os.killpg(group, signal.SIGKILL)
        with pytest.raises(BackendError, match="was ended by SIGKILL"):
            _pass(engine)
        assert _is_gone(group)
        _figures(_pass(engine))
        assert engine.num_starts == 2
        assert engine.config == SETTING


def test_an_engine_that_keeps_dying_is_given_up() -> None:
    with _process_engine("kill", "5") as engine:
        for _ in range(MAX_STARTS):
            with pytest.raises(BackendError, match="SIGKILL"):
                _pass(engine)
        with pytest.raises(BackendError, match=f"died {MAX_STARTS} times"):
            _pass(engine)
        assert engine.num_starts == MAX_STARTS


def test_out_of_memory_is_told_by_its_cause_and_the_log_is_kept() -> None:
    with (
        _process_engine("oom", "20") as engine,
        pytest.raises(BackendError, match=r"CUDA out of memory\. Tried") as caught,
    ):
        _pass(engine)
    log = Path(caught.value.hint.removeprefix("Its log: "))
    assert "OutOfMemoryError" in log.read_text()
    log.unlink()


def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(BackendError, match="ended with code 3 during `open`: ValueError: No avail"):
        VllmEngine(checkpoint(), capacity(), launch=launch_fake("start", "0"))


def test_a_hang_ends_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_GRACE_S", 0.5)
    with _process_engine("hang", "40") as engine:
        group = _group(engine)
        engine.prepare(_block())
        start_s = time.monotonic()
        with pytest.raises(BackendError, match="did not answer `run`"):
            engine.run(_block(), replicate=0, max_tokens=10**9, deadline_s=engine.now_s() + 0.3)
        assert time.monotonic() - start_s < 20
        assert _is_gone(group)


def test_a_start_that_hangs_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_START_QUIET_S", 3.0)
    with pytest.raises(BackendError, match=r"printed nothing for 3 s of `open`.*66/105"):
        VllmEngine(checkpoint(), capacity(), launch=launch_fake("capture", "0"))


def test_memory_that_stays_in_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([1 << 30, *[9 << 30] * 10_000])
    monkeypatch.setattr(
        child_module, "MemoryGuard", lambda _: MemoryGuard(0, used=lambda _: next(used))
    )
    monkeypatch.setattr(child_module, "_FREE_TIMEOUT_S", 0.3)
    told: list[str] = []
    engine = VllmEngine(checkpoint(), capacity(), launch=launch_fake(), report=told.append)
    assert engine.memory.state == "unknown"
    engine.close()
    assert engine.memory == MemoryCheck(state="held", held_bytes=8 << 30)
    assert any("8.0 GiB of GPU memory more than before" in line for line in told)


def test_an_engine_is_not_started_again_on_memory_that_did_not_come_back() -> None:
    used = iter([1 << 30, *[9 << 30] * 3, *[1 << 30] * 10])
    engine, children = inline_engine()
    children[0].guard = MemoryGuard(0, used=lambda _: next(used))
    children[0].memory = MemoryCheck(state="held", held_bytes=8 << 30)

    def dies(*_: Any, **__: Any) -> Any:
        children[0].is_healthy = False
        raise BackendError("it died")

    children[0].ask = dies  # type: ignore[method-assign]
    with pytest.raises(BackendError, match="it died"):
        _run(engine)
    with pytest.raises(GpuMemoryError, match=r"8\.0 GiB .* not freed") as caught:
        _run(engine)
    assert classify(caught.value)[0] == "gpu_memory"
    assert "gpu_memory" not in RETRIED_KINDS, "a retry would meet the same memory"
    assert len(children) == 1
    next(used), next(used)
    _figures(_run(engine))
    assert len(children) == 2, "once it is free the next pass starts another"


def test_time_on_the_gpu_counts_starts_and_stops_with_the_engine() -> None:
    clock = Clock()
    engine, _ = inline_engine(clock, start_s=40.0)
    assert engine.held_s == pytest.approx(40.0)
    clock.now_s += 5
    engine.close()
    clock.now_s += 100
    assert engine.held_s == pytest.approx(45.0, abs=0.1)


def test_starting_again_is_told_apart_from_measuring() -> None:
    clock = Clock()
    engine, children = inline_engine(clock, start_s=40.0)
    plan = make_plan(PLAIN, (_block(),), budget_s=1e6, tokens=3000)
    lab = Laboratory(plan, engine, (_block(),), load_s=40.0)

    def measure_afresh(replicate: int) -> Outcome:
        point = Point(step=VALIDATE, config=SETTING, block=0, replicate=replicate, max_tokens=3000)
        return lab.measure(point)

    first = measure_afresh(0)
    assert (first.load_s, engine.restarts_s) == (40.0, 0.0)

    def dies(*_: Any, **__: Any) -> Any:
        children[0].is_healthy = False
        raise BackendError("it died")

    children[0].ask = dies  # type: ignore[method-assign]
    second = measure_afresh(1)
    assert isinstance(second, Measured)
    assert (second.attempt, second.load_s) == (1, pytest.approx(40.0, abs=0.1))
    assert second.preparation_s < 10.0
    assert engine.restarts_s == pytest.approx(40.0, abs=0.1)


def test_time_on_several_gpus_is_their_sum() -> None:
    engine, _ = inline_engine(start_s=40.0, size=capacity(tensor_parallel_size=4))
    assert engine.held_s == pytest.approx(160.0)


def test_every_gpu_of_a_split_model_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-5f,1")
    monkeypatch.setattr(child_module.subprocess, "Popen", lambda *_, **__: None)
    guarded: list[tuple[int | str, ...]] = []
    monkeypatch.setattr(child_module, "MemoryGuard", lambda *devices: guarded.append(devices))

    def opened(self: Child, *_: Any, **__: Any) -> CoreFacts:
        self._log.unlink()
        raise BackendError("seen")

    monkeypatch.setattr(Child, "ask", opened)
    for size in (1, 2):
        with pytest.raises(BackendError, match="seen"):
            VllmEngine(checkpoint(), capacity(tensor_parallel_size=size))
    assert guarded == [(6,), (6, "GPU-5f")]


def test_an_interrupted_answer_is_never_taken_for_the_next_one() -> None:
    engine, children = inline_engine()

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    children[0].ask = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        _run(engine)
    assert children[0].is_ended
    _figures(_run(engine))
    assert len(children) == 2


def test_fakes_are_as_strict_as_what_they_stand_for() -> None:
    core = fake_vllm.open_core(
        options={"max_num_seqs": 2, "speculative_config": {
            "sparse_attn_num_speculative_tokens_set": [0, 2], "sparse_attn_max_ratio": 0.1}},
        has_plugin=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="not declared"):
        core.call("vegas_configure", {"num_speculative_tokens": 2, "sparsity_ratio": 0.2})


def test_auto_passes_over_an_engine_that_nobody_sized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "choose_backend", lambda: ("vllm", "because"))
    opened: list[str] = []
    monkeypatch.setattr(
        "vegas_runtime.engine.reference.ReferenceEngine.open",
        lambda **options: opened.append(options["model"]),
    )
    _, reason = backend.open_backend("auto", model="owner/m", max_num_speculative_tokens=4)
    assert opened == ["owner/m"]
    assert "sized for a workload" in reason
    with pytest.raises(UsageError, match="sizes its KV cache"):
        backend.open_backend("vllm", model="m", max_num_speculative_tokens=4)


@pytest.mark.parametrize("is_stock", [True, False])
def test_a_child_gets_its_own_variables_and_stock_no_plugin(
    monkeypatch: pytest.MonkeyPatch, is_stock: bool
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "vegas")
    monkeypatch.setattr(child_module, "other_plugins", lambda: "lora")
    tell = (
        "import os, sys; from multiprocessing.connection import Connection; "
        "Connection(int(sys.argv[-1])).send([os.environ['VLLM_PLUGINS'], os.environ['MINE']])"
    )
    child = child_module.launch(
        [sys.executable, "-c", tell], is_stock=is_stock, environment={"MINE": "7"}
    )
    assert child._pipe.recv() == ["lora" if is_stock else "vegas", "7"]
    child.is_healthy = False
    child.end(report=print)
    child._log.unlink()


def test_no_engine_outlives_a_tuner_that_was_killed(tmp_path: Path) -> None:
    start = (
        "import sys, time; sys.path[:0] = sys.argv[2:]; from fake_vllm import *; "
        "engine = VllmEngine(checkpoint(), capacity(), launch=launch_fake('hang', '10')); "
        "open(sys.argv[1], 'w').write(str(engine._child.pid)); "
        "engine.generate([(1, 2, 3)] * 50, max_new_tokens=50, sampling=SamplingConfig())"
    )
    told = tmp_path / "pid"
    root = Path(__file__).parent
    tuner = subprocess.Popen([sys.executable, "-c", start, str(told), str(root), str(root.parent)])
    try:
        limit_s = time.monotonic() + 60
        while not (told.exists() and told.read_text()):
            assert time.monotonic() < limit_s
            time.sleep(0.05)
        group = int(told.read_text())
        # In the middle of an order, which its process would notice a closed pipe only after.
        time.sleep(0.5)
        assert not _is_gone(group)
    finally:
        tuner.kill()
        tuner.wait()
    limit_s = time.monotonic() + 30
    while not _is_gone(group):
        assert time.monotonic() < limit_s, "the engine lives on without its tuner"
        time.sleep(0.1)
