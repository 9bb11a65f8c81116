"""Tuned methods measured side by side: rounds, the cost of selecting, acceptance at one gamma.

A deterministic program over a laboratory, as the sweep is: the same call over stored results
measures nothing again. Every round measures plain decoding and every method on the same text with
the same random numbers, each round in another order, so that a comparison within rounds is paired.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import VegasError
from vegas_runtime.protocol import Engine, PromptBlock, SelectionRecorder, WindowDrafter
from vegas_runtime.records import Run
from vegas_tune.bench import Progress
from vegas_tune.laboratory import Lab, Laboratory, Store
from vegas_tune.methods import PLAIN, slug
from vegas_tune.outcomes import Failed, Measured, Outcome
from vegas_tune.plan import Plan, Point

MAX_ROUNDS: Final = 10
# Fewer give no interval.
MIN_ROUNDS: Final = 2
# With and without selection work, alternating which comes first.
OVERHEAD_PAIRS: Final = 6

ROUND: Final = "compare"
SAME_GAMMA: Final = "same-gamma"
WITH: Final = "with-selection"
WITHOUT: Final = "without-selection"

# How the cost of selecting was told: the same drafts played back, as many drafts from a window, or
# the engine's own phase times.
OverheadSource = Literal["playback", "window", "phases", ""]

# Beyond any number a search uses: no random sample it has seen comes back.
_FIRST_REPLICATE: Final = 1_000


@dataclass(frozen=True, kw_only=True)
class SideBySide:
    """What was measured after tuning.

    Attributes:
        rounds: complete rounds; measurement by method name, plain decoding among them.
        overhead: by method, pairs of passes with and without the work of selecting.
        overhead_from: what the second of each pair is.
        same_gamma: by method, measurements at its own ratio and the gamma all share.
        gamma: that gamma.
        failures: measurements that gave no figure.
        spent_s: cost of all of it, seconds.
    """

    rounds: tuple[Mapping[str, Measured], ...]
    overhead: Mapping[str, tuple[tuple[Measured, Measured], ...]]
    overhead_from: OverheadSource
    same_gamma: Mapping[str, tuple[Measured, ...]]
    gamma: int
    failures: tuple[Failed, ...]
    spent_s: float


class ComparisonLab(Laboratory):
    """A laboratory that can also measure without the work of selecting.

    Args:
        plan: gives the budget.
        engine: what measures.
        blocks: the workload.
        store: where results are kept.
    """

    def __init__(
        self, plan: Plan, engine: Engine, blocks: Sequence[PromptBlock], *, store: Store
    ) -> None:
        super().__init__(plan, engine, blocks, store=store)
        self._recorder = engine if isinstance(engine, SelectionRecorder) else None
        self._recorded: tuple[SpeculationConfig, int] | None = None

    @property
    def can_skip_selection(self) -> bool:
        """Whether the engine can draft the same tokens without selecting."""
        return self._recorder is not None

    @property
    def drafts_from_windows(self) -> bool:
        """Whether the engine can draft as much from a window, which nothing is selected for."""
        return isinstance(self._engine, WindowDrafter)

    def window_of(self, config: SpeculationConfig) -> SpeculationConfig | None:
        """The setting that drafts as much without selecting, where this engine takes it."""
        engine = self._engine
        if not isinstance(engine, WindowDrafter):
            return None
        window = engine.without_selection(config)
        if window is None:
            return None
        try:
            engine.configure(window)
        except VegasError:
            # An engine that was not started for it.
            return None
        return window

    def _run(self, point: Point, deadline_s: float) -> Run:
        kind = point.step.partition(".")[0]
        if kind not in (WITH, WITHOUT) or self._recorder is None:
            return super()._run(point, deadline_s)
        # One text, one seed: every pass of a pair must draft the same tokens.
        block = self._blocks[point.block]
        self._engine.configure(point.config)
        self._engine.prepare(block)
        wanted = {"replicate": _FIRST_REPLICATE, "max_tokens": point.max_tokens}
        if kind == WITH:
            return self._engine.run(block, deadline_s=deadline_s, **wanted)
        if self._recorded != (point.config, point.block):
            self._recorded = None
            self._recorder.record_selections(block, deadline_s=deadline_s, **wanted)
            self._recorded = (point.config, point.block)
        return self._recorder.run_recorded(deadline_s=deadline_s)


def measure_side_by_side(
    plan: Plan,
    settings: Mapping[str, SpeculationConfig],
    lab: Lab,
    progress: Progress,
    *,
    can_skip_selection: bool,
    window_of: Callable[[SpeculationConfig], SpeculationConfig | None] | None = None,
) -> SideBySide:
    """Measure tuned methods and plain decoding against each other.

    Two rounds come first, then the cost of selecting and the acceptance at one gamma, then as
    many further rounds as the budget has room for.

    Args:
        plan: tokens, held-out blocks and budget; `lab` counts what is spent of it.
        settings: by method name, its best setting; the first one's gamma is the one that all
            share in `same_gamma`.
        lab: answers.
        progress: told what goes on.
        can_skip_selection: whether `lab` plays drafts back for points of step `WITHOUT`.
        window_of: where it does not, the setting to measure without selecting.
    """
    return _SideBySide(plan, settings, lab, progress).run(can_skip_selection, window_of)


class _SideBySide:
    def __init__(
        self,
        plan: Plan,
        settings: Mapping[str, SpeculationConfig],
        lab: Lab,
        progress: Progress,
    ) -> None:
        self._plan, self._settings, self._lab, self._progress = plan, settings, lab, progress
        self._gamma = next(iter(settings.values())).num_speculative_tokens
        self._rounds: list[dict[str, Measured]] = []
        self._num_opened = 0
        self._failures: list[Failed] = []

    def run(
        self,
        can_skip_selection: bool,
        window_of: Callable[[SpeculationConfig], SpeculationConfig | None] | None,
    ) -> SideBySide:
        """Rounds, overheads, one gamma, more rounds."""
        names = ", ".join(self._settings)
        self._progress.started(ROUND, f"{names} and plain decoding, side by side")
        self._more_rounds(MIN_ROUNDS)
        overhead: dict[str, tuple[tuple[Measured, Measured], ...]] = {}
        source: OverheadSource = ""
        if can_skip_selection:
            source = "playback"
            self._progress.started(WITHOUT, "the same drafts with and without selecting")
            overhead = {name: self._pairs(name, own) for name, own in self._settings.items()}
        elif window_of is not None:
            source = "window"
            self._progress.started(WITHOUT, "as many drafts with and without selecting")
            windows = {name: window_of(own) for name, own in self._settings.items()}
            overhead = {
                name: self._pairs(name, window)
                for name, window in windows.items()
                if window is not None
            }
        self._progress.started(SAME_GAMMA, f"every method at gamma {self._gamma}")
        same_gamma = {name: self._at_one_gamma(name) for name in self._settings}
        self._progress.started(ROUND, "further rounds")
        self._more_rounds(MAX_ROUNDS)
        return SideBySide(
            rounds=tuple(self._rounds),
            overhead=overhead,
            overhead_from=source,
            same_gamma=same_gamma,
            gamma=self._gamma,
            failures=tuple(self._failures),
            spent_s=self._lab.spent_s,
        )

    def _more_rounds(self, up_to: int) -> None:
        configs = {PLAIN: self._plan.plain, **self._settings}
        while self._num_opened < up_to and self._has_room(len(configs)):
            number = self._num_opened
            self._num_opened += 1
            blocks = self._plan.validation_blocks
            found: dict[str, Measured] = {}
            for name in _order(list(configs), number):
                outcome = self._measure(
                    f"{ROUND}.{slug(name)}",
                    configs[name],
                    blocks[number % len(blocks)],
                    _FIRST_REPLICATE + number,
                )
                if outcome is not None:
                    found[name] = outcome
            if len(found) == len(configs):
                self._rounds.append(found)

    def _pairs(
        self, name: str, without: SpeculationConfig
    ) -> tuple[tuple[Measured, Measured], ...]:
        pairs = []
        configs = {WITH: self._settings[name], WITHOUT: without}
        for number in range(OVERHEAD_PAIRS):
            if not self._has_room(2):
                break
            order = (WITH, WITHOUT) if number % 2 == 0 else (WITHOUT, WITH)
            block = self._plan.validation_blocks[0]
            results = {
                kind: self._measure(f"{kind}.{slug(name)}", configs[kind], block, number)
                for kind in order
            }
            one, other = results[WITH], results[WITHOUT]
            if one is None or other is None:
                break
            pairs.append((one, other))
        return tuple(pairs)

    def _at_one_gamma(self, name: str) -> tuple[Measured, ...]:
        """One pass per held-out block; the rounds' own where the method's gamma is that one."""
        config = self._settings[name]
        if config.num_speculative_tokens == self._gamma:
            return tuple(found[name] for found in self._rounds)
        config = config.replace(num_speculative_tokens=self._gamma)
        passes = [
            self._measure(f"{SAME_GAMMA}.{slug(name)}", config, block, _FIRST_REPLICATE + number)
            for number, block in enumerate(self._plan.validation_blocks)
            if self._has_room(1)
        ]
        return tuple(one for one in passes if one is not None)

    def _measure(
        self, step: str, config: SpeculationConfig, block: int, replicate: int
    ) -> Measured | None:
        point = Point(
            step=step,
            config=config,
            block=block,
            replicate=replicate,
            max_tokens=self._plan.tokens,
        )
        outcome: Outcome = self._lab.measure(point)
        self._progress.measured(outcome, self._lab.spent_s)
        if isinstance(outcome, Failed):
            self._failures.append(outcome)
            return None
        return outcome

    def _has_room(self, num_passes: int) -> bool:
        """Whether so many passes, each as long as those so far on average, still fit."""
        known = [m.cost_s for found in self._rounds for m in found.values()]
        expected_s = num_passes * sum(known) / len(known) if known else 0.0
        return self._lab.spent_s + expected_s <= self._plan.budget_s


def _order(names: list[str], number: int) -> list[str]:
    """Forth and back, starting elsewhere each time, so that no method always follows another."""
    start = number // 2 % len(names)
    turned = names[start:] + names[:start]
    return turned if number % 2 == 0 else turned[::-1]
