"""The table of a comparison: measurements in, one row per method out. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.profile import Estimate as Figure
from vegas_tune.bench import counts_by_request
from vegas_tune.measure import (
    Estimate,
    accepted,
    mean_ratio,
    position_acceptance,
    unpaired_ratio,
)
from vegas_tune.method_rounds import OverheadSource, SideBySide
from vegas_tune.methods import PLAIN, STOCK
from vegas_tune.outcomes import Measured
from vegas_tune.report_blocks import Table
from vegas_tune.steady import Unsteady, steady_steps
from vegas_tune.wording import estimate, setting, times

if TYPE_CHECKING:
    from vegas_tune.stock import StockArm
    from vegas_tune.stock_methods import OwnResult

NOT_MEASURED: Final = "not measured"
_DRAFT_NOTHING: Final = (PLAIN, STOCK)


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """One method at its own best setting. A figure is None where it was not measured.

    Attributes:
        name: of the method; `plain` is plain decoding.
        config: its setting; None when tuning found none.
        note: why figures are missing; empty when none is.
        tokens_per_iteration: tokens emitted per verification, bonus token included.
        position_acceptance: P(draft i accepted, once those before it were).
        selection_overhead: share of an iteration spent on selecting KV entries.
        overhead_from: how that was told; empty without it.
        decode_tok_s: decode throughput, tokens per second, over the rounds.
        is_interleaved: whether it took part in the rounds; vLLM's own methods are engines of their
            own and do not, so that nothing of theirs is paired.
        vs_plain: throughput over plain decoding's, paired by round.
        vs_best_other: throughput over that of the best other method, paired by round where both
            took part in the rounds.
        best_other: that method's name; empty without another.
        is_best_other_paired: whether they did.
        vs_stock: throughput over that of the engine without the plugin, which cannot be
            interleaved and is therefore not paired; None on an engine without such an arm.
        tokens_at_one_gamma: tokens per iteration at the gamma that all methods share.
    """

    name: str
    config: SpeculationConfig | None
    note: str = ""
    tokens_per_iteration: Estimate | None = None
    position_acceptance: tuple[Estimate, ...] = ()
    selection_overhead: Estimate | None = None
    overhead_from: OverheadSource = ""
    decode_tok_s: Estimate | None = None
    is_interleaved: bool = True
    vs_plain: Estimate | None = None
    vs_best_other: Estimate | None = None
    best_other: str = ""
    is_best_other_paired: bool = True
    vs_stock: Estimate | None = None
    tokens_at_one_gamma: Estimate | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values: dict[str, Any] = dict(vars(self))
        values["config"] = self.config.to_dict() if self.config is not None else None
        values["position_acceptance"] = [each.to_dict() for each in self.position_acceptance]
        return {
            key: value.to_dict() if isinstance(value, Estimate) else value
            for key, value in values.items()
        }


def method_rows(
    settings: Mapping[str, SpeculationConfig | None],
    plain: SpeculationConfig,
    measured: SideBySide,
    *,
    why_no_overhead: str = "",
    from_phases: bool = False,
) -> tuple[MethodRow, ...]:
    """One row per method, fastest first, plain decoding last; untuned methods after those.

    Args:
        settings: each method's best setting; None where tuning found none.
        plain: the gamma 0 setting.
        measured: what was measured of those that have one.
        why_no_overhead: why the cost of selecting is not among it; empty when it is.
        from_phases: take that cost from phase times where it was not measured by pairs.
    """
    logs = {
        name: [math.log(found[name].figures.decode_tok_s.est) for found in measured.rounds]
        for name in [*(name for name, config in settings.items() if config is not None), PLAIN]
    }
    known = len(measured.rounds) > 1
    drafting = [name for name in logs if name != PLAIN]
    if known:
        drafting.sort(key=lambda name: -sum(logs[name]))
    rows = [
        _row(name, settings[name], logs, drafting, measured, why_no_overhead, from_phases)
        for name in drafting
    ]
    rows.append(
        MethodRow(
            name=PLAIN,
            config=plain,
            note="" if known else _too_few(measured),
            tokens_per_iteration=Estimate(est=1.0, low=1.0, high=1.0, n=1),
            decode_tok_s=mean_ratio(logs[PLAIN]) if known else None,
        )
    )
    rows += [
        MethodRow(name=name, config=None, note="no setting that drafts could be measured")
        for name, config in settings.items()
        if config is None
    ]
    return tuple(rows)


def _row(
    name: str,
    config: SpeculationConfig | None,
    logs: Mapping[str, Sequence[float]],
    fastest_first: Sequence[str],
    measured: SideBySide,
    why_no_overhead: str,
    from_phases: bool,
) -> MethodRow:
    known = len(measured.rounds) > 1
    passes = [found[name] for found in measured.rounds]
    other = next((each for each in fastest_first if each != name), "")
    overhead = selection_overhead(measured.overhead.get(name, ()))
    source = measured.overhead_from
    if overhead is None and from_phases:
        overhead, source = phase_share(passes), "phases"
    notes = [] if known else [_too_few(measured)]
    if overhead is None:
        notes.append(why_no_overhead or "the cost of selecting was not measured")
    return MethodRow(
        name=name,
        config=config,
        note="; ".join(notes),
        tokens_per_iteration=tokens_per_iteration(passes),
        position_acceptance=position_acceptance([(m.point.block, m.run) for m in passes]),
        selection_overhead=overhead,
        overhead_from=source if overhead is not None else "",
        decode_tok_s=mean_ratio(logs[name]) if known else None,
        vs_plain=_over(logs, name, PLAIN) if known else None,
        vs_best_other=_over(logs, name, other) if known and other else None,
        best_other=other if known else "",
        tokens_at_one_gamma=tokens_per_iteration(measured.same_gamma.get(name, ())),
    )


def with_stock(
    rows: Sequence[MethodRow], measured: SideBySide, stock: StockArm
) -> tuple[MethodRow, ...]:
    """The rows against the engine without the plugin, and a row for it, before plain decoding's."""
    compared = [
        replace(row, vs_stock=stock.speedup([found[row.name] for found in measured.rounds]))
        if row.decode_tok_s is not None
        else row
        for row in rows
    ]
    logs = [math.log(one.figures.decode_tok_s.est) for one in stock.passes]
    own = MethodRow(
        name=STOCK,
        config=None,
        note="measured before and after the others, not between them",
        tokens_per_iteration=Estimate(est=1.0, low=1.0, high=1.0, n=1),
        decode_tok_s=mean_ratio(logs) if len(logs) > 1 else None,
    )
    place = next(place for place, row in enumerate(compared) if row.name == PLAIN)
    return (*compared[:place], own, *compared[place:])


