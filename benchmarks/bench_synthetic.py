"""The tuner on engines whose optimum is known: how often it is right, how often unsure."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.results_file import Row, write_rows

# The engines with a known optimum are test material; this script only counts more of them.
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from synthetic import SHAPES, Shape
from test_sweep import Bench

NOISE = 0.015
LOUD = 0.15


def main() -> None:
    """Sweep every shape with many seeds, quiet and loud, and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweeps", type=int, default=100)
    args = parser.parse_args()
    rows = [row for shape in SHAPES for row in measure(shape, args.sweeps)]
    for row in rows:
        print(row)
    print(write_rows("tuner_synthetic", rows))


def measure(shape: Shape, count: int) -> list[Row]:
    """Counts of one shape."""
    quiet = [Bench(shape, seed=seed, run_cv=NOISE) for seed in range(count)]
    results = [bench.sweep() for bench in quiet]
    regrets = sorted(bench.regret(result) for bench, result in zip(quiet, results, strict=True))
    close = sum(regret <= 0.03 for regret in regrets)
    validated = sum(result.status == "validated" for result in results)
    loud = [Bench(shape, seed=seed, run_cv=LOUD).sweep() for seed in range(count)]
    unsure = sum(result.status == "inconclusive" for result in loud)
    settings = sum(result.num_settings for result in results) / count
    case = f"{shape.name}, run-to-run CV {NOISE:.1%}, {count} sweeps"
    return [
        _count("regret_at_most_3pct", case, close, count),
        _count("validated", case, validated, count),
        Row(
            claim="regret_pct",
            case=f"{case} (mean; high is the largest)",
            value=round(100 * sum(regrets) / count, 3),
            low=None,
            high=round(100 * regrets[-1], 3),
            unit="% of the best rate",
        ),
        Row(
            claim="settings_measured",
            case=f"{case} (mean of 64 settings and plain decoding)",
            value=round(settings, 2),
            low=None,
            high=None,
            unit="settings",
        ),
        _count(
            "inconclusive", f"{shape.name}, run-to-run CV {LOUD:.0%}, {count} sweeps", unsure, count
        ),
    ]


def _count(claim: str, case: str, value: int, count: int) -> Row:
    return Row(claim=claim, case=case, value=value, low=None, high=None, unit=f"of {count}")


if __name__ == "__main__":
    main()
