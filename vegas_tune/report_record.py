"""The record behind a report: decisions, every point, protocol, workload, model and machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from vegas_runtime.profile import DecisionRecord, Point, Profile, RejectedWindow
from vegas_tune.curves import VALIDATION_STEP, all_points, step_number
from vegas_tune.report_blocks import Block, Entry, Facts, Table
from vegas_tune.wording import (
    count,
    estimate,
    fact,
    facts,
    label,
    line,
    number,
    percent,
    point,
    sentence,
    times,
)

STEP_NAMES: Final = {
    1: "Step 1, sparsity ratio",
    2: "Step 2, tokens per iteration",
    3: "Step 3, refinement",
    4: "Validation",
}


def log_entry(decision: DecisionRecord) -> Entry:
    """One decision, its reason and what it was taken against."""
    step = step_number(decision.step)
    name = STEP_NAMES.get(step or 0, line(decision.step))
    outcome = f" Outcome: {_spaced(decision.outcome)}." if decision.outcome else ""
    settled = "Settled by the data" if decision.resolved else "Not settled by the data"
    data = "; ".join(f"{key} {text}" for key, text in facts(decision.data))
    data = f" Data: {data}." if data else ""
    return Entry(
        title=f"{name}: {chosen_words(decision)}",
        text=sentence(line(decision.why)),
        small=f"{settled}. Rule: {line(decision.rule)}.{outcome}{data}",
        details=_alternatives(decision),
    )


def decision_rows(profile: Profile) -> Iterable[tuple[str, str, str, str]]:
    """The decision log in short: step, what was chosen, whether the data settled it, why."""
    for decision in profile.decisions:
        step = step_number(decision.step)
        yield (
            STEP_NAMES.get(step or 0, line(decision.step)),
            chosen_words(decision),
            "yes" if decision.resolved else "no",
            sentence(line(decision.why)),
        )


def _spaced(word: str) -> str:
    return line(word).replace("_", " ")


def chosen_words(decision: DecisionRecord) -> str:
    """What a decision chose, in a few words."""
    chosen = decision.chosen
    if isinstance(chosen, Mapping):
        gamma, ratio = chosen.get("num_speculative_tokens"), chosen.get("sparsity_ratio")
        if set(chosen) <= {"num_speculative_tokens", "sparsity_ratio", "min_tokens"}:
            if isinstance(gamma, int) and isinstance(ratio, (int, float)):
                return point(gamma, ratio)
            if gamma is None and isinstance(ratio, (int, float)):
                return f"{percent(ratio)} of KV"
        return fact("", chosen)
    return "nothing" if chosen is None else fact(_knob(decision), chosen)


def _knob(decision: DecisionRecord) -> str:
    """The key of a bare value: steps 1 and 3 choose a ratio, step 2 a number of tokens."""
    return "sparsity_ratio" if step_number(decision.step) in (1, 3) else "num_speculative_tokens"


def _alternatives(decision: DecisionRecord) -> Table | None:
    """The alternatives, a column for each key that any of them has."""
    rows = [
        alternative if isinstance(alternative, Mapping) else {_knob(decision): alternative}
        for alternative in decision.alternatives
    ]
    tuned = ("num_speculative_tokens", "sparsity_ratio")
    found = list(dict.fromkeys(str(key) for row in rows for key in row))
    keys = [key for key in tuned if key in found] + [key for key in found if key not in tuned]
    if not keys:
        return None
    cells = tuple(
        tuple(fact(key, row[key]) if row.get(key) is not None else "" for key in keys)
        for row in rows
    )
    return Table(
        caption=count(len(rows), "alternative"),
        columns=tuple(label(key) for key in keys),
        rows=cells,
        numeric=frozenset(range(len(keys))),
    )


def points_blocks(profile: Profile) -> tuple[Block, ...]:
    """Every point of every curve, failed ones with their reason."""
    measured = all_points(profile)
    if not measured:
        return ()
    columns: dict[str, Callable[[Point], str]] = {
        "accepted drafts": lambda p: estimate(p.accepted_per_iteration),
        "decode tok/s": lambda p: estimate(p.decode_tok_s),
        "against plain": lambda p: times(p.speedup_vs_gamma0),
        "steps": lambda p: number(p.n_steps) if p.n_steps is not None else "",
    }
    shown = {name: text for name, text in columns.items() if any(text(p) for _, p in measured)}
    rows = tuple(
        (
            "validation" if step == VALIDATION_STEP else str(step),
            str(each.num_speculative_tokens),
            percent(each.sparsity_ratio) if each.num_speculative_tokens else "",
            *(text(each) for text in shown.values()),
            _status(each),
        )
        for step, each in measured
    )
    failed = [each for _, each in measured if each.status == "failed"]
    words = f"{count(len(measured) - len(failed), 'point')} measured, {len(failed)} failed."
    table = Table(
        columns=("step", "gamma", "KV kept", *shown, "status"),
        rows=rows,
        numeric=frozenset(range(1, 3 + len(shown))),
    )
    return (
        f"{words} Brackets are 95 % intervals.",
        table,
        *_dropped_blocks(profile),
        *_rejected_blocks(profile),
    )


def _dropped_blocks(profile: Profile) -> Iterable[Block]:
    """Settings that were not tried, and why."""
    dropped = profile.curves.dropped or ()
    if not dropped:
        return
    yield f"{count(len(dropped), 'setting')} not tried, because they need more memory than others:"
    rows = tuple(
        (*_setting_cells(each), line(each.failure.message if each.failure else ""))
        for each in dropped
    )
    yield Table(columns=("gamma", "KV kept", "why"), rows=rows, numeric=frozenset({0, 1}))


def _rejected_blocks(profile: Profile) -> Iterable[Block]:
    """Tries that do not count, with the reason; each was made again."""
    rejected = profile.curves.rejected or ()
    if not rejected:
        return
    counted = profile.protocol.other.get("rejected_windows") if profile.protocol else None
    total = sum(counted.values()) if isinstance(counted, Mapping) else len(rejected)
    listed = "" if total == len(rejected) else f" The first {len(rejected)}:"
    yield f"{count(total, 'window')} rejected and measured again.{listed}"
    rows = tuple(
        (
            str(step_number(each.step) or "stock"),
            *_setting_cells(each),
            str(each.attempt + 1),
            _spaced(each.failure.kind),
            line(each.failure.message),
        )
        for each in rejected
    )
    yield Table(
        columns=("step", "gamma", "KV kept", "try", "kind", "why"),
        rows=rows,
        numeric=frozenset({1, 2, 3}),
    )


def _setting_cells(setting: Point | RejectedWindow) -> tuple[str, str]:
    gamma = setting.num_speculative_tokens
    return str(gamma), percent(setting.sparsity_ratio) if gamma else ""


def _status(measured: Point) -> str:
    if measured.failure is None:
        return "ok"
    return f"failed ({_spaced(measured.failure.kind)}): {line(measured.failure.message)}"


def protocol_blocks(profile: Profile) -> tuple[Block, ...]:
    """How it was measured."""
    if profile.protocol is None:
        return ()
    values = _without_unknown(profile.protocol.to_facts())
    return (Facts((("protocol", line(values.pop("id"))), *facts(values))),)


def workload_blocks(profile: Profile) -> tuple[Block, ...]:
    """The text it was measured on."""
    workload = profile.workload
    if workload is None:
        return ()
    values = _without_unknown(workload.to_facts())
    values["prompt_tokens"] = _token_counts(values.get("prompt_tokens"))
    values["output_tokens"] = _token_counts(values.get("output_tokens"))
    warning = (
        ("The text is not content-valid: acceptance on real text may differ.",)
        if workload.content_valid is False
        else ()
    )
    return (*warning, Facts(facts(values)))


def _token_counts(values: Mapping[str, Any] | None) -> str | None:
    """Percentiles as words; the ends where they are known."""
    if values is None:
        return None
    known = {key: number(value) for key, value in values.items() if value is not None}
    if len(set(known.values())) == 1:
        return f"{known['p50']} each"
    names = {"min": "least", "p50": "median", "p95": "95th percentile", "max": "most"}
    return ", ".join(f"{names[key]} {text}" for key, text in known.items())


def machine_blocks(profile: Profile) -> tuple[Block, ...]:
    """Model, device, runtime and sampling."""
    match = profile.match
    parts = {
        "Model": match.model,
        "Device": match.device,
        "Runtime": match.runtime,
        "Sampling": match.sampling,
    }
    blocks: list[Block] = []
    for title, part in parts.items():
        rows = facts(_without_unknown(part.to_facts()))
        if rows:
            blocks += [f"{title}:", Facts(rows)]
    if profile.host:
        blocks += ["Host:", Facts(facts(profile.host))]
    return tuple(blocks)


def about_blocks(profile: Profile) -> tuple[Block, ...]:
    """The file itself: identity, origin, lossless check."""
    tool, check = profile.tool, profile.lossless_check
    values: dict[str, Any] = {
        "status": profile.status,
        "created": profile.created,
        "written by": f"{tool.name} {tool.version}" if tool else None,
        "engine": profile.backend,
        "profile id": profile.profile_id,
        "supersedes": profile.supersedes,
        "lossless check": f"{_spaced(check.result)}, {check.method}, {count(check.n, 'output')}"
        if check
        else None,
        "files beside it": [artifact.name for artifact in profile.artifacts],
    }
    notes = (f"Notes: {line(profile.notes)}",) if profile.notes.strip() else ()
    return (Facts(facts(values)), *notes)


def _without_unknown(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
