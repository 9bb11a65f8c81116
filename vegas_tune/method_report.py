"""A comparison of methods as text, Markdown and one self-contained HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from vegas_tune.charts import Chart, interval_chart, line_chart
from vegas_tune.markdown import markdown_table, markdown_text
from vegas_tune.method_figures import Bars, PaperFigure, figure_to_dict
from vegas_tune.method_rounds import OverheadSource
from vegas_tune.method_table import (
    MethodRow,
    figure,
    main_table,
    position_table,
)
from vegas_tune.methods import PLAIN, STOCK
from vegas_tune.report_blocks import Section, Table
from vegas_tune.report_html import escaped, facts_html, html_page, html_section, paired
from vegas_tune.wording import facts, times

KIND: Final = "vegas-tune/comparison"
VERSION: Final = 1

_OVERHEADS: Final[dict[OverheadSource, str]] = {
    "playback": "selection overhead over pairs of the same drafts with and without the work of "
    "selecting.",
    "window": "selection overhead over pairs of passes that draft as many tokens from as many KV "
    "entries, selected in one and the sink and latest ones in the other (window), or where that "
    "gives none, the share of the selection phase by the engine's own times, in which what "
    "selecting adds to verification is missing (phases).",
    "": "selection overhead is the share of the selection phase by the engine's own times, in "
    "which what selecting adds to verification is missing (phases).",
}


@dataclass(frozen=True, kw_only=True)
class MethodComparison:
    """A finished comparison, as it is written.

    Attributes:
        title: model and device in one line.
        status: `complete`, or `inconclusive` where a figure of the table is missing.
        reason: one sentence on the status.
        facts: what was measured on and with: model, device, runtime, workload, sampling.
        rows: fastest first.
        figures: of the paper, from these data.
        num_rounds: complete rounds behind the throughput.
        num_measurements: of tuning and comparing together.
        spent_s: cost of all measurements.
        overhead_from: how the cost of selecting was measured, where pairs of passes gave it.
    """

    title: str
    status: str
    reason: str
    facts: dict[str, Any]
    rows: tuple[MethodRow, ...]
    figures: tuple[PaperFigure, ...]
    num_rounds: int
    num_measurements: int
    spent_s: float
    overhead_from: OverheadSource = "playback"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, the figures' data included."""
        return {
            "kind": KIND,
            "version": VERSION,
            "title": self.title,
            "status": self.status,
            "reason": self.reason,
            "facts": self.facts,
            "num_rounds": self.num_rounds,
            "num_measurements": self.num_measurements,
            "spent_s": round(self.spent_s, 1),
            "overhead_from": self.overhead_from,
            "rows": [row.to_dict() for row in self.rows],
            "figures": [figure_to_dict(each) for each in self.figures],
        }


def verdict(comparison: MethodComparison) -> str:
    """Who is fastest, by how much, and whether that is sure."""
    drafting = [
        row
        for row in comparison.rows
        if row.name not in (PLAIN, STOCK) and (row.vs_plain or row.vs_stock)
    ]
    if not drafting:
        return comparison.reason
    best = drafting[0]
    # One of vLLM's own is not interleaved with the plugin engine's plain decoding.
    base = best.vs_plain or best.vs_stock
    assert base is not None
    against = "plain decoding" if best.vs_plain else "stock vLLM"
    words = f"{best.name} is fastest: {times(figure(base))} {against}"
    if base.high < 1:
        words = (
            f"Drafting does not pay here: the fastest method, {best.name}, reaches "
            f"{times(figure(base))} {against}"
        )
    ratio = best.vs_best_other
    if ratio is None:
        return f"{words}."
    against = f"{times(figure(ratio))} {best.best_other}, the next"
    unsure = "" if ratio.low > 1 else "; that interval includes 1, so which is faster is not shown"
    return f"{words}, {against}{unsure}."


def small_print(comparison: MethodComparison) -> str:
    """How the figures came about."""
    words = (
        f"Every method at its own best setting, found by the same three-step tuning; then "
        f"{comparison.num_rounds} interleaved rounds of all methods and plain decoding on held-out "
        "text. Brackets are 95 % intervals: throughput and its ratios over rounds, paired; "
        f"acceptance over requests; {_OVERHEADS[comparison.overhead_from]}"
    )
    if any(not row.is_interleaved for row in comparison.rows):
        words += (
            " vLLM's own methods are fixed when an engine starts: each was tuned over gamma on "
            "engines of its own, measured on the same held-out text, and is compared unpaired."
        )
    return words


def render_comparison_text(comparison: MethodComparison) -> str:
    """Tables and sentences, Markdown that also reads well as text."""
    parts = [
        markdown_text(f"{comparison.title}: {comparison.status}"),
        markdown_text(verdict(comparison)),
        _markdown(main_table(comparison.rows)),
    ]
    positions = position_table(comparison.rows)
    if positions.rows:
        parts += [
            markdown_text("Chance that a draft is accepted once those before it were:"),
            _markdown(positions),
        ]
    if comparison.status != "complete":
        parts.append(markdown_text(comparison.reason))
    parts.append(markdown_text(small_print(comparison)))
    return "\n\n".join(parts) + "\n"


def render_comparison_html(comparison: MethodComparison) -> str:
    """One page: verdict, table, figures, facts."""
    table = Section(
        key="methods",
        title="Methods at their own best setting",
        blocks=(main_table(comparison.rows), small_print(comparison)),
    )
    positions = Section(
        key="positions",
        title="Acceptance by draft position",
        blocks=(position_table(comparison.rows),),
    )
    drawn = [
        html_section(Section(key=each.key, title=each.title, blocks=(_paper(each),)), draw(each))
        for each in comparison.figures
    ]
    is_complete = comparison.status == "complete"
    body = [
        '<header><p class="kicker">vegas-tune comparison</p>'
        f"<h1>{escaped(comparison.title)}</h1>"
        f'<p class="status {"validated" if is_complete else ""}">'
        f"{escaped(comparison.status.capitalize())}</p>"
        f'<p class="verdict">{escaped(verdict(comparison))}</p>'
        + ("" if is_complete else f"<p>{escaped(comparison.reason)}</p>")
        + "</header>",
        "<main>",
        html_section(table, None),
        *([html_section(positions, None)] if position_table(comparison.rows).rows else []),
        *paired(drawn),
        *(
            f'<section id="{key}"><h2>{escaped(key.capitalize())}</h2>{facts_html(shown)}</section>'
            for key, values in comparison.facts.items()
            if isinstance(values, dict) and (shown := facts(values))
        ),
        "</main>",
    ]
    return html_page(comparison.title, "\n".join(body))


def draw(shown: PaperFigure) -> Chart:
    """A figure as inline SVG."""
    if isinstance(shown, Bars):
        return interval_chart(
            key=shown.key,
            title=shown.title,
            description="; ".join(row.label for row in shown.rows),
            axis=shown.axis,
            rows=shown.rows,
        )
    return line_chart(
        key=shown.key,
        title=shown.title,
        description="; ".join(mark.label for each in shown.series for mark in each.marks),
        x_axis=shown.x_axis,
        y_axis=shown.y_axis,
        series=shown.series,
    )


def _paper(shown: PaperFigure) -> str:
    return f"The paper's {shown.paper}, from this comparison's measurements."


def _markdown(table: Table) -> str:
    return markdown_table(table.columns, table.rows, numeric=table.numeric)


def title_of(facts_by_part: dict[str, Any]) -> str:
    """Model and device in one line."""
    model, device = facts_by_part["model"].get("id"), facts_by_part["device"].get("class")
    return f"{model or 'a model'} on {device or 'an unknown device'}"
