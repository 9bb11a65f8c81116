"""Which implementation collects and which one drafts, and why: the rule behind "auto".

Collection must cost less than the pass it saves, so the order is by measured time on one H200
(`benchmarks/bench_collection.py`); what cannot run is skipped, and the reason is kept for
`vegas-tune doctor`.
"""

from __future__ import annotations

import os
from typing import Any, Final

import torch

from vegas_runtime.config import Rows
from vegas_runtime.errors import ConfigError
from vegas_runtime.kernels import build, ops
from vegas_runtime.kernels.arguments import MAX_COLLECTED_ROWS, MAX_QUERIES
from vegas_runtime.vllm_plugin.draft_attention import (
    GRAPH_SPLITS,
    DraftPath,
    FlashDraft,
    KernelDraft,
    TritonDraft,
    multiprocessors,
)
from vegas_runtime.vllm_plugin.fused import FusedVerify
from vegas_runtime.vllm_plugin.geometry import AttentionShape, Limits
from vegas_runtime.vllm_plugin.verification import (
    FlashVerify,
    Scoring,
    TritonVerify,
    VerifyPath,
)

VERIFY_PATHS: Final = ("fused", "fused_exact", "fa3", "triton")
_WITHOUT_SCORES: Final = ("fa3", "fused", "triton")
DRAFT_PATHS: Final = ("kernel", "fa3", "triton")
_VARIANT: Final = "VLLM_BATCH_INVARIANT is set, and this kernel splits its work by the batch"
_LONG_TAIL: Final = (
    "a method that was declared may read tails as long as the text, and page lists have room for "
    "a few tokens behind the selected ones"
)


def choose_verify(
    asked: str,
    shape: AttentionShape,
    limits: Limits,
    device: torch.device,
    *,
    rows: Rows,
    is_scored: bool,
) -> tuple[str, str]:
    """The collection path and why.

    Args:
        asked: `auto` or a path.
        shape: the layers.
        limits: the largest step.
        device: where.
        rows: query rows that are summed.
        is_scored: whether the method asks for scores; without them a path is just attention.

    Raises:
        ConfigError: the path asked for cannot run here.
    """
    variant = _VARIANT if is_batch_invariant() else None
    why_not = variant or why_not_fused(shape, limits, device)
    exact_only = f"exact scores are of rows 'two', not {rows!r}" if rows != "two" else None
    refusals = {
        "fused": why_not,
        "fused_exact": why_not or exact_only,
        "fa3": why_not_fa3(device),
        "triton": variant,
    }
    # Attention alone: FlashAttention-3 is 8 % behind ours at head dim 64 and 7 % ahead at 128.
    order = VERIFY_PATHS if is_scored or shape.head_dim <= 64 else _WITHOUT_SCORES
    return _choose("collection", asked, order, refusals)


def choose_draft(
    asked: str,
    shape: AttentionShape,
    limits: Limits,
    device: torch.device,
    *,
    has_long_tail: bool,
) -> tuple[str, str]:
    """The draft attention and why.

    Args:
        asked: `auto` or a path.
        shape: the layers.
        limits: the largest step.
        device: where.
        has_long_tail: whether tails may be as long as the text.

    Raises:
        ConfigError: the path asked for cannot run here.
    """
    variant = _VARIANT if is_batch_invariant() else None
    refusals = {
        "kernel": variant or why_not_kernel(shape, device),
        "fa3": why_not_fa3(device) or (_LONG_TAIL if has_long_tail else None),
        "triton": variant,
    }
    return _choose("draft_attention", asked, DRAFT_PATHS, refusals)


def _choose(
    knob: str, asked: str, order: tuple[str, ...], refusals: dict[str, str | None]
) -> tuple[str, str]:
    if asked == "auto":
        skipped: list[str] = []
        for path in order:
            if refusals[path] is None:
                why = "; ".join(f"{name}: {refusals[name]}" for name in skipped)
                return path, f"fastest that runs here{f' ({why})' if why else ''}"
            skipped.append(path)
        raise ConfigError(
            f"VLLM_BATCH_INVARIANT is set, and only FlashAttention-3 serves Vegas then: "
            f"{refusals['fa3']}.",
            hint="Unset VLLM_BATCH_INVARIANT.",
        )
    if asked not in refusals:
        raise ConfigError(
            f"`sparse_attn_{knob}` is {asked!r}; auto, {', '.join(refusals)} are supported."
        )
    if refusals[asked] is not None:
        raise ConfigError(
            f"`sparse_attn_{knob}` is {asked!r}, which cannot run here: {refusals[asked]}.",
            hint="Use 'auto'.",
        )
    return asked, "asked for"