def with_own(
    rows: Sequence[MethodRow],
    own: Sequence[OwnResult],
    measured: SideBySide,
    stock: StockArm | None,
) -> tuple[MethodRow, ...]:
    """The rows and those of vLLM's own methods, fastest first; what has no figure comes last.

    Args:
        rows: as `method_rows` makes them, those of `with_stock` included.
        own: vLLM's methods, measured or not.
        measured: what the rows rest on.
        stock: the engine without the plugin, which the others are compared with.
    """
    rates = {
        row.name: [found[row.name].figures.decode_tok_s.est for found in measured.rounds]
        for row in rows
        if row.decode_tok_s is not None and row.name not in _DRAFT_NOTHING
    }
    rates |= {
        one.method.name: [m.figures.decode_tok_s.est for m in one.passes]
        for one in own
        if one.is_measured
    }
    ranked = sorted(rates, key=lambda name: -_mean_log(rates[name]))
    known = {row.name: row for row in [*rows, *(_own_row(one, stock) for one in own)]}
    drafting = [_against_other(known[name], known, rates, ranked) for name in ranked]
    return (*drafting, *(row for name, row in known.items() if name not in rates))


def _own_row(result: OwnResult, stock: StockArm | None) -> MethodRow:
    if not result.is_measured:
        return MethodRow(
            name=result.method.name, config=None, note=result.reason, is_interleaved=False
        )
    logs = [math.log(one.figures.decode_tok_s.est) for one in result.passes]
    return MethodRow(
        name=result.method.name,
        config=result.chosen,
        note=result.reason,
        tokens_per_iteration=tokens_per_iteration(result.passes),
        position_acceptance=position_acceptance(
            [(one.point.block, one.run) for one in result.passes]
        ),
        decode_tok_s=mean_ratio(logs),
        is_interleaved=False,
        vs_stock=stock.speedup(result.passes) if stock is not None else None,
    )


def _against_other(
    row: MethodRow,
    known: Mapping[str, MethodRow],
    rates: Mapping[str, Sequence[float]],
    ranked: Sequence[str],
) -> MethodRow:
    """The row against the fastest other one, which may be an engine of its own."""
    other = next((name for name in ranked if name != row.name), "")
    if not other or (row.is_interleaved and known[other].is_interleaved):
        return row
    return replace(
        row,
        best_other=other,
        vs_best_other=unpaired_ratio(rates[row.name], rates[other]),
        is_best_other_paired=False,
    )


def with_notes(rows: Sequence[MethodRow], notes: Mapping[str, str]) -> tuple[MethodRow, ...]:
    """The rows with something more to say of some of them, by name."""
    return tuple(
        replace(row, note="; ".join(filter(None, (row.note, notes.get(row.name, "")))))
        for row in rows
    )


def refused_rows(refused: Mapping[str, str]) -> tuple[MethodRow, ...]:
    """Rows of methods that the engine does not run, each with its sentence."""
    return tuple(MethodRow(name=name, config=None, note=why) for name, why in refused.items())


def tokens_per_iteration(passes: Sequence[Measured]) -> Estimate | None:
    """Tokens emitted per verification, bonus token included; None without passes that draft."""
    counts = [one for one in counts_by_request(passes) if one]
    return accepted(counts).shifted(1.0) if counts else None


