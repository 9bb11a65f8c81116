from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from profiles import GPU, make_profile
from vegas_runtime import machine
from vegas_runtime.errors import ProfileMismatchError
from vegas_runtime.profile import Profile
from vegas_runtime.protocol import EngineInfo
from vegas_tune.apply import (
    MachineFacts,
    MatchFinding,
    machine_facts,
    match_profile,
    raise_on_hard,
)


def engine_info(profile: Profile, **changes: dict[str, Any]) -> EngineInfo:
    """An engine exactly like the one the profile was measured on, but for `changes`."""
    match = profile.match
    facts = {
        name: getattr(match, name).to_facts() | changes.get(name, {})
        for name in ("model", "device", "runtime")
    }
    return EngineInfo(
        backend=str(changes.get("backend", profile.backend)), max_num_speculative_tokens=15, **facts
    )


def levels(findings: list[MatchFinding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.field) for finding in findings]


# --------------------------------------------------------------------------- an engine


@pytest.mark.parametrize("changes", [{}, GPU])
def test_the_machine_it_was_measured_on_has_no_finding(changes: dict[str, Any]) -> None:
    profile = make_profile(**changes)

    assert match_profile(profile, engine_info(profile)) == []


@pytest.mark.parametrize(
    ("section", "key", "value", "level"),
    [
        ("model", "config_sha256", "00" * 32, "hard"),
        ("model", "dtype", "float32", "hard"),
        ("model", "quant", "fp8", "hard"),
        ("model", "head_dim", 128, "hard"),
        ("model", "num_kv_heads", 1, "hard"),
        ("model", "weights_sha256", "00" * 32, "soft"),
        ("model", "revision", "main", "soft"),
        ("device", "class", "NVIDIA H100 NVL", "hard"),
        ("device", "sm", "10.0", "hard"),
        ("device", "sm", "9.1", "soft"),
        ("device", "tp", 1, "hard"),
        ("device", "memory_gib", 94.0, "soft"),
        ("device", "power_limit_w", 500, "soft"),
        ("device", "count", 1, "soft"),
        ("runtime", "driver", "580.01", "soft"),
        ("runtime", "torch", "2.13.1", "soft"),
        ("runtime", "transformers", "5.25.0", "soft"),
        ("runtime", "vegas_runtime", "0.2.0", "soft"),
        ("runtime", "threads", 8, "soft"),
    ],
)
def test_a_difference_counts_as_its_field_says(
    section: str, key: str, value: Any, level: str
) -> None:
    profile = make_profile(**GPU)
    findings = match_profile(profile, engine_info(profile, **{section: {key: value}}))

    assert levels(findings) == [(level, f"{section}.{key}")]
    assert str(value) in findings[0].message
    assert findings[0].found == value


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("device", "class", "nvidia_h200"),
        ("device", "class", "H200"),
        ("device", "memory_gib", 140.4),
        ("device", "count", 8),
        ("model", "dtype", "torch.bfloat16"),
        ("runtime", "torch", "2.13.0+cu130"),
    ],
)
def test_another_spelling_of_the_same_is_no_difference(section: str, key: str, value: Any) -> None:
    profile = make_profile(**GPU)

    assert match_profile(profile, engine_info(profile, **{section: {key: value}})) == []


def test_a_wildcard_matches_all_and_an_unknown_fact_is_said() -> None:
    wildcards = {"class": "*", "memory_gib": "*", "kind": "*", "count": "*", "tp": "*"}
    profile = make_profile(match={"device": wildcards})
    other = {"kind": "cuda", "class": "NVIDIA H200", "memory_gib": 140, "count": 8, "tp": 4}

    assert match_profile(profile, engine_info(profile, device=other)) == []

    findings = match_profile(profile, engine_info(profile, runtime={"torch": None}))
    assert levels(findings) == [("info", "runtime")]
    assert "torch" in findings[0].message
    # What the profile does not say cannot differ.
    silent = make_profile(match={"runtime": {"torch": None}})
    assert match_profile(silent, engine_info(silent, runtime={"torch": "9"})) == []


