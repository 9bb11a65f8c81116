"""What is published of every method in vLLM: the rows of both parts, and what they say together."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from benchmarks.results_file import Row, write_rows
from benchmarks.vllm_arms import BASE, figures_of, mean_of, row, setting_of
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.protocol import STOCK_METHODS
from vegas_runtime.records import Run
from vegas_tune.measure import (
    Estimate,
    FloatArray,
    Measurement,
    accepted,
    mean_ratio,
    unpaired_ratio,
)
from vegas_tune.methods import PLAIN

NAME = "methods_vllm_h200"
WINDOW = "streaming_llm"
# How passes of the race are named in the records.
RACE = "race "
_WINDOW_NAME = "window, "


@dataclass
class Passes:
    """What was measured of one arm.

    Attributes:
        config: its setting.
        figures: one per round.
        step_s: mean time of an iteration, one per round.
    """

    config: SpeculationConfig
    figures: list[Measurement] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Decode throughput by round, tokens per second."""
        return [one.decode_tok_s.est for one in self.figures]

    def add(self, figures: Measurement) -> None:
        """Count a pass."""
        self.figures.append(figures)
        self.step_s.append(sum(time.est for time in figures.phases.values()))


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What the records of part `sparse` hold.

    Attributes:
        arms: the race's passes.
        base: stock vLLM's throughput.
        not_steady: passes that were not, by name.
    """

    arms: dict[str, Passes]
    base: list[float]
    not_steady: list[str]


def recorded(rows: Iterable[Mapping[str, Any]]) -> Recorded:
    """Read what `Evidence` kept of the part."""
    found = Recorded(arms={}, base=[], not_steady=[])
    for one in rows:
        run, what = Run.from_dict(one["run"]), one["what"]
        figures, unsteady = figures_of(run)
        if unsteady:
            found.not_steady.append(what)
        if what.startswith("stock "):
            found.base.append(figures.decode_tok_s.est)
        elif what.startswith(RACE):
            name = what.removeprefix(RACE).removesuffix(f" {setting_of(run.config)}")
            found.arms.setdefault(name, Passes(run.config)).add(figures)
    return found


def not_steady_row(case: str, part: str, names: Sequence[str]) -> Row:
    """How many of a part's passes were not steady, and which."""
    which = ", ".join(dict.fromkeys(names)) or "none"
    return row("passes_not_steady", f"{case}, part {part}: {which}", float(len(names)), "passes")


def publish(
    rows: Sequence[Row], part: str, *, folder: Path, facts: Mapping[str, Any] | None = None
) -> Path:
    """Write a part's rows in place of its earlier ones, and what both parts together say.

    Args:
        rows: of the part.
        part: its name.
        folder: of the results.
        facts: see `write_rows`.
    """

    def is_stale(old: Mapping[str, Any]) -> bool:
        if old["claim"] == "fastest_vs_own" or f", part {part}: " in old["case"]:
            return True
        method = method_of(old["case"])
        return bool(method) and (method in STOCK_METHODS) == (part == "own")

    where: dict[str, Any] = {"device": "cuda", "folder": folder, "facts": facts}
    path = write_rows(NAME, rows, **where, stale=is_stale)
    crossed = fastest_against_own(json.loads(path.read_text())["rows"])
    for one in crossed:
        print(one)
    return write_rows(NAME, crossed, **where)


def method_of(case: str) -> str:
    """The method that a case names; empty for none."""
    named = case.partition(" method=")[2]
    return named.partition(",")[0].partition(":")[0]


def sparse_rows(case: str, arms: Mapping[str, Passes], base: Sequence[float]) -> list[Row]:
    """What is published of the race.

    Args:
        case: names the workload.
        arms: by method name, plain decoding and windows among them.
        base: stock vLLM's throughput.
    """
    rows = [row("stock_decode", case, mean_of(base), "tok/s")]
    rounds = min((len(one.figures) for one in arms.values()), default=0)
    if min(rounds, len(base)) < 2:
        return rows
    logs = logs_of({name: one.rates[:rounds] for name, one in arms.items()})
    times = logs_of({name: one.step_s[:rounds] for name, one in arms.items()})
    windows = {one.config: name for name, one in arms.items() if one.config.algorithm == WINDOW}
    methods = [name for name in arms if name != PLAIN and not name.startswith(_WINDOW_NAME)]
    methods.sort(key=lambda name: -sum(logs[name]))
    if PLAIN in arms:
        rows.append(
            row("plugin_gamma0_vs_stock", case, unpaired_ratio(arms[PLAIN].rates, base), "x")
        )
    for name in methods:
        one = arms[name]
        own = f"{case} method={name}, {setting_of(one.config)}"
        rows += method_rows(own, one, _level(logs, name))
        rows.append(row("speedup_vs_stock", own, unpaired_ratio(one.rates, base), "x"))
        if PLAIN in arms:
            rows.append(row("speedup_vs_gamma0", own, paired_ratio(logs, name, PLAIN), "x"))
        other = next((each for each in methods if each != name), None)
        if other is not None:
            rows.append(row("vs_best_other", own, paired_ratio(logs, name, other), "x"))
        window = windows.get(window_of(one.config))
        if window is not None and window != name:
            rest = paired_ratio(times, window, name)
            overhead = Estimate(est=1 - rest.est, low=1 - rest.high, high=1 - rest.low, n=rest.n)
            rows.append(row("selection_overhead", own, overhead, "share of an iteration"))
    return rows


