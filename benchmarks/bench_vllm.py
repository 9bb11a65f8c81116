"""The plugin in vLLM 0.33 on one GPU: `python -m benchmarks.bench_vllm PART`, each within minutes.

    throughput   decode throughput against stock, and Vegas against StreamingLLM, each tuned here;
                 all engines side by side on one GPU of 140 GB
    lossless     greedy output against stock, distribution of a sampled token, ratio 1
    served       the half of it in the mode people serve in
    invariant    the half of it in vLLM's batch-invariant mode
    both         throughput, and the other half of lossless, on the same engines
    shape        time per step and memory of Qwen3-8B's shape at 4 x 122K, random weights
    sweep        the default sweep of the command line: engine starts and GPU time

Every part writes its rows at its end, and its raw step records beside them.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.results_file import RESULTS, Row, write_rows
from benchmarks.vllm_arms import (
    BASE,
    CONTEXT,
    SAMPLED,
    SPARE_PROMPTS,
    VEGAS,
    Evidence,
    block_of,
    capacity_of,
    engine_of,
    mean_of,
    pass_tokens,
    row,
    say,
    side_by_side,
    source_prompts,
)
from benchmarks.vllm_lossless import (
    allow_planting,
    compare_outputs,
    invariant,
    lossless,
    served,
)
from vegas_runtime.backend import Capacity, PromptBlock, find_checkpoint
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import EXIT_CODES
from vegas_runtime.gpu_memory import first_device, used_bytes
from vegas_runtime.machine import nvidia_smi
from vegas_runtime.vllm_plugin.engine import VllmEngine
from vegas_runtime.vllm_plugin.engine_options import Checkpoint
from vegas_tune.bench import Silent
from vegas_tune.laboratory import Laboratory, Measured
from vegas_tune.measure import Measurement, mean_ratio, unpaired_ratio
from vegas_tune.plan import make_plan
from vegas_tune.sweep import SweepResult, run_sweep

# Around what wider sweeps chose: tuning has seconds here, and the race is what is published.
GAMMAS = (3, 4, 6)
RATIOS = (0.03, 0.05, 0.07)
STOCK_PASSES = 3
# Passes in which nobody arrives: what decoding alone gains.
CLOSED_PASSES = 2
RACE_ROUNDS = 3
TUNED = {
    "vegas": VEGAS,
    "streaming_llm": BASE.replace(algorithm="streaming_llm"),
}
# The setting whose acceptance the prototype reported.
REPORTED = BASE.replace(num_speculative_tokens=6, sparsity_ratio=0.07)

PARTS = ("throughput", "lossless", "served", "invariant", "both", "shape", "sweep")

# Of each arm, by its name.
Passes = dict[str, list[Measurement]]


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batches", default="32,128,256")
    parser.add_argument("--seconds", type=float, default=35.0, help="of tuning at batch 100")
    parser.add_argument("--samples", type=int, default=20_480, help="of lossless, for each arm")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--data", type=Path, default=RESULTS.parent / "data")
    args = parser.parse_args()
    name = "vllm_h200"
    # Filled as figures come, so that a run that is cut off publishes those it reached.
    rows: list[Row] = []
    try:
        if args.part in ("throughput", "both"):
            throughput(
                args.model,
                [int(part) for part in args.batches.split(",")],
                rows,
                seconds=args.seconds,
                data=args.data,
                num_samples=args.samples if args.part == "both" else 0,
            )
        elif args.part == "lossless":
            lossless(find_checkpoint(args.model), rows, num_samples=args.samples)
        elif args.part == "served":
            served(find_checkpoint(args.model), rows, num_samples=args.samples)
        elif args.part == "invariant":
            invariant(find_checkpoint(args.model), rows, num_samples=args.samples)
        elif args.part == "shape":
            shape(args.data, rows)
        else:
            name = "sweep_h200"
            sweep(args.model, args.data, rows)
    finally:
        for one in rows:
            print(one)
        if rows:
            print(write_rows(name, rows, device="cuda", folder=args.out))


# --------------------------------------------------------------------------- throughput


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
                for block, passes in list(zip(blocks, base, strict=True))[::-1]:
                    size = block.batch_size
                    say(f"batch {size}")
                    share = (size / 100) ** 0.3
                    rows += _plugin(engine, block, passes, evidence, seconds=seconds * share)
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
    engine.prepare(block)
    what = f"stock b{block.batch_size}"
    return {
        "stock": [
            evidence.take(engine, block, what, replicate=number) for number in range(STOCK_PASSES)
        ],
        "stock closed": [
            evidence.take(
                engine, block, f"{what} closed", replicate=100 + number, has_arrivals=False
            )
            for number in range(CLOSED_PASSES)
        ],
    }


def _plugin(
    engine: VllmEngine,
    block: PromptBlock,
    stock: Passes,
    evidence: Evidence,
    *,
    seconds: float,
) -> list[Row]:
    size = block.batch_size
    engine.prepare(block)
    vegas = _tune(engine, block, "vegas", seconds, evidence)
    stream = _tune(engine, block, "streaming_llm", seconds * 0.7, evidence)
    arms = {
        "vegas": vegas,
        "vegas_rows_two": vegas.replace(rows="two"),
        "streaming_llm": stream,
        "plain": BASE,
    }
    passes: Passes = {name: [] for name in arms} | stock
    for number in range(RACE_ROUNDS):
        # Forth and back: linear drift hits every arm alike over two rounds.
        for name in list(arms) if number % 2 == 0 else list(arms)[::-1]:
            engine.configure(arms[name])
            what = f"race b{size} {name} {_named(arms[name])}"
            passes[name].append(evidence.take(engine, block, what, replicate=500 + number))
    for name in ("vegas", "streaming_llm", "plain"):
        engine.configure(arms[name])
        what = f"closed b{size} {name} {_named(arms[name])}"
        passes[f"{name} closed"] = [
            evidence.take(engine, block, what, replicate=800 + number, has_arrivals=False)
            for number in range(CLOSED_PASSES)
        ]
    engine.configure(REPORTED)
    reported = evidence.take(engine, block, f"b{size} {_named(REPORTED)}", replicate=900)
    return _rows(size, arms, passes, reported)


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
        f"  {algorithm}: {_named(chosen)} ({result.status}) after {len(result.outcomes)} passes "
        f"of {result.num_settings} settings in {result.spent_s:.0f} s"
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
    reported: Measurement,
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
        named = f"{case} {name} {_named(arms[name])}"
        rows.append(row("decode", named, mean_of(rates[name]), "tok/s"))
        if last.accepted is not None:
            rows.append(row("tuned_acceptance_length", named, _length(last), "tokens"))
        rows += [
            row("phase_ms", f"{named} {phase.removesuffix('_s')}", time.scaled(1000), "ms")
            for phase, time in last.phases.items()
            if time.est > 0
        ]
    named = f"{case} {_named(REPORTED)}"
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


def _named(config: SpeculationConfig) -> str:
    gamma = config.num_speculative_tokens
    return f"gamma {gamma}, ratio {config.sparsity_ratio:g}" if gamma else "gamma 0"


# --------------------------------------------------------------------------- a large shape

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "vocab_size": 151936, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
SHAPE_CONTEXT = 122_001
SHAPE_BATCH = 4
SHAPE_TOKENS = 4 * 64


def shape(data: Path, rows: list[Row]) -> None:
    """Time of a step at Qwen3-8B's shape, both arms; random weights, so no acceptance is told."""
    folder = data / "qwen3_8b_shape"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    facts = {"id": "Qwen3-8B's shape", "dtype": "bfloat16"}
    checkpoint = Checkpoint(folder=folder, tokenizer=None, facts=facts)
    capacity = Capacity(
        batch_size=SHAPE_BATCH,
        max_model_len=SHAPE_CONTEXT + 1024,
        gammas=(0, 6),
        max_ratio=0.07,
        config=BASE,
        load_format="dummy",
    )
    prompts = [
        tuple((31 * place + 7 * index) % 150_000 for index in range(SHAPE_CONTEXT))
        for place in range(SHAPE_BATCH)
    ]
    # Long enough that nobody ends and is prefilled again while the steps are timed.
    block = block_of(prompts, SHAPE_BATCH, max_new_tokens=1000)
    evidence = Evidence(data / "vllm_h200_shape.jsonl.z")
    case = f"Qwen3-8B's shape, {SHAPE_BATCH} x {SHAPE_CONTEXT}"
    for arm in ("stock", "plugin"):
        with engine_of(checkpoint, capacity, is_stock=arm == "stock") as engine:
            started_s = time.monotonic()
            engine.prepare(block)
            say(f"prefilled in {time.monotonic() - started_s:.0f} s")
            if arm == "plugin":
                engine.configure(REPORTED)
            run = engine.run(
                block, replicate=0, max_tokens=SHAPE_TOKENS, deadline_s=engine.now_s() + 60
            )
            evidence.keep(arm, run)
            steps = [one for one in run.steps if one.kind == "decode"][2:]
            for phase in ("verify_s", "draft_s", "select_s", "other_s"):
                values = [getattr(step, phase) for step in steps]
                if any(values):
                    named = f"{case}, {arm} {phase.removesuffix('_s')}"
                    rows.append(row("step_ms", named, 1000 * mean_of(values), "ms"))
            rows.append(
                row("step_ms", f"{case}, {arm}", 1000 * mean_of(s.duration_s for s in steps), "ms")
            )
            rows += _memory_rows(f"{case}, {arm}", capacity)
            if arm == "plugin":
                buffers = _buffers(engine.status)
                rows.append(row("plugin_buffers_gib", case, buffers / 2**30, "GiB"))
    evidence.write()


