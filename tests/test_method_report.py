"""A comparison as text, page and figures."""

from __future__ import annotations

import json
import re
import struct
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from synthetic_methods import MethodsEngine
from test_method_rounds import BASE, BLOCKS, SETTINGS
from test_report import check_inside

from vegas_runtime.errors import UsageError
from vegas_tune import figure_files
from vegas_tune.bench import Silent
from vegas_tune.chart_data import METHOD_STYLES
from vegas_tune.laboratory import Laboratory, MemoryStore
from vegas_tune.measure import Estimate
from vegas_tune.method_figures import Bars, Curves, PaperFigure, paper_figures
from vegas_tune.method_report import (
    MethodComparison,
    draw,
    render_comparison_html,
    render_comparison_text,
    verdict,
)
from vegas_tune.method_rounds import ComparisonLab, measure_side_by_side
from vegas_tune.method_table import MethodRow, method_rows
from vegas_tune.methods import PLAIN
from vegas_tune.plan import make_plan
from vegas_tune.sweep import Search, run_search

HOSTILE = "<script>alert(1)</script>"


def searches() -> dict[str, Search]:
    found = {}
    for name, config in SETTINGS.items():
        plan = make_plan(
            config.replace(num_speculative_tokens=0),
            BLOCKS,
            budget_s=4000.0,
            tokens=1200,
            ratios=(0.03, 0.05, 0.1, 0.25),
            max_num_speculative_tokens=10,
        )
        found[name] = run_search(plan, Laboratory(plan, MethodsEngine(), BLOCKS))
    return found


@pytest.fixture(scope="module")
def tuned() -> dict[str, Search]:
    return searches()


@pytest.fixture(scope="module")
def comparison(tuned: dict[str, Search]) -> MethodComparison:
    settings = {name: search.chosen for name, search in tuned.items() if search.chosen}
    plan = make_plan(BASE, BLOCKS, budget_s=1e6, tokens=1200)
    lab = ComparisonLab(plan, MethodsEngine(), BLOCKS, store=MemoryStore())
    measured = measure_side_by_side(plan, settings, lab, Silent(), can_skip_selection=True)
    rows = method_rows(dict(settings), plan.plain, measured)
    return MethodComparison(
        title="3 methods, a model on a machine",
        status="complete",
        reason="every figure of the table was measured.",
        facts={"model": {"id": HOSTILE}, "device": {"class": "a machine"}},
        rows=rows,
        figures=paper_figures(rows, tuned, measured),
        num_rounds=len(measured.rounds),
        num_measurements=99,
        spent_s=1.0,
    )


def by_key(comparison: MethodComparison) -> dict[str, PaperFigure]:
    return {each.key: each for each in comparison.figures}


# ------------------------------------------------------------------ the figures' data


def test_every_figure_of_the_paper_has_data(comparison: MethodComparison) -> None:
    swept = [f"figure-13-{name}" for name in SETTINGS]
    assert list(by_key(comparison)) == [
        "figure-2", "figure-4", "figure-8", "figure-9", "figure-10a", "figure-10b", *swept,
    ]  # fmt: skip


def test_curves_hold_what_tuning_measured(
    comparison: MethodComparison, tuned: dict[str, Search]
) -> None:
    figure_8 = by_key(comparison)["figure-8"]
    assert isinstance(figure_8, Curves)
    for each in figure_8.series:
        search = tuned[each.name]
        assert [mark.x for mark in each.marks] == list(search.plan.ratios)
        # The truth rises with the ratio, and a window's acceptance lies below the guided one's.
        assert each.marks[-1].y > each.marks[0].y
    highest = {each.name: each.marks[-1].y for each in figure_8.series}
    assert highest["vegas"] > highest["quest"] > highest["streaming_llm"]
    figure_4 = by_key(comparison)["figure-4"]
    assert isinstance(figure_4, Curves)
    # All at the largest gamma, so that curves reach equally far.
    assert {len(each.marks) for each in figure_4.series} == {10}
    figure_2 = by_key(comparison)["figure-2"]
    assert isinstance(figure_2, Curves)
    for each in figure_2.series:
        tokens = [mark.y for mark in each.marks]
        assert len(tokens) >= 3
        assert tokens == sorted(tokens)


def test_the_sweep_figure_holds_every_setting_tried(
    comparison: MethodComparison, tuned: dict[str, Search]
) -> None:
    for name, search in tuned.items():
        swept = by_key(comparison)[f"figure-13-{name}"]
        assert isinstance(swept, Curves)
        shown = {
            (int(each.name.removeprefix("gamma ")), mark.x)
            for each in swept.series
            for mark in each.marks
        }
        assert shown == {
            (m.point.config.num_speculative_tokens, m.point.config.sparsity_ratio)
            for m in search.measured()
            if m.point.config.num_speculative_tokens
        }


