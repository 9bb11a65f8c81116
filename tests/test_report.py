"""The report: what it says, that it is safe and self-contained, and that its charts are right."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console

from profiles import estimate, make_profile, point
from vegas_runtime.errors import UsageError
from vegas_runtime.profile import Estimate, Profile
from vegas_tune import wording
from vegas_tune.chart_data import METHOD_STYLES, Axis, Band, Bar, Mark, Part, Row, Series
from vegas_tune.charts import interval_chart, line_chart, nice_ticks, stacked_bars
from vegas_tune.curves import conditional_acceptance, gamma_curve, refine_curve, sparsity_curve
from vegas_tune.headline import headline, iteration_budget
from vegas_tune.markdown import markdown_code, markdown_table, markdown_text
from vegas_tune.report import FORMATS, render, render_html, render_markdown, render_table
from vegas_tune.report_style import PALETTES

VOID = {"meta", "link", "br", "hr", "img", "input"}
SECTIONS = (
    "next",
    "sparsity",
    "gamma",
    "refine",
    "validation",
    "acceptance",
    "phases",
    "decisions",
    "points",
    "protocol",
    "workload",
    "machine",
    "profile",
)
HOSTILE = "<script>alert(1)</script>\"' onload=x [a](http://evil.example) | `b` **c** @team\x1b[31m"
NOTHING: dict[str, list[Any]] = {"sparsity": [], "gamma": [], "refine": [], "validate": []}


class Page(HTMLParser):
    """Reads a page, and refuses one whose tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def selected(gamma: int) -> dict[str, Any]:
    return {"default": {"num_speculative_tokens": gamma}}


def plain_profile(**changes: Any) -> Profile:
    """Plain decoding won, a finalist was validated at 0.96x."""
    best = point(0.07, 3, 2.2, 44.9) | {"speedup_vs_gamma0": estimate(0.96)}
    return make_profile(
        selected=selected(0),
        curves={"validate": [best, point(0.07, 0, 0.0, 46.8)]},
        **changes,
    )


def draft_profile() -> Profile:
    return make_profile(status="draft", results=None, decisions=[], curves=NOTHING)


def sweep_decisions() -> list[dict[str, Any]]:
    """Decisions in the form a sweep writes them."""
    gammas = (3, 4, 5, 6, 7)
    return [
        {
            "step": "1-sparsity",
            "rule": "isotonic-bootstrap-plateau",
            "chosen": {"sparsity_ratio": 0.1},
            "why": "smallest ratio within 2 %.",
            "resolved": True,
            "outcome": "reached",
            "data": {"num_speculative_tokens": 15, "tolerance": 0.02},
            "alternatives": [
                {"sparsity_ratio": 0.1, "relative_accepted": estimate(0.99), "undetermined": False}
            ],
        },
        {
            "step": "2-gamma",
            "rule": "best-first-bracket",
            "chosen": {"num_speculative_tokens": 6, "sparsity_ratio": 0.1},
            "why": "gamma 6 at ratio 0.1 is the fastest of 5 measured.",
            "resolved": True,
            "alternatives": [
                {
                    "num_speculative_tokens": gamma,
                    "sparsity_ratio": 0.1,
                    "relative_tok_s": estimate(1.0),
                    "predicted_tok_s": 44.5 + gamma,
                }
                for gamma in gammas
            ],
        },
    ]


def svgs(html: str) -> list[ET.Element]:
    """The charts of a page, legends' swatches left out."""
    found = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    return [root for text in found if (root := ET.fromstring(text)).get("role") == "img"]


