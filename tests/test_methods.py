from __future__ import annotations

import pytest

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import ConfigError, UsageError
from vegas_tune.methods import DEFAULT_METHODS, parse_methods, slug

BASE = SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0, min_tokens=32)


def test_names_become_settings_that_share_the_floor() -> None:
    methods = parse_methods("vegas, quest:scope=kv_head,last_accepted", BASE)
    assert [method.name for method in methods] == ["vegas", "quest:scope=kv_head", "last_accepted"]
    assert [method.base for method in methods] == [
        BASE,
        BASE.replace(algorithm="quest", scope="kv_head"),
        BASE.replace(algorithm="vegas", rows="last_accepted"),
    ]


def test_the_default_is_the_papers_figure_9() -> None:
    names = [method.base.algorithm for method in parse_methods(DEFAULT_METHODS, BASE)]
    assert names == ["vegas", "streaming_llm", "quest", "spec_extend"]


def test_several_switches_stand_behind_each_other() -> None:
    (method,) = parse_methods("vegas:rows=all:scope=kv_head:metric=logit", BASE)
    assert method.base == BASE.replace(rows="all", scope="kv_head", metric="logit")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no method"),
        (" , ", "names no method"),
        ("plain,vegas", "'plain', which every comparison measures anyway"),
        ("vegas,vegas", "'vegas' and 'vegas', which are the same method"),
        ("all_rows,vegas:rows=all", "are the same method"),
        ("vegas:rows", "'rows' is no switch"),
        ("vegas:gamma=3", "'gamma=3' is no switch"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_methods(text, BASE)


def test_a_switch_has_known_values_only() -> None:
    with pytest.raises(ConfigError, match="`rows` is 'most'"):
        parse_methods("vegas:rows=most", BASE)


def test_a_slug_is_fit_for_a_file_name() -> None:
    assert slug("quest:scope=kv_head") == "quest-scope-kv_head"
