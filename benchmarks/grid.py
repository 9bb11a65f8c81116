"""A recorded grid as the benchmarks and tests use it: true rates, and sweeps replayed over it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.records import Run, StepRecord, read_json_lines
from vegas_runtime.replay import ReplayEngine
from vegas_tune.laboratory import Laboratory
from vegas_tune.measure import PHASES
from vegas_tune.plan import make_plan
from vegas_tune.request import PACKAGED
from vegas_tune.steady import Unsteady, steady_steps
from vegas_tune.sweep import SweepResult, run_sweep

GRID_FILE = Path(__file__).parent / "data" / "grid_smollm2_cpu.jsonl.z"
BUDGET_S = 720.0
REPLICATES = 24


@dataclass(frozen=True)
class Grid:
    """Every recorded pass, and the decode rate of each setting over all of them.

    On a GPU that is what was emitted over the steady steps of all passes, over their time.

    On a shared CPU times cannot be had that way: single passes differ by 10 %, and the fastest of
    65 would be the luckiest. What a setting emits per step is exact there, for greedy decoding
    repeats it. So the time of a step is put together from phases that each depend on one knob, and
    each of those is the median over every pass that shares the knob:

        gamma * draft(ratio) + select(ratio) + verify(gamma) + other(gamma)

    Attributes:
        header: of the file.
        rows: recorded passes, `run` read.
        rates: decode throughput by setting, tokens per second.
        phases: typical phase times by knob; empty where rates are measured directly.
    """

    header: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    rates: Mapping[SpeculationConfig, float]
    phases: Mapping[tuple[str, float], float]

    @classmethod
    def open(cls, path: Path = GRID_FILE) -> Grid:
        """Read a grid."""
        header, *rows = read_json_lines(path)
        return cls.of(header, rows)

    @classmethod
    def of(cls, header: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> Grid:
        """A grid from its header and its recorded passes."""
        read = tuple({**row, "run": Run.from_dict(row["run"])} for row in rows)
        runs = [row["run"] for row in read]
        if header["info"]["backend"] == "vllm":
            return cls(header, read, _measured_rates(runs), {})
        typical = _typical(runs)
        return cls(header, read, _typical_rates(runs, typical), typical)

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

    def engine(self, seed: int = 0, *, noise_cv: float | None = None) -> ReplayEngine:
        """The recording as an engine; `noise_cv` as for `sweep`."""
        rows = list(self.rows) if noise_cv is None else self._repeated(seed, noise_cv)
        return ReplayEngine([self.header, *rows])

    def sweep(
        self,
        seed: int = 0,
        *,
        noise_cv: float | None = None,
        engine: ReplayEngine | None = None,
    ) -> SweepResult:
        """Run the three-step sweep over the recording.

        Args:
            seed: of the noise and the bootstraps.
            noise_cv: None plays the recorded passes as they are, each with whatever the machine
                did at that moment, and again from the first when there are no more. A number
                plays recorded tokens, drawn at random, with typical phase times where there are
                any, and each repetition as a whole is slower or faster by noise of that
                coefficient of variation: what settings measured side by side differ by.
            engine: of the same seed and noise, made before.
        """
        engine = engine or self.engine(seed, noise_cv=noise_cv)
        drafting = [config for config in self.settings if config.num_speculative_tokens]
        plan = make_plan(
            self.plain,
            engine.blocks,
            budget_s=BUDGET_S,
            tokens=self.header["tokens"],
            ratios=sorted({config.sparsity_ratio for config in drafting}),
            gammas=sorted({config.num_speculative_tokens for config in drafting}),
            seed=seed,
            rounds=PACKAGED.rounds,
            shares_after_preparation=True,
        )
        return run_sweep(plan, Laboratory(plan, engine, engine.blocks))

    def _repeated(self, seed: int, noise_cv: float) -> list[Mapping[str, Any]]:
        """Every setting `REPLICATES` times on each block, with noise on its times.

        A repetition has the tokens of a recorded pass drawn at random, and typical phase times, or
        that pass's own where there are none.
        """
        chance = random.Random(seed)
        recorded: dict[tuple[int, SpeculationConfig], list[Run]] = {}
        for row in self.rows:
            recorded.setdefault((row["block"], row["run"].config), []).append(row["run"])
        rows: list[Mapping[str, Any]] = []
        for (block, _), runs in recorded.items():
            for replicate in range(REPLICATES):
                run = chance.choice(runs)
                pace = math.exp(chance.gauss(0.0, noise_cv))
                steps = tuple(self._paced(run, step, pace) for step in run.steps)
                overhead_s = run.elapsed_s - sum(step.duration_s for step in run.steps)
                elapsed_s = overhead_s + sum(step.duration_s for step in steps)
                played = replace(run, steps=steps, elapsed_s=elapsed_s)
                rows.append({"block": block, "replicate": replicate, "run": played})
        return rows

    def _paced(self, run: Run, step: StepRecord, pace: float) -> StepRecord:
        """A step at that pace (above 1: slower), at typical phase times where there are any."""
        if step.kind != "decode":
            return step
        times = {name: getattr(step, name) for name in PHASES}
        if self.phases:
            times = _typical_phases(run.config, self.phases)
        return replace(step, **{name: pace * own_s for name, own_s in times.items()})


def _measured_rates(runs: Iterable[Run]) -> dict[SpeculationConfig, float]:
    """Tokens over time of the steady steps of all passes, by setting."""
    totals: dict[SpeculationConfig, tuple[int, float]] = {}
    for run in runs:
        steps = steady_steps(run)
        if isinstance(steps, Unsteady):
            continue
        tokens, time_s = totals.get(run.config, (0, 0.0))
        totals[run.config] = (
            tokens + sum(sum(step.num_emitted_tokens) for step in steps),
            time_s + sum(step.duration_s for step in steps),
        )
    return {config: tokens / time_s for config, (tokens, time_s) in totals.items()}


def _typical(runs: Iterable[Run]) -> dict[tuple[str, float], float]:
    """Median time of each phase, by the knob that it depends on."""
    phases: dict[tuple[str, float], list[float]] = {}
    for run in runs:
        gamma, ratio = run.config.num_speculative_tokens, run.config.sparsity_ratio
        steps = [step for step in run.steps if step.kind == "decode"]
        for name, knob, share in (
            ("draft_s", ratio, max(gamma, 1)),
            ("select_s", ratio, 1),
            ("verify_s", gamma, 1),
            ("other_s", gamma, 1),
        ):
            # Plain decoding drafts nothing, at no ratio.
            if gamma or name in ("verify_s", "other_s"):
                own = median(getattr(step, name) for step in steps) / share
                phases.setdefault((name, knob), []).append(own)
    return {key: median(values) for key, values in phases.items()}


def _typical_rates(
    runs: Iterable[Run], typical: Mapping[tuple[str, float], float]
) -> dict[SpeculationConfig, float]:
    """Mean tokens of a step over its typical time, by setting."""
    tokens: dict[SpeculationConfig, list[float]] = {}
    for run in runs:
        emitted = [sum(step.num_emitted_tokens) for step in run.steps if step.kind == "decode"]
        tokens.setdefault(run.config, []).append(fmean(emitted))
    return {
        config: fmean(emitted) / sum(_typical_phases(config, typical).values())
        for config, emitted in tokens.items()
    }


def _typical_phases(
    config: SpeculationConfig, typical: Mapping[tuple[str, float], float]
) -> dict[str, float]:
    """Phase times of one iteration at a setting, from typical ones by knob."""
    gamma, ratio = config.num_speculative_tokens, config.sparsity_ratio
    return {
        "draft_s": gamma * typical["draft_s", ratio] if gamma else 0.0,
        "select_s": typical["select_s", ratio] if gamma else 0.0,
        "verify_s": typical["verify_s", gamma],
        "other_s": typical["other_s", gamma],
    }
