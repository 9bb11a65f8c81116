"""The reference engine behind the backend protocol: open, prepare, run, generate, close."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch

from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.engine.attention import register
from vegas_runtime.engine.decoding import Decoder, Request
from vegas_runtime.engine.host_memory import keep_freed_memory
from vegas_runtime.engine.kv_cache import KVCache, SavedPrefill
from vegas_runtime.engine.loading import LoadedModel, load_model, resolve_model, silent
from vegas_runtime.engine.model import DecoderModel, describe_model, prefill
from vegas_runtime.engine.packaged import Report
from vegas_runtime.engine.paged import AttentionChoice, why_not_kernels
from vegas_runtime.engine.selection import Selector
from vegas_runtime.engine.selection_tape import (
    RecordingSelector,
    ReplayingSelector,
    SelectionTape,
)
from vegas_runtime.errors import BackendError, ConfigError
from vegas_runtime.machine import device_facts, runtime_facts
from vegas_runtime.protocol import EngineInfo, PromptBlock
from vegas_runtime.records import Run, StepRecord

MakeSelector = Callable[[SpeculationConfig, KVCache, DecoderModel, AttentionChoice], Selector]


@dataclass(frozen=True, kw_only=True)
class _Recording:
    """A run that can be played back: what it was asked, what it gave, what its drafts read."""

    block: PromptBlock
    replicate: int
    run: Run
    tape: SelectionTape


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Texts of a block, complete.

    Attributes:
        outputs: new tokens per prompt, in the block's order.
        steps: every engine step.
        elapsed_s: wall time, prefill excluded.
    """

    outputs: tuple[tuple[int, ...], ...]
    steps: tuple[StepRecord, ...]
    elapsed_s: float


