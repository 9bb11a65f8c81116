"""Recorded passes as one NPZ: what goes in comes out, anyone can read it, damage is named."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_records import ROWS, RUN, STEP

from vegas_runtime.errors import StorageError
from vegas_runtime.record_arrays import read_arrays, write_arrays
from vegas_runtime.records import Run

PREFILL = replace(STEP, kind="prefill", request_ids=(), num_draft_tokens=(),
                  num_accepted_tokens=(), num_emitted_tokens=())  # fmt: skip
MIXED = replace(RUN, steps=(PREFILL, STEP, replace(STEP, verify_s=0.123457)))


def _plain(rows: list[dict[str, Any]]) -> Any:
    return json.loads(json.dumps(rows))


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([], id="none"),
        pytest.param(ROWS, id="no-pass"),
        pytest.param([{"run": RUN.to_dict()}], id="one-pass"),
        pytest.param(
            [ROWS[1], {"run": RUN.to_dict(), "at": 3}, {"run": MIXED.to_dict()}, {"failure": "x"}],
            id="mixed",
        ),
        pytest.param([{"run": replace(RUN, steps=()).to_dict()}], id="no-steps"),
    ],
)
def test_rows_read_back(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = tmp_path / "records.npz"
    write_arrays(path, iter(rows))
    assert read_arrays(path) == _plain(rows)


def test_a_pass_reads_back_exactly(tmp_path: Path) -> None:
    write_arrays(tmp_path / "records.npz", [{"run": MIXED.to_dict()}])
    (row,) = read_arrays(tmp_path / "records.npz")
    assert Run.from_dict(row["run"]) == MIXED


def test_numpy_alone_finds_the_columns(tmp_path: Path) -> None:
    write_arrays(tmp_path / "records.npz", [{"run": RUN.to_dict()}, {}, {"run": MIXED.to_dict()}])
    with np.load(tmp_path / "records.npz") as file:
        assert file["num_steps"].tolist() == [2, -1, 3]
        assert file["verify_s"].tolist() == [0.5, 0.5, 0.5, 0.5, 0.123457]
        assert file["is_prefill"].tolist() == [False, False, True, False, False]
        assert file["num_entries"].tolist() == [2, 2, 0, 2, 2]
        assert file["num_accepted_tokens"].tolist() == [4, 0] * 4


def test_equal_rows_make_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_arrays(tmp_path / name, [{"run": RUN.to_dict()}])
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"records\.npz does not exist"):
        read_arrays(tmp_path / "records.npz")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"PK\x03\x04", id="hardly-begun"),
        pytest.param(b'{"a": 1}\n', id="text"),
        pytest.param(b"\x80\x04N.", id="pickle"),
    ],
)
def test_another_kind_of_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "records.npz").write_bytes(content)
    with pytest.raises(StorageError, match=r"records\.npz cannot be read"):
        read_arrays(tmp_path / "records.npz")


def test_a_file_cut_off_anywhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "records.npz"
    write_arrays(path, [{"run": MIXED.to_dict()}])
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(StorageError, match="cannot be read"):
            read_arrays(path)


def _with(arrays: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**arrays, **{name: np.array(value) for name, value in changes.items()}}


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda a: _with(a, num_steps=[2]), id="a-step-too-many"),
        pytest.param(lambda a: _with(a, num_steps=[3, 0]), id="a-row-too-many"),
        pytest.param(lambda a: _with(a, num_entries=[0, 2, 3]), id="an-entry-too-few"),
        pytest.param(lambda a: _with(a, verify_s=[0.5]), id="a-short-column"),
        pytest.param(lambda a: {k: v for k, v in a.items() if k != "draft_s"}, id="no-column"),
        pytest.param(lambda a: _with(a, document=np.array([1, 2], dtype=np.uint8)), id="no-json"),
    ],
)
def test_columns_that_do_not_belong_together_are_damage(
    tmp_path: Path, damage: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    path = tmp_path / "records.npz"
    write_arrays(path, [{"run": MIXED.to_dict()}])
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **damage(arrays))
    path.write_bytes(buffer.getvalue())
    with pytest.raises(StorageError, match="cannot be read"):
        read_arrays(path)


def test_a_full_disk_leaves_no_half_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        write_arrays(tmp_path / "missing" / "records.npz", ROWS)
