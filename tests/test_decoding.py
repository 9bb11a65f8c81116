from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from typing import Any, ClassVar, Final, get_args

import pytest
import torch
from tiny_decoding import (
    GREEDY,
    Decoded,
    DraftSpy,
    SlowDecoder,
    decode,
    plain_text,
    slow_model,
    tiny_model,
    tiny_oracle,
)
from tiny_models import ARCHITECTURES, SLIDING_WINDOW, make_tiny, tiny_prompt

from vegas_runtime.config import Metric, Rows, SamplingConfig, Scope, SpeculationConfig
from vegas_runtime.engine.attention import register
from vegas_runtime.engine.model import describe_model
from vegas_runtime.policies import POLICIES, KVSelection, KVSelectionPolicy, Needs, SelectionInput

# One token; shorter than, about as long as, and longer than the sliding window.
PROMPTS: Final = [tiny_prompt(n, seed=n) for n in (1, 9, SLIDING_WINDOW + 1, 3 * SLIDING_WINDOW)]
NEW_TOKENS: Final = 10

BASE: Final = SpeculationConfig(num_speculative_tokens=4, sparsity_ratio=0.5, min_tokens=2)
GAMMAS: Final = (0, 1, 4, 7)
RATIOS: Final = (0.1, 0.5, 1.0)


