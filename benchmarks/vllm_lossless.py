"""Whether vLLM with the plugin puts out what vLLM puts out: greedy, and in distribution."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from benchmarks.equality import compare_samples, first_difference, is_more_often
from benchmarks.results_file import Row
from benchmarks.vllm_arms import (
    BASE,
    SAMPLED,
    engine_of,
    row,
    say,
    side_by_side,
    source_prompts,
)
from vegas_runtime.backend import Capacity
from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.vllm_plugin.driving import Completion
from vegas_runtime.vllm_plugin.engine import Checkpoint, VllmEngine

GREEDY = SamplingConfig()
PENALISED = replace(SAMPLED, repetition_penalty=1.1)
# Sparse enough that drafts are refused: an acceptance test that is wrong then shows.
SPARSE = BASE.replace(num_speculative_tokens=6, sparsity_ratio=0.05, min_tokens=8)
FULL = SPARSE.replace(sparsity_ratio=1.0)

NUM_GREEDY, GREEDY_TOKENS, GREEDY_CONTEXT = 64, 256, 2049
# Requests side by side in the control arm; the arms compared run all 64.
CONTROL_BATCH = 16
# Two steps of bfloat16 at logits of 16 to 32, where SmolLM2's largest lie.
NEAR_TIE = 0.25
GREEDY_LEVEL = 0.01

SAMPLE_CONTEXT, SAMPLE_TOKENS = 385, 8
# Behind the first verification at every acceptance, within the first few iterations.
POSITION = 5
FALSE_ALARM_RATE = 0.001
BATCH = 256

Outputs = list[tuple[int, ...]]


def lossless(checkpoint: Checkpoint, rows: list[Row], *, num_samples: int) -> None:
    """Must-shows 1 and 2 on engines of their own."""
    allow_planting()
    capacity = Capacity(
        batch_size=BATCH,
        max_model_len=GREEDY_CONTEXT + GREEDY_TOKENS + 1,
        gammas=(0, 6),
        max_ratio=0.1,
        config=SPARSE,
        gpu_memory_utilization=0.05,
        kv_cache_bytes=8 << 30,
    )
    with side_by_side(checkpoint, [capacity], capacity) as ((stock,), engine):
        compare_outputs(stock, engine, checkpoint.tokenizer, rows, num_samples=num_samples)
    full_acceptance(checkpoint, rows)


def allow_planting() -> None:
    """Let a function be sent into workers that start from now on; the bug is planted by one."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"


def compare_outputs(
    stock: VllmEngine, engine: VllmEngine, tokenizer: Any, rows: list[Row], *, num_samples: int
) -> None:
    """Greedy text and the distribution of a sampled token, both arms at the same time.

    Nothing is timed here, so they may share the GPU. Afterwards `engine` is broken on purpose.
    """
    long = source_prompts(tokenizer, NUM_GREEDY, GREEDY_CONTEXT)
    short = source_prompts(tokenizer, 1, SAMPLE_CONTEXT)[0]
    engine.configure(SPARSE)

    def sample(arm: VllmEngine, first_seed: int) -> dict[str, list[int]]:
        return {
            name: _samples(arm, short, sampling, num_samples, first_seed=first_seed)
            for name, sampling in (("plain", SAMPLED), ("penalties", PENALISED))
        }

    with ThreadPoolExecutor(2) as pool:
        # Other seeds than the drafting arm's: equal ones would make equal tokens of both.
        base = pool.submit(lambda: (_plain_greedy(stock, long), sample(stock, 10_000_000)))
        drafted = _tokens(_greedy(engine, long))
        ours = sample(engine, 0)
        greedy, theirs = base.result()
    rows += list(_greedy_rows(stock, long, drafted, *greedy))
    for name, tokens in ours.items():
        rows.append(_test(f"T 0.6, top-p 0.95, top-k 20, {name}", tokens, theirs[name]))
    _plant(engine)
    planted = _samples(engine, short, SAMPLED, num_samples, first_seed=0)
    rows.append(_test("a planted bug: q not as sampled", planted, theirs["plain"]))


def _test(case: str, ours: Sequence[int], theirs: Sequence[int]) -> Row:
    test = compare_samples(ours, theirs)
    verdict = "refused" if test.alarms(FALSE_ALARM_RATE) else "kept"
    say(f"{case}: p = {test.p_value:.2g} over {test.num_categories} tokens: equality {verdict}")
    return row(
        "same_distribution_p",
        f"{case}; {test.n[0]} and {test.n[1]} samples of output token {POSITION + 1}, "
        f"{test.num_categories} categories, refused below {FALSE_ALARM_RATE}",
        test.p_value,
        "p",
    )


def _samples(
    engine: VllmEngine,
    prompt: tuple[int, ...],
    sampling: SamplingConfig,
    count: int,
    *,
    first_seed: int,
) -> list[int]:
    """The token at `POSITION` of many outputs of one prompt."""
    done = engine.generate(
        [prompt] * count,
        max_new_tokens=SAMPLE_TOKENS,
        sampling=sampling,
        seeds=range(first_seed, first_seed + count),
    )
    say(f"{count} outputs sampled")
    return [one.token_ids[POSITION] for one in done if len(one.token_ids) > POSITION]


