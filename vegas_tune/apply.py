"""Use a profile: does it fit this machine, and what is vLLM told (`render`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from vegas_runtime.engine.loading import resolve_model
from vegas_runtime.errors import ProfileMismatchError
from vegas_runtime.machine import device_facts, runtime_facts
from vegas_runtime.profile import WILDCARD, Profile
from vegas_runtime.protocol import EngineInfo
from vegas_tune.render import FORMATS, batch_schedule, one_line, render, serving_plan

__all__ = [
    "FORMATS",
    "MachineFacts",
    "MatchFinding",
    "batch_schedule",
    "machine_facts",
    "match_profile",
    "raise_on_hard",
    "render",
    "serving_plan",
]

Level = Literal["hard", "soft", "info"]

# What another value means for a setting: `hard` that it was measured for something else, `soft`
# that its speed-up may differ. Facts not named here, and those under `other`, are soft.
_LEVELS: Final[Mapping[str, Level]] = {
    "model.id": "hard",
    "model.config_sha256": "hard",
    "model.dtype": "hard",
    "model.quant": "hard",
    "model.num_layers": "hard",
    "model.num_query_heads": "hard",
    "model.num_kv_heads": "hard",
    "model.head_dim": "hard",
    "device.kind": "hard",
    "device.class": "hard",
    "device.sm": "hard",
    "device.tp": "hard",
}
# Reported sizes and limits of equal devices differ by what firmware and kernel keep.
_RELATIVE_TOLERANCE: Final = {"device.memory_gib": 0.05, "device.power_limit_w": 0.01}


@dataclass(frozen=True, kw_only=True)
class MatchFinding:
    """One difference between a profile and a machine.

    Attributes:
        level: `hard` refuses, `soft` warns, `info` says what could not be compared.
        field: dotted place in the profile's `match` section, or a whole section.
        expected: what the profile says; None when it does not matter.
        found: what is here; None when it is not known.
        message: one line for the user.
    """

    level: Level
    field: str
    expected: Any
    found: Any
    message: str


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What is known without opening an engine; the same sections as `EngineInfo`."""

    device: Mapping[str, Any]
    runtime: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict)
    backend: str | None = None


def machine_facts(profile: Profile, *, model: str | None = None) -> MachineFacts:
    """This machine's facts, for the kind of device the profile is for.

    Args:
        profile: decides whether CPU or GPU is described.
        model: alias, id or path of the model that would be served, when the user named one. What
            is in a folder is not looked at, so it is not compared.

    Raises:
        ModelError: `model` names nothing.
    """
    source = resolve_model(model) if model is not None else None
    device = device_facts("cpu" if profile.match.device.kind == "cpu" else None)
    return MachineFacts(
        device=device,
        runtime=runtime_facts(device["kind"]),
        model={"id": source.id} if source is not None and source.kind != "path" else {},
    )


def match_profile(
    profile: Profile,
    facts: EngineInfo | MachineFacts,
    *,
    sampling: Mapping[str, Any] | None = None,
) -> list[MatchFinding]:
    """Compare what a profile was measured on with what is here.

    A fact that one side does not know is not compared, and said so; `"*"` matches all.

    Args:
        profile: the profile; its `match` section is what is compared.
        facts: a running engine's, or this machine's.
        sampling: how tokens will be drawn, in `SamplingConfig`'s terms, when known.

    Returns:
        Findings, hard ones first; empty when everything was compared and is equal.
    """
    match = profile.match
    findings = _model_findings(match.model.to_facts(), facts.model)
    findings += _device_findings(match.device.to_facts(), facts.device)
    findings += _section_findings("runtime", match.runtime.to_facts(), facts.runtime)
    if sampling is not None:
        findings += _section_findings("sampling", match.sampling.to_facts(), sampling)
    backends = {facts.backend, profile.backend} - {None}
    # A replay stands for the engine that was recorded.
    if len(backends) > 1 and "replay" not in backends:
        findings.append(_difference("backend", profile.backend, facts.backend, level="soft"))
    order: tuple[Level, ...] = ("hard", "soft", "info")
    return sorted(findings, key=lambda finding: order.index(finding.level))