class TestPage:
    def test_holds_every_section_once(self) -> None:
        page = Page(render_html(make_profile()))
        ids = [value for name, value in page.attributes if name == "id"]
        assert [each for each in ids if each in SECTIONS] == list(SECTIONS)
        assert len(ids) == len(set(ids))

    def test_asks_for_nothing(self) -> None:
        html = render_html(make_profile(notes="see http://evil.example/x.png"))
        page = Page(html)
        links = [value for name, value in page.attributes if name in ("src", "href", "srcset")]
        assert links == ["data:,"]
        assert not {"script", "img", "iframe", "object", "embed", "base"} & set(page.tags)
        assert re.findall(r"url\(([^)]*)\)", html) == ["#phases-hatch"]
        assert "@import" not in html
        assert "default-src 'none'" in html

    def test_names_its_charts_for_a_screen_reader(self) -> None:
        charts = svgs(render_html(make_profile()))
        assert len(charts) == 6
        for chart in charts:
            ids = [element.get("id") for element in (chart[0], chart[1])]
            assert [chart[0].tag, chart[1].tag] == ["title", "desc"]
            assert str(chart.get("aria-labelledby")).split() == ids
            assert chart[0].text
            assert chart[1].text

    def test_every_colour_has_the_contrast_its_use_needs(self) -> None:
        text = ("ink", "muted", "good", "caution")
        graphic = ("measured", "predicted", "conditional", "plain", "draft", "select", "other")
        graphic += METHOD_STYLES
        for palette in PALETTES.values():
            for ground in ("page", "card", "code"):
                for name in text:
                    assert contrast(palette[name], palette[ground]) >= 4.5, (name, ground)
            for name in graphic:
                assert contrast(palette[name], palette["card"]) >= 3, name
            for part in ("draft", "verify", "other", "plain"):
                assert contrast(palette[f"on-{part}"], palette[part]) >= 4.5, part

    def test_palettes_name_the_same_colours_and_all_are_used(self) -> None:
        html = render_html(make_profile())
        assert PALETTES["light"].keys() == PALETTES["dark"].keys()
        used = set(re.findall(r"var\(--([a-z0-9-]+)\)", html))
        assert used == set(PALETTES["light"])

    def test_leaves_out_what_the_profile_lacks(self) -> None:
        page = Page(render_html(draft_profile()))
        ids = {value for name, value in page.attributes if name == "id"}
        assert not ids & {"sparsity", "gamma", "refine", "validation", "acceptance", "points"}
        assert "No measurement stands behind this setting." in page.words

    @pytest.mark.parametrize("missing", ["phase_ms", "accepted_per_iteration", "acceptance_length"])
    def test_does_without_an_optional_figure(self, missing: str) -> None:
        Page(render_html(make_profile(results={missing: None})))

    def test_keeps_a_number_and_its_unit_together(self) -> None:
        assert "58.5\u00a0tok/s" in render_html(make_profile())


class TestHostileText:
    @pytest.fixture
    def profile(self) -> Profile:
        return make_profile(
            notes=HOSTILE,
            host={HOSTILE: HOSTILE, "list": [HOSTILE, {HOSTILE: 1}]},
            tool={"name": HOSTILE, "version": HOSTILE},
            match={
                "model": {"id": HOSTILE, "revision": HOSTILE, "dtype": HOSTILE},
                "device": {"class": HOSTILE},
                "runtime": {"torch": HOSTILE, "other": {HOSTILE: HOSTILE}},
            },
            selected={"default": {"algorithm": HOSTILE}},
            workload={"name": HOSTILE, "eos": HOSTILE, "mix": {HOSTILE: HOSTILE}},
            protocol={"id": HOSTILE, "order": HOSTILE},
            lossless_check={"method": HOSTILE},
            artifacts=[{"name": HOSTILE, "sha256": HOSTILE}],
            decisions=[
                {
                    "step": HOSTILE,
                    "rule": HOSTILE,
                    "chosen": {HOSTILE: HOSTILE},
                    "why": HOSTILE,
                    "alternatives": [HOSTILE, {HOSTILE: HOSTILE}],
                    "resolved": False,
                    "outcome": HOSTILE,
                    "data": {HOSTILE: [HOSTILE]},
                }
            ],
            curves={
                "gamma": [
                    {
                        "sparsity_ratio": 0.1,
                        "num_speculative_tokens": 15,
                        "status": "failed",
                        "failure": {"kind": HOSTILE, "message": HOSTILE},
                    }
                ]
            },
        )

    def test_stays_text_in_html(self, profile: Profile) -> None:
        html = render_html(profile, path=HOSTILE)
        page = Page(html)
        assert "script" not in page.tags
        assert page.words.count("alert(1)") >= 15
        assert not [name for name, _ in page.attributes if name.startswith("on")]
        assert "\x1b" not in html

    def test_forms_no_markup_in_markdown(self, profile: Profile) -> None:
        text = render_markdown(profile, path=HOSTILE)
        outside = re.sub(r"(?ms)^(`{3,})sh$.*?^\1$", "", text)
        assert outside.count("alert(1)") >= 15
        assert not re.search(r"(?<!\\)<", outside)
        assert not re.search(r"(?<!\\)\][(\[:]", outside)
        assert "@team" not in outside
        assert "http://evil" not in outside
        assert "\x1b" not in text
        for row in re.findall(r"(?m)^\|.*\|$", outside):
            assert len(re.findall(r"(?<!\\)\|", row)) == len(row.split(" | ")) + 1

    def test_forms_no_link_and_no_html_for_a_markdown_reader(self, profile: Profile) -> None:
        tokens = MarkdownIt("commonmark").enable("table").parse(render_markdown(profile))
        pieces = [piece for token in tokens for piece in token.children or ()]
        kinds = {piece.type for piece in [*tokens, *pieces]}
        assert "table_open" in kinds
        assert not kinds & {"link_open", "image", "html_block", "html_inline", "em_open"}
        strong = [b.content for a, b in pairwise(pieces) if a.type == "strong_open"]
        assert "c" not in strong

    def test_reaches_no_terminal_as_a_control_character(self, profile: Profile) -> None:
        console = Console(width=80, force_terminal=False)
        with console.capture() as captured:
            console.print(render_table(profile))
        assert "\x1b" not in captured.get()
        # rich's own markup is not read either: the brackets are still there.
        assert "[a](http://evil.example)" in "".join(captured.get().split("\n")).replace(" ", "")


