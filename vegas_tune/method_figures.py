"""What the figures of a comparison show: the paper's Figures 2, 4, 8, 9, 10 and 13 from own data.

Data only; `charts` draws it for the HTML report, `figure_files` as PNG and SVG.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vegas_runtime.config import SpeculationConfig
from vegas_tune.bench import counts_by_request
from vegas_tune.chart_data import METHOD_STYLES, Axis, Mark, Row, Series, Style
from vegas_tune.decide import plain_values
from vegas_tune.measure import Estimate, accepted, position_acceptance
from vegas_tune.method_rounds import SideBySide
from vegas_tune.method_table import MethodRow, figure, share
from vegas_tune.methods import slug
from vegas_tune.outcomes import Measured
from vegas_tune.plan import SPARSITY
from vegas_tune.sweep import Search
from vegas_tune.wording import estimate, number, percent

_GAMMA_AXIS: Final = Axis(label="tokens drafted per iteration (gamma)")
_RATIO_AXIS: Final = Axis(
    label="fraction of the KV cache kept (log scale)", unit=" %", factor=100, is_log=True
)
_TOKENS: Final = "tokens per iteration"


@dataclass(frozen=True, kw_only=True)
class Curves:
    """A figure of curves over a numeric axis.

    Attributes:
        key: unique among the figures; fit for a file name.
        title: one line.
        paper: which figure of the paper shows the same.
        x_axis: the horizontal axis.
        y_axis: the vertical axis.
        series: one per curve.
    """

    key: str
    title: str
    paper: str
    x_axis: Axis
    y_axis: Axis
    series: tuple[Series, ...]


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A figure of one value with its interval per method.

    Attributes:
        key: unique among the figures; fit for a file name.
        title: one line.
        paper: which figure of the paper shows the same.
        axis: of the values.
        names: of the methods.
        rows: one per method.
    """

    key: str
    title: str
    paper: str
    axis: Axis
    names: tuple[str, ...]
    rows: tuple[Row, ...]


PaperFigure = Curves | Bars


def figure_to_dict(drawn: PaperFigure) -> dict[str, Any]:
    """A figure's data as plain JSON values."""
    if isinstance(drawn, Bars):
        content: dict[str, Any] = {
            "axis": drawn.axis.label,
            "values": [
                {"method": name, "value": row.value, "low": row.low, "high": row.high}
                for name, row in zip(drawn.names, drawn.rows, strict=True)
            ],
        }
    else:
        content = {
            "x_axis": drawn.x_axis.label,
            "y_axis": drawn.y_axis.label,
            "series": [
                {
                    "name": each.name,
                    "points": [
                        {"x": m.x, "y": m.y, "low": m.low, "high": m.high} for m in each.marks
                    ],
                }
                for each in drawn.series
            ],
        }
    shown = {"key": drawn.key, "title": drawn.title, "paper": drawn.paper, **content}
    values: dict[str, Any] = plain_values(shown)
    return values


def paper_figures(
    rows: Sequence[MethodRow], searches: Mapping[str, Search], measured: SideBySide
) -> tuple[PaperFigure, ...]:
    """Every figure there are data for, in the paper's order.

    Args:
        rows: of the table.
        searches: what tuning measured, by method.
        measured: what was measured after it.
    """
    styles: dict[str, Style] = {
        name: METHOD_STYLES[place % len(METHOD_STYLES)] for place, name in enumerate(searches)
    }
    candidates: list[PaperFigure | None] = [
        _accuracy_by_gamma(searches, styles),
        _acceptance_by_position(searches, styles),
        _accepted_by_ratio(searches, styles),
        _throughput(rows, styles),
        _accuracy_at_one_gamma(rows, measured, styles),
        _overhead(rows, styles),
        *(_swept(name, search) for name, search in searches.items()),
    ]
    return tuple(each for each in candidates if each is not None)