def raise_on_hard(findings: Iterable[MatchFinding]) -> None:
    """Refuse a profile that was measured for something else.

    Raises:
        ProfileMismatchError: at least one finding is hard; the message lists all that are.
    """
    hard = [finding for finding in findings if finding.level == "hard"]
    if hard:
        raise ProfileMismatchError(
            "the profile was measured for something else, so its setting may slow this down: "
            + "; ".join(finding.message for finding in hard)
            + ".",
            hint='Tune here with `vegas-tune sweep`. To use it all the same, write "*" for what '
            "must not matter, with `profile_id: unsealed` and `status: draft`.",
        )


def _model_findings(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[MatchFinding]:
    if not found:
        return [_not_compared("model", "no model was opened")]
    findings = _section_findings("model", expected, found)
    config = expected.get("config_sha256")
    if config is None or config != found.get("config_sha256"):
        return findings
    # The same configuration under another name is a local copy or a rename.
    return [
        _difference("model.id", f.expected, f.found, level="info") if f.field == "model.id" else f
        for f in findings
    ]


def _device_findings(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[MatchFinding]:
    findings = _section_findings("device", expected, found)
    kind = [finding for finding in findings if finding.field == "device.kind"]
    # Between a CPU and a GPU everything else differs as well, and says nothing new.
    if any(finding.level == "hard" for finding in kind):
        return kind
    needed, count = expected.get("tp"), found.get("count")
    if "tp" not in found and isinstance(needed, int) and isinstance(count, int) and count < needed:
        findings.append(_difference("device.tp", needed, f"at most {count}"))
    return findings


def _section_findings(
    section: str, expected: Mapping[str, Any], found: Mapping[str, Any]
) -> list[MatchFinding]:
    findings: list[MatchFinding] = []
    unknown: list[str] = []
    for key, wanted in expected.items():
        if wanted is None or wanted == WILDCARD:
            continue
        name, actual = f"{section}.{key}", found.get(key)
        if actual is None:
            unknown.append(key)
        elif not _is_same(name, wanted, actual):
            findings.append(_difference(name, wanted, actual, level=_level(name, wanted, actual)))
    if unknown:
        findings.append(_not_compared(section, f"not known here: {', '.join(unknown)}"))
    return findings


def _level(name: str, wanted: Any, actual: Any) -> Level:
    if name == "device.sm" and str(wanted).split(".")[0] == str(actual).split(".")[0]:
        return "soft"
    return _LEVELS.get(name, "soft")


def _is_same(name: str, wanted: Any, actual: Any) -> bool:
    tolerance = _RELATIVE_TOLERANCE.get(name)
    if tolerance is not None and not isinstance(wanted, str) and not isinstance(actual, str):
        return bool(math.isclose(wanted, actual, rel_tol=tolerance))
    if name == "device.count" and isinstance(wanted, int) and isinstance(actual, int):
        # More devices than were used change nothing.
        return actual >= wanted
    return bool(_normal(name, wanted) == _normal(name, actual))


def _normal(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if name == "device.class":
        # One card has two spellings: "NVIDIA H200" and "NVIDIA_H200", at times without the maker.
        return value.replace("_", " ").casefold().removeprefix("nvidia ").strip()
    if name == "model.dtype":
        return value.removeprefix("torch.")
    if name.startswith("runtime."):
        # "2.13.0+cpu" and "2.13.0" are builds of one release.
        return value.split("+")[0]
    return value


def _difference(
    name: str, expected: Any, found: Any, *, level: Level | None = None
) -> MatchFinding:
    return MatchFinding(
        level=level or _LEVELS.get(name, "soft"),
        field=name,
        expected=expected,
        found=found,
        message=f"`{name}` is {one_line(found)} here and {one_line(expected)} in the profile",
    )


def _not_compared(section: str, why: str) -> MatchFinding:
    return MatchFinding(
        level="info",
        field=section,
        expected=None,
        found=None,
        message=f"`{section}` was not fully compared: {why}",
    )
