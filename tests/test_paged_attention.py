"""The reference engine on the kernels' operations: their CPU implementations, or a GPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

import pytest
import torch
from test_reference_engine import NEVER, block, loaded
from tiny_decoding import (
    DraftSpy,
    SlowDecoder,
    decode,
    plain_text,
    slow_model,
    tiny_model,
    tiny_oracle,
)
from tiny_models import ARCHITECTURES, SLIDING_WINDOW, make_tiny, tiny_prompt
from torch import Tensor

from vegas_runtime.config import Rows, Scope, SpeculationConfig
from vegas_runtime.engine.attention import register
from vegas_runtime.engine.kv_cache import KVCache
from vegas_runtime.engine.model import DecoderModel, describe_model
from vegas_runtime.engine.paged import PagedAttention, why_not_kernels
from vegas_runtime.engine.reference import ReferenceEngine
from vegas_runtime.errors import BackendError
from vegas_runtime.kernels import build, ops
from vegas_runtime.kernels.reference import varlen_topk
from vegas_runtime.policies import make_policy

PROMPTS: Final = [tiny_prompt(n, seed=n) for n in (1, 9, SLIDING_WINDOW + 1, 3 * SLIDING_WINDOW)]
BASE: Final = SpeculationConfig(num_speculative_tokens=4, sparsity_ratio=0.5, min_tokens=2)
CPU: Final = torch.device("cpu")

SETTINGS: Final[list[dict[str, Any]]] = [
    {"num_speculative_tokens": 0},
    {"num_speculative_tokens": 1, "sparsity_ratio": 0.1},
    {"num_speculative_tokens": 7, "sparsity_ratio": 0.1, "scope": "kv_head"},
    {"num_speculative_tokens": 16, "sparsity_ratio": 0.3},
    {"rows": "all"},
    {"rows": "all", "scope": "kv_head", "sparsity_ratio": 0.1},
    {"rows": "first_middle_last", "num_speculative_tokens": 7},
    {"sparsity_ratio": 1.0},
    {"algorithm": "dense"},
    {"algorithm": "streaming_llm", "sparsity_ratio": 0.1},
    {"algorithm": "snapkv", "sparsity_ratio": 0.1},
]


def setting_id(setting: dict[str, Any]) -> str:
    return "-".join(str(value) for value in setting.values())


# -- decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS, ids=setting_id)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_is_that_of_generate(architecture: str, setting: dict[str, Any]) -> None:
    oracle = tiny_oracle(architecture)
    decoded = decode(
        tiny_model(architecture),
        PROMPTS,
        BASE.replace(**setting),
        max_new_tokens=[10, 4, 10, 7],
        lanes=3,
        attention="kernels",
    )
    limits = (10, 4, 10, 7)
    expected = [plain_text(oracle, p, n) for p, n in zip(PROMPTS, limits, strict=True)]
    assert decoded.outputs == expected


@pytest.mark.parametrize("algorithm", ["streaming_llm", "snapkv", "dense"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_a_policy_chose_by_itself_is_what_drafts_read(
    architecture: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, count = [tiny_prompt(n, seed=n) for n in (1, 40, 30)], 6
    config = BASE.replace(sparsity_ratio=0.4, algorithm=algorithm)
    if algorithm == "snapkv" and architecture in ("gpt_oss", "gemma3"):
        pytest.skip("the slow oracle of snapkv knows models without sliding windows")
    spy = DraftSpy(monkeypatch)
    decoded = decode(
        tiny_model(architecture),
        prompts,
        config,
        max_new_tokens=count,
        lanes=2,
        after_step=spy.after_step,
        attention="kernels",
    )
    slow = SlowDecoder(model=slow_model(architecture), config=config)
    for index, prompt in enumerate(prompts):
        text, turns = slow.decode(prompt, count)
        assert decoded.outputs[index] == text
        assert spy.turns[index] == turns


@pytest.mark.parametrize("scope", ["layer", "kv_head"])
@pytest.mark.parametrize("rows", ["two", "all"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keeping_everything_accepts_every_draft(
    architecture: str, rows: Rows, scope: Scope
) -> None:
    config = BASE.replace(sparsity_ratio=1.0, rows=rows, scope=scope)
    model = tiny_model(architecture)
    decoded = decode(model, PROMPTS, config, max_new_tokens=10, attention="kernels")
    assert set(decoded.all_accepted) == {4}


@pytest.mark.parametrize("rows", ["two", "all", "first_middle_last"])
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_a_request_drafts_alike_alone_and_beside_others_that_come_and_go(
    architecture: str, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores and normalisers follow their request when lanes are filled and freed."""
    model, config = tiny_model(architecture), BASE.replace(rows=rows, sparsity_ratio=0.2)
    prompts, limits = [tiny_prompt(n, seed=n) for n in (30, 50, 40, 25)], [3, 12, 5, 8]
    together = DraftSpy(monkeypatch)
    decode(
        model,
        prompts,
        config,
        max_new_tokens=limits,
        lanes=2,
        after_step=together.after_step,
        attention="kernels",
    )
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        alone = DraftSpy(monkeypatch)
        decode(
            model,
            [prompt],
            config,
            max_new_tokens=limit,
            after_step=alone.after_step,
            attention="kernels",
        )
        assert together.turns[index] == alone.turns[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_exact_collection_drafts_nearly_as_well_as_the_reference(architecture: str) -> None:
    """Equal up to one-byte rounding: over 100 tokens a few drafts may differ, not their worth."""
    config = BASE.replace(sparsity_ratio=0.3)
    prompts = [tiny_prompt(n, seed=n) for n in (40, 60, 80)]
    accepted = {
        attention: decode(
            tiny_model(architecture), prompts, config, max_new_tokens=40, attention=attention
        ).all_accepted
        for attention in ("kernels", "reference")
    }
    means = [sum(counts) / len(counts) for counts in accepted.values()]
    assert abs(means[0] - means[1]) < 0.3


@pytest.mark.parametrize("algorithm", ["vegas", "streaming_llm", "snapkv"])
def test_a_recorded_run_comes_again_without_the_work_of_choosing(algorithm: str) -> None:
    engine = ReferenceEngine(loaded(), max_num_speculative_tokens=8, attention="kernels")
    engine.configure(BASE.replace(algorithm=algorithm, sparsity_ratio=0.3))
    given = block(max_new_tokens=12)
    usual = engine.run(given, replicate=3, max_tokens=30, deadline_s=NEVER)
    engine.record_selections(given, replicate=3, max_tokens=30, deadline_s=NEVER)
    again = engine.run_recorded(deadline_s=NEVER)
    assert again.outputs_sha256 == usual.outputs_sha256
    counts = [[step.num_accepted_tokens for step in run.steps] for run in (usual, again)]
    assert counts[0] == counts[1]


def test_the_engine_says_who_attends_and_why() -> None:
    facts = ReferenceEngine(loaded(), max_num_speculative_tokens=8).info.runtime
    assert facts["attention_path"] == "reference"
    assert facts["attention_reason"] == "float32 keeps the exact reference path"
    engine = ReferenceEngine(loaded(), max_num_speculative_tokens=8, attention="kernels")
    assert engine.info.runtime["attention_path"] == "kernels"
    assert "attention_reason" not in engine.info.runtime
    before = engine.config
    with pytest.raises(BackendError, match="the kernels were asked for, but `quest`"):
        engine.configure(BASE.replace(algorithm="quest"))
    assert engine.config == before


# -- one pass -------------------------------------------------------------------------------------


def filled_cache(model: DecoderModel, lens: list[int], capacity: int, device: torch.device) -> Any:
    """A cache of random tokens in the model's dtype; what lies beyond each lane's is NaN."""
    random = torch.Generator().manual_seed(len(lens))
    cache = KVCache(
        model.shape,
        num_lanes=len(lens),
        capacity=capacity,
        dtype=model.model.dtype,
        device=device,
    )
    for buffer in (*cache.keys, *cache.values):
        buffer.copy_(torch.randn(buffer.shape, generator=random))
        for lane, length in enumerate(lens):
            buffer[lane, :, length:] = torch.nan
    return cache


def exact_weights(query: Tensor, key: Tensor, rows: list[int], scale: float) -> Tensor:
    """Softmax weights [Hkv, N] of one lane, float64, summed over rows and each group's heads."""
    num_rows, num_tokens = query.shape[1], key.shape[1]
    grouped = query.double().unflatten(0, (key.shape[0], -1))
    logits = torch.einsum("kgsd,knd->kgsn", grouped, key.double()) * scale
    last = num_tokens - num_rows + torch.arange(num_rows)
    hidden = torch.arange(num_tokens) > last[:, None]
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    return weights[:, :, rows].sum(dim=(1, 2))


def check_pass(model: DecoderModel, device: torch.device, rows: Rows, scope: Scope) -> float:
    """One draft and one verify pass over ragged lanes; the worst share of exact mass captured."""
    lens, num_rows = [75, 200, 131], 5
    config = BASE.replace(rows=rows, scope=scope, sparsity_ratio=0.1)
    needs = make_policy(config).needs
    assert needs.collection is not None
    cache = filled_cache(model, lens, 210, device)
    paged = PagedAttention(model, config, needs, cache)
    layer = model.shape.full_layers[-1]
    head_dim = model.shape.head_dims[0]
    random = torch.Generator().manual_seed(7)
    # Drafted tokens' queries are close to those that verify them, not equal.
    queries = torch.randn(len(lens), model.num_heads, num_rows, head_dim, generator=random)
    drafted = queries + 0.1 * torch.randn(queries.shape, generator=random)
    prefix = torch.tensor(lens, device=device) - num_rows
    dtype, scale, whole = model.model.dtype, head_dim**-0.5, slice(0, len(lens))
    for step in range(num_rows - 1):
        positions = (prefix + step)[:, None]
        row = drafted[:, :, step : step + 1].to(device, dtype)
        paged.draft(positions, step)(layer, row, scale, None)
    verified = queries.to(device, dtype)
    out = paged.verify(whole, prefix, num_rows)(layer, verified, scale, None)
    assert out.isfinite().all()
    for other in set(model.shape.full_layers) - {layer}:
        paged.verify(whole, prefix, num_rows)(other, verified, scale, None)
    paged.select(prefix)
    assert paged._reads is not None
    place = model.shape.full_layers.index(layer)
    slots, counts = paged._reads.slots[place].cpu(), paged._reads.counts.tolist()
    worst = 1.0
    for lane, length in enumerate(lens):
        budget = config.kv_budget(length - num_rows)
        assert counts[lane] == budget
        key = cache.keys[layer][lane, :, :length].cpu()
        weights = exact_weights(
            verified[lane].cpu(), key, needs.collection.row_indices(num_rows), scale
        )[:, : length - num_rows + 1]
        weights = weights if scope == "kv_head" else weights.sum(dim=0, keepdim=True)
        positions = slots[lane, :, :budget].long() - lane * cache.capacity
        assert bool((positions.diff(dim=-1) > 0).all())
        lists, candidates = weights.shape
        best = varlen_topk(
            weights.float(), torch.full((lists,), candidates), torch.full((lists,), budget)
        )
        kept = weights.gather(-1, positions).sum() / weights.gather(-1, best).sum()
        worst = min(worst, float(kept))
    return worst


@pytest.mark.parametrize("scope", ["layer", "kv_head"])
@pytest.mark.parametrize(("rows", "least"), [("two", 0.995), ("first_middle_last", 0.95)])
def test_selection_keeps_the_mass_that_exact_scores_would(
    rows: Rows, least: float, scope: Scope
) -> None:
    """Exact: one-byte codes err by 4.4 % at most, so only near ties swap. Hint: see bench_hint."""
    assert check_pass(tiny_model("llama"), CPU, rows, scope) > least


def test_a_lane_of_any_length_is_a_whole_number_of_tiles() -> None:
    cache = filled_cache(tiny_model("llama"), [3], 17, CPU)
    assert cache.capacity == cache.keys[0].shape[2] == 32


# -- which path runs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"metric": "logit"}, "metric `logit`"),
        ({"rows": "last_accepted"}, "rows `last_accepted`"),
        ({"algorithm": "spec_extend"}, "rows `last_accepted`"),
        ({"algorithm": "quest"}, "`quest` selects anew"),
        ({"num_speculative_tokens": 17}, "18 rows"),
    ],
)
def test_what_no_kernel_does_is_named_and_refused_when_asked_for(
    setting: dict[str, Any], words: str
) -> None:
    model, config = tiny_model("llama"), BASE.replace(**setting)
    with pytest.raises(BackendError, match=words):
        why_not_kernels(model, config, "kernels")


