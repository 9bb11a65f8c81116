from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from synthetic import HOPELESS, PLATEAU, RISING, SHAPES, Shape, SyntheticEngine, make_blocks

from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.errors import BackendError, BudgetSpentError, NoValidTrialError
from vegas_tune.bench import Bench as Measurements
from vegas_tune.bench import Silent
from vegas_tune.decide import Decision
from vegas_tune.laboratory import Laboratory, MemoryStore, RecordedLab
from vegas_tune.outcomes import Failed, Measured, Outcome
from vegas_tune.plan import GAMMA, REFINE, SPARSITY, STEPS, VALIDATE, Plan, make_plan
from vegas_tune.sweep import SweepResult, run_search, run_sweep

BASE = SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0, min_tokens=32)
# Virtual seconds: room for the search and some ten to twenty validation rounds of each shape.
BUDGET_S = {"plateau": 2500.0, "rising": 7500.0, "hopeless": 3500.0}

Fault = Callable[[SpeculationConfig, int], None]


class Bench:
    """One sweep of a synthetic engine, with everything it used."""

    def __init__(
        self,
        shape: Shape,
        *,
        seed: int = 0,
        blocks: int = 3,
        sampling: SamplingConfig | None = None,
        budget_s: float | None = None,
        tokens: int = 2400,
        load_s: float = 0.0,
        rules: dict[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        self.shape = shape
        self.blocks = make_blocks(blocks, sampling=sampling)
        self.engine = SyntheticEngine(shape, seed=seed, **engine)
        self.plan: Plan = make_plan(
            BASE,
            self.blocks,
            budget_s=budget_s or BUDGET_S[shape.name],
            tokens=tokens,
            seed=seed,
            **(rules or {}),
        )
        self.store = MemoryStore()
        self.lab = Laboratory(self.plan, self.engine, self.blocks, store=self.store, load_s=load_s)

    def sweep(self, progress: Any = None) -> SweepResult:
        return run_sweep(self.plan, self.lab, progress)

    def regret(self, result: SweepResult) -> float:
        """Share of the best true throughput on the plan's grid that the choice gives up."""
        chosen = result.selected
        rate = self.shape.rate(chosen.num_speculative_tokens, chosen.sparsity_ratio)
        return 1 - rate / self.shape.best_rate(self.plan.gammas, self.plan.ratios)


def _decisions(result: SweepResult) -> str:
    return json.dumps([decision.to_dict() for decision in result.decisions])


# ------------------------------------------------------------------ quality of the decision


def _judge_quality(shape: Shape, seeds: range) -> None:
    benches = [Bench(shape, seed=seed, run_cv=0.015) for seed in seeds]
    results = [bench.sweep() for bench in benches]
    regrets = [bench.regret(result) for bench, result in zip(benches, results, strict=True)]
    assert sum(regret > 0.03 for regret in regrets) <= 0.05 * len(seeds), sorted(regrets)[-5:]
    assert sum(result.status == "validated" for result in results) >= 0.95 * len(seeds)
    assert np.mean([result.num_settings for result in results]) < 0.4 * 64
    # The noise met: 1.5 % of time, and acceptance drawn afresh in each pass.
    assert 0.01 < np.mean([result.noise_floor_cv for result in results]) < 0.03


def _judge_doubt(shape: Shape, seeds: range) -> None:
    results = [Bench(shape, seed=seed, run_cv=0.15).sweep() for seed in seeds]
    assert sum(result.status == "inconclusive" for result in results) >= 0.95 * len(seeds)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_choice_is_within_three_per_cent_of_the_best(shape: Shape) -> None:
    _judge_quality(shape, range(10))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_ten_times_the_noise_is_inconclusive(shape: Shape) -> None:
    _judge_doubt(shape, range(10))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_choice_is_within_three_per_cent_of_the_best_in_95_of_100_runs(shape: Shape) -> None:
    _judge_quality(shape, range(100))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_ten_times_the_noise_is_inconclusive_in_95_of_100_runs(shape: Shape) -> None:
    _judge_doubt(shape, range(100))


def test_a_drifting_machine_does_not_decide() -> None:
    # 20 % slower by the end. Over 100 seeds: mean regret 0.54 % (0.51 % without drift), one above
    # 3 % either way.
    benches = [Bench(PLATEAU, seed=seed, drift_per_s=0.2 / 1700) for seed in range(8)]
    regrets = [bench.regret(bench.sweep()) for bench in benches]
    assert np.mean(regrets) <= 0.015
    assert sum(regret > 0.03 for regret in regrets) <= 1


def test_plain_decoding_wins_where_drafting_does_not_pay() -> None:
    result = Bench(HOPELESS).sweep()
    assert (result.status, result.selected) == ("validated", result.plan.plain)
    assert "does not pay" in result.reason
    assert result.finalists
    assert result.validation is not None
    assert result.validation.winner.num_speculative_tokens > 0


# ------------------------------------------------------------------ the three steps


def test_a_flat_plateau_is_found_and_a_rising_curve_is_not_taken_for_one() -> None:
    flat = replace(PLATEAU, agreement=lambda ratio: 0.88 if ratio >= 0.05 else 0.7)
    found = Bench(flat, tokens=6000, budget_s=1e5).sweep().decisions[0]
    assert (found.step, found.outcome) == (SPARSITY, "reached")
    assert found.chosen["sparsity_ratio"] in (0.05, 0.07)
    rising = Bench(RISING).sweep().decisions[0]
    assert (rising.outcome, rising.resolved) == ("not_reached", True)
    assert "no plateau" in rising.why


def test_step_one_repeats_only_what_is_undetermined() -> None:
    result = Bench(PLATEAU, run_cv=0.0, budget_s=1e5).sweep()
    rounds = Counter(one.point.replicate for one in result.measured(SPARSITY))
    first = min(rounds)
    assert rounds[first] == len(result.plan.ratios) + 1
    assert all(count < rounds[first] for number, count in rounds.items() if number != first)


def test_step_one_ends_where_data_settles_nothing() -> None:
    result = Bench(PLATEAU, tokens=300, run_cv=0.0, budget_s=1e6).sweep()
    assert not result.decisions[0].resolved
    replicates = {one.point.replicate for one in result.measured(SPARSITY)}
    assert len(replicates) == result.plan.sparsity_rounds


def test_greedy_text_is_not_asked_twice() -> None:
    greedy = SamplingConfig(temperature=0.0)
    for blocks, rounds in ((1, 1), (2, 1), (3, 2)):
        result = Bench(PLATEAU, blocks=blocks, sampling=greedy, tokens=400).sweep()
        replicates = {one.point.replicate for one in result.measured(SPARSITY)}
        assert len(replicates) <= rounds
        blocks_met = {one.point.block for one in result.measured(SPARSITY)}
        assert len(blocks_met) == len(replicates)


def test_every_gamma_search_is_bracketed_and_holds_plain_decoding() -> None:
    for seed in range(5):
        result = Bench(PLATEAU, seed=seed).sweep()
        ladder = (0, *result.plan.gammas)
        tried = {one.point.config.num_speculative_tokens for one in result.measured(GAMMA)}
        decision = next(d for d in result.decisions if d.step == GAMMA)
        at = ladder.index(decision.chosen["num_speculative_tokens"])
        assert 0 in tried
        assert {ladder[at - 1], ladder[min(at + 1, len(ladder) - 1)]} <= tried


def test_predictions_stand_beside_measurements() -> None:
    result = Bench(PLATEAU, run_cv=0.0).sweep()
    decision = next(d for d in result.decisions if d.step == GAMMA)
    for alternative in decision.alternatives:
        gamma, ratio = alternative["num_speculative_tokens"], alternative["sparsity_ratio"]
        truth = PLATEAU.rate(gamma, ratio)
        assert alternative["predicted_tok_s"] == pytest.approx(truth, rel=0.08)


def test_validation_is_fresh_interleaved_and_on_held_out_text() -> None:
    result = Bench(PLATEAU).sweep()
    validation = [one.point for one in result.measured(VALIDATE)]
    searched = [one.point for one in result.measured(SPARSITY, GAMMA, REFINE)]
    assert {point.block for point in validation} == set(result.plan.validation_blocks)
    assert not {point.block for point in validation} & {point.block for point in searched}
    assert min(p.replicate for p in validation) > max(p.replicate for p in searched)
    order = [point.config for point in validation]
    width = len(result.finalists) + 1
    first, second = order[:width], order[width : 2 * width]
    assert set(first) == {*result.finalists, result.plan.plain}
    assert second == first[::-1]


def test_one_block_is_validated_with_fresh_replicates() -> None:
    result = Bench(PLATEAU, blocks=1).sweep()
    validation = {one.point.replicate for one in result.measured(VALIDATE)}
    searched = {one.point.replicate for one in result.measured(SPARSITY, GAMMA, REFINE)}
    assert validation
    assert not validation & searched
    assert result.decisions[-1].data["held_out_text"] is False


@pytest.mark.parametrize(("prefill_s", "is_held_out"), [(500.0, True), (700.0, False)])
def test_text_of_its_own_gives_way_where_preparing_it_takes_the_budget(
    prefill_s: float, is_held_out: bool
) -> None:
    bench = Bench(PLATEAU, blocks=2, prefill_s=prefill_s, rules={"preparation_share": 0.5})
    result = bench.sweep()
    validation = {one.point.block for one in result.measured(VALIDATE)}
    searched = {one.point.block for one in result.measured(SPARSITY, GAMMA, REFINE)}
    assert validation
    assert validation.isdisjoint(searched) == is_held_out
    last = result.decisions[-1]
    assert last.data["held_out_text"] == is_held_out
    assert ("On the text of the search" in last.why) == (not is_held_out)
    assert last.why == result.reason
    again = run_sweep(result.plan, RecordedLab(result.outcomes))
    assert again.decisions == result.decisions


def test_a_long_prefill_leaves_the_search_its_share() -> None:
    def sweep(**rules: bool) -> tuple[Bench, SweepResult]:
        own = {"preparation_share": 0.5, **rules}
        bench = Bench(PLATEAU, blocks=2, prefill_s=1200.0, run_cv=0.015, rules=own)
        return bench, bench.sweep()

    # Behind the first prefill nothing was left of the share that the first step had.
    _, before = sweep()
    assert (before.status, before.num_settings) == ("inconclusive", 1)
    bench, result = sweep(shares_after_preparation=True)
    assert result.status == "validated"
    assert bench.regret(result) <= 0.03
    assert bench.lab.spent_s <= bench.plan.budget_s
    again = run_sweep(result.plan, RecordedLab(result.outcomes))
    assert again.decisions == result.decisions


# ------------------------------------------------------------------ determinism and replay


def test_the_same_results_lead_to_the_same_decisions_byte_for_byte() -> None:
    for shape in SHAPES:
        bench = Bench(shape, seed=3, run_cv=0.03)
        live = bench.sweep()
        again = run_sweep(bench.plan, RecordedLab(bench.store.outcomes.values()))
        assert _decisions(again) == _decisions(live)
        assert (again.status, again.selected) == (live.status, live.selected)
        assert again.spent_s == live.spent_s


def test_a_search_takes_the_same_choice_and_leaves_validation_to_its_caller() -> None:
    whole, alone = Bench(PLATEAU), Bench(PLATEAU)
    result = whole.sweep()
    search = run_search(alone.plan, alone.lab)
    assert search.decisions == result.decisions[:-1]
    assert {outcome.point.step for outcome in search.outcomes} == {SPARSITY, GAMMA, REFINE}
    assert search.outcomes == result.outcomes[: len(search.outcomes)]
    last = search.decisions[-1].chosen
    assert search.chosen == alone.plan.config(
        last["num_speculative_tokens"], last["sparsity_ratio"]
    )
    assert search.chosen in result.finalists
    assert search.spent_s == alone.lab.spent_s <= 0.7 * alone.plan.budget_s


def test_a_search_without_any_figure_has_no_choice() -> None:
    def fail(config: SpeculationConfig, number: int) -> None:
        if config.num_speculative_tokens:
            raise MemoryError("out of memory")

    bench = Bench(PLATEAU, faults=fail)
    search = run_search(bench.plan, bench.lab)
    assert search.chosen is None
    assert len(search.measured()) == 1


@pytest.mark.parametrize(("budget_s", "status"), [(400.0, "inconclusive"), (700.0, "validated")])
def test_a_replay_takes_the_same_budget_decisions(budget_s: float, status: str) -> None:
    bench = Bench(PLATEAU, budget_s=budget_s)
    live = bench.sweep()
    assert live.status == status
    again = run_sweep(bench.plan, RecordedLab(bench.store.outcomes.values()))
    assert _decisions(again) == _decisions(live)
    assert again.outcomes == live.outcomes


# ------------------------------------------------------------------ budget


@pytest.mark.parametrize("budget_s", [40.0, 120.0, 200.0, 300.0, 500.0, 900.0, 1600.0])
def test_the_budget_is_hard(budget_s: float) -> None:
    bench = Bench(PLATEAU, budget_s=budget_s, load_s=10.0)
    result = bench.sweep()
    # A pass may end one step after its deadline.
    assert bench.engine.now_s() + 10.0 <= budget_s + 1.0
    assert result.spent_s <= budget_s + 1.0
    assert result.decisions[-1].step == VALIDATE
    if result.status == "inconclusive":
        assert "budget" in result.reason


def test_a_budget_for_some_validation_rounds_is_used() -> None:
    result = Bench(RISING, run_cv=0.05, budget_s=6000.0).sweep()
    assert result.plan.looks[0] <= result.num_rounds < result.plan.looks[-1]
    if result.status == "inconclusive":
        assert f"allowed {result.num_rounds} rounds" in result.reason


def test_rounds_go_on_for_a_narrower_interval_while_there_is_time() -> None:
    def half_width(budget_s: float, stop_precision: float) -> tuple[int, float]:
        rules = {"looks": (6, 12, 24, 48), "stop_precision": stop_precision}
        result = Bench(PLATEAU, run_cv=0.03, budget_s=budget_s, rules=rules).sweep()
        assert result.status == "validated"
        assert result.validation is not None
        return result.num_rounds, result.validation.speedups[result.selected].half_width

    early, wide = half_width(6000.0, 0.05)
    late, narrow = half_width(6000.0, 0.02)
    assert (early, late) == (12, 48)
    assert narrow <= 0.02 < wide <= 0.05
    # Where the budget ends before, what there is counts.
    some, between = half_width(2600.0, 0.001)
    assert early < some < 48
    assert 0.001 < between < 0.05


def test_as_many_finalists_are_validated_as_the_plan_says() -> None:
    for count in (2, 3):
        result = Bench(PLATEAU, rules={"num_finalists": count}).sweep()
        assert result.validation is not None
        assert len(result.finalists) == count
        assert {*result.validation.speedups} == {*result.finalists}
        settings = {one.point.config for one in result.measured(VALIDATE)}
        assert settings == {*result.finalists, result.plan.plain}


def test_no_step_eats_the_next_ones_share() -> None:
    result = Bench(PLATEAU, budget_s=1500.0, run_cv=0.03).sweep()
    spent = dict.fromkeys(STEPS, 0.0)
    for outcome in result.outcomes:
        spent[outcome.point.step] += outcome.cost_s
    assert spent[SPARSITY] <= 0.40 * 1500.0
    assert spent[SPARSITY] + spent[GAMMA] <= 0.60 * 1500.0
    assert sum(spent[step] for step in STEPS[:3]) <= 0.70 * 1500.0
    assert spent[VALIDATE] > 0


@pytest.mark.parametrize("load_s", [300.0, 1000.0])
def test_the_engine_s_start_is_not_taken_for_a_prefill(load_s: float) -> None:
    # Every new block would seem to cost another start, and nothing would fit any more.
    result = Bench(PLATEAU, budget_s=2500.0 + load_s, load_s=load_s).sweep()
    assert (result.status, result.num_rounds >= result.plan.looks[0]) == ("validated", True)


def _resumed(bench: Bench, after: int, load_s: float) -> SweepResult:
    """What a sweep finds that is stopped after so many passes and goes on with another start."""
    bench.engine.faults = lambda _, passes: bench.lab.stop_soon() if passes == after - 1 else None
    with pytest.raises(KeyboardInterrupt):
        bench.sweep()
    assert len(bench.store.outcomes) == after
    engine = SyntheticEngine(bench.shape, prefill_s=bench.engine.prefill_s)
    bench.lab = Laboratory(bench.plan, engine, bench.blocks, store=bench.store, load_s=load_s)
    result = bench.sweep()
    again = run_sweep(bench.plan, RecordedLab(bench.store.outcomes.values()))
    assert _decisions(again) == _decisions(result)
    return result


def test_a_resumed_sweep_shares_out_what_all_its_starts_leave() -> None:
    # Nothing to prepare: another start is then all that resuming costs.
    options: dict[str, Any] = {"budget_s": 1600.0, "prefill_s": 0.0}
    resumed = _resumed(Bench(PLATEAU, load_s=300.0, **options), after=1, load_s=500.0)
    # The same as one sweep whose only start took as long as both.
    whole = Bench(PLATEAU, load_s=800.0, **options).sweep()
    assert [one.point for one in resumed.outcomes] == [one.point for one in whole.outcomes]
    assert resumed.spent_s == pytest.approx(whole.spent_s, abs=0.01)
    assert [one.load_s for one in resumed.outcomes[:3]] == [300.0, 500.0, 0.0]


def test_each_start_is_paid_for_by_search_and_validation_alike() -> None:
    bench = Bench(PLATEAU, budget_s=1600.0, prefill_s=0.0, load_s=300.0)
    result = _resumed(bench, after=12, load_s=500.0)
    assert result.spent_s <= 1600.0 + 1.0
    searched_s = sum(one.cost_s for one in result.outcomes if one.point.step != VALIDATE)
    assert 800.0 + 0.6 * 800.0 < searched_s <= 800.0 + 0.7 * 800.0


def test_what_another_engine_had_prepared_is_expected_to_take_its_time_again() -> None:
    blocks, engine = make_blocks(2), SyntheticEngine(PLATEAU, prefill_s=250.0)
    plan = make_plan(BASE, blocks, budget_s=1500.0, tokens=2400)
    store = MemoryStore()

    def measured(num_rounds: int, engine: SyntheticEngine) -> Measurements:
        lab = Laboratory(plan, engine, blocks, store=store, load_s=40.0)
        bench = Measurements(plan, lab, Silent())
        for _ in range(num_rounds):
            bench.open_round((0, 1, 1))
            assert bench.measure(VALIDATE, plan.plain)
        return bench

    first = measured(2, engine)
    first.open_round((0,))
    assert first.has_room_for(VALIDATE, [plan.plain] * 20)
    resumed = measured(3, SyntheticEngine(PLATEAU, prefill_s=250.0))
    left_s = 1500.0 - resumed.spent_s
    pass_s = resumed.measured()[-1].run.elapsed_s
    # Its own engine holds block 1, and lacks block 0.
    for block, room_s in ((1, left_s), (0, left_s - 250.0)):
        resumed.open_round((block,))
        for num, fits in ((int(0.9 * room_s / pass_s), True), (int(1.1 * room_s / pass_s), False)):
            assert resumed.has_room_for(VALIDATE, [plan.plain] * num) is fits, (block, num)


def test_a_start_behind_a_failure_is_not_taken_for_measuring() -> None:
    def fail(config: SpeculationConfig, number: int) -> None:
        if number == 0:
            bench.engine.num_passes += 1
            raise BackendError("died")

    bench = Bench(PLATEAU, budget_s=1600.0, load_s=800.0, prefill_s=0.0, faults=fail)
    result = bench.sweep()
    whole = Bench(PLATEAU, budget_s=1600.0, load_s=800.0, prefill_s=0.0).sweep()
    assert [one.point for one in result.outcomes] == [one.point for one in whole.outcomes]
    assert [one.load_s for one in result.outcomes if one.load_s] == [800.0]
    assert result.outcomes[0].attempt == 1


@pytest.mark.parametrize(
    ("prefill_s", "budget_s"), [(200.0, 1500.0), (250.0, 1500.0), (200.0, 1200.0)]
)
def test_where_prefills_are_long_the_search_leaves_validation_its_first_look(
    prefill_s: float, budget_s: float
) -> None:
    bench = Bench(PLATEAU, budget_s=budget_s, prefill_s=prefill_s, blocks=2)
    result = bench.sweep()
    assert result.num_rounds >= result.plan.looks[0]
    assert result.spent_s <= budget_s + 1.0
    assert bench.regret(result) <= 0.03
    # Alone, the search takes its whole share.
    alone = Bench(PLATEAU, budget_s=budget_s, prefill_s=prefill_s, blocks=2)
    searched_s = sum(one.cost_s for one in result.outcomes if one.point.step != VALIDATE)
    assert searched_s < run_search(alone.plan, alone.lab).spent_s


def test_a_budget_that_ends_in_the_first_measurement_says_so() -> None:
    with pytest.raises(BudgetSpentError, match="budget of 2 s") as caught:
        Bench(PLATEAU, budget_s=2.0, prefill_s=5.0).sweep()
    assert caught.value.exit_code == 6


# ------------------------------------------------------------------ failures


def _when(condition: Callable[[SpeculationConfig], bool], error: Exception) -> Fault:
    def fault(config: SpeculationConfig, num_passes: int) -> None:
        if condition(config):
            raise error

    return fault


def test_running_out_of_memory_drops_what_needs_more() -> None:
    bench = Bench(
        PLATEAU, faults=_when(lambda c: c.num_speculative_tokens >= 10, MemoryError("no room"))
    )
    result = bench.sweep()
    assert bench.regret(result) <= 0.03
    assert result.status == "validated"
    oom = [failure for failure in result.failures if failure.kind == "oom"]
    # One failure each at 15 and at 10: the smallest ratio fails, the others need no trial.
    assert [f.point.config.num_speculative_tokens for f in oom] == [15, 10]
    assert all("ran out of memory" in reason for reason in result.dominated.values())
    assert result.decisions[0].data["num_speculative_tokens"] == 7


def test_a_ratio_that_does_not_fit_leaves_the_smaller_ones() -> None:
    big = _when(lambda c: c.num_speculative_tokens > 0 and c.sparsity_ratio >= 0.25, MemoryError())
    bench = Bench(PLATEAU, faults=big)
    result = bench.sweep()
    assert bench.regret(result) <= 0.03
    assert {one.point.config.sparsity_ratio for one in result.measured(SPARSITY)} <= {
        1.0, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15,
    }  # fmt: skip


def test_nothing_measured_at_all_is_an_error() -> None:
    with pytest.raises(NoValidTrialError, match="engine") as caught:
        Bench(PLATEAU, faults=_when(lambda c: True, BackendError("it died"))).sweep()
    assert caught.value.exit_code == 7
    assert "it died" in caught.value.message


def test_only_plain_decoding_measured_is_inconclusive() -> None:
    drafting = _when(lambda c: c.num_speculative_tokens > 0, BackendError("draft kernel failed"))
    result = Bench(PLATEAU, faults=drafting).sweep()
    assert (result.status, result.selected) == ("inconclusive", result.plan.plain)
    assert "all failed" in result.reason


def test_an_engine_that_dies_for_good_leaves_what_was_found() -> None:
    def fault(config: SpeculationConfig, num_passes: int) -> None:
        if num_passes >= 30:
            raise BackendError("gone")

    result = Bench(PLATEAU, faults=fault).sweep()
    assert result.status == "inconclusive"
    assert len(result.measured()) == 30
    assert result.failures


def test_a_fault_now_and_then_costs_no_decision() -> None:
    random = np.random.default_rng(0)

    def fault(config: SpeculationConfig, num_passes: int) -> None:
        if random.random() < 0.1:
            raise BackendError("hiccup")

    bench = Bench(PLATEAU, faults=fault)
    result = bench.sweep()
    assert result.status == "validated"
    assert bench.regret(result) <= 0.03


def test_failed_validation_rounds_are_put_up_with_three_times() -> None:
    def fault(config: SpeculationConfig, num_passes: int) -> None:
        if validating[0] and config.num_speculative_tokens == 0:
            raise MemoryError

    validating = [False]

    class Watch:
        def started(self, step: str, what: str) -> None:
            validating[0] = step == VALIDATE

        def measured(self, outcome: Outcome, spent_s: float) -> None: ...

        def decided(self, decision: Decision) -> None: ...

    result = Bench(PLATEAU, faults=fault).sweep(Watch())
    assert result.status == "inconclusive"
    assert result.selected.num_speculative_tokens > 0
    assert result.validation is None


# ------------------------------------------------------------------ progress


def test_progress_is_told_of_every_step_point_and_decision() -> None:
    class Listener:
        def __init__(self) -> None:
            self.steps: list[str] = []
            self.outcomes: list[Outcome] = []
            self.spent: list[float] = []
            self.decisions: list[Decision] = []

        def started(self, step: str, what: str) -> None:
            self.steps.append(step)
            assert what

        def measured(self, outcome: Outcome, spent_s: float) -> None:
            self.outcomes.append(outcome)
            self.spent.append(spent_s)

        def decided(self, decision: Decision) -> None:
            self.decisions.append(decision)

    listener = Listener()
    result = Bench(PLATEAU).sweep(listener)
    assert tuple(listener.steps) == STEPS
    assert tuple(listener.outcomes) == result.outcomes
    assert tuple(listener.decisions) == result.decisions
    assert listener.spent == sorted(listener.spent)
    assert listener.spent[-1] == result.spent_s
    assert all(isinstance(outcome, (Measured, Failed)) for outcome in listener.outcomes)
