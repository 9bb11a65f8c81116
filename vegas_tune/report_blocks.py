"""The blocks a report is made of, before any format lays them out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table.

    Attributes:
        columns: head of each column.
        rows: cells, as many as there are columns.
        caption: says what is inside where the table is folded away; empty: shown at once.
        numeric: columns that align right.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    numeric: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Facts:
    """Labels with their values."""

    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Command:
    """A shell command to copy."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One item of a log: a title, a sentence, small print, and details."""

    title: str
    text: str
    small: str
    details: Table | None = None


Block = str | Table | Facts | Command | Entry


@dataclass(frozen=True, kw_only=True)
class Section:
    """A titled part; `key` names it, and its chart where it has one."""

    key: str
    title: str
    blocks: tuple[Block, ...]
