"""Whole engines that change from method to method: no output changes, no draft is lost.

As `test_vllm_worker`: one process runs `vllm_method_scenarios`.
"""

from __future__ import annotations

from typing import Any

import pytest
from script_runs import report_of
from tiny_decoding import decode, saved_model

from vegas_runtime.config import SpeculationConfig

pytest.importorskip("vllm", reason="the plugin runs inside vLLM")

pytestmark = pytest.mark.vllm
METHODS = (
    *("last_accepted", "accepted_only", "spec_extend", "sparse_spec", "snapkv"),
    *("page", "vegas"),
)
on_each_method = pytest.mark.parametrize("name", METHODS)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the engines did."""
    folder = str(tmp_path_factory.mktemp("llama"))
    return report_of("vllm_method_scenarios.py", folder, timeout_s=900) | {"folder": folder}


def test_every_method_ran_in_one_engine(report: dict[str, Any]) -> None:
    assert {*report["methods"]} == {*METHODS}
    for name, found in report["methods"].items():
        held = found["held"]
        assert name in held.values()


@on_each_method
def test_every_draft_over_the_whole_cache_is_accepted(report: dict[str, Any], name: str) -> None:
    # At ratio 1 a draft pass sees what verification sees, so q = p.
    counts = report["methods"][name]["everything"]
    assert counts["drafts"] > 20
    assert counts["accepted"] == counts["drafts"]


@on_each_method
def test_greedy_output_is_stocks(report: dict[str, Any], name: str) -> None:
    counts = report["methods"][name]["sparse"]
    assert 0 < counts["accepted"] < counts["drafts"]
    assert report["methods"][name]["tokens"] == report["stock"]


@on_each_method
def test_as_many_drafts_are_accepted_as_in_the_reference_engine(
    report: dict[str, Any], name: str
) -> None:
    """The same model, prompts, budget and method; there scores are float32 and nothing is paged."""
    found = report["methods"][name]
    config = SpeculationConfig(**found["held"], **report["sparse_setting"])
    decoded = decode(
        saved_model(report["folder"]),
        report["prompts"],
        config,
        max_new_tokens=len(report["stock"][0]),
        lanes=4,
    )
    assert decoded.outputs == report["stock"]
    drafted = sum(sum(step.num_draft_tokens) for step in decoded.steps)
    accepted = sum(decoded.all_accepted)
    # One byte a score, and a budget that counts no drafts behind a prompt, move single drafts.
    assert abs(found["sparse"]["accepted"] - accepted) <= 4
    assert abs(found["sparse"]["drafts"] - drafted) <= 9


@on_each_method
def test_preempted_and_resumed_requests_repeat_stock(report: dict[str, Any], name: str) -> None:
    found = report["crowded"][name]
    assert found["counts"]["preemptions"] > 0
    assert found["counts"]["drafts"] > 0
    assert found["tokens"] == report["stock_crowd"]


def test_what_slows_a_method_is_said(report: dict[str, Any]) -> None:
    slowed = report["slowed_by"]
    assert "vegas" not in slowed
    assert "second pass over K" in slowed["spec_extend"]
    assert "32 prompt rows run a second time" in slowed["snapkv"]
    assert "second pass over K" in slowed["vegas, rows last_accepted"]


def test_drafts_leave_no_trace_in_the_penalties_counts(report: dict[str, Any]) -> None:
    assert report["counts_left"] == 0


def test_prompts_choose_by_the_rows_that_prefilling_computed(report: dict[str, Any]) -> None:
    rows = report["prompt_rows"]
    assert rows["hits"] > 0
    # Float32 in other batches; neighbouring rows differ by far more.
    assert max(rows["again"], rows["cached"]) < 1e-4 * rows["rows"]
