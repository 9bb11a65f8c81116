"""Accepted drafts per iteration against the fraction of KV kept: the paper's Figure 8."""

from __future__ import annotations

from benchmarks.acceptance import Bench, parse_arguments
from benchmarks.results_file import write_rows

RATIOS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.25, 0.5)
WINDOW_RATIOS = (0.03, 0.07, 0.15, 0.25)
GAMMA = 7


def main() -> None:
    """Measure and write."""
    args = parse_arguments(__doc__)
    bench = Bench.open(args)
    rows = bench.measure(algorithm="dense", num_speculative_tokens=GAMMA, sparsity_ratio=1.0)
    for ratio in RATIOS:
        rows += bench.measure(num_speculative_tokens=GAMMA, sparsity_ratio=ratio)
    for ratio in WINDOW_RATIOS:
        rows += bench.measure(
            algorithm="streaming_llm", num_speculative_tokens=GAMMA, sparsity_ratio=ratio
        )
    rows.append(bench.lossless_row("bench_sparsity"))
    print(write_rows("acceptance_reference", rows, device=args.device))


if __name__ == "__main__":
    main()
