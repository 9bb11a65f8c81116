"""The plugin in vLLM 0.33 on one GPU: `python -m benchmarks.bench_vllm PART`, each within minutes.

    throughput   decode throughput against stock, and Vegas against StreamingLLM, each tuned here;
                 all engines side by side on one GPU of 140 GB
    lossless     greedy output against stock, distribution of a sampled token, ratio 1
    served       the half of it in the mode people serve in
    invariant    the half of it in vLLM's batch-invariant mode
    both         throughput, and the other half of lossless, on the same engines
    shape        time per step and memory of Qwen3-8B's shape at 4 x 122K, random weights; with
                 `--tensor-parallel 2` split over two GPUs, and acceptance at ratio 1 there
    sweep        the default sweep of the command line: engine starts and GPU time; with
                 `--workers 2` each of two GPUs measures every point
    agree        no GPU: how far apart the sweeps run so far are, from the records they kept

Every part writes its rows at its end, and its raw step records beside them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.results_file import RESULTS, Row, write_rows
from benchmarks.vllm_lossless import invariant, lossless, served
from benchmarks.vllm_shape import shape
from benchmarks.vllm_sweeps import agree, kept_records, sweep
from benchmarks.vllm_throughput import throughput
from vegas_runtime.backend import find_checkpoint

PARTS = ("throughput", "lossless", "served", "invariant", "both", "shape", "sweep", "agree")


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
    parser.add_argument("--workers", type=int, default=1, help="GPUs that measure, of sweep")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--data", type=Path, default=RESULTS.parent / "data")
    args = parser.parse_args()
    name, is_replay = "vllm_h200", args.part == "agree"
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
            if args.part == "sweep":
                sweep(args.model, args.data, rows, num_workers=args.workers)
            else:
                agree(kept_records(args.data), rows)
    finally:
        for one in rows:
            print(one)
        if rows:
            facts = json.loads((args.out / f"{name}.json").read_text()) if is_replay else None
            print(write_rows(name, rows, device="cuda", facts=facts, folder=args.out))


if __name__ == "__main__":
    main()
