from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles import estimate, make_profile
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import ConfigError, ModelError, UsageError
from vegas_runtime.profile import Profile, dump_profile, parse_profile
from vegas_tune.apply import FORMATS, batch_schedule, render

# --------------------------------------------------------------------------- formats


def read_yaml(text: str) -> tuple[str, Any]:
    values = yaml.safe_load(text)
    assert set(values) <= {"model", "max-num-seqs", "tensor-parallel-size", "speculative-config"}
    return values["model"], values.get("speculative-config")


def read_args(text: str) -> tuple[str, Any]:
    words = shlex.split(text, comments=True)
    assert words[:2] == ["vllm", "serve"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    config = options.get("--speculative-config")
    return words[2], None if config is None else json.loads(config)


def read_env(text: str) -> tuple[str, Any]:
    script = f'{text}\nprintf "%s\\0%s" "$VEGAS_MODEL" "$VEGAS_SPECULATIVE_CONFIG"'
    done = subprocess.run(["sh", "-eu", "-c", script], capture_output=True, text=True, check=True)
    model, config = done.stdout.split("\0")
    return model, json.loads(config) if config else None


def read_python(text: str) -> tuple[str, Any]:
    seen: dict[str, Any] = {}

    class LLM:
        def __init__(self, **arguments: Any) -> None:
            seen.update(arguments)

        def generate(self, prompts: list[str], sampling: dict[str, Any]) -> list[Any]:
            assert prompts
            assert sampling["max_tokens"] > 0
            return [SimpleNamespace(outputs=[SimpleNamespace(text="")])]

    fake = SimpleNamespace(LLM=LLM, SamplingParams=lambda **arguments: arguments)
    before = sys.modules.get("vllm")
    sys.modules["vllm"] = fake  # type: ignore[assignment]
    try:
        exec(compile(text, "snippet", "exec"), {"__name__": "__main__", "print": lambda _: None})
    finally:
        del sys.modules["vllm"]
        if before is not None:
            sys.modules["vllm"] = before
    return seen["model"], seen.get("speculative_config")


READERS: dict[str, Callable[[str], tuple[str, Any]]] = {
    "yaml": read_yaml,
    "args": read_args,
    "env": read_env,
    "python": read_python,
}


def test_every_format_is_read_back_here() -> None:
    assert set(READERS) == set(FORMATS)


configs = st.builds(
    SpeculationConfig,
    algorithm=st.sampled_from(["vegas", "streaming_llm"]),
    num_speculative_tokens=st.integers(1, 64),
    sparsity_ratio=st.floats(0, 1, exclude_min=True),
    min_tokens=st.integers(1, 4096),
    rows=st.sampled_from(["two", "all", "last_accepted"]),
    metric=st.sampled_from(["weight", "logit"]),
    scope=st.sampled_from(["layer", "kv_head"]),
)


@pytest.mark.parametrize("output", READERS)
@settings(max_examples=20, deadline=None)
@given(
    config=configs, model=st.sampled_from(["Qwen/Qwen3-8B", "./a b", "no", "it's $HOME `x`", "é"])
)
def test_what_is_rendered_reads_back_as_the_selected_setting(
    output: str, config: SpeculationConfig, model: str
) -> None:
    made = make_profile(
        selected={"default": config.to_dict()}, match={"model": {"id": model}, "device": {"tp": 2}}
    )
    profile = parse_profile(dump_profile(made))

    served, speculative = READERS[output](render(profile, output))

    assert served == model
    assert SpeculationConfig.from_rfc(speculative) == profile.selected.default == config
    # The lookup serving uses ends at the same setting.
    assert profile.select(batch=8, context=2048) == config


@pytest.mark.parametrize("output", READERS)
def test_plain_decoding_is_rendered_without_speculation_and_says_so(output: str) -> None:
    profile = make_profile(selected={"default": {"num_speculative_tokens": 0}})

    text = render(profile, output)

    assert "# Plain decoding measured fastest, so nothing is drafted." in text
    assert READERS[output](text) == (profile.match.model.id, None)


@pytest.mark.parametrize("output", READERS)
def test_text_of_a_profile_cannot_leave_its_comment(output: str) -> None:
    evil = "GPU\nmax-num-seqs: 99\ntouch /tmp/x\nimport os"
    profile = make_profile(match={"device": {"class": evil}})

    text = render(profile, output)

    assert "touch" in text
    assert all(line.startswith("#") for line in text.splitlines() if "touch" in line)
    READERS[output](text)


def test_limits_come_from_what_was_measured() -> None:
    profile = make_profile(validity={"batch": [1, 33]}, match={"device": {"tp": 4}})

    text = render(profile, "yaml")

    values = yaml.safe_load(text)
    assert values["max-num-seqs"] == 32
    assert values["tensor-parallel-size"] == 4
    assert f"# vegas-tune profile {profile.profile_id}\n" in text
    assert "# Measured for 1 to 32 running requests and contexts of 1024 to 4095 tokens." in text
    assert "tensor-parallel-size" not in yaml.safe_load(render(make_profile(), "yaml"))
    assert "--tensor-parallel-size 4" in render(profile, "args")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"status": "draft"}, "WARNING: a draft"),
        ({"status": "inconclusive"}, "WARNING: inconclusive"),
        ({}, "WARNING: measured with the reference backend"),
        (
            {},
            "Measured 1.25x [1.23, 1.27] the decode throughput of plain decoding on AMD EPYC 9B14.",
        ),
        (
            {"results": {"speedup_vs_gamma0": estimate(1.01)}},
            "WARNING: that is not clearly faster than plain decoding.",
        ),
        ({"results": {"speedup_vs_gamma0": 1.3}}, "WARNING: that is not clearly faster"),
        (
            {"selected": {"default": {"min_tokens": 256}}},
            "Below about 3657 tokens of context the floor of 256 tokens decides",
        ),
    ],
)
def test_what_a_reader_must_know_is_a_comment(changes: dict[str, Any], expected: str) -> None:
    text = render(make_profile(**changes), "yaml")

    assert any(line.startswith(f"# {expected}") for line in text.splitlines())


