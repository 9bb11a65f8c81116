"""vLLM behind the backend protocol: one engine start, ratio and gamma change while it runs."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.errors import BackendError, ConfigError, VegasError
from vegas_runtime.gpu_memory import UNKNOWN, MemoryCheck, MemoryGuard
from vegas_runtime.protocol import Capacity, EngineInfo, PromptBlock, StockMethod
from vegas_runtime.records import Run
from vegas_runtime.vllm_plugin.child import Child, Launch, launch_host
from vegas_runtime.vllm_plugin.core import CoreFacts
from vegas_runtime.vllm_plugin.driving import Completion, Decoded, DecodeOrder
from vegas_runtime.vllm_plugin.engine_options import (
    WINDOW,
    Checkpoint,
    control_values,
    engine_options,
)
from vegas_runtime.vllm_plugin.recording import Clock

Report = Callable[[str], None]

# Two restarts: an engine that dies a third time dies of something that will not go away.
MAX_STARTS: Final = 3
# Loading a large checkpoint and capturing its graphs; a hang is told from slowness by nothing else.
_START_TIMEOUT_S: Final = 1800.0
# Compiling is the longest that a start is silent: a minute for large models.
_START_QUIET_S: Final = 300.0
# What may pass after a deadline before the engine counts as hung: one step, and its records.
_GRACE_S: Final = 60.0
_PREFILL_TIMEOUT_S: Final = 900.0
_CONTROL_TIMEOUT_S: Final = 120.0

_DENSE: Final = "dense"
_PLAIN: Final = SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0)


class VllmEngine:
    """Runs vLLM in processes of its own; implements `protocol.Engine`.

    With the plugin, drafting is on and every knob that `configure` takes can change while the
    engine runs. Without it (`is_stock`), vLLM is what was installed, at its own defaults, and gamma
    0 is all it does, or one method of vLLM's own at one gamma (`drafting`).

    An engine that died is started again for the next measurement, at most `MAX_STARTS` times.

    Args:
        checkpoint: what to serve.
        capacity: what the engine must be able to hold.
        is_stock: leave the plugin out.
        drafting: how stock vLLM drafts; None for plain decoding.
        report: told what takes long.
        launch: starts the process that runs vLLM; `launch_host` by default.
        clock: seconds, the same in that process.

    Attributes:
        num_starts: how often it was started.
        restarts_s: what all of its starts but the first took, seconds.
        memory: what became of the GPU memory when it ended last; unknown before that.

    Raises:
        BackendError: it does not start.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        capacity: Capacity,
        *,
        is_stock: bool = False,
        drafting: StockMethod | None = None,
        report: Report | None = None,
        launch: Launch | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        assert is_stock or drafting is None, "with the plugin, drafting is the plugin's"
        self._clock = clock
        self._checkpoint = checkpoint
        self._capacity = capacity
        self._is_stock = is_stock
        self._drafting = drafting
        self._report = report or _silent
        num_gpus = capacity.tensor_parallel_size
        self._launch = launch or functools.partial(launch_host, num_gpus=num_gpus)
        self._options = engine_options(checkpoint, capacity, is_stock=is_stock, drafting=drafting)
        self._child: Child | None = None
        self._facts: CoreFacts | None = None
        self._is_closed = False
        self._config = self._first_config
        self._limit: int | None = None
        self._prepared = ""
        self.num_starts = 0
        self.restarts_s = 0.0
        self.memory: MemoryCheck = UNKNOWN
        self._guard: MemoryGuard | None = None
        self._held_s = 0.0
        self._start()

    @property
    def tokenizer(self) -> Any:
        """The model's own tokenizer."""
        return self._checkpoint.tokenizer

    @property
    def info(self) -> EngineInfo:
        """What is running, and on what."""
        facts = self._running_facts()
        path = "stock" if self._is_stock else _attention_path(facts.status)
        return EngineInfo(
            backend="vllm",
            model=dict(self._checkpoint.facts),
            device=dict(facts.device),
            runtime={**facts.runtime, "attention_path": path},
            max_num_speculative_tokens=max(self._gammas),
        )

    @property
    def status(self) -> Mapping[str, Any]:
        """What the plugin's workers said of themselves at the start; empty for stock vLLM."""
        return self._running_facts().status

    @property
    def config(self) -> SpeculationConfig:
        """The setting in force, as it was read back."""
        return self._config

    @property
    def held_s(self) -> float:
        """Seconds that this engine has held a GPU, starts included; of several GPUs, the sum."""
        running = self._child.age_s if self._child is not None else 0.0
        return (self._held_s + running) * self._capacity.tensor_parallel_size

    def configure(self, config: SpeculationConfig) -> None:
        """Change the setting of the running engine, and read it back.

        Raises:
            ConfigError: gamma is not among those the engine was started for, or above.
            BackendError: what is in force afterwards is something else.
        """
        self._refuse(config)
        self._apply(config, self._limit)

    def without_selection(self, config: SpeculationConfig) -> SpeculationConfig | None:
        """See `protocol.WindowDrafter`: lengths alone make a window's lists, and nothing is scored.

        None for what chooses nothing: plain decoding, the window itself, stock vLLM.
        """
        chooses = config.num_speculative_tokens and config.algorithm not in (WINDOW, _DENSE)
        return config.replace(algorithm=WINDOW) if chooses and not self._is_stock else None

    def prepare(self, block: PromptBlock) -> None:
        """Prefill a block's prompts into the prefix cache. Idempotent.

        Raises:
            ConfigError: they do not fit.
            BackendError: the engine died.
        """
        if block.sha256 != self._prepared:
            self._report(f"prefilling block {block.index}, or finding it prefilled")
        self._prepared = block.sha256
        self._ask(
            "prepare",
            timeout_s=_PREFILL_TIMEOUT_S,
            key=block.sha256,
            prompts=block.prompts,
            batch_size=block.batch_size,
            max_new_tokens=block.max_new_tokens,
        )

    def run(self, block: PromptBlock, *, replicate: int, max_tokens: int, deadline_s: float) -> Run:
        """Decode a block with its batch always full; see `protocol.Engine.run`.

        The block's prompts come in again, with new seeds, for as long as the pass lasts.

        Raises:
            BackendError: the engine died or hangs, or no decode step ended before the deadline.
        """
        return self._decode(
            block, replicate, max_tokens=max_tokens, deadline_s=deadline_s, has_arrivals=True
        )

    def run_closed(self, block: PromptBlock, *, replicate: int, deadline_s: float) -> Run:
        """Decode while the requests that started together are all still running.

        Admitting a request costs vLLM milliseconds of its loop for each few thousand prompt tokens,
        cached or not, and all requests of the batch wait for it. That is part of serving; without
        it, what is left is decoding alone.

        Args:
            block: what to decode; its output limit, less an iteration, is each request's share.
            replicate: see `run`.
            deadline_s: see `run`.
        """
        share = block.max_new_tokens - max(self._gammas) - 1
        return self._decode(
            block,
            replicate,
            max_tokens=max(1, share // 2) * block.batch_size,
            deadline_s=deadline_s,
            has_arrivals=False,
        )

    def _decode(
        self,
        block: PromptBlock,
        replicate: int,
        *,
        max_tokens: int,
        deadline_s: float,
        has_arrivals: bool,
    ) -> Run:
        self.prepare(block)
        if not self._is_stock and self._limit != block.batch_size:
            self._apply(self._config, block.batch_size)
        order = DecodeOrder(
            key=block.sha256,
            batch_size=block.batch_size,
            max_new_tokens=block.max_new_tokens,
            sampling=block.sampling,
            replicate=replicate,
            max_tokens=max_tokens,
            deadline_s=deadline_s,
            is_recorded=not self._is_stock,
            has_arrivals=has_arrivals,
            num_draft_tokens=self._config.num_speculative_tokens,
            # Stock vLLM runs as many as it has, up to what it was started for.
            has_spare=not self._is_stock or block.batch_size == self._capacity.batch_size,
        )
        left_s = max(0.0, deadline_s - self.now_s())
        decoded: Decoded = self._ask("run", timeout_s=left_s + _GRACE_S, order=order)
        return Run(
            config=self._config,
            batch_size=block.batch_size,
            steps=decoded.steps,
            elapsed_s=decoded.elapsed_s,
            num_prompt_tokens=decoded.num_prompt_tokens,
            num_cached_tokens=decoded.num_cached_tokens,
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: SamplingConfig,
        seeds: Sequence[int] | None = None,
        num_logprobs: int = 0,
        timeout_s: float = _PREFILL_TIMEOUT_S,
    ) -> list[Completion]:
        """Complete prompts at the setting in force, as many at a time as the engine takes.

        Args:
            prompts: token ids.
            max_new_tokens: output limit of each.
            sampling: how tokens are drawn.
            seeds: one per prompt; the sampling's own, counted up, unless given.
            num_logprobs: likeliest tokens to report for each new one.
            timeout_s: after this the engine counts as hung.
        """
        if not self._is_stock and self._limit is not None:
            self._apply(self._config, None)
        own = [sampling.seed + number for number in range(len(prompts))]
        completions: list[Completion] = self._ask(
            "generate",
            timeout_s=timeout_s,
            prompts=prompts,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seeds=own if seeds is None else list(seeds),
            num_logprobs=num_logprobs,
        )
        return completions

    def call(self, utility: str, *args: Any, timeout_s: float = _CONTROL_TIMEOUT_S) -> Any:
        """Call a utility of vLLM's engine core by name; for measurements of the engine itself."""
        return self._ask("call", timeout_s=timeout_s, utility=utility, args=args)

    def now_s(self) -> float:
        """Monotonic wall clock, the same in every process of this machine."""
        return self._clock()

    def close(self) -> None:
        """Stop every process of the engine and wait until its GPU memory is free. Idempotent."""
        self._is_closed = True
        self._end()

    # ------------------------------------------------------------------ control

    @property
    def _gammas(self) -> tuple[int, ...]:
        if self._is_stock:
            return (self._first_config.num_speculative_tokens,)
        return self._capacity.gammas

    @property
    def _first_config(self) -> SpeculationConfig:
        """What is in force when the engine has started."""
        return _PLAIN if self._drafting is None else self._drafting.config

    def _refuse(self, config: SpeculationConfig) -> None:
        gamma = config.num_speculative_tokens
        own = self._drafting
        if own is not None and (config.algorithm, gamma) != (own.name, own.num_speculative_tokens):
            raise ConfigError(
                f"{config.algorithm!r} with {gamma} drafted tokens was asked of an engine that "
                f"drafts {own.num_speculative_tokens} by vLLM's own {own.name!r}; it cannot change "
                "while it runs."
            )
        if gamma not in self._gammas:
            known = ", ".join(map(str, self._gammas))
            raise ConfigError(
                f"`num_speculative_tokens` is {gamma}, but this engine was started for {known}."
            )
        if gamma and own is None and config.sparsity_ratio > self._capacity.max_ratio:
            raise ConfigError(
                f"`sparsity_ratio` is {config.sparsity_ratio:g}, but this engine was started for "
                f"at most {self._capacity.max_ratio:g}."
            )

    def _apply(self, config: SpeculationConfig, limit: int | None) -> None:
        """Put a setting in force and compare what the engine says it runs now."""
        if not self._is_stock:
            asked = control_values(config, limit)
            found = self.call("vegas_configure", asked)
            differing = [
                f"`{name}` is {found.get(name)!r} there and {value!r} was asked for"
                for name, value in asked.items()
                if found.get(name) != value
            ]
            if differing:
                raise BackendError(
                    f"vLLM did not take the setting: {'; '.join(differing)}. Its figures would be "
                    "another setting's.",
                    hint="vegas-tune doctor says whether the plugin is active.",
                )
        self._config, self._limit = config, limit

    # ------------------------------------------------------------------ the process

    def _start(self) -> None:
        what = "stock vLLM" if self._is_stock else "vLLM with the plugin"
        if self._drafting is not None:
            gamma = self._drafting.num_speculative_tokens
            what += f" with {self._drafting.name}, {gamma} drafted tokens"
        self._report(f"starting {what}")
        self.num_starts += 1
        self._child = self._launch(self._is_stock)
        self._facts = self._guarded(
            lambda: self._alive().ask(
                "open",
                timeout_s=_START_TIMEOUT_S,
                quiet_s=_START_QUIET_S,
                options=self._options,
                has_plugin=not self._is_stock,
            )
        )
        self._limit = None
        self._apply(self._first_config, None)

    def _alive(self) -> Child:
        assert self._child is not None
        return self._child

    def _running(self) -> Child:
        if self._is_closed:
            raise BackendError("the engine is closed.")
        if self._child is None:
            if self.num_starts >= MAX_STARTS:
                raise BackendError(
                    f"vLLM died {self.num_starts} times; it is not started again.",
                    hint="Its last log says why.",
                )
            if self._guard is not None:
                # It would find too little memory, and say so in words of its own after a minute.
                self._guard.look().refuse_held("vLLM")
            config, started_s = self._config, self.now_s()
            try:
                self._start()
            finally:
                self.restarts_s += self.now_s() - started_s
            self._apply(config, None)
        return self._alive()

    def _running_facts(self) -> CoreFacts:
        assert self._facts is not None
        return self._facts

    def _ask(self, order: str, /, *, timeout_s: float, **arguments: Any) -> Any:
        child = self._running()
        return self._guarded(lambda: child.ask(order, timeout_s=timeout_s, **arguments))

    def _guarded(self, ask: Callable[[], Any]) -> Any:
        """Let an answer through; after anything that leaves the engine unusable, end it."""
        try:
            return ask()
        except VegasError:
            if not self._alive().is_healthy:
                self._end()
            raise
        except BaseException:
            # An interrupt in the middle of an answer, say: the next order must not get it.
            self._end()
            raise

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            self._guard = child.guard
            self.memory = child.end(report=self._report)
            self._held_s += child.age_s


def _attention_path(status: Mapping[str, Any]) -> str:
    """How scores are collected and drafts attend, e.g. `fused+kernel`."""
    worker = status["workers"][0]
    return f"{worker['collection']}+{worker['draft_attention']}"


def _silent(_: str) -> None:
    """Report to nobody."""