class TestVerdict:
    def test_a_gain_is_given_with_its_interval_and_what_it_is_against(self) -> None:
        top = headline(make_profile())
        assert top.figure == "1.25x"
        assert top.interval.startswith("[1.23, 1.27] ")
        assert "plain decoding in the same engine" in top.interval
        assert "is faster than plain decoding" in top.verdict
        assert top.status_text == "Validated"

    def test_the_gain_over_the_stock_engine_is_the_one_published(self) -> None:
        top = headline(make_profile(results={"speedup_vs_stock": estimate(1.4)}))
        assert top.figure == "1.40x"
        assert "without the plugin" in top.interval
        assert ("Against plain decoding", "1.25x [1.23, 1.27]") in top.rows

    def test_plain_decoding_is_said_plainly(self) -> None:
        top = headline(plain_profile())
        assert top.figure == ""
        assert top.verdict.startswith("Plain decoding is fastest here")
        assert "gamma 3, 7 % of KV, reaches 0.960x [0.941, 0.979]" in top.verdict
        assert top.rows[0] == ("Setting", "plain decoding, nothing is drafted")

    def test_a_gain_that_only_the_last_decision_holds_is_found(self) -> None:
        decision = {
            "step": "4-validate",
            "rule": "paired-rounds-vs-gamma0",
            "chosen": {"num_speculative_tokens": 0, "sparsity_ratio": 0.07},
            "why": "drafting does not pay here.",
            "resolved": True,
            "alternatives": [
                {
                    "num_speculative_tokens": 3,
                    "sparsity_ratio": 0.07,
                    "speedup_vs_gamma0": estimate(0.96),
                }
            ],
        }
        profile = make_profile(
            selected=selected(0),
            curves={"validate": [point(0.07, 3, 2.2, 44.9), point(0.07, 0, 0.0, 46.8)]},
            decisions=[decision],
        )
        assert "reaches 0.960x [0.941, 0.979]" in headline(profile).verdict
        assert "| 0.960x [0.941, 0.979] |" in render_markdown(profile)

    def test_the_time_of_a_plain_step_is_not_called_an_iteration(self) -> None:
        plain = plain_profile(results={"accepted_per_iteration": None, "acceptance_length": None})
        assert "One step of plain decoding takes 739 ms." in render_markdown(plain)
        assert "one step of plain decoding: 739" in render_html(plain)

    @pytest.mark.parametrize(
        ("interval", "words"),
        [
            ({"est": 1.01, "low": 0.98, "high": 1.04}, "not shown to be faster"),
            ({"est": 0.9, "low": 0.88, "high": 0.92}, "slower than plain decoding"),
            ({"est": 1.2, "low": None, "high": None, "point_only": True}, "without an interval"),
        ],
    )
    def test_no_gain_is_claimed_that_the_interval_does_not_show(
        self, interval: dict[str, Any], words: str
    ) -> None:
        top = headline(make_profile(results={"speedup_vs_gamma0": interval}))
        assert words in top.verdict

    def test_inconclusive_says_what_to_do(self) -> None:
        text = render_markdown(make_profile(status="inconclusive"))
        assert "**Inconclusive**" in text
        assert "--budget" in text
        assert "vegas-tune apply" not in text

    def test_a_changed_draft_does_not_borrow_its_figures(self) -> None:
        top = headline(make_profile(status="draft"))
        assert top.figure == ""
        assert "nothing ties the figures" in top.verdict

    def test_next_step_fits_the_engine_and_names_the_file(self) -> None:
        here = render_markdown(make_profile(), path="my run/profile.yaml")
        served = render_markdown(make_profile(backend="vllm"))
        assert "vegas-tune apply 'my run/profile.yaml' --run" in here
        assert "vllm serve --config" in served

    def test_an_iteration_is_set_against_plain_decoding_of_as_many_tokens(self) -> None:
        budget = iteration_budget(make_profile())
        assert budget is not None
        assert budget.drafting_ms == pytest.approx(372 + 48 + 310 + 9)
        # 8 requests gain 5.45 tokens each, at 46.8 tokens per second together.
        assert budget.plain_ms == pytest.approx(1000 * 5.45 * 8 / 46.8)


