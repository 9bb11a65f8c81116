"""What a chart shows: marks, series, axes, rows and bars, whatever draws them.

Numbers and words, nothing of profiles; `charts` draws them as SVG, `figure_files` as files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Phase = Literal["draft", "select", "verify", "other", "plain"]
Style = Literal[
    "measured", "predicted", "conditional", "plain",
    "method-0", "method-1", "method-2", "method-3",
    "method-4", "method-5", "method-6", "method-7",
]  # fmt: skip
# For things of one kind beside each other; told apart by marker, fill and dash as well.
METHOD_STYLES: Final[tuple[Style, ...]] = (
    "method-0", "method-1", "method-2", "method-3",
    "method-4", "method-5", "method-6", "method-7",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A point with its interval, and what its tooltip says."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Marks joined by a line; those with an interval get a band."""

    name: str
    marks: tuple[Mark, ...]
    style: Style = "measured"


@dataclass(frozen=True, kw_only=True)
class Band:
    """A horizontal stretch across the whole plot, with a line at `value` if there is one."""

    name: str
    low: float
    high: float
    value: float | None = None
    style: Literal["plateau", "plain"] = "plateau"


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis: its label, the text of its ticks, and its scale.

    Attributes:
        label: what it shows, with the unit.
        unit: written after each tick.
        factor: tick text is the value times this.
        is_log: logarithmic.
        from_zero: the axis starts at 0.
        end: largest value shown even where nothing reaches it.
    """

    label: str
    unit: str = ""
    factor: float = 1.0
    is_log: bool = False
    from_zero: bool = False
    end: float | None = None

    def text(self, value: float) -> str:
        """A tick's text."""
        scaled = value * self.factor
        plain = f"{scaled:,.0f}" if abs(scaled) >= 1000 else f"{scaled:.4g}"
        return f"{plain}{self.unit}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of an interval chart."""

    label: str
    value: float
    low: float | None
    high: float | None
    style: Style
    is_chosen: bool = False


@dataclass(frozen=True, kw_only=True)
class Part:
    """A segment of a stacked bar; `kind` names its colour and pattern."""

    name: str
    value: float
    text: str
    kind: Phase


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A stacked bar."""

    label: str
    parts: tuple[Part, ...]
