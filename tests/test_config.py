from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vegas_runtime.config import (
    MAX_SPECULATIVE_TOKENS,
    RFC_KEYS,
    Metric,
    Rows,
    SamplingConfig,
    Scope,
    SpeculationConfig,
    cache_dir,
    is_offline,
)
from vegas_runtime.errors import ConfigError

BASE = SpeculationConfig(num_speculative_tokens=7, sparsity_ratio=0.07)
CONFIGS = st.builds(
    SpeculationConfig,
    algorithm=st.sampled_from(["vegas", "dense", "quest"]),
    num_speculative_tokens=st.integers(0, MAX_SPECULATIVE_TOKENS),
    sparsity_ratio=st.floats(0, 1, exclude_min=True),
    min_tokens=st.integers(1, 10**6),
    rows=st.sampled_from(get_args(Rows)),
    metric=st.sampled_from(get_args(Metric)),
    scope=st.sampled_from(get_args(Scope)),
)

# -- SpeculationConfig ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("num_speculative_tokens", 0),
        ("num_speculative_tokens", MAX_SPECULATIVE_TOKENS),
        ("sparsity_ratio", 1),
        ("sparsity_ratio", 1e-9),
        ("min_tokens", 1),
    ],
)
def test_ends_of_the_ranges_are_in(knob: str, value: float) -> None:
    assert getattr(BASE.replace(**{knob: value}), knob) == value


@pytest.mark.parametrize(
    ("knob", "value", "message"),
    [
        ("num_speculative_tokens", -1, "is -1; 0 .* to 64 is supported"),
        ("num_speculative_tokens", MAX_SPECULATIVE_TOKENS + 1, "is 65; 0 .* to 64"),
        ("num_speculative_tokens", 3.0, "is 3.0; a whole number"),
        ("num_speculative_tokens", True, "is True; a whole number"),
        ("num_speculative_tokens", "7", "is '7'; a whole number"),
        ("sparsity_ratio", 0.0, r"is 0; .* must be in \(0, 1\]"),
        ("sparsity_ratio", -0.1, r"is -0.1; .* must be in \(0, 1\]"),
        ("sparsity_ratio", 1.01, r"is 1.01; .* must be in \(0, 1\]"),
        ("sparsity_ratio", math.nan, r"is nan; .* must be in \(0, 1\]"),
        ("sparsity_ratio", math.inf, r"is inf; .* must be in \(0, 1\]"),
        ("sparsity_ratio", "0.1", "is '0.1'; a fraction"),
        ("sparsity_ratio", True, "is True; a fraction"),
        ("min_tokens", 0, "is 0; at least 1"),
        ("min_tokens", 2.5, "is 2.5; a whole number"),
        ("min_tokens", False, "is False; a whole number"),
        ("rows", "three", "is 'three'; one of two, all, last_accepted"),
        ("metric", "max", "is 'max'; one of weight, logit"),
        ("scope", "head", "is 'head'; one of layer, kv_head"),
    ],
)
def test_a_value_outside_its_range_is_refused(knob: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"`{knob}` {message}"):
        BASE.replace(**{knob: value})


@pytest.mark.parametrize(
    ("ratio", "hint"),
    [
        (14, "To keep 14 % of the KV cache, write 0.14."),
        (100, "To keep 100 % of the KV cache, write 1."),
        (1e6, ""),
        (-3, ""),
        (math.nan, ""),
    ],
)
def test_a_percentage_gets_the_fraction_as_hint(ratio: float, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BASE.replace(sparsity_ratio=ratio)
    assert caught.value.hint == hint


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BASE.sparsity_ratio = 0.5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("prefix_len", "gamma", "ratio", "min_tokens", "budget"),
    [
        (999, 0, 0.1, 1, 100),
        # ceil(0.1 * 1010) and ceil(0.1 * 1011): the block's rows count.
        (1000, 9, 0.1, 1, 101),
        (1000, 10, 0.1, 1, 102),
        (1000, 9, 0.1, 256, 256),
        (100, 9, 0.1, 256, 101),
        (100, 9, 1.0, 1, 101),
        (0, 0, 0.01, 1, 1),
        (0, 7, 0.5, 256, 1),
    ],
)
def test_kv_budget(prefix_len: int, gamma: int, ratio: float, min_tokens: int, budget: int) -> None:
    config = BASE.replace(num_speculative_tokens=gamma, sparsity_ratio=ratio, min_tokens=min_tokens)
    assert config.kv_budget(prefix_len) == budget