class ReferenceEngine:
    """Runs any decoder-only checkpoint through transformers; implements `protocol.Engine`.

    Prefilled prompts are kept until `close`, so that every setting of a sweep restores them
    instead of prefilling again.

    Args:
        loaded: model, tokenizer and facts.
        max_num_speculative_tokens: largest gamma `configure` takes.
        report: told what takes long.
        attention: who attends; see `paged.why_not_kernels`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_num_speculative_tokens: int,
        report: Report | None = None,
        attention: AttentionChoice = "auto",
    ) -> None:
        self.tokenizer = loaded.tokenizer
        self._model: DecoderModel | None = describe_model(loaded.model)
        self._report = report or silent
        self._config = SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0)
        self._prefilled: dict[tuple[int, ...], SavedPrefill] = {}
        self._cache: KVCache | None = None
        self._recording: _Recording | None = None
        self._attention: AttentionChoice = attention
        device = loaded.model.device
        self._info = EngineInfo(
            backend="reference",
            model=dict(loaded.facts),
            device=device_facts(device.type),
            runtime={
                **runtime_facts(device.type),
                "kv_cache_dtype": str(loaded.model.dtype).removeprefix("torch."),
                "threads": torch.get_num_threads(),
            },
            max_num_speculative_tokens=max_num_speculative_tokens,
        )
        self.configure(self._config)

    @classmethod
    def open(
        cls,
        *,
        model: str,
        max_num_speculative_tokens: int,
        dtype: str = "auto",
        device: str = "auto",
        report: Report | None = None,
        attention: AttentionChoice = "auto",
    ) -> Self:
        """Load a model by alias, Hub id or path.

        On a CPU the process keeps memory that it frees (`host_memory.keep_freed_memory`).

        Args:
            model: what to load.
            max_num_speculative_tokens: largest gamma.
            dtype: `auto`, `float32`, `bfloat16` or `float16`.
            device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
            report: told what takes long.
            attention: who attends; see `paged.why_not_kernels`.

        Raises:
            BackendError: the device is not there, or the kernels were asked for and cannot run it.
            ModelError: it cannot be found, fetched or run.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            keep_freed_memory()
        loaded = load_model(
            resolve_model(model),
            dtype=dtype,
            device=device,
            attn_implementation=register(),
            report=report or silent,
        )
        return cls(
            loaded,
            max_num_speculative_tokens=max_num_speculative_tokens,
            report=report,
            attention=attention,
        )

    @property
    def info(self) -> EngineInfo:
        """What is running, and on what."""
        return self._info

    @property
    def config(self) -> SpeculationConfig:
        """The setting in force."""
        return self._config

    def configure(self, config: SpeculationConfig) -> None:
        """Change the setting; takes effect with the next run.

        From then on `info.runtime` says who attends (`attention_path`) and, if not the kernels, why
        (`attention_reason`).

        Raises:
            BackendError: the engine is closed, or the kernels were asked for and cannot do this.
            ConfigError: gamma above the maximum, or a policy this engine does not have.
        """
        largest = self._info.max_num_speculative_tokens
        if config.num_speculative_tokens > largest:
            raise ConfigError(
                f"`num_speculative_tokens` is {config.num_speculative_tokens}, but this engine "
                f"was opened for at most {largest}."
            )
        self._note_attention(why_not_kernels(self._running(), config, self._attention))
        self._config = config

    def _note_attention(self, reason: str | None) -> None:
        """Say who attends from now on, and `reason` if it is not the kernels."""
        runtime = {**self._info.runtime, "attention_path": "reference", "attention_reason": reason}
        if reason is None:
            runtime["attention_path"] = "kernels"
            del runtime["attention_reason"]
        if runtime != self._info.runtime and self._running().device.type == "cuda":
            where = "the kernels" if reason is None else f"the reference path ({reason})"
            self._report(f"attention: {where}")
        self._info = replace(self._info, runtime=runtime)

    def prepare(self, block: PromptBlock) -> None:
        """Prefill a block's prompts once.

        Raises:
            ConfigError: a prompt is empty, or leaves no room for output in the model's context.
        """
        model = self._running()
        for place, prompt in enumerate(block.prompts):
            if not prompt:
                raise ConfigError(f"prompt {place} of block {block.index} is empty.")
            if len(prompt) >= model.max_positions:
                raise ConfigError(
                    f"prompt {place} of block {block.index} has {len(prompt)} tokens; the model "
                    f"holds {model.max_positions}, output included."
                )
        # By prompt, not by block: a replayed prompt, or one met with other sampling, is known.
        missing = [p for p in dict.fromkeys(block.prompts) if p not in self._prefilled]
        total, done = sum(len(prompt) for prompt in missing), 0
        for prompt in missing:
            before = done

            def tell(tokens: int, before: int = before) -> None:
                self._report(f"prefilling block {block.index}: {before + tokens}/{total} tokens")

            self._prefilled[prompt] = prefill(model, prompt, tell)
            done += len(prompt)

    def run(self, block: PromptBlock, *, replicate: int, max_tokens: int, deadline_s: float) -> Run:
        """Decode a block while its batch is full; see `protocol.Engine.run`.

        Raises:
            BackendError: the deadline came before the first decode step ended, or a request
                ended with its first token and none was left to take its place.
            ConfigError: fewer prompts than `batch_size`, or see `prepare`.
        """
        return self._run(block, replicate, max_tokens, deadline_s, Selector)

    def record_selections(
        self, block: PromptBlock, *, replicate: int, max_tokens: int, deadline_s: float
    ) -> Run:
        """Run, and keep what every draft step read; see `protocol.SelectionRecorder`.

        Raises:
            BackendError: see `run`.
            ConfigError: see `run`.
        """
        tape = SelectionTape(config=self._config)
        self._recording = None
        run = self._run(
            block,
            replicate,
            max_tokens,
            deadline_s,
            partial(RecordingSelector, tape=tape),
        )
        self._recording = _Recording(block=block, replicate=replicate, run=run, tape=tape)
        return run

    def run_recorded(self, *, deadline_s: float) -> Run:
        """The recorded run again, without choosing; see `protocol.SelectionRecorder`.

        Raises:
            BackendError: nothing is recorded at this setting, the deadline came, or the outputs
                differ from the recorded run's.
        """
        recording = self._recording
        if recording is None or recording.tape.config != self._config:
            raise BackendError("no run at the setting in force is recorded.")
        max_tokens = sum(
            sum(step.num_emitted_tokens)
            for step in recording.run.steps
            if step.kind == "decode" and step.num_running == recording.run.batch_size
        )
        run = self._run(
            recording.block,
            recording.replicate,
            max_tokens,
            deadline_s,
            partial(ReplayingSelector, tape=recording.tape),
        )
        if run.outputs_sha256 != recording.run.outputs_sha256:
            raise BackendError(
                f"the outputs differ from the recorded run's after {len(run.steps)} of "
                f"{len(recording.run.steps)} steps, so the drafts were not the same."
            )
        return run

    def _run(
        self,
        block: PromptBlock,
        replicate: int,
        max_tokens: int,
        deadline_s: float,
        make_selector: MakeSelector,
    ) -> Run:
        if len(block.prompts) < block.batch_size:
            raise ConfigError(
                f"block {block.index}: {len(block.prompts)} prompts cannot keep "
                f"{block.batch_size} requests running."
            )
        self.prepare(block)
        start = self.now_s()
        steps: list[StepRecord] = []
        requests: list[Request] = []
        emitted, starved = 0, False
        for step in self._decode(block, replicate, requests, make_selector):
            steps.append(step)
            full = step.num_running == block.batch_size
            emitted += sum(step.num_emitted_tokens) if step.kind == "decode" and full else 0
            ended = sum(request.is_finished for request in requests)
            starved = len(block.prompts) - ended < block.batch_size
            if emitted >= max_tokens or starved or self.now_s() >= deadline_s:
                break
        if not any(step.kind == "decode" for step in steps):
            if starved:
                raise BackendError(
                    f"a request of block {block.index} ended with its first token and no other "
                    "was waiting, so there was no decode step with a full batch.",
                    hint="Raise `max_new_tokens`, or leave out prompts that end at once.",
                )
            raise BackendError(
                "the deadline came before the first decode step ended.",
                hint="Raise the budget, or use fewer or shorter prompts.",
            )
        return Run(
            config=self._config,
            batch_size=block.batch_size,
            steps=tuple(steps),
            elapsed_s=self.now_s() - start,
            outputs_sha256=_hash_outputs(requests),
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, sampling: SamplingConfig
    ) -> Generation:
        """Decode prompts to their ends at the setting in force.

        Args:
            prompts: token ids.
            max_new_tokens: output limit of each.
            sampling: how tokens are drawn.
        """
        block = PromptBlock(
            index=0,
            prompts=tuple(tuple(prompt) for prompt in prompts),
            batch_size=len(prompts),
            max_new_tokens=max_new_tokens,
            sampling=sampling,
        )
        self.prepare(block)
        start = self.now_s()
        requests: list[Request] = []
        steps = tuple(self._decode(block, 0, requests))
        return Generation(
            outputs=tuple(tuple(request.output) for request in requests),
            steps=steps,
            elapsed_s=self.now_s() - start,
        )

    def now_s(self) -> float:
        """Monotonic wall clock."""
        return time.monotonic()

    def close(self) -> None:
        """Free the model and every saved prompt."""
        self._model, self._cache, self._recording = None, None, None
        self._prefilled.clear()

    def _running(self) -> DecoderModel:
        if self._model is None:
            raise BackendError("the engine is closed.")
        return self._model

    def _decode(
        self,
        block: PromptBlock,
        replicate: int,
        requests: list[Request],
        make_selector: MakeSelector = Selector,
    ) -> Iterator[StepRecord]:
        """Yield steps until every request ended; fills `requests` in the block's order."""
        model = self._running()
        for index, prompt in enumerate(block.prompts):
            seed = _request_seed(block.sampling.seed, replicate, index)
            requests.append(
                Request(
                    index=index,
                    saved=self._prefilled[prompt],
                    max_new_tokens=block.max_new_tokens,
                    random=torch.Generator().manual_seed(seed),
                )
            )
        waiting = list(requests)
        cache = self._cache_for(block)
        selector = make_selector(self._config, cache, model, self._attention)
        decoder = Decoder(model, self._config, block.sampling, cache, selector)
        while waiting or decoder.requests:
            free = block.batch_size - len(decoder.requests)
            starting, waiting = waiting[:free], waiting[free:]
            if starting:
                yield decoder.admit(starting, num_waiting=len(waiting))
            else:
                yield decoder.step(num_waiting=len(waiting))
            decoder.retire()

    def _cache_for(self, block: PromptBlock) -> KVCache:
        """A cache large enough for the block at any gamma, reused between runs."""
        model = self._running()
        longest = max(len(prompt) for prompt in block.prompts) + block.max_new_tokens
        capacity = longest + self._info.max_num_speculative_tokens + 1
        lanes = min(block.batch_size, len(block.prompts))
        held = self._cache
        if held is None or held.capacity < capacity or held.keys[0].shape[0] < lanes:
            self._cache = None
            self._cache = KVCache(
                model.shape,
                num_lanes=lanes,
                capacity=capacity,
                dtype=model.model.dtype,
                device=model.device,
            )
        assert self._cache is not None
        return self._cache


def _request_seed(seed: int, replicate: int, index: int) -> int:
    """A seed for one request of one repetition, unrelated to its neighbours'."""
    digest = hashlib.sha256(f"{seed}/{replicate}/{index}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _hash_outputs(requests: Sequence[Request]) -> str:
    outputs = [request.output for request in requests]
    return hashlib.sha256(json.dumps(outputs).encode()).hexdigest()
