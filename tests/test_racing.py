from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from synthetic import PLATEAU
from test_sweep import Bench

from vegas_runtime.config import SpeculationConfig
from vegas_tune.decide import spending_levels
from vegas_tune.plan import DEFAULT_RACE_LOOKS, GAMMA, Plan
from vegas_tune.racing import drop_outs

FOUR = [SpeculationConfig(num_speculative_tokens=g, sparsity_ratio=0.05) for g in (2, 3, 4, 5)]


def _race(losses: list[float], seed: int, noise: float = 0.015) -> dict[SpeculationConfig, int]:
    """Rounds after which each setting drops out; settings run at 1 - loss of the same speed."""
    random = np.random.default_rng(seed)
    racing, dropped = FOUR[: len(losses)], dict[SpeculationConfig, int]()
    speed = dict(zip(racing, np.log1p(-np.array(losses)), strict=True))
    rounds = []
    for number in range(1, DEFAULT_RACE_LOOKS[-1] + 1):
        mood = random.normal(0, 0.05)
        rounds.append({c: float(speed[c] + mood + random.normal(0, noise)) for c in racing})
        if number in DEFAULT_RACE_LOOKS:
            out = drop_outs(rounds, racing, num_looks=len(DEFAULT_RACE_LOOKS))
            dropped |= dict.fromkeys(out, number)
            racing = [config for config in racing if config not in out]
    return dropped


def test_the_best_hardly_ever_drops_out_however_often_one_looks() -> None:
    races = [_race([0.0, 0.0], seed) for seed in range(300)]
    # Two equals: each is the designated best. 5 % of 300 races, and three binomial deviations.
    for config in FOUR[:2]:
        assert sum(config in dropped for dropped in races) <= 0.05 * 300 + 3 * 3.8


def test_the_slow_drop_out_early_and_the_fastest_stays() -> None:
    races = [_race([0.04, 0.0, 0.05], seed) for seed in range(50)]
    assert sum(FOUR[0] in dropped and FOUR[2] in dropped for dropped in races) >= 45
    assert not any(FOUR[1] in dropped for dropped in races)
    assert min(min(dropped.values()) for dropped in races if dropped) == DEFAULT_RACE_LOOKS[0]


def test_what_all_settings_share_does_not_decide() -> None:
    # 5 % of mood per round against 1.5 % of noise: unpaired, 4 % could not be told apart.
    assert FOUR[0] in _race([0.06, 0.0], seed=1)


def test_levels_add_up_and_grow_towards_the_last_look() -> None:
    levels = spending_levels((6, 10, 16, 24), 0.05)
    assert sum(levels) == pytest.approx(0.05)
    assert all(early < late for early, late in pairwise(levels))


# ------------------------------------------------------------------ in a sweep


def test_step_two_races_forth_and_back_and_records_who_dropped_out() -> None:
    result = Bench(PLATEAU, tokens=6000, budget_s=1e5).sweep()
    decision = next(d for d in result.decisions if d.step == GAMMA)
    assert decision.rule == "best-first-bracket, wilcoxon-race"
    out = [one for one in decision.alternatives if "dropped_after_rounds" in one]
    assert out
    assert {one["dropped_after_rounds"] for one in out} <= set(DEFAULT_RACE_LOOKS)
    assert decision.chosen["num_speculative_tokens"] not in {
        one["num_speculative_tokens"] for one in out
    }
    points = [one.point for one in result.measured(GAMMA)]
    raced = sorted({point.replicate for point in points})[-4:]
    orders = [[p.config for p in points if p.replicate == number] for number in raced]
    for one, other in pairwise(orders):
        if set(one) == set(other):
            assert one == other[::-1]


def test_a_plan_recorded_before_the_race_is_carried_out_without_it() -> None:
    values = Bench(PLATEAU).plan.to_dict()
    del values["race_looks"]
    old = Plan.from_dict(values)
    assert old.race_looks == ()
    result = Bench(PLATEAU, rules={"race_looks": ()}).sweep()
    rules = [d.rule for d in result.decisions if d.step == GAMMA]
    assert rules == ["best-first-bracket"]