class TestFormats:
    def test_every_point_and_failure_is_told(self) -> None:
        profile = make_profile()
        text = render_markdown(profile)
        part = text.split("### Every measured point")[1].split("###")[0]
        rows = [row for row in part.splitlines() if re.match(r"\| (\d|validation) \|", row)]
        curves = profile.curves
        expected = len([*curves.sparsity, *curves.gamma, *curves.refine, *curves.validation])
        assert len(rows) == expected
        assert "failed (oom): 24.1 GiB asked for, 24.0 GiB present." in text

    def test_every_decision_is_told_with_its_reason(self) -> None:
        profile = make_profile()
        markdown, page = render_markdown(profile), Page(render_html(profile)).words
        for decision in profile.decisions:
            assert decision.rule in page
            assert decision.rule in markdown
            assert decision.why in page
            assert markdown_text(decision.why) in markdown

    def test_markdown_has_no_html(self) -> None:
        assert not re.search(r"<[a-z/!]", render_markdown(make_profile()))

    def test_table_summary_fits_a_narrow_terminal(self) -> None:
        console = Console(width=60, force_terminal=False)
        with console.capture() as captured:
            console.print(render_table(make_profile()))
        lines = captured.get().splitlines()
        assert max(map(len, lines)) <= 60
        assert any("1.25x" in line for line in lines)

    def test_json_is_the_profile(self) -> None:
        profile = make_profile()
        assert json.loads(render(profile, "json")) == profile.to_dict()

    @pytest.mark.parametrize("output", sorted(FORMATS))
    @pytest.mark.parametrize("profile", [make_profile(), plain_profile(), draft_profile()])
    def test_every_format_renders_and_repeats_itself(self, output: str, profile: Profile) -> None:
        text = render(profile, output)
        assert text.endswith("\n")
        assert render(profile, output) == text

    def test_unknown_format_is_a_usage_error(self) -> None:
        with pytest.raises(UsageError, match="'pdf' is unknown; known are table, md"):
            render(make_profile(), "pdf")


class TestCurves:
    def test_reads_decisions_as_a_sweep_writes_them(self) -> None:
        profile = make_profile(decisions=sweep_decisions())
        sparsity, gamma = sparsity_curve(profile), gamma_curve(profile)
        assert sparsity.fixed == 15
        assert sparsity.chosen is not None
        assert sparsity.chosen.sparsity_ratio == 0.1
        assert gamma.chosen is not None
        assert gamma.chosen.num_speculative_tokens == 6
        assert gamma.predicted[5, 0.1] == 49.5
        assert "predicted from acceptance" in render_html(profile)

    def test_points_at_another_setting_are_left_out_and_counted(self) -> None:
        odd = point(0.07, 4, 3.0, 55.0)
        curves = {"refine": [odd, *(point(ratio, 6, 4.4, 58.0) for ratio in (0.1, 0.05))]}
        curve = refine_curve(make_profile(curves=curves))
        assert [each.sparsity_ratio for each in curve.points] == [0.05, 0.1]
        assert curve.num_left_out == 1

    def test_plain_decoding_is_a_level_and_not_a_point(self) -> None:
        measured = [point(0.1, 0, 0.0, 46.8), point(0.1, 2, 1.6, 50.0), point(0.1, 4, 3.0, 55.0)]
        curve = gamma_curve(make_profile(curves={"gamma": measured}))
        assert curve.plain is not None
        assert [each.num_speculative_tokens for each in curve.points] == [2, 4]

    def test_conditional_acceptance_multiplies_to_survival(self) -> None:
        profile = make_profile()
        assert profile.results is not None
        product = math.prod(conditional_acceptance(profile))
        assert product == pytest.approx(profile.results.survival[-1].est)


