"""Figures as PNG and SVG files, drawn by matplotlib (extra `demo`)."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from vegas_runtime.errors import UsageError
from vegas_runtime.records import replace_file
from vegas_tune.chart_data import METHOD_STYLES, Axis, Mark, Style
from vegas_tune.method_figures import Bars, Curves, PaperFigure
from vegas_tune.report_style import PALETTES

FORMATS: Final = ("png", "svg")
_DPI: Final = 150
_SHAPES: Final = "os^D"
_LINES: Final = ("-", "--", ":", "-.")


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_figures(figures: Iterable[PaperFigure], folder: Path) -> list[Path]:
    """Draw every figure into a folder, as PNG and as SVG.

    Args:
        figures: what to draw.
        folder: where to; made when absent.

    Returns:
        The files, in order.

    Raises:
        UsageError: matplotlib is not installed.
        StorageError: a file cannot be written.
    """
    if not can_draw():
        raise UsageError(
            "drawing figures needs matplotlib, which is not installed.",
            hint="Install the extra: pip install 'vegas-tune[demo]'",
        )
    # Not pyplot: it would choose a window system and keep every figure.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    # A fixed salt and no date: the same data give the same bytes.
    with rc_context({"svg.hashsalt": "vegas-tune", "svg.fonttype": "none", "font.size": 9}):
        for each in figures:
            drawn = Figure(figsize=(5.2, 3.4), layout="constrained")
            axes = drawn.add_subplot()
            if isinstance(each, Curves):
                _draw_curves(axes, each)
            else:
                _draw_bars(axes, each)
            axes.set_title(each.title, fontsize=9)
            for kind in FORMATS:
                path = folder / f"{each.key}.{kind}"
                buffer = io.BytesIO()
                metadata = {"Date": None} if kind == "svg" else {}
                drawn.savefig(buffer, format=kind, dpi=_DPI, metadata=metadata)
                replace_file(path, buffer.getvalue())
                files.append(path)
    return files


def _draw_curves(axes: Any, curves: Curves) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    for each in curves.series:
        x, y = [mark.x for mark in each.marks], [mark.y for mark in each.marks]
        look = _look(each.style)
        axes.plot(x, y, label=each.name, markersize=4.5, linewidth=1.4, **look)
        known = [m for m in each.marks if m.low is not None and m.high is not None]
        if known:
            below, above = _reach(known)
            axes.errorbar(
                [m.x for m in known],
                [m.y for m in known],
                yerr=(below, above),
                fmt="none",
                ecolor=look["color"],
                elinewidth=0.9,
                capsize=2,
            )
    if curves.x_axis.is_log:
        axes.set_xscale("log")
    ticks = sorted({mark.x for each in curves.series for mark in each.marks})
    axes.xaxis.set_major_locator(FixedLocator(_apart(ticks, curves.x_axis)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: curves.x_axis.text(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: curves.y_axis.text(value)))
    axes.set_xlabel(curves.x_axis.label)
    axes.set_ylabel(curves.y_axis.label)
    if curves.y_axis.from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.legend(fontsize=7.5, frameon=False)


def _draw_bars(axes: Any, bars: Bars) -> None:
    from matplotlib.ticker import FuncFormatter

    for place, row in enumerate(bars.rows):
        error = None
        if row.low is not None and row.high is not None:
            error = [[row.value - row.low], [row.high - row.value]]
        axes.barh(
            place,
            row.value,
            xerr=error,
            color=_look(row.style)["color"],
            height=0.6,
            capsize=3,
            error_kw={"elinewidth": 1},
        )
    axes.set_yticks(range(len(bars.rows)), bars.names)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: bars.axis.text(value)))
    axes.set_xlabel(bars.axis.label)
    axes.grid(axis="x", alpha=0.3, linewidth=0.6)


def _reach(marks: Iterable[Mark]) -> tuple[list[float], list[float]]:
    """How far each interval reaches below and above its value."""
    below = [m.y - m.low for m in marks if m.low is not None]
    above = [m.high - m.y for m in marks if m.high is not None]
    return below, above


def _look(style: Style) -> dict[str, Any]:
    """Colour, marker and dash of a style, as the HTML report's."""
    colour = PALETTES["light"][style]
    place = METHOD_STYLES.index(style) if style in METHOD_STYLES else 0
    return {
        "color": colour,
        "marker": _SHAPES[place % len(_SHAPES)],
        "markerfacecolor": colour if place < len(_SHAPES) else "none",
        "linestyle": _LINES[place % len(_LINES)],
    }


def _apart(ticks: list[float], axis: Axis) -> list[float]:
    """Ticks whose texts do not run into each other; the smallest always among them."""
    shown: list[float] = []
    reach = (ticks[-1] / ticks[0]) ** 0.07 if axis.is_log else (ticks[-1] - ticks[0]) * 0.05
    for tick in ticks:
        if not shown or (tick > shown[-1] * reach if axis.is_log else tick - shown[-1] > reach):
            shown.append(tick)
    return shown
