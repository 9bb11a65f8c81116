"""Does a profile still hold? Three tiers, three verdicts.

1. `replay_decisions`, here: no engine. The sweep runs again over the recorded measurements and
   must take the same decisions, byte for byte.
2. `recheck.check_acceptance`: any engine that runs the model. Accepted tokens, request by request,
   against the recorded ones: they hardly depend on the machine, so a loss is a fault in the code.
3. `recheck.check_speedup`: a device of the profile's class. The speed-up over plain decoding,
   measured side by side, against the recorded one; tokens per second are never compared.

A measured ratio is `regressed` when it is surely below 1 - margin, `ok` when it is surely above,
else `inconclusive`: more rounds are added until the plan's looks or the budget end.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from vegas_runtime.errors import BudgetSpentError, NoValidTrialError, StorageError
from vegas_runtime.profile import DecisionRecord, Profile
from vegas_tune.evidence import (
    CELL_RECORDS,
    RECORDS_NAME,
    find_records,
    records_name,
    unpack_records,
)
from vegas_tune.laboratory import RecordedLab
from vegas_tune.measure import Estimate
from vegas_tune.sweep import SweepResult, run_sweep

# Losses below this are not worth an alarm, however exactly they are known.
LEAST_MARGIN: Final = 0.03
# A margin of this many run-to-run deviations: noise of the size met while tuning is no alarm.
NOISE_MARGIN: Final = 2.0

Status = Literal["ok", "regressed", "inconclusive"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of one tier.

    Attributes:
        tier: `replay`, `acceptance` or `speedup`.
        status: `ok`, `regressed` or `inconclusive`.
        why: one sentence.
        ratio: measured over recorded, with its interval; None where nothing was compared.
        margin: loss that is put up with, a fraction; None where nothing was compared.
    """

    tier: Literal["replay", "acceptance", "speedup"]
    status: Status
    why: str
    ratio: Estimate | None = None
    margin: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        values: dict[str, Any] = {"tier": self.tier, "status": self.status, "why": self.why}
        if self.ratio is not None:
            values |= {"ratio": self.ratio.to_dict(), "margin": self.margin}
        return values


def judge(ratio: Estimate, margin: float) -> Status:
    """Three verdicts on a ratio of measured to recorded."""
    if ratio.high < 1 - margin:
        return "regressed"
    return "ok" if ratio.low > 1 - margin else "inconclusive"


# --------------------------------------------------------------------------- tier 1


def replay_decisions(profile: Profile, folder: Path) -> Verdict:
    """Run the sweep again over the records beside a profile.

    Args:
        profile: what was published.
        folder: where the profile and its records lie.

    Returns:
        `ok` when every decision comes out the same; `regressed` when one does not, or when the
        records are not those the profile rests on; `inconclusive` when there are none.
    """
    hashes = {artifact.name: artifact.sha256 for artifact in profile.artifacts}
    name = records_name(hashes)
    if name is None:
        return _replayed("inconclusive", f"the profile names no {RECORDS_NAME} to replay.")
    path = folder / name
    if not path.exists():
        return _replayed("inconclusive", f"{path} is not there; keep it beside the profile.")
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != hashes[name]:
            return _replayed(
                "regressed",
                f"{path} is not what the profile rests on (sha256 {found[:12]}, the profile says "
                f"{hashes[name][:12]}): it was changed or cut off.",
            )
        result = result_of(path)
    except (StorageError, NoValidTrialError, BudgetSpentError) as error:
        return _replayed("regressed", f"the records cannot be replayed: {error.message}")
    except OSError as error:
        return _replayed("inconclusive", f"{path} cannot be read: {error.strerror}.")
    difference = _first_difference(profile, result)
    if difference is not None:
        return _replayed("regressed", difference)
    cells, difference = _replay_cells(profile, folder)
    if difference is not None:
        return _replayed("regressed", difference)
    return _replayed(
        "ok",
        f"{len(result.decisions)} decisions over {len(result.outcomes)} recorded measurements "
        f"came out the same{f', and those of {cells} further cells' if cells else ''}.",
    )


def _replay_cells(profile: Profile, folder: Path) -> tuple[int, str | None]:
    """Replay the further (batch, context) cells: how many there are, and what differs."""
    count = 0
    for artifact in profile.artifacts:
        match = CELL_RECORDS.fullmatch(artifact.name)
        if match is None:
            continue
        count += 1
        batch, context = int(match[1]), int(match[2])
        try:
            if hashlib.sha256((folder / artifact.name).read_bytes()).hexdigest() != artifact.sha256:
                return count, f"{artifact.name} is not what the profile rests on: it was changed."
            result = result_of(folder / artifact.name)
        except (StorageError, NoValidTrialError, BudgetSpentError) as error:
            return count, f"{artifact.name} cannot be replayed: {error.message}"
        except OSError as error:
            return count, f"{artifact.name} cannot be read: {error.strerror}."
        held = [b.config for b in profile.selected.buckets if b.contains(batch, context)]
        found = [result.selected] if result.status == "validated" else []
        if held != found:
            return count, (
                f"the profile holds {held} for batch {batch} at context {context}, the records "
                f"lead to {found}."
            )
    return count, None


def recorded_result(folder: Path) -> SweepResult:
    """The sweep that the records in a folder are of.

    Raises:
        StorageError: they are missing, damaged or incomplete.
        NoValidTrialError: they hold nothing but failures.
    """
    return result_of(find_records(folder))


def result_of(path: Path, **rules: Any) -> SweepResult:
    """The sweep that a file of records is of, gone through once more; see `recorded_result`.

    Args:
        path: the records.
        **rules: fields of the plan to decide by instead.

    Raises:
        StorageError: by these rules it would have measured something else.
    """
    plan, outcomes = unpack_records(path)
    return run_sweep(replace(plan, **rules), RecordedLab(outcomes))


def _first_difference(profile: Profile, result: SweepResult) -> str | None:
    published = [_canonical(decision) for decision in profile.decisions]
    replayed = [
        _canonical(DecisionRecord.model_validate(decision.to_dict()))
        for decision in result.decisions
    ]
    for number, (old, new) in enumerate(zip(published, replayed, strict=False), start=1):
        if old != new:
            step, chosen = profile.decisions[number - 1].step, profile.decisions[number - 1].chosen
            again = result.decisions[number - 1].chosen
            return (
                f"decision {number} ({step}) is {json.dumps(chosen)} in the profile, the records "
                f"lead to {json.dumps(again)}."
                if chosen != again
                else f"decision {number} ({step}) has other figures in the profile than the "
                "records lead to."
            )
    if len(published) != len(replayed):
        return f"the profile holds {len(published)} decisions, the records lead to {len(replayed)}."
    if profile.selected.default != result.selected or profile.status != result.status:
        return (
            f"the profile selects {profile.selected.default} ({profile.status}), the records lead "
            f"to {result.selected} ({result.status})."
        )
    return None


def _canonical(decision: DecisionRecord) -> str:
    values = decision.model_dump(mode="json", exclude_none=True)
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def _replayed(status: Status, why: str) -> Verdict:
    return Verdict(tier="replay", status=status, why=why)
