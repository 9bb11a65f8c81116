"""Drafts accepted on the kernels' operations beside the reference path, same model and prompts.

The reference path selects by exact scores in float32. The operations collect rows `two` exactly,
in one-byte codes, and other rows against a normaliser known beforehand (`bench_hint`): this shows
what either is worth in accepted drafts. On a CPU the operations' own oracle runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from benchmarks.acceptance import Bench, parse_arguments
from benchmarks.results_file import write_rows
from vegas_runtime.config import Scope
from vegas_runtime.engine.paged import AttentionChoice

GAMMA = 7
PATHS: tuple[AttentionChoice, ...] = ("reference", "kernels")


def main() -> None:
    """Measure, and write each figure as it comes: on a CPU the operations' oracle is slow."""
    args = parse_arguments(__doc__)
    benches = {attention: Bench.open(args, attention) for attention in PATHS}
    for ratio in (0.07, 0.03):
        for scope in get_args(Scope):
            for which in ("two", "all"):
                for attention, bench in benches.items():
                    measured = bench.measure(
                        rows=which,
                        scope=scope,
                        num_speculative_tokens=GAMMA,
                        sparsity_ratio=ratio,
                    )
                    suffix = f"scope={scope} {args.dtype} attention={attention}"
                    write_rows(
                        "kernel_path",
                        [
                            replace(row, case=f"{row.case} {suffix}")
                            for row in measured
                            if row.claim == "accepted_per_iteration"
                        ],
                        device=args.device,
                    )


if __name__ == "__main__":
    main()
