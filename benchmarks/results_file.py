"""Published figures: one JSON file per topic, rows replaced by claim and case, never by hand."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vegas_runtime.machine import device_facts, runtime_facts

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure.

    Attributes:
        claim: what is measured.
        case: at which setting.
        value: point estimate.
        low: lower end of the 95 % interval, or None.
        high: upper end, or None.
        unit: of the value.
    """

    claim: str
    case: str
    value: float
    low: float | None
    high: float | None
    unit: str


def write_rows(
    name: str,
    rows: Sequence[Row],
    *,
    device: str = "cpu",
    facts: Mapping[str, Any] | None = None,
    folder: Path = RESULTS,
    stale: Callable[[Mapping[str, Any]], bool] = lambda row: False,
) -> Path:
    """Merge rows into `<folder>/<name>.json`.

    Args:
        name: topic.
        rows: figures; a row of the same claim and case is replaced.
        device: `cpu` or `cuda`.
        facts: `machine` and `versions` of where the rows were measured; of here by default.
        folder: where the file lies; one that is there is added to.
        stale: whether a row that is there goes, though none of the new ones is of its case: where
            cases name what a run chose.

    Returns:
        The file written.
    """
    path = folder / f"{name}.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    own = {(row.claim, row.case) for row in rows}
    kept = [row for row in before if (row["claim"], row["case"]) not in own and not stale(row)]
    facts = facts or {"machine": device_facts(device), "versions": runtime_facts()}
    document = {
        "machine": facts["machine"],
        "versions": facts["versions"],
        "command": _command(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "rows": kept + [asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def _command(argv: Sequence[str]) -> str:
    """How the running script was started; of a folder only the name, which is what others have."""
    arguments = [Path(one).name if Path(one).is_absolute() else one for one in argv[1:]]
    return shlex.join(["python", "-m", f"benchmarks.{Path(argv[0]).stem}", *arguments])
