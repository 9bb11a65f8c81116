from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vegas_runtime.errors import UsageError, WorkloadError
from vegas_tune.request import PACKAGED, SERVED, SweepRequest, parse_duration_s
from vegas_tune.tune import describe, describe_text, resume_command


def options(**changes: Any) -> dict[str, Any]:
    """What the command line hands over when only a model is named."""
    values: dict[str, Any] = {
        "model": "smollm2-135m", "backend": "auto", "budget": None, "workload": "stdlib",
        "data": None, "context": None, "batch": None, "blocks": None, "waiting": None,
        "max_new_tokens": None, "tokens": None, "rounds": None, "temperature": 0.0, "top_k": 0,
        "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "algorithm": "vegas", "rows": None,
        "metric": "weight", "scope": "layer", "granularity": None, "min_tokens": None,
        "max_gamma": 15, "ratios": None, "gammas": None, "tensor_parallel_size": 1, "seed": 0,
        "dtype": "auto", "device": "auto", "run_dir": None, "new": False,
    }  # fmt: skip
    return values | changes


def test_the_packaged_model_gets_defaults_of_its_own() -> None:
    small = SweepRequest.from_options(options(model="SmolLM2-135M"))
    assert small.budget_s == 720
    assert small.base.min_tokens == PACKAGED.min_tokens
    assert small.spec.context_len == PACKAGED.context
    served = SweepRequest.from_options(options(model="Qwen3-8B"))
    assert served.base.min_tokens == SERVED.min_tokens == 256
    own_text = SweepRequest.from_options(options(workload="prompts.jsonl"))
    assert own_text.base.min_tokens == 256
    assert own_text.spec.path == Path("prompts.jsonl")
    assert own_text.spec.name == "jsonl"


def test_every_packaged_ratio_lies_above_the_floor() -> None:
    described = describe(SweepRequest.from_options(options()))
    assert described["inactive_ratios"] == []
    assert described["ratios"] == list(PACKAGED.ratios)


def test_what_is_given_wins_over_defaults() -> None:
    request = SweepRequest.from_options(
        options(budget="90s", ratios="0.05,0.1,0.2", gammas="2,4", batch=3, min_tokens=8)
    )
    assert request.budget_s == 90
    assert request.ratios == (0.05, 0.1, 0.2)
    assert request.gammas == (2, 4)
    assert request.spec.batch_size == 3
    assert request.base.min_tokens == 8


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("12m", 720), ("1.5h", 5400)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "12", "m", "0m", "-5s", "1d", "ten minutes"])
def test_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="length of time"):
        parse_duration_s(text)


@pytest.mark.parametrize("changes", [{"ratios": "a,b"}, {"gammas": "1.5"}])
def test_lists_that_are_no_numbers_are_refused(changes: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="separated by commas"):
        SweepRequest.from_options(options(**changes))


def test_two_files_for_one_workload_are_refused() -> None:
    with pytest.raises(UsageError, match="one of them"):
        SweepRequest.from_options(options(workload="a.jsonl", data=Path("b.jsonl")))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel_size": 0, "backend": "vllm"}, "size is 0; at least 1"),
        ({"tensor_parallel_size": 2, "backend": "reference"}, "only vLLM .* reference, as asked"),
        ({"tensor_parallel_size": 2, "backend": "replay"}, "only vLLM .* replay, as asked"),
    ],
)
def test_a_split_that_means_nothing_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SweepRequest.from_options(options(**changes))


def test_a_split_is_part_of_the_plan_and_of_its_description() -> None:
    one, two = (
        SweepRequest.from_options(options(backend="vllm", tensor_parallel_size=size))
        for size in (1, 2)
    )
    described = describe(two)
    assert described["tensor_parallel_size"] == 2
    assert "each on 2 GPUs" in describe_text(described)
    assert "on 1 GPU" not in describe_text(describe(one))


def test_contexts_below_the_floor_are_refused_before_anything_is_loaded() -> None:
    request = SweepRequest.from_options(options(context=128, min_tokens=256))
    with pytest.raises(WorkloadError, match="--min-tokens"):
        describe(request)


def test_the_resume_command_is_the_same_without_new() -> None:
    words = ["/somewhere/bin/vegas-tune", "sweep", "--model", "a b", "--new", "--budget", "5m"]
    assert resume_command(words) == "vegas-tune sweep --model 'a b' --budget 5m"
