"""Points and results for tests of the board: no engine, real records."""

from __future__ import annotations

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.records import Run, StepRecord
from vegas_tune.outcomes import Measured
from vegas_tune.plan import GAMMA, Point


def point(number: int, *, place: int = 0, step: str = GAMMA) -> Point:
    config = SpeculationConfig(num_speculative_tokens=3, sparsity_ratio=0.05)
    return Point(step=step, config=config, block=0, replicate=number, max_tokens=9, place=place)


def measured(which: Point, attempt: int = 0, where: str = "here") -> Measured:
    step = StepRecord(
        kind="decode", num_running=1, num_waiting=0, request_ids=(0,), num_draft_tokens=(3,),
        num_accepted_tokens=(2,), num_emitted_tokens=(3,), draft_s=0.1, select_s=0.0,
        verify_s=0.1, other_s=0.0,
    )  # fmt: skip
    run = Run(config=which.config, batch_size=1, steps=(step,) * 6, elapsed_s=1.2)
    return Measured(point=which, attempt=attempt, cost_s=1.5, run=run, where=where)
