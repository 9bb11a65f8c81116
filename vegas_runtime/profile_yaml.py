"""Strict YAML text <-> plain values, for profiles. Knows nothing of what a profile holds.

Reading follows YAML 1.2's core schema (`no` is text, `1e3` a number, a date text), refuses
duplicate keys, aliases and tags, and reports every problem in one line. Writing is canonical, and
quotes whatever a YAML 1.1 reader, such as PyYAML or vLLM's, would take for something else.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any, ClassVar, Final, cast

import yaml

from vegas_runtime.errors import ProfileInvalidError

_NO_FOLDING: Final = 2**31 - 1

_CORE_SCHEMA: Final = (
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), [*"tTfF"]),
    # No leading zeros: YAML 1.1 would read 017 as octal, so it stays text and is refused.
    ("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$"), [*"-+0123456789"]),
    (
        "tag:yaml.org,2002:float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?[0-9]+[eE][-+]?[0-9]+"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        [*"-+0123456789."],
    ),
)
# Breaks lines, or is invisible: shown escaped, in double quotes.
_UNPRINTABLE: Final = re.compile("[^\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd]")


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.events.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem=f"an alias (*{event.anchor}) is not read here; write the value out",
                problem_mark=cast("yaml.error.Mark", event.start_mark),
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        first_lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} is not text; put it in quotes",
                    problem_mark=key_node.start_mark,
                )
            if key in first_lines:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} was already given in line {first_lines[key]}, and "
                    "only one can count; remove one of the two",
                    problem_mark=key_node.start_mark,
                )
            first_lines[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        style = None
        if _UNPRINTABLE.search(data):
            style = '"'
        elif any(pattern.match(data) for _, pattern, _ in _CORE_SCHEMA):
            style = "'"
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    def represent_leaf_list(self, data: list[Any]) -> yaml.SequenceNode:
        """A list of scalars takes one line; anything deeper is a block."""
        is_leaf = not any(isinstance(item, (list, dict)) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=is_leaf)

    def represent_leaf_mapping(self, data: dict[str, Any]) -> yaml.MappingNode:
        """A mapping of numbers, such as an estimate, takes one line."""
        is_leaf = all(isinstance(value, (int, float)) for value in data.values())
        return self.represent_mapping("tag:yaml.org,2002:map", data, flow_style=is_leaf)


for _tag, _pattern, _first in _CORE_SCHEMA:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(list, _Dumper.represent_leaf_list)
_Dumper.add_representer(dict, _Dumper.represent_leaf_mapping)


def to_yaml(values: dict[str, Any]) -> str:
    """Canonical YAML: keys in the order given, one line per leaf, no alias, floats exact."""
    text: str = yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_NO_FOLDING
    )
    return text


def from_yaml(text: str, source: str) -> Any:
    """Read one YAML document into plain values.

    Args:
        text: the document.
        source: the file's name, for messages.

    Raises:
        ProfileInvalidError: the text is not YAML, or uses what is refused here.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise _located(error, text, source) from error
    except yaml.reader.ReaderError as error:
        code = error.character if isinstance(error.character, int) else ord(error.character)
        raise ProfileInvalidError(
            f"{source} holds the character U+{code:04X} at position {error.position}, which YAML "
            "does not allow.",
            hint="The file is damaged, or is not a profile; restore it.",
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ProfileInvalidError(
            f"{source} is not readable YAML: {reason}.", hint="Restore the file."
        ) from error
    except RecursionError as error:
        raise ProfileInvalidError(
            f"{source} is nested too deeply for a profile.", hint="Restore the file."
        ) from error


def _located(error: yaml.MarkedYAMLError, text: str, source: str) -> ProfileInvalidError:
    """One line with the place and, where it is clear, the cause."""
    problem = " ".join(f"{error.context or ''} {error.problem or ''}".split())
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return ProfileInvalidError(f"{source} is not readable YAML: {problem}.")
    place = f"{source}, line {mark.line + 1}"
    if text[mark.index : mark.index + 1] == "\t":
        return ProfileInvalidError(
            f"{place} is indented with a tab, which YAML does not allow; use spaces."
        )
    if mark.index >= len(text.rstrip()):
        return ProfileInvalidError(
            f"{place}: the file ends in the middle of a value ({problem}), so it was cut off.",
            hint="Restore it, or run `vegas-tune sweep` again to write it anew.",
        )
    return ProfileInvalidError(f"{place}: {problem}.")
