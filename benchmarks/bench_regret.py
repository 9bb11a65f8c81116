"""What the three-step sweep gives up against having measured the whole recorded grid."""

from __future__ import annotations

import argparse
from statistics import median

from benchmarks.grid import Grid
from benchmarks.results_file import Row, write_rows

NOISE = (0.015, 0.03, None)


def main() -> None:
    """Replay sweeps over the grid and write their regret and their cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweeps", type=int, default=20)
    args = parser.parse_args()
    grid = Grid.open()
    best = grid.best
    where = (
        f"SmolLM2-135M, {len(grid.settings)} settings, best gamma {best.num_speculative_tokens} at "
        f"ratio {best.sparsity_ratio:g}"
    )
    rows = [
        Row(
            claim="best_speedup_vs_gamma0",
            case=where,
            value=round(grid.rates[best] / grid.rates[grid.plain], 3),
            low=None,
            high=None,
            unit="x",
        )
    ]
    for noise_cv in NOISE:
        seeds = range(1 if noise_cv is None else args.sweeps)
        results = [grid.sweep(seed, noise_cv=noise_cv) for seed in seeds]
        played = "passes as recorded" if noise_cv is None else f"run-to-run noise {noise_cv:.1%}"
        case = f"{where}; {played}, {len(results)} sweeps"
        regrets = sorted(100 * grid.regret(result.selected) for result in results)
        shares = sorted(100 * result.num_settings / len(grid.settings) for result in results)
        rows += [
            _row("regret_pct", case, regrets, "% of decode throughput"),
            _row("settings_measured_pct", case, shares, "% of the grid"),
            _row("sweep_cost_s", case, sorted(result.spent_s for result in results), "s"),
            Row(
                claim="regret_at_most_3pct",
                case=case,
                value=sum(regret <= 3 for regret in regrets),
                low=None,
                high=None,
                unit=f"of {len(results)}",
            ),
        ]
    for row in rows:
        print(row)
    print(write_rows("regret_cpu", rows))


def _row(claim: str, case: str, values: list[float], unit: str) -> Row:
    """Median, smallest and largest."""
    return Row(
        claim=claim,
        case=f"{case} (median; low and high are the smallest and the largest)",
        value=round(median(values), 3),
        low=round(values[0], 3),
        high=round(values[-1], 3),
        unit=unit,
    )


if __name__ == "__main__":
    main()