@cache
def plain(architecture: str, max_new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """The prompts' texts by transformers' `generate`."""
    oracle = tiny_oracle(architecture)
    return [plain_text(oracle, prompt, max_new_tokens) for prompt in PROMPTS]


def run(architecture: str, config: SpeculationConfig, max_new_tokens: int = NEW_TOKENS) -> Decoded:
    return decode(tiny_model(architecture), PROMPTS, config, max_new_tokens=max_new_tokens)


def switch_settings() -> list[dict[str, Any]]:
    """Every pair of rows and metric, each with one scope so that all pairs of switches occur.

    Gammas and ratios go round, so that each switch meets several of them.
    """
    pairs = itertools.product(get_args(Rows), get_args(Metric))
    sizes = itertools.cycle(itertools.product((4, 7, 1), RATIOS))
    return [
        {
            "rows": rows,
            "metric": metric,
            "scope": get_args(Scope)[(place // 2 + place) % 2],
            "num_speculative_tokens": gamma,
            "sparsity_ratio": ratio,
        }
        for place, ((rows, metric), (gamma, ratio)) in enumerate(zip(pairs, sizes, strict=False))
    ]


def sizes_of(algorithm: str) -> list[dict[str, Any]]:
    """Every gamma with every ratio that makes a difference; for a baseline, in turn."""
    sizes = [*itertools.product(GAMMAS[1:], RATIOS)]
    if algorithm != "vegas":
        sizes = [(7, 0.1), (4, 0.5), (1, 0.5), (4, 1.0)] if algorithm != "dense" else [(4, 0.5)]
    return [
        {"algorithm": algorithm, "num_speculative_tokens": gamma, "sparsity_ratio": ratio}
        for gamma, ratio in [(0, 0.5), *sizes]
    ]


# Those whose drafts are not the target's own.
SPARSE: Final = sorted(set(POLICIES) - {"dense"})

SETTINGS: Final = [
    *itertools.chain.from_iterable(sizes_of(algorithm) for algorithm in POLICIES),
    *switch_settings(),
]


def setting_id(setting: dict[str, Any]) -> str:
    return "-".join(str(value) for value in setting.values())


# -- greedy text ----------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS, ids=setting_id)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_is_that_of_generate(architecture: str, setting: dict[str, Any]) -> None:
    decoded = run(architecture, BASE.replace(**setting))
    assert decoded.outputs == plain(architecture)


@pytest.mark.parametrize("algorithm", SPARSE)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_drafts_are_both_accepted_and_rejected(architecture: str, algorithm: str) -> None:
    """Else equal texts would prove nothing."""
    config = BASE.replace(algorithm=algorithm)
    counts = run(architecture, config, max_new_tokens=32).all_accepted
    assert 0 < sum(counts) / len(counts) < 4
    assert any(0 < count < 4 for count in counts)
    assert 0 in counts


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"rows": "last_accepted"},
        {"rows": "all", "metric": "logit"},
        {"rows": "first_middle_last", "scope": "kv_head"},
        {"rows": "accepted_only", "metric": "logit", "scope": "kv_head"},
        {"algorithm": "streaming_llm"},
        {"algorithm": "dense"},
    ],
    ids=setting_id,
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_drafts_are_those_of_the_definitions(
    architecture: str, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Selection, packing, tail and windows, against an oracle that knows none of them.

    Text alone cannot show a wrong selection: whatever is drafted, rejection repairs it.
    """
    prompts, count = [tiny_prompt(n, seed=n) for n in (1, 40, 30)], 6
    config = BASE.replace(sparsity_ratio=0.4, **setting)
    spy = DraftSpy(monkeypatch)
    model = tiny_model(architecture)
    decoded = decode(
        model, prompts, config, max_new_tokens=count, lanes=2, after_step=spy.after_step
    )
    slow = SlowDecoder(model=slow_model(architecture), config=config)
    for index, prompt in enumerate(prompts):
        text, turns = slow.decode(prompt, count)
        assert decoded.outputs[index] == text
        assert spy.turns[index] == turns


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dense_drafting_accepts_every_draft(architecture: str) -> None:
    decoded = run(architecture, BASE.replace(algorithm="dense"))
    assert set(decoded.all_accepted) == {4}


@pytest.mark.parametrize("scope", get_args(Scope))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_vegas_keeping_everything_equals_dense(architecture: str, scope: Scope) -> None:
    full = run(architecture, BASE.replace(sparsity_ratio=1.0, scope=scope))
    dense = run(architecture, BASE.replace(algorithm="dense"))
    assert full.outputs == dense.outputs
    assert full.all_accepted == dense.all_accepted
    assert set(full.all_accepted) == {4}


@pytest.mark.parametrize("knob", [{"sparsity_ratio": 1.0}, {"min_tokens": 1000}], ids=setting_id)
@pytest.mark.parametrize("algorithm", SPARSE)
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_a_window_over_everything_accepts_every_draft(
    architecture: str, algorithm: str, knob: dict[str, Any]
) -> None:
    decoded = run(architecture, BASE.replace(algorithm=algorithm, **knob))
    assert set(decoded.all_accepted) == {4}


@pytest.mark.parametrize("penalty", [1.3, 0.7])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_greedy_text_with_a_penalty_is_that_of_generate(architecture: str, penalty: float) -> None:
    sampling = SamplingConfig(repetition_penalty=penalty)
    decoded = decode(
        tiny_model(architecture),
        PROMPTS,
        BASE,
        max_new_tokens=NEW_TOKENS,
        lanes=3,
        sampling=sampling,
    )
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = tiny_oracle(architecture).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            repetition_penalty=penalty,
        )
        expected.append(output[0, len(prompt) :].tolist())
    assert decoded.outputs == expected
    assert decoded.outputs != plain(architecture)
    assert 0 < sum(decoded.all_accepted) < 4 * len(decoded.all_accepted)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_runs_and_dense_drafts_mostly_stand(architecture: str) -> None:
    tiny = make_tiny(architecture, attn_implementation=register()).to(torch.bfloat16)
    decoded = decode(
        describe_model(tiny),
        PROMPTS,
        BASE.replace(algorithm="dense"),
        max_new_tokens=NEW_TOKENS,
    )
    assert [len(output) for output in decoded.outputs] == [NEW_TOKENS] * len(PROMPTS)
    # Not all: near-ties fall differently in passes of one row and of five, at 8 bits.
    assert sum(decoded.all_accepted) > 0.5 * 4 * len(decoded.all_accepted)


# -- how requests end -----------------------------------------------------------------------------


@cache
def ended_texts(several: bool) -> tuple[dict[str, Any], list[list[int]]]:
    """Overrides with one end token or two, and the prompts' texts by `generate` up to theirs."""
    texts = plain("llama", 30)
    # Tokens that end the first text early, the second late, and others perhaps.
    ends = [texts[0][2], texts[1][20]]
    override: dict[str, Any] = {"eos_token_id": ends if several else ends[0], "pad_token_id": 0}
    oracle = make_tiny("llama", **override)
    return override, [plain_text(oracle, prompt, 30) for prompt in PROMPTS]


@pytest.mark.parametrize("algorithm", POLICIES)
@pytest.mark.parametrize("several", [False, True])
def test_each_request_ends_at_its_own_end_token(algorithm: str, several: bool) -> None:
    override, expected = ended_texts(several)
    model = describe_model(make_tiny("llama", attn_implementation=register(), **override))
    ends = override["eos_token_id"]
    assert model.eos_token_ids == {*(ends if several else [ends])}
    config = BASE.replace(algorithm=algorithm)
    decoded = decode(model, PROMPTS, config, max_new_tokens=30, lanes=2)
    assert decoded.outputs == expected
    lengths = {len(output) for output in expected}
    assert len(lengths) > 1
    assert min(lengths) < 30


def test_an_end_token_among_accepted_drafts_cuts_the_rest_off() -> None:
    text = plain("llama", 30)[3]
    end = text[7]
    first = text.index(end)
    override: dict[str, Any] = {"eos_token_id": end, "pad_token_id": 0}
    model = describe_model(make_tiny("llama", attn_implementation=register(), **override))
    config = BASE.replace(algorithm="dense", num_speculative_tokens=7)
    decoded = decode(model, PROMPTS[3:], config, max_new_tokens=30)
    assert decoded.outputs == [text[: first + 1]]
    last = decoded.steps[-1]
    assert last.num_emitted_tokens[0] < last.num_accepted_tokens[0] + 1


@pytest.mark.parametrize("algorithm", POLICIES)
def test_waiting_requests_take_freed_lanes(algorithm: str) -> None:
    prompts = [tiny_prompt(10 + 7 * i, seed=i) for i in range(7)]
    limits = [1, 12, 5, 1, 9, 3, 12]
    config = BASE.replace(algorithm=algorithm)
    decoded = decode(tiny_model("gemma3"), prompts, config, max_new_tokens=limits, lanes=2)
    oracle = tiny_oracle("gemma3")
    assert decoded.outputs == [
        plain_text(oracle, prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)
    ]
    assert max(step.num_running for step in decoded.steps) == 2
    waiting = [step.num_waiting for step in decoded.steps]
    assert waiting == sorted(waiting, reverse=True)
    assert (waiting[0], waiting[-1]) == (5, 0)


@pytest.mark.parametrize("algorithm", POLICIES)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_full_context_ends_one_request_while_others_go_on(
    architecture: str, algorithm: str
) -> None:
    size: dict[str, Any] = {"max_position_embeddings": 64}
    prompts = [tiny_prompt(n, seed=n) for n in (60, 20, 63, 45)]
    tiny = make_tiny(architecture, attn_implementation=register(), **size)
    positions: list[int] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        positions.append(int(kwargs["position_ids"].max()))

    tiny.register_forward_pre_hook(note, with_kwargs=True)
    decoded = decode(
        describe_model(tiny),
        prompts,
        BASE.replace(algorithm=algorithm, num_speculative_tokens=7),
        max_new_tokens=24,
        lanes=3,
    )
    oracle = tiny_oracle(architecture, **size)
    room = [4, 24, 1, 19]
    assert decoded.outputs == [
        plain_text(oracle, prompt, count) for prompt, count in zip(prompts, room, strict=True)
    ]
    # Drafts beyond the end are discarded, but a model that looks positions up must not fail.
    assert max(positions) == 63


# -- independence, records, refusals --------------------------------------------------------------


@pytest.mark.parametrize("algorithm", POLICIES)
def test_a_request_samples_the_same_alone_and_beside_others(algorithm: str) -> None:
    model = tiny_model("llama")
    sampling = SamplingConfig(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.2
    )
    config = BASE.replace(algorithm=algorithm)
    outputs = [
        decode(
            model, PROMPTS, config, max_new_tokens=NEW_TOKENS, lanes=lanes, sampling=sampling
        ).outputs
        for lanes in (1, 3, 4)
    ]
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0] != plain("llama")


@pytest.mark.parametrize("sampling", [GREEDY, SamplingConfig(temperature=1.0)])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_records_account_for_every_token(gamma: int, sampling: SamplingConfig) -> None:
    config = BASE.replace(num_speculative_tokens=gamma)
    decoded = decode(
        tiny_model("qwen3"),
        PROMPTS,
        config,
        max_new_tokens=NEW_TOKENS,
        lanes=2,
        sampling=sampling,
    )
    emitted = dict.fromkeys(range(len(PROMPTS)), 0)
    for step in decoded.steps:
        drafted = 0 if step.kind == "prefill" else gamma
        assert step.num_draft_tokens == (drafted,) * step.num_running
        assert len(step.request_ids) == step.num_running <= 2
        assert min(step.draft_s, step.select_s, step.verify_s, step.other_s) >= 0
        assert step.verify_s > 0
        assert (step.draft_s > 0) == (drafted > 0)
        for index, accepted, count in zip(
            step.request_ids, step.num_accepted_tokens, step.num_emitted_tokens, strict=True
        ):
            assert 0 <= accepted <= drafted
            emitted[index] += count
            # The output limit may cut an iteration short; nothing else does.
            ended = emitted[index] == NEW_TOKENS
            assert count <= accepted + 1 if ended else count == accepted + 1
    assert emitted == dict.fromkeys(range(len(PROMPTS)), NEW_TOKENS)
    prefills = [step for step in decoded.steps if step.kind == "prefill"]
    assert sorted(i for step in prefills for i in step.request_ids) == [0, 1, 2, 3]


LENGTHS: Final = {"prefix_lens", "committed_lens", "current_lens"}


class ProbePolicy(KVSelectionPolicy):
    """Drafts densely, anew at each draft step, and notes what it is handed."""

    name: ClassVar[str] = "probe"
    given: ClassVar[list[SelectionInput]] = []

    def _needs(self) -> Needs:
        return Needs(per_draft_step=True)

    def select(self, given: SelectionInput) -> KVSelection | None:
        self.given.append(
            dataclasses.replace(
                given,
                prefix_lens=given.prefix_lens.clone(),
                committed_lens=given.committed_lens.clone(),
            )
        )
        return None


def test_a_policy_is_handed_the_lengths_it_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "probe", ProbePolicy)
    monkeypatch.setattr(ProbePolicy, "given", [])
    decoded = run("llama", BASE.replace(algorithm="probe", num_speculative_tokens=2))
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
    # The first pass fed the last prompt token; every later one, which accepts all, three.
    prefixes = [lengths - 1] + [lengths + 3 * turn for turn in range(len(decoded.steps) - 2)]
    given = iter(ProbePolicy.given)
    for prefix, fed in zip(prefixes, [1] + [3] * len(prefixes), strict=False):
        for drafted in range(2):
            handed = next(given)
            assert torch.equal(handed.prefix_lens, prefix)
            assert torch.equal(handed.committed_lens, prefix + fed)
            assert torch.equal(handed.current_lens, prefix + fed + drafted)
            undeclared = {field.name for field in dataclasses.fields(handed)} - LENGTHS
            assert {getattr(handed, name) for name in undeclared} == {None}
    assert next(given, None) is None