@settings(max_examples=200, deadline=None, derandomize=True)
@given(CONFIGS, st.integers(0, 200_000))
def test_kv_budget_stays_within_its_bounds(config: SpeculationConfig, prefix_len: int) -> None:
    budget = config.kv_budget(prefix_len)
    assert min(config.min_tokens, prefix_len + 1) <= budget <= prefix_len + 1
    assert budget <= config.kv_budget(prefix_len + 1)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(CONFIGS)
def test_every_spelling_reads_back(config: SpeculationConfig) -> None:
    assert SpeculationConfig.from_dict(config.to_dict()) == config
    assert SpeculationConfig.from_rfc(config.to_rfc()) == config
    assert SpeculationConfig.from_rfc(json.loads(json.dumps(config.to_rfc()))) == config


def test_the_usual_configuration_holds_the_rfc_keys_only() -> None:
    assert BASE.to_rfc() == {
        "method": "sparse_attn",
        "sparse_attn_algorithm": "vegas",
        "num_speculative_tokens": 7,
        "sparse_attn_ratio": 0.07,
        "sparse_attn_min_tokens": 256,
    }
    switched = BASE.replace(rows="all", metric="logit", scope="kv_head").to_rfc()
    assert switched["sparse_attn_rows"] == "all"
    assert switched["sparse_attn_metric"] == "logit"
    assert switched["sparse_attn_scope"] == "kv_head"


def test_every_knob_has_an_rfc_key() -> None:
    assert set(RFC_KEYS) == {field.name for field in dataclasses.fields(SpeculationConfig)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparsity": 0.1}, "unknown speculation key 'sparsity'; known are algorithm"),
        ({"sparsity_ratio": 7}, "`sparsity_ratio` is 7"),
    ],
)
def test_from_dict_refuses_what_it_does_not_know(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculationConfig.from_dict(BASE.to_dict() | change)


@pytest.mark.parametrize("key", ["num_speculative_tokens", "sparsity_ratio"])
def test_from_dict_names_a_missing_key(key: str) -> None:
    values = BASE.to_dict()
    del values[key]
    with pytest.raises(ConfigError, match=f"'{key}' is missing"):
        SpeculationConfig.from_dict(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "eagle3"}, "`method` is 'eagle3'; this runtime reads 'sparse_attn'"),
        ({"sparsity_ratio": 0.1}, "unknown speculative-config key 'sparsity_ratio'"),
        ({"sparse_attn_rows": "some"}, "`rows` is 'some'"),
    ],
)
def test_from_rfc_refuses_what_it_does_not_know(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculationConfig.from_rfc(BASE.to_rfc() | change)


# -- SamplingConfig -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
    ],
)
def test_sampling_outside_its_range_is_refused(knob: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"`{knob}` is {value!r}"):
        SamplingConfig(**{knob: value})  # type: ignore[arg-type]


def test_temperature_zero_is_greedy() -> None:
    assert SamplingConfig().is_greedy
    assert SamplingConfig(top_k=5, repetition_penalty=1.2).is_greedy
    assert not SamplingConfig(temperature=0.6).is_greedy


# -- environment ----------------------------------------------------------------------------------


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("VEGAS_TUNE_CACHE", "XDG_CACHE_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_cache_folder_follows_the_environment(
    bare_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = bare_environment
    assert cache_dir() == home / ".cache" / "vegas-tune"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    assert cache_dir() == home / "xdg" / "vegas-tune"
    monkeypatch.setenv("VEGAS_TUNE_CACHE", "~/own")
    assert cache_dir() == home / "own"


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
@pytest.mark.parametrize(
    ("value", "offline"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("", False)]
)
@pytest.mark.usefixtures("bare_environment")
def test_offline_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, offline: bool
) -> None:
    monkeypatch.setenv(name, value)
    assert is_offline() is offline