def test_a_good_profile_for_vllm_has_no_warning() -> None:
    assert "WARNING" not in render(make_profile(backend="vllm"), "yaml")


def test_a_profile_for_any_model_needs_one_to_serve() -> None:
    profile = make_profile(match={"model": {"id": "*"}})

    with pytest.raises(UsageError, match="--model"):
        render(profile)
    assert read_yaml(render(profile, model="a/b"))[0] == "a/b"


def test_the_model_to_serve_is_named_as_vllm_knows_it(tmp_path: Path) -> None:
    profile = make_profile()

    assert read_yaml(render(profile, model="qwen3-8b"))[0] == "Qwen/Qwen3-8B"
    assert read_yaml(render(profile, model=str(tmp_path)))[0] == str(tmp_path)
    with pytest.raises(ModelError, match="neither a known short name"):
        render(profile, model="nothing")


@pytest.mark.parametrize("model", ["smollm2-135m", "a-folder-elsewhere"])
def test_a_name_that_vllm_cannot_fetch_is_warned_of(model: str) -> None:
    text = render(make_profile(match={"model": {"id": model}}), "args")

    assert f"# WARNING: vLLM cannot fetch a model by the name {model}; " in text
    assert "cannot fetch" not in render(make_profile(), "args")


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="'k8s' is unknown; known are yaml, args, python, env"):
        render(make_profile(), "k8s")


# --------------------------------------------------------------------------- schedules


def bucket(batch: list[int], gamma: int, **changes: Any) -> dict[str, Any]:
    config = SpeculationConfig(num_speculative_tokens=gamma, sparsity_ratio=0.07, min_tokens=32)
    context = changes.pop("context", [1024, 4096])
    return {"batch": batch, "context": context, "config": config.replace(**changes).to_dict()}


def as_vllm_reads(schedule: list[list[int]], batch: int) -> int:
    """vLLM's lookup: inclusive ranges, a gap and the tail continue what came before."""
    assert schedule[0][0] == 1
    return [gamma for first, _, gamma in schedule if first <= batch][-1]