def _plant(engine: VllmEngine) -> None:
    """Break the plugin in the running engine: drafts are tested against a q they were not of."""
    engine.call("collective_rpc", misreport_draft_distribution)
    say("planted the bug")


def misreport_draft_distribution(worker: Any) -> None:
    """Scale the draft logits after sampling from them; runs inside the worker."""
    speculator = worker.model_runner.speculator
    propose = speculator.propose

    def wrong(*args: Any, **kwargs: Any) -> Any:
        drafts = propose(*args, **kwargs)
        speculator.draft_logits.mul_(0.7)
        return drafts

    speculator.propose = wrong


# --------------------------------------------------------------------------- greedy


def full_acceptance(checkpoint: Checkpoint, rows: list[Row]) -> None:
    """At ratio 1 a draft is the target's own choice, so every one is accepted.

    Exactly so only where both passes round alike: FlashAttention-3 for both of them. Any two
    kernels that round differently lose about one draft in eighty in bfloat16.
    """
    prompts = source_prompts(checkpoint.tokenizer, NUM_GREEDY, GREEDY_CONTEXT)
    capacity = Capacity(
        batch_size=NUM_GREEDY,
        max_model_len=GREEDY_CONTEXT + GREEDY_TOKENS + 1,
        gammas=(0, 6),
        max_ratio=1.0,
        config=FULL,
        gpu_memory_utilization=0.05,
        kv_cache_bytes=8 << 30,
        speculative_options={
            "sparse_attn_collection": "fa3", "sparse_attn_draft_attention": "fa3"
        },
    )  # fmt: skip
    with engine_of(checkpoint, capacity) as engine:
        for sampling, name in ((GREEDY, "greedy"), (SAMPLED, "T 0.6, top-p 0.95, top-k 20")):
            accepted, drafted = _counts(engine, FULL, prompts, sampling)
            say(f"ratio 1, {name}: {accepted} of {drafted} drafts accepted")
            case = f"{name}, gamma 6, {drafted} drafts, FlashAttention-3 in both passes"
            rows.append(row("acceptance_at_ratio_1", case, accepted / drafted, "share"))


def _counts(
    engine: VllmEngine,
    config: SpeculationConfig,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingConfig,
) -> tuple[int, int]:
    """Accepted and drafted tokens over whole outputs."""
    engine.configure(config)
    engine.call("vegas_start_recording")
    engine.generate(prompts, max_new_tokens=GREEDY_TOKENS, sampling=sampling)
    steps = engine.call("vegas_drain_records")
    return tuple(  # type: ignore[return-value]
        sum(sum(step[name]) for step in steps)
        for name in ("num_accepted_tokens", "num_draft_tokens")
    )


def _greedy(engine: VllmEngine, prompts: Sequence[tuple[int, ...]]) -> list[Completion]:
    return engine.generate(prompts, max_new_tokens=GREEDY_TOKENS, sampling=GREEDY)


def _plain_greedy(stock: VllmEngine, prompts: Sequence[tuple[int, ...]]) -> tuple[Outputs, Outputs]:
    """Stock's outputs, and its outputs for the same prompts in smaller batches."""
    plain = _tokens(_greedy(stock, prompts))
    control: Outputs = []
    for start in range(0, len(prompts), CONTROL_BATCH):
        control += _tokens(_greedy(stock, prompts[start : start + CONTROL_BATCH]))
    return plain, control


def _greedy_rows(
    stock: VllmEngine,
    prompts: Sequence[tuple[int, ...]],
    drafted: Outputs,
    plain: Outputs,
    control: Outputs,
) -> Iterator[Row]:
    """Drafted output against stock's, beside stock's against itself in smaller batches."""
    differing = {
        name: [
            (place, at)
            for place, (one, other) in enumerate(zip(outputs, plain, strict=True))
            if (at := first_difference(one, other)) is not None
        ]
        for name, outputs in (("drafted", drafted), ("control", control))
    }
    count = len(prompts)
    p = is_more_often(len(differing["drafted"]), count, len(differing["control"]), count)
    say(
        f"greedy: { ({name: len(found) for name, found in differing.items()}) } differ, p = {p:.3g}"
    )
    case = f"{count} requests x {GREEDY_TOKENS} tokens, bfloat16, gamma 6, ratio 0.05"
    for name, found in differing.items():
        yield row("greedy_outputs_differing", f"{case}, {name}", len(found) / count, "share")
    yield row("greedy_p", f"{case}, one-sided, alarm below {GREEDY_LEVEL}", p, "p")
    gaps = [
        _gap(stock, (*prompts[place], *plain[place][:at])) for place, at in differing["drafted"]
    ]
    yield row(
        "greedy_largest_gap",
        f"{case}: of the two likeliest tokens at a first difference; a near-tie is below "
        f"{NEAR_TIE}",
        max(gaps, default=0.0),
        "nat",
    )


def _gap(stock: VllmEngine, prefix: tuple[int, ...]) -> float:
    """How far apart stock's two likeliest next tokens are, in log probability."""
    (done,) = stock.generate([prefix], max_new_tokens=1, sampling=GREEDY, num_logprobs=2)
    first, second = done.top_logprobs[0][:2]
    return first[1] - second[1]


def _tokens(completions: Sequence[Completion]) -> Outputs:
    return [one.token_ids for one in completions]