def own_rows(
    case: str, name: str, by_gamma: Mapping[int, tuple[float, Passes]], base: Sequence[float]
) -> list[Row]:
    """What is published of one of vLLM's own methods, at its best gamma.

    Args:
        case: names the workload.
        name: of the method.
        by_gamma: throughput it was chosen by, and passes.
        base: stock vLLM's throughput, of the same run.
    """
    rows = [row("own_searched", f"{case} {name}", float(len(by_gamma)), "gammas")]
    gamma = max(by_gamma, key=lambda each: by_gamma[each][0])
    one = by_gamma[gamma][1]
    own = f"{case} method={name}, gamma {gamma}"
    rows += method_rows(own, one, mean_ratio([math.log(rate) for rate in one.rates]))
    if len(base) > 1:
        rows.append(row("speedup_vs_stock", own, unpaired_ratio(one.rates, base), "x"))
        rows.append(row("stock_decode", f"{case}, beside {name}", mean_of(base), "tok/s"))
    return rows


def method_rows(case: str, passes: Passes, decode: Estimate) -> list[Row]:
    """Throughput, tokens per iteration and acceptance by position of one method."""
    counts = [one.counts for one in passes.figures if one.counts]
    rows = [row("decode", case, decode, "tok/s")]
    if counts:
        rows.append(row("tokens_per_iteration", case, accepted(counts).shifted(1.0), "tokens"))
    positions = list(zip(*(one.survival for one in passes.figures), strict=False))
    rows += [
        row("first_i_drafts_accepted", f"{case} i={index}", mean_of(shares), "share")
        for index, shares in enumerate(positions, start=1)
    ]
    return rows


def fastest_against_own(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The fastest method that selects over each of vLLM's own: both against stock in their run.

    Args:
        rows: of the results file, both parts' where both were run.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for one in rows:
        if one["claim"] == "speedup_vs_stock":
            found[method_of(one["case"])] = one
    selecting = [name for name in found if name not in STOCK_METHODS]
    if not selecting:
        return []
    best = max(selecting, key=lambda name: found[name]["value"])
    return [
        row(
            "fastest_vs_own",
            f"{found[best]['case'].partition(' method=')[0]} {best} over {name}, unpaired",
            _ratio(found[best], found[name]),
            "x",
        )
        for name in found
        if name in STOCK_METHODS
    ]


def _ratio(top: Mapping[str, Any], bottom: Mapping[str, Any]) -> Estimate:
    """Ratio of two ratios that share nothing: log half-widths add in quadrature."""
    est = top["value"] / bottom["value"]
    down = math.hypot(
        math.log(top["value"] / top["low"]), math.log(bottom["high"] / bottom["value"])
    )
    up = math.hypot(math.log(top["high"] / top["value"]), math.log(bottom["value"] / bottom["low"]))
    return Estimate(est=est, low=est * math.exp(-down), high=est * math.exp(up), n=2)


def logs_of(values: Mapping[str, Sequence[float]]) -> dict[str, FloatArray]:
    """Logarithms of each arm's figures, one per round."""
    return {name: np.log(np.asarray(found, dtype=float)) for name, found in values.items()}


def paired_ratio(logs: Mapping[str, FloatArray], one: str, other: str) -> Estimate:
    """Ratio of two arms over the rounds, with a 95 % interval from the spread of all arms.

    Rounds are the blocks of a block design, arms its treatments: what is left of the logarithms
    when both are taken off has (arms - 1) * (rounds - 1) degrees of freedom. A round takes a
    minute, so there are few; two rounds of one pair would leave a single degree.
    """
    table = np.stack(list(logs.values()))
    rest = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0) + table.mean()
    arms, rounds = table.shape
    return _pooled(logs[one] - logs[other], rest, (arms - 1) * (rounds - 1), terms=2)


def _level(logs: Mapping[str, FloatArray], name: str) -> Estimate:
    """Mean of one arm over the rounds, its spread that of all arms together."""
    table = np.stack(list(logs.values()))
    rest = table - table.mean(axis=1, keepdims=True)
    return _pooled(logs[name], rest, rest.size - len(rest), terms=1)


def _pooled(values: FloatArray, rest: FloatArray, freedom: int, *, terms: int) -> Estimate:
    """Exponential of a mean over rounds, of which each is a sum of so many figures."""
    spread = math.sqrt(float((rest**2).sum()) / freedom)
    reach = float(stdtrit(freedom, 0.975)) * spread * math.sqrt(terms / len(values))
    mean = float(values.mean())
    return Estimate(
        est=math.exp(mean), low=math.exp(mean - reach), high=math.exp(mean + reach), n=len(values)
    )


def window_of(config: SpeculationConfig) -> SpeculationConfig:
    """As many drafts from as many entries, none of them selected."""
    return BASE.replace(
        algorithm=WINDOW,
        num_speculative_tokens=config.num_speculative_tokens,
        sparsity_ratio=config.sparsity_ratio,
    )


def window_name(config: SpeculationConfig) -> str:
    """Of an arm that no method is."""
    return f"{_WINDOW_NAME}{setting_of(config)}"
