"""A report as one HTML file: no script, no font, no request; light and dark; wide and narrow."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from vegas_runtime.profile import Profile
from vegas_tune.charts import Chart
from vegas_tune.headline import Headline
from vegas_tune.report_blocks import Block, Command, Entry, Facts, Section, Table
from vegas_tune.report_charts import report_charts
from vegas_tune.report_content import report_content
from vegas_tune.report_style import STYLE
from vegas_tune.wording import line

# What the page may load, told to the browser: nothing. A hostile profile gains nothing from text.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
# Without an icon of its own a served page is asked for /favicon.ico.
_NO_ICON = '<link rel="icon" href="data:,">'

_UNIT = re.compile(r"(?<=\d) (?=(?:%|tok/s|ms|min|s|GiB)(?!\w))")

# Charts that stand beside each other on a wide screen; the other sections take the whole width.
_PAIRED = frozenset({"sparsity", "gamma", "refine", "validation", "acceptance", "phases"})


def render_html(profile: Profile, *, path: str = "profile.yaml") -> str:
    """The report as one self-contained HTML page.

    Args:
        profile: what to report on; every string in it is escaped.
        path: the profile's file, for the commands to copy.
    """
    report = report_content(profile, path=path)
    charts = report_charts(profile)
    first = [part for part in report.sections if part.key not in _PAIRED and part.key == "next"]
    drawn = [part for part in report.sections if part.key in _PAIRED]
    rest = [part for part in report.sections if part.key not in _PAIRED and part.key != "next"]
    body = [
        _header(report.headline),
        "<main>",
        *(html_section(part, None) for part in first),
        *paired([html_section(part, charts.get(part.key)) for part in drawn]),
        *(html_section(part, None) for part in rest),
        "</main>",
        f"<footer><p>{_footer(profile)}</p></footer>",
    ]
    return html_page(report.headline.title, "\n".join(body))


def paired(sections: list[str]) -> list[str]:
    """Sections that stand beside each other on a wide screen."""
    return ['<div class="pairs">', *sections, "</div>"] if sections else []


def html_page(title: str, body: str) -> str:
    """A self-contained page around a body of HTML."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>vegas-tune: {escaped(title)}</title>\n{_NO_ICON}\n"
        f"<style>\n{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _header(headline: Headline) -> str:
    figure = (
        f'<p class="figure"><strong>{escaped(headline.figure)}</strong> '
        f"<span>{escaped(headline.interval)}</span></p>"
        if headline.figure
        else ""
    )
    return (
        f'<header><p class="kicker">vegas-tune report</p><h1>{escaped(headline.title)}</h1>'
        f'<p class="status {headline.status}">{escaped(headline.status_text)}</p>'
        f'{figure}<p class="verdict">{escaped(headline.verdict)}</p>'
        f"{facts_html(headline.rows)}</header>"
    )


def _footer(profile: Profile) -> str:
    tool = f"{profile.tool.name} {profile.tool.version}" if profile.tool else "vegas-tune"
    made = f", {profile.created}" if profile.created else ""
    return escaped(line(f"Made from {profile.profile_id} by {tool}{made}."))


def html_section(section: Section, chart: Chart | None) -> str:
    """A titled part with its chart."""
    drawn = f'<figure class="chart">{chart.svg}{chart.legend}</figure>' if chart else ""
    blocks = list(section.blocks)
    lead = ""
    if drawn and blocks and isinstance(blocks[0], str):
        lead = _block(blocks.pop(0))
    return (
        f'<section id="{section.key}" aria-labelledby="{section.key}-heading">'
        f'<h2 id="{section.key}-heading">{escaped(section.title)}</h2>'
        f"{lead}{drawn}{''.join(_blocks(blocks))}</section>"
    )


def _blocks(blocks: Iterable[Block]) -> Iterable[str]:
    """Blocks in order; neighbouring log entries share one list."""
    is_listing = False
    for block in blocks:
        if isinstance(block, Entry) != is_listing:
            is_listing = not is_listing
            yield '<ol class="log">' if is_listing else "</ol>"
        yield _block(block)
    if is_listing:
        yield "</ol>"


def _block(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{escaped(block)}</p>"
    if isinstance(block, Command):
        return f'<pre tabindex="0"><code>{escaped(block.text)}</code></pre>'
    if isinstance(block, Facts):
        return facts_html(block.rows)
    if isinstance(block, Table):
        return _folded(block) if block.caption else _table(block)
    details = _folded(block.details) if block.details is not None else ""
    return (
        f"<li><h3>{escaped(block.title)}</h3><p>{escaped(block.text)}</p>"
        f'<p class="small">{escaped(block.small)}</p>{details}</li>'
    )


def escaped(text: str) -> str:
    """Text that is only text, its numbers kept on one line with their units."""
    return _UNIT.sub("\u00a0", escape(text))


def facts_html(rows: Iterable[tuple[str, str]]) -> str:
    """Labels with their values."""
    items = "".join(
        f"<div><dt>{escaped(label)}</dt><dd>{escaped(text)}</dd></div>" for label, text in rows
    )
    return f'<dl class="facts">{items}</dl>'


def _folded(table: Table) -> str:
    """A table behind its caption: looked up rather than read."""
    return f"<details><summary>{escaped(table.caption)}</summary>{_table(table)}</details>"


def _table(table: Table) -> str:
    """A table in a box of its own, which scrolls where the page must not."""

    def cell(index: int, text: str, tag: str, scope: str = "") -> str:
        kind = ' class="number"' if index in table.numeric else ""
        return f"<{tag}{scope}{kind}>{escaped(text)}</{tag}>"

    head = "".join(cell(i, text, "th", ' scope="col"') for i, text in enumerate(table.columns))
    rows = "".join(
        f"<tr>{''.join(cell(i, text, 'td') for i, text in enumerate(row))}</tr>"
        for row in table.rows
    )
    label = escaped(table.caption or ", ".join(table.columns))
    return (
        f'<div class="table" role="region" aria-label="{label}" tabindex="0">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
