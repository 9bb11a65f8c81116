from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles import estimate, make_profile, point, profile_values, refused
from vegas_runtime import profile as profile_module
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import StorageError
from vegas_runtime.profile import (
    Estimate,
    Match,
    ModelFacts,
    Profile,
    Workload,
    dump_profile,
    json_schema,
    load_profile,
    parse_profile,
    write_profile,
)

# Text that some YAML reader takes for something else.
TRAPS = [
    *("no", "NO", "off", "y", "true", "~", "null", "", " ", "1e3", "1E5", "0x1F", "017", "1_000"),
    *("12:30", "2026-11-29", "2026-11-29T20:40:00Z", ".inf", ".nan", "1.", "-.5", "+1", "=", "<<"),
    *("- a", "a: b", "#x", "'", '"', "*", "&a", "!tag", "%", "@", "`", "|", ">", "\t", "a\nb"),
    *("a\r\nb", "\x00", "\x1b[31m", "\x7f", "\x85", "\u2028", "\ufeff", "é", "日本", "😀", " a "),
]


# --------------------------------------------------------------------------- round trip


def test_a_profile_survives_being_written_and_read(tmp_path: Path) -> None:
    profile = make_profile(notes="two\nlines", **{"x-team": {"owner": "me"}})
    path = tmp_path / "p.yaml"

    write_profile(profile, path)

    assert load_profile(path) == profile
    assert path.read_text(encoding="utf-8") == dump_profile(load_profile(path))


def test_an_own_key_without_a_value_is_kept() -> None:
    values = profile_values() | {"x-reviewed": None, "x-": 1}
    profile = Profile.model_validate(values).seal()

    assert parse_profile(dump_profile(profile)).extensions == {"x-": 1, "x-reviewed": None}


def test_sections_are_written_in_a_fixed_order_and_leaves_on_one_line() -> None:
    values = profile_values()
    shuffled = dict(sorted(values.items(), reverse=True))

    text = dump_profile(Profile.model_validate(shuffled))

    assert text == dump_profile(Profile.model_validate(values))
    top = [line.split(":")[0] for line in text.splitlines() if line[0] not in " -"]
    assert top == [key for key in Profile.known_keys() if key in top]
    assert "  speedup_vs_gamma0: {est: 1.25, low: 1.225, high: 1.275, n: 6}\n" in text
    assert "  batch: [1, 9]\n" in text


def test_a_sweep_of_many_points_stays_under_40_kb() -> None:
    curve = [point(0.01 * k, 15, 5.123456789, 312.123456789) for k in range(1, 21)]
    curves = {"sparsity": curve, "gamma": curve, "refine": curve, "validate": curve}

    assert len(dump_profile(make_profile(curves=curves))) < 40_000


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(TRAPS)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
texts = st.sampled_from(TRAPS) | st.text()


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    low, est, high = sorted(draw(st.lists(st.floats(-1e9, 1e9), min_size=3, max_size=3)))
    ends = st.lists(st.integers(0, 10**6), min_size=2, max_size=2, unique=True).map(sorted)
    measured = {"est": est, "low": low, "high": high, "n": draw(st.integers(0, 99))}
    return make_profile(
        **{"x-any": draw(json_values)},
        curves={"sparsity": [], "gamma": [], "refine": []},
        notes=draw(texts),
        match={
            "model": {"id": draw(texts), "other": draw(st.dictionaries(texts, json_values))},
            "device": {
                "kind": draw(st.sampled_from(["cpu", "cuda", "*", None])),
                "memory_gib": draw(st.sampled_from([1.5, "*", None])),
            },
        },
        selected={
            "default": {
                "num_speculative_tokens": draw(st.integers(0, 64)),
                "sparsity_ratio": draw(st.floats(0, 1, exclude_min=True)),
                "rows": draw(st.sampled_from(["two", "all"])),
            }
        },
        validity={"batch": draw(ends), "context": draw(ends)},
        results={
            "decode_tok_s": draw(st.sampled_from([measured, est])),
            "phase_ms": draw(st.sampled_from([None, dict.fromkeys(PHASES, measured)])),
        },
        decisions=[
            {
                "step": draw(st.integers(1, 4) | texts),
                "rule": draw(texts),
                "chosen": draw(json_values),
                "why": draw(texts),
                "alternatives": draw(st.lists(json_values, max_size=3)),
                "resolved": draw(st.booleans()),
                "data": draw(st.dictionaries(texts, json_values, max_size=3)),
            }
        ],
    )


