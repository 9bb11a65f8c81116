"""A recorded grid as the benchmarks and tests use it: true rates, and sweeps replayed over it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.records import Run, StepRecord, read_json_lines
from vegas_runtime.replay import ReplayEngine
from vegas_tune.laboratory import Laboratory
from vegas_tune.measure import Unsteady, steady_steps
from vegas_tune.plan import make_plan
from vegas_tune.sweep import SweepResult, run_sweep

GRID_FILE = Path(__file__).parent / "data" / "grid_smollm2_cpu.jsonl.z"
BUDGET_S = 720.0


@dataclass(frozen=True)
class Grid:
    """Every recorded pass, and the decode rate of each setting over all of them.

    A setting's rate on one block is tokens per step over the median time of a step, steps of all
    its passes pooled: what a block emits per step is the same in every greedy pass, and a median
    over the repetitions leaves out the moments when the machine did something else. Blocks are
    averaged.
    """

    header: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    rates: Mapping[SpeculationConfig, float]

    @classmethod
    def open(cls, path: Path = GRID_FILE) -> Grid:
        """Read a grid."""
        header, *rows = read_json_lines(path)
        steps: dict[SpeculationConfig, dict[int, list[StepRecord]]] = {}
        for row in rows:
            run = Run.from_dict(row["run"])
            steady = steady_steps(run)
            if not isinstance(steady, Unsteady):
                steps.setdefault(run.config, {}).setdefault(row["block"], []).extend(steady)
        rates = {
            config: fmean(_rate(own) for own in by_block.values())
            for config, by_block in steps.items()
        }
        return cls(header, tuple(rows), rates)

    @property
    def best(self) -> SpeculationConfig:
        """The fastest setting."""
        return max(self.rates, key=self.rates.__getitem__)

    @property
    def plain(self) -> SpeculationConfig:
        """Gamma 0."""
        return next(config for config in self.rates if config.num_speculative_tokens == 0)

    @property
    def settings(self) -> tuple[SpeculationConfig, ...]:
        """Every recorded setting."""
        return tuple(self.rates)

    def regret(self, selected: SpeculationConfig) -> float:
        """Throughput given up against the grid's best, a fraction."""
        if selected.num_speculative_tokens == 0:
            selected = self.plain
        return 1 - self.rates[selected] / self.rates[self.best]

    def sweep(self, seed: int) -> SweepResult:
        """Run the three-step sweep over the recording.

        Args:
            seed: shuffles which repetition answers first, setting by setting; 0 leaves them.
        """
        rows = list(self.rows)
        if seed:
            chance = random.Random(seed)
            groups: dict[tuple[int, SpeculationConfig], list[Mapping[str, Any]]] = {}
            for row in rows:
                key = row["block"], SpeculationConfig.from_dict(row["run"]["config"])
                groups.setdefault(key, []).append(row)
            rows = []
            for group in groups.values():
                order = chance.sample(range(len(group)), len(group))
                rows += [{**row, "replicate": r} for row, r in zip(group, order, strict=True)]
        engine = ReplayEngine([self.header, *rows])
        drafting = [config for config in self.settings if config.num_speculative_tokens]
        plan = make_plan(
            self.plain,
            engine.blocks,
            budget_s=BUDGET_S,
            tokens=self.header["tokens"],
            ratios=sorted({config.sparsity_ratio for config in drafting}),
            gammas=sorted({config.num_speculative_tokens for config in drafting}),
            seed=seed,
        )
        return run_sweep(plan, Laboratory(plan, engine, engine.blocks))


def _rate(steps: list[StepRecord]) -> float:
    """Tokens per second: mean tokens of a step over its median time."""
    tokens = fmean(sum(step.num_emitted_tokens) for step in steps)
    return tokens / median(step.duration_s for step in steps)
