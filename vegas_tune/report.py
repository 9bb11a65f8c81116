"""A profile for readers: a terminal's table, Markdown, an HTML page, JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from vegas_runtime.errors import UsageError
from vegas_runtime.profile import Profile
from vegas_tune.headline import Headline, headline
from vegas_tune.markdown import markdown_code, markdown_table, markdown_text
from vegas_tune.report_blocks import Block, Command, Entry, Facts, Table
from vegas_tune.report_content import report_content
from vegas_tune.report_html import render_html
from vegas_tune.report_record import decision_rows
from vegas_tune.wording import sentence

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["FORMATS", "render", "render_html", "render_markdown", "render_table"]

_TEXT_WIDTH: Final = 100


def render(profile: Profile, output: str, *, path: str = "profile.yaml") -> str:
    """A profile as text.

    Args:
        profile: what to report on.
        output: `table`, `md`, `html` or `json`.
        path: the profile's file, for the commands to copy.

    Raises:
        UsageError: an unknown output.
    """
    if output not in FORMATS:
        raise UsageError(f"format {output!r} is unknown; known are {', '.join(FORMATS)}.")
    return FORMATS[output](profile, path)


def render_table(profile: Profile) -> RenderableType:
    """The summary a terminal shows after a sweep: verdict, key figures, decisions."""
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    top = headline(profile)
    colour = "green" if top.status == "validated" else "yellow"
    lines: list[RenderableType] = [
        Text(top.title, style="bold"),
        Text.assemble((top.status_text, colour), ": ", top.verdict),
    ]
    figures = RichTable.grid(padding=(0, 2))
    figures.add_column(style="dim", no_wrap=True)
    figures.add_column(overflow="fold")
    if top.figure:
        figures.add_row("Speed-up", Text(f"{top.figure} {top.interval}", style="bold"))
    for label, text in top.rows:
        figures.add_row(Text(label), Text(text))
    lines += [Text(""), figures]
    if profile.decisions:
        log = RichTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("step", "chosen", "settled", "why"):
            log.add_column(column, overflow="fold")
        for row in decision_rows(profile):
            log.add_row(*(Text(text) for text in row))
        lines += [Text(""), log]
    return Group(*lines)


def render_markdown(profile: Profile, *, path: str = "profile.yaml") -> str:
    """The whole report as Markdown without any HTML, for a comment on a pull request.

    Text from the profile is escaped: it cannot form markup, a link or a mention.
    """
    report = report_content(profile, path=path)
    parts = [*_headline_markdown(report.headline)]
    for section in report.sections:
        parts.append(f"### {markdown_text(section.title)}")
        parts += [_block_markdown(block) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def _headline_markdown(top: Headline) -> Iterable[str]:
    yield f"## {markdown_text(top.title)}"
    figure = (
        f"**{markdown_text(top.figure)}** {markdown_text(top.interval)}. " if top.figure else ""
    )
    yield f"{figure}**{markdown_text(top.status_text)}**: {markdown_text(top.verdict)}"
    yield _block_markdown(Facts(top.rows))


def _block_markdown(block: Block) -> str:
    if isinstance(block, str):
        return markdown_text(block)
    if isinstance(block, Command):
        return markdown_code(block.text)
    if isinstance(block, Facts):
        # As one text: a label in brackets before a colon would define a link.
        return "\n".join(f"- {markdown_text(f'{sentence(k)}: {text}')}" for k, text in block.rows)
    if isinstance(block, Table):
        return _table_markdown(block)
    return _entry_markdown(block)


def _entry_markdown(entry: Entry) -> str:
    parts = [f"**{markdown_text(entry.title)}**"]
    parts += [markdown_text(text) for text in (entry.text, entry.small)]
    if entry.details:
        parts.append(_table_markdown(entry.details))
    return "\n\n".join(parts)


def _table_markdown(table: Table) -> str:
    return markdown_table(table.columns, table.rows, numeric=table.numeric)


def _table_text(profile: Profile, path: str) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=_TEXT_WIDTH, color_system=None)
    with console.capture() as captured:
        console.print(render_table(profile))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


FORMATS: Final[Mapping[str, Callable[[Profile, str], str]]] = {
    "table": _table_text,
    "md": lambda profile, path: render_markdown(profile, path=path),
    "html": lambda profile, path: render_html(profile, path=path),
    "json": lambda profile, path: json.dumps(profile.to_dict(), indent=2, allow_nan=False) + "\n",
}
