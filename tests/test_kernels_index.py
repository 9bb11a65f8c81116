"""The kernels' index logic (csrc/include/schedule.h), compiled for the CPU, by properties."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vegas_runtime.kernels import build, implementations, paged

_SHIM = """
#include "include/schedule.h"
using namespace vegas;
extern "C" {
int units_verify(int n, int q, int w) { return verify_units(n, q, w); }
int units_sparse(int c, int t, int n) { return sparse_units(c, t, n); }
int slice(int total, int grid) { return slice_units(total, grid); }
int query_of(int order, int queries) { return row_to_query(order, queries); }
int position(int t) { return exact_position(t); }
int encode(uint32_t bits) { return encode_score(bits); }
uint32_t decode(uint32_t code) { return decode_score(code); }
int kept(int budget, int n, int forced, int c) { return entries_kept(budget, n, forced, c); }
}
"""


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The header's functions, called from Python."""
    folder, compiler = build.source_dir(), shutil.which("g++")
    if folder is None or compiler is None:
        pytest.skip("needs the sources and g++")
    scratch = tmp_path_factory.mktemp("index")
    source, library = scratch / "shim.cpp", scratch / "shim.so"
    source.write_text(_SHIM)
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{folder}"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.encode.argtypes = [ctypes.c_uint32]
    loaded.decode.restype = ctypes.c_uint32
    return loaded


@given(
    items=st.lists(st.integers(0, 3000), min_size=1, max_size=40),
    heads=st.integers(1, 8),
    grid=st.integers(1, 300),
)
@settings(max_examples=200, deadline=None)
def test_every_unit_is_done_once_and_blocks_write_two_partials(
    header: ctypes.CDLL, items: list[int], heads: int, grid: int
) -> None:
    """Equal slices cover the flat numbering; an item's parts are consecutive blocks."""
    flat = [units for units in items for _ in range(heads)]
    total = sum(flat)
    size = header.slice(total, grid)
    assert size * grid >= total
    partials: dict[int, list[int]] = {}
    covered = 0
    for block in range(grid):
        begin, end = min(block * size, total), min((block + 1) * size, total)
        covered += end - begin
        start = 0
        for units in flat:
            low, high = max(begin, start), min(end, start + units)
            if low < high and (low > start or high < start + units):
                slot = 1 if low == start else 0
                partials.setdefault(block, []).append(slot)
                # The merge finds the writer of this part by dividing.
                first = start // size
                assert (slot == 1) == (block == first)
                assert first <= block <= (start + units - 1) // size
            start += units
    assert covered == total
    for slots in partials.values():
        assert len(slots) == len(set(slots)) <= 2


@given(
    length=st.integers(0, 300_000), queries=st.integers(0, 17), window=st.sampled_from([0, 5, 128])
)
@settings(max_examples=200, deadline=None)
def test_units_are_the_references(
    header: ctypes.CDLL, length: int, queries: int, window: int
) -> None:
    length = max(length, queries)
    prefix = torch.zeros(2, dtype=torch.int32)
    starts = torch.tensor([0, queries], dtype=torch.int32)
    lens = torch.tensor([length], dtype=torch.int32)
    implementations.build_schedule(lens, starts, None, None, window, prefix)
    assert header.units_verify(length, queries, window) == int(prefix[1])
    if queries > 0:
        first = max(0, length - queries - window + 1) if window else 0
        assert int(prefix[1]) * 64 >= length - first > (int(prefix[1]) - 2) * 64


@given(length=st.integers(0, 50_000), tail=st.integers(0, 50_000), count=st.integers(0, 9_000))
@settings(max_examples=200, deadline=None)
def test_sparse_units_are_the_references(
    header: ctypes.CDLL, length: int, tail: int, count: int
) -> None:
    prefix = torch.zeros(2, dtype=torch.int32)
    arguments = [torch.tensor([n], dtype=torch.int32) for n in (length, count, tail)]
    implementations.build_schedule(arguments[0], None, arguments[1], arguments[2], 0, prefix)
    assert header.units_sparse(count, tail, length) == int(prefix[1])


@pytest.mark.parametrize("queries", range(1, 18))
def test_row_order_is_a_permutation_with_first_and_last_in_front(
    header: ctypes.CDLL, queries: int
) -> None:
    order = [header.query_of(i, queries) for i in range(queries)]
    assert sorted(order) == list(range(queries))
    assert order == paged.packed_queries(queries)


@given(
    budget=st.integers(-5, 2**31 - 1),
    candidates=st.integers(0, 60),
    forced=st.integers(0, 4),
    capacity=st.integers(8, 64),
)
@settings(max_examples=200, deadline=None)
def test_kept_entries_are_the_references(
    header: ctypes.CDLL, budget: int, candidates: int, forced: int, capacity: int
) -> None:
    counts = torch.zeros(1, dtype=torch.int32)
    implementations.select(
        torch.zeros(1, 1, 1, 64, dtype=torch.uint8),
        *(torch.tensor([n], dtype=torch.int32) for n in (candidates, budget)),
        *(forced, 0, None, 16, None, None, None, torch.zeros(0, dtype=torch.int16)),
        *(torch.zeros(1, 1, 1, capacity, dtype=torch.int32), counts),
    )
    assert header.kept(budget, candidates, min(forced, candidates), capacity) == int(counts[0])


@given(st.floats(0, 2.0**127, width=32))
@settings(max_examples=300, deadline=None)
def test_score_code_is_the_references(header: ctypes.CDLL, weight: float) -> None:
    bits = int(torch.tensor(weight).view(torch.int32))
    code = header.encode(bits)
    assert code == int(paged.encode_scores(torch.tensor([weight]))[0])
    back = torch.tensor(code, dtype=torch.uint8)
    assert header.decode(code) == int(paged.decode_scores(back).view(torch.int32))


def test_exact_positions_are_a_permutation_of_the_unit(header: ctypes.CDLL) -> None:
    positions = [header.position(t) for t in range(64)]
    assert sorted(positions) == list(range(64))
    assert positions == paged.exact_positions(torch.device("cpu")).tolist()


def test_library_sources_are_all_compiled() -> None:
    folder = build.source_dir()
    assert folder is not None
    named = {path.name for path in build.sources(folder)}
    assert {"bindings.cpp", "select.cu", "schedule.cu", "sparse_attention.cu"} <= named
    includes = [path for path in folder.rglob("*.cu*") if "torch/" in path.read_text()]
    assert not includes, "only bindings.cpp may include torch headers"


def test_resource_report_is_read() -> None:
    report = (
        "ptxas info    : Compiling entry function '_Zk' for 'sm_90a'\n"
        "    0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 16 barriers\n"
    )
    wanted = {"_Zk@sm_90a": {"stack_bytes": 0, "spill_bytes": 8, "registers": 168}}
    assert build.resource_usage(report) == wanted


def test_build_key_changes_with_the_sources(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("one")
    before = build.source_hash(tmp_path)
    (tmp_path / "a.cu").write_text("two")
    assert build.source_hash(tmp_path) != before
    assert build.source_hash(tmp_path, ("80",)) != build.source_hash(tmp_path)
