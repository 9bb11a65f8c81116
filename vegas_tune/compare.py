"""Two profiles against each other: ratios with intervals, and whether they may be compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from vegas_runtime.errors import UsageError
from vegas_runtime.profile import WILDCARD, Bucket, Estimate, Profile, load_profile
from vegas_tune.apply import MachineFacts, match_profile
from vegas_tune.markdown import markdown_table, markdown_text
from vegas_tune.wording import UNKNOWN, estimate, fact, line, percent, setting, times

Verdict = Literal["higher", "lower", "no difference shown", "no interval", "not measured"]

# Facts of the workload that make it another question; the rest of it follows from the prompts.
_WORKLOAD_FACTS: Final = (
    "name",
    "prompts_sha256",
    "batch_size",
    "context_len",
    "max_new_tokens",
    "eos",
)
_OPTIONS_OF_EVERY_COMMAND: Final = ("--json", "--debug")
# Differences that `apply` only warns of, and that make two results incomparable.
_DECISIVE: Final = ("sampling.", "backend")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One figure in both profiles.

    Attributes:
        name: what it is, with the unit.
        a: the figure in the first profile; None when not measured.
        b: the figure in the second.
        ratio: b over a with its 95 % interval; None unless both are measured and positive.
        verdict: what the interval says of b against a.
    """

    name: str
    a: Estimate | None
    b: Estimate | None
    ratio: Estimate | None
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something the two were measured with or on that is not the same.

    Attributes:
        field: dotted place in the profile.
        a: value in the first profile, in words.
        b: value in the second.
        is_decisive: whether it makes the figures incomparable.
    """

    field: str
    a: str
    b: str
    is_decisive: bool


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two profiles against each other.

    Attributes:
        names: what to call them.
        statuses: their status.
        settings: what each selected, in words.
        changes: one per figure.
        differences: decisive ones first.
        noise_floor_cv: the larger run-to-run spread of the two; None when neither has one.
    """

    names: tuple[str, str]
    statuses: tuple[str, str]
    settings: tuple[str, str]
    changes: tuple[Change, ...]
    differences: tuple[Difference, ...]
    noise_floor_cv: float | None

    @property
    def is_like_for_like(self) -> bool:
        """Whether nothing decisive differs."""
        return not any(difference.is_decisive for difference in self.differences)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = asdict(self)
        values["is_like_for_like"] = self.is_like_for_like
        values["changes"] = [
            {
                "name": change.name,
                "a": _plain(change.a),
                "b": _plain(change.b),
                "ratio": _plain(change.ratio),
                "verdict": change.verdict,
            }
            for change in self.changes
        ]
        return values

    def to_markdown(self) -> str:
        """Tables and sentences for a comment on a pull request."""
        a, b = self.names
        head = (a, b, f"{b} / {a}", "verdict")
        rows = [("status", *self.statuses, "", ""), ("selected", *self.settings, "", "")]
        rows += [
            (
                change.name,
                _figure(change.name, change.a),
                _figure(change.name, change.b),
                times(change.ratio),
                change.verdict,
            )
            for change in self.changes
        ]
        parts = [markdown_text(self._warning())] if self.differences else []
        parts.append(markdown_table(("", *head), rows))
        if self.differences:
            listed = [
                (each.field, each.a, each.b, "yes" if each.is_decisive else "no")
                for each in self.differences
            ]
            parts.append(markdown_table(("differs", a, b, "decisive"), listed))
        parts.append(markdown_text(self._small_print()))
        return "\n\n".join(parts) + "\n"

    def _warning(self) -> str:
        decisive = [each.field for each in self.differences if each.is_decisive]
        if not decisive:
            return "Like for like, apart from what is listed below."
        return (
            f"Not like for like: {', '.join(decisive)} differ, so a ratio below may come from that "
            "and not from the setting."
        )

    def _small_print(self) -> str:
        words = "Brackets are 95 % intervals; a ratio's follows from both on the logarithmic scale."
        if self.noise_floor_cv is not None:
            words += (
                f" Runs of one setting spread by {percent(self.noise_floor_cv)} (CV) within a "
                "sweep, and two sweeps differ by more than that: compare speed-ups before tokens "
                "per second."
            )
        return words