def _accuracy_by_gamma(
    searches: Mapping[str, Search], styles: Mapping[str, Style]
) -> Curves | None:
    series = []
    for name, search in searches.items():
        passes = _by_config(search)
        ratio = _busiest_ratio(passes, search.chosen)
        marks = [
            _mark(config.num_speculative_tokens, tokens, f"{name}, gamma")
            for config, own in passes.items()
            if config.sparsity_ratio == ratio and (tokens := _tokens(own)) is not None
        ]
        if marks:
            shown = f"{name} ({percent(ratio)} of KV)"
            series.append(Series(name=shown, marks=_ascending(marks), style=styles[name]))
    if not series:
        return None
    return Curves(
        key="figure-2",
        title="Tokens per iteration against tokens drafted",
        paper="Figure 2",
        x_axis=_GAMMA_AXIS,
        y_axis=Axis(label=_TOKENS, from_zero=True),
        series=tuple(series),
    )


def _acceptance_by_position(
    searches: Mapping[str, Search], styles: Mapping[str, Style]
) -> Curves | None:
    """Step 1's passes at the largest gamma, at each method's ratio: all drafted equally far."""
    series = []
    for name, search in searches.items():
        passes = _by_config(search, SPARSITY)
        if not passes or search.chosen is None:
            continue
        config = _nearest(passes, search.chosen)
        values = position_acceptance([(m.point.block, m.run) for m in passes[config]])
        marks = [_mark(i, each, f"{name}, draft") for i, each in enumerate(values, start=1)]
        if marks:
            shown = f"{name} ({percent(config.sparsity_ratio)} of KV)"
            series.append(Series(name=shown, marks=tuple(marks), style=styles[name]))
    if not series:
        return None
    return Curves(
        key="figure-4",
        title="Chance that a draft is accepted once those before it were",
        paper="Figure 4",
        x_axis=Axis(label="position of the draft"),
        y_axis=Axis(label="acceptance"),
        series=tuple(series),
    )


def _accepted_by_ratio(
    searches: Mapping[str, Search], styles: Mapping[str, Style]
) -> Curves | None:
    series, gammas = [], set()
    for name, search in searches.items():
        marks = []
        for config, own in _by_config(search, SPARSITY).items():
            tokens = _tokens(own)
            if tokens is not None:
                gammas.add(config.num_speculative_tokens)
                marks.append(_mark(config.sparsity_ratio, tokens.shifted(-1.0), f"{name}, kept"))
        if marks:
            series.append(Series(name=name, marks=_ascending(marks), style=styles[name]))
    if not series:
        return None
    at = " or ".join(map(str, sorted(gammas)))
    return Curves(
        key="figure-8",
        title=f"Accepted drafts against the fraction of KV kept, gamma {at}",
        paper="Figure 8",
        x_axis=_RATIO_AXIS,
        y_axis=Axis(label="accepted drafts per iteration", from_zero=True),
        series=tuple(series),
    )


def _throughput(rows: Sequence[MethodRow], styles: Mapping[str, Style]) -> Bars | None:
    return _bars(
        rows,
        styles,
        key="figure-9",
        title="Decode throughput, every method at its best setting",
        paper="Figure 9",
        axis=Axis(label="decode throughput, tok/s", from_zero=True),
        values={row.name: row.decode_tok_s for row in rows},
        unit="tok/s",
    )


def _accuracy_at_one_gamma(
    rows: Sequence[MethodRow], measured: SideBySide, styles: Mapping[str, Style]
) -> Bars | None:
    return _bars(
        rows,
        styles,
        key="figure-10a",
        title=f"Tokens per iteration, every method at gamma {measured.gamma} and its own ratio",
        paper="Figure 10a",
        axis=Axis(label=_TOKENS, from_zero=True),
        values={row.name: row.tokens_at_one_gamma for row in rows},
        unit="",
    )


def _overhead(rows: Sequence[MethodRow], styles: Mapping[str, Style]) -> Bars | None:
    return _bars(
        rows,
        styles,
        key="figure-10b",
        title="Share of an iteration spent on selecting KV entries",
        paper="Figure 10b",
        axis=Axis(label="selection overhead", unit=" %", factor=100, from_zero=True),
        values={row.name: row.selection_overhead for row in rows},
        unit="%",
    )


