"""Whether vLLM with the plugin puts out what vLLM puts out: greedy, and in distribution.

Twice, since bfloat16 rounds otherwise in a verify pass than in a step of its own, as it does in a
batch of another size. vLLM's batch-invariant mode takes most of that away: what is left of a
difference there is the drafting's. In the mode people serve in, stock vLLM against itself is the
bar, at another batch size, and with its own n-gram drafts, which it verifies in one pass too; and
the plugin on FlashAttention-3 alone tells what the compiled kernels add.
"""

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
    Arm,
    engines_of,
    row,
    say,
    side_by_side,
    source_prompts,
)
from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.protocol import Capacity, StockMethod
from vegas_runtime.vllm_plugin.driving import Completion
from vegas_runtime.vllm_plugin.engine import VllmEngine
from vegas_runtime.vllm_plugin.engine_options import Checkpoint

GREEDY = SamplingConfig()
SAMPLINGS = {
    "T 0.6, top-p 0.95, top-k 20": SAMPLED,
    "T 0.6, top-p 0.95, top-k 20, penalties": replace(SAMPLED, repetition_penalty=1.1),
}
# Sparse enough that drafts are refused: an acceptance test that is wrong then shows.
SPARSE = BASE.replace(num_speculative_tokens=6, sparsity_ratio=0.05, min_tokens=8)
FULL = SPARSE.replace(sparsity_ratio=1.0)
WARM = SamplingConfig(temperature=0.6, seed=17)
# Of one token, so that there is always something to draft, most of it wrong.
NGRAM = StockMethod(
    name="ngram",
    num_speculative_tokens=6,
    options={"prompt_lookup_min": 1, "prompt_lookup_max": 3},
)
ON_FA3 = {"sparse_attn_collection": "fa3", "sparse_attn_draft_attention": "fa3"}
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}

NUM_GREEDY, GREEDY_TOKENS, GREEDY_CONTEXT = 64, 256, 2049
# Requests side by side in the control arm; the arms compared run all 64.
CONTROL_BATCH = 16
GREEDY_LEVEL = 0.01

SAMPLE_CONTEXT, SAMPLE_TOKENS = 385, 8
# Behind the first verification at every acceptance, within the first few iterations.
POSITION = 5
FALSE_ALARM_RATE = 0.001
BATCH = 256
CONTROL_SAMPLE_BATCH = 64

Outputs = list[tuple[int, ...]]


def lossless(checkpoint: Checkpoint, rows: list[Row], *, num_samples: int) -> None:
    """Equality on engines of their own, in either mode."""
    served(checkpoint, rows, num_samples=num_samples)
    invariant(checkpoint, rows, num_samples=num_samples)


def served(checkpoint: Checkpoint, rows: list[Row], *, num_samples: int) -> None:
    """Equality in the mode people serve in, stock against itself beside it."""
    capacity = _capacity(max_ratio=0.1, config=SPARSE)
    others = {
        "vLLM's own n-gram drafts against none": Arm(capacity=capacity, drafting=NGRAM),
        "plugin, FlashAttention-3 in every pass": Arm(
            capacity=replace(capacity, speculative_options=ON_FA3), is_stock=False
        ),
    }
    arms = [Arm(capacity=capacity), Arm(capacity=capacity, is_stock=False), *others.values()]
    with engines_of(checkpoint, arms) as (stock, engine, *rest):
        outputs = compare_outputs(
            stock, engine, checkpoint.tokenizer, rows, num_samples=num_samples
        )
        for (name, arm), other in zip(others.items(), rest, strict=True):
            if not arm.is_stock:
                other.configure(SPARSE)
            rows += list(_other_rows(stock, other, outputs, num_samples, name=name))