@pytest.mark.parametrize(
    ("buckets", "outside", "expected"),
    [
        ([bucket([1, 9], 6)], "default", None),
        ([bucket([1, 9], 6)], "fallback_gamma_0", [[1, 8, 6], [9, 9, 0]]),
        ([bucket([4, 9], 6)], "fallback_gamma_0", [[1, 3, 0], [4, 8, 6], [9, 9, 0]]),
        ([bucket([0, 9], 7), bucket([9, 33], 3)], "nearest", [[1, 8, 7], [9, 33, 3]]),
        (
            [bucket([16, 33], 2), bucket([1, 5], 7)],
            "fallback_gamma_0",
            [[1, 4, 7], [5, 15, 0], [16, 32, 2], [33, 33, 0]],
        ),
        # Half-way in octaves between 4 and 16 is 8; at 8 the first of the equally near wins.
        ([bucket([1, 5], 7), bucket([16, 33], 2)], "nearest", [[1, 8, 7], [9, 33, 2]]),
        ([bucket([1, 9], 6), bucket([9, 17], 6)], "nearest", None),
    ],
)
def test_half_open_buckets_become_inclusive_ranges(
    buckets: list[dict[str, Any]], outside: str, expected: list[list[int]] | None
) -> None:
    profile = make_profile(selected={"buckets": buckets, "outside": outside})

    assert batch_schedule(profile)[1] == expected


@st.composite
def bucketed_profiles(draw: st.DrawFn) -> Profile:
    ends = sorted(draw(st.lists(st.integers(0, 40), min_size=2, max_size=8, unique=True)))
    pairs = [pair for pair in pairwise(ends) if draw(st.booleans())]
    pairs = [(first, end) for first, end in pairs or [(ends[0], ends[1])] if end > 1]
    buckets = [bucket([first, end], draw(st.integers(0, 8))) for first, end in pairs]
    outside = draw(st.sampled_from(["fallback_gamma_0", "nearest", "default"]))
    return make_profile(selected={"buckets": buckets or [bucket([1, 9], 3)], "outside": outside})


@settings(max_examples=100, deadline=None)
@given(bucketed_profiles())
def test_vllm_drafts_at_every_batch_size_what_the_lookup_says(profile: Profile) -> None:
    config, schedule = batch_schedule(profile)

    for batch in range(1, 90):
        chosen = profile.select(batch, 2048)
        gamma = config.num_speculative_tokens
        if schedule is not None:
            # vLLM caps every entry at the configured number.
            gamma = min(as_vllm_reads(schedule, batch), gamma)
        assert gamma == chosen.num_speculative_tokens
        if gamma:
            assert chosen == config.replace(num_speculative_tokens=gamma)


def test_a_schedule_is_rendered_beside_the_rfc_keys() -> None:
    profile = make_profile(selected={"buckets": [bucket([1, 5], 7), bucket([5, 9], 3)]})

    text = render(profile, "yaml")

    speculative = read_yaml(text)[1]
    schedule = speculative.pop("num_speculative_tokens_per_batch_size")
    assert schedule == [[1, 4, 7], [5, 8, 3], [9, 9, 0]]
    assert SpeculationConfig.from_rfc(speculative).num_speculative_tokens == 7
    assert "# A schedule over batch sizes limits" in text
    assert (
        read_args(render(profile, "args"))[1]["num_speculative_tokens_per_batch_size"] == schedule
    )


def test_buckets_that_never_draft_are_plain_decoding() -> None:
    profile = make_profile(selected={"buckets": [bucket([1, 9], 0)]})

    assert read_yaml(render(profile))[1] is None


def test_settings_by_context_need_the_context_served() -> None:
    buckets = [bucket([1, 9], 7, context=[0, 2048]), bucket([1, 9], 3, context=[2048, 9999])]
    profile = make_profile(selected={"buckets": buckets, "outside": "nearest"})

    with pytest.raises(UsageError, match="--context N"):
        render(profile)
    assert read_yaml(render(profile, context=2047))[1]["num_speculative_tokens"] == 7
    assert read_yaml(render(profile, context=2048))[1]["num_speculative_tokens"] == 3


def test_settings_that_vllm_cannot_switch_between_are_refused() -> None:
    buckets = [bucket([1, 5], 7), bucket([5, 9], 7, sparsity_ratio=0.1)]

    with pytest.raises(ConfigError, match="differ in more than `num_speculative_tokens`"):
        render(make_profile(selected={"buckets": buckets}))
