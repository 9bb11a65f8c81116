from __future__ import annotations

import errno
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import StorageError
from vegas_runtime.records import (
    Run,
    StepRecord,
    read_json_lines,
    replace_file,
    write_json_lines,
)

STEP = StepRecord(
    kind="decode",
    num_running=2,
    num_waiting=1,
    request_ids=(0, 3),
    num_draft_tokens=(4, 4),
    num_accepted_tokens=(4, 0),
    num_emitted_tokens=(5, 1),
    draft_s=0.25,
    select_s=0.125,
    verify_s=0.5,
    other_s=0.0625,
)
RUN = Run(
    config=SpeculationConfig(num_speculative_tokens=4, sparsity_ratio=0.07, rows="all"),
    batch_size=2,
    steps=(STEP, STEP),
    elapsed_s=2.5,
    outputs_sha256="ab" * 32,
)
ROWS: list[dict[str, Any]] = [{"a": 1, "b": [1.5, None]}, {"text": "line\nbreak   ü"}, {}]


def test_duration_is_the_sum_of_the_phases() -> None:
    assert STEP.duration_s == 0.9375


def test_a_run_reads_back_from_plain_values() -> None:
    assert StepRecord.from_dict(STEP.to_dict()) == STEP
    assert Run.from_dict(RUN.to_dict()) == RUN
    assert Run.from_dict(json.loads(json.dumps(RUN.to_dict()))) == RUN


def test_times_are_kept_to_the_microsecond() -> None:
    step = StepRecord.from_dict(STEP.to_dict() | {"draft_s": 0.123456789})
    run = Run(config=RUN.config, batch_size=2, steps=(step,), elapsed_s=1.00000049)
    values = run.to_dict()
    assert values["steps"][0]["draft_s"] == 0.123457
    assert values["elapsed_s"] == 1.0
    assert Run.from_dict(values).to_dict() == values


@pytest.mark.parametrize("rows", [[], ROWS, ROWS * 1000])
def test_rows_read_back(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = tmp_path / "run.jsonl.z"
    write_json_lines(path, iter(rows))
    assert list(read_json_lines(path)) == rows


def test_equal_rows_make_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_json_lines(tmp_path / name, [RUN.to_dict()])
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.z"
    with pytest.raises(StorageError, match=f"{path} does not exist"):
        list(read_json_lines(path))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b'{"a": 1}\n', id="not-compressed"),
        pytest.param(zlib.compress(b'{"a": 1}\n' * 100)[:-5], id="cut-off"),
        pytest.param(zlib.compress(b"\xff\xfe\n"), id="not-text"),
        pytest.param(zlib.compress(b'{"a": 1}\n{"a":\n'), id="not-json"),
        pytest.param(zlib.compress(b"[1, 2]\n"), id="not-a-row"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.jsonl.z"
    path.write_bytes(content)
    with pytest.raises(StorageError, match=f"{path} cannot be read"):
        list(read_json_lines(path))


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o644
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("call", ["fsync", "replace", "chmod"])
def test_a_full_disk_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(StorageError, match=f"cannot write {path}: No space left") as caught:
        replace_file(path, b"new")
    assert "Free some space" in caught.value.hint
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


def test_a_folder_that_is_not_there_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "file"
    with pytest.raises(StorageError, match=f"cannot write {path}: No such file"):
        write_json_lines(path, ROWS)


def test_a_read_only_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    # Not by the folder's mode: the superuser may write anywhere.
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with pytest.raises(StorageError, match="Permission denied"):
        replace_file(tmp_path / "file", b"new")