def invariant(checkpoint: Checkpoint, rows: list[Row], *, num_samples: int) -> None:
    """Acceptance at ratio 1 and equality, in vLLM's batch-invariant mode."""
    allow_planting()
    capacity = _capacity(max_ratio=1.0, config=FULL)
    arms = side_by_side(checkpoint, [capacity], capacity, environment=INVARIANT)
    with arms as ((stock,), engine):
        full_acceptance(engine, checkpoint.tokenizer, rows)
        outputs = _Outputs(stock, engine, checkpoint.tokenizer, num_samples)
        rows += list(_greedy_rows(stock, outputs, mode="batch-invariant"))
        rows += list(_distribution_rows(outputs, mode="batch-invariant"))
        _plant(engine)
        planted = _samples(engine, outputs.short, SAMPLED, num_samples, first_seed=0)
        theirs = outputs.theirs[next(iter(SAMPLINGS))]
        rows.append(_test("a planted bug: q not as sampled", planted, theirs))


def _capacity(*, max_ratio: float, config: SpeculationConfig) -> Capacity:
    return Capacity(
        batch_size=BATCH,
        max_model_len=GREEDY_CONTEXT + GREEDY_TOKENS + 1,
        gammas=(0, 6),
        max_ratio=max_ratio,
        config=config,
        gpu_memory_utilization=0.05,
        kv_cache_bytes=8 << 30,
    )


