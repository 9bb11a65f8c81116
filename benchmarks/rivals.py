"""What the three-step sweep is held against on a recorded grid: full grid, random search, TPE."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from statistics import fmean

import optuna

from benchmarks.grid import Grid
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.replay import ReplayEngine
from vegas_tune.outcomes import Measured
from vegas_tune.performer import Performer
from vegas_tune.plan import GAMMA, Point

# Tells the recorded rate of a setting; stops when the engine time is spent.
Ask = Callable[[SpeculationConfig], float]


class SpentError(Exception):
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
            SpentError: the time is over, and with it the search.
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
            raise SpentError
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


# --------------------------------------------------------------------------- all of them


def searches(
    grid: Grid, seed: int, noise_cv: float
) -> Iterator[tuple[str, SpeculationConfig, int]]:
    """Name, choice and number of settings measured: the sweep first, then its rivals.

    Args:
        grid: the recording.
        seed: of noise and searches.
        noise_cv: see `Grid.sweep`.
    """
    engine = grid.engine(seed, noise_cv=noise_cv)
    result = grid.sweep(seed, engine=engine.rewound())
    yield "three-step", result.selected, result.num_settings
    for name, search in RIVALS.items():
        ask = Measurer(grid, engine, result.spent_s)
        with suppress(SpentError):
            search(grid, ask, seed)
        yield name, ask.best(), sum(bool(rates) for rates in ask.rates.values())
