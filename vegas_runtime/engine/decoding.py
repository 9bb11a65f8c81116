"""The loop: prefill, then draft, verify, accept, roll back, for several requests at once.

    select   the policy picks KV entries from the last verify pass's scores; they are packed
             (`selection.py`)
    draft    gamma forward passes over the selected entries, one token per request each
    verify   one forward pass over everything: gamma + 1 rows per request, scores collected
    accept   speculative sampling; the committed length moves, which is all the roll-back there is

A request's last prompt token is its first pending token, so its first pass is a verify pass of
one row: it yields the first output token and the first scores, as `cold start` is defined.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.engine.acceptance import (
    Acceptance,
    TokenSampler,
    accept_greedy,
    accept_sampled,
    draw,
)
from vegas_runtime.engine.attention import (
    AttentionPass,
    Narrow,
    make_window,
    windows_for_positions,
)
from vegas_runtime.engine.kv_cache import DraftCache, KVCache, SavedPrefill
from vegas_runtime.engine.model import DecoderModel
from vegas_runtime.engine.paged import AttentionChoice
from vegas_runtime.engine.selection import Selector
from vegas_runtime.kernels.reference import Window
from vegas_runtime.policies import KVSelection
from vegas_runtime.records import StepKind, StepRecord


@dataclass(kw_only=True)
class Request:
    """One request in a lane.

    Attributes:
        index: its place in the block.
        saved: its prefilled prompt.
        max_new_tokens: output limit.
        random: its own random numbers, whatever runs beside it.
        output: tokens emitted so far.
    """

    index: int
    saved: SavedPrefill
    max_new_tokens: int
    random: torch.Generator
    output: list[int] = field(default_factory=list)
    is_finished: bool = False

    def emit(self, tokens: Sequence[int], *, eos: frozenset[int], max_positions: int) -> int:
        """Append tokens until the request ends; return how many were added."""
        room = min(self.max_new_tokens, max_positions - len(self.saved.prompt))
        for added, token in enumerate(tokens, start=1):
            self.output.append(token)
            if token in eos or len(self.output) >= room:
                self.is_finished = True
                return added
        return len(tokens)


@dataclass(kw_only=True)
class _Phases:
    """Adds up wall time by phase, waiting for the device at each mark."""

    device: torch.device
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("draft", "select", "verify", "other"), 0.0)
    )
    _mark: float = field(default_factory=time.perf_counter)

    def end(self, phase: str) -> None:
        """Book the time since the last mark."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[phase] += now - self._mark
        self._mark = now


