"""What a sweep has measured, what it may still measure, and what that would cost.

Between the steps, which say what they want to know, and the laboratory, which answers: rounds,
the budget, and settings that need not be tried because a smaller one ran out of memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from vegas_runtime.config import SpeculationConfig
from vegas_tune.decide import Cell, Decision, Rates
from vegas_tune.laboratory import Lab
from vegas_tune.measure import Counts
from vegas_tune.outcomes import Failed, Measured, Outcome
from vegas_tune.plan import BUDGET_SHARES, GAMMA, REFINE, SPARSITY, VALIDATE, Plan, Point
from vegas_tune.predictor import Predictor


class Progress(Protocol):
    """What a sweep tells while it runs."""

    def started(self, step: str, what: str) -> None:
        """A step starts; `what` says what it looks for."""

    def measured(self, outcome: Outcome, spent_s: float) -> None:
        """A point was measured, found stored, or failed; `spent_s` of the budget is gone."""

    def decided(self, decision: Decision) -> None:
        """A decision was taken."""


class Silent:
    """Tells nothing."""

    def started(self, step: str, what: str) -> None:
        """See `Progress`."""

    def measured(self, outcome: Outcome, spent_s: float) -> None:
        """See `Progress`."""

    def decided(self, decision: Decision) -> None:
        """See `Progress`."""


class Bench:
    """One sweep's measurements.

    Args:
        plan: gives budget and shares.
        lab: measures.
        progress: is told.
        validates: whether validation follows the search, which then leaves it what its first look
            will take.

    Attributes:
        outcomes: every result asked for, in order.
        dominated: settings not tried because a smaller one ran out of memory, with the reason.
        is_budget_spent: whether a measurement was passed over for want of time.
    """

    def __init__(self, plan: Plan, lab: Lab, progress: Progress, *, validates: bool = True) -> None:
        self.outcomes: list[Outcome] = []
        self.dominated: dict[SpeculationConfig, str] = {}
        self.is_budget_spent = False
        self._plan = plan
        self._lab = lab
        self._progress = progress
        self._validates = validates
        self._rounds = 0
        self._block = 0
        # What engine starts took of what is spent, and how many outcomes the last one came after.
        self._starts_s = 0.0
        # What preparing the search's text took, where the plan says that it counts like a start.
        self._prepared_s = 0.0
        self._last_start = 0
        # The last one asked for, and how many outcomes it knew.
        self._guess: tuple[int, Predictor | None] = (0, None)

    @property
    def spent_s(self) -> float:
        """Cost of everything measured."""
        return self._lab.spent_s

    @property
    def num_rounds(self) -> int:
        """Rounds opened."""
        return self._rounds

    @property
    def validation_blocks(self) -> tuple[int, ...]:
        """Blocks to validate on, by what preparing those of the search took."""
        plan = self._plan
        prepared = (one.preparation_s for one in self.measured(SPARSITY, GAMMA, REFINE))
        all_s = plan.num_blocks * max(prepared, default=0.0)
        has_time = all_s <= plan.preparation_share * (plan.budget_s - self._starts_s)
        return plan.validation_blocks if has_time else plan.search_blocks

    def open_round(self, blocks: Sequence[int]) -> None:
        """Start a round: settings measured side by side, on the same text with the same seeds.

        Args:
            blocks: prompt blocks to go through in turn.
        """
        self._block = blocks[self._rounds % len(blocks)]
        self._rounds += 1

    def measure(self, step: str, config: SpeculationConfig) -> tuple[Measured, ...]:
        """Measure one setting in the open round, at every place at the same time.

        Returns:
            Nothing when it failed everywhere, is dominated by one that ran out of memory, or does
            not fit into the step's share of the budget.
        """
        if self._is_dominated(config):
            return ()
        cost_s = self._preparation_s(self._block) + self._pass_s(step, config)
        if self.spent_s + cost_s > self._limit_s(step):
            self.is_budget_spent = True
            return ()
        points = [
            Point(
                step=step,
                config=config,
                block=self._block,
                # A round's number is never used again, so no sample of a search step can return in
                # validation.
                replicate=self._rounds - 1,
                max_tokens=self._tokens(step),
                place=place,
            )
            for place in range(self._plan.places)
        ]
        outcomes = self._lab.measure_places(points)
        start_s = max(outcome.load_s for outcome in outcomes)
        if start_s:
            self._starts_s += start_s
            self._last_start = len(self.outcomes)
        measured = tuple(outcome for outcome in outcomes if isinstance(outcome, Measured))
        if self._plan.shares_after_preparation and step != VALIDATE:
            self._prepared_s += max((one.preparation_s for one in measured), default=0.0)
        for outcome in outcomes:
            self.outcomes.append(outcome)
            self._progress.measured(outcome, self.spent_s)
        return measured

    def measure_all(self, step: str, configs: Iterable[SpeculationConfig]) -> list[Measured]:
        """Measure settings in this order; those that worked."""
        return [measured for config in configs for measured in self.measure(step, config)]

    def compare(
        self, step: str, configs: Sequence[SpeculationConfig], *, is_backwards: bool
    ) -> list[dict[SpeculationConfig, float]]:
        """Measure settings side by side, in the open round.

        Args:
            step: what for.
            configs: what to compare.
            is_backwards: take them in the opposite order; a round forth and one back are ABBA, so
                that linear drift cancels.

        Returns:
            Log throughput by setting, once for each device on which all of them worked.
        """
        results = self.measure_all(step, configs[::-1] if is_backwards else configs)
        by_device: dict[tuple[int, str], dict[SpeculationConfig, float]] = {}
        for one in results:
            rates = by_device.setdefault((one.point.place, one.where), {})
            rates[one.point.config] = math.log(one.figures.decode_tok_s.est)
        return [rates for rates in by_device.values() if len(rates) == len(configs)]

    def has_room_for(self, step: str, configs: Iterable[SpeculationConfig]) -> bool:
        """Whether a whole round of these settings fits into what is left of the budget."""
        cost_s = sum(self._pass_s(step, config) for config in configs)
        return self.spent_s + self._preparation_s(self._block) + cost_s <= self._limit_s(step)

    def measured(self, *steps: str) -> list[Measured]:
        """Finished measurements of these steps, of all by default, in order."""
        return [
            outcome
            for outcome in self.outcomes
            if isinstance(outcome, Measured) and (not steps or outcome.point.step in steps)
        ]

    def rates(self, *steps: str) -> Rates:
        """Settings of these steps compared across their rounds."""
        return Rates([_cell(measured) for measured in self.measured(*steps)])

    def predictor(self) -> Predictor:
        """A guess at every setting, from all that is measured so far."""
        known, predictor = self._guess
        if predictor is None or known != len(self.outcomes):
            pairs = ((measured.point.config, measured.figures) for measured in self.measured())
            predictor = Predictor(self._plan.batch_size, pairs)
            self._guess = len(self.outcomes), predictor
        return predictor

    # ------------------------------------------------------------------ cost

    def _limit_s(self, step: str) -> float:
        """When a step has to end, seconds of the budget.

        Shares are of what engine starts leave: the first one, and one for each time the sweep was
        resumed or its engine died; and of what preparing the search's text leaves, which a slow
        machine may need longer for than for everything it measures. The usual shares would there
        leave validation less than its first look takes, and the whole sweep without an answer: the
        search then gives up as much, of what it has at most half.
        """
        if step == VALIDATE:
            return self._plan.budget_s
        set_up_s = self._starts_s + self._prepared_s
        left_s = self._plan.budget_s - set_up_s
        search_s = most_s = left_s * BUDGET_SHARES[REFINE]
        if self._validates and self.measured():
            search_s = min(most_s, max(most_s / 2, left_s - self._first_look_s()))
        return set_up_s + search_s * BUDGET_SHARES[step] / BUDGET_SHARES[REFINE]

    def _first_look_s(self) -> float:
        """What validation takes up to its first look, with finalists as fast as is expected."""
        plan = self._plan
        drafting = [plan.config(gamma, ratio) for gamma in plan.gammas for ratio in plan.ratios]
        finalist = self.predictor().best(drafting)[0]
        finalists_s = plan.num_finalists * self._pass_s(VALIDATE, finalist)
        round_s = self._pass_s(VALIDATE, plan.plain) + finalists_s
        return self._preparation_s(self.validation_blocks[0]) + plan.looks[0] * round_s

    def _tokens(self, step: str) -> int:
        return self._plan.validation_tokens if step == VALIDATE else self._plan.tokens

    def _pass_s(self, step: str, config: SpeculationConfig) -> float:
        """Expected time of a pass over a block that is prepared; 0 while nothing is known."""
        known = self.measured()
        if not known:
            return 0.0
        # What a pass takes beyond its decoding: restoring prefills, the warm-up, the last step.
        overheads = [
            measured.run.elapsed_s * measured.figures.decode_tok_s.est / measured.point.max_tokens
            for measured in known
        ]
        overhead = sum(overheads) / len(overheads)
        same = [m.figures.decode_tok_s.est for m in known if m.point.config == config]
        rate = sum(same) / len(same) if same else self.predictor().rate(config)
        if not math.isfinite(rate) or rate <= 0:
            rate = min(measured.figures.decode_tok_s.est for measured in known)
        return self._tokens(step) / rate * overhead

    def _preparation_s(self, block: int) -> float:
        """Expected time of preparing a block: of its prefill where the running engine lacks it.

        The longest that a measurement of an earlier block took; 0 while nothing is known. That the
        engine is another one than before shows in its first result, not sooner.
        """
        since = self.outcomes[self._last_start :]
        if any(isinstance(one, Measured) and one.point.block == block for one in since):
            return 0.0
        return max((measured.preparation_s for measured in self.measured()), default=0.0)

    # ------------------------------------------------------------------ memory

    def _is_dominated(self, config: SpeculationConfig) -> bool:
        """Whether a setting that needs no more memory than this one had too little.

        The verified block grows with gamma, the drafting buffers with both gamma and ratio.
        """
        for outcome in self.outcomes:
            if not isinstance(outcome, Failed) or outcome.kind != "oom":
                continue
            smaller = outcome.point.config
            gamma, ratio = smaller.num_speculative_tokens, smaller.sparsity_ratio
            is_smaller = gamma <= config.num_speculative_tokens and ratio <= config.sparsity_ratio
            if gamma == 0 or is_smaller:
                self.dominated[config] = f"gamma {gamma} at ratio {ratio:g} ran out of memory."
                return True
        return False


def counts_by_request(measured: Iterable[Measured]) -> list[dict[tuple[int, int], Counts]]:
    """Counters of each measurement, by (block, request)."""
    return [
        {
            (one.point.block, request): counts
            for request, counts in one.figures.counts.items()
        }
        for one in measured
    ]  # fmt: skip


def _cell(measured: Measured) -> Cell:
    rate = measured.figures.decode_tok_s
    # 1.96: the interval is shown at 95 %; only its scale matters here.
    log_se = rate.half_width / 1.96
    # A device is a block: settings measured on two of them are never compared directly.
    compared_in = (measured.point.replicate, measured.point.place, measured.where)
    return Cell(compared_in, measured.point.config, math.log(rate.est), log_se)
