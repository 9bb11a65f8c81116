"""What an argument of an operation must look like; all else is a `UsageError` that names it.

Checks look at shapes, dtypes, devices, strides and addresses, so nothing is read back from a GPU.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from vegas_runtime.errors import UsageError

MAX_QUERIES: Final = 17
# Rows one block of the widest kernel holds; collected rows must lie in one block.
MAX_COLLECTED_ROWS: Final = 128
_TILE_TOKENS: Final = 16


def check_ints(*named: tuple[str, Tensor, tuple[int, ...]], device: torch.device) -> None:
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


def check_floats(*named: tuple[str, Tensor, tuple[int, ...]], device: torch.device) -> None:
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


def check_table(table: Tensor, batch: int, device: torch.device) -> None:
    """Check a block table: int32 [B, blocks], rows of unit stride."""
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


def check_cache(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check queries [T, H, D] against the paged cache they read: shapes, dtype, strides, size."""
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


def check_outputs(q: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    """Check what attention writes, and its sinks: out as q, lse [T, H], sinks [H] or None."""
    if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device:
        raise UsageError(
            f"`out` is {out.dtype} {list(out.shape)} on {out.device}; as q is needed: {q.dtype} "
            f"{list(q.shape)} on {q.device}."
        )
    if out.stride(2) != 1 or any(s % 4 for s in out.stride()[:2]) or out.data_ptr() % 16:
        raise UsageError(f"`out` has strides {out.stride()}; multiples of 4, 1 in D are needed.")
    check_floats(("lse", lse, tuple(q.shape[:2])), device=q.device)
    if sinks is not None:
        check_floats(("sinks", sinks, (q.shape[1],)), device=q.device)


def check_score(
    q: Tensor,
    k: Tensor,
    batch: int,
    max_queries: int,
    score: Tensor,
    hint: Tensor | None,
    rows: Tensor | None,
) -> None:
    """Check what a verify pass collects into, against which hint and of which rows."""
    Hkv, G = k.shape[2], q.shape[1] // k.shape[2]
    if hint is None:
        raise UsageError("Collecting scores needs `hint`: [B, H] normalisers to weigh against.")
    check_floats(("hint", hint, (batch, q.shape[1])), device=q.device)
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
        check_ints(("rows", rows, (batch,)), device=q.device)
        if max_queries * G > MAX_COLLECTED_ROWS:
            raise UsageError(
                f"{max_queries} queries of {G} heads are {max_queries * G} rows; any of at most "
                f"{MAX_COLLECTED_ROWS} can be collected.",
                hint="Collect the first and last query only, or draft one token less.",
            )


def check_lists(
    slots: Tensor, leading: tuple[int, ...], num_kv_heads: int, device: torch.device
) -> None:
    """Check lists of slots: int32 [*leading, 1 or Hkv, capacity], unit stride."""
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


def check_select(
    score: Tensor,
    candidates: Tensor,
    keys: Tensor,
    slots: Tensor,
    counts: Tensor,
    sinks: int,
    recent: int,
) -> None:
    """Check scores, scratch memory and lists of a selection, and that forced entries fit."""
    if score.dim() not in (4, 6) or score.dtype not in (torch.uint8, torch.bfloat16):
        raise UsageError(
            f"`score` is {score.dtype} {list(score.shape)}; [layers, B, Hkv, n] uint8 or bfloat16 "
            "or [layers, B, Hkv, n / 64, W, 64] uint8 is needed."
        )
    R, B, Hkv, n = score.shape[:4]
    n *= 64 if score.dim() == 6 else 1
    check_ints(("candidates", candidates, (B,)), ("counts", counts, (B,)), device=score.device)
    check_lists(slots, (R, B), Hkv, score.device)
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


def check_exact(
    score: Tensor, reference: Tensor | None, lse: Tensor | None, query_start: Tensor | None
) -> None:
    """Check what exact scores need besides: reference, true normalisers, rows of requests."""
    if reference is None or lse is None or query_start is None:
        raise UsageError("Exact scores need `reference`, `lse` and `query_start`.")
    R, B, Hkv, _, W = score.shape[:5]
    H = reference.shape[-1]
    check_floats(
        ("reference", reference, (R, B, H)), ("lse", lse, (R, B, 2, H)), device=score.device
    )
    check_ints(("query_start", query_start, (B + 1,)), device=score.device)
    if score.dtype != torch.uint8 or not score[0, 0, 0].is_contiguous() or score.shape[5] != 64:
        raise UsageError(
            f"Exact `score` is {score.dtype} with strides {score.stride()}; uint8 with contiguous "
            "units of [W, 64] is needed."
        )
    if H % Hkv or 2 * (H // Hkv) != W:
        raise UsageError(f"{H} heads over {Hkv} KV heads do not fit {W} rows of exact scores.")