class Decoder:
    """Decodes up to `num_lanes` requests together at one setting.

    Args:
        model: what to run.
        config: how to draft.
        sampling: how tokens are drawn.
        cache: holds the lanes; at least as long as the longest text plus gamma + 1.
        selector: says what draft steps read; asks the setting's policy unless given.
        attention: who attends, unless a selector is given; see `paged.why_not_kernels`.

    Raises:
        BackendError: the kernels were asked for, and they do not do this.
        ConfigError: an unknown policy, or a switch that it lacks.
    """

    def __init__(
        self,
        model: DecoderModel,
        config: SpeculationConfig,
        sampling: SamplingConfig,
        cache: KVCache,
        selector: Selector | None = None,
        attention: AttentionChoice = "auto",
    ) -> None:
        self.model, self.config, self.cache = model, config, cache
        self.sampler = TokenSampler(sampling)
        self.selector = selector or Selector(config, cache, model, attention)
        self.requests: list[Request] = []
        device, lanes = model.device, cache.keys[0].shape[0]
        self._tokens = torch.zeros(lanes, cache.capacity, dtype=torch.int64, device=device)
        self._committed = torch.zeros(lanes, dtype=torch.int64, device=device)

    # -- requests come and go ---------------------------------------------------------------

    @torch.inference_mode()
    def admit(self, requests: Sequence[Request], *, num_waiting: int) -> StepRecord:
        """Give requests free lanes and run their one-row first pass.

        Returns:
            A record of kind `prefill`.
        """
        phases = _Phases(device=self.model.device)
        first = len(self.requests)
        for lane, request in enumerate(requests, start=first):
            self.cache.restore(lane, request.saved)
            prompt = torch.tensor(request.saved.prompt, device=self.model.device)
            self._tokens[lane, : len(prompt)] = prompt
            self._committed[lane] = len(prompt) - 1
        self.requests.extend(requests)
        lanes = slice(first, len(self.requests))
        self.selector.admitted(lanes)
        phases.end("other")
        drafts = self._tokens.new_zeros(len(requests), 0)
        logits, this = self._verify(drafts, lanes)
        phases.end("verify")
        self.selector.prefilled(lanes, [request.saved for request in requests], this)
        phases.end("select")
        accepted = self._accept(drafts, None, logits, self._uniforms(lanes, 0), lanes)
        return self._commit(drafts, accepted, this, lanes, phases, "prefill", num_waiting)

    @torch.inference_mode()
    def retire(self) -> list[Request]:
        """Free the lanes of finished requests; the last lanes move into the gaps."""
        finished = [request for request in self.requests if request.is_finished]
        for lane in reversed(range(len(self.requests))):
            if self.requests[lane].is_finished:
                last = len(self.requests) - 1
                if lane != last:
                    self._move_lane(last, lane)
                self.requests[lane] = self.requests[last]
                self.requests.pop()
        return finished

    def _move_lane(self, source: int, target: int) -> None:
        self.cache.move(source, target, int(self._committed[source]))
        for state in (self._tokens, self._committed):
            state[target] = state[source]
        self.selector.moved(source, target)

    # -- one iteration ----------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, *, num_waiting: int) -> StepRecord:
        """One draft-verify-accept iteration over every request."""
        phases = _Phases(device=self.model.device)
        lanes = slice(0, len(self.requests))
        gamma = self.config.num_speculative_tokens
        uniforms = self._uniforms(lanes, gamma)
        drafts, draft_probs = self._draft(uniforms[:, :gamma], phases)
        logits, this = self._verify(drafts, lanes)
        phases.end("verify")
        accepted = self._accept(drafts, draft_probs, logits, uniforms[:, gamma:], lanes)
        return self._commit(drafts, accepted, this, lanes, phases, "decode", num_waiting)

    def _uniforms(self, lanes: slice, gamma: int) -> Tensor:
        """Each request's next 2 * gamma + 1 random numbers; unused when greedy."""
        drawn = [torch.rand(2 * gamma + 1, generator=r.random) for r in self.requests[lanes]]
        return torch.stack(drawn).to(self.model.device)

    def _draft(self, uniforms: Tensor, phases: _Phases) -> tuple[Tensor, Tensor | None]:
        """Draft `gamma` tokens per request.

        Returns:
            Tokens [B, gamma], and the distributions they were drawn from [B, gamma, V] (None
            when greedy).
        """
        batch, gamma = uniforms.shape
        committed = self._committed[:batch]
        drafts = self._tokens.new_zeros(batch, gamma)
        probs: list[Tensor] = []
        selector = self.selector
        selection: KVSelection | None = None
        narrow: Narrow | None = None
        for i in range(gamma):
            if selector.selects_by_query:
                narrow = selector.narrow(committed, i, phases.end)
            elif i == 0 or selector.selects_each_step:
                selection = selector.select(committed, i, selection)
                phases.end("select")
            packed = None if selection is None else selector.packed
            tokens = self._tokens[:batch].gather(1, (committed + i)[:, None])
            positions = (committed + i)[:, None]
            logits = self._draft_pass(tokens, positions, i, packed, narrow)[:, -1]
            history = self._history(positions + 1, slice(0, batch))
            if self.sampler.config.is_greedy:
                drafts[:, i] = self.sampler.greedy(logits, history)
            else:
                distribution = self.sampler.distribution(logits, history)
                drafts[:, i] = draw(distribution, uniforms[:, i])
                probs.append(distribution)
            self._tokens[:batch].scatter_(1, positions + 1, drafts[:, i : i + 1])
            phases.end("draft")
        return drafts, torch.stack(probs, dim=1) if probs else None

    def _draft_pass(
        self,
        tokens: Tensor,
        positions: Tensor,
        step: int,
        packed: DraftCache | None,
        narrow: Narrow | None,
    ) -> Tensor:
        """Logits [B, 1, V] of one draft step."""
        layers, paged = self.model.shape.sliding_windows, self.selector.paged
        if paged is not None:
            self.cache.begin(positions, 0)
            this = AttentionPass(
                windows={}, sliding_windows=layers, run=paged.draft(positions, step)
            )
            return self.model.forward(tokens, positions, self.cache, this)
        if packed is None:
            self.cache.begin(positions, 0)
            windows = windows_for_positions(positions, layers)
            this = AttentionPass(windows=windows, sliding_windows=layers, narrow=narrow)
            return self.model.forward(tokens, positions, self.cache, this)
        packed.begin(positions)
        this = AttentionPass(windows=_packed_windows(packed, positions), sliding_windows=layers)
        return self.model.forward(tokens, positions, packed, this)

    def _verify(self, drafts: Tensor, lanes: slice) -> tuple[Tensor, AttentionPass]:
        """One pass over pending token and drafts.

        Returns:
            Logits [B, gamma + 1, V], and the pass with what it collected.
        """
        gamma = drafts.shape[1]
        committed = self._committed[lanes]
        positions = committed[:, None] + torch.arange(gamma + 1, device=drafts.device)
        tokens = self._tokens[lanes].gather(1, positions)
        layers, paged = self.model.shape.sliding_windows, self.selector.paged
        this = AttentionPass(
            windows=windows_for_positions(positions, layers) if paged is None else {},
            sliding_windows=layers,
            score=self.selector.score(gamma + 1),
            run=None if paged is None else paged.verify(lanes, committed, gamma + 1),
            num_queries=self.selector.num_queries(gamma + 1),
        )
        self.cache.begin(positions, lanes.start)
        logits = self.model.forward(tokens, positions, self.cache, this)
        self.selector.verified(lanes, committed, gamma, this)
        return logits, this

    def _accept(
        self,
        drafts: Tensor,
        draft_probs: Tensor | None,
        logits: Tensor,
        uniforms: Tensor,
        lanes: slice,
    ) -> Acceptance:
        """Test the drafts against the target's logits [B, gamma + 1, V]."""
        gamma = drafts.shape[1]
        rows = torch.arange(1, gamma + 2, device=drafts.device)
        history = self._history(self._committed[lanes][:, None] + rows, lanes)
        if self.sampler.config.is_greedy:
            return accept_greedy(drafts, self.sampler.greedy(logits, history))
        target = self.sampler.distribution(logits, history)
        if draft_probs is None:
            draft_probs = target.new_zeros(drafts.shape[0], 0, target.shape[-1])
        return accept_sampled(drafts, draft_probs, target, uniforms)

    def _history(self, lengths: Tensor, lanes: slice) -> Tensor | None:
        """Texts of the given lengths [B, S] as [B, S, T], padded with their first token."""
        if not self.sampler.needs_history:
            return None
        tokens = self._tokens[lanes, : int(lengths.max())]
        inside = torch.arange(tokens.shape[1], device=tokens.device) < lengths[..., None]
        return torch.where(inside, tokens[:, None], tokens[:, None, :1])

    def _commit(
        self,
        drafts: Tensor,
        accepted: Acceptance,
        this: AttentionPass,
        lanes: slice,
        phases: _Phases,
        kind: StepKind,
        num_waiting: int,
    ) -> StepRecord:
        """Move the committed lengths, hand tokens to their requests, write the record."""
        self.selector.accepted(lanes, accepted.num_accepted, this)
        committed = self._committed[lanes]
        committed += 1 + accepted.num_accepted
        self._tokens[lanes].scatter_(1, committed[:, None], accepted.next_token[:, None])
        counts = accepted.num_accepted.tolist()
        texts = zip(drafts.tolist(), counts, accepted.next_token.tolist(), strict=True)
        running = self.requests[lanes]
        emitted = [
            request.emit(
                [*draft[:count], token],
                eos=self.model.eos_token_ids,
                max_positions=self.model.max_positions,
            )
            for request, (draft, count, token) in zip(running, texts, strict=True)
        ]
        phases.end("other")
        return StepRecord(
            kind=kind,
            num_running=len(running),
            num_waiting=num_waiting,
            request_ids=tuple(request.index for request in running),
            num_draft_tokens=(drafts.shape[1],) * len(running),
            num_accepted_tokens=tuple(counts),
            num_emitted_tokens=tuple(emitted),
            draft_s=phases.seconds["draft"],
            select_s=phases.seconds["select"],
            verify_s=phases.seconds["verify"],
            other_s=phases.seconds["other"],
        )


def _packed_windows(packed: DraftCache, positions: Tensor) -> dict[int | None, Window]:
    """Column ranges of a draft step, after `packed.begin`."""
    windows: dict[int | None, Window] = {}
    for window, counts in packed.counts.items():
        low = None
        if window is not None:
            first_visible = positions - window + 1
            low = (first_visible - packed.window_starts[window][:, None]).clamp(min=0)
        windows[window] = make_window(counts[:, None], low)
    return windows
