"""A run's evidence on disk: one row per outcome, and the packed file beside a profile.

The packed file is an NPZ (`vegas_runtime.record_arrays`): a header with the plan, then the rows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from vegas_runtime.errors import StorageError
from vegas_runtime.record_arrays import read_arrays, write_arrays
from vegas_runtime.records import Run, read_json_lines
from vegas_tune.outcomes import Failed, Measured, Outcome
from vegas_tune.plan import Plan, Point
from vegas_tune.steady import Unsteady, steady_steps

RECORDS_NAME: Final = "records.npz"
# As profiles before it had them: the same rows as compressed JSON lines. Read, no longer written.
OLD_RECORDS_NAME: Final = "records.jsonl.z"
# Records of further (batch, context) cells of a profile.
CELL_RECORDS: Final = re.compile(r"records-b(\d+)-c(\d+)\.(?:npz|jsonl\.z)")
RECORDS_KIND: Final = "vegas-tune/records"
RECORDS_VERSION: Final = 1
RECORD_KIND: Final = "vegas-tune/measurement"
RECORD_VERSION: Final = 1


def records_name(artifacts: Iterable[str]) -> str | None:
    """Which of a profile's files holds its records; None when none does."""
    names = set(artifacts)
    return next((name for name in (RECORDS_NAME, OLD_RECORDS_NAME) if name in names), None)


def find_records(folder: Path) -> Path:
    """The records in a profile's folder, where they would be when there are none."""
    old = folder / OLD_RECORDS_NAME
    new = folder / RECORDS_NAME
    return old if old.exists() and not new.exists() else new


def cell_records_name(batch: int, context: int) -> str:
    """File name of a further cell's records."""
    return f"records-b{batch}-c{context}.npz"


def outcome_to_row(outcome: Outcome) -> dict[str, Any]:
    """Plain values of an outcome, as JSON knows them."""
    row: dict[str, Any] = {
        "kind": RECORD_KIND,
        "version": RECORD_VERSION,
        "point": outcome.point.to_dict(),
        "attempt": outcome.attempt,
        "cost_s": outcome.cost_s,
    }
    if outcome.where:
        row["where"] = outcome.where
    if outcome.telemetry is not None:
        row["telemetry"] = dict(outcome.telemetry)
    if outcome.load_s:
        row["load_s"] = outcome.load_s
    if isinstance(outcome, Measured):
        return row | {"run": outcome.run.to_dict()}
    return row | {"failure": {"kind": outcome.kind, "reason": outcome.reason}}


def outcome_from_row(row: Mapping[str, Any]) -> Outcome:
    """Inverse of `outcome_to_row`.

    Raises:
        StorageError: the row is of another kind or damaged.
    """
    try:
        if (row["kind"], row["version"]) != (RECORD_KIND, RECORD_VERSION):
            raise StorageError(
                f"a record is of kind {row['kind']!r} version {row['version']!r}; this release "
                f"reads {RECORD_KIND!r} version {RECORD_VERSION}."
            )
        common: dict[str, Any] = {
            "point": Point.from_dict(row["point"]),
            "attempt": int(row["attempt"]),
            "cost_s": float(row["cost_s"]),
            "where": str(row.get("where", "")),
            "telemetry": row.get("telemetry"),
            "load_s": float(row.get("load_s", 0.0)),
        }
        if "failure" in row:
            failure = row["failure"]
            return Failed(**common, kind=str(failure["kind"]), reason=str(failure["reason"]))
        outcome = Measured(**common, run=Run.from_dict(row["run"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(f"a record is damaged: {type(error).__name__} {error}.") from error
    if isinstance(steady_steps(outcome.run), Unsteady):
        raise StorageError(f"the record of {outcome.point.key} is damaged: it holds no figure.")
    return outcome


def pack_records(path: Path, plan: Plan, outcomes: Iterable[Outcome]) -> str:
    """Write a plan and the outcomes of its run as one file; see `unpack_records`.

    Args:
        path: where to.
        plan: the plan.
        outcomes: every outcome, in any order.

    Returns:
        SHA-256 of the file.

    Raises:
        StorageError: it cannot be written.
    """
    ordered = sorted(outcomes, key=lambda outcome: (outcome.point.key, outcome.attempt))
    header = {"kind": RECORDS_KIND, "version": RECORDS_VERSION, "plan": plan.to_dict()}
    write_arrays(path, [header, *(outcome_to_row(outcome) for outcome in ordered)])
    return hashlib.sha256(path.read_bytes()).hexdigest()


def unpack_records(path: Path) -> tuple[Plan, list[Outcome]]:
    """Read what `pack_records` wrote.

    Raises:
        StorageError: the file is missing, damaged, or not of this kind.
    """
    is_old = path.name.endswith(".jsonl.z")
    rows = read_json_lines(path) if is_old else iter(read_arrays(path))
    header = next(rows, {})
    if (header.get("kind"), header.get("version")) != (RECORDS_KIND, RECORDS_VERSION):
        raise StorageError(f"{path} is not a file of records that this release reads.")
    try:
        plan = Plan.from_dict(header["plan"])
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"the plan in {path} is damaged: {error}.") from error
    return plan, [outcome_from_row(row) for row in rows]
