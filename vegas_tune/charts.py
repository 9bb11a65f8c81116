"""Charts as inline SVG: small, themable through CSS variables, readable by a screen reader.

Every chart has a title and a description; series differ in marker and dash as well as in colour;
text is escaped here. A `Chart` carries its legend apart, as HTML, so that it wraps on a narrow
screen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from vegas_tune.chart_data import METHOD_STYLES, Axis, Band, Bar, Mark, Part, Row, Series, Style

WIDTH: Final = 480
HEIGHT: Final = 300

_SHAPES: Final = ("circle", "square", "triangle", "diamond")
_SHAPE_OF: Final[dict[Style, str]] = {
    "measured": "circle",
    "predicted": "square",
    "conditional": "triangle",
    "plain": "diamond",
    **{style: _SHAPES[place % len(_SHAPES)] for place, style in enumerate(METHOD_STYLES)},
}

# Room for tick labels at the larger font of a narrow screen, whose size is set by CSS.
_CHAR: Final = 8.5
_TOP: Final = 52
_RIGHT: Final = 14
_BOTTOM: Final = 50
_PAD: Final = 0.04
_X_TICK_GAP: Final = 14


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A drawn chart: the SVG, and its legend as HTML (empty where there is nothing to tell)."""

    svg: str
    legend: str


