"""Each kernel operation once: check arguments, then CUDA or the reference.

    build_schedule     once per step: how the work of all layers splits over the GPU
    verify_attention   verification over the paged cache; can collect scores in the same pass
    select             scores -> the k best entries per request, as slots or positions
    sparse_attention   one query per request over selected slots and the dense tail

All lengths live on the device and nothing is allocated or synchronised inside, so every operation
can be captured in a CUDA graph and replayed with other lengths. Argument checks look at shapes,
dtypes and strides only. On a CPU the same schemas run the oracle of `paged.py`; on a GPU without
the compiled kernels so do the functions here, after logging the reason once.
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
MAX_QUERIES: Final = 17
MAX_SPARSE_GROUP: Final = 16
# Rows one block of the widest kernel holds; collected rows must lie in one block.
MAX_COLLECTED_ROWS: Final = 128
_TILE_TOKENS: Final = 16
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
    _ints(("seq_lens", seq_lens, (B,)), ("prefix", prefix, (B + 1,)), device=seq_lens.device)
    if (query_start is None) == (counts is None) or (counts is None) != (tail_start is None):
        raise UsageError(
            "`build_schedule` needs either `query_start` (verification) or `counts` and "
            "`tail_start` (sparse attention)."
        )
    if query_start is not None:
        _ints(("query_start", query_start, (B + 1,)), device=seq_lens.device)
    if counts is not None and tail_start is not None:
        _ints(("counts", counts, (B,)), ("tail_start", tail_start, (B,)), device=seq_lens.device)
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
    _check_cache(q, k, v)
    _check_outputs(q, out, lse, sinks)
    _ints(("seq_lens", seq_lens, (B,)), ("query_start", query_start, (B + 1,)), device=q.device)
    _ints(("prefix", prefix, (B + 1,)), device=q.device)
    _check_table(block_table, B, q.device)
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
        _check_score(q, k, B, max_queries, score, hint, rows)
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
    _check_cache(q, k, v)
    _check_outputs(q, out, lse, sinks)
    if q.shape[0] != B:
        raise UsageError(f"`q` has {q.shape[0]} rows for {B} requests; one each is needed.")
    _ints(("seq_lens", seq_lens, (B,)), ("counts", counts, (B,)), device=q.device)
    _ints(("tail_start", tail_start, (B,)), ("prefix", prefix, (B + 1,)), device=q.device)
    _check_table(block_table, B, q.device)
    _check_lists(slots, (B,), k.shape[2], q.device)
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
    _check_select(score, candidates, keys, slots, counts, sinks, recent)
    B = score.shape[1]
    _ints(("budgets", budgets, (B,)), device=score.device)
    if block_table is not None:
        _check_table(block_table, B, score.device)
    if score.dim() == 6:
        _check_exact(score, reference, lse, query_start)
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


def _ints(*named: tuple[str, Tensor, tuple[int, ...]], device: torch.device) -> None:
    """Check contiguous int32 tensors of given shapes."""
    for name, tensor, shape in named:
        if tensor.dtype != torch.int32 or tuple(tensor.shape) != shape:
            raise UsageError(
                f"`{name}` is {tensor.dtype} {list(tensor.shape)}; int32 {list(shape)} is needed."
            )
        if tensor.device != device:
            raise UsageError(f"`{name}` is on {tensor.device}, the other tensors on {device}.")
        if not tensor.is_contiguous():
            raise UsageError(f"`{name}` has strides {tensor.stride()}; it must be contiguous.")


def _check_table(table: Tensor, batch: int, device: torch.device) -> None:
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != batch:
        raise UsageError(
            f"`block_table` is {table.dtype} {list(table.shape)}; "
            f"int32 [{batch}, blocks] is needed."
        )
    if table.device != device or table.stride(1) != 1:
        raise UsageError(
            f"`block_table` is on {table.device} with strides {table.stride()}; rows on {device} "
            "with unit stride are needed."
        )


def _check_cache(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 3 or k.dim() != 4 or k.shape != v.shape or k.shape[3] != q.shape[2]:
        raise UsageError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit; [T, H, D] and "
            "twice [blocks, block size, Hkv, D] are needed."
        )
    if q.dtype not in (torch.bfloat16, torch.float16) and q.device.type == "cuda":
        raise UsageError(f"`q` is {q.dtype}; the kernels take bfloat16 and float16.")
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise UsageError(
            f"q, k and v are {q.dtype} on {q.device}, {k.dtype} on {k.device} and {v.dtype} on "
            f"{v.device}; one dtype and device is needed."
        )
    if q.shape[1] % k.shape[2] != 0:
        raise UsageError(f"{q.shape[1]} query heads do not divide by {k.shape[2]} KV heads.")
    if k.shape[1] % _TILE_TOKENS != 0:
        raise UsageError(f"The block size is {k.shape[1]}; a multiple of {_TILE_TOKENS} is needed.")
    if k.stride() != v.stride() or k.stride(3) != 1 or any(s % 8 for s in k.stride()[:3]):
        raise UsageError(
            f"k has strides {k.stride()} and v {v.stride()}; they must be equal, contiguous in D "
            "and multiples of 8 elsewhere, so that 16-byte loads are aligned."
        )
    if q.stride(2) != 1 or any(s % 2 for s in q.stride()[:2]):
        raise UsageError(f"q has strides {q.stride()}; contiguous in D and even is needed.")
    if any(t.data_ptr() % 16 for t in (q, k, v)):
        raise UsageError("q, k or v does not start at a multiple of 16 bytes.")
    # Offsets are 32-bit counts of 16 bytes.
    if k.shape[0] * k.stride(0) * 2 > 16 << 32:
        raise UsageError("One layer's cache spans more than 64 GiB; kernels address at most that.")


def _check_outputs(q: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device:
        raise UsageError(
            f"`out` is {out.dtype} {list(out.shape)} on {out.device}; as q is needed: {q.dtype} "
            f"{list(q.shape)} on {q.device}."
        )
    if out.stride(2) != 1 or any(s % 4 for s in out.stride()[:2]) or out.data_ptr() % 16:
        raise UsageError(f"`out` has strides {out.stride()}; multiples of 4, 1 in D are needed.")
    _floats(("lse", lse, tuple(q.shape[:2])), device=q.device)
    if sinks is not None:
        _floats(("sinks", sinks, (q.shape[1],)), device=q.device)


def _floats(*named: tuple[str, Tensor, tuple[int, ...]], device: torch.device) -> None:
    """Check contiguous float32 tensors of given shapes."""
    for name, tensor, shape in named:
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
            raise UsageError(
                f"`{name}` is {tensor.dtype} {list(tensor.shape)}; float32 {list(shape)} is needed."
            )
        if tensor.device != device or not tensor.is_contiguous():
            raise UsageError(
                f"`{name}` is on {tensor.device} with strides {tensor.stride()}; contiguous on "
                f"{device} is needed."
            )


def _check_score(
    q: Tensor,
    k: Tensor,
    batch: int,
    max_queries: int,
    score: Tensor,
    hint: Tensor | None,
    rows: Tensor | None,
) -> None:
    Hkv, G = k.shape[2], q.shape[1] // k.shape[2]
    if hint is None:
        raise UsageError("Collecting scores needs `hint`: [B, H] normalisers to weigh against.")
    _floats(("hint", hint, (batch, q.shape[1])), device=q.device)
    exact = score.dim() == 5
    if exact and (
        score.shape != (batch, Hkv, score.shape[2], 2 * G, 64)
        or score.dtype != torch.uint8
        or not score[0].is_contiguous()
    ):
        raise UsageError(
            f"`score` is {score.dtype} {list(score.shape)}; exact scores are contiguous uint8 "
            f"[{batch}, {Hkv}, n / 64, {2 * G}, 64]."
        )
    if exact and rows is not None:
        raise UsageError("Exact scores are of the first and last query; `rows` must be None.")
    if not exact and (
        score.dim() != 3
        or score.shape[:2] != (batch, Hkv)
        or score.dtype not in (torch.uint8, torch.bfloat16)
    ):
        raise UsageError(
            f"`score` is {score.dtype} {list(score.shape)}; [{batch}, {Hkv}, n] uint8 or bfloat16, "
            f"or [{batch}, {Hkv}, n / 64, {2 * G}, 64] uint8 is needed."
        )
    if score.device != q.device or score.data_ptr() % 16 or any(s % 16 for s in score.stride()[:2]):
        raise UsageError(
            f"`score` is on {score.device} with strides {score.stride()}; on {q.device} with "
            "multiples of 16 is needed."
        )
    if not exact and (score.shape[2] % 64 != 0 or score.stride(2) != 1):
        raise UsageError(
            f"`score` holds {score.shape[2]} entries with strides {score.stride()}; a multiple of "
            "64 with stride 1 is needed."
        )
    if rows is not None:
        _ints(("rows", rows, (batch,)), device=q.device)
        if max_queries * G > MAX_COLLECTED_ROWS:
            raise UsageError(
                f"{max_queries} queries of {G} heads are {max_queries * G} rows; any of at most "
                f"{MAX_COLLECTED_ROWS} can be collected.",
                hint="Collect the first and last query only, or draft one token less.",
            )


def _check_lists(
    slots: Tensor, leading: tuple[int, ...], num_kv_heads: int, device: torch.device
) -> None:
    n = len(leading)
    fits = slots.dim() == n + 2 and tuple(slots.shape[:n]) == leading
    if slots.dtype != torch.int32 or not fits or slots.shape[n] not in (1, num_kv_heads):
        raise UsageError(
            f"`slots` is {slots.dtype} {list(slots.shape)}; int32 [{', '.join(map(str, leading))}, "
            f"1 or {num_kv_heads}, capacity] is needed."
        )
    if slots.device != device or slots.stride(-1) != 1:
        raise UsageError(
            f"`slots` is on {slots.device} with strides {slots.stride()}; unit stride on {device} "
            "is needed."
        )


def _check_select(
    score: Tensor,
    candidates: Tensor,
    keys: Tensor,
    slots: Tensor,
    counts: Tensor,
    sinks: int,
    recent: int,
) -> None:
    if score.dim() not in (4, 6) or score.dtype not in (torch.uint8, torch.bfloat16):
        raise UsageError(
            f"`score` is {score.dtype} {list(score.shape)}; [layers, B, Hkv, n] uint8 or bfloat16 "
            "or [layers, B, Hkv, n / 64, W, 64] uint8 is needed."
        )
    R, B, Hkv, n = score.shape[:4]
    n *= 64 if score.dim() == 6 else 1
    _ints(("candidates", candidates, (B,)), ("counts", counts, (B,)), device=score.device)
    _check_lists(slots, (R, B), Hkv, score.device)
    if not slots.is_contiguous():
        raise UsageError(f"`slots` has strides {slots.stride()}; it must be contiguous.")
    if n % 16 or any(s % 16 for s in score.stride()[:3]) or score.data_ptr() % 16:
        raise UsageError(
            f"`score` is {list(score.shape)} with strides {score.stride()}; multiples of 16 are "
            "needed for aligned loads."
        )
    heads_out = slots.shape[2]
    bytes_are_keys = score.dim() == 4 and score.dtype == torch.uint8 and heads_out == Hkv
    if not bytes_are_keys and (
        tuple(keys.shape) != (R, B, heads_out, n)
        or keys.dtype != torch.int16
        or not keys.is_contiguous()
    ):
        raise UsageError(
            f"`keys` is {keys.dtype} {list(keys.shape)}; contiguous int16 "
            f"[{R}, {B}, {heads_out}, {n}] is needed."
        )
    if sinks < 0 or recent < 0 or sinks + recent > slots.shape[3]:
        raise UsageError(
            f"{sinks} sinks and {recent} recent entries do not fit lists of {slots.shape[3]}."
        )


def _check_exact(
    score: Tensor, reference: Tensor | None, lse: Tensor | None, query_start: Tensor | None
) -> None:
    if reference is None or lse is None or query_start is None:
        raise UsageError("Exact scores need `reference`, `lse` and `query_start`.")
    R, B, Hkv, _, W = score.shape[:5]
    H = reference.shape[-1]
    _floats(("reference", reference, (R, B, H)), ("lse", lse, (R, B, 2, H)), device=score.device)
    _ints(("query_start", query_start, (B + 1,)), device=score.device)
    if score.dtype != torch.uint8 or not score[0, 0, 0].is_contiguous() or score.shape[5] != 64:
        raise UsageError(
            f"Exact `score` is {score.dtype} with strides {score.stride()}; uint8 with contiguous "
            "units of [W, 64] is needed."
        )
    if H % Hkv or 2 * (H // Hkv) != W:
        raise UsageError(f"{H} heads over {Hkv} KV heads do not fit {W} rows of exact scores.")
