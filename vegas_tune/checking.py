"""`check` from end to end: tier 1 without an engine, then tier 2 (and 3) on the engine at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vegas_runtime.backend import open_backend
from vegas_runtime.errors import EXIT_CODES, UsageError
from vegas_runtime.profile import WILDCARD, Profile, load_profile
from vegas_tune.apply import match_profile, raise_on_hard
from vegas_tune.gate import Status, Verdict, replay_decisions
from vegas_tune.request import parse_duration_s
from vegas_tune.workload import workload_from_description

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Check:
    """Every tier's verdict on one profile.

    Attributes:
        profile_id: of the profile.
        verdicts: in the order they were taken.
    """

    profile_id: str
    verdicts: tuple[Verdict, ...]

    @property
    def status(self) -> Status:
        """The worst verdict: regressed, then inconclusive, then ok."""
        found = {verdict.status for verdict in self.verdicts}
        if "regressed" in found:
            return "regressed"
        return "inconclusive" if "inconclusive" in found else "ok"

    @property
    def exit_code(self) -> int:
        """0, 3 or 6."""
        return EXIT_CODES[self.status]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "verdict": self.status,
            "profile_id": self.profile_id,
            "tiers": [verdict.to_dict() for verdict in self.verdicts],
        }

    def to_text(self, _: object = None) -> str:
        """One line per tier, then the verdict."""
        lines = [f"{v.tier:<10} {v.status:<12} {v.why}" for v in self.verdicts]
        return "\n".join([*lines, self.status])


def run(
    path: Path,
    *,
    replay_only: bool,
    speedup: bool,
    model: str | None,
    data: Path | None,
    budget: str,
    dtype: str,
    device: str,
    report: Report,
) -> Check:
    """Check a profile.

    Args:
        path: of the profile; its records lie beside it.
        replay_only: stop after tier 1.
        speedup: also run tier 3, on a device of the profile's class.
        model: where the model is, when not at the profile's id.
        data: the workload's file, for a profile tuned on one.
        budget: hard limit on the time of the tiers that measure.
        dtype: see `ReferenceEngine.open`; `auto` is the profile's own.
        device: see `ReferenceEngine.open`.
        report: told what takes long.

    Raises:
        ProfileInvalidError: it cannot be read.
        ProfileMismatchError: the engine at hand runs another model, dtype or device.
        WorkloadError: the recorded prompts cannot be made again here.
    """
    profile = load_profile(path)
    replayed = replay_decisions(profile, path.parent)
    if replay_only or replayed.status != "ok":
        return Check(profile_id=profile.profile_id, verdicts=(replayed,))
    return Check(
        profile_id=profile.profile_id,
        verdicts=(
            replayed,
            *_measure(
                profile,
                path.parent,
                speedup=speedup,
                model=model,
                data=data,
                budget_s=parse_duration_s(budget),
                dtype=dtype,
                device=device,
                report=report,
            ),
        ),
    )


def _measure(
    profile: Profile,
    folder: Path,
    *,
    speedup: bool,
    model: str | None,
    data: Path | None,
    budget_s: float,
    dtype: str,
    device: str,
    report: Report,
) -> list[Verdict]:
    from vegas_tune.recheck import check_acceptance, check_speedup

    recorded = profile.match.model
    name = model or recorded.id
    if name is None or name == WILDCARD or profile.workload is None:
        raise UsageError(
            "the profile does not say which model and text it was measured with, so acceptance "
            "cannot be measured again.",
            hint="Use --replay-only.",
        )
    if dtype == "auto" and recorded.dtype not in (None, WILDCARD):
        dtype = str(recorded.dtype)
    engine, reason = open_backend(
        "reference",
        model=name,
        max_num_speculative_tokens=_largest_gamma(profile),
        dtype=dtype,
        device=device,
        report=report,
    )
    report(f"backend: {reason}")
    try:
        findings = match_profile(profile, engine.info)
        # Acceptance hardly depends on the machine; only tier 3 needs the profile's own device.
        raise_on_hard(f for f in findings if speedup or not f.field.startswith("device."))
        workload = workload_from_description(
            profile.workload.to_facts(),
            engine.tokenizer,
            data,
            max_model_len=engine.info.model.get("max_model_len"),
        )
        verdicts = [check_acceptance(folder, engine, workload.blocks, budget_s=budget_s)]
        if speedup:
            verdicts.append(check_speedup(folder, engine, workload.blocks, budget_s=budget_s))
        return verdicts
    finally:
        engine.close()


def _largest_gamma(profile: Profile) -> int:
    points = (*profile.curves.gamma, *profile.curves.refine, *profile.curves.validation)
    drafted = [point.num_speculative_tokens for point in points]
    return max([profile.selected.default.num_speculative_tokens, *drafted])
