"""Whether vLLM with the plugin puts out what vLLM puts out: greedy, and in distribution."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.equality import compare_samples, first_difference, is_more_often
from benchmarks.results_file import Row
from benchmarks.vllm_arms import BASE, SAMPLED, engine_of, row, say, source_prompts
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
    """Must-shows 1 and 2: one start of the plugin's engine, one of stock vLLM's."""
    long = source_prompts(checkpoint.tokenizer, NUM_GREEDY, GREEDY_CONTEXT)
    short = source_prompts(checkpoint.tokenizer, 1, SAMPLE_CONTEXT)[0]
    capacity = Capacity(
        batch_size=BATCH,
        max_model_len=GREEDY_CONTEXT + GREEDY_TOKENS + 1,
        gammas=(0, 6),
        max_ratio=1.0,
        config=SPARSE,
    )
    # Lets a function be sent into the worker, which is how the bug is planted.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    with engine_of(checkpoint, capacity) as engine:
        rows += list(_full_acceptance(engine, long))
        engine.configure(SPARSE)
        drafted = _tokens(_greedy(engine, long))
        ours = {
            name: _samples(engine, short, sampling, num_samples, first_seed=0)
            for name, sampling in (("plain", SAMPLED), ("penalties", PENALISED))
        }
        _plant(engine)
        planted = _samples(engine, short, SAMPLED, num_samples, first_seed=0)
    with engine_of(checkpoint, capacity, is_stock=True) as engine:
        rows += list(_greedy_rows(engine, long, drafted))
        for name, sampling in (("plain", SAMPLED), ("penalties", PENALISED)):
            # Other seeds than the drafting arm's: equal ones would make equal tokens of both.
            theirs = _samples(engine, short, sampling, num_samples, first_seed=10_000_000)
            rows.append(_test(f"T 0.6, top-p 0.95, top-k 20, {name}", ours[name], theirs))
            if name == "plain":
                rows.append(_test("a planted bug: q not as sampled", planted, theirs))


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


def _full_acceptance(engine: VllmEngine, prompts: Sequence[tuple[int, ...]]) -> Iterator[Row]:
    """At ratio 1 a draft is the target's own choice, so every one is accepted."""
    for sampling, name in ((GREEDY, "greedy"), (SAMPLED, "T 0.6, top-p 0.95, top-k 20")):
        accepted, drafted = _counts(engine, FULL, prompts, sampling)
        say(f"ratio 1, {name}: {accepted} of {drafted} drafts accepted")
        yield row(
            "acceptance_at_ratio_1",
            f"{name}, gamma 6, {drafted} drafts (none is accepted less where rounding never "
            "differs between one row and seven)",
            accepted / drafted,
            "share",
        )


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


def _greedy_rows(
    stock: VllmEngine, prompts: Sequence[tuple[int, ...]], drafted: Outputs
) -> Iterator[Row]:
    """Drafted output against stock's, beside stock's against itself in smaller batches."""
    plain = _tokens(_greedy(stock, prompts))
    control: Outputs = []
    for start in range(0, len(prompts), CONTROL_BATCH):
        control += _tokens(_greedy(stock, prompts[start : start + CONTROL_BATCH]))
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
