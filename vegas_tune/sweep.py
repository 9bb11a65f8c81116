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
from vegas_tune.decide import Choice, Decision, Plateau, Validation, choose, find_plateau, validate
from vegas_tune.decision_log import choice_decision, named, sparsity_decision, validation_decision
from vegas_tune.laboratory import Failed, Lab, Measured, Outcome
from vegas_tune.measure import pool
from vegas_tune.plan import GAMMA, REFINE, SPARSITY, VALIDATE, Plan
from vegas_tune.racing import drop_outs

# Settings this far behind the leader are not measured again, nor validated.
CONTENDER_LOSS: Final = 0.05
FINALIST_LOSS: Final = 0.10
MAX_CONTENDERS: Final = 4
# A ratio this many rungs from where gamma was chosen may want another gamma.
REBRACKET_RUNGS: Final = 2
# Validation rounds with a failed measurement that are put up with.
MAX_BROKEN_ROUNDS: Final = 3

_SEARCH: Final = (GAMMA, REFINE)


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

    They spend at most `BUDGET_SHARES[REFINE]` of the plan's budget.

    Raises:
        StorageError: a result could not be kept, or a record is missing.
    """
    return _Sweep(plan, lab, progress or Silent(), validates=False).search()


class _Sweep:
    def __init__(self, plan: Plan, lab: Lab, progress: Progress, *, validates: bool = True) -> None:
        self._plan = plan
        self._progress = progress
        self._bench = Bench(plan, lab, progress, validates=validates)
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
        self._climb(GAMMA, ladder, best, anchors=[plan.plain])
        dropped = self._race(GAMMA, ladder)
        rule = "best-first-bracket, wilcoxon-race" if plan.race_looks else "best-first-bracket"
        choice = self._choose(GAMMA, rule, ladder[1:], dropped)
        return None if choice is None else choice.chosen.num_speculative_tokens

    def _refine(self, gamma: int, ratio: float) -> None:
        """Step 3: the fastest ratio at that gamma, and gamma once more when the ratio moved far."""
        plan = self._plan
        self._progress.started(REFINE, f"the fastest sparsity ratio at gamma {gamma}")
        ladder = [plan.config(gamma, candidate) for candidate in plan.ratios]
        best = self._bench.predictor().best(ladder)[0]
        self._climb(REFINE, ladder, best, anchors=[plan.config(gamma, ratio)])
        choice = self._choose(REFINE, "ratio-hill-climb", ladder)
        if choice is None:
            return
        chosen = choice.chosen.sparsity_ratio
        moved = abs(plan.ratios.index(chosen) - plan.ratios.index(ratio))
        if moved >= REBRACKET_RUNGS:
            ladder = [plan.config(candidate, chosen) for candidate in plan.gammas]
            self._climb(REFINE, ladder, choice.chosen)
        self._settle()

    def _settle(self) -> None:
        """Race the best of everything tried: the steps vary one knob at a time, noise hits both."""
        plan, bench = self._plan, self._bench
        for _ in range(plan.settle_rounds):
            contenders = self._contenders(self._drafting())
            if len(contenders) < 2:
                break
            bench.open_round(plan.search_blocks)
            bench.measure_all(REFINE, contenders if bench.num_rounds % 2 else contenders[::-1])
        self._choose(REFINE, "race", sorted(self._drafting(), key=_cost_order))

    def _drafting(self) -> list[SpeculationConfig]:
        """Every setting that drafts and was measured in steps 2 and 3."""
        measured = self._bench.measured(*_SEARCH)
        configs = dict.fromkeys(one.point.config for one in measured)
        return [config for config in configs if config.num_speculative_tokens]

    def _validate(self, finalists: Sequence[SpeculationConfig]) -> SweepResult:
        """Fresh measurements of the finalists against plain decoding, in rounds."""
        plan, bench = self._plan, self._bench
        names = " and ".join(named(config) for config in finalists)
        self._progress.started(VALIDATE, f"{names or 'nothing'} against plain decoding, afresh")
        settings = [*finalists, plan.plain]
        rounds: list[dict[SpeculationConfig, float]] = []
        verdict: Validation | None = None
        turn = num_broken = 0
        while finalists and len(rounds) < plan.looks[-1] and num_broken < MAX_BROKEN_ROUNDS:
            bench.open_round(plan.validation_blocks)
            if not bench.has_room_for(VALIDATE, settings):
                break
            found = bench.compare(VALIDATE, settings, is_backwards=turn % 2 == 1)
            if not found:
                num_broken += 1
                continue
            turn += 1
            rounds += found
            if _looked(plan.looks, len(rounds) - len(found), len(rounds)):
                verdict = self._judge(rounds, finalists)
                if _is_settled(verdict, plan):
                    break
        return self._conclude(rounds, finalists, verdict, num_broken)

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

    def _climb(
        self,
        step: str,
        ladder: Sequence[SpeculationConfig],
        start: SpeculationConfig,
        *,
        anchors: Iterable[SpeculationConfig] = (),
    ) -> None:
        """Measure around `start` until the fastest rung has both neighbours measured.

        Later rounds repeat the contenders in the opposite order, so that drift cancels.
        """
        bench, blocks = self._bench, self._plan.search_blocks
        bench.open_round(blocks)
        near = [start, *_neighbours(ladder, start)]
        bench.measure_all(step, dict.fromkeys([*anchors, *near]))
        self._bracket(step, ladder)
        for _ in range(self._plan.rounds - 1):
            again = self._contenders(ladder)
            if len(again) < 2:
                break
            bench.open_round(blocks)
            bench.measure_all(step, again[::-1])
            self._bracket(step, ladder)

    def _bracket(self, step: str, ladder: Sequence[SpeculationConfig]) -> None:
        given_up: set[SpeculationConfig] = set()
        while tried := self._tried(ladder):
            rates = self._bench.rates(*_SEARCH)
            open_ends = [
                config
                for config in _neighbours(ladder, rates.leader(tried))
                if config not in rates and config not in given_up
            ]
            num_drafting = sum(config.num_speculative_tokens > 0 for config in tried)
            if not open_ends or num_drafting >= self._plan.max_settings:
                return
            best = self._bench.predictor().best(open_ends)[0]
            if not self._bench.measure(step, best):
                given_up.add(best)

    def _race(self, step: str, ladder: Sequence[SpeculationConfig]) -> dict[SpeculationConfig, int]:
        """Repeat the contenders side by side; the surely slower ones drop out at each look.

        Returns:
            After how many rounds each of them dropped out.
        """
        plan, bench = self._plan, self._bench
        racing = self._contenders(ladder)
        rounds: list[dict[SpeculationConfig, float]] = []
        dropped: dict[SpeculationConfig, int] = {}
        turn = 0
        while len(racing) > 1 and len(rounds) < max(plan.race_looks, default=0):
            bench.open_round(plan.search_blocks)
            found = bench.compare(step, racing, is_backwards=turn % 2 == 1)
            if not found:
                break
            turn += 1
            rounds += found
            if _looked(plan.race_looks, len(rounds) - len(found), len(rounds)):
                slower = drop_outs(rounds, racing, num_looks=len(plan.race_looks))
                dropped |= dict.fromkeys(slower, len(rounds))
                racing = [config for config in racing if config not in dropped]
        return dropped

    def _contenders(self, ladder: Sequence[SpeculationConfig]) -> list[SpeculationConfig]:
        tried = self._tried(ladder)
        if not tried:
            return []
        rates = self._bench.rates(*_SEARCH)
        ranked = [config for config in rates.ranked() if config in tried]
        close = [c for c in ranked if rates.ratio(c, ranked[0]).est >= 1 - CONTENDER_LOSS]
        return close[:MAX_CONTENDERS]

    def _tried(self, ladder: Sequence[SpeculationConfig]) -> list[SpeculationConfig]:
        known = {measured.point.config for measured in self._bench.measured(*_SEARCH)}
        return [config for config in ladder if config in known]

    def _choose(
        self,
        step: str,
        rule: str,
        ladder: Sequence[SpeculationConfig],
        dropped: Mapping[SpeculationConfig, int] | None = None,
    ) -> Choice | None:
        """Choose on a ladder that is ordered cheapest first, and record it."""
        if not self._tried(ladder):
            return None
        rates, predictor = self._bench.rates(*_SEARCH), self._bench.predictor()
        choice = choose(rates, ladder, tolerance=self._plan.tie_tolerance)
        predicted = {config: predictor.rate(config) for config in choice.relative}
        self._decide(choice_decision(step, rule, choice, predicted, rates.noise_cv, dropped or {}))
        return choice

    def _last_choice(self) -> SpeculationConfig | None:
        """What steps 2 and 3 chose; None when they had nothing to choose from."""
        chosen = [decision.chosen for decision in self._decisions if decision.step in _SEARCH]
        if not chosen:
            return None
        last = chosen[-1]
        return self._plan.config(last["num_speculative_tokens"], last["sparsity_ratio"])

    # ------------------------------------------------------------------ validation

    def _finalists(self) -> list[SpeculationConfig]:
        """The last choice and the best other setting near it, cheapest first."""
        last = self._last_choice()
        if last is None:
            return []
        rates = self._bench.rates(*_SEARCH)
        others = [
            config
            for config in rates.ranked()
            if config.num_speculative_tokens
            and config != last
            and rates.ratio(config, last).est >= 1 - FINALIST_LOSS
        ]
        return sorted([last, *others[:1]], key=_cost_order)

    def _judge(
        self,
        rounds: Sequence[Mapping[SpeculationConfig, float]],
        finalists: Sequence[SpeculationConfig],
    ) -> Validation:
        plan = self._plan
        return validate(
            rounds,
            finalists,
            plan.plain,
            level=plan.look_level,
            precision=plan.precision,
            tie_tolerance=plan.tie_tolerance,
        )

    def _conclude(
        self,
        rounds: Sequence[Mapping[SpeculationConfig, float]],
        finalists: Sequence[SpeculationConfig],
        verdict: Validation | None,
        num_broken: int,
    ) -> SweepResult:
        plan, bench = self._plan, self._bench
        if not bench.measured():
            raise _no_figures(plan, bench.outcomes)
        # The end of the budget is a look too, in place of those that it cut off.
        if len(rounds) not in plan.looks and len(rounds) >= 2:
            verdict = self._judge(rounds, finalists)
        status, reason = self._status(len(rounds), finalists, verdict, num_broken)
        selected = plan.plain
        if verdict is not None:
            selected = verdict.selected
        elif finalists:
            selected = finalists[0]
        noise_cv = self._noise_cv()
        self._decide(
            validation_decision(
                plan, status, reason, selected, verdict, num_rounds=len(rounds), noise_cv=noise_cv
            )
        )
        return SweepResult(
            plan=plan,
            status=status,
            reason=reason,
            selected=selected,
            decisions=tuple(self._decisions),
            outcomes=tuple(bench.outcomes),
            finalists=tuple(finalists),
            validation=verdict,
            num_rounds=len(rounds),
            noise_floor_cv=noise_cv,
            dominated=dict(bench.dominated),
            spent_s=bench.spent_s,
        )

    def _status(
        self,
        num_rounds: int,
        finalists: Sequence[SpeculationConfig],
        verdict: Validation | None,
        num_broken: int,
    ) -> tuple[Literal["validated", "inconclusive"], str]:
        plan = self._plan
        if verdict is not None and num_rounds >= plan.looks[0]:
            why = verdict.why
            if verdict.status == "inconclusive" and num_rounds < plan.looks[-1]:
                why += f" The budget of {plan.budget_s:g} s allowed {num_rounds} rounds."
            return verdict.status, why
        if not finalists:
            cause = "the budget was spent first" if self._bench.is_budget_spent else "all failed"
            return "inconclusive", f"no setting that drafts could be compared: {cause}."
        if num_broken >= MAX_BROKEN_ROUNDS:
            return "inconclusive", f"{num_broken} validation rounds had a failed measurement."
        return "inconclusive", (
            f"the budget of {plan.budget_s:g} s allowed {num_rounds} validation rounds; "
            f"{plan.looks[0]} are needed."
        )

    def _noise_cv(self) -> float:
        """Spread between passes: validation's, which has the most rounds, else the search's."""
        for steps in ((VALIDATE,), _SEARCH):
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


def _is_settled(verdict: Validation, plan: Plan) -> bool:
    """Whether further rounds are not worth their time."""
    half_width = verdict.speedups[verdict.winner].half_width
    return verdict.status == "validated" and half_width <= plan.stop_precision


def _looked(looks: Sequence[int], before: int, after: int) -> bool:
    """Whether a look falls on the rounds just added; several places add several at a time."""
    return any(before < look <= after for look in looks)


def _neighbours(
    ladder: Sequence[SpeculationConfig], config: SpeculationConfig
) -> list[SpeculationConfig]:
    at = ladder.index(config)
    return [ladder[i] for i in (at - 1, at + 1) if 0 <= i < len(ladder)]


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
