"""A whole engine that drafts with Quest: no output changes, and its bounds are the cache's.

As `test_vllm_worker`: one process runs `vllm_quest_scenarios`.
"""

from __future__ import annotations

from typing import Any

import pytest
from script_runs import report_of
from tiny_decoding import decode, saved_model

from vegas_runtime.config import SpeculationConfig

pytest.importorskip("vllm", reason="the plugin runs inside vLLM")

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the engine did."""
    folder = str(tmp_path_factory.mktemp("llama"))
    return report_of("vllm_quest_scenarios.py", folder, timeout_s=550) | {"folder": folder}


def test_every_draft_over_the_whole_cache_is_accepted(report: dict[str, Any]) -> None:
    # At ratio 1 a draft pass sees what verification sees, so q = p.
    counts = report["everything"]
    assert counts["drafts"] > 20
    assert counts["accepted"] == counts["drafts"]


def test_greedy_output_is_stocks_through_rejections_and_preemption(report: dict[str, Any]) -> None:
    counts = report["sparse"]
    assert report["held"] == "quest"
    assert 0 < counts["accepted"] < counts["drafts"]
    assert counts["preemptions"] > 0
    assert report["tokens"] == report["stock"]


def test_as_many_drafts_are_accepted_as_in_the_reference_engine(report: dict[str, Any]) -> None:
    """The same model, prompts, budget and pages; there nothing is paged."""
    config = SpeculationConfig(algorithm="quest", **report["sparse_setting"])
    few = report["prompts"]
    decoded = decode(
        saved_model(report["folder"]),
        few,
        config,
        max_new_tokens=len(report["stock"][0]),
        lanes=4,
    )
    assert decoded.outputs == report["stock"][: len(few)]
    drafted = sum(sum(step.num_draft_tokens) for step in decoded.steps)
    # Float32 in both: what may differ is a page or a token that nearly ties.
    assert abs(report["few"]["accepted"] - sum(decoded.all_accepted)) <= 2
    # A preempted request starts with a pass that verifies nothing, and vLLM drafts at the end.
    assert abs(report["few"]["drafts"] - drafted) <= 9


def test_bounds_of_full_blocks_are_those_of_the_cache(report: dict[str, Any]) -> None:
    assert report["bounds"]["checked"] >= 6
    assert report["bounds"]["wrong"] == 0


def test_coming_back_to_quest_bounds_what_another_method_wrote(report: dict[str, Any]) -> None:
    assert report["vegas_tokens"] == report["stock"][:3]
    assert report["stale"]["wrong"] > 0, "Vegas bounds nothing, so this test would show nothing"
    assert report["rebuilt"]["checked"] >= 6
    assert report["rebuilt"]["wrong"] == 0


def test_bounds_are_counted_where_memory_is(report: dict[str, Any]) -> None:
    assert report["memory"] == 16 << 20
    assert report["collector_bytes"] > report["bounds_bytes"] > 0


def test_what_slows_quest_is_said(report: dict[str, Any]) -> None:
    assert "its own query" in report["slowed_by"]["quest"]