def test_bars_are_the_tables_own_figures(comparison: MethodComparison) -> None:
    rows = {row.name: row for row in comparison.rows}
    throughput, overhead = by_key(comparison)["figure-9"], by_key(comparison)["figure-10b"]
    assert isinstance(throughput, Bars)
    assert isinstance(overhead, Bars)
    assert set(throughput.names) == {*SETTINGS, PLAIN}
    for name, bar in zip(throughput.names, throughput.rows, strict=True):
        known = rows[name].decode_tok_s
        assert known is not None
        assert (bar.low, bar.value, bar.high) == (known.low, known.est, known.high)
    assert set(overhead.names) == set(SETTINGS)
    assert max(zip(overhead.rows, overhead.names, strict=True), key=lambda p: p[0].value)[1] == (
        "quest"
    )


# ------------------------------------------------------------------ words


def test_the_document_is_json_with_all_figures(comparison: MethodComparison) -> None:
    document = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert [row["name"] for row in document["rows"]] == [row.name for row in comparison.rows]
    assert len(document["figures"]) == len(comparison.figures)
    assert all(each.get("series") or each.get("values") for each in document["figures"])


def test_text_is_markdown_with_two_tables(comparison: MethodComparison) -> None:
    tokens = MarkdownIt("commonmark").enable("table").parse(render_comparison_text(comparison))
    assert sum(token.type == "table_open" for token in tokens) == 2


def row(
    name: str, plain: tuple[float, float, float], other: tuple[float, float, float]
) -> MethodRow:
    def estimate(values: tuple[float, float, float]) -> Estimate:
        return Estimate(low=values[0], est=values[1], high=values[2], n=10)

    return MethodRow(
        name=name,
        config=SETTINGS["vegas"],
        vs_plain=estimate(plain),
        vs_best_other=estimate(other),
        best_other="quest",
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            row("vegas", (1.2, 1.25, 1.3), (1.05, 1.1, 1.15)),
            r"^vegas is fastest: 1\.25x .* next\.$",
        ),
        (row("vegas", (1.2, 1.25, 1.3), (0.98, 1.01, 1.04)), "which is faster is not shown"),
        (row("vegas", (0.7, 0.75, 0.8), (1.05, 1.1, 1.15)), "^Drafting does not pay here"),
    ],
)
def test_the_verdict_claims_what_the_intervals_show(
    comparison: MethodComparison, rows: MethodRow, words: str
) -> None:
    values = {**vars(comparison), "rows": (rows,)}
    assert re.search(words, verdict(MethodComparison(**values)))


class Page(HTMLParser):
    """Counts tags; unknown ones would be somebody's text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)


def test_the_page_holds_table_and_charts_and_no_script(comparison: MethodComparison) -> None:
    html = render_comparison_html(comparison)
    page = Page()
    page.feed(html)
    assert "script" not in page.tags
    assert HOSTILE not in html
    assert page.tags.count("figure") == len(comparison.figures)
    assert page.tags.count("table") == 2
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", html)


def test_charts_stay_inside_their_frames(comparison: MethodComparison) -> None:
    for each in comparison.figures:
        assert check_inside(ET.fromstring(draw(each).svg)) > 0


def test_methods_differ_in_marker_or_fill_as_well_as_in_colour() -> None:
    looks = []
    for style in METHOD_STYLES:
        look = figure_files._look(style)
        looks.append((look["marker"], look["markerfacecolor"] == "none"))
    assert len(set(looks)) == len(METHOD_STYLES)


# ------------------------------------------------------------------ files


def test_figures_are_written_as_png_and_svg(comparison: MethodComparison, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = figure_files.write_figures(comparison.figures, tmp_path / "figures")
    assert len(files) == 2 * len(comparison.figures)
    for path in files:
        content = path.read_bytes()
        if path.suffix == ".png":
            width, height = struct.unpack(">II", content[16:24])
            assert content.startswith(b"\x89PNG")
            assert min(width, height) > 300
        else:
            words = "".join(ET.fromstring(content).itertext())
            shown = by_key(comparison)[path.stem]
            names = shown.names if isinstance(shown, Bars) else [s.name for s in shown.series]
            assert all(name in words for name in names)
    again = figure_files.write_figures(comparison.figures, tmp_path / "again")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in files]


def test_without_matplotlib_it_says_what_to_install(
    comparison: MethodComparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figure_files, "can_draw", lambda: False)
    with pytest.raises(UsageError, match="matplotlib") as caught:
        figure_files.write_figures(comparison.figures, tmp_path)
    assert "vegas-tune[demo]" in caught.value.hint