def test_between_cpu_and_gpu_only_the_kind_is_named() -> None:
    profile = make_profile(**GPU)
    cpu = {"kind": "cpu", "class": "AMD EPYC", "sm": None, "memory_gib": 24, "count": 1}

    findings = match_profile(profile, engine_info(profile, device=cpu))

    assert levels(findings) == [("hard", "device.kind")]


def test_a_local_copy_of_the_model_is_known_by_its_configuration() -> None:
    profile = make_profile()
    copy = engine_info(profile, model={"id": "./my-copy"})
    findings = match_profile(profile, copy)
    assert levels(findings) == [("info", "model.id")]

    unproven = engine_info(profile, model={"id": "./my-copy", "config_sha256": None})
    assert levels(match_profile(profile, unproven))[0] == ("hard", "model.id")


def test_facts_without_a_name_are_compared_softly() -> None:
    profile = make_profile(match={"runtime": {"other": {"flash_attn": "3.0"}}})

    findings = match_profile(profile, engine_info(profile, runtime={"flash_attn": "2.8"}))

    assert levels(findings) == [("soft", "runtime.flash_attn")]


def test_another_engine_warns_but_a_replay_does_not() -> None:
    profile = make_profile()

    on_vllm = match_profile(profile, engine_info(profile, backend="vllm"))  # type: ignore[arg-type]
    replayed = match_profile(profile, engine_info(profile, backend="replay"))  # type: ignore[arg-type]

    assert levels(on_vllm) == [("soft", "backend")]
    assert replayed == []


def test_sampling_is_compared_where_it_is_known() -> None:
    profile = make_profile()
    drawn = {**profile.match.sampling.to_facts(), "temperature": 0.6, "seed": 5}

    findings = match_profile(profile, engine_info(profile), sampling=drawn)

    assert levels(findings) == [("soft", "sampling.temperature")]


def test_all_hard_differences_are_refused_in_one_line() -> None:
    profile = make_profile()
    info = engine_info(
        profile, model={"dtype": "float32"}, device={"class": "Other"}, runtime={"torch": "9"}
    )

    findings = match_profile(profile, info)
    with pytest.raises(ProfileMismatchError) as caught:
        raise_on_hard(findings)

    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert "`model.dtype` is float32 here and bfloat16 in the profile" in message
    assert "`device.class` is Other here and AMD EPYC 9B14 in the profile" in message
    assert "torch" not in message
    assert "\n" not in message
    assert [finding.level for finding in findings] == ["hard", "hard", "soft"]
    raise_on_hard([finding for finding in findings if finding.level != "hard"])


# --------------------------------------------------------------------------- this machine


def test_this_machine_matches_a_profile_made_from_its_facts() -> None:
    device = machine.device_facts("cpu")
    profile = make_profile(
        match={"device": {**device, "tp": None}, "runtime": machine.runtime_facts("cpu")}
    )

    findings = match_profile(profile, machine_facts(profile))

    assert device["kind"] == "cpu"
    assert {finding.level for finding in findings} <= {"info"}


def test_without_a_model_only_its_name_can_be_compared() -> None:
    profile = make_profile()

    unnamed = MachineFacts(device={}, runtime={})
    named = MachineFacts(device={}, runtime={}, model={"id": "Qwen/Qwen3-8B"})

    assert ("info", "model") in levels(match_profile(profile, unnamed))
    assert ("hard", "model.id") in levels(match_profile(profile, named))


def test_too_few_devices_for_the_split_are_seen_without_an_engine() -> None:
    profile = make_profile(**GPU)
    device = profile.match.device.to_facts() | {"count": 1}
    del device["tp"]

    findings = match_profile(profile, MachineFacts(device=device, runtime={}))

    assert ("hard", "device.tp") in levels(findings)


def test_the_model_named_is_compared_by_its_id_and_a_folder_is_not(tmp_path: Path) -> None:
    profile = make_profile(match={"model": {"id": "Qwen/Qwen3-8B"}})

    def compared(model: str) -> list[tuple[str, str]]:
        findings = match_profile(profile, machine_facts(profile, model=model))
        return [found for found in levels(findings) if found[1].startswith("model")]

    assert compared("qwen3-8b") == [("info", "model")]
    assert compared("Qwen/Qwen3-4B") == [("hard", "model.id"), ("info", "model")]
    assert compared(str(tmp_path)) == [("info", "model")]
