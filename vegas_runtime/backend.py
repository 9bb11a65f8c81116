"""The one door to every engine: `open_backend`, and which engine a name means here."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import BackendError, ConfigError, UsageError
from vegas_runtime.machine import has_nvidia_driver
from vegas_runtime.protocol import Capacity, Engine, StockMethod

if TYPE_CHECKING:
    from vegas_runtime.vllm_plugin.engine import VllmEngine
    from vegas_runtime.vllm_plugin.engine_options import Checkpoint

BACKENDS: Final = ("auto", "reference", "vllm", "replay")


def open_backend(
    name: str,
    *,
    model: str,
    max_num_speculative_tokens: int,
    dtype: str = "auto",
    device: str = "auto",
    capacity: Capacity | None = None,
    report: Callable[[str], None] | None = None,
) -> tuple[Engine, str]:
    """Open an engine.

    Args:
        name: `auto`, `reference`, `vllm` or `replay`.
        model: what to load; for `replay` the file of a recorded grid.
        max_num_speculative_tokens: largest gamma that will be configured.
        dtype: see `ReferenceEngine.open`, for vLLM `loading.served_facts`.
        device: see `ReferenceEngine.open`; vLLM takes the first it sees.
        capacity: what the engine must be able to hold; needed for vLLM, which `auto` passes over
            without one.
        report: told what takes long.

    Returns:
        The engine, and one sentence: which one was taken and why.

    Raises:
        UsageError: an unknown backend, or vLLM without a capacity.
        BackendError: it cannot be opened here.
        ModelError: the model cannot be found, fetched or run.
    """
    chosen, reason = resolve_backend(name)
    if name == "auto" and chosen == "vllm" and capacity is None:
        chosen = "reference"
        reason = "reference engine: vLLM has to be sized for a workload, and none was given yet"
    if chosen == "replay":
        from vegas_runtime.replay import ReplayEngine

        return ReplayEngine.open(Path(model)), reason
    if chosen == "vllm":
        if capacity is None:
            raise UsageError(
                "vLLM sizes its KV cache and its graphs once, at the start, and was not told for "
                "what.",
                hint="Use --backend reference here.",
            )
        checkpoint = find_checkpoint(model, dtype=dtype, report=report)
        return open_vllm(checkpoint, capacity, report=report), reason
    from vegas_runtime.engine.loading import resolve_model

    # A name that means nothing is said before torch and transformers are imported.
    resolve_model(model)
    from vegas_runtime.engine.reference import ReferenceEngine

    engine = ReferenceEngine.open(
        model=model,
        max_num_speculative_tokens=max_num_speculative_tokens,
        dtype=dtype,
        device=device,
        report=report,
    )
    return engine, reason


def refusal_by_vllm(config: SpeculationConfig) -> str:
    """Why the plugin for vLLM cannot be started for a setting; empty when it can.

    Args:
        config: algorithm and switches; its gamma and ratio do not matter.

    Raises:
        ConfigError: no engine knows such a method.
    """
    from vegas_runtime.policies import make_policy
    from vegas_runtime.vllm_plugin.config import translate

    make_policy(config)
    start = config.replace(num_speculative_tokens=1, sparsity_ratio=1.0)
    try:
        translate(start.to_rfc(), model="")
    except ConfigError as error:
        return error.message
    return ""


def slowed_on_vllm(config: SpeculationConfig) -> str:
    """What a method costs on vLLM that another way of serving it would save; empty for nothing.

    Args:
        config: algorithm and switches of a method that the plugin serves.
    """
    from vegas_runtime.vllm_plugin.methods import slowed_by

    return slowed_by(config.algorithm, config.rows)


def find_checkpoint(
    model: str, *, dtype: str = "auto", report: Callable[[str], None] | None = None
) -> Checkpoint:
    """A model on this machine's disk, before any engine is open: its prompts decide for what.

    Args:
        model: alias, Hub id, folder or GGUF file; fetched and converted where need be.
        dtype: see `loading.served_facts`.
        report: told what takes long.

    Raises:
        ModelError: it cannot be found or fetched, or is no decoder.
    """
    from vegas_runtime.engine import loading
    from vegas_runtime.vllm_plugin.engine_options import Checkpoint

    source = loading.fetch(loading.resolve_model(model), report or _silent)
    return Checkpoint(
        folder=source.folder,
        tokenizer=loading.load_tokenizer(source),
        facts=loading.served_facts(source, dtype),
    )


def open_vllm(
    checkpoint: Checkpoint,
    capacity: Capacity,
    *,
    is_stock: bool = False,
    drafting: StockMethod | None = None,
    report: Callable[[str], None] | None = None,
) -> VllmEngine:
    """Open vLLM on a checkpoint.

    Args:
        checkpoint: from `find_checkpoint`.
        capacity: what the engine must be able to hold.
        is_stock: as it is installed, without the plugin, at its own defaults, gamma 0 only unless
            it is to draft by a method of its own.
        drafting: that method; only stock vLLM has one.
        report: told what takes long.

    Raises:
        BackendError: vLLM is not installed or does not start.
    """
    if importlib.util.find_spec("vllm") is None:
        raise BackendError(
            "vLLM is not installed, so it cannot be measured.",
            hint="pip install 'vegas-tune[vllm]', or use --backend reference.",
        )
    from vegas_runtime.vllm_plugin.engine import VllmEngine

    return VllmEngine(checkpoint, capacity, is_stock=is_stock, drafting=drafting, report=report)


def _silent(_: str) -> None:
    """Report to nobody."""


def resolve_backend(name: str) -> tuple[str, str]:
    """Which engine a name means here.

    Returns:
        `reference`, `vllm` or `replay`, and one sentence why.

    Raises:
        UsageError: an unknown name.
    """
    if name not in BACKENDS:
        raise UsageError(f"backend {name!r} is unknown; known are {', '.join(BACKENDS)}.")
    return choose_backend() if name == "auto" else (name, f"{name}, as asked for")


def choose_backend() -> tuple[str, str]:
    """What `auto` takes: vLLM where CUDA and the plugin are usable, else the reference engine.

    Returns:
        The backend's name, and why it was taken.
    """
    if not has_nvidia_driver():
        return "reference", "reference engine: this machine has no CUDA device"
    if importlib.util.find_spec("vllm") is None:
        return "reference", "reference engine: vLLM is not installed (extra `vllm`)"
    return "vllm", "vLLM: CUDA device and vLLM are here"