def selection_overhead(pairs: Sequence[tuple[Measured, Measured]]) -> Estimate | None:
    """Share of an iteration that selecting costs.

    Args:
        pairs: as many drafts with and without selecting; fewer than two give None.
    """
    if len(pairs) < 2:
        return None
    return _share_from([_step_s(without) / _step_s(with_it) for with_it, without in pairs])


def phase_share(passes: Sequence[Measured]) -> Estimate | None:
    """Share of an iteration in the selection phase, by the engine's own times.

    What selecting adds to verification is not in that phase, so it is a lower bound.

    Args:
        passes: of one setting; fewer than two, or none with such a phase, give None.
    """
    shares = []
    for one in passes:
        phases = {name: time.est for name, time in one.figures.phases.items()}
        shares.append(phases["select_s"] / sum(phases.values()))
    if len(shares) < 2 or not any(shares):
        return None
    return _share_from([1 - share for share in shares])


def _share_from(rests: Sequence[float]) -> Estimate:
    """What is missing from 1, from several observations of the rest."""
    rest = mean_ratio([math.log(each) for each in rests])
    # Selecting that costs nothing measurable may come out below zero: that is the noise.
    return Estimate(est=1 - rest.est, low=1 - rest.high, high=1 - rest.low, n=rest.n)


def _step_s(measured: Measured) -> float:
    """Mean time of an iteration."""
    steps = steady_steps(measured.run)
    assert not isinstance(steps, Unsteady)
    return sum(step.duration_s for step in steps) / len(steps)


def _mean_log(rates: Sequence[float]) -> float:
    return sum(map(math.log, rates)) / len(rates)


def _over(logs: Mapping[str, Sequence[float]], name: str, other: str) -> Estimate:
    pairs = zip(logs[name], logs[other], strict=True)
    return mean_ratio([one - base for one, base in pairs])


def _too_few(measured: SideBySide) -> str:
    return f"{len(measured.rounds)} complete rounds; 2 are needed for a figure with an interval"


# --------------------------------------------------------------------------- words


def main_table(rows: Sequence[MethodRow]) -> Table:
    """The comparison as a table for readers."""
    columns: dict[str, list[str]] = {
        "method": [row.name for row in rows],
        "setting": [_setting(row) for row in rows],
        "tokens per iteration": [
            _shown(row.tokens_per_iteration) if row.name not in _DRAFT_NOTHING else "1"
            for row in rows
        ],
        "selection overhead": [_overhead(row) for row in rows],
        "decode tok/s": [_shown(row.decode_tok_s) for row in rows],
        "against plain": [times(figure(row.vs_plain)) for row in rows],
        "against the best other": [_best_other(row) for row in rows],
        "against the engine without the plugin": [times(figure(row.vs_stock)) for row in rows],
        "note": [row.note for row in rows],
    }
    # These are about what not every comparison has.
    for name in ("against the engine without the plugin", "note"):
        if not any(columns[name]):
            del columns[name]
    return Table(
        columns=tuple(columns),
        rows=tuple(zip(*columns.values(), strict=True)),
        numeric=frozenset(
            place for place, name in enumerate(columns) if name not in ("method", "setting", "note")
        ),
    )


def position_table(rows: Sequence[MethodRow]) -> Table:
    """P(draft i accepted, once those before it were), a column per position."""
    longest = max((len(row.position_acceptance) for row in rows), default=0)
    return Table(
        columns=("method", *(f"draft {i}" for i in range(1, longest + 1))),
        rows=tuple(
            (row.name, *cells, *[""] * (longest - len(cells)))
            for row in rows
            if (cells := [_shown(each) for each in row.position_acceptance])
        ),
        numeric=frozenset(range(1, longest + 1)),
    )


def figure(value: Estimate | None) -> Figure | None:
    """A measured estimate in the form that words are made from."""
    if value is None:
        return None
    return Figure(est=value.est, low=value.low, high=value.high, n=value.n)


def share(value: Estimate | None) -> str:
    """A share with its interval: `5.9 % [5.1, 6.7]`."""
    return estimate(figure(value.scaled(100.0)), "%") if value is not None else ""


def _shown(value: Estimate | None) -> str:
    return estimate(figure(value))


def _setting(row: MethodRow) -> str:
    if row.name == STOCK:
        return "its own defaults"
    if row.config is not None and not row.is_interleaved:
        return f"gamma {row.config.num_speculative_tokens}"
    return setting(row.config) if row.config is not None else NOT_MEASURED


def _best_other(row: MethodRow) -> str:
    ratio = times(figure(row.vs_best_other))
    how = "" if row.is_best_other_paired else ", unpaired"
    return f"{ratio} ({row.best_other}{how})" if ratio else ""


def _overhead(row: MethodRow) -> str:
    words = share(row.selection_overhead)
    return f"{words} ({row.overhead_from})" if words and row.overhead_from != "playback" else words
