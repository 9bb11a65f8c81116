"""What a profile comes down to: the setting, how much it gains and against what, how sure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from vegas_runtime.config import SWITCHES, SpeculationConfig
from vegas_runtime.profile import WILDCARD, Estimate, Point, Profile, Results
from vegas_tune.curves import validated_speedup
from vegas_tune.wording import count, estimate, line, number, percent, point, times

_STATUS: Final = {
    "validated": "Validated",
    "inconclusive": "Inconclusive",
    "draft": "Draft",
}


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The top of every report.

    Attributes:
        title: model and device.
        status: the profile's own.
        status_text: the same for a reader.
        figure: the speed-up, e.g. `1.25x`; empty when there is none to claim.
        interval: its interval and what it is against; empty without a figure.
        verdict: one or two sentences.
        rows: the setting and the key figures, label and value.
    """

    title: str
    status: Literal["validated", "inconclusive", "draft"]
    status_text: str
    figure: str
    interval: str
    verdict: str
    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class IterationBudget:
    """One iteration against plain decoding of as many tokens.

    Attributes:
        tokens: tokens an iteration adds to each request.
        drafting_ms: time of the iteration.
        plain_ms: time plain decoding takes for as many tokens of the same batch.
    """

    tokens: float
    drafting_ms: float
    plain_ms: float


def headline(profile: Profile) -> Headline:
    """Sum up a profile."""
    results, drafts = profile.results, profile.selected.default.num_speculative_tokens > 0
    figure = interval = ""
    if results is not None and drafts and profile.status != "draft":
        gain, against = _published(results)
        figure = times(gain, interval=False)
        span = times(gain).removeprefix(figure).strip()
        interval = f"{span} the decode throughput of {against}".strip()
    return Headline(
        title=title(profile),
        status=profile.status,
        status_text=_STATUS[profile.status],
        figure=figure,
        interval=interval,
        verdict=_verdict(profile),
        rows=tuple(_rows(profile)),
    )


def title(profile: Profile) -> str:
    """Model and device in one line."""
    model, device = profile.match.model.id, profile.match.device.device_class
    named = line(model) if model not in (None, WILDCARD) else "Any model"
    return f"{named} on {line(device) if device not in (None, WILDCARD) else 'any device'}"


def iteration_budget(profile: Profile) -> IterationBudget | None:
    """One iteration against plain decoding; None where the profile lacks a figure for it."""
    results, workload = profile.results, profile.workload
    if results is None or results.phase_ms is None or workload is None:
        return None
    length = results.acceptance_length
    if length is None and results.accepted_per_iteration is not None:
        tokens = results.accepted_per_iteration.est + 1
    elif length is not None:
        tokens = length.est
    else:
        return None
    if results.baseline_tok_s.est <= 0:
        return None
    phases = results.phase_ms
    return IterationBudget(
        tokens=tokens,
        drafting_ms=sum(
            each.est for each in (phases.draft, phases.select, phases.verify, phases.other)
        ),
        plain_ms=1000 * tokens * workload.batch_size / results.baseline_tok_s.est,
    )


def _published(results: Results) -> tuple[Estimate, str]:
    """The ratio to quote: against what a user has today where that was measured."""
    if results.speedup_vs_stock is not None:
        return results.speedup_vs_stock, "the engine without the plugin, at its own defaults"
    return results.speedup_vs_gamma0, "plain decoding in the same engine"


