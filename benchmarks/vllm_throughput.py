"""Decode throughput on vLLM: stock, and the plugin's methods, each tuned here, side by side.

All engines are on one GPU at the same time. Each algorithm is tuned on the prompts that the race
uses; in the race arms take turns, forth and back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.results_file import Row
from benchmarks.vllm_arms import (
    BASE,
    CONTEXT,
    REPORTED,
    SPARE_PROMPTS,
    VEGAS,
    Evidence,
    block_of,
    capacity_of,
    mean_of,
    pass_tokens,
    row,
    say,
    setting_of,
    side_by_side,
    source_prompts,
)
from benchmarks.vllm_lossless import allow_planting, compare_outputs
from vegas_runtime.backend import find_checkpoint
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.protocol import Capacity, PromptBlock
from vegas_runtime.vllm_plugin.engine import VllmEngine
from vegas_runtime.vllm_plugin.engine_options import Checkpoint
from vegas_tune.bench import Silent
from vegas_tune.laboratory import Laboratory
from vegas_tune.measure import Measurement, mean_ratio, unpaired_ratio
from vegas_tune.outcomes import Measured
from vegas_tune.plan import make_plan
from vegas_tune.sweep import SweepResult, run_sweep

# Around what wider sweeps chose: tuning has seconds here, and the race is what is published.
GAMMAS = (3, 4, 6)
RATIOS = (0.03, 0.05, 0.07)
# Half of them behind the race: what the machine did meanwhile shows.
STOCK_PASSES = 6
# Passes in which nobody arrives: what decoding alone gains.
CLOSED_PASSES = 2
RACE_ROUNDS = 5
TUNED = {
    "vegas": VEGAS,
    "streaming_llm": BASE.replace(algorithm="streaming_llm"),
}

# Of each arm, by its name.
Passes = dict[str, list[Measurement]]


def throughput(
    model: str,
    batches: Sequence[int],
    rows: list[Row],
    *,
    seconds: float,
    data: Path,
    num_samples: int = 0,
) -> None:
    """Both arms at every batch size; one plugin engine start for all of them.

    Args:
        model: what to serve.
        batches: requests running.
        rows: gains figures.
        seconds: of tuning at batch 100; a little more above, less below.
        data: where raw records are kept.
        num_samples: of `lossless`, on the same engines afterwards; 0 leaves it out.
    """
    checkpoint = find_checkpoint(model, report=say)
    if num_samples:
        allow_planting()
    sizes = sorted(batches)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(source_prompts, checkpoint.tokenizer, sizes[-1] + SPARE_PROMPTS)
        capacities = [_capacity(size, checkpoint) for size in sizes]
        with side_by_side(checkpoint, capacities, capacities[-1]) as (stock, engine):
            prompts = reading.result()
            say(f"{len(prompts)} prompts of {CONTEXT} tokens")
            evidence = Evidence(data / f"vllm_h200_{'_'.join(map(str, sizes))}.jsonl.z")
            # Smaller batches use a part of the larger ones' prompts: they are prefilled once.
            blocks = [block_of(prompts[: size + SPARE_PROMPTS], size) for size in sizes]
            try:
                base = [
                    _stock(arm, block, evidence) for arm, block in zip(stock, blocks, strict=True)
                ]
                # The largest first: what the smaller ones need is cached then.
                for arm, block, passes in list(zip(stock, blocks, base, strict=True))[::-1]:
                    size = block.batch_size
                    say(f"batch {size}")
                    share = (size / 100) ** 0.3
                    arms = _tuned(engine, block, evidence, seconds=seconds * share)
                    passes |= _race(engine, block, arms, evidence)
                    passes["stock"] += _open_passes(arm, block, evidence, first=STOCK_PASSES // 2)
                    rows += _rows(size, arms, passes)
            finally:
                evidence.write()
                rows.append(_not_steady(sizes, evidence))
            if num_samples:
                compare_outputs(
                    stock[-1], engine, checkpoint.tokenizer, rows, num_samples=num_samples
                )


def _not_steady(sizes: Sequence[int], evidence: Evidence) -> Row:
    """How many of the passes that figures rest on were not steady, and which."""
    which = ", ".join(dict.fromkeys(evidence.not_steady)) or "none"
    case = f"b{', b'.join(map(str, sizes))}: {which}"
    return row("passes_not_steady", case, float(len(evidence.not_steady)), "passes")


def _capacity(batch_size: int, checkpoint: Checkpoint) -> Capacity:
    return capacity_of(
        checkpoint,
        batch_size,
        num_prompts=batch_size + SPARE_PROMPTS,
        context=CONTEXT,
        gammas=GAMMAS,
        max_ratio=max(RATIOS),
    )


def _stock(engine: VllmEngine, block: PromptBlock, evidence: Evidence) -> Passes:
    """Stock vLLM's passes ahead of the race, and those in which nobody arrives."""
    engine.prepare(block)
    return {
        "stock": _open_passes(engine, block, evidence, first=0),
        "stock closed": [
            evidence.take(
                engine,
                block,
                f"stock b{block.batch_size} closed",
                replicate=100 + number,
                has_arrivals=False,
            )
            for number in range(CLOSED_PASSES)
        ],
    }


