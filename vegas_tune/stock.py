"""The other arm: stock vLLM, without the plugin, before the sweep and after it.

What a user has today is another engine, at its own defaults. It cannot be interleaved with the one
that is tuned, so it is measured on both sides of it: what the machine's speed did in between shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from vegas_runtime.backend import PromptBlock
from vegas_tune.bench import Progress
from vegas_tune.laboratory import Failed, Laboratory, Measured, Outcome, Store
from vegas_tune.measure import Estimate, unpaired_ratio
from vegas_tune.plan import STOCK, Plan, Point

if TYPE_CHECKING:
    from vegas_runtime.vllm_plugin.engine import VllmEngine

# Of each side. Three tell the spread between passes from the drift between sides.
PASSES: Final = 3
# Far from every round of a sweep, so that no sample is drawn twice.
_FIRST_REPLICATE: Final = {"before": 1_000_000, "after": 2_000_000}

Side = Literal["before", "after"]


@dataclass(frozen=True, kw_only=True)
class EngineUse:
    """What a sweep took of the machine.

    Attributes:
        plugin_starts: starts of the engine that was tuned.
        stock_starts: starts of stock vLLM.
        held_s: seconds that one of them held the GPU, starts included.
    """

    plugin_starts: int
    stock_starts: int
    held_s: float

    @property
    def gpu_minutes(self) -> float:
        """GPU time, rounded to the second."""
        return round(self.held_s) / 60


class StockArm:
    """Measures stock vLLM, or finds that it was measured.

    Args:
        plan: gives text and size of a pass.
        blocks: the workload.
        store: where results are kept.
        open_engine: starts stock vLLM; called only when something is missing.
        progress: told what is measured.

    Attributes:
        num_starts: engine starts so far.
        held_s: seconds they held the GPU.
    """

    def __init__(
        self,
        plan: Plan,
        blocks: Sequence[PromptBlock],
        store: Store,
        open_engine: Callable[[], VllmEngine],
        progress: Progress,
    ) -> None:
        self._plan = plan
        self._blocks = blocks
        self._store = store
        self._open_engine = open_engine
        self._progress = progress
        self._sides: dict[Side, list[Outcome]] = {}
        self.num_starts = 0
        self.held_s = 0.0

    def measure(self, side: Side) -> None:
        """Measure one side.

        Raises:
            BackendError: stock vLLM does not start.
            StorageError: a result could not be kept.
        """
        self._progress.started(STOCK, f"stock vLLM, {side} the sweep")
        points = stock_points(self._plan, side)
        stored = [self._store.find(point, 0) for point in points]
        if all(outcome is not None for outcome in stored):
            self._sides[side] = [outcome for outcome in stored if outcome is not None]
        else:
            self._sides[side] = self._fresh(points)
        for outcome in self._sides[side]:
            self._progress.measured(outcome, outcome.cost_s)

    def speedup(self, tuned: Sequence[Measured]) -> Estimate | None:
        """Decode throughput of a setting over stock's; None where either was measured too little.

        Args:
            tuned: passes of the setting that no choice was made on.
        """
        stock = self.passes
        if min(len(tuned), len(stock)) < 2:
            return None
        return unpaired_ratio(_rates(tuned), _rates(stock))

    @property
    def passes(self) -> list[Measured]:
        """Every finished pass of both sides."""
        return [*self._finished("before"), *self._finished("after")]

    @property
    def drift(self) -> Estimate | None:
        """Stock's throughput after over before; None without two passes of each."""
        before, after = self._finished("before"), self._finished("after")
        if min(len(before), len(after)) < 2:
            return None
        return unpaired_ratio(_rates(after), _rates(before))

    @property
    def failures(self) -> list[Failed]:
        """Passes that gave no figure."""
        return [one for side in self._sides.values() for one in side if isinstance(one, Failed)]

    def _finished(self, side: Side) -> list[Measured]:
        return [one for one in self._sides.get(side, []) if isinstance(one, Measured)]

    def _fresh(self, points: Sequence[Point]) -> list[Outcome]:
        started_s = time.monotonic()
        engine = self._open_engine()
        try:
            load_s = time.monotonic() - started_s
            # The sweep's budget is the tuned engine's; what is missing here is a handful of passes.
            lab = Laboratory(self._plan, engine, self._blocks, store=self._store, load_s=load_s)
            return [lab.measure(point) for point in points]
        finally:
            engine.close()
            self.num_starts += engine.num_starts
            self.held_s += engine.held_s


def stock_points(plan: Plan, side: Side) -> list[Point]:
    """The passes of one side: plain decoding of the text that validation uses."""
    blocks = plan.validation_blocks
    return [
        Point(
            step=STOCK,
            config=plan.plain,
            block=blocks[number % len(blocks)],
            replicate=_FIRST_REPLICATE[side] + number,
            max_tokens=plan.tokens,
        )
        for number in range(PASSES)
    ]


def _rates(passes: Sequence[Measured]) -> list[float]:
    return [one.figures.decode_tok_s.est for one in passes]