def is_batch_invariant() -> bool:
    """Whether vLLM was asked for results that do not depend on what else is in a batch.

    Then a row of a verify pass is, bit for bit, what a step of its own would have given, and
    drafting changes no token at all, rounding included.
    """
    return bool(int(os.environ.get("VLLM_BATCH_INVARIANT", "0")))


def why_not_fa3(device: torch.device) -> str | None:
    """Why FlashAttention-3 cannot run; None when it can."""
    if device.type != "cuda":
        return f"tensors are on {device.type}"
    from vllm.v1.attention.backends.fa_utils import (  # type: ignore[import-not-found,unused-ignore]
        is_flash_attn_varlen_func_available,
    )
    from vllm.vllm_flash_attn.flash_attn_interface import (  # type: ignore[import-not-found,unused-ignore]
        fa_version_unsupported_reason,
        is_fa_version_supported,
    )

    if not is_flash_attn_varlen_func_available():
        return "this vLLM has no FlashAttention"
    return None if is_fa_version_supported(3) else str(fa_version_unsupported_reason(3))


def why_not_fused(shape: AttentionShape, limits: Limits, device: torch.device) -> str | None:
    """Why the collecting kernel cannot run; None when it can."""
    group = shape.num_heads // shape.num_kv_heads
    if limits.max_rows > MAX_QUERIES:
        return f"{limits.max_rows} verify rows; the kernel takes {MAX_QUERIES}"
    if limits.max_rows * group > MAX_COLLECTED_ROWS:
        return (
            f"{limits.max_rows} verify rows of {group} heads; the kernel collects from "
            f"{MAX_COLLECTED_ROWS} in all"
        )
    return _why_not_compiled(shape, device, group=1)


def why_not_kernel(shape: AttentionShape, device: torch.device) -> str | None:
    """Why the compiled sparse attention cannot run; None when it can."""
    return _why_not_compiled(shape, device, group=shape.num_heads // shape.num_kv_heads)


def _why_not_compiled(shape: AttentionShape, device: torch.device, *, group: int) -> str | None:
    if device.type != "cuda":
        return None  # the operations' reference runs
    reason = build.unavailable_reason()
    if reason is not None:
        return reason
    probe = torch.empty((1, shape.num_heads, shape.head_dim), dtype=shape.dtype, device=device)
    return ops.why_not_cuda(probe, group=group)


def flash_attention() -> Any:
    """`flash_attn_varlen_func` as vLLM ships it."""
    from vllm.v1.attention.backends.fa_utils import (  # type: ignore[import-not-found,unused-ignore]
        flash_attn_varlen_func,
    )

    return flash_attn_varlen_func


def make_verify(
    path: str,
    shape: AttentionShape,
    limits: Limits,
    device: torch.device,
    *,
    scoring: Scoring,
    per_head: bool,
) -> VerifyPath:
    """The collection path of that name."""
    if path in ("fused", "fused_exact"):
        return FusedVerify(
            shape, limits, per_head=per_head, exact=path == "fused_exact", device=device
        )
    if path == "fa3":
        return FlashVerify(shape, limits, scoring=scoring, attend=flash_attention(), device=device)
    return TritonVerify(
        shape, limits, scoring=scoring, units=multiprocessors(device), device=device
    )


def make_draft(path: str, shape: AttentionShape, limits: Limits, device: torch.device) -> DraftPath:
    """The draft attention of that name."""
    if path == "fa3":
        splits = 1 if is_batch_invariant() else GRAPH_SPLITS
        return FlashDraft(shape, limits, device, attend=flash_attention(), num_splits=splits)
    if path == "kernel":
        return KernelDraft(shape, limits, device)
    return TritonDraft(shape, limits, device)
