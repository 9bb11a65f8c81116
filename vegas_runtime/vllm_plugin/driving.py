"""Keeps an engine core busy the way the tuner needs it; knows vLLM only through `core.Core`.

A measurement wants a batch that is always full and requests of every age in it. Requests that all
start together also end together: the last ones then run alone and set the wall time. So arrivals
are continuous. As requests end, the block's prompts come in again, in turn and with a new seed, and
the first of them are given shorter and shorter limits, so that endings are spread from the start.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from vegas_runtime.config import SamplingConfig
from vegas_runtime.errors import BackendError, ConfigError
from vegas_runtime.records import StepRecord
from vegas_runtime.vllm_plugin.core import Core, CoreOutput, Emission, Tokens
from vegas_runtime.vllm_plugin.recording import Clock, EngineStep, to_records
from vegas_runtime.vllm_plugin.unrecorded import steps_of_outputs

# Requests kept waiting beyond the batch: several may end in one step, and a new one takes a
# message's time to arrive.
_SPARE_SHARE: Final = 8
_LEAST_SPARE: Final = 4


@dataclass(frozen=True, kw_only=True)
class DecodeOrder:
    """What `Driver.run` is to do; see `protocol.Engine.run`.

    Attributes:
        key: names the prompts, as `Driver.prepare` was given them.
        batch_size: requests kept running.
        max_new_tokens: output limit of each.
        sampling: how tokens are drawn.
        replicate: which repetition; shifts the seeds.
        max_tokens: stop once this many tokens were emitted while the batch was full.
        deadline_s: on `time.monotonic`'s clock.
        has_arrivals: requests end and others take their place; without, all start together and
            the pass ends before the first of them does.
        is_recorded: whether the engine core records its steps itself (the plugin's does).
        num_draft_tokens: of one that does not, what it drafts per request and iteration.
        has_spare: whether more requests than the batch are handed over, so that a free place is
            taken at once. An engine that cannot be held to the batch gets no more than that: the
            step behind an ending runs one request short, and does not count.
    """

    key: str
    batch_size: int
    max_new_tokens: int
    sampling: SamplingConfig
    replicate: int
    max_tokens: int
    deadline_s: float
    is_recorded: bool
    has_arrivals: bool = True
    num_draft_tokens: int = 0
    has_spare: bool = True


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """What `Driver.run` brings back.

    Attributes:
        steps: in order of time.
        elapsed_s: wall time of the pass.
        num_prompt_tokens: of the requests that started.
        num_cached_tokens: of them, those found in the prefix cache.
    """

    steps: tuple[StepRecord, ...]
    elapsed_s: float
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One complete output.

    Attributes:
        token_ids: all of it.
        finish_reason: why it ended.
        top_logprobs: see `Emission`.
    """

    token_ids: tuple[int, ...]
    finish_reason: str
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


class Driver:
    """Feeds one engine core and reads what comes back.

    Args:
        core: the engine; this is its only user.
        clock: the engine's, seconds.
    """

    def __init__(self, core: Core, clock: Clock = time.monotonic) -> None:
        self._core = core
        self._now_s = clock
        self._num_submitted = 0
        # Prompts whose KV lies in the prefix cache, the one used last at the end, as the engine
        # itself forgets them: least recently used first.
        self._prepared: OrderedDict[str, tuple[tuple[int, ...], ...]] = OrderedDict()

    def prepare(
        self, key: str, prompts: Sequence[Tokens], *, batch_size: int, max_new_tokens: int
    ) -> None:
        """Prefill prompts, so that later runs find them in the prefix cache. Idempotent.

        Args:
            key: names them.
            prompts: token ids.
            batch_size: requests that will run at a time.
            max_new_tokens: output limit of each.

        Raises:
            ConfigError: they do not fit into the KV cache, or one into the model's context.
        """
        if key in self._prepared:
            self._prepared.move_to_end(key)
            return
        self._check_fit(prompts, batch_size, max_new_tokens)
        own = tuple(tuple(prompt) for prompt in prompts)
        self.generate(own, max_new_tokens=1, sampling=SamplingConfig(), seeds=[0] * len(own))
        self._prepared[key] = own
        room = self._core.facts.num_kv_tokens - batch_size * self._reserve(max_new_tokens)
        while sum(map(_num_tokens, self._prepared.values())) > room:
            self._prepared.popitem(last=False)

    def run(self, order: DecodeOrder) -> Decoded:
        """Decode prepared prompts with the batch always full; see `protocol.Engine.run`.

        Raises:
            BackendError: no step with a full batch ended before the deadline, or a request failed.
        """
        prompts = self._prepared[order.key]
        self._prepared.move_to_end(order.key)
        if order.is_recorded:
            self._core.call("vegas_start_recording")
        start_s = self._now_s()
        arrivals = _Arrivals(self._submit, prompts, order)
        outputs: list[CoreOutput] = []
        try:
            arrivals.fill()
            emitted = 0
            while emitted < order.max_tokens and self._now_s() < order.deadline_s:
                output = self._core.poll()
                own = [one for one in output.emissions if one.request_id in arrivals.places]
                if not outputs and not own:
                    # A step of the pass before this one, still under way when it was ended.
                    continue
                outputs.append(output)
                if output.num_took_part >= order.batch_size:
                    emitted += sum(len(one.token_ids) for one in own)
                arrivals.take(own)
        finally:
            self._core.abort(list(arrivals.live))
        elapsed_s = self._now_s() - start_s
        if order.is_recorded:
            # Called after the aborts and answered after them: the engine is idle when it returns.
            rows = self._core.call("vegas_drain_records")
            steps = [EngineStep.from_dict(row) for row in rows]
        else:
            self._core.call("get_supported_tasks")
            steps = steps_of_outputs(outputs, order.num_draft_tokens)
        if not order.has_spare:
            # Nobody is meant to wait; who is seen between its arrival and the next step does not.
            steps = [replace(step, num_waiting=0) for step in steps]
        records = to_records(steps, arrivals.places, block_size=self._core.facts.block_size)
        if not any(record.kind == "decode" for record in records):
            raise BackendError(
                "the deadline came before the first decode step ended.",
                hint="Raise the budget, or use fewer or shorter prompts.",
            )
        emissions = [one for output in outputs for one in output.emissions]
        return Decoded(
            steps=tuple(records),
            elapsed_s=elapsed_s,
            num_prompt_tokens=sum(one.num_prompt_tokens for one in emissions),
            num_cached_tokens=sum(one.num_cached_tokens for one in emissions),
        )

    def generate(
        self,
        prompts: Sequence[Tokens],
        *,
        max_new_tokens: int,
        sampling: SamplingConfig,
        seeds: Sequence[int],
        num_logprobs: int = 0,
    ) -> list[Completion]:
        """Complete every prompt; as many at a time as the engine takes.

        Args:
            prompts: token ids.
            max_new_tokens: output limit of each.
            sampling: how tokens are drawn.
            seeds: one per prompt.
            num_logprobs: likeliest tokens to report for each new one.

        Returns:
            One completion per prompt, in order.

        Raises:
            BackendError: a request failed.
        """
        facts = self._core.facts
        most = facts.max_num_seqs + _num_spare(facts.max_num_seqs)
        todo = iter(enumerate(zip(prompts, seeds, strict=True)))
        places: dict[str, int] = {}
        parts: dict[int, list[Emission]] = {}
        done: dict[int, Completion] = {}
        while len(done) < len(prompts):
            while len(places) < most and (item := next(todo, None)) is not None:
                place, (prompt, seed) = item
                request = self._submit(
                    prompt, sampling, seed=seed, max_tokens=max_new_tokens, logprobs=num_logprobs
                )
                places[request], parts[place] = place, []
            for one in self._core.poll().emissions:
                if one.request_id not in places:
                    continue
                _refuse_failed(one)
                parts[places[one.request_id]].append(one)
                if one.finish_reason:
                    place = places.pop(one.request_id)
                    done[place] = _completion(parts.pop(place))
        return [done[place] for place in range(len(prompts))]

    def _submit(
        self,
        prompt: Tokens,
        sampling: SamplingConfig,
        *,
        seed: int,
        max_tokens: int,
        logprobs: int = 0,
    ) -> str:
        request = f"vegas-{self._num_submitted}"
        self._num_submitted += 1
        self._core.submit(
            request, prompt, sampling, seed=seed, max_tokens=max_tokens, num_logprobs=logprobs
        )
        return request

    def _reserve(self, max_new_tokens: int) -> int:
        """KV tokens of a running request beside its prompt: output, drafts, unfilled blocks."""
        return max_new_tokens + 4 * self._core.facts.block_size

    def _check_fit(self, prompts: Sequence[Tokens], batch_size: int, max_new_tokens: int) -> None:
        facts = self._core.facts
        longest = max(map(len, prompts)) + max_new_tokens
        if longest > facts.max_model_len:
            raise ConfigError(
                f"a prompt needs {longest} tokens of context, output included; the engine was "
                f"started for {facts.max_model_len}."
            )
        if batch_size > facts.max_num_seqs:
            raise ConfigError(
                f"{batch_size} requests are to run; the engine was started for "
                f"{facts.max_num_seqs}."
            )
        needed = _num_tokens(prompts) + batch_size * self._reserve(max_new_tokens)
        if needed > facts.num_kv_tokens:
            raise ConfigError(
                f"{len(prompts)} prompts with their output need {needed} tokens of KV cache and "
                f"the engine holds {facts.num_kv_tokens}, so they would push each other out and "
                "be prefilled again while decoding is measured.",
                hint="Use a smaller --batch, fewer --waiting prompts or a shorter --context.",
            )


class _Arrivals:
    """A block's prompts, arriving one after the other for as long as a run lasts."""

    def __init__(
        self,
        submit: Callable[..., str],
        prompts: Sequence[Tokens],
        order: DecodeOrder,
    ) -> None:
        self._submit = submit
        self._prompts = prompts
        self._order = order
        self._num_started = 0
        self.places: dict[str, int] = {}
        self.live: set[str] = set()

    def fill(self) -> None:
        """Submit until the batch and the spare places are taken."""
        order = self._order
        num_spare = _num_spare(order.batch_size) if order.has_spare else 0
        while len(self.live) < order.batch_size + num_spare:
            self._start_one()

    def take(self, emissions: Iterable[Emission]) -> None:
        """Note what ended, and put others in its place."""
        for one in emissions:
            _refuse_failed(one)
            if one.finish_reason:
                self.live.discard(one.request_id)
        self.fill()

    def _start_one(self) -> None:
        order, number = self._order, self._num_started
        place = number % len(self._prompts)
        request = self._submit(
            self._prompts[place],
            order.sampling,
            seed=request_seed(order.sampling.seed, order.replicate, number),
            max_tokens=_limit(number, order),
        )
        self._num_started += 1
        self.places[request] = place
        self.live.add(request)


def _limit(number: int, order: DecodeOrder) -> int:
    """Output limit of the n-th request: the first batch ends one after the other."""
    if number >= order.batch_size or not order.has_arrivals:
        return order.max_new_tokens
    return max(1, -(-order.max_new_tokens * (number + 1) // order.batch_size))


def request_seed(seed: int, replicate: int, index: int) -> int:
    """A seed for one request of one repetition, unrelated to its neighbours'."""
    digest = hashlib.sha256(f"{seed}/{replicate}/{index}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _num_spare(batch_size: int) -> int:
    return max(_LEAST_SPARE, batch_size // _SPARE_SHARE)


def _num_tokens(prompts: Iterable[Tokens]) -> int:
    return sum(map(len, prompts))


def _refuse_failed(emission: Emission) -> None:
    if emission.finish_reason in ("error", "abort"):
        raise BackendError(
            f"vLLM ended a request with `{emission.finish_reason}`; what ran is no measurement."
        )


def _completion(parts: Sequence[Emission]) -> Completion:
    return Completion(
        token_ids=tuple(token for part in parts for token in part.token_ids),
        finish_reason=parts[-1].finish_reason,
        top_logprobs=tuple(tuple(row) for row in _rows(parts)),
    )


def _rows(parts: Iterable[Emission]) -> Iterator[list[tuple[int, float]]]:
    for part in parts:
        yield from part.top_logprobs
