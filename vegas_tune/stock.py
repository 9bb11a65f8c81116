"""The other arm: stock vLLM, without the plugin, before the sweep and after it.

What a user has today is another engine, at its own defaults. It cannot be interleaved with the one
that is tuned, so it is measured on both sides of it: what the machine's speed did in between shows.
Where several devices measure, each measures stock as well, and is compared with itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from vegas_runtime.gpu_memory import UNKNOWN, MemoryCheck, worst
from vegas_runtime.protocol import PromptBlock
from vegas_tune.bench import Progress
from vegas_tune.laboratory import Laboratory, StoppableLab, Store, settled
from vegas_tune.measure import Estimate, blocked_ratio
from vegas_tune.outcomes import Failed, Measured, Outcome
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
        held_s: seconds that one of them held a GPU, starts included; of several GPUs, the sum.
        memory: what became of the GPU memory once all had ended.
    """

    plugin_starts: int
    stock_starts: int
    held_s: float
    memory: MemoryCheck = UNKNOWN

    @property
    def gpu_minutes(self) -> float:
        """GPU time, rounded to the second."""
        return round(self.held_s) / 60

    @classmethod
    def of(cls, tuned: VllmEngine, stock: StockEngine) -> EngineUse:
        """What two engines took that have ended."""
        checks = [tuned.memory, *([stock.memory] if stock.num_starts else [])]
        return cls(
            plugin_starts=tuned.num_starts,
            stock_starts=stock.num_starts,
            held_s=tuned.held_s + stock.held_s,
            memory=worst(*checks),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "engine_starts": self.plugin_starts,
            "stock_engine_starts": self.stock_starts,
            "gpu_minutes": round(self.gpu_minutes, 2),
            "gpu_memory_afterwards": self.memory.state,
        }

    def to_text(self) -> str:
        """For a person."""
        starts = f"{self.plugin_starts} start{'' if self.plugin_starts == 1 else 's'}"
        words = (
            f"{starts} of the tuned engine, {self.stock_starts} of stock vLLM; "
            f"{self.gpu_minutes:.1f} GPU-minutes"
        )
        if self.memory.state == "held":
            words += f"\nWARNING: {self.memory.to_text('vLLM')}"
        return words


class StockFigures:
    """Measures stock vLLM through a laboratory, or finds that it was measured.

    Args:
        plan: gives text and size of a pass, and how many devices there are.
        store: where results are kept.
        open_lab: a laboratory of stock vLLM; asked for only when something is missing.
        progress: told what is measured.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        open_lab: Callable[[], AbstractContextManager[StoppableLab]],
        progress: Progress,
    ) -> None:
        self._plan = plan
        self._store = store
        self._open_lab = open_lab
        self._progress = progress
        self._sides: dict[Side, list[Outcome]] = {}
        self._lab: StoppableLab | None = None
        self._stops_soon = False

    def stop_soon(self) -> None:
        """Raise KeyboardInterrupt once the pass in progress is stored."""
        self._stops_soon = True
        if self._lab is not None:
            self._lab.stop_soon()

    def go_on(
        self, store: Store, open_lab: Callable[[], AbstractContextManager[StoppableLab]]
    ) -> None:
        """Use another store and laboratory from now on: those given before were closed since."""
        self._store, self._open_lab = store, open_lab

    def measure(self, side: Side) -> None:
        """Measure one side.

        Raises:
            BackendError: stock vLLM does not start.
            StorageError: a result could not be kept.
        """
        self._progress.started(STOCK, f"stock vLLM, {side} the sweep")
        rounds = stock_points(self._plan, side)
        stored = [settled(self._store, point) for points in rounds for point in points]
        found = [outcome for outcome in stored if outcome is not None]
        if len(found) < len(stored):
            with self._open_lab() as lab:
                self._lab = lab
                if self._stops_soon:
                    lab.stop_soon()
                found = [outcome for points in rounds for outcome in lab.measure_places(points)]
        self._sides[side] = found
        for outcome in found:
            self._progress.measured(outcome, outcome.cost_s)

    def speedup(self, tuned: Sequence[Measured]) -> Estimate | None:
        """Decode throughput of a setting over stock's; None where either was measured too little.

        Args:
            tuned: passes of the setting that no choice was made on.
        """
        return _ratio(tuned, self.passes)

    @property
    def passes(self) -> list[Measured]:
        """Every finished pass of both sides."""
        return [*self._finished("before"), *self._finished("after")]

    @property
    def drift(self) -> Estimate | None:
        """Stock's throughput after over before; None without two passes of each."""
        return _ratio(self._finished("after"), self._finished("before"))

    @property
    def failures(self) -> list[Failed]:
        """Passes that gave no figure."""
        return [one for side in self._sides.values() for one in side if isinstance(one, Failed)]

    def _finished(self, side: Side) -> list[Measured]:
        return [one for one in self._sides.get(side, []) if isinstance(one, Measured)]


