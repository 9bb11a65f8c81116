"""The three-step sweep against full grid, random search and TPE, each with the same engine time.

All of them measure on the same recording, under the same noise, with the same tokens. The sweep
goes first; what it spent, its validation included, is what the others may spend. They take the
setting with the highest mean rate, plain decoding among them; the sweep decides as it always does.
Whatever comes out is written.

`--backend vllm --model FOLDER` records the grid first (`vllm_grid`), and races what the sweep and
its best rival choose from it, on the engine itself; with `--race` the grid is one that was recorded
earlier. `--seeds 0` leaves the replays for a machine without a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median, stdev

from benchmarks.grid import GRID_FILE, Grid
from benchmarks.results_file import RESULTS, Row, write_rows
from benchmarks.rivals import searches
from vegas_runtime.config import SpeculationConfig
from vegas_tune.measure import Measurement, measure

# Beside a shared CPU's noise; the passes of a GPU are played as they came as well.
NOISE = (0.015, 0.03)
GPU_NOISE = (0.0, 0.015)


def main() -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grid", type=Path, default=GRID_FILE, help="recorded to, with --backend")
    parser.add_argument("--name", default="ablation_cpu", help="of the results file")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--backend", choices=("vllm",), help="record the grid there first")
    parser.add_argument("--race", action="store_true", help="of a grid recorded; no other is")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", type=int, default=128, help="requests running, with --backend")
    parser.add_argument(
        "--seconds", type=float, default=170.0, help="behind the engine's start, with --backend"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows: list[Row] = []
    if args.backend == "vllm":
        from benchmarks.vllm_grid import race_recorded, record_and_race

        measure_there = race_recorded if args.race else record_and_race
        try:
            measure_there(args.model, args.grid, rows, batch_size=args.batch, seconds=args.seconds)
        finally:
            _publish(args.name, args.grid, rows, args.out)
    if args.seeds:
        grid = Grid.open(args.grid)
        _publish(args.name, args.grid, compare(grid, args.seeds), args.out)


def compare(grid: Grid, num_seeds: int) -> list[Row]:
    """Every method on the recording, at each noise; and what the recording holds."""
    device = grid.header["info"]["device"]["class"]
    where = f"grid of {len(grid.settings)} settings on {device}"
    rows = recorded_rows(grid, where)
    for noise_cv in NOISE if grid.phases else GPU_NOISE:
        found: dict[str, list[tuple[float, int]]] = {}
        for name, regret, count in regrets(grid, noise_cv, range(num_seeds)):
            found.setdefault(name, []).append((100 * regret, count))
        noise = f"run-to-run noise {noise_cv:.1%}" if noise_cv else "passes as recorded"
        for name, pairs in found.items():
            case = f"{name}; {where}, {noise}, {num_seeds} seeds, equal engine time"
            rows += _rows(case, [regret for regret, _ in pairs], [count for _, count in pairs])
    return rows


def regrets(grid: Grid, noise_cv: float, seeds: range) -> Iterator[tuple[str, float, int]]:
    """Method, throughput given up (a fraction), and settings measured; for each seed."""
    for seed in seeds:
        for name, chosen, count in searches(grid, seed, noise_cv):
            yield name, grid.regret(chosen), count


def recorded_rows(grid: Grid, where: str) -> list[Row]:
    """What the best setting gains, and how far passes of one setting lie apart."""
    best = grid.best
    gain = grid.rates[best] / grid.rates[grid.plain]
    setting = f"gamma {best.num_speculative_tokens} at ratio {best.sparsity_ratio:g}"
    rows = [_row("best_speedup_vs_gamma0", f"{where}; {setting}", round(gain, 3), "x")]
    rates: dict[SpeculationConfig, list[float]] = {}
    for row in grid.rows:
        figures = measure(row["run"])
        if isinstance(figures, Measurement):
            rates.setdefault(row["run"].config, []).append(figures.decode_tok_s.est)
    spreads = [stdev(own) / fmean(own) for own in rates.values() if len(own) > 1]
    # Between blocks it is the text that differs.
    if spreads and len(grid.header["blocks"]) == 1:
        passes = sorted(len(own) for own in rates.values())
        case = f"{where}, {passes[0]} to {passes[-1]} passes of each (median over settings)"
        rows.append(_row("pass_to_pass_cv_pct", case, round(100 * median(spreads), 2), "%"))
    return rows


def _publish(name: str, grid: Path, rows: Sequence[Row], folder: Path) -> None:
    """Print rows and merge them into the results, as measured where the grid was recorded."""
    if not rows:
        return
    for row in rows:
        print(row)
    header = Grid.open(grid).header
    if header["info"]["backend"] != "vllm":
        print(write_rows(name, rows, folder=folder))
        return
    facts = {"machine": header["info"]["device"], "versions": header["info"]["runtime"]}
    print(write_rows(name, rows, facts=facts, folder=folder))


def _row(claim: str, case: str, value: float, unit: str) -> Row:
    return Row(claim=claim, case=case, value=value, low=None, high=None, unit=unit)


def _rows(case: str, regret: list[float], counts: list[int]) -> list[Row]:
    """Mean with the extremes, the share that came close, and what was looked at."""
    return [
        Row(
            claim="regret_pct",
            case=f"{case} (mean; low and high are the smallest and the largest)",
            value=round(fmean(regret), 3),
            low=round(min(regret), 3),
            high=round(max(regret), 3),
            unit="% of decode throughput",
        ),
        Row(
            claim="regret_at_most_3pct",
            case=case,
            value=sum(one <= 3 for one in regret),
            low=None,
            high=None,
            unit=f"of {len(regret)}",
        ),
        Row(
            claim="settings_measured",
            case=f"{case} (median)",
            value=median(counts),
            low=min(counts),
            high=max(counts),
            unit="settings",
        ),
    ]


if __name__ == "__main__":
    main()
