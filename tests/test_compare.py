"""Comparing two profiles: ratios with intervals, and when they are not like for like."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from profiles import estimate, make_profile
from vegas_runtime.profile import Estimate
from vegas_tune.compare import Change, Comparison, compare_profiles, ratio_of


def measured(est: float, low: float, high: float, n: int | None = None) -> Estimate:
    return Estimate(est=est, low=low, high=high, n=n)


def change(comparison: Comparison, name: str) -> Change:
    return next(each for each in comparison.changes if each.name == name)


class TestRatio:
    def test_interval_is_that_of_the_delta_method(self) -> None:
        a = measured(50, 50 * math.exp(-0.03), 50 * math.exp(0.03))
        b = measured(60, 60 * math.exp(-0.04), 60 * math.exp(0.04))
        ratio = ratio_of(a, b)
        assert ratio is not None
        assert ratio.low is not None
        assert ratio.high is not None
        assert ratio.est == pytest.approx(1.2)
        assert math.log(ratio.high / ratio.est) == pytest.approx(0.05, rel=1e-3)
        assert math.log(ratio.est / ratio.low) == pytest.approx(0.05, rel=1e-3)

    def test_interval_covers_the_true_ratio(self) -> None:
        random = np.random.default_rng(7)
        hits, runs = 0, 2000
        for _ in range(runs):
            one, other = (mean * math.exp(random.normal(0, 0.02)) for mean in (50.0, 60.0))
            reach = math.exp(1.96 * 0.02)
            ratio = ratio_of(
                measured(one, one / reach, one * reach),
                measured(other, other / reach, other * reach),
            )
            assert ratio is not None
            assert ratio.low is not None
            assert ratio.high is not None
            hits += ratio.low <= 1.2 <= ratio.high
        # 95 % of 2,000 runs; five binomial standard errors of 0.49 % on either side.
        assert 0.95 - 0.025 < hits / runs < 0.95 + 0.025

    def test_swapping_turns_the_interval_over(self) -> None:
        a, b = measured(4.4, 4.0, 4.7), measured(5.0, 4.9, 5.3)
        one, other = ratio_of(a, b), ratio_of(b, a)
        assert one is not None
        assert one.low is not None
        assert other is not None
        assert other.high is not None
        assert one.low == pytest.approx(1 / other.high, rel=1e-4)

    def test_a_bound_at_zero_does_not_break_it(self) -> None:
        ratio = ratio_of(measured(0.1, 0.0, 0.2), measured(0.2, 0.15, 0.25))
        assert ratio is not None
        assert ratio.high is not None
        assert math.isfinite(ratio.high)

    def test_without_an_interval_there_is_none(self) -> None:
        ratio = ratio_of(Estimate(est=2, point_only=True), measured(3, 2, 4))
        assert ratio == Estimate(est=1.5, point_only=True)

    @pytest.mark.parametrize("a", [None, measured(0, 0, 1)])
    def test_nothing_is_compared_with_nothing(self, a: Estimate | None) -> None:
        assert ratio_of(a, measured(1, 0.9, 1.1)) is None


class TestComparison:
    def test_a_profile_equals_itself(self) -> None:
        comparison = compare_profiles(make_profile(), make_profile())
        assert comparison.is_like_for_like
        assert comparison.differences == ()
        for each in comparison.changes:
            assert each.ratio is not None
            assert each.ratio.est == 1
            assert each.verdict == "no difference shown"

    @pytest.mark.parametrize(
        ("tok_s", "verdict"),
        [(58.5 * 1.1, "higher"), (58.5 * 0.9, "lower"), (59.0, "no difference shown")],
    )
    def test_verdict_follows_the_interval(self, tok_s: float, verdict: str) -> None:
        changed = make_profile(results={"decode_tok_s": estimate(tok_s)})
        comparison = compare_profiles(make_profile(), changed)
        assert change(comparison, "decode throughput, tok/s").verdict == verdict

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"match": {"model": {"config_sha256": "d2" * 32}}}, "model.config_sha256"),
            ({"match": {"model": {"dtype": "float32"}}}, "model.dtype"),
            ({"match": {"device": {"class": "Another CPU"}}}, "device.class"),
            ({"match": {"sampling": {"temperature": 0.6}}}, "sampling.temperature"),
            ({"workload": {"prompts_sha256": "cc" * 32}}, "workload.prompts_sha256"),
            ({"workload": {"batch_size": 4}}, "workload.batch_size"),
            ({"protocol": {"id": "steady-v2"}}, "protocol.id"),
            ({"backend": "vllm"}, "backend"),
        ],
    )
    def test_another_question_is_not_like_for_like(
        self, changes: dict[str, Any], field: str
    ) -> None:
        comparison = compare_profiles(make_profile(), make_profile(**changes))
        assert not comparison.is_like_for_like
        assert field in [each.field for each in comparison.differences if each.is_decisive]
        assert comparison.to_markdown().startswith("Not like for like:")
        assert field in comparison.to_markdown()

    @pytest.mark.parametrize(
        ("match", "field"),
        [
            ({"runtime": {"torch": "2.14.0"}}, "runtime.torch"),
            ({"model": {"id": "a/local-copy"}}, "model.id"),
            ({"model": {"revision": None}}, "model.revision"),
        ],
    )
    def test_a_small_difference_is_listed_and_does_not_forbid(
        self, match: dict[str, Any], field: str
    ) -> None:
        comparison = compare_profiles(make_profile(), make_profile(match=match))
        assert comparison.is_like_for_like
        assert [each.field for each in comparison.differences] == [field]

    def test_a_wildcard_differs_from_nothing(self) -> None:
        anywhere = make_profile(match={"device": {"class": "*"}, "runtime": {"torch": "*"}})
        assert compare_profiles(make_profile(), anywhere).differences == ()
        assert compare_profiles(anywhere, make_profile()).differences == ()

    def test_what_only_one_measured_is_said(self) -> None:
        comparison = compare_profiles(
            make_profile(), make_profile(results={"accepted_per_iteration": None})
        )
        assert change(comparison, "accepted drafts per iteration").verdict == "not measured"
        assert "not recorded" in comparison.to_markdown()

    def test_cells_that_both_hold_are_compared(self) -> None:
        def cells(gain: float, last: int) -> dict[str, Any]:
            config = {"num_speculative_tokens": 4, "sparsity_ratio": 0.05}
            return {
                "buckets": [
                    {
                        "batch": [1, 9],
                        "context": [1024, 4096],
                        "config": config,
                        "speedup_vs_gamma0": estimate(gain),
                    },
                    {"batch": [9, last], "context": [1024, 4096], "config": config},
                ]
            }

        a, b = make_profile(selected=cells(1.2, 17)), make_profile(selected=cells(1.5, 33))
        found = [each for each in compare_profiles(a, b).changes if "batch" in each.name]
        assert [each.name for each in found] == ["speed-up, batch 1 to 8, context 1024 to 4095"]
        assert found[0].verdict == "higher"

    def test_is_plain_json(self) -> None:
        comparison = compare_profiles(make_profile(), make_profile(backend="vllm"))
        values = json.loads(json.dumps(comparison.to_dict()))
        assert values["is_like_for_like"] is False
        assert values["changes"][0]["ratio"]["est"] == 1
        assert values["noise_floor_cv"] == 0.015

    def test_names_and_values_cannot_form_markup(self) -> None:
        other = make_profile(match={"device": {"class": "<b>|x|"}})
        text = compare_profiles(make_profile(), other, names=("main", "<i>")).to_markdown()
        assert "\\<b\\>\\|x\\|" in text
        assert "\\<i\\> / main" in text