PHASES = ("draft", "select", "verify", "other")


@settings(max_examples=60, deadline=None)
@given(profiles())
def test_any_profile_reads_back_equal_and_dumps_to_the_same_bytes(profile: Profile) -> None:
    text = dump_profile(profile)
    again = parse_profile(text)

    assert again == profile
    assert dump_profile(again) == text
    # Nor does a reader of YAML 1.1, such as vLLM's, take any of it for something else.
    assert yaml.safe_load(text) == profile.to_dict()


@pytest.mark.parametrize("trap", TRAPS)
def test_text_that_looks_like_something_else_stays_text(trap: str) -> None:
    profile = make_profile(workload={"name": trap}, match={"model": {"id": trap}})

    assert parse_profile(dump_profile(profile)).workload == profile.workload


def test_numbers_of_numeric_libraries_are_kept_as_plain_ones() -> None:
    import numpy as np

    data = {"a": np.float64(0.5), "b": np.int64(3), "c": [np.float32(0.25)], "d": (1, 2)}
    decision = {"step": np.int64(1), "rule": "r", "why": "w", "resolved": True, "data": data}
    profile = make_profile(
        decisions=[decision],
        results={"decode_tok_s": {"est": np.float64(2), "low": 1, "high": np.float32(3)}},
        curves={"gamma": [{**point(0.1, 1, 1, 1), "num_speculative_tokens": np.int32(4)}]},
    )

    assert profile.decisions[0].data == {"a": 0.5, "b": 3, "c": [0.25], "d": [1, 2]}
    assert parse_profile(dump_profile(profile)) == profile


# --------------------------------------------------------------------------- seal


def test_the_id_covers_the_content_but_not_notes_and_own_keys() -> None:
    sealed = make_profile()

    assert make_profile(notes="hello", **{"x-a": 1}).profile_id == sealed.profile_id
    assert make_profile(created="2026-11-30T00:00:00Z").profile_id != sealed.profile_id
    assert make_profile(validity={"batch": [1, 10]}).profile_id != sealed.profile_id


def test_a_changed_profile_is_refused_with_the_way_to_keep_the_change() -> None:
    text = dump_profile(make_profile()).replace("est: 1.25,", "est: 1.26,")

    message = refused(text)

    assert "was changed after it was written" in message
    assert make_profile().profile_id[:19] in message
    assert "profile_id: unsealed" in message
    assert "status: draft" in message


def test_a_hand_made_draft_needs_no_seal_and_no_evidence() -> None:
    text = """
schema: vegas-tune/profile
schema_version: 1
profile_id: unsealed
status: draft
match: {model: {id: Qwen/Qwen3-8B}, device: {kind: cuda, class: "*"}}
selected: {default: {num_speculative_tokens: 6, sparsity_ratio: 7e-2}}
validity: {batch: [1, 33], context: [4096, 32768]}
"""
    profile = parse_profile(text)

    assert profile.selected.default == SpeculationConfig(
        num_speculative_tokens=6, sparsity_ratio=0.07
    )
    assert profile.serving.speculative_config == profile.selected.default.to_rfc()
    assert parse_profile(dump_profile(profile)) == profile


def test_an_unsealed_profile_cannot_claim_evidence() -> None:
    text = dump_profile(Profile.model_validate(profile_values()))

    assert "`status: validated` but is unsealed" in refused(text)
    with pytest.raises(AssertionError):
        write_profile(Profile.model_validate(profile_values()), Path("never.yaml"))


@pytest.mark.parametrize("key", ["created", "tool", "backend", "workload", "protocol"])
@pytest.mark.parametrize("status", ["validated", "inconclusive"])
def test_what_is_not_a_draft_needs_its_evidence(key: str, status: str) -> None:
    text = dump_profile(make_profile(status="draft", **{key: None}))
    message = refused(text.replace("status: draft", f"status: {status}", 1))

    assert f"`status` is {status}, but {key!r} is missing" in message


