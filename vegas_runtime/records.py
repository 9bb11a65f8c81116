"""What every engine yields: one record per engine step. Never a bare number."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, Self

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import StorageError

StepKind = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One engine step: what ran, what came out, how long each phase took.

    Attributes:
        kind: `prefill` when prompt text was processed in the step, else `decode`. What is computed
            again after a full prefix hit (vLLM: up to one KV block) is part of decoding.
        num_running: requests that held a place in the batch.
        num_waiting: requests ready to take a free place.
        request_ids: per request with a part in the step, its index in the block.
        num_draft_tokens: per running request, tokens drafted.
        num_accepted_tokens: per running request, drafts accepted.
        num_emitted_tokens: per running request, tokens added to its output.
        draft_s: drafting forward passes and draft sampling.
        select_s: choosing KV entries and gathering them.
        verify_s: the verification (or plain decoding) forward pass, collection included.
        other_s: sampling, acceptance, bookkeeping.
    """

    kind: StepKind
    num_running: int
    num_waiting: int
    request_ids: tuple[int, ...]
    num_draft_tokens: tuple[int, ...]
    num_accepted_tokens: tuple[int, ...]
    num_emitted_tokens: tuple[int, ...]
    draft_s: float
    select_s: float
    verify_s: float
    other_s: float

    @property
    def duration_s(self) -> float:
        """Wall time of the step."""
        return self.draft_s + self.select_s + self.verify_s + self.other_s

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name; times rounded to the microsecond.

        Not `dataclasses.asdict`, which copies every number of every tuple: a pass has thousands.
        """
        values = {name: getattr(self, name) for name in _STEP_FIELDS}
        return values | {name: round(values[name], 6) for name in _PHASES}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`, lists read as tuples."""
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**plain)


_STEP_FIELDS: Final = tuple(field.name for field in fields(StepRecord))
_PHASES: Final = ("draft_s", "select_s", "verify_s", "other_s")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measured pass of an engine over one block of prompts at one setting.

    Attributes:
        config: the setting read back from the engine, not the one asked for.
        batch_size: requests the engine was meant to keep running.
        steps: in order of time.
        elapsed_s: wall time of the whole pass, restoring prefills included.
        outputs_sha256: hash over every request's output tokens; equal settings of a lossless
            method give equal hashes when greedy in float32.
        num_prompt_tokens: prompt tokens of the requests that started, where the engine has a
            prefix cache; else 0.
        num_cached_tokens: of them, those found in it.
    """

    config: SpeculationConfig
    batch_size: int
    steps: tuple[StepRecord, ...]
    elapsed_s: float
    outputs_sha256: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values; times rounded to the microsecond."""
        values: dict[str, Any] = {
            "config": self.config.to_dict(),
            "batch_size": self.batch_size,
            "steps": tuple(step.to_dict() for step in self.steps),
            "elapsed_s": round(self.elapsed_s, 6),
            "outputs_sha256": self.outputs_sha256,
        }
        if self.num_prompt_tokens:
            values["num_prompt_tokens"] = self.num_prompt_tokens
            values["num_cached_tokens"] = self.num_cached_tokens
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        return cls(
            config=SpeculationConfig.from_dict(values["config"]),
            batch_size=values["batch_size"],
            steps=tuple(StepRecord.from_dict(step) for step in values["steps"]),
            elapsed_s=values["elapsed_s"],
            outputs_sha256=values["outputs_sha256"],
            num_prompt_tokens=values.get("num_prompt_tokens", 0),
            num_cached_tokens=values.get("num_cached_tokens", 0),
        )


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as zlib-compressed JSON lines, atomically.

    Raises:
        StorageError: the folder is full or cannot be written.
    """
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    replace_file(path, zlib.compress(text.encode(), 9))


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read what `write_json_lines` wrote.

    Raises:
        StorageError: the file is missing, cut off, or not of this kind.
    """
    try:
        text = zlib.decompress(path.read_bytes()).decode()
    except FileNotFoundError as error:
        raise StorageError(f"recorded run {path} does not exist.") from error
    except (OSError, zlib.error, UnicodeDecodeError) as error:
        raise StorageError(f"recorded run {path} cannot be read: {error}.") from error
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise StorageError(
                f"recorded run {path} cannot be read: line {number} is not JSON: {error}."
            ) from error
        if not isinstance(row, dict):
            raise StorageError(f"recorded run {path} cannot be read: line {number} is no object.")
        yield row


def replace_file(path: Path, data: bytes) -> None:
    """Write a whole file or nothing: temporary file, flush to disk, rename.

    Raises:
        StorageError: the folder is full or cannot be written.
    """
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}.",
            hint="Free some space or choose another folder, then run the same command again.",
        ) from error