def _open_passes(
    engine: VllmEngine, block: PromptBlock, evidence: Evidence, *, first: int
) -> list[Measurement]:
    """Half of stock vLLM's passes under arrivals."""
    return [
        evidence.take(engine, block, f"stock b{block.batch_size}", replicate=number)
        for number in range(first, first + STOCK_PASSES // 2)
    ]


def _tuned(
    engine: VllmEngine, block: PromptBlock, evidence: Evidence, *, seconds: float
) -> dict[str, SpeculationConfig]:
    """Each arm's setting: the methods at their best, and what stands beside them."""
    engine.prepare(block)
    vegas = _tune(engine, block, "vegas", seconds, evidence)
    return {
        "vegas": vegas,
        "vegas_rows_two": vegas.replace(rows="two"),
        "streaming_llm": _tune(engine, block, "streaming_llm", seconds * 0.7, evidence),
        "plain": BASE,
    }


def _race(
    engine: VllmEngine,
    block: PromptBlock,
    arms: Mapping[str, SpeculationConfig],
    evidence: Evidence,
) -> Passes:
    """Arms in turns, then each alone in passes in which nobody arrives."""
    size = block.batch_size
    passes: Passes = {name: [] for name in arms}
    for number in range(RACE_ROUNDS):
        # Forth and back: linear drift hits every arm alike over two rounds.
        for name in list(arms) if number % 2 == 0 else list(arms)[::-1]:
            engine.configure(arms[name])
            what = f"race b{size} {name} {setting_of(arms[name])}"
            passes[name].append(evidence.take(engine, block, what, replicate=500 + number))
    for name in ("vegas", "streaming_llm", "plain"):
        engine.configure(arms[name])
        what = f"closed b{size} {name} {setting_of(arms[name])}"
        passes[f"{name} closed"] = [
            evidence.take(engine, block, what, replicate=800 + number, has_arrivals=False)
            for number in range(CLOSED_PASSES)
        ]
    engine.configure(REPORTED)
    what = f"b{size} {setting_of(REPORTED)}"
    passes["reported"] = [evidence.take(engine, block, what, replicate=900)]
    return passes


def _tune(
    engine: VllmEngine,
    block: PromptBlock,
    algorithm: str,
    seconds: float,
    evidence: Evidence,
) -> SpeculationConfig:
    """The three steps and validation, as the command line runs them, on these prompts."""
    plan = make_plan(
        TUNED[algorithm],
        [block],
        budget_s=seconds,
        # Half of what is published rests on: candidates are many, and repeated.
        tokens=pass_tokens(block.batch_size) // 2,
        ratios=RATIOS,
        gammas=GAMMAS,
        rounds=1,
        settle_rounds=1,
        sparsity_rounds=2,
    )
    lab = Laboratory(plan, engine, [block])
    result = run_sweep(plan, lab, Silent())
    for outcome in result.outcomes:
        if isinstance(outcome, Measured):
            evidence.keep(f"tune b{plan.batch_size} {algorithm} {outcome.point.key}", outcome.run)
        else:
            say(f"  failed: {outcome.point.key}: {outcome.reason}")
    chosen = result.selected
    if not chosen.num_speculative_tokens:
        # The race is between drafting settings; whether to draft at all is its own row.
        chosen = _fastest_drafting(result)
    say(
        f"  {algorithm}: {setting_of(chosen)} ({result.status}) after {len(result.outcomes)} "
        f"passes of {result.num_settings} settings in {result.spent_s:.0f} s"
    )
    return chosen


def _fastest_drafting(result: SweepResult) -> SpeculationConfig:
    """The fastest setting that drafts, finalists first."""
    if result.finalists:
        return result.finalists[0]
    drafting = [one for one in result.measured() if one.point.config.num_speculative_tokens]
    if not drafting:
        raise SystemExit(f"{result.spent_s:.0f} s of tuning measured no setting that drafts.")
    return max(drafting, key=lambda one: one.figures.decode_tok_s.est).point.config


def _rows(
    size: int,
    arms: Mapping[str, SpeculationConfig],
    passes: Passes,
) -> list[Row]:
    rates = {name: [one.decode_tok_s.est for one in found] for name, found in passes.items()}
    base, closed = rates["stock"], rates["stock closed"]
    logs = {name: [math.log(rate) for rate in found] for name, found in rates.items()}

    def paired(one: str, other: str) -> Any:
        pairs = zip(logs[one], logs[other], strict=True)
        return mean_ratio([above - below for above, below in pairs])

    case = f"b{size}"
    rows = [
        row("speedup_vs_stock", case, unpaired_ratio(rates["vegas"], base), "x"),
        row("speedup_vs_gamma0", case, paired("vegas", "plain"), "x"),
        row("vegas_vs_streaming_llm", case, paired("vegas", "streaming_llm"), "x"),
        row("rows_all_vs_two", case, paired("vegas", "vegas_rows_two"), "x"),
        row("plugin_gamma0_vs_stock", case, unpaired_ratio(rates["plain"], base), "x"),
        row("stock_decode", case, mean_of(base), "tok/s"),
        row("stock_decode", f"{case}, no arrivals", mean_of(closed), "tok/s"),
        *(
            row(
                "speedup_vs_stock_no_arrivals",
                f"{case} {name}",
                unpaired_ratio(rates[f"{name} closed"], closed),
                "x",
            )
            for name in ("vegas", "streaming_llm", "plain")
        ),
    ]  # fmt: skip
    for name in ("vegas", "vegas_rows_two", "streaming_llm"):
        last = passes[name][-1]
        named = f"{case} {name} {setting_of(arms[name])}"
        rows.append(row("decode", named, mean_of(rates[name]), "tok/s"))
        if last.accepted is not None:
            rows.append(row("tuned_acceptance_length", named, _length(last), "tokens"))
        rows += [
            row("phase_ms", f"{named} {phase.removesuffix('_s')}", time.scaled(1000), "ms")
            for phase, time in last.phases.items()
            if time.est > 0
        ]
    (reported,) = passes["reported"]
    named = f"{case} {setting_of(REPORTED)}"
    rows.append(row("acceptance_length", named, _length(reported), "tokens"))
    rows += [
        row("first_i_drafts_accepted", f"{named} i={index}", share, "probability")
        for index, share in enumerate(reported.survival, start=1)
    ]
    return rows


def _length(figures: Measurement) -> Any:
    """Acceptance length, bonus token included, with its interval."""
    accepted = figures.accepted
    assert accepted is not None
    return type(accepted)(
        est=accepted.est + 1, low=accepted.low + 1, high=accepted.high + 1, n=accepted.n
    )
