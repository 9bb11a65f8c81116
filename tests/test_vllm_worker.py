"""Whole engines: vLLM's scheduler, V2 runner and samplers, drafting with the target on a CPU.

Everything but CUDA graphs and CUDA kernels; see `vllm_bed`. One process runs all scenarios, because
importing vLLM takes longer than any of them.
"""

from __future__ import annotations

from typing import Any

import pytest
from script_runs import report_of

pytest.importorskip("vllm", reason="the plugin runs inside vLLM")

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the engines of `vllm_scenarios` did."""
    return report_of("vllm_scenarios.py", str(tmp_path_factory.mktemp("llama")), timeout_s=550)


def test_the_bed_runs_the_v2_runner(report: dict[str, Any]) -> None:
    assert report["stock"]["runner"] == "vllm.v1.worker.gpu.model_runner"


def test_vllm_is_as_the_worker_needs_it(report: dict[str, Any]) -> None:
    assert len(report["deviations"]) > 10
    assert {target: found for target, found in report["deviations"].items() if found} == {}


@pytest.mark.parametrize("sampling", ["greedy", "sampled", "penalised"])
def test_every_draft_over_the_whole_cache_is_accepted(
    report: dict[str, Any], sampling: str
) -> None:
    # At ratio 1 a draft pass sees what verification sees, so q = p; with penalties too.
    counts = report[f"everything_{sampling}"]
    assert counts["drafts"] > 20
    assert counts["accepted"] == counts["drafts"]


def test_drafts_filtered_by_top_k_and_top_p_are_accepted_but_for_the_threshold(
    report: dict[str, Any],
) -> None:
    # q keeps a token too many where two lie within 1/32 of a logit; p rejects it then.
    counts = report["everything_filtered"]
    assert counts["drafts"] > 20
    assert counts["accepted"] >= counts["drafts"] - 3


def test_a_draws_distribution_is_the_processed_one(report: dict[str, Any]) -> None:
    for case in report["draws"]:
        assert case["missing"] == 0, "a token that p allows is never forbidden"
        # Float32: a division by the temperature and a multiplication with it.
        assert case["error"] < 2e-6
        # Random logits lie far denser at the threshold than a language model's.
        assert case["distance"] < 0.05
        assert case["others_untouched"]


def test_only_what_is_kept_is_drawn_and_as_often_as_it_should(report: dict[str, Any]) -> None:
    assert all(case["forbidden_drawn"] == 0 for case in report["draws"])
    # Nine classes: the 99.99 % quantile of chi-square with 8 degrees of freedom is 31.8.
    assert report["draws"][0]["chi_square"] < 31.8


def test_at_temperature_0_the_likeliest_token_is_drawn(report: dict[str, Any]) -> None:
    assert report["draws"][-1]["argmax"]
    assert not report["draws"][0]["argmax"]


def test_greedy_output_is_stocks_when_most_of_the_cache_is_left_out(
    report: dict[str, Any],
) -> None:
    counts = report["sparse_counts"]
    assert 0 < counts["accepted"] < counts["drafts"]
    assert report["sparse"] == report["stock"]["mixed"]


def test_greedy_output_with_penalties_is_stocks(report: dict[str, Any]) -> None:
    assert report["penalised"] == report["stock"]["penalised"]
    assert report["penalised"] != report["stock"]["mixed"]


def test_drafts_leave_no_trace_in_the_penalties_counts(report: dict[str, Any]) -> None:
    assert report["counts_left"] == 0


def test_a_request_at_the_end_of_the_context_ends_there_and_the_others_go_on(
    report: dict[str, Any],
) -> None:
    assert [len(tokens) for tokens in report["long"]] == [6, 30, 30]
    assert report["long"] == report["stock"]["long"]


def test_a_stop_token_inside_a_block_ends_the_request(report: dict[str, Any]) -> None:
    assert report["stopped"] == report["stock"]["stopped"]
    assert len(report["stopped"][0]) < len(report["stopped"][1])


def test_logprobs_are_the_targets(report: dict[str, Any]) -> None:
    ours, stock = report["logprobs"], report["stock"]["logprobs"]
    for mine, theirs in zip(ours, stock, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            # Verification multiplies the same rows in other batches: float32 rounding.
            assert a == pytest.approx(b, abs=1e-4)


def test_the_setting_changes_while_the_engine_runs_and_is_read_back(
    report: dict[str, Any],
) -> None:
    held = report["sparse_in_force"]
    assert (held["sparsity_ratio"], held["min_tokens"], held["algorithm"]) == (0.3, 6, "vegas")


@pytest.mark.parametrize("change", ["off", "fewer", "streaming"])
def test_output_does_not_depend_on_what_drafts(report: dict[str, Any], change: str) -> None:
    assert report[change] == report["stock"]["mixed"]


def test_without_drafts_nothing_is_collected(report: dict[str, Any]) -> None:
    assert report["off_counts"]["drafts"] == report["off_counts"]["collected"] == 0
    assert report["fewer_counts"]["collected"] > 0


def test_fewer_drafts_are_fewer_rows_to_verify(report: dict[str, Any]) -> None:
    fewer, all_of_them = report["fewer_counts"]["drafts"], report["sparse_counts"]["drafts"]
    assert 0 < fewer < all_of_them


def test_preempted_and_resumed_requests_repeat_stock(report: dict[str, Any]) -> None:
    assert report["crowded_counts"]["preemptions"] > 0
    assert report["crowded_counts"]["drafts"] > 0
    assert report["crowded"] == report["stock"]["mixed"]


def test_a_cached_prompt_drafts_like_a_fresh_one(report: dict[str, Any]) -> None:
    assert report["cache_hits"] > 0
    assert report["cached"] == report["stock"]["mixed"][-1:]


def test_status_says_which_paths_are_taken(report: dict[str, Any]) -> None:
    (worker,) = report["status"]["workers"]
    assert worker["collection"] == worker["draft_attention"] == "plain"
    assert worker["num_layers"] == 2
    # Four requests' q for three drafts, one pass's logits, and a histogram of 512 bins.
    assert worker["draft_bytes"] == 4 * (4 * 3 * 128 + 4 * 128 + 4 * 512)
