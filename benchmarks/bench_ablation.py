"""The three-step sweep against full grid, random search and TPE, each with the same engine time.

All of them measure on the same recording, under the same noise, with the same tokens. The sweep
goes first; what it spent, its validation included, is what the others may spend. They take the
setting with the highest mean rate, plain decoding among them; the sweep decides as it always does.
Whatever comes out is written.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median

import optuna

from benchmarks.grid import GRID_FILE, Grid
from benchmarks.results_file import Row, write_rows
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.replay import ReplayEngine
from vegas_tune.laboratory import Measured, Performer
from vegas_tune.plan import GAMMA, Point

NOISE = (0.015, 0.03)
# Tells the recorded rate of a setting; stops when the engine time is spent.
Ask = Callable[[SpeculationConfig], float]


class _SpentError(Exception):
    """The engine time is over."""


class Measurer:
    """Measures settings one by one until the engine time is spent."""

    def __init__(self, grid: Grid, engine: ReplayEngine, budget_s: float) -> None:
        self._engine = engine.rewound()
        self._performer = Performer(self._engine, self._engine.blocks)
        self._budget_s = budget_s
        self._tokens = grid.header["tokens"]
        self.rates: dict[SpeculationConfig, list[float]] = {}

    def __call__(self, config: SpeculationConfig) -> float:
        """Rate of one more pass, tokens per second.

        Raises:
            _SpentError: the time is over, and with it the search.
        """
        repeats = self.rates.setdefault(config, [])
        # Blocks in turn, as the sweep takes its rounds.
        blocks = len(self._engine.blocks)
        point = Point(
            step=GAMMA,
            config=config,
            block=len(repeats) % blocks,
            replicate=len(repeats),
            max_tokens=self._tokens,
        )
        outcome = self._performer.perform(point, 0, self._budget_s)
        if self._engine.now_s() > self._budget_s:
            raise _SpentError
        rate = outcome.figures.decode_tok_s.est if isinstance(outcome, Measured) else 0.0
        repeats.append(rate)
        return rate

    def best(self) -> SpeculationConfig:
        """The setting with the highest mean."""
        return max(
            (config for config, rates in self.rates.items() if rates),
            key=lambda config: fmean(self.rates[config]),
        )


# --------------------------------------------------------------------------- the rivals


def full_grid(grid: Grid, ask: Ask, seed: int) -> None:
    """Every setting once, in random order, then every setting once more, and so on."""
    chance = random.Random(seed)
    while True:
        order = list(grid.settings)
        chance.shuffle(order)
        for config in order:
            ask(config)


def random_search(grid: Grid, ask: Ask, seed: int) -> None:
    """Settings drawn evenly, with replacement."""
    chance = random.Random(seed)
    ask(grid.plain)
    while True:
        ask(chance.choice(grid.settings))


def tpe(grid: Grid, ask: Ask, seed: int) -> None:
    """Optuna's TPE over the two ladders; plain decoding is measured first."""
    ratios = sorted({c.sparsity_ratio for c in grid.settings if c.num_speculative_tokens})
    gammas = sorted({c.num_speculative_tokens for c in grid.settings if c.num_speculative_tokens})
    at = {(c.num_speculative_tokens, c.sparsity_ratio): c for c in grid.settings}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    ask(grid.plain)
    while True:
        trial = study.ask()
        gamma = gammas[trial.suggest_int("gamma", 0, len(gammas) - 1)]
        ratio = ratios[trial.suggest_int("ratio", 0, len(ratios) - 1)]
        study.tell(trial, ask(at[gamma, ratio]))


RIVALS = {"full grid": full_grid, "random": random_search, "TPE": tpe}


# --------------------------------------------------------------------------- figures


def regrets(grid: Grid, noise_cv: float, seeds: range) -> Iterator[tuple[str, float, int]]:
    """Method, throughput given up (a fraction), and settings measured; for each seed."""
    for seed in seeds:
        engine = grid.engine(seed, noise_cv=noise_cv)
        result = grid.sweep(seed, engine=engine.rewound())
        yield "three-step", grid.regret(result.selected), result.num_settings
        for name, search in RIVALS.items():
            ask = Measurer(grid, engine, result.spent_s)
            with suppress(_SpentError):
                search(grid, ask, seed)
            yield name, grid.regret(ask.best()), sum(bool(rates) for rates in ask.rates.values())


def main() -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grid", type=Path, default=GRID_FILE)
    parser.add_argument("--name", default="ablation_cpu", help="of the results file")
    parser.add_argument("--seeds", type=int, default=20)
    args = parser.parse_args()
    grid = Grid.open(args.grid)
    device = grid.header["info"]["device"]["class"]
    rows = []
    for noise_cv in NOISE:
        found: dict[str, list[tuple[float, int]]] = {}
        for name, regret, count in regrets(grid, noise_cv, range(args.seeds)):
            found.setdefault(name, []).append((100 * regret, count))
        for name, pairs in found.items():
            case = (
                f"{name}; grid of {len(grid.settings)} settings on {device}, run-to-run noise "
                f"{noise_cv:.1%}, {args.seeds} seeds, equal engine time"
            )
            rows += _rows(case, [regret for regret, _ in pairs], [count for _, count in pairs])
    for row in rows:
        print(row)
    print(write_rows(args.name, rows))


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