def allow_planting() -> None:
    """Let a function be sent into workers that start from now on; the bug is planted by one."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"


def compare_outputs(
    stock: VllmEngine, engine: VllmEngine, tokenizer: Any, rows: list[Row], *, num_samples: int
) -> _Outputs:
    """Greedy text and the distribution of a sampled token, each beside stock against itself."""
    outputs = _Outputs(stock, engine, tokenizer, num_samples)
    rows += list(_greedy_rows(stock, outputs, mode="as served"))
    rows += list(_distribution_rows(outputs, mode="as served"))
    for name, sampling in SAMPLINGS.items():
        control = _samples(
            stock,
            outputs.short,
            sampling,
            num_samples,
            first_seed=20_000_000,
            at_once=CONTROL_SAMPLE_BATCH,
        )
        case = f"as served, {name}, stock at {CONTROL_SAMPLE_BATCH} against {BATCH} at once"
        rows.append(_test(case, control, outputs.theirs[name]))
    return outputs


def _other_rows(
    stock: VllmEngine, other: VllmEngine, outputs: _Outputs, num_samples: int, *, name: str
) -> Iterator[Row]:
    """The same two questions of another engine that drafts, lossless by the same rule."""
    differing = _differing(_tokens(_greedy(other, outputs.long)), outputs.plain)
    yield from _difference_rows(stock, outputs, differing, case=_greedy_case("as served"), arm=name)
    for sampled, sampling in SAMPLINGS.items():
        tokens = _samples(other, outputs.short, sampling, num_samples, first_seed=30_000_000)
        yield _test(f"as served, {sampled}, {name}", tokens, outputs.theirs[sampled])


class _Outputs:
    """What both arms put out. Nothing is timed here, so they share the GPU.

    Attributes:
        long: prompts of the greedy outputs.
        short: the prompt whose continuation is sampled.
        drafted: greedy outputs of the drafting arm.
        plain: stock's.
        control: stock's, fewer requests at a time.
        ours: sampled tokens of the drafting arm, by the sampling's name.
        theirs: stock's.
    """

    def __init__(
        self, stock: VllmEngine, engine: VllmEngine, tokenizer: Any, num_samples: int
    ) -> None:
        self.long = source_prompts(tokenizer, NUM_GREEDY, GREEDY_CONTEXT)
        self.short = source_prompts(tokenizer, 1, SAMPLE_CONTEXT)[0]
        engine.configure(SPARSE)

        def sample(arm: VllmEngine, first_seed: int) -> dict[str, list[int]]:
            return {
                name: _samples(arm, self.short, sampling, num_samples, first_seed=first_seed)
                for name, sampling in SAMPLINGS.items()
            }

        with ThreadPoolExecutor(1) as pool:
            # Other seeds than the drafting arm's: equal ones would make equal tokens of both.
            base = pool.submit(lambda: (_plain_greedy(stock, self.long), sample(stock, 10_000_000)))
            self.drafted = _tokens(_greedy(engine, self.long))
            self.ours = sample(engine, 0)
            (self.plain, self.control), self.theirs = base.result()


def _distribution_rows(outputs: _Outputs, *, mode: str) -> Iterator[Row]:
    for name, tokens in outputs.ours.items():
        yield _test(f"{mode}, {name}", tokens, outputs.theirs[name])


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
    at_once: int | None = None,
) -> list[int]:
    """The token at `POSITION` of many outputs of one prompt, `at_once` in a batch."""
    done: list[Completion] = []
    for start in range(0, count, at_once or count):
        number = min(at_once or count, count - start)
        done += engine.generate(
            [prompt] * number,
            max_new_tokens=SAMPLE_TOKENS,
            sampling=sampling,
            seeds=range(first_seed + start, first_seed + start + number),
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


def full_acceptance(engine: VllmEngine, tokenizer: Any, rows: list[Row]) -> None:
    """At ratio 1 a draft's distribution is the target's own, so every one is accepted.

    Not so behind top-k and top-p: the draft's cut is right to 1/32 of a logit (`draft_sampling`),
    and a token it keeps too many is rejected.
    """
    prompts = source_prompts(tokenizer, NUM_GREEDY, GREEDY_CONTEXT)
    named = {
        "greedy": GREEDY,
        "T 0.6": WARM,
        "T 0.6, top-p 0.95, top-k 20": SAMPLED,
    }
    for name, sampling in named.items():
        accepted, drafted = _counts(engine, FULL, prompts, sampling)
        say(f"ratio 1, {name}: {accepted} of {drafted} drafts accepted")
        case = f"batch-invariant, {name}, gamma 6, {drafted} drafts"
        rows.append(row("acceptance_at_ratio_1", case, accepted / drafted, "share", digits=6))


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


def _greedy_rows(stock: VllmEngine, outputs: _Outputs, *, mode: str) -> Iterator[Row]:
    """Drafted output against stock's, beside stock's against itself in smaller batches."""
    differing = {
        name: _differing(tokens, outputs.plain)
        for name, tokens in (("drafted", outputs.drafted), ("control", outputs.control))
    }
    count = len(outputs.long)
    p = is_more_often(len(differing["drafted"]), count, len(differing["control"]), count)
    numbers = {name: len(found) for name, found in differing.items()}
    say(f"greedy, {mode}: {numbers} of {count} differ, p = {p:.3g}")
    case = _greedy_case(mode)
    for name, found in differing.items():
        yield from _difference_rows(stock, outputs, found, case=case, arm=name)
    yield row("greedy_p", f"{case}, one-sided, alarm below {GREEDY_LEVEL}", p, "p")


def _greedy_case(mode: str) -> str:
    return f"{mode}, {NUM_GREEDY} requests x {GREEDY_TOKENS} tokens, bfloat16, gamma 6, ratio 0.05"


def _differing(tokens: Outputs, plain: Outputs) -> list[tuple[int, int]]:
    """Requests whose output is another than stock's, and where it begins to be."""
    return [
        (place, at)
        for place, (one, other) in enumerate(zip(tokens, plain, strict=True))
        if (at := first_difference(one, other)) is not None
    ]


def _difference_rows(
    stock: VllmEngine,
    outputs: _Outputs,
    differing: Sequence[tuple[int, int]],
    *,
    case: str,
    arm: str,
) -> Iterator[Row]:
    """How many requests differ, and how far from a tie their first differences are."""
    share = len(differing) / len(outputs.long)
    yield row("greedy_outputs_differing", f"{case}, {arm}", share, "share")
    gaps = [
        _gap(stock, (*outputs.long[place], *outputs.plain[place][:at])) for place, at in differing
    ]
    yield row(
        "greedy_largest_gap",
        f"{case}, {arm}: of the two likeliest tokens at a first difference",
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
