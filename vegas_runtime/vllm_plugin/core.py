"""One running vLLM engine as the tuner sees it: requests go in, step outputs come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vegas_runtime.config import SamplingConfig

Tokens = Sequence[int]


@dataclass(frozen=True, kw_only=True)
class CoreFacts:
    """What an engine core turned out to be, once started.

    Attributes:
        block_size: tokens of a KV block.
        num_kv_tokens: tokens the KV cache holds.
        max_num_seqs: most requests running.
        max_model_len: longest context, output included.
        device: as `machine.device_facts`.
        runtime: as `machine.runtime_facts`, with `kv_cache_dtype` and `attention_path`.
        status: what the plugin's workers say of themselves; empty without the plugin.
    """

    block_size: int
    num_kv_tokens: int
    max_num_seqs: int
    max_model_len: int
    device: Mapping[str, Any] = field(default_factory=dict)
    runtime: Mapping[str, Any] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Emission:
    """What one request got from one step.

    Attributes:
        request_id: as submitted.
        token_ids: new output tokens.
        finish_reason: `stop`, `length`, `abort`, `error`; empty while it goes on.
        num_prompt_tokens: with the first token, how many the prompt had; else 0.
        num_cached_tokens: of them, those found in the prefix cache.
        scheduled_s: with the first token, when it was admitted, on the engine's clock.
        top_logprobs: per new token, the likeliest tokens with their log probabilities, when asked.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    scheduled_s: float = 0.0
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)

    @property
    def num_context_tokens(self) -> int:
        """Prompt tokens computed beside the row that samples; 0 but for a first token."""
        return max(0, self.num_prompt_tokens - self.num_cached_tokens - 1)


@dataclass(frozen=True, kw_only=True)
class CoreOutput:
    """What came out of one engine step.

    Attributes:
        end_s: when its results were there, on the engine's clock (`time.monotonic`).
        emissions: of the requests that got something.
        num_running: requests that hold a place after it.
        num_waiting: requests ready to take one.
    """

    end_s: float
    emissions: list[Emission]
    num_running: int
    num_waiting: int

    @property
    def num_took_part(self) -> int:
        """Requests that held a place during the step."""
        return self.num_running + sum(bool(one.finish_reason) for one in self.emissions)


class Core(Protocol):
    """One running vLLM engine."""

    @property
    def facts(self) -> CoreFacts:
        """What it turned out to be."""

    def submit(
        self,
        request_id: str,
        prompt: Tokens,
        sampling: SamplingConfig,
        *,
        seed: int,
        max_tokens: int,
        num_logprobs: int = 0,
    ) -> None:
        """Hand a request over; it starts when a place is free."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests, whether running or waiting."""

    def poll(self) -> CoreOutput:
        """Wait for the next step's output."""

    def call(self, utility: str, *args: Any) -> Any:
        """Call a utility of the engine core by name, after everything submitted before."""

    def close(self) -> None:
        """Stop the engine."""
