"""Measurements as one file each, whole or absent: what a comparison keeps after tuning."""

from __future__ import annotations

from pathlib import Path

from vegas_runtime.errors import StorageError
from vegas_runtime.records import read_json_lines, write_json_lines
from vegas_tune.evidence import outcome_from_row, outcome_to_row
from vegas_tune.outcomes import Outcome
from vegas_tune.plan import Point


class RecordFolder:
    """A `laboratory.Store` of record files, without a journal.

    Args:
        path: the folder; made when absent.

    Raises:
        StorageError: the folder cannot be used, or a record in it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[tuple[str, int], Outcome] = {}
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot use {path}: {error.strerror or error}; measurements would be lost.",
                hint="Choose another folder with --run-dir.",
            ) from error
        for file in sorted(path.glob("*.z")):
            try:
                rows = list(read_json_lines(file))
                outcome = outcome_from_row(rows[0] if len(rows) == 1 else {})
            except StorageError as error:
                raise StorageError(
                    f"{file} cannot be used: {error.message}",
                    hint="Delete this file to measure the point again.",
                ) from error
            self._outcomes[outcome.point.key, outcome.attempt] = outcome

    def find(self, point: Point, attempt: int) -> Outcome | None:
        """See `laboratory.Store`; a record of another point of the same name is not it."""
        found = self._outcomes.get((point.key, attempt))
        return found if found is not None and found.point == point else None

    def begin(self, point: Point, attempt: int) -> None:
        """See `laboratory.Store`."""

    def finish(self, outcome: Outcome) -> None:
        """See `laboratory.Store`.

        Raises:
            StorageError: the folder is full or cannot be written.
        """
        key = (outcome.point.key, outcome.attempt)
        write_json_lines(self._path / f"{key[0]}.a{key[1]}.z", [outcome_to_row(outcome)])
        self._outcomes[key] = outcome

    def abandon(self, point: Point, attempt: int, kind: str) -> None:
        """See `laboratory.Store`."""
