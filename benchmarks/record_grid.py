"""Record a full grid (every candidate ratio x every candidate gamma, and plain decoding).

The rows are replayed by `bench_regret.py` and the tests: they show what a sweep loses against
having measured everything. Settings come in random order. A sweep compares settings side by side;
a grid cannot, and the speed of a shared machine drifts by 20 % within minutes. So a short plain
pass is timed every few settings, and each pass's times are divided by the machine's pace at that
moment (interpolated, 1 at the median). Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.engine.reference import ReferenceEngine
from vegas_runtime.protocol import PromptBlock
from vegas_runtime.records import Run, write_json_lines
from vegas_tune.plan import gamma_ladder
from vegas_tune.request import PACKAGED
from vegas_tune.workload import build_workload
from vegas_tune.workload_spec import WorkloadSpec

DATA = Path(__file__).parent / "data"
PLAIN = SpeculationConfig(
    num_speculative_tokens=0, sparsity_ratio=1.0, min_tokens=PACKAGED.min_tokens
)
# Settings between two timings of the pace, and plain steps of one timing.
PACE_EVERY = 4
PACE_STEPS = 10


def main() -> None:
    """Measure every setting and write the grid."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--blocks", type=int, default=PACKAGED.blocks)
    parser.add_argument("--replicates", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=PACKAGED.tokens)
    parser.add_argument("--out", type=Path, default=DATA / "grid_smollm2_cpu.jsonl.z")
    args = parser.parse_args()
    engine = ReferenceEngine.open(model=args.model, max_num_speculative_tokens=15)
    spec = WorkloadSpec(
        context_len=PACKAGED.context,
        batch_size=PACKAGED.batch,
        num_waiting=PACKAGED.waiting,
        num_blocks=args.blocks,
        max_new_tokens=PACKAGED.max_new_tokens,
    )
    workload = build_workload(spec, engine.tokenizer, max_model_len=8192)
    header = {
        "kind": "grid",
        "info": asdict(engine.info),
        "workload": workload.describe(),
        "blocks": [
            {
                "sha256": block.sha256,
                "prompt_lens": [len(prompt) for prompt in block.prompts],
                "prefill_s": round(prefill_s(engine, block), 3),
            }
            for block in workload.blocks
        ],
        "tokens": args.tokens,
    }
    rows: list[dict[str, Any]] = [header]
    started = time.monotonic()
    for replicate in range(args.replicates):
        for block in workload.blocks:
            order = settings()
            random.Random(f"{replicate}/{block.index}").shuffle(order)
            for run, pace in record(engine, block, order, replicate, args.tokens):
                rows.append(
                    {
                        "block": block.index,
                        "replicate": replicate,
                        "pace": round(pace, 4),
                        "run": run.to_dict(),
                    }
                )
            print(
                f"replicate {replicate} block {block.index}: {len(rows) - 1} runs, "
                f"{time.monotonic() - started:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            args.out.parent.mkdir(exist_ok=True)
            write_json_lines(args.out, rows)


def settings() -> list[SpeculationConfig]:
    """Plain decoding, and every candidate gamma at every candidate ratio."""
    drafting = [
        PLAIN.replace(num_speculative_tokens=gamma, sparsity_ratio=ratio)
        for gamma in gamma_ladder(15)
        for ratio in PACKAGED.ratios
    ]
    return [PLAIN, *drafting]


def prefill_s(engine: ReferenceEngine, block: PromptBlock) -> float:
    """Time to prefill a block."""
    before = engine.now_s()
    engine.prepare(block)
    return engine.now_s() - before


def record(
    engine: ReferenceEngine,
    block: PromptBlock,
    order: list[SpeculationConfig],
    replicate: int,
    tokens: int,
) -> list[tuple[Run, float]]:
    """One pass of every setting, times divided by the machine's pace.

    Returns:
        Each pass and the pace it was divided by (above 1: the machine was slow).
    """
    runs: list[Run] = []
    places: list[int] = []
    plain_s: list[float] = []
    for place, config in enumerate(order):
        if place % PACE_EVERY == 0:
            places.append(place)
            plain_s.append(plain_step_s(engine, block))
        runs.append(decode(engine, block, config, replicate, tokens))
    places.append(len(order))
    plain_s.append(plain_step_s(engine, block))
    # A run lies in the middle of its place.
    paces = np.interp(np.arange(len(order)) + 0.5, places, np.array(plain_s) / median(plain_s))
    return [(scaled(run, float(pace)), float(pace)) for run, pace in zip(runs, paces, strict=True)]


def decode(
    engine: ReferenceEngine,
    block: PromptBlock,
    config: SpeculationConfig,
    replicate: int,
    tokens: int,
) -> Run:
    """One pass at a setting."""
    engine.configure(config)
    return engine.run(
        block, replicate=replicate, max_tokens=tokens, deadline_s=engine.now_s() + 600
    )


def plain_step_s(engine: ReferenceEngine, block: PromptBlock) -> float:
    """Median time of a plain decoding step, now."""
    run = decode(engine, block, PLAIN, 0, PACE_STEPS * block.batch_size)
    return median(step.duration_s for step in run.steps if step.kind == "decode")


def scaled(run: Run, pace: float) -> Run:
    """A pass as a machine at the median pace would have run it."""
    steps = tuple(
        replace(
            step,
            draft_s=step.draft_s / pace,
            select_s=step.select_s / pace,
            verify_s=step.verify_s / pace,
            other_s=step.other_s / pace,
        )
        for step in run.steps
    )
    return replace(run, steps=steps, elapsed_s=run.elapsed_s / pace)


if __name__ == "__main__":
    main()
