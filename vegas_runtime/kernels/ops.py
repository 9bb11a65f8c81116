"""Each kernel operation once: check arguments, then CUDA or the reference.

    build_schedule     once per step: how the work of all layers splits over the GPU
    verify_attention   verification over the paged cache; can collect scores in the same pass
    select             scores -> the k best entries per request, as slots or positions
    sparse_attention   one query per request over selected slots and the dense tail

All lengths live on the device and nothing is allocated or synchronised inside, so every operation
can be captured in a CUDA graph and replayed with other lengths. What is refused, `arguments.py`
says. On a CPU the same schemas run the oracle of `paged.py`; on a GPU without the compiled kernels
so do the functions here, after logging the reason once.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from vegas_runtime.errors import UsageError
from vegas_runtime.kernels import build, implementations
from vegas_runtime.kernels.arguments import (
    MAX_COLLECTED_ROWS,
    MAX_QUERIES,
    check_cache,
    check_exact,
    check_ints,
    check_lists,
    check_outputs,
    check_score,
    check_select,
    check_table,
)

SCHEMAS: Final = {
    "build_schedule": (
        "(Tensor seq_lens, Tensor? query_start, Tensor? counts, Tensor? tail_start, int window, "
        "Tensor(a!) prefix) -> ()"
    ),
    "verify_attention": (
        "(Tensor q, Tensor k, Tensor v, Tensor block_table, Tensor seq_lens, Tensor query_start, "
        "Tensor prefix, int max_queries, float scale, int window, Tensor? sinks, Tensor? hint, "
        "Tensor? rows, int path, Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? score, "
        "Tensor(d!) partials, Tensor(e!) counters) -> ()"
    ),
    "sparse_attention": (
        "(Tensor q, Tensor k, Tensor v, Tensor slots, Tensor counts, Tensor block_table, "
        "Tensor tail_start, Tensor seq_lens, Tensor prefix, float scale, Tensor? sinks, "
        "bool overlap, Tensor(a!) out, Tensor(b!) lse, Tensor(c!) partials, Tensor(d!) counters) "
        "-> ()"
    ),
    "select": (
        "(Tensor score, Tensor candidates, Tensor budgets, int sinks, int recent, "
        "Tensor? block_table, int block_size, Tensor? reference, Tensor? lse, "
        "Tensor? query_start, Tensor(a!) keys, Tensor(b!) slots, Tensor(c!) counts) -> ()"
    ),
}
# CUDA paths of verify_attention: the fastest that runs, tensor cores from sm_80 on, Hopper's.
PATHS: Final = {"auto": 0, "mma": 1, "sm90": 2}
HEAD_DIMS: Final = (64, 128)
MAX_SPARSE_GROUP: Final = 16
_MIN_SHARED_MEMORY: Final = 140 << 10

_log = logging.getLogger(__name__)
_library = torch.library.Library("vegas", "DEF")  # type: ignore[no-untyped-call]
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema)  # type: ignore[no-untyped-call]
    _library.impl(_name, getattr(implementations, _name), "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"vegas::{_name}", lambda *_: None, lib=_library)


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Scratch memory that attention calls of one stream share.

    Attributes:
        partials: float32, results of items that blocks split between them.
        counters: int32, zero between calls.
    """

    partials: Tensor
    counters: Tensor


