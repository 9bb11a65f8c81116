"""How a step is laid out before it runs: its graph, its split, its budgets."""

from __future__ import annotations

from typing import Any

import pytest
from script_runs import report_of

from vegas_runtime.config import SpeculationConfig

pytest.importorskip("vllm", reason="the plugin runs inside vLLM")

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def pieces() -> dict[str, Any]:
    """What `vllm_pieces` did."""
    return report_of("vllm_pieces.py", timeout_s=300)


@pytest.mark.parametrize(
    ("batch", "graph"),
    [
        ("even", ["FULL", 16, 112, 7]),
        ("other_gamma", ["FULL", 16, 80, 5]),
        # One request at the end of its context, and two that just arrived: no cliff.
        ("uneven", ["FULL", 16, 112, 7]),
        ("arrival", ["FULL", 32, 224, 7]),
        # Mostly padding: the piecewise graph of 64 tokens does less.
        ("mostly_single", ["PIECEWISE", None, 32, None]),
        ("prompt_chunk", ["PIECEWISE", None, 64, None]),
        ("long_prompt", ["NONE", 5, 428, None]),
        ("plain", ["FULL", 16, 16, 1]),
        # Plain decoding's graph does not collect: the next wider one does.
        ("drafting_begins", ["FULL", 16, 80, 5]),
        ("dummy", ["FULL", 16, 112, 7]),
        ("before_capture", ["NONE", 10, 70, None]),
    ],
)
def test_a_step_replays(pieces: dict[str, Any], batch: str, graph: list[Any]) -> None:
    assert pieces["dispatch"][batch] == graph


def test_drafts_replay_the_next_larger_batch(pieces: dict[str, Any]) -> None:
    assert pieces["dispatch"]["drafts"] == [1, 4, 16, 32]


def test_prompt_chunks_are_split_off_behind_verification(pieces: dict[str, Any]) -> None:
    assert pieces["splits"]["verify_only"] == [4, 18, None]
    assert pieces["splits"]["with_chunks"] == [3, 16, [16, 36, 100]]
    assert pieces["splits"]["chunks_only"] == [0, 0, [0, 16, 46]]


def test_a_batch_in_another_order_is_noticed(pieces: dict[str, Any]) -> None:
    assert "no longer sorts" in pieces["splits"]["unsorted"]


def test_budgets_are_the_configurations_to_the_entry(pieces: dict[str, Any]) -> None:
    config = SpeculationConfig(num_speculative_tokens=6, sparsity_ratio=0.07, min_tokens=64)
    assert pieces["budgets"]["held"] == [
        config.kv_budget(7400 - 7),
        # Two drafts only: the request nears the end of its context.
        config.replace(num_speculative_tokens=2).kv_budget(5000 - 3),
        config.replace(num_speculative_tokens=0).kv_budget(3000 - 1),
        config.kv_budget(40 - 7),
        0,
        0,
    ]


def test_sinks_are_read_in_float32_whatever_the_model_holds(pieces: dict[str, Any]) -> None:
    assert pieces["sinks"] == ["torch.float32", [0.5, -2.0]]


def test_rows_and_requests_of_an_earlier_batch_do_not_stay(pieces: dict[str, Any]) -> None:
    assert pieces["budgets"]["is_prompt"] == [0, 0, 1, 0, 0, 0]
    assert pieces["budgets"]["rows"] == [1, 0, 0, 0, 0, 0]
    assert pieces["budgets"]["request_ids"] == [1, -1, -1, -1, -1, -1]
