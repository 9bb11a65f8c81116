"""The plugin in vLLM 0.33 on one GPU: `python -m benchmarks.bench_vllm PART`, each within minutes.

    throughput   decode throughput against stock, and Vegas against StreamingLLM, each tuned here;
                 all engines side by side on one GPU of 140 GB
    lossless     greedy output against stock, distribution of a sampled token, ratio 1
    served       the half of it in the mode people serve in
    invariant    the half of it in vLLM's batch-invariant mode
    both         throughput, and the other half of lossless, on the same engines
    shape        time per step and memory of Qwen3-8B's shape at 4 x 122K, random weights; with
                 `--tensor-parallel 2` split over two GPUs, and acceptance at ratio 1 there
    sweep        the default sweep of the command line: engine starts and GPU time

Every part writes its rows at its end, and its raw step records beside them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.results_file import RESULTS, Row, write_rows
from benchmarks.vllm_arms import SAMPLED, row, setting_of
from benchmarks.vllm_lossless import invariant, lossless, served
from benchmarks.vllm_shape import shape
from benchmarks.vllm_throughput import throughput
from vegas_runtime.backend import find_checkpoint
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import EXIT_CODES

PARTS = ("throughput", "lossless", "served", "invariant", "both", "shape", "sweep")


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
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs, of shape")
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
            shape(args.data, rows, tensor_parallel_size=args.tensor_parallel)
        else:
            name = "sweep_h200"
            sweep(args.model, args.data, rows)
    finally:
        for one in rows:
            print(one)
        if rows:
            print(write_rows(name, rows, device="cuda", folder=args.out))


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
    case = f"default plan, {setting_of(selected)} ({outcome['status']})"
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
