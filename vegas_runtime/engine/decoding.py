"""The loop: prefill, then draft, verify, accept, roll back, for several requests at once.

    select   the policy picks KV entries from the last verify pass's scores; they are packed
    draft    gamma forward passes over the packed entries, one token per request each
    verify   one forward pass over everything: gamma + 1 rows per request, scores collected
    accept   speculative sampling; the committed length moves, which is all the roll-back there is

A request's last prompt token is its first pending token, so its first pass is a verify pass of
one row: it yields the first output token and the first scores, as `cold start` is defined.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

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
    make_window,
    windows_for_positions,
)
from vegas_runtime.engine.kv_cache import DraftCache, KVCache, SavedPrefill
from vegas_runtime.engine.model import DecoderModel
from vegas_runtime.errors import ConfigError
from vegas_runtime.kernels.reference import ScoreSpec, Window
from vegas_runtime.policies import KVSelection, SelectionInput, make_policy
from vegas_runtime.policies.base import EARLY_ROWS
from vegas_runtime.records import StepKind, StepRecord

# Columns to spare, so that a context growing by some tokens does not reallocate.
PACKED_SLACK: Final = 64


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

    Raises:
        ConfigError: an unknown policy, or one that needs what this engine does not offer.
    """

    def __init__(
        self,
        model: DecoderModel,
        config: SpeculationConfig,
        sampling: SamplingConfig,
        cache: KVCache,
    ) -> None:
        self.model, self.config, self.cache = model, config, cache
        self.sampler = TokenSampler(sampling)
        self.policy = make_policy(config)
        needs = self.policy.needs
        if needs.query or needs.keys or needs.prompt_rows or needs.dense_first_phase:
            raise ConfigError(
                f"`algorithm` {config.algorithm!r} needs queries, keys or prompt rows while "
                "drafting, which the reference engine does not hand out."
            )
        self.requests: list[Request] = []
        self._packed: DraftCache | None = None
        device, lanes = model.device, cache.keys[0].shape[0]
        self._tokens = torch.zeros(lanes, cache.capacity, dtype=torch.int64, device=device)
        self._committed = torch.zeros(lanes, dtype=torch.int64, device=device)
        self._prefix = torch.zeros(lanes, dtype=torch.int64, device=device)
        self._collection = needs.collection if config.num_speculative_tokens else None
        if self._collection is not None:
            heads = model.shape.num_kv_heads[0] if self._collection.scope == "kv_head" else 1
            self._scores = torch.zeros(
                len(model.shape.full_layers), lanes, heads, cache.capacity, device=device
            )

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
        phases.end("other")
        self.requests.extend(requests)
        lanes = slice(first, len(self.requests))
        drafts = self._tokens.new_zeros(len(requests), 0)
        logits, kept = self._verify(drafts, lanes)
        phases.end("verify")
        accepted = self._accept(drafts, None, logits, self._uniforms(lanes, 0), lanes)
        return self._commit(drafts, accepted, kept, lanes, phases, "prefill", num_waiting)

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
        for state in (self._tokens, self._committed, self._prefix):
            state[target] = state[source]
        if self._collection is not None:
            self._scores[:, target] = self._scores[:, source]

    # -- one iteration ----------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, *, num_waiting: int) -> StepRecord:
        """One draft-verify-accept iteration over every request."""
        phases = _Phases(device=self.model.device)
        lanes = slice(0, len(self.requests))
        gamma = self.config.num_speculative_tokens
        uniforms = self._uniforms(lanes, gamma)
        drafts, draft_probs = self._draft(uniforms[:, :gamma], phases)
        logits, kept = self._verify(drafts, lanes)
        phases.end("verify")
        accepted = self._accept(drafts, draft_probs, logits, uniforms[:, gamma:], lanes)
        return self._commit(drafts, accepted, kept, lanes, phases, "decode", num_waiting)

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
        packed: DraftCache | None = None
        selection: KVSelection | None = None
        for i in range(gamma):
            if i == 0 or self.policy.needs.per_draft_step:
                packed, selection = self._select(batch, i, packed, selection)
                phases.end("select")
            tokens = self._tokens[:batch].gather(1, (committed + i)[:, None])
            positions = (committed + i)[:, None]
            logits = self._draft_pass(tokens, positions, packed)[:, -1]
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

    def _select(
        self, batch: int, drafted: int, packed: DraftCache | None, before: KVSelection | None
    ) -> tuple[DraftCache | None, KVSelection | None]:
        """Ask the policy and pack what it chose; None packs nothing and drafts densely."""
        committed = self._committed[:batch]
        selection = self.policy.select(
            SelectionInput(
                prefix_lens=self._prefix[:batch],
                committed_lens=committed,
                current_lens=committed + drafted,
                scores=self._scores[:, :batch] if self._collection is not None else None,
            )
        )
        if selection is None:
            return None, None
        if before is not None and _same(selection, before):
            return packed, selection
        gamma = self.config.num_speculative_tokens
        tail = int((committed + gamma - selection.tail_starts).max())
        packed = self._packed_cache(selection.positions.shape[-1] + tail)
        packed.gather(selection, committed + drafted)
        packed.gather_windows(committed + drafted)
        return packed, selection

    def _packed_cache(self, width: int) -> DraftCache:
        """The draft cache, made anew only when it has become too narrow."""
        if self._packed is None or self._packed.width < width:
            self._packed = DraftCache(
                self.cache,
                width=width + PACKED_SLACK,
                max_drafts=self.config.num_speculative_tokens,
                write_through=self.policy.needs.per_draft_step,
            )
        return self._packed

    def _draft_pass(self, tokens: Tensor, positions: Tensor, packed: DraftCache | None) -> Tensor:
        """Logits [B, 1, V] of one draft step."""
        layers = self.model.shape.sliding_windows
        if packed is None:
            self.cache.begin(positions, 0)
            windows = windows_for_positions(positions, layers)
            this = AttentionPass(windows=windows, sliding_windows=layers)
            return self.model.forward(tokens, positions, self.cache, this)
        packed.begin(positions)
        this = AttentionPass(windows=_packed_windows(packed, positions), sliding_windows=layers)
        return self.model.forward(tokens, positions, packed, this)

    def _verify(self, drafts: Tensor, lanes: slice) -> tuple[Tensor, dict[int, Tensor]]:
        """One pass over pending token and drafts.

        Returns:
            Logits [B, gamma + 1, V], and scores by layer whose rows wait for acceptance.
        """
        gamma = drafts.shape[1]
        committed = self._committed[lanes]
        positions = committed[:, None] + torch.arange(gamma + 1, device=drafts.device)
        tokens = self._tokens[lanes].gather(1, positions)
        score = None
        if self._collection is not None:
            score = ScoreSpec(
                rows=tuple(self._collection.row_indices(gamma + 1)),
                metric=self._collection.metric,
                per_kv_head=self._collection.scope == "kv_head",
                reduce_rows=self._collection.rows in EARLY_ROWS,
            )
        layers = self.model.shape.sliding_windows
        this = AttentionPass(
            windows=windows_for_positions(positions, layers), sliding_windows=layers, score=score
        )
        self.cache.begin(positions, lanes.start)
        logits = self.model.forward(tokens, positions, self.cache, this)
        self._prefix[lanes] = committed
        if score is not None and score.reduce_rows:
            self._store_scores(this.scores, lanes)
            return logits, {}
        return logits, this.scores

    def _store_scores(self, scores: dict[int, Tensor], lanes: slice) -> None:
        """Keep reduced scores [B, Hd, N] by layer for the coming selection."""
        for place, layer in enumerate(self.model.shape.full_layers):
            own = scores[layer]
            self._scores[place, lanes, :, : own.shape[-1]] = own

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
        kept: dict[int, Tensor],
        lanes: slice,
        phases: _Phases,
        kind: StepKind,
        num_waiting: int,
    ) -> StepRecord:
        """Move the committed lengths, hand tokens to their requests, write the record."""
        if kept and self._collection is not None:
            reduced = {
                layer: _reduce_rows(rows, accepted.num_accepted, self._collection.rows)
                for layer, rows in kept.items()
            }
            self._store_scores(reduced, lanes)
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


def _same(one: KVSelection, other: KVSelection) -> bool:
    return torch.equal(one.tail_starts, other.tail_starts) and torch.equal(
        one.positions, other.positions
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


def _reduce_rows(rows: Tensor, num_accepted: Tensor, which: str) -> Tensor:
    """Sum the rows [B, R, Hd, N] that acceptance picked: row a, or rows 0..a."""
    index = torch.arange(rows.shape[1], device=rows.device)
    last = num_accepted[:, None]
    picked = index == last if which == "last_accepted" else index <= last
    return (rows * picked[:, :, None, None]).sum(dim=1)