class QueryPolicy(ProbePolicy):
    """Drafts densely too, but asks for each step's query and the keys' bounds."""

    name: ClassVar[str] = "query"

    def _needs(self) -> Needs:
        return Needs(query=True, page_size=8)


def test_a_policy_that_asks_for_queries_gets_each_layers_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(POLICIES, "query", QueryPolicy)
    monkeypatch.setattr(ProbePolicy, "given", [])
    model = tiny_model("gemma3")
    prompts, layers = PROMPTS[1:3], len(model.shape.full_layers)
    config = BASE.replace(algorithm="query", num_speculative_tokens=2)
    decoded = decode(model, prompts, config, max_new_tokens=NEW_TOKENS)
    assert set(decoded.all_accepted) == {2}
    assert [len(turns) for turns in map(decoded.accepted, range(2))] == [3, 3]
    assert len(ProbePolicy.given) == 3 * 2 * layers
    for place, handed in enumerate(ProbePolicy.given):
        turn, drafted = divmod(place // layers, 2)
        current = torch.tensor([len(prompt) for prompt in prompts]) + 3 * turn + drafted
        assert torch.equal(handed.current_lens, current)
        assert handed.query is not None
        assert handed.query.shape == (2, 4, 16)
        assert handed.page_low is not None
        assert handed.page_high is not None
        assert handed.page_low.shape == (2, 2, int(current.max()) // 8, 16)
        assert bool((handed.page_low <= handed.page_high).all())
        assert handed.scores is None
        assert handed.keys is None
    queries = [handed.query for handed in ProbePolicy.given if handed.query is not None]
    assert len({query.sum().item() for query in queries}) == len(queries)
