"""Which query rows to sum, per draft position: the paper's Figure 4 and Table 1."""

from __future__ import annotations

from benchmarks.acceptance import Bench, parse_arguments
from benchmarks.results_file import write_rows

RATIO = 0.07
ROWS = ("two", "all", "last_accepted", "first_middle_last", "accepted_only")
GAMMAS = (7, 15)


def main() -> None:
    """Measure and write."""
    args = parse_arguments(__doc__)
    bench = Bench.open(args)
    rows = []
    for gamma in GAMMAS:
        for which in ROWS:
            rows += bench.measure(rows=which, num_speculative_tokens=gamma, sparsity_ratio=RATIO)
        rows += bench.measure(
            algorithm="streaming_llm", num_speculative_tokens=gamma, sparsity_ratio=RATIO
        )
    for gamma in (3, 5, 10):
        rows += bench.measure(num_speculative_tokens=gamma, sparsity_ratio=RATIO)
    rows.append(bench.lossless_row("bench_rows"))
    print(write_rows("acceptance_reference", rows, device=args.device))


if __name__ == "__main__":
    main()
