"""A sweep of the synthetic engine in its own process, which ends itself where it is told to.

    python killable_sweep.py FOLDER LOG [KEY WHEN]

KEY names the measurement (`Point.key`); WHEN is `begun` (trial claimed, engine not started),
`running` (half-way through the pass) or `recorded` (record written, Optuna not told). Each started
pass is a line of LOG. Decisions are printed as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from synthetic import PLATEAU, SyntheticEngine, make_blocks

from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.protocol import PromptBlock
from vegas_runtime.records import Run
from vegas_tune.laboratory import Laboratory
from vegas_tune.outcomes import Outcome
from vegas_tune.plan import Plan, Point, make_plan
from vegas_tune.study import RunFolder
from vegas_tune.sweep import run_sweep

BLOCKS = make_blocks(2, sampling=SamplingConfig(temperature=0.0))


def small_plan() -> Plan:
    """A whole sweep of some fifty measurements."""
    base = SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0, min_tokens=32)
    return make_plan(base, BLOCKS, budget_s=1e6, tokens=800, ratios=(0.02, 0.05, 0.1, 0.25, 0.5))


class LoggingEngine(SyntheticEngine):
    """Notes each pass that starts, and may end the process in the middle of one."""

    log: Path
    die_in: str | None = None

    def run(self, block: PromptBlock, *, replicate: int, max_tokens: int, deadline_s: float) -> Run:
        gamma, ratio = self.config.num_speculative_tokens, self.config.sparsity_ratio
        with self.log.open("a") as file:
            file.write(f"g{gamma}.s{ratio:g}.b{block.index}.r{replicate}\n")
        if self.die_in == f"g{gamma}.s{ratio:g}.b{block.index}.r{replicate}":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(block, replicate=replicate, max_tokens=max_tokens, deadline_s=deadline_s)


class MortalFolder(RunFolder):
    """Ends the process at a chosen point of a chosen measurement."""

    die_at: tuple[str, str] = ("", "")

    def begin(self, point: Point, attempt: int) -> None:
        super().begin(point, attempt)
        if self.die_at == (point.key, "begun"):
            os.kill(os.getpid(), signal.SIGKILL)

    def _tell(self, step: str, number: int, outcome: Outcome) -> None:
        if self.die_at == (outcome.point.key, "recorded"):
            os.kill(os.getpid(), signal.SIGKILL)
        super()._tell(step, number, outcome)


def main(arguments: list[str]) -> None:
    """Run, or die trying."""
    folder, log, *doom = arguments
    engine = LoggingEngine(PLATEAU)
    engine.log = Path(log)
    plan = small_plan()
    with MortalFolder.open(Path(folder), plan) as store:
        if doom:
            key, when = doom
            store.die_at = (key, when)
            engine.die_in = key.partition(".")[2] if when == "running" else None
        result = run_sweep(plan, Laboratory(plan, engine, BLOCKS, store=store))
    decisions: list[dict[str, Any]] = [decision.to_dict() for decision in result.decisions]
    sys.stdout.write(json.dumps(decisions))


if __name__ == "__main__":
    main(sys.argv[1:])