def test_more_collected_rows_than_a_block_holds_are_refused() -> None:
    model = tiny_model("llama", num_attention_heads=16, num_key_value_heads=1)
    with pytest.raises(BackendError, match="144 rows per KV head"):
        why_not_kernels(model, BASE.replace(rows="all", num_speculative_tokens=8), "kernels")
    assert why_not_kernels(model, BASE.replace(num_speculative_tokens=8), "kernels") is None


def test_capped_logits_keep_the_reference() -> None:
    model = describe_model(make_tiny("gemma3", attn_logit_softcapping=50.0))
    with pytest.raises(BackendError, match="caps its attention logits"):
        why_not_kernels(model, BASE, "kernels")


def test_float32_keeps_the_oracle_and_a_cpu_says_so() -> None:
    assert why_not_kernels(tiny_model("llama"), BASE) == "float32 keeps the exact reference path"
    half = describe_model(make_tiny("llama").to(torch.bfloat16))
    assert why_not_kernels(half, BASE) == "tensors are on cpu"
    assert why_not_kernels(half, BASE, "reference") == "the reference path was asked for"


# -- on a GPU -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    reason = build.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    return torch.device("cuda")


def gpu_model(architecture: str, head_dim: int, **overrides: Any) -> tuple[DecoderModel, Any]:
    """A tiny model in bfloat16 on the GPU, and the same weights in float32 as its oracle."""
    # A third of the usual spread: rounded to bfloat16, sharper random models are chaotic.
    usual = {"initializer_range": 0.11, "num_attention_heads": 8, "num_key_value_heads": 2}
    sizes = {"head_dim": head_dim, **usual, **overrides}
    oracle = make_tiny(architecture, attn_implementation=register(), **sizes)
    rounded = oracle.to(torch.bfloat16)
    model = describe_model(rounded.to("cuda"))
    exact = make_tiny(architecture, **sizes).to(torch.bfloat16).to(torch.float32).to("cuda")
    return model, exact


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ["two", "all"])
@pytest.mark.parametrize(
    ("architecture", "head_dim"), [("llama", 64), ("qwen3", 128), ("gpt_oss", 64)]
)
def test_tokens_on_a_gpu_are_the_targets_likeliest(
    architecture: str, head_dim: int, rows: Rows, gpu: torch.device
) -> None:
    """Greedy text by the float32 oracle, up to what bfloat16 does to plain decoding as well."""
    model, oracle = gpu_model(architecture, head_dim)
    prompts = [tiny_prompt(n, seed=n) for n in (3, 60, 200, 500)]
    config = BASE.replace(rows=rows, sparsity_ratio=0.2, num_speculative_tokens=7)
    assert why_not_kernels(model, config) is None
    decoded = decode(model, prompts, config, max_new_tokens=[40, 20, 40, 30], lanes=3)
    behind: list[float] = []
    for prompt, output in zip(prompts, decoded.outputs, strict=True):
        text = torch.tensor([prompt + output], device=gpu)
        logits = oracle(text).logits[0, len(prompt) - 1 : -1].float()
        taken = logits.gather(1, text[0, len(prompt) :, None])[:, 0]
        behind += ((logits.amax(-1) - taken) / logits.std()).tolist()
    # In standard deviations of the logits; an unrelated token is 2 to 3 behind. A rounded router
    # logit may send a token to another expert, so one in fifty may miss.
    assert sum(gap > 0.1 for gap in behind) <= len(behind) / 50
    assert 0 < sum(decoded.all_accepted) / len(decoded.all_accepted) <= 7


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["layer", "kv_head"])
@pytest.mark.parametrize(("rows", "least"), [("two", 0.995), ("all", 0.95)])
def test_selection_on_a_gpu_keeps_the_mass_that_exact_scores_would(
    rows: Rows, least: float, scope: Scope, gpu: torch.device
) -> None:
    model, _ = gpu_model("llama", 64)
    assert check_pass(model, gpu, rows, scope) > least


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["layer", "kv_head"])
@pytest.mark.parametrize("rows", ["two", "all"])
def test_cpu_and_gpu_pick_the_same_entries_from_the_same_scores(
    rows: Rows, scope: Scope, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every selection of a decode, bit for bit."""
    select: Callable[..., None] = ops.select
    compared = 0

    def both(score: Tensor, **arguments: Any) -> None:
        nonlocal compared
        select(score, **arguments)
        host = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in arguments.items()}
        slots, counts = torch.zeros_like(host["slots"]), torch.zeros_like(host["counts"])
        select(score.cpu(), **{**host, "slots": slots, "counts": counts})
        assert counts.tolist() == host["counts"].tolist()
        for lane, count in enumerate(counts.tolist()):
            assert torch.equal(slots[:, lane, :, :count], host["slots"][:, lane, :, :count])
        compared += 1

    monkeypatch.setattr("vegas_runtime.engine.collected.ops.select", both)
    model, _ = gpu_model("llama", 64)
    prompts = [tiny_prompt(n, seed=n) for n in (3, 300, 90)]
    config = BASE.replace(rows=rows, scope=scope, sparsity_ratio=0.2)
    decode(model, prompts, config, max_new_tokens=[12, 30, 20], lanes=2)
    assert compared > 5


@pytest.mark.gpu
@pytest.mark.parametrize("choice", ["kernels", "reference"])
def test_kernels_and_reference_draft_alike_on_a_gpu(
    choice: Literal["kernels", "reference"], gpu: torch.device
) -> None:
    """Plain decoding's text is reproduced by most drafts that read everything, on either path."""
    model, _ = gpu_model("llama", 64)
    prompts = [tiny_prompt(n, seed=n) for n in (100, 333)]
    config = BASE.replace(sparsity_ratio=1.0)
    decoded = decode(model, prompts, config, max_new_tokens=60, attention=choice)
    # Near ties in bfloat16 may turn either way between one row and five.
    assert sum(decoded.all_accepted) / len(decoded.all_accepted) > 3.5
