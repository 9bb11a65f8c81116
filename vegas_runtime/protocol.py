"""What an engine is told and what it answers: protocols, and the values that cross them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self, runtime_checkable

from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.errors import ConfigError
from vegas_runtime.records import Run


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


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a serving engine is sized for before it starts; engines that grow ignore it.

    Attributes:
        batch_size: most requests running.
        max_model_len: longest context, output included, in tokens.
        gammas: every `num_speculative_tokens` that will be configured, ascending, 0 among them.
        max_ratio: largest sparsity ratio that will be configured.
        config: algorithm, floor and switches; its gamma and ratio do not matter.
        also: settings of other algorithms and switches that will be configured besides.
        gpu_memory_utilization: share of the GPU's memory the engine may take.
        kv_cache_bytes: size of the KV cache, for engines side by side on one GPU; what is left of
            the engine's share by default.
        speculative_options: further keys of the speculative config, to measure the engine itself.
        load_format: `auto`, or `dummy` for weights that are random numbers of the right shape.
        tensor_parallel_size: GPUs that the model is split over.

    Raises:
        ConfigError: a value is outside its range.
    """

    batch_size: int
    max_model_len: int
    gammas: tuple[int, ...]
    max_ratio: float
    config: SpeculationConfig
    also: tuple[SpeculationConfig, ...] = ()
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    speculative_options: Mapping[str, Any] = field(default_factory=dict)
    load_format: str = "auto"
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.max_model_len < 2:
            raise ConfigError(
                f"an engine for {self.batch_size} requests of {self.max_model_len} tokens cannot "
                "decode anything."
            )
        if sorted({0, *self.gammas}) != list(self.gammas):
            raise ConfigError(
                f"the engine's gammas are {list(self.gammas)}; they must ascend from 0, which is "
                "plain decoding."
            )
        # Refuses what no setting could have.
        self.config.replace(
            num_speculative_tokens=self.gammas[-1], sparsity_ratio=float(self.max_ratio)
        )

    @classmethod
    def of(
        cls,
        blocks: Sequence[PromptBlock],
        *,
        gammas: Iterable[int],
        ratios: Iterable[float],
        config: SpeculationConfig,
        also: Iterable[SpeculationConfig] = (),
        tensor_parallel_size: int = 1,
    ) -> Self:
        """What measuring these blocks at these settings takes.

        Args:
            blocks: the workload.
            gammas: to be configured; 0 is added.
            ratios: to be configured.
            config: algorithm, floor and switches.
            also: other algorithms and switches to be configured.
            tensor_parallel_size: GPUs that the model is split over.
        """
        longest = max(max(map(len, block.prompts)) + block.max_new_tokens for block in blocks)
        return cls(
            batch_size=max(block.batch_size for block in blocks),
            max_model_len=longest,
            gammas=tuple(sorted({0, *gammas})),
            max_ratio=max(ratios),
            config=config,
            also=tuple(also),
            tensor_parallel_size=tensor_parallel_size,
        )


# vLLM's own ways to draft: the first two need nothing, the others a model, a head, or layers made
# for it in the model itself.
STOCK_METHODS: Final = ("ngram", "suffix", "draft_model", "eagle3", "mtp")
# vLLM 0.33 runs every method on its V2 model runner but these.
ON_V1_RUNNER: Final = frozenset({"suffix"})


@dataclass(frozen=True, kw_only=True)
class StockMethod:
    """One of vLLM's own ways to draft, at one number of tokens; fixed while the engine runs.

    Attributes:
        name: one of `STOCK_METHODS`, as vLLM's `method`.
        num_speculative_tokens: tokens drafted per iteration (gamma), the most where the method
            decides for itself; at least 1.
        model: the draft model or head; empty for a method without one.
        options: further keys of vLLM's `--speculative-config`.
    """

    name: str
    num_speculative_tokens: int
    model: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> SpeculationConfig:
        """The setting that its engine reports; it selects no KV entries, so its ratio is 1."""
        return SpeculationConfig(
            algorithm=self.name,
            num_speculative_tokens=self.num_speculative_tokens,
            sparsity_ratio=1.0,
        )

    def to_vllm(self) -> dict[str, Any]:
        """The value of vLLM's `--speculative-config`."""
        return {
            "method": self.name,
            "num_speculative_tokens": self.num_speculative_tokens,
            **({"model": self.model} if self.model else {}),
            **self.options,
        }


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


@runtime_checkable
class WindowDrafter(Protocol):
    """What an engine offers that drafts from a window of any method's budget.

    The same number of drafts over as many KV entries, without the work of choosing them: what that
    work costs, where drafts cannot be played back.
    """

    def without_selection(self, config: SpeculationConfig) -> SpeculationConfig | None:
        """The setting that differs from this one in the choice alone; None where none does."""


@runtime_checkable
class Restarting(Protocol):
    """What an engine offers that starts again after it died."""

    @property
    def restarts_s(self) -> float:
        """What its starts took so far, the first one left out, seconds."""
