from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles import make_profile, profile_values, refused
from vegas_runtime.errors import ProfileInvalidError
from vegas_runtime.profile import Profile, dump_profile, load_profile, parse_profile


def edited(old: str, new: str, **changes: Any) -> str:
    """A draft made by hand: the complete profile's text with one place changed."""
    text = dump_profile(Profile.model_validate(profile_values(status="draft", **changes)))
    assert text.count(old) >= 1
    return text.replace(old, new, 1)


BAD_CONTENT = {
    "a percentage": ("sparsity_ratio: 0.07", "sparsity_ratio: 7", "to keep 7 % write 0.07"),
    "a percentage in a curve": (
        "sparsity_ratio: 0.02",
        "sparsity_ratio: 2",
        "`curves.sparsity[1].sparsity_ratio`: 2 is not a fraction",
    ),
    "nan": ("est: 58.5", "est: .nan", "`results.decode_tok_s.est` is nan; that is not a measureme"),
    "infinity": ("high: 59.67", "high: .inf", "`results.decode_tok_s.high` is inf; that is not"),
    "an overflow": ("est: 58.5", "est: 1e999", "`results.decode_tok_s.est` is inf"),
    "nan in free data": ("tolerance: 0.02", "tolerance: .nan", "nan is not a measurement"),
    "no as false": (
        "resolved: true",
        "resolved: no",
        "`decisions[1].resolved` is 'no'; true or fa",
    ),
    "a quoted number": ("n_steps: 240", "n_steps: '240'", "without quotes"),
    "a fraction of a count": ("n_steps: 240", "n_steps: 240.5", "a whole number is needed"),
    "a number as text": (
        "transformers: 5.24.0",
        "transformers: 5.24",
        "`match.runtime.transformers` is 5.24; text is needed; put it in quotes",
    ),
    "an octal": ("batch_size: 8", "batch_size: 010", "`workload.batch_size` is '010'"),
    "a boolean count": (
        "threads: 2",
        "threads: true",
        "`match.runtime.threads`: a whole number, or",
    ),
    "a date": ("'2026-11-29T20:40:00Z'", "2026-11-29", "`created` is '2026-11-29', which does not"),
    "a typo at the top": (
        "validity:",
        "validty:",
        "unknown key 'validty'; did you mean 'validity'?",
    ),
    "a typo inside": (
        "dtype:",
        "dtpye:",
        "`match.model`: unknown key 'dtpye'; did you mean 'dtype'",
    ),
    "a key of another name": (
        "num_speculative_tokens: 6",
        "gamma: 6",
        "`selected.default`: unknown key 'gamma'; known are algorithm, ",
    ),
    "a typo in a setting": ("min_tokens: 32", "min_token: 32", "did you mean 'min_tokens'?"),
    "an unknown choice": ("outside: fallback_gamma_0", "outside: guess", "'fallback_gamma_0'"),
    "an unknown rule": ("rows: two", "rows: three", "`rows` is 'three'; one of two, all"),
    "a policy without a name": ("algorithm: vegas", "algorithm: 3", "`algorithm` is 3"),
    "too many tokens": (
        "num_speculative_tokens: 6",
        "num_speculative_tokens: 99",
        "is 99; 0 (plain",
    ),
    "a range backwards": ("batch: [1, 9]", "batch: [9, 1]", "[9, 1] is not a range"),
    "a range of text": ("batch: [1, 9]", "batch: 1-9", "'1-9' is not a range"),
    "a scalar for a section": (
        "  batch: [1, 9]\n  context: [1024, 4096]",
        "  - 1",
        "`validity` is [1]",
    ),
    "a section for a list": ("decisions:", "decisions: {}\nx-rest:", "`decisions` is {}; a list"),
    "an empty value": ("status: draft", "status:", "`status` is None"),
    "an estimate without interval": (
        "{est: 58.5, low: 57.33, high: 59.67, n: 20}",
        "{est: 58.5, n: 20}",
        "`low` and `high` are needed, or `point_only: true`",
    ),
    "an estimate outside its interval": (
        "est: 58.5",
        "est: 60",
        "`est` 60 is not between `low` 57.3",
    ),
    "both kinds of estimate": ("{est: 58.5,", "{point_only: true, est: 58.5,", "keep one of them"),
    "a failure without reason": (
        "status: failed",
        "status: ok",
        "`failure` belongs to failed points",
    ),
    "another method": ("method: sparse_attn", "method: eagle", "remove `serving`, it is derived"),
    "serving for another setting": (
        "sparse_attn_ratio: 0.07",
        "sparse_attn_ratio: 0.08",
        "`serving.speculative_config` and `selected.default` differ",
    ),
    "an id of another form": (
        "profile_id: unsealed",
        "profile_id: 123abc",
        "`profile_id` is '123abc'",
    ),
    "braces in a value": ("rows: two", "rows: '{two}'", "`rows` is '{two}'"),
    "a number as key": ("other:", "7:", "the key 7 is not text; put it in quotes"),
    "two problems": (
        "n_steps: 240\n    status: ok",
        "n_steps: a\n    status: b",
        "(1 more problem.)",
    ),
}


@pytest.mark.parametrize("case", BAD_CONTENT)
def test_bad_content_is_refused_in_one_line_with_its_place(case: str) -> None:
    old, new, expected = BAD_CONTENT[case]

    assert expected in refused(edited(old, new))


