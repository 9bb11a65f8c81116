"""Whether a model can be split over GPUs as asked: said before it is fetched, without CUDA."""

from __future__ import annotations

from typing import Final

from vegas_runtime.errors import UsageError
from vegas_runtime.machine import num_gpus

_OPTION: Final = "--tensor-parallel-size"


def check_split(size: int, backend: str, reason: str) -> None:
    """Refuse what no machine can do.

    Args:
        size: GPUs to split the model over.
        backend: `reference`, `vllm` or `replay`.
        reason: one sentence on why that one.

    Raises:
        UsageError: fewer GPUs than one, or several for an engine that splits nothing.
    """
    if size < 1:
        raise UsageError(f"{_OPTION} is {size}; at least 1 is needed.")
    if size > 1 and backend != "vllm":
        raise UsageError(
            f"{_OPTION} is {size}, and only vLLM splits a model over GPUs. Chosen was: {reason}.",
            hint="Leave it out, or use --backend vllm.",
        )


def check_gpus(size: int, *, num_engines: int = 1) -> None:
    """Refuse a split over more GPUs than this process may use.

    One GPU is not looked for: the engine says itself what it lacks.

    Args:
        size: GPUs of each engine.
        num_engines: engines side by side.

    Raises:
        UsageError: there are fewer, as far as that can be told.
    """
    found, needed = num_gpus() if size > 1 else None, size * num_engines
    if found is None or found >= needed:
        return
    whose = "the model is" if num_engines == 1 else f"the models of {num_engines} workers are each"
    raise UsageError(
        f"{whose} split over {size} GPUs, which takes {needed}, and this process may use {found}.",
        hint=f"Lower {_OPTION}, or name more GPUs in CUDA_VISIBLE_DEVICES.",
    )