class StockEngine:
    """Stock vLLM, started when something is missing and kept until the end of a `session`.

    Args:
        open_engine: starts it.

    Attributes:
        num_starts: engine starts so far.
        held_s: seconds they held the GPU.
        memory: what became of the GPU memory when it ended last.
    """

    def __init__(self, open_engine: Callable[[], VllmEngine]) -> None:
        self._open_engine = open_engine
        self._engine: VllmEngine | None = None
        self.num_starts = 0
        self.held_s = 0.0
        self.memory: MemoryCheck = UNKNOWN

    @contextmanager
    def session(self) -> Iterator[None]:
        """End the engine, if one was started, with the context."""
        try:
            yield
        finally:
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()
                self.num_starts += engine.num_starts
                self.held_s += engine.held_s
                self.memory = engine.memory

    @contextmanager
    def lab(
        self, plan: Plan, blocks: Sequence[PromptBlock], store: Store
    ) -> Iterator[StoppableLab]:
        """A laboratory on the engine, which is started if need be.

        Args:
            plan: of the sweep; its budget is the tuned engine's, and here are a handful of passes.
            blocks: the workload.
            store: where results are kept.
        """
        started_s = time.monotonic()
        if self._engine is None:
            self._engine = self._open_engine()
        load_s = time.monotonic() - started_s
        yield Laboratory(plan, self._engine, blocks, store=store, load_s=load_s)


class StockArm(StockFigures):
    """`StockFigures` with an engine of its own, started for each side that is missing.

    Args:
        plan: gives text and size of a pass.
        blocks: the workload.
        store: where results are kept.
        open_engine: starts stock vLLM; called only when something is missing.
        progress: told what is measured.
    """

    def __init__(
        self,
        plan: Plan,
        blocks: Sequence[PromptBlock],
        store: Store,
        open_engine: Callable[[], VllmEngine],
        progress: Progress,
    ) -> None:
        self.engine = StockEngine(open_engine)
        super().__init__(plan, store, lambda: self.engine.lab(plan, blocks, store), progress)

    def measure(self, side: Side) -> None:
        """See `StockFigures.measure`."""
        with self.engine.session():
            super().measure(side)


def stock_points(plan: Plan, side: Side) -> list[list[Point]]:
    """The passes of one side: plain decoding of the text that validation uses.

    Returns:
        Per pass, a point for each of the plan's devices.
    """
    blocks = plan.validation_blocks
    return [
        [
            Point(
                step=STOCK,
                config=plan.plain,
                block=blocks[number % len(blocks)],
                replicate=_FIRST_REPLICATE[side] + number,
                max_tokens=plan.tokens,
                place=place,
            )
            for place in range(plan.places)
        ]
        for number in range(PASSES)
    ]


def _ratio(tops: Sequence[Measured], bottoms: Sequence[Measured]) -> Estimate | None:
    """Throughput of some passes over that of others, on the devices that made two of each."""
    groups = []
    # A place may be taken over by another device.
    for device in sorted({(one.point.place, one.where) for one in tops}):
        pair = [_rates(passes, device) for passes in (tops, bottoms)]
        if min(map(len, pair)) >= 2:
            groups.append((pair[0], pair[1]))
    return blocked_ratio(groups) if groups else None


def _rates(passes: Sequence[Measured], device: tuple[int, str]) -> list[float]:
    return [
        one.figures.decode_tok_s.est for one in passes if (one.point.place, one.where) == device
    ]