BAD_TEXT = {
    "empty": ("", "p.yaml is empty. Run `vegas-tune sweep`"),
    "blank": ("\n  \n# nothing\n", "is empty"),
    "a list": ("- a\n- b\n", "is not a vegas-tune profile"),
    "prose": ("hello there", "is not a vegas-tune profile"),
    "another file": ("schema: other/thing\n", "found 'other/thing'"),
    "JSON of another kind": ('{"model": "x"}', "found None"),
    "a duplicate key": (
        "schema: a\nb: 1\nschema: c\n",
        "line 3: the key 'schema' was already given in line 1",
    ),
    "a nested duplicate": (
        "a:\n  b: 1\n  b: 2\n",
        "line 3: the key 'b' was already given in line 2",
    ),
    "a duplicate in quotes": ("a: 1\n'a': 2\n", "the key 'a' was already given in line 1"),
    "a tab": ("schema: a\nmatch:\n\tmodel: b\n", "line 3 is indented with a tab"),
    "an alias": ("a: &x 1\nb: *x\n", "line 2: an alias (*x) is not read here"),
    "a merge": ("a: &x {b: 1}\nc: {<<: *x}\n", "an alias (*x)"),
    "an object": ("a: !!python/object/apply:os.system ['true']\n", "could not determine a constr"),
    "two documents": (
        "schema: a\n---\nschema: b\n",
        "expected a single document in the stream but found another document",
    ),
    "an unfinished list": ("schema: a\nb: [1, 2", "so it was cut off. Restore it"),
    "an unfinished quote": ("schema: a\nb: 'text", "so it was cut off. Restore it"),
    "a control character": ("schema: \x01\n", "the character U+0001 at position 8"),
    "bad indentation": ("a: 1\n  b: 2\n", "line 2: mapping values are not allowed here"),
    "deep nesting": ("[" * 20_000, "is nested too deeply"),
    "an endless number": (f"schema: {'9' * 5000}\n", "is not readable YAML"),
    "a complex key": ("? [a, b]\n: c\n", "is not text"),
}


@pytest.mark.parametrize("case", BAD_TEXT)
def test_bad_text_is_refused_in_one_line(case: str) -> None:
    text, expected = BAD_TEXT[case]

    assert expected in refused(text)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2", "has schema version 2; this release reads up to 1"),
        ("0", "`schema_version` is 0"),
        ("'1'", "`schema_version` is '1'"),
        ("true", "`schema_version` is True"),
        ("1.0", "`schema_version` is 1.0"),
    ],
)
def test_a_version_that_cannot_be_read_is_refused(version: str, expected: str) -> None:
    text = dump_profile(make_profile())
    changed = text.replace("schema_version: 1", f"schema_version: {version}")
    # What is new in a newer file must not be what is complained about.
    changed += "new_section: {}\n" if version == "2" else ""

    assert expected in refused(changed)
    assert "`schema_version` is missing" in refused(text.replace("schema_version: 1\n", ""))


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(ProfileInvalidError) as caught:
            load_profile(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
        return str(caught.value)

    binary, utf16, large = (tmp_path / name for name in ("a", "b", "c"))
    binary.write_bytes(b"schema: \xff\xfe")
    utf16.write_bytes(dump_profile(make_profile()).encode("utf-16"))
    large.write_bytes(b"#" * (1 << 21))

    assert "there is no profile at" in refusal(tmp_path / "none.yaml")
    assert "is a folder; a profile is a file. Name the YAML file" in refusal(tmp_path)
    (tmp_path / "profile.yaml").write_text("")
    assert f"Use {tmp_path / 'profile.yaml'}." in refusal(tmp_path)
    assert "is not UTF-8 text: byte 0xFF at position 8" in refusal(binary)
    assert "is not UTF-8 text" in refusal(utf16)
    assert "is larger than 1 MiB" in refusal(large)
    assert "cannot be read: Not a directory" in refusal(large / "x")


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    text = dump_profile(make_profile())
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())

    assert load_profile(path) == make_profile()


def test_a_file_cut_off_anywhere_is_never_taken_for_the_whole() -> None:
    text = dump_profile(make_profile(notes="kept by hand"))
    whole = parse_profile(text)
    step = 103

    for end in [*range(0, len(text) - 40, step), *range(len(text) - 40, len(text) - 1)]:
        refused(text[:end])
    assert parse_profile(text[:-1]) == whole


def test_a_cut_between_sections_is_called_a_cut() -> None:
    text = edited("x", "x")

    assert "The file looks cut off" in refused(text[: text.index("validity:")])
    # A missing section in the middle is an omission.
    start, end = text.index("validity:"), text.index("workload:")
    message = refused(text[:start] + text[end:])
    assert "`validity` is missing." in message
    assert "cut off" not in message


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_damage_is_refused_or_changes_nothing(data: st.DataObject) -> None:
    profile = make_profile()
    text = dump_profile(profile)
    place = data.draw(st.integers(0, len(text) - 1))
    length = data.draw(st.integers(0, 3))
    inserted = data.draw(st.text(max_size=3) | st.sampled_from(["\n", ": ", "- ", "#", "'", "{"]))
    damaged = text[:place] + inserted + text[place + length :]

    try:
        read = parse_profile(damaged)
    except ProfileInvalidError as error:
        assert "\n" not in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert read.compute_id() == profile.profile_id