@dataclass(frozen=True)
class _Scale:
    """Values to pixels; `low` < `high`, both positive when logarithmic."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        share = (value - low) / (high - low)
        return round(self.start + share * (self.end - self.start), 2)


@dataclass(frozen=True)
class _Frame:
    """The plot area and its two scales."""

    x: _Scale
    y: _Scale
    left: float
    right: float
    top: float
    bottom: float


# --------------------------------------------------------------------------- line chart


def line_chart(
    *,
    key: str,
    title: str,
    description: str,
    x_axis: Axis,
    y_axis: Axis,
    series: Sequence[Series],
    bands: Sequence[Band] = (),
    chosen: tuple[Mark, str] | None = None,
) -> Chart:
    """Curves with interval bands over a numeric axis.

    Args:
        key: unique in the page; prefixes ids.
        title: one line.
        description: what the curves show, in words, for those who cannot see them.
        x_axis: the horizontal axis; ticks stand where points are.
        y_axis: the vertical axis.
        series: at least one, with at least one mark.
        bands: horizontal stretches behind the curves.
        chosen: the mark that was chosen, and what to write above it.
    """
    marks = [mark for each in series for mark in each.marks]
    ticks, frame = _frame(marks, bands, x_axis, y_axis)
    parts = [*_y_grid(frame, y_axis, ticks), *_x_ticks(frame, x_axis, marks)]
    parts += [_band(frame, band) for band in bands]
    if chosen is not None:
        parts.append(_guide(frame, *chosen))
    for each in series:
        parts += _curve(frame, each)
    if chosen is not None:
        x, y = frame.x(chosen[0].x), frame.y(chosen[0].y)
        parts.append(f'<circle class="chosen" cx="{x}" cy="{y}" r="9"/>')
    parts.append(_text(WIDTH / 2, HEIGHT - 8, x_axis.label, "axis", anchor="middle"))
    parts.append(_text(2, 16, y_axis.label, "axis"))
    names: list[tuple[str, str]] = [(each.style, each.name) for each in series]
    names += [(band.style, band.name) for band in bands]
    return Chart(svg=_svg(key, title, description, HEIGHT, parts), legend=_legend(names))


def _frame(
    marks: Sequence[Mark], bands: Sequence[Band], x_axis: Axis, y_axis: Axis
) -> tuple[list[float], _Frame]:
    """Scales that hold every mark, interval and band."""
    ys = [value for mark in marks for value in (mark.low, mark.y, mark.high) if value is not None]
    ys += [value for band in bands for value in (band.low, band.high)]
    ticks = nice_ticks(*_y_range(ys, y_axis))
    left = 14 + _CHAR * max(len(y_axis.text(tick)) for tick in ticks)
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    low, high = _x_range([mark.x for mark in marks], x_axis)
    frame = _Frame(
        x=_Scale(low, high, left, right, x_axis.is_log),
        y=_Scale(ticks[0], ticks[-1], bottom, _TOP),
        left=left,
        right=right,
        top=_TOP,
        bottom=bottom,
    )
    return ticks, frame


def _y_range(values: Sequence[float], axis: Axis) -> tuple[float, float]:
    low, high = min(values), max(values)
    if axis.end is not None:
        high = max(high, axis.end)
    if axis.from_zero:
        low = min(low, 0.0)
    if low == high:
        reach = abs(low) * 0.1 or 1.0
        low, high = low - reach, high + reach
    return low, high


def _x_range(values: Sequence[float], axis: Axis) -> tuple[float, float]:
    """The values' range with a margin on both sides, and some width around a single one."""
    low, high = min(values), max(values)
    if axis.is_log:
        margin = (high / low) ** _PAD if high > low else 1.5
        return low / margin, high * margin
    margin = (high - low) * _PAD or 1.0
    return low - margin, high + margin


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values that enclose a range, about `count` of them; `low` < `high`."""
    raw = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Rounding keeps 0.30000000000000004 out of the labels.
    return [float(f"{index * step:.12g}") for index in range(first, max(last, first + 1) + 1)]


def _y_grid(frame: _Frame, axis: Axis, ticks: Sequence[float]) -> Iterable[str]:
    width, height = frame.right - frame.left, frame.bottom - frame.top
    yield (
        f'<rect class="plot" x="{frame.left}" y="{frame.top}" width="{width}" height="{height}"/>'
    )
    for tick in ticks:
        y = frame.y(tick)
        yield f'<line class="grid" x1="{frame.left}" x2="{frame.right}" y1="{y}" y2="{y}"/>'
        yield _text(frame.left - 6, y + 5, axis.text(tick), "tick", anchor="end")


def _x_ticks(frame: _Frame, axis: Axis, marks: Sequence[Mark]) -> Iterable[str]:
    """A tick at every measured position, a text where it does not touch the one before."""
    free_from = -math.inf
    for value in sorted({mark.x for mark in marks}):
        x, text = frame.x(value), axis.text(value)
        end = frame.bottom + 5
        yield f'<line class="axis-tick" x1="{x}" x2="{x}" y1="{frame.bottom}" y2="{end}"/>'
        half = len(text) * _CHAR / 2
        if x - half < free_from:
            continue
        yield _text(x, frame.bottom + 21, text, "tick", anchor="middle")
        free_from = x + half + _X_TICK_GAP / 2


def _band(frame: _Frame, band: Band) -> str:
    top, bottom = frame.y(band.high), frame.y(band.low)
    # A band without height is still drawn: a pixel says where it is.
    height = max(round(bottom - top, 2), 1.0)
    top = min(top, frame.bottom - height)
    drawn = (
        f'<rect class="band {band.style}" x="{frame.left}" y="{top}" '
        f'width="{frame.right - frame.left}" height="{height}"/>'
    )
    if band.value is not None:
        y = frame.y(band.value)
        drawn += (
            f'<line class="level {band.style}" x1="{frame.left}" x2="{frame.right}" '
            f'y1="{y}" y2="{y}"/>'
        )
    return drawn


def _guide(frame: _Frame, mark: Mark, words: str) -> str:
    """A line down from the words that name the chosen point."""
    x = frame.x(mark.x)
    half = len(words) * _CHAR / 2
    anchor = "end" if x + half > WIDTH else "start" if x - half < 0 else "middle"
    return f'<line class="guide" x1="{x}" x2="{x}" y1="{frame.top}" y2="{frame.bottom}"/>' + _text(
        x, frame.top - 8, words, "guide-text", anchor=anchor
    )


def _curve(frame: _Frame, series: Series) -> Iterable[str]:
    marks = sorted(series.marks, key=lambda mark: mark.x)
    known = [(m, m.low, m.high) for m in marks if m.low is not None and m.high is not None]
    if len(known) > 1:
        lower = [f"{frame.x(mark.x)},{frame.y(low)}" for mark, low, _ in known]
        upper = [f"{frame.x(mark.x)},{frame.y(high)}" for mark, _, high in known]
        corners = " ".join([*upper, *lower[::-1]])
        yield f'<polygon class="interval {series.style}" points="{corners}"/>'
    if len(marks) > 1:
        path = " ".join(f"{frame.x(mark.x)},{frame.y(mark.y)}" for mark in marks)
        yield f'<polyline class="line {series.style}" points="{path}"/>'
    for mark in marks:
        yield _point(frame.x(mark.x), frame.y(mark.y), series.style, mark, frame)


def _point(x: float, y: float, style: Style, mark: Mark, frame: _Frame) -> str:
    whisker = ""
    if mark.low is not None and mark.high is not None:
        whisker = (
            f'<line class="whisker {style}" x1="{x}" x2="{x}" '
            f'y1="{frame.y(mark.low)}" y2="{frame.y(mark.high)}"/>'
        )
    return f"<g><title>{escape(mark.label)}</title>{whisker}{_marker(x, y, style)}</g>"


def _marker(x: float, y: float, style: Style) -> str:
    """Circle, square, triangle or diamond: the shape tells the series without colour."""
    shape = _SHAPE_OF[style]
    if shape == "circle":
        return f'<circle class="mark {style}" cx="{x}" cy="{y}" r="4.5"/>'
    if shape == "square":
        return (
            f'<rect class="mark {style}" x="{round(x - 4, 2)}" y="{round(y - 4, 2)}" '
            'width="8" height="8"/>'
        )
    corners = ((0, -6), (5.5, 4), (-5.5, 4)) if shape == "triangle" else (
        (0, -6), (6, 0), (0, 6), (-6, 0)
    )  # fmt: skip
    points = " ".join(f"{round(x + dx, 2)},{round(y + dy, 2)}" for dx, dy in corners)
    return f'<polygon class="mark {style}" points="{points}"/>'


# --------------------------------------------------------------------------- rows and bars


def interval_chart(
    *, key: str, title: str, description: str, axis: Axis, rows: Sequence[Row]
) -> Chart:
    """Values with their intervals, one under the other, each under its own words."""
    values = [
        value for row in rows for value in (row.low, row.value, row.high) if value is not None
    ]
    ticks = nice_ticks(*_y_range(values, axis))
    top, pitch, left, right = 12, 48, 22, WIDTH - 22
    bottom = top + pitch * len(rows)
    scale = _Scale(ticks[0], ticks[-1], left, right)
    height = bottom + 50
    parts = [
        f'<rect class="plot" x="{left}" y="{top}" width="{right - left}" height="{bottom - top}"/>'
    ]
    for tick in ticks:
        x = scale(tick)
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 19, axis.text(tick), "tick", anchor="middle"))
    for index, row in enumerate(rows):
        words, y = top + pitch * index + 17, top + pitch * index + 33
        x = scale(row.value)
        whisker = ""
        if row.low is not None and row.high is not None:
            whisker = (
                f'<line class="whisker {row.style}" x1="{scale(row.low)}" '
                f'x2="{scale(row.high)}" y1="{y}" y2="{y}"/>'
            )
        ring = f'<circle class="chosen" cx="{x}" cy="{y}" r="9"/>' if row.is_chosen else ""
        parts.append(_text(left + 6, words, row.label, "row-text"))
        marker = _marker(x, y, row.style)
        parts.append(f"<g><title>{escape(row.label)}</title>{whisker}{marker}{ring}</g>")
    parts.append(_text(WIDTH / 2, height - 8, axis.label, "axis", anchor="middle"))
    return Chart(svg=_svg(key, title, description, height, parts), legend="")


def stacked_bars(*, key: str, title: str, description: str, bars: Sequence[Bar]) -> Chart:
    """Horizontal bars on one scale that starts at 0, each made of parts."""
    longest = max(sum(part.value for part in bar.parts) for bar in bars)
    pitch = 66
    parts = [_hatch(key)]
    for index, bar in enumerate(bars):
        top = 6 + pitch * index
        parts.append(_text(2, top + 15, bar.label, "row-text"))
        x = 2.0
        for part in bar.parts:
            width = round(part.value / longest * (WIDTH - 4), 2)
            parts.append(_segment(key, x, top + 24, width, part))
            x = round(x + width, 2)
    names = {part.name: part for bar in bars for part in bar.parts}
    legend = [(f"part {part.kind}", f"{part.name} {part.text}") for part in names.values()]
    height = 6 + pitch * len(bars)
    return Chart(svg=_svg(key, title, description, height, parts), legend=_legend(legend))


def _hatch(key: str) -> str:
    return (
        f'<defs><pattern id="{escape(key)}-hatch" width="7" height="7" '
        'patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect class="part select" width="7" height="7"/>'
        '<line class="hatch" x1="0" x2="0" y1="0" y2="7"/></pattern></defs>'
    )


def _segment(key: str, x: float, y: float, width: float, part: Part) -> str:
    fill = f' fill="url(#{escape(key)}-hatch)"' if part.kind == "select" else ""
    kind = "part hatched" if part.kind == "select" else f"part {part.kind}"
    drawn = f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="30"{fill}/>'
    # Only where the name surely fits; the legend names every part.
    if part.kind != "select" and len(part.name) * _CHAR + 12 <= width:
        drawn += _text(x + width / 2, y + 20, part.name, f"part-text {part.kind}", anchor="middle")
    return f"<g><title>{escape(f'{part.name} {part.text}')}</title>{drawn}</g>"


# --------------------------------------------------------------------------- pieces


def _svg(key: str, title: str, description: str, height: float, parts: Iterable[str]) -> str:
    name = escape(key)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-desc">{escape(description)}</desc>{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, words: str, kind: str, *, anchor: str = "start") -> str:
    return (
        f'<text class="{kind}" x="{round(x, 2)}" y="{round(y, 2)}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )


def _legend(names: Sequence[tuple[str, str]]) -> str:
    """Names beside the marks they belong to, in the order drawn."""
    items = "".join(
        f'<li><svg class="swatch" viewBox="0 0 28 16" aria-hidden="true">{_swatch(style)}</svg>'
        f"{escape(name)}</li>"
        for style, name in names
    )
    return f'<ul class="legend">{items}</ul>' if items else ""


def _swatch(style: str) -> str:
    if style == "plateau":
        return '<rect class="band plateau" x="1" y="3" width="26" height="10"/>'
    if style == "plain":
        return (
            '<rect class="band plain" x="1" y="3" width="26" height="10"/>'
            '<line class="level plain" x1="1" x2="27" y1="8" y2="8"/>'
        )
    if style.startswith("part "):
        hatch = '<path class="hatch" d="M6 15L20 1M13 15L22 6M6 8L13 1"/>'
        return (
            f'<rect class="{style}" x="6" y="1" width="16" height="14"/>'
            f"{hatch if style == 'part select' else ''}"
        )
    kind: Style = next((each for each in _SHAPE_OF if each == style), "measured")
    return f'<line class="line {kind}" x1="1" x2="27" y1="8" y2="8"/>{_marker(14, 8, kind)}'