class TestCharts:
    @settings(max_examples=60, deadline=None)
    @given(
        marks=st.lists(
            st.tuples(st.floats(1e-3, 1), st.floats(0, 1e5), st.floats(0, 1e3), st.booleans()),
            min_size=1,
            max_size=12,
        ),
        is_log=st.booleans(),
        from_zero=st.booleans(),
    )
    def test_everything_lies_inside_the_plot(
        self, marks: list[tuple[float, float, float, bool]], is_log: bool, from_zero: bool
    ) -> None:
        drawn = tuple(
            Mark(x=x, y=y, low=y - half if known else None, high=y + half if known else None)
            for x, y, half, known in marks
        )
        chart = line_chart(
            key="k",
            title="t",
            description="d",
            x_axis=Axis(label="x", is_log=is_log),
            y_axis=Axis(label="y", from_zero=from_zero),
            series=[Series(name="s", marks=drawn)],
            bands=[Band(name="b", low=drawn[0].y * 0.98, high=drawn[0].y, value=drawn[0].y)],
            chosen=(drawn[0], "chosen"),
        )
        check_inside(ET.fromstring(chart.svg))

    def test_a_level_beyond_the_points_widens_the_axis(self) -> None:
        chart = line_chart(
            key="k",
            title="t",
            description="d",
            x_axis=Axis(label="x"),
            y_axis=Axis(label="y"),
            series=[Series(name="s", marks=(Mark(x=1, y=50), Mark(x=2, y=51)))],
            bands=[Band(name="plain", low=77, high=79, value=78, style="plain")],
        )
        check_inside(ET.fromstring(chart.svg))

    def test_words_stay_words(self) -> None:
        mark = Mark(x=1, y=1, low=0, high=2, label=HOSTILE)
        axis = Axis(label=HOSTILE, unit=HOSTILE)
        words = {"key": "k", "title": HOSTILE, "description": HOSTILE}
        row = Row(label=HOSTILE, value=1, low=0, high=2, style="plain")
        part = Part(name=HOSTILE, value=1, text=HOSTILE, kind="draft")
        charts = [
            line_chart(
                **words,
                x_axis=axis,
                y_axis=axis,
                series=[Series(name=HOSTILE, marks=(mark,))],
                bands=[Band(name=HOSTILE, low=0, high=1)],
                chosen=(mark, HOSTILE),
            ),
            interval_chart(**words, axis=axis, rows=[row]),
            stacked_bars(**words, bars=[Bar(label=HOSTILE, parts=(part,))]),
        ]
        for chart in charts:
            for text in (chart.svg, chart.legend):
                assert "script" not in Page(text).tags
                assert "<script" not in text

    def test_real_charts_stay_inside_their_plots(self) -> None:
        for profile in (make_profile(), make_profile(decisions=sweep_decisions())):
            charts = svgs(render_html(profile))
            assert sum(check_inside(chart) for chart in charts) > 40

    def test_a_point_lies_where_the_axis_says(self) -> None:
        chart = line_chart(
            key="k",
            title="t",
            description="d",
            x_axis=Axis(label="x", is_log=True),
            y_axis=Axis(label="y", from_zero=True),
            series=[
                Series(
                    name="s", marks=tuple(Mark(x=x, y=y) for x, y in ((1, 0), (10, 5), (100, 10)))
                )
            ],
        )
        root = ET.fromstring(chart.svg)
        dots = [e for e in root.iter("circle") if "mark" in str(e.get("class"))]
        xs = [float(str(dot.get("cx"))) for dot in dots]
        ys = [float(str(dot.get("cy"))) for dot in dots]
        # Equal factors take equal room on a logarithmic axis; half-way is half-way up.
        assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.02)
        assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.02)
        plot = next(e for e in root.iter("rect") if e.get("class") == "plot")
        assert ys[0] == pytest.approx(float(str(plot.get("y"))) + float(str(plot.get("height"))))
        assert ys[2] == pytest.approx(float(str(plot.get("y"))))

    def test_band_is_the_interval(self) -> None:
        def band(half: float) -> float:
            marks = tuple(Mark(x=x, y=5, low=5 - half, high=5 + half) for x in (1, 2))
            chart = line_chart(
                key="k",
                title="t",
                description="d",
                x_axis=Axis(label="x"),
                y_axis=Axis(label="y", from_zero=True, end=10),
                series=[Series(name="s", marks=marks)],
            )
            polygon = next(e for e in ET.fromstring(chart.svg).iter("polygon"))
            ys = [float(pair.split(",")[1]) for pair in str(polygon.get("points")).split()]
            return max(ys) - min(ys)

        assert band(2) == pytest.approx(2 * band(1), abs=0.05)

    def test_bars_share_one_scale(self) -> None:
        bars = [
            Bar(label="a", parts=(Part(name="x", value=30, text="", kind="draft"),)),
            Bar(label="b", parts=(Part(name="y", value=60, text="", kind="plain"),)),
        ]
        root = ET.fromstring(stacked_bars(key="k", title="t", description="d", bars=bars).svg)
        widths = [float(str(e.get("width"))) for e in root.iter("rect") if e.get("height") == "30"]
        assert widths[1] == pytest.approx(2 * widths[0], abs=0.05)

    def test_interval_chart_marks_the_chosen_row(self) -> None:
        rows = [
            Row(label="one", value=5, low=4, high=6, style="measured", is_chosen=True),
            Row(label="two", value=3, low=None, high=None, style="plain"),
        ]
        chart = interval_chart(key="k", title="t", description="d", axis=Axis(label="x"), rows=rows)
        root = ET.fromstring(chart.svg)
        assert len([e for e in root.iter("circle") if e.get("class") == "chosen"]) == 1
        assert len([e for e in root.iter("line") if "whisker" in str(e.get("class"))]) == 1
        check_inside(root)

    @given(
        low=st.floats(-1e6, 1e6, allow_subnormal=False),
        span=st.floats(1e-3, 1e6, allow_subnormal=False),
    )
    def test_ticks_enclose_their_range_evenly(self, low: float, span: float) -> None:
        high = low + span
        ticks = nice_ticks(low, high)
        slack = 1e-6 * max(abs(low), span)
        assert ticks[0] <= low + slack
        assert ticks[-1] >= high - slack
        assert 2 <= len(ticks) <= 8
        steps = [after - before for before, after in pairwise(ticks)]
        assert steps == pytest.approx([steps[0]] * len(steps), rel=1e-3)


