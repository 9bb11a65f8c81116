"""vLLM's own drafting methods: which of them can run, each tuned over gamma, each at its best.

Such a method is fixed when an engine starts, so every gamma is a start of its own, and none of it
can be interleaved with the plugin's engine. Each start measures search passes, which gamma is
chosen by, and held-out passes, which alone are published; what was found is kept, and a gamma found
before is not started again.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import BackendError, ConfigError, GpuMemoryError
from vegas_runtime.protocol import ON_V1_RUNNER, PromptBlock, StockMethod
from vegas_tune.bench import Progress
from vegas_tune.laboratory import Store, settled
from vegas_tune.outcomes import Failed, Measured, Outcome
from vegas_tune.plan import Plan, Point
from vegas_tune.stock import StockEngine

if TYPE_CHECKING:
    from vegas_runtime.vllm_plugin.engine import VllmEngine

# Engine starts for one method: a first gamma, its neighbours, and one more where the best of them
# lies at the end. A start takes a minute; throughput is flat around its optimum.
MAX_GAMMAS: Final = 4
# Where the search begins on the ladder: what most methods accept of longer drafts is little.
FIRST_GAMMA: Final = 3
SEARCH_PASSES: Final = 2
HELD_OUT_PASSES: Final = 3
# Beyond the numbers of search, rounds and stock passes, so that no sample is drawn twice.
_SEARCH_REPLICATE: Final = 3_000_000
_HELD_OUT_REPLICATE: Final = 4_000_000

_ARCTIC: Final = "arctic_inference"


@dataclass(frozen=True, kw_only=True)
class OwnMethod:
    """One of vLLM's own methods, as it was asked for.

    Attributes:
        name: as vLLM calls it; the row's name.
        model: draft model or head; empty for none.
        reason: why it cannot run here; empty where nothing is known against it.
    """

    name: str
    model: str = ""
    reason: str = ""

    def at(self, gamma: int) -> StockMethod:
        """What an engine is started with."""
        return StockMethod(name=self.name, num_speculative_tokens=gamma, model=self.model)


@dataclass(frozen=True, kw_only=True)
class OwnResult:
    """One of vLLM's own methods, measured or not.

    Attributes:
        method: which.
        chosen: its best setting; None where none could be measured.
        passes: held-out passes at that setting.
        reason: why there are none, or what else a reader must know; may be empty.
        outcomes: everything measured, search included.
    """

    method: OwnMethod
    chosen: SpeculationConfig | None
    passes: tuple[Measured, ...]
    reason: str
    outcomes: tuple[Outcome, ...]

    @property
    def is_measured(self) -> bool:
        """Whether it has a figure with an interval."""
        return len(self.passes) > 1


def own_method(name: str, *, draft_model: str = "", eagle_head: str = "") -> OwnMethod:
    """One of vLLM's own methods, and what stands against it here.

    Args:
        name: one of `protocol.STOCK_METHODS`.
        draft_model: what the user named for `draft_model`.
        eagle_head: what the user named for `eagle3`.
    """
    if name == "suffix" and importlib.util.find_spec(_ARCTIC) is None:
        return OwnMethod(
            name=name,
            reason="suffix decoding needs the package arctic-inference, which is not installed "
            "(pip install arctic-inference)",
        )
    wanted = {"draft_model": ("--draft-model", draft_model), "eagle3": ("--eagle-head", eagle_head)}
    option, model = wanted.get(name, ("", ""))
    if option and not model:
        return OwnMethod(name=name, reason=f"{option} names nothing to draft with")
    return OwnMethod(name=name, model=model)


class OwnMethods:
    """Measures vLLM's own methods, each on engines of its own.

    Args:
        plan: gives the gammas, the text and the size of a pass.
        blocks: the workload.
        store_of: where a method's results are kept.
        open_engine: starts stock vLLM with a method; called only when something is missing.
        progress: told what is measured.
    """

    def __init__(
        self,
        plan: Plan,
        blocks: Sequence[PromptBlock],
        store_of: Callable[[OwnMethod], Store],
        open_engine: Callable[[StockMethod], VllmEngine],
        progress: Progress,
    ) -> None:
        self._plan = plan
        self._blocks = blocks
        self._store_of = store_of
        self._open_engine = open_engine
        self._progress = progress

    def measure(self, method: OwnMethod) -> OwnResult:
        """Tune one method over gamma and measure it at its best.

        Raises:
            StorageError: a result could not be kept.
            GpuMemoryError: an engine's memory did not come back.
        """
        if method.reason:
            return OwnResult(
                method=method, chosen=None, passes=(), reason=method.reason, outcomes=()
            )
        store = self._store_of(method)
        found: dict[int, list[Outcome]] = {}
        reasons: list[str] = []
        while (gamma := next_gamma(self._plan.gammas, _rates(found))) is not None:
            self._progress.started(
                f"vllm.{method.name}", f"vLLM's own {method.name}, {gamma} drafted tokens"
            )
            try:
                found[gamma] = self._at(method.at(gamma), store)
            except GpuMemoryError:
                # It is no fault of the method's, and the next engine would fare no better.
                raise
            except (BackendError, ConfigError) as error:
                found[gamma] = []
                reasons.append(error.message)
            for outcome in found[gamma]:
                self._progress.measured(outcome, outcome.cost_s)
        return self._conclude(method, found, reasons)

    def _at(self, drafting: StockMethod, store: Store) -> list[Outcome]:
        """Every pass at one gamma, from one engine start or from the store."""
        points = own_points(self._plan, drafting.config)
        stored = [settled(store, point) for point in points]
        found = [outcome for outcome in stored if outcome is not None]
        if len(found) == len(points):
            return found
        engine = StockEngine(lambda: self._open_engine(drafting))
        with engine.session(), engine.lab(self._plan, self._blocks, store) as lab:
            return [lab.measure(point) for point in points]

    def _conclude(
        self, method: OwnMethod, found: Mapping[int, Sequence[Outcome]], reasons: Sequence[str]
    ) -> OwnResult:
        outcomes = tuple(one for own in found.values() for one in own)
        rates = {gamma: rate for gamma, rate in _rates(found).items() if math.isfinite(rate)}
        if not rates:
            failed = [one.reason for one in outcomes if isinstance(one, Failed)]
            return OwnResult(
                method=method,
                chosen=None,
                passes=(),
                reason=[*failed, *reasons, "nothing was measured"][0],
                outcomes=outcomes,
            )
        best = max(rates, key=lambda gamma: rates[gamma])
        notes = [f"engines of its own: {', '.join(map(str, found))} drafted tokens were tried"]
        if method.name in ON_V1_RUNNER:
            notes.append("vLLM runs it on its V1 model runner")
        return OwnResult(
            method=method,
            chosen=method.at(best).config,
            passes=tuple(
                one
                for one in found[best]
                if isinstance(one, Measured) and one.point.replicate >= _HELD_OUT_REPLICATE
            ),
            reason="; ".join(notes),
            outcomes=outcomes,
        )


def own_points(plan: Plan, config: SpeculationConfig) -> list[Point]:
    """The passes of one gamma: search text first, then held-out text."""
    wanted = (
        ("search", SEARCH_PASSES, plan.search_blocks, _SEARCH_REPLICATE),
        ("held-out", HELD_OUT_PASSES, plan.validation_blocks, _HELD_OUT_REPLICATE),
    )
    return [
        Point(
            step=f"vllm-{config.algorithm}-{kind}",
            config=config,
            block=blocks[number % len(blocks)],
            replicate=first + number,
            max_tokens=plan.tokens,
        )
        for kind, count, blocks, first in wanted
        for number in range(count)
    ]


def next_gamma(ladder: Sequence[int], rates: Mapping[int, float]) -> int | None:
    """Which gamma to start an engine at next; None when the best known has both neighbours.

    Args:
        ladder: candidate gammas, ascending.
        rates: throughput of those measured; minus infinity where none could be.

    Returns:
        At most `MAX_GAMMAS` different ones are ever asked for.
    """
    if not rates:
        return min(ladder, key=lambda gamma: (abs(gamma - FIRST_GAMMA), gamma))
    if len(rates) >= MAX_GAMMAS or not any(map(math.isfinite, rates.values())):
        # A method that cannot start with one gamma cannot with another.
        return None
    place = ladder.index(max(rates, key=lambda gamma: rates[gamma]))
    neighbours = [ladder[i] for i in (place - 1, place + 1) if 0 <= i < len(ladder)]
    return next((gamma for gamma in neighbours if gamma not in rates), None)


def _rates(found: Mapping[int, Sequence[Outcome]]) -> dict[int, float]:
    """Mean log throughput of search passes by gamma."""
    rates = {}
    for gamma, outcomes in found.items():
        logs = [
            math.log(one.figures.decode_tok_s.est)
            for one in outcomes
            if isinstance(one, Measured) and one.point.replicate < _HELD_OUT_REPLICATE
        ]
        rates[gamma] = sum(logs) / len(logs) if logs else -math.inf
    return rates
