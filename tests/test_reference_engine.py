from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from tiny_decoding import plain_text, tiny_oracle
from tiny_models import make_tiny, tiny_prompt
from transformers import PreTrainedTokenizerBase

from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.engine.attention import register
from vegas_runtime.engine.loading import LoadedModel, ModelSource
from vegas_runtime.engine.reference import ReferenceEngine
from vegas_runtime.errors import BackendError, ConfigError
from vegas_runtime.protocol import Engine, PromptBlock
from vegas_runtime.records import Run

NEVER = math.inf
NO_LIMIT = 10**9
NEW_TOKENS = 10
PROMPTS = tuple(tuple(tiny_prompt(n, seed=n)) for n in (40, 25, 60, 33))
VEGAS = SpeculationConfig(num_speculative_tokens=4, sparsity_ratio=0.5, min_tokens=4)
SETTINGS = [
    VEGAS,
    VEGAS.replace(num_speculative_tokens=0),
    VEGAS.replace(num_speculative_tokens=7, sparsity_ratio=0.1),
    VEGAS.replace(algorithm="streaming_llm"),
    VEGAS.replace(algorithm="dense", num_speculative_tokens=2),
]
SAMPLED = SamplingConfig(temperature=1.0, seed=5)


def loaded(**overrides: Any) -> LoadedModel:
    return LoadedModel(
        source=ModelSource("path", "tiny"),
        model=make_tiny("llama", attn_implementation=register(), **overrides),
        # Token ids in, token ids out: the engine only hands its tokenizer on.
        tokenizer=cast(PreTrainedTokenizerBase, None),
        facts={"id": "tiny", "dtype": "float32"},
    )


def block(
    prompts: tuple[tuple[int, ...], ...] = PROMPTS,
    *,
    batch_size: int = 2,
    max_new_tokens: int = NEW_TOKENS,
    sampling: SamplingConfig | None = None,
) -> PromptBlock:
    return PromptBlock(
        index=0,
        prompts=prompts,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        sampling=sampling or SamplingConfig(),
    )


@pytest.fixture
def engine() -> Iterator[ReferenceEngine]:
    opened = ReferenceEngine(loaded(), max_num_speculative_tokens=8)
    yield opened
    opened.close()


def run(
    engine: ReferenceEngine,
    config: SpeculationConfig = VEGAS,
    given: PromptBlock | None = None,
    *,
    replicate: int = 0,
    max_tokens: int = NO_LIMIT,
    deadline_s: float = NEVER,
) -> Run:
    engine.configure(config)
    return engine.run(
        given or block(), replicate=replicate, max_tokens=max_tokens, deadline_s=deadline_s
    )