def _verdict(profile: Profile) -> str:
    results = profile.results
    chosen = profile.selected.default
    drafts = chosen.num_speculative_tokens > 0
    if profile.status == "draft":
        if results is None:
            return "No measurement stands behind this setting."
        return "Changed by hand: nothing ties the figures in this draft to its setting."
    if not drafts:
        return _plain_verdict(profile)
    if results is None:
        return "The sweep ended before the setting was validated against plain decoding."
    gain = results.speedup_vs_gamma0
    drafted = count(chosen.num_speculative_tokens, "token")
    words = (
        f"Drafting {drafted} per iteration with {percent(chosen.sparsity_ratio)} of the KV cache"
    )
    if gain.low is None or gain.high is None:
        return f"{words} was measured without an interval, so a gain is not shown."
    if gain.low > 1:
        sure = "is faster than plain decoding here"
    elif gain.high < 1:
        sure = "is slower than plain decoding here; do not serve with it"
    else:
        sure = "is not shown to be faster than plain decoding here: the interval includes 1"
    ending = "" if profile.status == "validated" else " Another setting may still be better."
    return f"{words} {sure}.{ending}"


def _plain_verdict(profile: Profile) -> str:
    words = "No gain from drafting was shown, so plain decoding is kept."
    if profile.status == "validated":
        words = (
            "Plain decoding is fastest here: drafting does not pay for this model, machine and "
            "workload."
        )
    best = _best_drafting(profile)
    if best is None:
        return words
    named = point(best.num_speculative_tokens, best.sparsity_ratio)
    reached = estimate(best.decode_tok_s, "tok/s")
    gain = validated_speedup(profile, best)
    if gain is not None:
        reached = f"{times(gain)} of its throughput"
    return f"{words} The best drafting setting, {named}, reaches {reached}."


def _best_drafting(profile: Profile) -> Point | None:
    """The fastest validated setting that drafts."""
    drafting = [
        each
        for each in profile.curves.validation
        if each.num_speculative_tokens and each.decode_tok_s is not None
    ]
    rates = [each.decode_tok_s.est if each.decode_tok_s else 0.0 for each in drafting]
    return drafting[rates.index(max(rates))] if rates else None


def _rows(profile: Profile) -> Iterable[tuple[str, str]]:
    chosen, results = profile.selected.default, profile.results
    yield "Setting", _setting(profile)
    if results is not None:
        rate, plain = results.decode_tok_s, results.baseline_tok_s
        if chosen.num_speculative_tokens:
            yield "Decode throughput", estimate(rate, "tok/s")
        yield "Plain decoding", estimate(plain, "tok/s")
        if chosen.num_speculative_tokens and results.speedup_vs_stock is not None:
            yield "Against plain decoding", times(results.speedup_vs_gamma0)
        if chosen.num_speculative_tokens and results.accepted_per_iteration is not None:
            accepted = estimate(results.accepted_per_iteration)
            yield "Accepted drafts", f"{accepted} of {chosen.num_speculative_tokens} per iteration"
    yield "Meant for" if profile.status == "draft" else "Measured for", measured_region(profile)
    check = profile.lossless_check
    if check is not None:
        words = {"pass": "passed", "fail": "FAILED", "not_run": "not run"}[check.result]
        over = f", {count(check.n, 'output')}" if check.n else ""
        yield "Output unchanged", f"{words} ({line(check.method)}{over})"


def _setting(profile: Profile) -> str:
    chosen = profile.selected.default
    if not chosen.num_speculative_tokens:
        return "plain decoding, nothing is drafted"
    drafted = count(chosen.num_speculative_tokens, "token")
    words = (
        f"{drafted} drafted per iteration, attending to {percent(chosen.sparsity_ratio)} of the KV "
        f"cache (at least {number(chosen.min_tokens)} entries)"
    )
    usual = SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0)
    switches = [
        f"{name} {getattr(chosen, name)}"
        for name in SWITCHES
        if getattr(chosen, name) != getattr(usual, name)
    ]
    return f"{words}; policy {', '.join([line(chosen.algorithm), *switches])}"


def measured_region(profile: Profile) -> str:
    """Batch sizes and context lengths that the default setting was measured for."""
    (first, batch_end), (shortest, context_end) = profile.validity.batch, profile.validity.context
    batch = f"{first}" if batch_end - first == 1 else f"{first:,} to {batch_end - 1:,}"
    return f"batch {batch}, context {shortest:,} to {context_end - 1:,} tokens"