def _memory_rows(case: str, capacity: Capacity) -> list[Row]:
    """GPU memory in use now, everything of the process counted, and what it may be."""
    device = first_device()
    used, total = used_bytes(device), nvidia_smi("memory.total", device=str(device))
    rows = []
    if used is not None:
        rows.append(row("gpu_memory_used_gib", case, used / 2**30, "GiB"))
    if total is not None and total.isdecimal():
        allowed = int(total) / 2**10 * capacity.gpu_memory_utilization
        rows.append(row("gpu_memory_allowed_gib", case, allowed, "GiB"))
    return rows


def _buffers(status: Mapping[str, Any]) -> int:
    """Bytes of score, index and draft buffers on one GPU."""
    worker = status["workers"][0]
    return int(worker["collector_bytes"] + worker["draft_bytes"])


# --------------------------------------------------------------------------- the command line

STARTS = ("engine_starts", "stock_engine_starts")
FIGURES = {"decode_tok_s": "tok/s", "speedup_vs_stock": "x", "speedup_vs_gamma0": "x"}


def sweep(model: str, data: Path, rows: list[Row]) -> None:
    """The default sweep of the command line, a process of its own, timed from outside."""
    folder = data / f"sweep_h200_{time.time_ns()}"
    command = [
        sys.executable, "-m", "vegas_tune.cli", "sweep", "--model", model, "--backend", "vllm",
        "--temperature", str(SAMPLED.temperature), "--top-p", str(SAMPLED.top_p),
        "--top-k", str(SAMPLED.top_k), "--run-dir", str(folder), "--json",
    ]  # fmt: skip
    started_s = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    wall_s = time.monotonic() - started_s
    if done.returncode not in (EXIT_CODES["ok"], EXIT_CODES["inconclusive"]):
        raise SystemExit(f"the sweep ended with {done.returncode}: {done.stdout}")
    outcome = json.loads(done.stdout)
    selected = SpeculationConfig.from_dict(outcome["selected"])
    case = f"default plan, {_named(selected)} ({outcome['status']})"
    use = outcome["engine_use"]
    rows += [
        *(row(name, case, float(use[name]), "starts") for name in STARTS),
        row("gpu_minutes", case, use["gpu_minutes"], "min"),
        row("wall_s", case, wall_s, "s"),
    ]
    for claim, unit in FIGURES.items():
        found = (outcome["results"] or {}).get(claim)
        if found is not None:
            ends = {"low": found.get("low"), "high": found.get("high")}
            rows.append(Row(claim=claim, case=case, value=found["est"], unit=unit, **ends))


if __name__ == "__main__":
    main()