@pytest.mark.parametrize("key", ["results", "decisions"])
def test_only_a_validated_profile_must_say_what_was_found(key: str) -> None:
    profile = make_profile(status="inconclusive", **{key: None})

    assert parse_profile(dump_profile(profile)) == profile
    message = refused(dump_profile(profile).replace("status: inconclusive", "status: validated", 1))
    assert f"`status` is validated, but {key!r} is missing" in message


# --------------------------------------------------------------------------- versions


def test_every_older_version_has_a_migration() -> None:
    assert set(profile_module.MIGRATIONS) == set(range(1, profile_module.SCHEMA_VERSION))


@pytest.fixture
def version_1(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A version 1 profile's values, met by a release that renamed `selected.chosen`."""
    values = make_profile().to_dict()
    values["selected"]["chosen"] = values["selected"].pop("default")
    values["profile_id"] = profile_module.content_id(values)

    def migrate(values: dict[str, Any]) -> dict[str, Any]:
        selected = dict(values["selected"])
        selected["default"] = selected.pop("chosen")
        return values | {"selected": selected}

    monkeypatch.setattr(profile_module, "SCHEMA_VERSION", 2)
    monkeypatch.setattr(profile_module, "MIGRATIONS", {1: migrate})
    return values


def test_a_switch_that_came_later_is_written_only_where_it_is_set() -> None:
    plain = SpeculationConfig(num_speculative_tokens=5, sparsity_ratio=0.07)
    ids = set()
    for config in (plain, plain.replace(granularity="page")):
        made = make_profile(selected={"default": config.to_dict()}).seal()
        written = made.to_dict()["selected"]["default"]
        assert ("granularity" in written) == (config != plain)
        assert parse_profile(profile_module.to_yaml(made.to_dict())).selected.default == config
        ids.add(made.profile_id)
    assert len(ids) == 2


def test_an_older_profile_is_migrated_and_sealed_again(version_1: dict[str, Any]) -> None:
    migrated = parse_profile(profile_module.to_yaml(version_1))

    assert migrated.schema_version == 2
    chosen = SpeculationConfig.from_dict(version_1["selected"]["chosen"])
    assert migrated.selected.default == chosen
    assert migrated.profile_id == migrated.compute_id() != version_1["profile_id"]


def test_a_changed_older_profile_is_refused_before_it_is_migrated(
    version_1: dict[str, Any],
) -> None:
    version_1["validity"]["batch"] = [1, 100]

    assert "was changed after it was written" in refused(profile_module.to_yaml(version_1))


def test_a_hand_made_older_draft_stays_unsealed(version_1: dict[str, Any]) -> None:
    version_1 |= {"profile_id": "unsealed", "status": "draft"}

    assert parse_profile(profile_module.to_yaml(version_1)).profile_id == "unsealed"


# --------------------------------------------------------------------------- content rules


def test_estimates_keep_six_digits_and_read_a_bare_number_as_a_point() -> None:
    assert Estimate(est=1.23456789, low=1, high=2).est == 1.23457
    assert Estimate.model_validate(3) == Estimate(est=3, point_only=True)
    assert "decode_tok_s: {est: 3.0, point_only: true}" in dump_profile(
        make_profile(results={"decode_tok_s": 3})
    )


def test_facts_without_a_name_are_kept_and_found_again() -> None:
    facts = {"id": "m", "dtype": "float32", "tied_embeddings": True, "vocab_size": 49152}

    model = ModelFacts.from_facts(facts)

    assert model.other == {"tied_embeddings": True, "vocab_size": 49152}
    assert {k: v for k, v in model.to_facts().items() if v is not None} == facts
    match = Match.from_facts(model=facts, device={}, runtime={}, sampling={"seed": 3, "top_k": 5})
    assert match.model == model
    assert match.sampling.top_k == 5
    assert not match.sampling.other


def test_a_workload_description_is_found_again_in_the_file() -> None:
    described = {**profile_values()["workload"], "path": None, "a_new_fact": [1, 2]}
    workload = Workload.from_facts(described)
    kept = make_profile().model_copy(update={"workload": workload}).seal()

    again = parse_profile(dump_profile(kept)).workload
    assert again is not None
    assert {key: again.to_facts()[key] for key in described} == described


def test_plain_decoding_has_an_empty_serving_block() -> None:
    profile = make_profile(selected={"default": {"num_speculative_tokens": 0}})

    assert "serving:\n  speculative_config: null\n" in dump_profile(profile)
    assert parse_profile(dump_profile(profile)) == profile


def test_json_schema_closes_every_section_and_lets_own_keys_through() -> None:
    schema = json_schema()

    json.dumps(schema)
    assert schema["properties"]["schema_version"]["const"] == 1
    assert schema["patternProperties"] == {"^x-": {}}
    assert "extensions" not in schema["properties"]
    assert set(schema["properties"]) == set(Profile.known_keys())
    for name, section in schema["$defs"].items():
        closed = section["anyOf"][0] if "anyOf" in section else section
        assert closed["additionalProperties"] is False, name


def test_reading_profiles_loads_no_engine() -> None:
    code = "import sys, vegas_runtime.profile; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"


# --------------------------------------------------------------------------- lookup


def bucket(batch: tuple[int, int], context: tuple[int, int], gamma: int) -> dict[str, Any]:
    config = SpeculationConfig(num_speculative_tokens=gamma, sparsity_ratio=0.05)
    return {"batch": list(batch), "context": list(context), "config": config.to_dict()}


def chosen_by(**selected: Any) -> Callable[[int, int], int]:
    profile = make_profile(selected=selected, validity={"batch": [4, 33], "context": [4096, 32768]})
    return lambda batch, context: profile.select(batch, context).num_speculative_tokens


@pytest.mark.parametrize(
    ("batch", "context", "inside"),
    [
        (4, 4096, True),
        (32, 32767, True),
        (3, 8192, False),
        (33, 8192, False),
        (8, 4095, False),
        (8, 32768, False),
    ],
)
def test_without_buckets_the_default_holds_inside_validity(
    batch: int, context: int, inside: bool
) -> None:
    assert chosen_by(outside="fallback_gamma_0")(batch, context) == (6 if inside else 0)
    assert chosen_by(outside="nearest")(batch, context) == 6
    assert chosen_by(outside="default")(batch, context) == 6


def test_buckets_hold_inside_their_ranges_and_the_rule_outside() -> None:
    buckets = [
        bucket((1, 9), (4096, 16384), 7),
        bucket((9, 33), (4096, 16384), 3),
        bucket((1, 33), (16384, 32768), 9),
    ]
    cells = [(1, 4096), (8, 16383), (9, 4096), (32, 8192), (32, 16384), (33, 8192), (200, 40_000)]

    def at(outside: str) -> list[int]:
        choose = chosen_by(buckets=buckets, outside=outside)
        return [choose(*cell) for cell in cells]

    assert at("fallback_gamma_0") == [7, 7, 3, 3, 9, 0, 0]
    assert at("default") == [7, 7, 3, 3, 9, 6, 6]
    assert at("nearest") == [7, 7, 3, 3, 9, 3, 9]


def test_falling_back_keeps_everything_but_the_number_of_tokens() -> None:
    profile = make_profile()

    fallback = profile.select(1000, 2048)

    assert fallback == profile.selected.default.replace(num_speculative_tokens=0)


def test_overlapping_buckets_are_refused() -> None:
    values = profile_values(
        status="draft",
        selected={"buckets": [bucket((1, 9), (0, 100), 1), bucket((8, 16), (99, 200), 2)]},
    )

    message = refused(profile_module.to_yaml(values))

    assert "`selected`: buckets overlap at batch [8, 16], context [99, 200]" in message


# --------------------------------------------------------------------------- writing


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write") as caught:
        write_profile(make_profile(), tmp_path / "none" / "p.yaml")

    assert caught.value.exit_code == 1


def test_a_failed_write_leaves_the_old_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.yaml"
    write_profile(make_profile(), path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(StorageError, match="No space left"):
        write_profile(make_profile(results={"decode_tok_s": estimate(99)}), path)

    assert load_profile(path) == make_profile()
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.yaml"]


def test_the_documented_profile_is_one_and_no_section_is_left_out() -> None:
    text = (Path(__file__).parents[1] / "profiles" / "README.md").read_text(encoding="utf-8")
    example = text.split("```yaml\n")[1].split("```")[0]

    assert parse_profile(example).status == "draft"
    table = text.split("## Sections")[1].split("### `selected`")[0]
    assert [key for key in Profile.known_keys() if f"`{key}`" not in table] == []
