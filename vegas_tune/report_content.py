"""What a report says, before it is Markdown, HTML or a terminal's table.

Every sentence and table of a report is made here, once, from the profile alone; the formats only
lay it out (and the HTML page adds the charts).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vegas_runtime.profile import Point, Profile
from vegas_tune.curves import (
    Curve,
    conditional_acceptance,
    gamma_curve,
    refine_curve,
    sparsity_curve,
    validated_speedup,
)
from vegas_tune.headline import Headline, headline, iteration_budget
from vegas_tune.report_blocks import Block, Command, Section, Table
from vegas_tune.report_record import (
    about_blocks,
    chosen_words,
    log_entry,
    machine_blocks,
    points_blocks,
    protocol_blocks,
    workload_blocks,
)
from vegas_tune.wording import (
    count,
    estimate,
    line,
    number,
    percent,
    point,
    sentence,
    times,
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """A whole report."""

    headline: Headline
    sections: tuple[Section, ...]


def report_content(profile: Profile, *, path: str = "profile.yaml") -> Report:
    """Say everything a profile holds.

    Args:
        profile: what to report on.
        path: the profile's file, for the commands to copy.
    """
    sections = (
        Section(key="next", title="What to do next", blocks=tuple(_next_steps(profile, path))),
        _curve_section(
            "sparsity",
            "Step 1: accepted tokens against sparsity ratio",
            sparsity_curve(profile),
            _sparsity_words,
        ),
        _curve_section(
            "gamma",
            "Step 2: throughput against tokens per iteration",
            gamma_curve(profile),
            _gamma_words,
        ),
        _curve_section(
            "refine",
            "Step 3: throughput against sparsity ratio",
            refine_curve(profile),
            _refine_words,
        ),
        Section(key="validation", title="Validation", blocks=tuple(_validation(profile))),
        Section(key="acceptance", title="Acceptance by position", blocks=_acceptance(profile)),
        Section(key="phases", title="Where an iteration's time goes", blocks=_phases(profile)),
        Section(key="buckets", title="Settings by batch and context", blocks=_buckets(profile)),
        Section(
            key="decisions", title="Decision log", blocks=tuple(map(log_entry, profile.decisions))
        ),
        Section(key="points", title="Every measured point", blocks=points_blocks(profile)),
        Section(key="protocol", title="How it was measured", blocks=protocol_blocks(profile)),
        Section(key="workload", title="Workload", blocks=workload_blocks(profile)),
        Section(key="machine", title="Model and machine", blocks=machine_blocks(profile)),
        Section(key="profile", title="This profile", blocks=about_blocks(profile)),
    )
    return Report(
        headline=headline(profile), sections=tuple(part for part in sections if part.blocks)
    )


# --------------------------------------------------------------------------- what to do


def _next_steps(profile: Profile, path: str) -> Iterable[Block]:
    file = shlex.quote(line(path))
    drafts = profile.selected.default.num_speculative_tokens > 0
    if profile.status == "draft":
        yield "Measure before serving with it: a sweep on this machine replaces the draft."
        yield Command(f"vegas-tune sweep --model {shlex.quote(_model(profile))}")
        return
    if profile.status == "inconclusive":
        yield (
            "Run the same sweep again with more time: finished measurements are kept, and only "
            "what is still open is measured. Until then, plain decoding is the safe choice."
        )
        yield Command(f"vegas-tune sweep --model {shlex.quote(_model(profile))} --budget 30m")
        return
    if not drafts:
        yield (
            "Serve this model without speculation on this machine. Tune again when the batch, the "
            "context or the text changes: longer contexts and larger batches favour drafting."
        )
    elif profile.backend == "vllm":
        yield "Print vLLM's configuration and serve with it."
        yield Command(f"vegas-tune apply {file} > vllm.yaml && vllm serve --config vllm.yaml")
    else:
        yield (
            "Try the setting on this machine; tokens per second and acceptance are shown beside "
            "plain decoding."
        )
        yield Command(f'vegas-tune apply {file} --run "Once upon a time"')
    yield "In CI, test that the evidence still leads to this setting and that acceptance holds."
    yield Command(f"vegas-tune check {file}")


def _model(profile: Profile) -> str:
    model = profile.match.model.id
    return line(model) if model not in (None, "*") else "MODEL"


# --------------------------------------------------------------------------- curves


def _curve_section(
    key: str, title: str, curve: Curve, words: Callable[[Curve], Iterable[str]]
) -> Section:
    blocks = list(words(curve)) if curve.points else []
    if curve.points and curve.decision is not None:
        settled = "" if curve.decision.resolved else " The data did not settle it."
        blocks.append(
            f"Chosen: {chosen_words(curve.decision)}. {sentence(line(curve.decision.why))}{settled}"
        )
    if curve.num_left_out:
        more = count(curve.num_left_out, "more point")
        blocks.append(f"{more} of this step at other settings: see every measured point.")
    return Section(key=key, title=title, blocks=tuple(blocks))


def _sparsity_words(curve: Curve) -> Iterable[str]:
    first, last = curve.points[0], curve.points[-1]
    yield (
        f"Drafts accepted per iteration at gamma {number(curve.fixed or 0)}, by the fraction of "
        f"the KV cache that drafting attends to: "
        f"{estimate(first.accepted_per_iteration)} at {percent(first.sparsity_ratio)}, "
        f"{estimate(last.accepted_per_iteration)} at {percent(last.sparsity_ratio)}."
    )
    outcome = curve.decision.outcome if curve.decision else ""
    if "not_reached" in outcome:
        yield "There is no plateau: acceptance still rises at the largest ratio measured."


def _gamma_words(curve: Curve) -> Iterable[str]:
    fastest = max(curve.points, key=_rate)
    yield (
        f"Decode throughput when drafting with {percent(curve.fixed or 0)} of the KV cache. "
        f"Fastest of {len(curve.points)}: gamma {fastest.num_speculative_tokens} at "
        f"{estimate(fastest.decode_tok_s, 'tok/s')}.{_against_plain(curve)}"
    )


def _refine_words(curve: Curve) -> Iterable[str]:
    fastest = max(curve.points, key=_rate)
    yield (
        f"Decode throughput at gamma {number(curve.fixed or 0)}. Fastest of {len(curve.points)}: "
        f"{percent(fastest.sparsity_ratio)} at {estimate(fastest.decode_tok_s, 'tok/s')}."
        f"{_against_plain(curve)}"
    )


def _against_plain(curve: Curve) -> str:
    plain = curve.plain.decode_tok_s if curve.plain else None
    return f" Plain decoding in the same step: {estimate(plain, 'tok/s')}." if plain else ""


def _rate(measured: Point) -> float:
    assert measured.decode_tok_s is not None
    return measured.decode_tok_s.est


# --------------------------------------------------------------------------- results


def _validation(profile: Profile) -> Iterable[Block]:
    results, protocol = profile.results, profile.protocol
    if results is None and not profile.curves.validation:
        return
    pairs = protocol.pairs if protocol else None
    how = f" in {count(pairs, 'interleaved round')}" if pairs else ""
    yield (
        f"The finalists were measured afresh against plain decoding{how}; nothing that chose them "
        "is used again."
    )
    chosen = profile.selected.default
    rows = [
        (
            point(measured.num_speculative_tokens, measured.sparsity_ratio),
            estimate(measured.decode_tok_s),
            times(validated_speedup(profile, measured)),
        )
        for measured in profile.curves.validation
        if measured.status == "ok"
    ]
    if not rows and results is not None:
        words = point(chosen.num_speculative_tokens, chosen.sparsity_ratio)
        rows = [
            (words, estimate(results.decode_tok_s), times(results.speedup_vs_gamma0)),
            ("plain decoding", estimate(results.baseline_tok_s), ""),
        ]
    if rows:
        yield Table(
            columns=("setting", "decode tok/s", "against plain"),
            rows=tuple(rows),
            numeric=frozenset({1, 2}),
        )


def _acceptance(profile: Profile) -> tuple[Block, ...]:
    results = profile.results
    if results is None or not results.survival:
        return ()
    rows = tuple(
        (str(position), estimate(survives), f"{alone:.3f}")
        for position, (survives, alone) in enumerate(
            zip(results.survival, conditional_acceptance(profile), strict=True), start=1
        )
    )
    table = Table(
        caption="Acceptance as a table",
        columns=("draft position", "all up to here accepted", "accepted when reached"),
        rows=rows,
        numeric=frozenset({0, 1, 2}),
    )
    return (
        "The probability that the first drafts of an iteration are all accepted, and that a draft "
        "is accepted when every one before it was.",
        table,
    )


def _phases(profile: Profile) -> tuple[Block, ...]:
    phases = profile.results.phase_ms if profile.results else None
    if phases is None:
        return ()
    parts = {name: getattr(phases, name) for name in ("draft", "select", "verify", "other")}
    total = sum(value.est for value in parts.values())
    rows = tuple(
        (name, estimate(value), percent(round(value.est / total, 3)) if total else "")
        for name, value in parts.items()
    )
    table = Table(
        caption="Phases as a table",
        columns=("phase", "ms per iteration", "share"),
        rows=rows,
        numeric=frozenset({1, 2}),
    )
    drafts = profile.selected.default.num_speculative_tokens > 0
    step = "One iteration" if drafts else "One step of plain decoding"
    words = f"{step} takes {number(total)} ms."
    budget = iteration_budget(profile)
    if budget is not None:
        words = (
            f"One iteration takes {number(budget.drafting_ms)} ms and yields "
            f"{number(budget.tokens)} tokens per request; plain decoding takes "
            f"{number(budget.plain_ms)} ms for as many."
        )
    return (words, table)


def _buckets(profile: Profile) -> tuple[Block, ...]:
    outside = {
        "fallback_gamma_0": "plain decoding",
        "nearest": "the nearest cell",
        "default": "the default setting",
    }[profile.selected.outside]
    if not profile.selected.buckets:
        return ()
    rows: tuple[tuple[str, ...], ...] = tuple(
        (
            _span(bucket.batch),
            _span(bucket.context),
            point(bucket.config.num_speculative_tokens, bucket.config.sparsity_ratio),
            times(bucket.speedup_vs_gamma0),
        )
        for bucket in profile.selected.buckets
    )
    columns: tuple[str, ...] = ("batch", "context", "setting", "against plain")
    if any(bucket.speedup_vs_stock for bucket in profile.selected.buckets):
        columns += ("against stock vLLM",)
        stock = [times(bucket.speedup_vs_stock) for bucket in profile.selected.buckets]
        rows = tuple((*row, cell) for row, cell in zip(rows, stock, strict=True))
    table = Table(columns=columns, rows=rows, numeric=frozenset(range(3, len(columns))))
    return (f"Outside the measured cells: {outside}.", table)


def _span(span: tuple[int, int]) -> str:
    first, last = span[0], span[1] - 1
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"