def _swept(name: str, search: Search) -> Curves | None:
    """Every setting that tuning measured: one curve per gamma."""
    by_gamma: dict[int, list[Mark]] = {}
    for config, own in _by_config(search).items():
        rates = [one.figures.decode_tok_s for one in own]
        # Passes of one setting ran at different times, so their own intervals say too little.
        mean = sum(rate.est for rate in rates) / len(rates)
        gamma = config.num_speculative_tokens
        words = f"gamma {gamma}, {percent(config.sparsity_ratio)}: {number(mean)} tok/s"
        mark = Mark(x=config.sparsity_ratio, y=mean, label=words)
        by_gamma.setdefault(gamma, []).append(mark)
    if not by_gamma:
        return None
    return Curves(
        key=f"figure-13-{slug(name)}",
        title=f"{name}: decode throughput of every setting tried",
        paper="Figure 13",
        x_axis=_RATIO_AXIS,
        y_axis=Axis(label="decode throughput, tok/s"),
        series=tuple(
            Series(
                name=f"gamma {gamma}",
                marks=_ascending(marks),
                style=METHOD_STYLES[place % len(METHOD_STYLES)],
            )
            for place, (gamma, marks) in enumerate(sorted(by_gamma.items()))
        ),
    )


# --------------------------------------------------------------------------- pieces


def _by_config(search: Search, *steps: str) -> dict[SpeculationConfig, list[Measured]]:
    """What tuning measured of each setting that drafts."""
    found: dict[SpeculationConfig, list[Measured]] = {}
    for measured in search.measured(*steps):
        if measured.point.config.num_speculative_tokens:
            found.setdefault(measured.point.config, []).append(measured)
    return found


def _busiest_ratio(
    passes: Mapping[SpeculationConfig, object], chosen: SpeculationConfig | None
) -> float:
    """The ratio that most gammas were tried at; the chosen one among equals."""
    ratios = [config.sparsity_ratio for config in passes]
    own = chosen.sparsity_ratio if chosen is not None else 0.0
    return max(ratios, key=lambda ratio: (ratios.count(ratio), ratio == own), default=own)


def _nearest(passes: Iterable[SpeculationConfig], chosen: SpeculationConfig) -> SpeculationConfig:
    """The chosen ratio at the largest gamma, or what is nearest to it."""

    def distance(config: SpeculationConfig) -> tuple[int, float]:
        off = abs(config.sparsity_ratio - chosen.sparsity_ratio)
        return -config.num_speculative_tokens, off

    return min(passes, key=distance)


def _tokens(passes: Sequence[Measured]) -> Estimate | None:
    counts = [one for one in counts_by_request(passes) if one]
    return accepted(counts).shifted(1.0) if counts else None


def _mark(x: float, value: Estimate, words: str) -> Mark:
    return Mark(
        x=x,
        y=value.est,
        low=value.low,
        high=value.high,
        label=f"{words} {number(x)}: {estimate(figure(value))}",
    )


def _ascending(marks: Iterable[Mark]) -> tuple[Mark, ...]:
    return tuple(sorted(marks, key=lambda mark: mark.x))


def _bars(
    rows: Sequence[MethodRow],
    styles: Mapping[str, Style],
    *,
    key: str,
    title: str,
    paper: str,
    axis: Axis,
    values: Mapping[str, Estimate | None],
    unit: str,
) -> Bars | None:
    drawn, names = [], []
    for row in rows:
        value = values[row.name]
        if value is None:
            continue
        names.append(row.name)
        words = share(value) if unit == "%" else estimate(figure(value), unit)
        drawn.append(
            Row(
                label=f"{row.name}: {words}",
                value=value.est,
                low=value.low,
                high=value.high,
                style=styles.get(row.name, "plain"),
            )
        )
    if not drawn:
        return None
    return Bars(key=key, title=title, paper=paper, axis=axis, names=tuple(names), rows=tuple(drawn))
