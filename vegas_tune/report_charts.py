"""The charts of a report: a profile's curves and results as `charts` draws them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from vegas_runtime.profile import Estimate, Point, Profile
from vegas_tune.chart_data import Axis, Band, Bar, Mark, Part, Phase, Row, Series
from vegas_tune.charts import Chart, interval_chart, line_chart, stacked_bars
from vegas_tune.curves import (
    Curve,
    conditional_acceptance,
    gamma_curve,
    refine_curve,
    sparsity_curve,
)
from vegas_tune.headline import iteration_budget
from vegas_tune.wording import estimate, number, percent, point

_RATIO_AXIS: Final = Axis(
    label="fraction of the KV cache kept (log scale)", unit=" %", factor=100, is_log=True
)
_GAMMA_AXIS: Final = Axis(label="tokens drafted per iteration (gamma)")
_RATE_AXIS: Final = Axis(label="decode throughput, tok/s")


def report_charts(profile: Profile) -> dict[str, Chart]:
    """The charts a profile has figures for, by the key of their section."""
    makers: dict[str, Callable[[Profile], Chart | None]] = {
        "sparsity": _sparsity_chart,
        "gamma": _gamma_chart,
        "refine": _refine_chart,
        "acceptance": _acceptance_chart,
        "phases": _phases_chart,
        "validation": _validation_chart,
    }
    charts = {key: make(profile) for key, make in makers.items()}
    return {key: chart for key, chart in charts.items() if chart is not None}


def _sparsity_chart(profile: Profile) -> Chart | None:
    curve = sparsity_curve(profile)
    if not curve.points:
        return None
    marks = tuple(
        _mark(each.sparsity_ratio, each.accepted_per_iteration, percent(each.sparsity_ratio))
        for each in curve.points
    )
    tolerance = curve.decision.data.get("tolerance") if curve.decision else None
    bands: list[Band] = []
    if isinstance(tolerance, float) and 0 < tolerance < 1:
        top = marks[-1].y
        name = f"within {percent(tolerance)} of the largest ratio (plateau)"
        bands.append(Band(name=name, low=top * (1 - tolerance), high=top))
    return line_chart(
        key="sparsity",
        title="Accepted drafts per iteration against the fraction of KV kept",
        description=_described(marks),
        x_axis=_RATIO_AXIS,
        y_axis=Axis(label="accepted drafts per iteration", from_zero=True),
        series=[Series(name=f"measured at gamma {number(curve.fixed or 0)}", marks=marks)],
        bands=bands,
        chosen=_chosen(curve, marks, lambda each: percent(each.sparsity_ratio)),
    )


def _gamma_chart(profile: Profile) -> Chart | None:
    curve = gamma_curve(profile)
    if not curve.points:
        return None
    marks = tuple(
        _mark(
            each.num_speculative_tokens, each.decode_tok_s, f"gamma {each.num_speculative_tokens}"
        )
        for each in curve.points
    )
    predicted = tuple(
        Mark(x=gamma, y=rate, label=f"gamma {gamma}: {number(rate)} tok/s predicted")
        for (gamma, ratio), rate in sorted(curve.predicted.items())
        if gamma and ratio == curve.fixed
    )
    series = [Series(name=f"measured at {percent(curve.fixed or 0)} of KV", marks=marks)]
    if predicted:
        name = "predicted from acceptance and phase times"
        series.insert(0, Series(name=name, marks=predicted, style="predicted"))
    return line_chart(
        key="gamma",
        title="Decode throughput against tokens drafted per iteration",
        description=_described(marks),
        x_axis=_GAMMA_AXIS,
        y_axis=_RATE_AXIS,
        series=series,
        bands=_plain_band(curve),
        chosen=_chosen(curve, marks, lambda each: f"gamma {each.num_speculative_tokens}"),
    )


def _refine_chart(profile: Profile) -> Chart | None:
    curve = refine_curve(profile)
    if not curve.points:
        return None
    marks = tuple(
        _mark(each.sparsity_ratio, each.decode_tok_s, percent(each.sparsity_ratio))
        for each in curve.points
    )
    return line_chart(
        key="refine",
        title="Decode throughput against the fraction of KV kept",
        description=_described(marks),
        x_axis=_RATIO_AXIS,
        y_axis=_RATE_AXIS,
        series=[Series(name=f"measured at gamma {number(curve.fixed or 0)}", marks=marks)],
        bands=_plain_band(curve),
        chosen=_chosen(curve, marks, lambda each: percent(each.sparsity_ratio)),
    )


def _acceptance_chart(profile: Profile) -> Chart | None:
    results = profile.results
    if results is None or not results.survival:
        return None
    survival = tuple(
        _mark(position, value, f"drafts 1 to {position} accepted")
        for position, value in enumerate(results.survival, start=1)
    )
    alone = tuple(
        Mark(x=position, y=value, label=f"draft {position} accepted when reached: {value:.3f}")
        for position, value in enumerate(conditional_acceptance(profile), start=1)
        if value == value  # NaN where no iteration got that far
    )
    series = [Series(name="all drafts up to here accepted", marks=survival)]
    if alone:
        name = "this draft accepted, when reached"
        series.append(Series(name=name, marks=alone, style="conditional"))
    return line_chart(
        key="acceptance",
        title="Probability of acceptance by draft position",
        description=_described(survival),
        x_axis=Axis(label="position of the draft in its iteration"),
        y_axis=Axis(label="probability", from_zero=True, end=1.0),
        series=series,
    )


def _phases_chart(profile: Profile) -> Chart | None:
    phases = profile.results.phase_ms if profile.results else None
    if phases is None:
        return None
    values: dict[Phase, Estimate] = {
        "draft": phases.draft,
        "select": phases.select,
        "verify": phases.verify,
        "other": phases.other,
    }
    total = sum(max(value.est, 0.0) for value in values.values())
    if total <= 0:
        return None
    parts = tuple(
        Part(name=name, value=value.est, text=estimate(value, "ms"), kind=name)
        for name, value in values.items()
        if value.est > 0
    )
    budget = iteration_budget(profile)
    tokens = f", {number(budget.tokens)} tokens per request" if budget else ""
    drafts = profile.selected.default.num_speculative_tokens > 0
    step = "one iteration" if drafts else "one step of plain decoding"
    bars = [Bar(label=f"{step}: {number(total)} ms{tokens}", parts=parts)]
    if budget is not None:
        text = f"{number(budget.plain_ms)} ms"
        plain = Part(name="plain decoding", value=budget.plain_ms, text=text, kind="plain")
        bars.append(Bar(label=f"plain decoding, as many tokens: {text}", parts=(plain,)))
    return stacked_bars(
        key="phases",
        title="Time of one iteration by phase, against plain decoding of as many tokens",
        description="; ".join(f"{part.name} {part.text}" for bar in bars for part in bar.parts),
        bars=bars,
    )


def _validation_chart(profile: Profile) -> Chart | None:
    rows = [
        _row(each, each.decode_tok_s, is_chosen=_is_selected(profile, each))
        for each in profile.curves.validation
        if each.decode_tok_s is not None and each.status == "ok"
    ]
    if not rows:
        return None
    return interval_chart(
        key="validation",
        title="Decode throughput of the finalists and of plain decoding",
        description="; ".join(row.label for row in rows),
        axis=_RATE_AXIS,
        rows=rows,
    )


def _row(measured: Point, rate: Estimate, *, is_chosen: bool) -> Row:
    words = point(measured.num_speculative_tokens, measured.sparsity_ratio)
    return Row(
        label=f"{words}{' (selected)' if is_chosen else ''}: {estimate(rate)}",
        value=rate.est,
        low=rate.low,
        high=rate.high,
        style="measured" if measured.num_speculative_tokens else "plain",
        is_chosen=is_chosen,
    )


def _is_selected(profile: Profile, measured: Point) -> bool:
    chosen = profile.selected.default
    if chosen.num_speculative_tokens != measured.num_speculative_tokens:
        return False
    return not chosen.num_speculative_tokens or chosen.sparsity_ratio == measured.sparsity_ratio


def _mark(x: float, value: Estimate | None, words: str) -> Mark:
    assert value is not None
    return Mark(
        x=x, y=value.est, low=value.low, high=value.high, label=f"{words}: {estimate(value)}"
    )


def _plain_band(curve: Curve) -> list[Band]:
    plain = curve.plain.decode_tok_s if curve.plain else None
    if plain is None:
        return []
    low = plain.est if plain.low is None else plain.low
    high = plain.est if plain.high is None else plain.high
    name = f"plain decoding, {estimate(plain)}"
    return [Band(name=name, low=low, high=high, value=plain.est, style="plain")]


def _chosen(
    curve: Curve, marks: tuple[Mark, ...], words: Callable[[Point], str]
) -> tuple[Mark, str] | None:
    if curve.chosen is None:
        return None
    return marks[curve.points.index(curve.chosen)], f"chosen: {words(curve.chosen)}"


def _described(marks: tuple[Mark, ...]) -> str:
    return "; ".join(mark.label for mark in marks)