class TestWording:
    @pytest.mark.parametrize(
        ("values", "text"),
        [
            ({"est": 58.5, "low": 57.33, "high": 59.67}, "58.5 [57.3, 59.7]"),
            ({"est": 3.87, "low": 3.793, "high": 3.947}, "3.87 [3.79, 3.95]"),
            ({"est": 4.1, "low": 3.895, "high": 4.305}, "4.10 [3.90, 4.30]"),
            ({"est": 12345.6, "low": 12000, "high": 12700}, "12,346 [12,000, 12,700]"),
            ({"est": 0.0, "low": 0.0, "high": 0.0}, "0 [0, 0]"),
            ({"est": 46.8123, "point_only": True}, "46.8"),
        ],
    )
    def test_an_estimate_is_as_precise_as_its_interval(
        self, values: dict[str, Any], text: str
    ) -> None:
        assert wording.estimate(Estimate.model_validate(values)) == text

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [(0.045, "45 ms"), (3.2, "3.2 s"), (720, "12 min"), (3900, "65 min"), (7500, "2 h 5 min")],
    )
    def test_a_duration_has_the_unit_that_suits_it(self, seconds: float, text: str) -> None:
        assert wording.duration(seconds) == text

    @pytest.mark.parametrize(
        ("key", "value", "text"),
        [
            ("memory_gib", 24.0, "24 GiB"),
            ("budget_s", 720, "12 min"),
            ("noise_floor_cv", 0.015, "1.5 %"),
            ("sparsity_ratio", 0.07, "7 %"),
            ("weights_sha256", "e5" * 32, "e5e5e5e5e5e5..."),
            ("content_valid", True, "yes"),
            ("tp", "*", "any"),
            ("relative_tok_s", {"est": 1.0, "low": 0.95, "high": 1.05}, "1.00x [0.95, 1.05]"),
            ("odd", {"est": "no number"}, "est no number"),
            ("seed", 1234567, "1234567"),
        ],
    )
    def test_a_fact_takes_its_unit_from_its_key(self, key: str, value: Any, text: str) -> None:
        assert wording.fact(key, value) == text

    @given(st.text())
    def test_a_line_is_one_printable_line(self, text: str) -> None:
        assert wording.line(text).isprintable()


