"""Plain text as Markdown that shows it as it is, also on GitHub. Writes no HTML."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Final

# Where Markdown would take text for markup. An underscore inside a word is none, and a bracket
# makes a link only with what follows it, so that intervals can be read in the source as well.
_MARKUP: Final = re.compile(r"([\\`*<>|~#&$]|\](?=[(\[:])|(?<!\w)_|_(?!\w))")
_LIST: Final = re.compile(r"^(?:([-+=])|(\d+)([.)])(?=\s|$))")
# What GitHub recognises without markup: mentions, issue numbers and bare links.
_MENTION: Final = re.compile(r"@(?=\w)|#(?=\d)")
_LINK: Final = re.compile(r"(?:https?|ftp)://|\bwww\.", re.IGNORECASE)
_ZERO_WIDTH_SPACE: Final = "\u200b"


def markdown_text(text: str) -> str:
    """Text that can form neither markup nor a link nor a mention."""
    text = _MARKUP.sub(r"\\\1", text)
    text = _LIST.sub(lambda found: f"{found[2] or ''}\\{found[1] or found[3]}", text)
    text = _MENTION.sub(lambda found: f"{found[0]}{_ZERO_WIDTH_SPACE}", text)
    return _LINK.sub(lambda found: f"{found[0][:1]}{_ZERO_WIDTH_SPACE}{found[0][1:]}", text)


def markdown_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numeric: Collection[int] = (),
) -> str:
    """A table; `numeric` are the columns that align right."""
    lines = [
        [markdown_text(text) for text in columns],
        ["---:" if index in numeric else "---" for index in range(len(columns))],
        *([markdown_text(text) for text in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_code(text: str) -> str:
    """A shell command in a fence longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}sh\n{text}\n{fence}"