class PassCounter:
    """Counts forward passes of the model, by tokens in a row."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self.lengths: list[int] = []
        assert engine._model is not None
        engine._model.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: Any, kwargs: Any) -> None:
        self.lengths.append(kwargs["input_ids"].shape[1])

    def take(self) -> list[int]:
        """Passes since the last call."""
        taken, self.lengths = self.lengths, []
        return taken


# -- settings -------------------------------------------------------------------------------------


def test_it_is_an_engine(engine: ReferenceEngine) -> None:
    checked: Engine = engine
    info = checked.info
    assert info.backend == "reference"
    assert info.model == {"id": "tiny", "dtype": "float32"}
    assert info.device["kind"] == "cpu"
    assert info.runtime["kv_cache_dtype"] == "float32"
    assert info.runtime["threads"] == torch.get_num_threads()
    assert info.max_num_speculative_tokens == 8


@pytest.mark.parametrize("config", SETTINGS)
def test_the_setting_in_force_is_read_back(
    engine: ReferenceEngine, config: SpeculationConfig
) -> None:
    assert engine.config.num_speculative_tokens == 0
    engine.configure(config)
    assert engine.config == config
    assert run(engine, config, max_tokens=4).config == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_speculative_tokens": 9}, "`num_speculative_tokens` is 9, .* at most 8"),
        ({"algorithm": "vega"}, "`algorithm` is 'vega'"),
        ({"algorithm": "dense", "rows": "all"}, "`rows` is 'all'"),
    ],
)
def test_a_setting_it_cannot_run_is_refused_and_changes_nothing(
    engine: ReferenceEngine, change: dict[str, Any], message: str
) -> None:
    engine.configure(VEGAS)
    with pytest.raises(ConfigError, match=message):
        engine.configure(VEGAS.replace(**change))
    assert engine.config == VEGAS


# -- prefills -------------------------------------------------------------------------------------


def test_a_block_is_prefilled_once(engine: ReferenceEngine) -> None:
    passes = PassCounter(engine)
    engine.prepare(block())
    # All but each prompt's last token, which is the first pass's own.
    assert passes.take() == [len(prompt) - 1 for prompt in PROMPTS]
    engine.prepare(block())
    assert passes.take() == []
    for config in SETTINGS:
        run(engine, config)
        assert max(passes.take()) == config.num_speculative_tokens + 1


def test_a_prompt_met_again_is_not_prefilled_again(engine: ReferenceEngine) -> None:
    passes = PassCounter(engine)
    engine.prepare(block(PROMPTS[:2]))
    assert passes.take() == [39, 24]
    engine.prepare(block([*PROMPTS, PROMPTS[2]]))
    assert passes.take() == [len(prompt) - 1 for prompt in PROMPTS[2:]]


def test_a_run_prepares_on_demand(engine: ReferenceEngine) -> None:
    passes = PassCounter(engine)
    first = run(engine)
    assert passes.take()[: len(PROMPTS)] == [len(prompt) - 1 for prompt in PROMPTS]
    assert run(engine).outputs_sha256 == first.outputs_sha256


def test_long_prompts_are_prefilled_in_chunks_and_reported() -> None:
    told: list[str] = []
    engine = ReferenceEngine(loaded(), max_num_speculative_tokens=2, report=told.append)
    passes = PassCounter(engine)
    prompt = tuple(tiny_prompt(1100))
    engine.prepare(block((prompt, PROMPTS[0]), batch_size=1))
    assert passes.take() == [512, 512, 75, 39]
    assert [line.split(": ")[1] for line in told] == [
        "512/1140 tokens",
        "1024/1140 tokens",
        "1099/1140 tokens",
        "1139/1140 tokens",
    ]


def test_a_chunked_prefill_decodes_like_generate() -> None:
    engine = ReferenceEngine(loaded(), max_num_speculative_tokens=4)
    prompt = tiny_prompt(1100)
    engine.configure(VEGAS)
    generated = engine.generate([prompt], max_new_tokens=12, sampling=SamplingConfig())
    assert [*generated.outputs[0]] == plain_text(tiny_oracle("llama"), prompt, 12)


@pytest.mark.parametrize("config", SETTINGS[2:4])
def test_runs_at_other_settings_leave_no_trace(
    engine: ReferenceEngine, config: SpeculationConfig
) -> None:
    before = run(engine, config)
    for other in SETTINGS:
        run(engine, other)
        run(engine, other, block(PROMPTS[2:], max_new_tokens=30))
    after = run(engine, config)
    assert after.outputs_sha256 == before.outputs_sha256
    assert counts(after) == counts(before)


def counts(one: Run) -> list[tuple[Any, ...]]:
    """What a run did, without how long it took."""
    return [
        (step.kind, step.request_ids, step.num_accepted_tokens, step.num_emitted_tokens)
        for step in one.steps
    ]


# -- texts ----------------------------------------------------------------------------------------


def test_finished_greedy_texts_hash_the_same_at_every_setting(engine: ReferenceEngine) -> None:
    # One request at a time: a run ends with the last text, so that all of them are whole.
    hashes = {run(engine, config, block(batch_size=1)).outputs_sha256 for config in SETTINGS}
    assert len(hashes) == 1
    other = run(engine, VEGAS, block(PROMPTS[:3], batch_size=1))
    assert other.outputs_sha256 not in hashes


@pytest.mark.parametrize("config", SETTINGS)
def test_generated_texts_are_those_of_generate(
    engine: ReferenceEngine, config: SpeculationConfig
) -> None:
    engine.configure(config)
    generated = engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS, sampling=SamplingConfig())
    oracle = tiny_oracle("llama")
    assert [[*output] for output in generated.outputs] == [
        plain_text(oracle, prompt, NEW_TOKENS) for prompt in PROMPTS
    ]
    assert generated.elapsed_s > 0
    assert sum(sum(step.num_emitted_tokens) for step in generated.steps) == 4 * NEW_TOKENS


def test_replicates_draw_other_texts_and_repeat_themselves(engine: ReferenceEngine) -> None:
    given = block(sampling=SAMPLED)
    hashes = [run(engine, given=given, replicate=i).outputs_sha256 for i in (0, 1, 2, 0, 1, 2)]
    assert len(set(hashes)) == 3
    assert hashes[:3] == hashes[3:]
    reseeded = block(sampling=SamplingConfig(temperature=1.0, seed=6))
    assert run(engine, given=reseeded).outputs_sha256 not in hashes


def test_equal_prompts_of_a_block_draw_different_texts(engine: ReferenceEngine) -> None:
    generated = engine.generate([PROMPTS[0]] * 4, max_new_tokens=NEW_TOKENS, sampling=SAMPLED)
    assert len(set(generated.outputs)) == 4


# -- records and where a run ends -----------------------------------------------------------------


@pytest.mark.parametrize("config", SETTINGS)
def test_records_are_consistent(engine: ReferenceEngine, config: SpeculationConfig) -> None:
    result = run(engine, config)
    gamma = config.num_speculative_tokens
    assert result.batch_size == 2
    assert result.steps[0].kind == "prefill"
    assert sum(step.duration_s for step in result.steps) <= result.elapsed_s + 1e-3
    emitted = dict.fromkeys(range(len(PROMPTS)), 0)
    for step in result.steps:
        assert step.num_running == len(step.request_ids) <= 2
        assert min(step.draft_s, step.select_s, step.verify_s, step.other_s) >= 0
        assert step.num_draft_tokens == (gamma * (step.kind == "decode"),) * step.num_running
        assert step.num_waiting == sum(1 for index in emitted if index > max(step.request_ids))
        for index, count in zip(step.request_ids, step.num_emitted_tokens, strict=True):
            emitted[index] += count
    # Three of the four requests end before the batch can no longer be kept full.
    assert sorted(emitted.values())[1:] == [NEW_TOKENS] * 3
    assert max(step.num_waiting for step in result.steps) == 2


@pytest.mark.parametrize("max_tokens", [1, 10, 15])
@pytest.mark.parametrize("config", SETTINGS[:2], ids=["vegas", "plain"])
def test_a_run_ends_once_it_emitted_enough_with_a_full_batch(
    engine: ReferenceEngine, config: SpeculationConfig, max_tokens: int
) -> None:
    result = run(engine, config, max_tokens=max_tokens)
    emitted = [
        sum(step.num_emitted_tokens)
        for step in result.steps
        if step.kind == "decode" and step.num_running == 2
    ]
    assert sum(emitted) >= max_tokens
    assert sum(emitted[:-1]) < max_tokens


def test_a_run_ends_when_the_batch_can_no_longer_be_full(engine: ReferenceEngine) -> None:
    result = run(engine, given=block(PROMPTS[:3], batch_size=2))
    full = [step.num_running for step in result.steps if step.kind == "decode"]
    assert set(full) == {2}
    whole = run(engine, given=block(PROMPTS[:3], batch_size=1))
    assert sum(sum(step.num_emitted_tokens) for step in whole.steps) == 3 * NEW_TOKENS


class ClockedEngine(ReferenceEngine):
    """Every look at the clock takes a second."""

    seconds = 0.0

    def now_s(self) -> float:
        self.seconds += 1
        return self.seconds


def test_a_run_ends_with_the_first_step_behind_the_deadline() -> None:
    engine = ClockedEngine(loaded(), max_num_speculative_tokens=8)
    engine.prepare(block())
    # One look when the run starts, one after each step: the prefill step, then decode steps.
    result = run(engine, deadline_s=engine.now_s() + 6)
    assert [step.kind for step in result.steps] == ["prefill"] + ["decode"] * 4


def test_a_deadline_before_any_decode_step_is_an_error() -> None:
    engine = ClockedEngine(loaded(), max_num_speculative_tokens=8)
    with pytest.raises(BackendError, match="deadline came before the first decode step"):
        run(engine, deadline_s=engine.now_s())


def test_requests_that_end_at_once_are_not_blamed_on_the_deadline(
    engine: ReferenceEngine,
) -> None:
    with pytest.raises(BackendError, match="ended with its first token"):
        run(engine, given=block(max_new_tokens=1))


def test_a_block_that_cannot_fill_its_batch_is_refused(engine: ReferenceEngine) -> None:
    with pytest.raises(ConfigError, match="2 prompts cannot keep 3 requests running"):
        run(engine, given=block(PROMPTS[:2], batch_size=3))


@pytest.mark.parametrize(("length", "fits"), [(63, True), (64, False), (100, False)])
def test_a_prompt_that_leaves_no_room_is_refused(length: int, fits: bool) -> None:
    small = loaded(max_position_embeddings=64)
    engine = ReferenceEngine(small, max_num_speculative_tokens=4)
    given = block((PROMPTS[0], tuple(tiny_prompt(length))))
    if fits:
        engine.prepare(given)
        return
    with pytest.raises(ConfigError, match=rf"prompt 1 .* has {length} tokens; .* holds 64"):
        engine.prepare(given)


def test_an_empty_prompt_is_refused(engine: ReferenceEngine) -> None:
    with pytest.raises(ConfigError, match="prompt 1 of block 0 is empty"):
        engine.prepare(block((PROMPTS[0], ())))


def test_a_closed_engine_says_so_and_closes_again(engine: ReferenceEngine) -> None:
    run(engine, max_tokens=4)
    engine.close()
    engine.close()
    for use in (lambda: engine.prepare(block()), lambda: run(engine)):
        with pytest.raises(BackendError, match="engine is closed"):
            use()
