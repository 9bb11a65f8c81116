"""Many recorded passes as one NPZ file: steps in columns, everything else as one JSON text.

`numpy.load` opens it without this package. With R rows, S steps of all passes in order and N
entries (a request's part in a step) of all steps in order:

    document            [bytes] uint8, JSON: the rows, each pass without its steps
    num_steps           [R] int64, steps of the row's pass; -1 for a row without one
    is_prefill          [S] bool
    num_running         [S] int64        num_waiting          [S] int64
    draft_s, select_s, verify_s, other_s [S] float64, seconds
    num_entries         [S] int64
    request_ids         [N] int64        num_draft_tokens     [N] int64
    num_accepted_tokens [N] int64        num_emitted_tokens   [N] int64
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vegas_runtime.errors import StorageError
from vegas_runtime.records import replace_file

COUNTS: Final = ("num_running", "num_waiting")
TIMES: Final = ("draft_s", "select_s", "verify_s", "other_s")
ENTRIES: Final = ("request_ids", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens")

Arrays = Mapping[str, NDArray[Any]]


def write_arrays(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows atomically; equal rows make equal bytes.

    Args:
        path: where to.
        rows: plain values; what stands under `run` is `Run.to_dict()`.

    Raises:
        StorageError: the folder is full or cannot be written.
    """
    document, num_steps, steps = [], [], []
    for row in rows:
        run = row.get("run")
        if run is None:
            document.append(dict(row))
            num_steps.append(-1)
            continue
        document.append({**row, "run": {k: v for k, v in run.items() if k != "steps"}})
        num_steps.append(len(run["steps"]))
        steps += run["steps"]
    text = json.dumps(document, separators=(",", ":")).encode()
    arrays: dict[str, NDArray[Any]] = {
        "document": np.frombuffer(text, dtype=np.uint8),
        "num_steps": np.array(num_steps, dtype=np.int64),
        "is_prefill": np.array([step["kind"] == "prefill" for step in steps], dtype=bool),
        "num_entries": np.array([len(step["request_ids"]) for step in steps], dtype=np.int64),
    }
    for name in COUNTS:
        arrays[name] = np.array([step[name] for step in steps], dtype=np.int64)
    for name in TIMES:
        arrays[name] = np.array([step[name] for step in steps], dtype=np.float64)
    for name in ENTRIES:
        arrays[name] = np.array([each for step in steps for each in step[name]], dtype=np.int64)
    buffer = io.BytesIO()
    # Members of a zip file written this way carry a fixed date.
    # Typed as if an array could be called `allow_pickle`.
    save: Any = np.savez_compressed
    save(buffer, **arrays)
    replace_file(path, buffer.getvalue())


def read_arrays(path: Path) -> list[dict[str, Any]]:
    """Read what `write_arrays` wrote; tuples come back as lists.

    Raises:
        StorageError: the file is missing, cut off, damaged, or not of this kind.
    """
    try:
        # Nothing in it is executed: no pickles.
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return _rows(arrays)
    except FileNotFoundError as error:
        raise StorageError(f"recorded run {path} does not exist.") from error
    except (
        OSError, EOFError, ValueError, KeyError, TypeError, AttributeError,
        zipfile.BadZipFile, zlib.error,
    ) as error:  # fmt: skip
        raise StorageError(f"recorded run {path} cannot be read: {error}.") from error


def _rows(arrays: Arrays) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(arrays["document"].tobytes())
    counts = arrays["num_steps"].tolist()
    steps = _steps(arrays)
    if len(rows) != len(counts) or sum(max(count, 0) for count in counts) != len(steps):
        raise ValueError(f"{len(rows)} rows and {len(steps)} steps do not belong together")
    at = 0
    for row, count in zip(rows, counts, strict=True):
        if count >= 0:
            row["run"]["steps"] = steps[at : at + count]
            at += count
    return rows


def _steps(arrays: Arrays) -> list[dict[str, Any]]:
    """Every step as `StepRecord.to_dict` gives it, lists for tuples."""
    sizes = arrays["num_entries"]
    ends = np.cumsum(sizes).tolist()
    starts = [0, *ends[:-1]]
    entries = {name: arrays[name].tolist() for name in ENTRIES}
    if any(len(column) != (ends[-1] if ends else 0) for column in entries.values()):
        raise ValueError("entries and steps do not belong together")
    columns: dict[str, list[Any]] = {
        "kind": ["prefill" if prefill else "decode" for prefill in arrays["is_prefill"].tolist()],
        **{name: arrays[name].tolist() for name in (*COUNTS, *TIMES)},
        **{
            name: [column[start:end] for start, end in zip(starts, ends, strict=False)]
            for name, column in entries.items()
        },
    }
    names = list(columns)
    return [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]
