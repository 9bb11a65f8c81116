"""The three steps of the paper's section 3.4, then validation; readable top to bottom.

A deterministic program over `lab.measure`: every choice follows from the plan and the measured
results and from nothing else, so that running it again over the records takes the same choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import BudgetSpentError, NoValidTrialError, VegasError
from vegas_tune.bench import Bench, Progress, Silent, counts_by_request
from vegas_tune.decide import Choice, Decision, Plateau, Validation, choose, find_plateau
from vegas_tune.decision_log import choice_decision, named, sparsity_decision, validation_decision
from vegas_tune.laboratory import Lab
from vegas_tune.ladder import SEARCH, LadderSearch, neighbours
from vegas_tune.measure import pool
from vegas_tune.outcomes import Failed, Measured, Outcome
from vegas_tune.plan import GAMMA, REFINE, SPARSITY, VALIDATE, Plan
from vegas_tune.validation import Validated, validate_afresh

# Settings this far behind the choice are not validated.
FINALIST_LOSS: Final = 0.10
# A ratio this many rungs from where gamma was chosen may want another gamma.
REBRACKET_RUNGS: Final = 2


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """What a sweep found, and everything it rests on.

    Attributes:
        plan: what was planned.
        status: `validated`, or `inconclusive`.
        reason: one sentence on the status.
        selected: the setting to serve with; plain decoding is one.
        decisions: in order.
        outcomes: every measurement asked for, in order, failures included.
        finalists: the settings validated, cheapest first.
        validation: the finalists' verdict; None when fewer than two rounds were complete.
        num_rounds: complete validation rounds.
        noise_floor_cv: run-to-run coefficient of variation met; NaN when nothing was repeated.
        dominated: settings not tried because a smaller one ran out of memory, with the reason.
        spent_s: cost of all measurements, seconds.
    """

    plan: Plan
    status: Literal["validated", "inconclusive"]
    reason: str
    selected: SpeculationConfig
    decisions: tuple[Decision, ...]
    outcomes: tuple[Outcome, ...]
    finalists: tuple[SpeculationConfig, ...]
    validation: Validation | None
    num_rounds: int
    noise_floor_cv: float
    dominated: Mapping[SpeculationConfig, str]
    spent_s: float

    def measured(self, *steps: str) -> list[Measured]:
        """Finished measurements of these steps, of all by default, in order."""
        return _finished(self.outcomes, steps)

    @property
    def failures(self) -> tuple[Failed, ...]:
        """The measurements that gave no figure."""
        return tuple(outcome for outcome in self.outcomes if isinstance(outcome, Failed))

    @property
    def num_settings(self) -> int:
        """Different settings measured, plain decoding included."""
        return len({measured.point.config for measured in self.measured()})


@dataclass(frozen=True, kw_only=True)
class Search:
    """What the three steps found, not validated.

    Attributes:
        plan: what was planned.
        chosen: the best setting that drafts; None when none could be measured.
        decisions: in order.
        outcomes: every measurement asked for, in order, failures included.
        spent_s: cost of all measurements, seconds.
    """

    plan: Plan
    chosen: SpeculationConfig | None
    decisions: tuple[Decision, ...]
    outcomes: tuple[Outcome, ...]
    spent_s: float

    def measured(self, *steps: str) -> list[Measured]:
        """Finished measurements of these steps, of all by default, in order."""
        return _finished(self.outcomes, steps)


def run_sweep(plan: Plan, lab: Lab, progress: Progress | None = None) -> SweepResult:
    """Find, refine and validate a setting.

    Returns:
        The result; `inconclusive` when the budget or the noise left no verdict.

    Raises:
        NoValidTrialError: every measurement failed.
        BudgetSpentError: the budget ended before the first measurement did.
        StorageError: a result could not be kept, or a record is missing.
    """
    return _Sweep(plan, lab, progress or Silent()).run()


def run_search(plan: Plan, lab: Lab, progress: Progress | None = None) -> Search:
    """The three steps alone, for who validates the choice by other means.

    They spend at most `BUDGET_SHARES[REFINE]` of what engine starts leave of the plan's budget.

    Raises:
        StorageError: a result could not be kept, or a record is missing.
    """
    return _Sweep(plan, lab, progress or Silent(), validates=False).search()


class _Sweep:
    def __init__(self, plan: Plan, lab: Lab, progress: Progress, *, validates: bool = True) -> None:
        self._plan = plan
        self._progress = progress
        self._bench = Bench(plan, lab, progress, validates=validates)
        self._ladders = LadderSearch(plan, self._bench)
        self._decisions: list[Decision] = []

    # ------------------------------------------------------------------ the program

    def run(self) -> SweepResult:
        """Three steps and validation."""
        self._three_steps()
        return self._validate(self._finalists())

    def search(self) -> Search:
        """Three steps."""
        self._three_steps()
        return Search(
            plan=self._plan,
            chosen=self._last_choice(),
            decisions=tuple(self._decisions),
            outcomes=tuple(self._bench.outcomes),
            spent_s=self._bench.spent_s,
        )

    def _three_steps(self) -> None:
        ratio = self._find_sparsity()
        gamma = None if ratio is None else self._find_gamma(ratio)
        if ratio is not None and gamma is not None:
            self._refine(gamma, ratio)

    def _find_sparsity(self) -> float | None:
        """Step 1: where accepted tokens stabilise, at a large gamma; None without any figure."""
        plan, bench = self._plan, self._bench
        self._progress.started(SPARSITY, "where the number of accepted tokens stabilises")
        bench.open_round(plan.search_blocks)
        bench.measure(SPARSITY, plan.plain)
        for gamma in reversed(plan.gammas):
            # The next smaller gamma only where not one ratio worked at this one.
            if bench.measure_all(SPARSITY, [plan.config(gamma, ratio) for ratio in plan.ratios]):
                break
        else:
            return None
        plateau = self._plateau(gamma)
        while not plateau.resolved and bench.num_rounds < plan.most_sparsity_rounds:
            again = [*plateau.undetermined, max(plateau.relative)]
            bench.open_round(plan.search_blocks)
            if not bench.measure_all(SPARSITY, [plan.config(gamma, ratio) for ratio in again]):
                break
            plateau = self._plateau(gamma)
        return self._hand_on_ratio(gamma, plateau)

    def _find_gamma(self, ratio: float) -> int | None:
        """Step 2: the fastest gamma at that ratio; None when none could be measured."""
        plan = self._plan
        self._progress.started(GAMMA, f"the fastest gamma at sparsity ratio {ratio:g}")
        ladder = [plan.plain, *(plan.config(gamma, ratio) for gamma in plan.gammas)]
        best = self._bench.predictor().best(ladder[1:])[0]
        self._ladders.climb(GAMMA, ladder, best, anchors=[plan.plain])
        dropped = self._ladders.race(GAMMA, ladder)
        rule = "best-first-bracket, wilcoxon-race" if plan.race_looks else "best-first-bracket"
        choice = self._choose(GAMMA, rule, ladder[1:], dropped)
        return None if choice is None else choice.chosen.num_speculative_tokens

    def _refine(self, gamma: int, ratio: float) -> None:
        """Step 3: the fastest ratio at that gamma, and gamma once more when the ratio moved far."""
        plan = self._plan
        self._progress.started(REFINE, f"the fastest sparsity ratio at gamma {gamma}")
        ladder = [plan.config(gamma, candidate) for candidate in plan.ratios]
        best = self._bench.predictor().best(ladder)[0]
        self._ladders.climb(REFINE, ladder, best, anchors=[plan.config(gamma, ratio)])
        choice = self._choose(REFINE, "ratio-hill-climb", ladder)
        if choice is None:
            return
        chosen = choice.chosen.sparsity_ratio
        moved = abs(plan.ratios.index(chosen) - plan.ratios.index(ratio))
        if moved >= REBRACKET_RUNGS:
            ladder = [plan.config(candidate, chosen) for candidate in plan.gammas]
            self._ladders.climb(REFINE, ladder, choice.chosen)
        self._settle()

    def _settle(self) -> None:
        """Race the best of everything tried: the steps vary one knob at a time, noise hits both."""
        plan, bench = self._plan, self._bench
        self._look_around()
        for _ in range(plan.settle_rounds):
            contenders = self._ladders.contenders(self._drafting())
            if len(contenders) < 2:
                break
            bench.open_round(plan.search_blocks)
            bench.measure_all(REFINE, contenders if bench.num_rounds % 2 else contenders[::-1])
        self._choose(REFINE, "race", sorted(self._drafting(), key=_cost_order))

    def _look_around(self) -> None:
        """Measure what lies beside the fastest setting, along both knobs, until none is faster."""
        plan, bench = self._plan, self._bench
        for _ in range(plan.looks_around):
            drafting = self._drafting()
            if not drafting:
                return
            leader = bench.rates(*SEARCH).leader(drafting)
            gamma, ratio = leader.num_speculative_tokens, leader.sparsity_ratio
            beside = [
                *neighbours([plan.config(gamma, each) for each in plan.ratios], leader),
                *neighbours([plan.config(each, ratio) for each in plan.gammas], leader),
            ]
            unknown = [config for config in beside if config not in drafting]
            if not unknown:
                return
            bench.open_round(plan.search_blocks)
            if not bench.measure_all(REFINE, [leader, *unknown]):
                return

    def _drafting(self) -> list[SpeculationConfig]:
        """Every setting that drafts and was measured in steps 2 and 3."""
        measured = self._bench.measured(*SEARCH)
        configs = dict.fromkeys(one.point.config for one in measured)
        return [config for config in configs if config.num_speculative_tokens]

    def _validate(self, finalists: Sequence[SpeculationConfig]) -> SweepResult:
        """Fresh measurements of the finalists against plain decoding, in rounds."""
        names = ", ".join(named(config) for config in finalists)
        self._progress.started(VALIDATE, f"{names or 'nothing'} against plain decoding, afresh")
        return self._conclude(finalists, validate_afresh(self._plan, self._bench, finalists))

    # ------------------------------------------------------------------ step 1

    def _plateau(self, gamma: int) -> Plateau:
        counts = {}
        for ratio in self._plan.ratios:
            config = self._plan.config(gamma, ratio)
            same = [m for m in self._bench.measured(SPARSITY) if m.point.config == config]
            if same:
                counts[ratio] = pool(counts_by_request(same))
        plan = self._plan
        return find_plateau(counts, tolerance=plan.plateau_tolerance, seed=plan.seed)

    def _hand_on_ratio(self, gamma: int, plateau: Plateau) -> float:
        plan = self._plan
        instead: SpeculationConfig | None = None
        if plateau.ratio is None:
            options = [plan.config(g, ratio) for ratio in plateau.relative for g in plan.gammas]
            instead = self._bench.predictor().best(options)[0]
        decision = sparsity_decision(plan, gamma, plateau, instead)
        self._decide(decision)
        ratio: float = decision.chosen["sparsity_ratio"]
        return ratio

    # ------------------------------------------------------------------ steps 2 and 3

    def _choose(
        self,
        step: str,
        rule: str,
        ladder: Sequence[SpeculationConfig],
        dropped: Mapping[SpeculationConfig, int] | None = None,
    ) -> Choice | None:
        """Choose on a ladder that is ordered cheapest first, and record it."""
        if not self._ladders.tried(ladder):
            return None
        rates, predictor = self._bench.rates(*SEARCH), self._bench.predictor()
        choice = choose(rates, ladder, tolerance=self._plan.tie_tolerance)
        predicted = {config: predictor.rate(config) for config in choice.relative}
        self._decide(choice_decision(step, rule, choice, predicted, rates.noise_cv, dropped or {}))
        return choice

    def _last_choice(self) -> SpeculationConfig | None:
        """What steps 2 and 3 chose; None when they had nothing to choose from."""
        chosen = [decision.chosen for decision in self._decisions if decision.step in SEARCH]
        if not chosen:
            return None
        last = chosen[-1]
        return self._plan.config(last["num_speculative_tokens"], last["sparsity_ratio"])

    # ------------------------------------------------------------------ validation

    def _finalists(self) -> list[SpeculationConfig]:
        """The last choice and the best other settings near it, cheapest first."""
        last = self._last_choice()
        if last is None:
            return []
        rates = self._bench.rates(*SEARCH)
        others = [
            config
            for config in rates.ranked()
            if config.num_speculative_tokens
            and config != last
            and rates.ratio(config, last).est >= 1 - FINALIST_LOSS
        ]
        return sorted([last, *others[: self._plan.num_finalists - 1]], key=_cost_order)

    def _conclude(
        self, finalists: Sequence[SpeculationConfig], validated: Validated
    ) -> SweepResult:
        plan, bench = self._plan, self._bench
        if not bench.measured():
            raise _no_figures(plan, bench.outcomes)
        noise_cv = self._noise_cv()
        self._decide(
            validation_decision(
                plan,
                validated.status,
                validated.reason,
                validated.selected,
                validated.verdict,
                num_rounds=validated.num_rounds,
                noise_cv=noise_cv,
                is_held_out=validated.is_held_out,
            )
        )
        return SweepResult(
            plan=plan,
            status=validated.status,
            reason=validated.reason,
            selected=validated.selected,
            decisions=tuple(self._decisions),
            outcomes=tuple(bench.outcomes),
            finalists=tuple(finalists),
            validation=validated.verdict,
            num_rounds=validated.num_rounds,
            noise_floor_cv=noise_cv,
            dominated=dict(bench.dominated),
            spent_s=bench.spent_s,
        )

    def _noise_cv(self) -> float:
        """Spread between passes: validation's, which has the most rounds, else the search's."""
        for steps in ((VALIDATE,), SEARCH):
            if self._bench.measured(*steps):
                return self._bench.rates(*steps).noise_cv
        return math.nan

    def _decide(self, decision: Decision) -> None:
        self._decisions.append(decision)
        self._progress.decided(decision)


def _finished(outcomes: Iterable[Outcome], steps: Sequence[str]) -> list[Measured]:
    return [
        outcome
        for outcome in outcomes
        if isinstance(outcome, Measured) and (not steps or outcome.point.step in steps)
    ]


def _cost_order(config: SpeculationConfig) -> tuple[int, float]:
    """Cheaper first: fewer tokens drafted, then fewer KV entries read."""
    return config.num_speculative_tokens, config.sparsity_ratio


def _no_figures(plan: Plan, outcomes: Sequence[Outcome]) -> VegasError:
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    kinds = sorted({failure.kind for failure in failed})
    if set(kinds) <= {"timeout"}:
        return BudgetSpentError(
            f"the budget of {plan.budget_s:g} s ended before the first measurement did.",
            hint="Raise --budget, or use fewer, shorter prompts.",
        )
    return NoValidTrialError(
        f"all {len(failed)} measurements failed ({', '.join(kinds)}); the last: {failed[-1].reason}"
    )