def compare_files(
    first: Path | None, second: Path | None, *, options: Sequence[str] = ()
) -> Comparison:
    """Compare the profiles in two files.

    Args:
        first: the reference.
        second: what is judged.
        options: options given beside the files; only those of every command go with them.

    Raises:
        UsageError: a file is not named, or an option belongs to a comparison of methods.
        ProfileInvalidError: a file holds no readable profile.
    """
    if first is None or second is None:
        raise UsageError(
            "two profiles are compared, or methods on a model; "
            f"{'nothing' if first is None else 'one profile'} was named.",
            hint="vegas-tune compare A.yaml B.yaml, or vegas-tune compare --model smollm2-135m",
        )
    others = [option for option in options if option not in _OPTIONS_OF_EVERY_COMMAND]
    if others:
        raise UsageError(
            f"{others[0]} belongs to a comparison of methods on a model and would change nothing "
            "between two profiles.",
            hint="Leave it out, or give --model instead of the profiles.",
        )
    return compare_profiles(
        load_profile(first), load_profile(second), names=(str(first), str(second))
    )


def compare_profiles(a: Profile, b: Profile, *, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Compare what two profiles measured, b against a.

    Args:
        a: the reference.
        b: what is judged.
        names: what to call them.
    """
    floors = [each.protocol.noise_floor_cv for each in (a, b) if each.protocol is not None]
    known = [floor for floor in floors if floor is not None]
    return Comparison(
        names=(line(names[0]), line(names[1])),
        statuses=(a.status, b.status),
        settings=(setting(a.selected.default), setting(b.selected.default)),
        changes=(*_changes(a, b), *_bucket_changes(a, b)),
        differences=tuple(
            sorted(_differences(a, b), key=lambda difference: not difference.is_decisive)
        ),
        noise_floor_cv=max(known) if known else None,
    )


def ratio_of(a: Estimate | None, b: Estimate | None) -> Estimate | None:
    """Ratio b / a, its interval by the delta method on the log scale from the two intervals.

    The half-widths on either side add in quadrature, so that skewed intervals stay skewed (MOVER;
    Zou and Donner, 2008). Where a bound is not positive, that side is taken as wide as the other.

    Returns:
        None where a figure is missing or not positive; without interval where one has none.
    """
    if a is None or b is None or a.est <= 0 or b.est <= 0:
        return None
    est = b.est / a.est
    one, other = _log_reach(a), _log_reach(b)
    if one is None or other is None:
        return Estimate(est=est, point_only=True)
    (a_down, a_up), (b_down, b_up) = one, other
    n = min((each.n for each in (a, b) if each.n is not None), default=None)
    return Estimate(
        est=est,
        low=est * math.exp(-math.hypot(b_down, a_up)),
        high=est * math.exp(math.hypot(b_up, a_down)),
        n=n,
    )


def _log_reach(value: Estimate) -> tuple[float, float] | None:
    """How far the interval reaches down and up on the log scale; `est` is positive."""
    if value.low is None or value.high is None:
        return None
    up = math.log(value.high / value.est)
    return (math.log(value.est / value.low) if value.low > 0 else up), up


def _changes(a: Profile, b: Profile) -> Iterable[Change]:
    figures: dict[str, str] = {
        "decode_tok_s": "decode throughput, tok/s",
        "baseline_tok_s": "plain decoding, tok/s",
        "speedup_vs_gamma0": "speed-up over plain decoding",
        "speedup_vs_stock": "speed-up over the engine without the plugin",
        "accepted_per_iteration": "accepted drafts per iteration",
        "acceptance_length": "tokens per iteration",
    }
    for name, words in figures.items():
        one, other = (getattr(each.results, name) if each.results else None for each in (a, b))
        if one is not None or other is not None:
            yield _change(words, one, other)


def _bucket_changes(a: Profile, b: Profile) -> Iterable[Change]:
    """Speed-ups of the cells that both profiles hold."""

    def cell(bucket: Bucket) -> tuple[tuple[int, int], tuple[int, int]]:
        return bucket.batch, bucket.context

    others = {cell(bucket): bucket.speedup_vs_gamma0 for bucket in b.selected.buckets}
    for bucket in a.selected.buckets:
        if cell(bucket) in others:
            (first, batch_end), (shortest, context_end) = cell(bucket)
            where = f"batch {first} to {batch_end - 1}, context {shortest} to {context_end - 1}"
            yield _change(f"speed-up, {where}", bucket.speedup_vs_gamma0, others[cell(bucket)])


def _change(name: str, a: Estimate | None, b: Estimate | None) -> Change:
    ratio = ratio_of(a, b)
    return Change(name=name, a=a, b=b, ratio=ratio, verdict=_verdict(ratio))


def _verdict(ratio: Estimate | None) -> Verdict:
    if ratio is None:
        return "not measured"
    if ratio.low is None or ratio.high is None:
        return "no interval"
    if ratio.low > 1:
        return "higher"
    return "lower" if ratio.high < 1 else "no difference shown"


def _differences(a: Profile, b: Profile) -> Iterable[Difference]:
    """What differs, by the rules that decide whether a profile fits a machine."""
    facts = MachineFacts(
        model=_known(b.match.model.to_facts()),
        device=_known(b.match.device.to_facts()),
        runtime=_known(b.match.runtime.to_facts()),
        backend=b.backend,
    )
    sampling = _known(b.match.sampling.to_facts())
    for finding in match_profile(a, facts, sampling=sampling):
        if finding.expected is None and finding.found is None:
            continue
        yield Difference(
            field=finding.field,
            a=fact(finding.field, finding.expected),
            b=fact(finding.field, finding.found),
            is_decisive=finding.level == "hard" or finding.field.startswith(_DECISIVE),
        )
    yield from _half_known("model", a.match.model.to_facts(), b.match.model.to_facts())
    yield from _half_known("device", a.match.device.to_facts(), b.match.device.to_facts())
    yield from _listed("workload", _workload(a), _workload(b), _WORKLOAD_FACTS)
    yield from _listed("protocol", _protocol(a), _protocol(b), ("id",))


def _half_known(section: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterable[Difference]:
    """Facts that only one of the two recorded: whether they differ cannot be told."""
    for key in dict.fromkeys([*a, *b]):
        one, other = a.get(key), b.get(key)
        if (one is None) != (other is None) and WILDCARD not in (one, other):
            yield Difference(
                field=f"{section}.{key}", a=fact(key, one), b=fact(key, other), is_decisive=False
            )


def _listed(
    section: str, a: Mapping[str, Any], b: Mapping[str, Any], keys: Sequence[str]
) -> Iterable[Difference]:
    for key in keys:
        if a.get(key) != b.get(key):
            yield Difference(
                field=f"{section}.{key}",
                a=fact(key, a.get(key)),
                b=fact(key, b.get(key)),
                is_decisive=True,
            )


def _workload(profile: Profile) -> dict[str, Any]:
    return profile.workload.to_facts() if profile.workload else {}


def _protocol(profile: Profile) -> dict[str, Any]:
    return profile.protocol.to_facts() if profile.protocol else {}


def _known(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts that can differ: what is unknown or matches all cannot."""
    return {key: value for key, value in facts.items() if value not in (None, WILDCARD)}


def _figure(name: str, value: Estimate | None) -> str:
    if value is None:
        return UNKNOWN
    return times(value) if name.startswith("speed-up") else estimate(value)


def _plain(value: Estimate | None) -> dict[str, Any] | None:
    return value.model_dump(mode="json") if value is not None else None
