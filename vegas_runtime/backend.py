"""The one door to every engine: a small protocol, and `open_backend`."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.errors import BackendError, UsageError
from vegas_runtime.machine import has_nvidia_driver
from vegas_runtime.records import Run

BACKENDS: Final = ("auto", "reference", "vllm", "replay")


@dataclass(frozen=True, kw_only=True)
class PromptBlock:
    """Prompts measured together, always with the same sampling.

    Attributes:
        index: place in the workload, from 0.
        prompts: token ids; the first `batch_size` start, the rest wait for a free place.
        batch_size: requests kept running.
        max_new_tokens: output limit of each request.
        sampling: how tokens are drawn.
    """

    index: int
    prompts: tuple[tuple[int, ...], ...]
    batch_size: int
    max_new_tokens: int
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    @property
    def sha256(self) -> str:
        """Hash over token ids, limits and sampling."""
        content = [self.prompts, self.batch_size, self.max_new_tokens, self.sampling.to_dict()]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What an engine runs, as plain values for the profile's `match` section.

    Attributes:
        backend: `reference`, `vllm` or `replay`.
        model: id, revision, config_sha256, weights_sha256, dtype, quant, max_model_len.
        device: class (e.g. `NVIDIA H200`, or the CPU's name), kind (`cuda`, `cpu`), sm,
            memory_gib, count, tp.
        runtime: versions by package, kv_cache_dtype, attention path, threads.
        max_num_speculative_tokens: largest gamma this engine was opened for.
    """

    backend: str
    model: dict[str, Any]
    device: dict[str, Any]
    runtime: dict[str, Any]
    max_num_speculative_tokens: int


class Engine(Protocol):
    """What the tuner needs of an engine."""

    @property
    def info(self) -> EngineInfo:
        """What is running, and on what."""

    @property
    def tokenizer(self) -> Any:
        """The model's own tokenizer (transformers'); None for a replay."""

    @property
    def config(self) -> SpeculationConfig:
        """The setting in force, read back from the engine."""

    def configure(self, config: SpeculationConfig) -> None:
        """Change ratio and gamma while the engine runs.

        Raises:
            ConfigError: gamma above `info.max_num_speculative_tokens`, or an unknown policy.
        """

    def prepare(self, block: PromptBlock) -> None:
        """Prefill a block once; later runs restore its KV. Idempotent."""

    def run(self, block: PromptBlock, *, replicate: int, max_tokens: int, deadline_s: float) -> Run:
        """Decode a block at the setting in force.

        Args:
            block: what to decode; prepared on demand.
            replicate: which repetition this is; shifts the sampling seed, orders replays.
            max_tokens: stop once this many tokens were emitted while the batch was full.
            deadline_s: on this engine's clock (`now_s`); the pass ends at the first step after it.

        Raises:
            BackendError: the engine died, or no step finished before the deadline.
        """

    def now_s(self) -> float:
        """This engine's clock, seconds; a replay's clock advances by recorded times."""

    def close(self) -> None:
        """Free the model and its memory. Idempotent."""


@runtime_checkable
class SelectionRecorder(Protocol):
    """What an engine offers beside `Engine` when it can draft without choosing.

    The same drafts with and without the work of choosing KV entries say what that work costs.
    """

    def record_selections(
        self, block: PromptBlock, *, replicate: int, max_tokens: int, deadline_s: float
    ) -> Run:
        """Run, and keep what every draft step read until the next recording.

        Args and errors: see `Engine.run`.
        """

    def run_recorded(self, *, deadline_s: float) -> Run:
        """The recorded run again, told what to read instead of choosing it.

        Raises:
            BackendError: nothing is recorded, the setting is another one now, or the outputs
                differ from the recorded run's.
        """


def open_backend(
    name: str,
    *,
    model: str,
    max_num_speculative_tokens: int,
    dtype: str = "auto",
    device: str = "auto",
    report: Callable[[str], None] | None = None,
) -> tuple[Engine, str]:
    """Open an engine.

    Args:
        name: `auto`, `reference`, `vllm` or `replay`.
        model: what to load; for `replay` the file of a recorded grid.
        max_num_speculative_tokens: largest gamma that will be configured.
        dtype: see `ReferenceEngine.open`.
        device: see `ReferenceEngine.open`.
        report: told what takes long.

    Returns:
        The engine, and one sentence: which one was taken and why.

    Raises:
        UsageError: an unknown backend.
        BackendError: it cannot be opened here.
        ModelError: the model cannot be found, fetched or run.
    """
    if name not in BACKENDS:
        raise UsageError(f"backend {name!r} is unknown; known are {', '.join(BACKENDS)}.")
    chosen, reason = choose_backend() if name == "auto" else (name, f"{name}, as asked for")
    if chosen == "replay":
        from vegas_runtime.replay import ReplayEngine

        return ReplayEngine.open(Path(model)), reason
    if chosen == "vllm":
        raise BackendError(
            "the vLLM plugin is not part of this release.",
            hint="Use --backend reference.",
        )
    from vegas_runtime.engine.reference import ReferenceEngine

    engine = ReferenceEngine.open(
        model=model,
        max_num_speculative_tokens=max_num_speculative_tokens,
        dtype=dtype,
        device=device,
        report=report,
    )
    return engine, reason


def choose_backend() -> tuple[str, str]:
    """What `auto` takes: vLLM where CUDA and the plugin are usable, else the reference engine.

    Returns:
        The backend's name, and why it was taken.
    """
    if not has_nvidia_driver():
        return "reference", "reference engine: this machine has no CUDA device"
    if importlib.util.find_spec("vllm") is None:
        return "reference", "reference engine: vLLM is not installed (extra `vllm`)"
    if importlib.util.find_spec("vegas_runtime.vllm_plugin") is None:
        return "reference", "reference engine: this release has no vLLM plugin"
    return "vllm", "vLLM: CUDA device, vLLM and the plugin are here"