def make_workspace(
    device: torch.device, *, batch: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> Workspace:
    """Scratch memory for batches up to `batch`; 2 * 128 * (head_dim + 2) floats per SM."""
    floats = 0
    if device.type == "cuda":
        units = torch.cuda.get_device_properties(device).multi_processor_count
        floats = 2 * units * MAX_COLLECTED_ROWS * (head_dim + 2)
    row_blocks = -(-MAX_QUERIES * (num_heads // num_kv_heads) // MAX_COLLECTED_ROWS)
    return Workspace(
        partials=torch.empty(floats, dtype=torch.float32, device=device),
        counters=torch.zeros(batch * row_blocks * num_kv_heads, dtype=torch.int32, device=device),
    )


def build_schedule(
    seq_lens: Tensor,
    prefix: Tensor,
    *,
    query_start: Tensor | None = None,
    window: int = 0,
    counts: Tensor | None = None,
    tail_start: Tensor | None = None,
) -> None:
    """Count the work of every request, for all layers of one kind.

    Pass `query_start` for `verify_attention`; `counts` and `tail_start` for `sparse_attention`.

    Args:
        seq_lens: [B] int32, tokens cached, new ones included; 0 for padding.
        prefix: [B + 1] int32, written.
        query_start: [B + 1] int32 first row of each request in q.
        window: sliding window of the layers, 0 for none.
        counts: [B] int32 selected entries.
        tail_start: [B] int32 first token of the dense tail.

    Raises:
        UsageError: a wrong shape, dtype or device.
    """
    B = seq_lens.shape[0]
    check_ints(("seq_lens", seq_lens, (B,)), ("prefix", prefix, (B + 1,)), device=seq_lens.device)
    if (query_start is None) == (counts is None) or (counts is None) != (tail_start is None):
        raise UsageError(
            "`build_schedule` needs either `query_start` (verification) or `counts` and "
            "`tail_start` (sparse attention)."
        )
    if query_start is not None:
        check_ints(("query_start", query_start, (B + 1,)), device=seq_lens.device)
    if counts is not None and tail_start is not None:
        check_ints(
            ("counts", counts, (B,)), ("tail_start", tail_start, (B,)), device=seq_lens.device
        )
    _call("build_schedule", None, seq_lens, query_start, counts, tail_start, window, prefix)


def verify_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    prefix: Tensor,
    max_queries: int,
    scale: float,
    out: Tensor,
    lse: Tensor,
    workspace: Workspace,
    window: int = 0,
    sinks: Tensor | None = None,
    score: Tensor | None = None,
    hint: Tensor | None = None,
    rows: Tensor | None = None,
    path: str = "auto",
) -> None:
    """Causal attention of each request's newest 1..17 tokens over its whole cache.

    A score [B, Hkv, n] (uint8 code or bfloat16) is the weight of a KV entry against `hint`, summed
    over the collected rows and the heads of the KV group. A score [B, Hkv, n / 64, 2 G, 64] (uint8)
    keeps the rows of the first and last query apart, relative to `hint` rounded to whole octaves;
    `select` applies the true normaliser. A wrong hint changes scores only, never the output.

    Args:
        q: [T, H, D] bfloat16 or float16, all requests' rows.
        k: [blocks, block size, Hkv, D] view of the cache, any strides that are multiples of 8.
        v: likewise, with the same strides.
        block_table: [B, blocks] int32.
        seq_lens: [B] int32.
        query_start: [B + 1] int32; empty ranges are padding and are not written.
        prefix: [B + 1] int32 of `build_schedule`, for this window.
        max_queries: largest number of rows of a request.
        scale: factor on query-key products.
        out: [T, H, D], written.
        lse: [T, H] float32 natural log, sinks included; written.
        workspace: scratch memory.
        window: tokens a row sees, itself included; 0 for all.
        sinks: [H] float32 logits of the denominator, or None.
        score: see above, or None; n a multiple of 64. Entries beyond seq_lens are 0 up to the next
            multiple of 16, and undefined from there on. Full-attention layers only.
        hint: [B, H] float32 natural-log normalisers.
        rows: [B] int32 bit i collects query i; by default the first and the last. Not for exact.
        path: `auto`, or one of the CUDA paths by name: a key of `PATHS`.

    Raises:
        UsageError: a wrong shape, dtype, stride, alignment or device.
    """
    B = seq_lens.shape[0]
    check_cache(q, k, v)
    check_outputs(q, out, lse, sinks)
    check_ints(
        ("seq_lens", seq_lens, (B,)), ("query_start", query_start, (B + 1,)), device=q.device
    )
    check_ints(("prefix", prefix, (B + 1,)), device=q.device)
    check_table(block_table, B, q.device)
    if not 1 <= max_queries <= MAX_QUERIES:
        raise UsageError(
            f"`max_queries` is {max_queries}; 1 to {MAX_QUERIES} rows per request are supported.",
            hint="Send prefills and longer blocks to the engine's own attention.",
        )
    if path not in PATHS:
        raise UsageError(f"`path` is {path!r}; one of {', '.join(PATHS)} is needed.")
    if score is not None and window > 0:
        raise UsageError(
            f"`score` is given for a layer with a window of {window}; only full-attention layers "
            "are sparsified, so only they collect."
        )
    if score is not None:
        check_score(q, k, B, max_queries, score, hint, rows)
    _call(
        "verify_attention",
        why_not_cuda(q),
        *(q, k, v, block_table, seq_lens, query_start, prefix, max_queries, scale, window),
        *(sinks, hint, rows, PATHS[path], out, lse, score),
        *(workspace.partials, workspace.counters),
    )


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    slots: Tensor,
    counts: Tensor,
    block_table: Tensor,
    tail_start: Tensor,
    seq_lens: Tensor,
    prefix: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
    workspace: Workspace,
    sinks: Tensor | None = None,
    overlap: bool = False,
) -> None:
    """One query per request over its selected slots, then every token from `tail_start` on.

    Args:
        q: [B, H, D] bfloat16 or float16.
        k: [blocks, block size, Hkv, D] view, as in `verify_attention`.
        v: likewise.
        slots: [B, 1 or Hkv, capacity] int32: block * block size + offset.
        counts: [B] int32, entries used of each list.
        block_table: [B, blocks] int32, for the tail.
        tail_start: [B] int32.
        seq_lens: [B] int32, new token included; 0 for padding, whose rows are not written.
        prefix: [B + 1] int32 of `build_schedule` with counts and tail_start.
        scale: factor on query-key products.
        out: [B, H, D], written.
        lse: [B, H] float32, written: the next verification's hint.
        workspace: scratch memory.
        sinks: [H] float32, or None.
        overlap: begin while the kernel in front of this one in the stream still runs (Hopper).
            A promise that this kernel wrote none of slots, counts, block_table, tail_start,
            seq_lens, prefix and the listed KV entries; q, the tail and the workspace may be its.

    Raises:
        UsageError: a wrong shape, dtype, stride, alignment or device.
    """
    B = seq_lens.shape[0]
    check_cache(q, k, v)
    check_outputs(q, out, lse, sinks)
    if q.shape[0] != B:
        raise UsageError(f"`q` has {q.shape[0]} rows for {B} requests; one each is needed.")
    check_ints(("seq_lens", seq_lens, (B,)), ("counts", counts, (B,)), device=q.device)
    check_ints(("tail_start", tail_start, (B,)), ("prefix", prefix, (B + 1,)), device=q.device)
    check_table(block_table, B, q.device)
    check_lists(slots, (B,), k.shape[2], q.device)
    _call(
        "sparse_attention",
        why_not_cuda(q, group=q.shape[1] // k.shape[2]),
        *(q, k, v, slots, counts, block_table, tail_start, seq_lens, prefix, scale),
        *(sinks, overlap, out, lse, workspace.partials, workspace.counters),
    )


def select(
    score: Tensor,
    *,
    candidates: Tensor,
    budgets: Tensor,
    keys: Tensor,
    slots: Tensor,
    counts: Tensor,
    sinks: int = 0,
    recent: int = 0,
    block_table: Tensor | None = None,
    block_size: int = 16,
    reference: Tensor | None = None,
    lse: Tensor | None = None,
    query_start: Tensor | None = None,
) -> None:
    """Keep each request's best entries, as many as its budget says.

    Exactly that many per row, ascending, lowest position first among equals, the same on every
    device. Entries beyond `counts` of a list are not written.

    Args:
        score: [R, B, Hkv, n] of R layers, uint8 codes or bfloat16; or [R, B, Hkv, n / 64, 2 G, 64]
            uint8.
        candidates: [B] int32 scored entries of each request; others are never looked at.
        budgets: [B] int32 entries kept of each request (`budgets.kv_budgets`), read on the device:
            at least the forced ones are, at most the candidates and what a list holds.
        keys: [R, B, 1 or Hkv, n] int16 scratch memory; may be empty when uint8 scores are ranked
            per KV head.
        slots: [R, B, 1 or Hkv, capacity] int32, written; 1 sums the KV heads.
        counts: [B] int32 entries of each list, written.
        sinks: first entries kept in any case, within the budget.
        recent: last candidates kept in any case, within the budget.
        block_table: [B, blocks] int32: write slots; None writes positions.
        block_size: tokens per block.
        reference: exact scores: [R, B, H] float32 what codes are relative to (the hint).
        lse: exact scores: [R, B, 2, H] float32 true normalisers of the first and last query.
        query_start: exact scores: [B + 1] int32.

    Raises:
        UsageError: a wrong shape, dtype, stride, alignment or device.
    """
    check_select(score, candidates, keys, slots, counts, sinks, recent)
    B = score.shape[1]
    check_ints(("budgets", budgets, (B,)), device=score.device)
    if block_table is not None:
        check_table(block_table, B, score.device)
    if score.dim() == 6:
        check_exact(score, reference, lse, query_start)
    reason = None if score.device.type == "cpu" else build.unavailable_reason()
    _call(
        "select",
        reason,
        *(score, candidates, budgets, sinks, recent, block_table, block_size),
        *(reference, lse, query_start, keys, slots, counts),
    )


def why_not_cuda(q: Tensor, *, group: int = 1) -> str | None:
    """Why attention takes the reference path; None when CUDA kernels run.

    Args:
        q: queries, head dim last.
        group: query heads per KV head that one warp must hold (sparse attention only).
    """
    if q.device.type != "cuda":
        return f"tensors are on {q.device.type}"
    reason = build.unavailable_reason()
    if reason is not None:
        return reason
    if q.shape[2] not in HEAD_DIMS:
        return f"head dim {q.shape[2]} has no kernel; {HEAD_DIMS} have"
    if group > MAX_SPARSE_GROUP:
        return f"{group} query heads per KV head; sparse attention takes {MAX_SPARSE_GROUP}"
    if _shared_memory(q.device) < _MIN_SHARED_MEMORY:
        return f"the GPU has less than {_MIN_SHARED_MEMORY >> 10} KB of shared memory per block"
    return None


@functools.cache
def _shared_memory(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0))


def _call(name: str, reason: str | None, *arguments: object) -> None:
    """Run an operation through its schema, or its reference where `reason` says so."""
    device = next(a.device for a in arguments if isinstance(a, Tensor))
    if device.type == "cuda" and name == "build_schedule":
        reason = build.unavailable_reason()
    if device.type == "cuda" and reason is not None:
        _say_once(name, reason)
        getattr(implementations, name)(*arguments)
        return
    getattr(torch.ops.vegas, name)(*arguments)


@functools.cache
def _say_once(name: str, reason: str) -> None:
    _log.warning("%s runs on the slow reference path: %s.", name, reason)