class TestMarkdown:
    @settings(max_examples=300, deadline=None)
    @given(st.text(alphabet="ab1 \\`*_[]()<>|~#!&$-+=.:@/^\"'"))
    def test_text_is_read_back_as_it_was_written(self, text: str) -> None:
        # A line begins and ends with ink: blanks around a paragraph are nobody's text.
        words = " ".join(text.split())
        tokens = MarkdownIt("commonmark").enable("table").parse(markdown_text(words))
        assert [token.type for token in tokens if token.type != "inline"] == (
            ["paragraph_open", "paragraph_close"] if words else []
        )
        pieces = [piece for token in tokens for piece in token.children or ()]
        assert {piece.type for piece in pieces} <= {"text"}
        read = "".join(piece.content for piece in pieces)
        assert read.replace("\u200b", "") == words

    @pytest.mark.parametrize("text", ["- a", "+ a", "1. a", "# a", "> a", "| a |", "~~a~~", "==="])
    def test_no_line_starts_a_block(self, text: str) -> None:
        assert "\\" in markdown_text(text)[:3]

    def test_names_with_underscores_stay_readable(self) -> None:
        assert markdown_text("num_speculative_tokens") == "num_speculative_tokens"

    @pytest.mark.parametrize("text", ["[a](b)", "![a](b)", "[a][b]", "[a]: b", "[^1]: b"])
    def test_no_brackets_make_a_link(self, text: str) -> None:
        assert markdown_text(text) == text.replace("]", "\\]", 1)

    def test_intervals_stay_readable(self) -> None:
        assert markdown_text("58.5 [57.3, 59.7]") == "58.5 [57.3, 59.7]"

    def test_a_label_cannot_define_a_link(self) -> None:
        text = render_markdown(make_profile(host={"[plain]": "http://evil.example"}))
        assert "- [plain\\]: h" in text

    def test_a_cell_cannot_end_its_column(self) -> None:
        rows = markdown_table(("a",), [("x | y",)]).splitlines()
        assert rows[2] == "| x \\| y |"

    def test_a_command_cannot_leave_its_fence(self) -> None:
        text = markdown_code("echo ````")
        assert text.startswith("`````sh\n")
        assert text.endswith("\n`````")


def check_inside(chart: ET.Element) -> int:
    """Assert that bands, intervals, lines and marks lie in the plot; how many were looked at."""
    plot = next((e for e in chart.iter("rect") if e.get("class") == "plot"), None)
    if plot is None:
        return 0
    left, top, width, height = (float(str(plot.get(k))) for k in ("x", "y", "width", "height"))
    right, bottom = left + width, top + height
    seen = 0
    for element in chart.iter():
        kind = str(element.get("class")).split()[0]
        if kind not in ("band", "interval", "line", "mark", "whisker", "level"):
            continue
        seen += 1
        # A marker's centre is what lies inside; its edge may reach over the border.
        slack = 6.1 if kind == "mark" else 0.02
        for x, y in corners(element):
            assert left - slack <= x <= right + slack, (kind, x, left, right)
            assert top - slack <= y <= bottom + slack, (kind, y, top, bottom)
    return seen


def corners(element: ET.Element) -> list[tuple[float, float]]:
    def value(name: str) -> float:
        number = float(str(element.get(name)))
        assert math.isfinite(number)
        return number

    if element.tag == "circle":
        return [(value("cx"), value("cy"))]
    if element.tag == "rect":
        x, y = value("x"), value("y")
        return [(x, y), (x + value("width"), y + value("height"))]
    if element.tag == "line":
        return [(value("x1"), value("y1")), (value("x2"), value("y2"))]
    pairs = (pair.split(",") for pair in str(element.get("points")).split())
    return [(float(x), float(y)) for x, y in pairs]


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)
