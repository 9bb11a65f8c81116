from __future__ import annotations

import json
from typing import Any

import pytest
from synthetic import make_blocks

from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.errors import ConfigError, UsageError, WorkloadError
from vegas_tune.plan import Plan, Point, gamma_ladder, make_plan

BASE = SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0, min_tokens=32)


def _plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {"budget_s": 600.0, "tokens": 480}
    return make_plan(BASE, make_blocks(values.pop("blocks", 3)), **(values | changes))


@pytest.mark.parametrize(
    ("largest", "ladder"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (8, (1, 2, 3, 4, 5, 8)),
        (15, (1, 2, 3, 4, 5, 7, 10, 15)),
        (16, (1, 2, 3, 4, 5, 7, 10, 16)),
        (64, (1, 2, 3, 4, 5, 7, 10, 15, 21, 30, 43, 64)),
    ],
)
def test_gamma_ladder_ends_at_the_largest(largest: int, ladder: tuple[int, ...]) -> None:
    assert gamma_ladder(largest) == ladder


@pytest.mark.parametrize("largest", [0, 65])
def test_gamma_ladder_refuses_what_no_engine_runs(largest: int) -> None:
    with pytest.raises(UsageError, match=str(largest)):
        gamma_ladder(largest)


def test_plan_survives_json() -> None:
    plan = _plan(model={"id": "m", "dtype": "float32"})
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert again.identity == plan.identity


def test_a_plan_from_before_fewer_drafts_had_a_tie_of_their_own_keeps_its_one() -> None:
    values = _plan().to_dict() | {"tie_tolerance": 0.007}
    assert Plan.from_dict(values).gamma_tie_tolerance == _plan().gamma_tie_tolerance == 0.01
    del values["gamma_tie_tolerance"]
    assert Plan.from_dict(values).gamma_tie_tolerance == 0.007


def test_a_plan_from_before_models_were_split_is_of_one_gpu() -> None:
    values = _plan().to_dict()
    del values["tensor_parallel_size"]
    assert Plan.from_dict(values).identity == _plan().identity
    assert _plan(tensor_parallel_size=2).identity != _plan().identity


def test_a_plan_with_unknown_keys_is_not_read() -> None:
    with pytest.raises(ValueError, match="colour"):
        Plan.from_dict(_plan().to_dict() | {"colour": "red"})


def test_more_time_is_the_same_plan_and_other_text_is_not() -> None:
    plan = _plan()
    assert _plan(budget_s=900.0).identity == plan.identity
    assert _plan(seed=1).identity != plan.identity
    other = make_plan(BASE, make_blocks(3, prompt_tokens=1000), budget_s=600.0, tokens=480)
    assert other.identity != plan.identity


def test_validation_text_is_held_out() -> None:
    for count, search, validation in ((1, (0,), (0,)), (2, (0,), (1,)), (3, (0, 1), (2,))):
        plan = make_plan(BASE, make_blocks(count), budget_s=600.0, tokens=480)
        assert (plan.search_blocks, plan.validation_blocks) == (search, validation)
        assert plan.is_held_out == (count > 1)


def test_a_plan_knows_whether_its_text_repeats_itself() -> None:
    greedy = make_blocks(1, sampling=SamplingConfig())
    assert make_plan(BASE, greedy, budget_s=600.0, tokens=480).is_greedy
    assert not _plan().is_greedy


def test_every_plain_setting_is_the_same_one() -> None:
    plan = _plan()
    assert plan.config(0, 0.02) == plan.config(0, 0.5) == plan.plain


def test_bad_candidates_are_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match="budget"):
        _plan(budget_s=0.0)
    with pytest.raises(UsageError, match="nothing to tune"):
        _plan(gammas=(0,))
    with pytest.raises(ConfigError, match="sparsity_ratio"):
        _plan(ratios=(0.1, 7.0))
    with pytest.raises(WorkloadError, match="no prompts"):
        make_plan(BASE, (), budget_s=600.0, tokens=480)


def test_points_have_distinct_names_that_fit_a_file() -> None:
    plan = _plan()
    points = [
        Point(step="2-gamma", config=plan.config(g, r), block=b, replicate=i, max_tokens=1)
        for g in plan.gammas
        for r in plan.ratios
        for b in range(3)
        for i in range(3)
    ]
    keys = {point.key for point in points}
    assert len(keys) == len(points)
    assert not any("/" in key for key in keys)
    assert Point.from_dict(json.loads(json.dumps(points[5].to_dict()))) == points[5]


def test_describe_counts_time_and_disk_before_anything_is_measured() -> None:
    plan = _plan()
    unknown = plan.describe(prompt_tokens=48_000)
    assert unknown["expected_s"] is None
    assert [step["step"] for step in unknown["steps"]] == [
        "1-sparsity", "2-gamma", "3-refine", "4-validate",
    ]  # fmt: skip
    slow = plan.describe(tok_s=1.0, prefill_tok_s=100.0, prompt_tokens=48_000)
    assert slow["expected_s"] == plan.budget_s
    fast = plan.describe(tok_s=1e4, prefill_tok_s=1e6, prompt_tokens=48_000)
    assert 0 < fast["expected_s"] < 30
    assert fast["disk_bytes"] > 0
