"""What the three-step sweep gives up against having measured the whole recorded grid."""

from __future__ import annotations

import argparse
from statistics import median

from benchmarks.grid import Grid
from benchmarks.results_file import Row, write_rows


def main() -> None:
    """Replay sweeps over the grid and write their regret and their cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweeps", type=int, default=20)
    args = parser.parse_args()
    grid = Grid.open()
    results = [grid.sweep(seed) for seed in range(args.sweeps)]
    regrets = sorted(100 * grid.regret(result.selected) for result in results)
    shares = sorted(100 * result.num_settings / len(grid.settings) for result in results)
    costs = sorted(result.spent_s for result in results)
    plain, best = grid.rates[grid.plain], grid.best
    case = (
        f"SmolLM2-135M, {len(grid.settings)} settings, {args.sweeps} replayed sweeps; the grid's "
        f"best is gamma {best.num_speculative_tokens} at ratio {best.sparsity_ratio:g}"
    )
    rows = [
        _row("regret_pct", case, regrets, "% of decode throughput"),
        _row("settings_measured_pct", case, shares, "% of the grid"),
        _row("sweep_cost_s", case, costs, "s"),
        Row(
            claim="best_speedup_vs_gamma0",
            case=case,
            value=round(grid.rates[best] / plain, 3),
            low=None,
            high=None,
            unit="x",
        ),
    ]
    for row in rows:
        print(row)
    for result in results:
        selected = result.selected
        print(
            f"gamma {selected.num_speculative_tokens} ratio {selected.sparsity_ratio:g} "
            f"regret {grid.regret(selected):.1%} {result.status}"
        )
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
