"""Tiny models decoded in three ways: by the engine, by transformers, and slowly, from definitions.

The slow way keeps no cache: every draft token is a forward pass over the whole text with an
explicit mask per layer, every score is read off a dense pass with the drafts in it. It knows
selection, tail and acceptance only as `algorithms.md` words them, and shares no code with the
engine or the policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypeVar

import pytest
import slow_baselines
import torch
from slow_baselines import Reads
from tiny_models import make_tiny
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.engine import decoding
from vegas_runtime.engine.acceptance import Acceptance, accept_greedy
from vegas_runtime.engine.attention import register
from vegas_runtime.engine.decoding import Decoder, Request
from vegas_runtime.engine.kv_cache import KVCache, SavedPrefill
from vegas_runtime.engine.model import DecoderModel, describe_model, prefill
from vegas_runtime.engine.paged import AttentionChoice
from vegas_runtime.records import StepRecord

GREEDY: Final = SamplingConfig()

# Of a layer, its queries [H, S, D] and keys [Hkv, S, D]: narrows the mask [H, S, S] in place.
Narrow = Callable[[int, Tensor, Tensor, Tensor], None]

T = TypeVar("T")

# One iteration of one request: its drafts, and how many of them stood.
Turn = tuple[tuple[int, ...], int]


@cache
def tiny_model(architecture: str, seed: int = 0, **overrides: Any) -> DecoderModel:
    """A tiny model as the engine runs it."""
    model = make_tiny(architecture, seed=seed, attn_implementation=register(), **overrides)
    return describe_model(model)


def saved_model(folder: str) -> DecoderModel:
    """A checkpoint as the engine runs it."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=register())
    return describe_model(model.eval())


@cache
def tiny_oracle(architecture: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """The same weights with transformers' own attention."""
    return make_tiny(architecture, seed=seed, **overrides)


def plain_text(oracle: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """New tokens of transformers' greedy `generate`."""
    return [*_plain_text(oracle, tuple(prompt), max_new_tokens)]


@cache
def _plain_text(
    oracle: PreTrainedModel, prompt: tuple[int, ...], max_new_tokens: int
) -> tuple[int, ...]:
    """Remembered: the same prompts are decoded at many settings."""
    ids = torch.tensor([list(prompt)])
    output = oracle.generate(
        ids,
        # Explicit, because a prompt may hold the padding token.
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )
    return tuple(output[0, len(prompt) :].tolist())


# -- the engine -----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Decoded:
    """Outputs in the order of the prompts, and every engine step."""

    outputs: list[list[int]]
    steps: list[StepRecord] = field(default_factory=list)

    def accepted(self, index: int) -> list[int]:
        """Drafts accepted at each of a request's iterations."""
        return [
            count
            for step in self.steps
            if step.kind == "decode"
            for request, count in zip(step.request_ids, step.num_accepted_tokens, strict=True)
            if request == index
        ]

    @property
    def all_accepted(self) -> list[int]:
        """Drafts accepted at every iteration of every request."""
        return [count for index in range(len(self.outputs)) for count in self.accepted(index)]


def decode(
    model: DecoderModel,
    prompts: Sequence[Sequence[int]],
    config: SpeculationConfig,
    *,
    max_new_tokens: int | Sequence[int],
    lanes: int | None = None,
    sampling: SamplingConfig = GREEDY,
    saved: Sequence[SavedPrefill] | None = None,
    after_step: Callable[[Decoder], None] | None = None,
    attention: AttentionChoice = "auto",
) -> Decoded:
    """Decode prompts with `lanes` (default: all) at a time, each request to its own end.

    Args:
        model: what to run.
        prompts: token ids.
        config: how to draft.
        max_new_tokens: output limit of all requests, or of each.
        lanes: requests that run at once.
        sampling: how tokens are drawn; request i is seeded with i.
        saved: prefilled prompts, when they are at hand.
        after_step: called after each step, before finished requests leave.
        attention: who attends; `kernels` runs the operations' CPU implementations.
    """
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    lanes = len(prompts) if lanes is None else lanes
    longest = max(map(len, prompts)) + max(limits)
    cache = KVCache(
        model.shape,
        num_lanes=lanes,
        capacity=longest + config.num_speculative_tokens + 1,
        dtype=model.model.dtype,
        device=model.device,
    )
    decoder = Decoder(model, config, sampling, cache, attention=attention)
    requests = [
        Request(
            index=index,
            saved=prefill(model, prompt) if saved is None else saved[index],
            max_new_tokens=limit,
            random=torch.Generator().manual_seed(index),
        )
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    decoded = Decoded(outputs=[request.output for request in requests])
    waiting = list(requests)
    while waiting or decoder.requests:
        free = lanes - len(decoder.requests)
        starting, waiting = waiting[:free], waiting[free:]
        if starting:
            step = decoder.admit(starting, num_waiting=len(waiting))
        else:
            step = decoder.step(num_waiting=len(waiting))
        decoded.steps.append(step)
        if after_step is not None:
            after_step(decoder)
        decoder.retire()
    return decoded


class DraftSpy:
    """Records every request's drafts on their way into the accept test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turns: dict[int, list[Turn]] = {}
        self._last: list[Turn] = []
        monkeypatch.setattr(decoding, "accept_greedy", self._accept)

    def _accept(self, drafts: Tensor, target_tokens: Tensor) -> Acceptance:
        outcome = accept_greedy(drafts, target_tokens)
        rows = zip(drafts.tolist(), outcome.num_accepted.tolist(), strict=True)
        self._last = [(tuple(tokens), count) for tokens, count in rows]
        return outcome

    def after_step(self, decoder: Decoder) -> None:
        """Book the last accept test's lanes to their requests; first passes draft nothing."""
        if self._last[0][0]:
            for request, turn in zip(decoder.requests, self._last, strict=True):
                self.turns.setdefault(request.index, []).append(turn)


# -- the slow oracle ------------------------------------------------------------------------------


def masked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with the mask [H, S, N] of `layer_masks`; leaves scores in `seen`."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    raw = query @ key.transpose(-1, -2)
    mask = kwargs["layer_masks"][layer]
    if kwargs["narrow"] is not None:
        kwargs["narrow"](layer, query[0], key[0, ::groups], mask)
    logits = (raw * scaling).masked_fill(~mask, -torch.inf)
    sinks = torch.full(logits.shape[1:2], -torch.inf) if s_aux is None else s_aux
    column = sinks.view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
    weights = torch.cat((logits, column), dim=-1).softmax(dim=-1)[..., :-1]
    kwargs["seen"][layer] = {"weight": weights[0], "logit": raw[0]}
    return (weights @ value).transpose(1, 2), None


AttentionInterface.register("slow_oracle", masked_attention)


@dataclass(kw_only=True)
class SlowDecoder:
    """Greedy speculative decoding of one request, recomputed from the text at every turn."""

    model: PreTrainedModel
    config: SpeculationConfig

    def decode(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[list[int], list[Turn]]:
        """Output tokens, and each iteration's drafts and how many were accepted."""
        text, prefix = list(prompt), len(prompt) - 1
        target, scores = self._verify(text, prefix)
        text.append(target[0])
        chosen = self._chosen_after_prefill(scores, prefix)
        turns: list[Turn] = []
        while len(text) < len(prompt) + max_new_tokens:
            drafts = self._draft(text, chosen)
            prefix = len(text) - 1
            target, scores = self._verify(text + drafts, prefix)
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == target[accepted]:
                accepted += 1
            text += [*drafts[:accepted], target[accepted]]
            if self.config.algorithm != "snapkv":
                chosen = self._chosen(scores, prefix, accepted)
            turns.append((tuple(drafts), accepted))
        return text[len(prompt) : len(prompt) + max_new_tokens], turns

    def _forward(
        self, text: list[int], masks: list[Tensor], narrow: Narrow | None = None
    ) -> tuple[Tensor, dict[int, Any]]:
        seen: dict[int, Any] = {}
        with torch.inference_mode():
            output = self.model(
                input_ids=torch.tensor([text]),
                use_cache=False,
                layer_masks=masks,
                narrow=narrow,
                seen=seen,
            )
        return output.logits[0], seen

    def _dense_masks(self, length: int) -> list[Tensor]:
        """Causal [H, S, N] per layer, within the window where the layer slides."""
        rows, columns = torch.arange(length)[:, None], torch.arange(length)
        causal = columns <= rows
        near = columns > rows - (getattr(self.model.config, "sliding_window", None) or length)
        heads = self.model.config.num_attention_heads
        return [
            (causal & near if slides else causal).expand(heads, -1, -1).clone()
            for slides in self._slides()
        ]

    def _slides(self) -> list[bool]:
        config = self.model.config
        kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
        return [kind == "sliding_attention" for kind in kinds]

    def _verify(self, text: list[int], prefix: int) -> tuple[list[int], dict[int, Any]]:
        """Likeliest token after each row from `prefix` on, and every layer's scores."""
        logits, seen = self._forward(text, self._dense_masks(len(text)))
        tokens: list[int] = logits[prefix:].argmax(-1).tolist()
        return tokens, seen

    def _chosen_after_prefill(self, seen: dict[int, Any], prefix: int) -> list[list[Reads]]:
        if self.config.algorithm == "sparse_spec":
            return []
        if self.config.algorithm == "snapkv":
            group = self.model.config.num_attention_heads // self.model.config.num_key_value_heads
            return [
                repeat(slow_baselines.snapkv(self.config, seen[layer]["logit"], group), group)
                for layer in range(self.model.config.num_hidden_layers)
            ]
        return self._chosen(seen, prefix, accepted=0)

    def _chosen(self, seen: dict[int, Any], prefix: int, accepted: int) -> list[list[Reads]]:
        """What the next draft steps read per layer and query head; nothing where that is all."""
        layers = range(self.model.config.num_hidden_layers)
        heads = self.model.config.num_attention_heads
        if self.config.algorithm == "vegas":
            return self._chosen_by_vegas(seen, prefix, accepted)
        if self.config.algorithm == "spec_extend":
            rows = [seen[layer]["weight"][:, prefix + accepted] for layer in layers]
            return [[slow_baselines.spec_extend(self.config, row, prefix)] * heads for row in rows]
        if self.config.algorithm == "sparse_spec":
            group = heads // self.model.config.num_key_value_heads
            blocks = [seen[layer]["weight"][:, prefix:] for layer in layers]
            return [
                repeat(
                    slow_baselines.sparse_spec(self.config, block, group, prefix, accepted), group
                )
                for block in blocks
            ]
        return []

    def _chosen_by_vegas(
        self, seen: dict[int, Any], prefix: int, accepted: int
    ) -> list[list[Reads]]:
        last = seen[0]["weight"].shape[1] - 1 - prefix
        rows = {
            "two": {0, last},
            "all": {*range(last + 1)},
            "first_middle_last": {0, last // 2, last},
            "last_accepted": {accepted},
            "accepted_only": {*range(accepted + 1)},
        }[self.config.rows]
        model = self.model.config
        heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
        group = heads // kv_heads if self.config.scope == "kv_head" else heads
        share = self.config.sparsity_ratio * (prefix + self.config.num_speculative_tokens + 1)
        budget = min(max(math.ceil(share), self.config.min_tokens), prefix + 1)
        layers = []
        for layer in range(model.num_hidden_layers):
            block = seen[layer][self.config.metric][:, [prefix + row for row in sorted(rows)]]
            total = block.double().sum(dim=1)[:, : prefix + 1]
            own = []
            for head in range(heads):
                start = head // group * group
                sums = total[start : start + group].sum(dim=0)
                if self.config.granularity == "page":
                    own.append(slow_baselines.whole_pages(self.config, sums.tolist(), prefix))
                    continue
                best = {*sums.argsort(descending=True, stable=True)[:budget].tolist()}
                own.append(Reads(entries=best, tail_start=prefix + 1))
            layers.append(own)
        return layers

    def _streamed(self, position: int) -> set[int]:
        """First block and newest blocks of 16, for a query at `position`."""
        count = position + 1
        asked = max(self.config.sparsity_ratio * count, self.config.min_tokens)
        blocks = [range(i, min(i + 16, count)) for i in range(0, count, 16)]
        return {j for block in (blocks[0], *blocks[-math.ceil(asked / 16) :]) for j in block}

    def _draft(self, text: list[int], chosen: list[list[Reads]]) -> list[int]:
        """Draft gamma tokens."""
        drafts: list[int] = []
        first = len(text) - 1
        algorithm = self.config.algorithm
        narrow = self._narrow_by_quest(first) if algorithm == "quest" else None
        for _ in range(self.config.num_speculative_tokens):
            whole = text + drafts
            masks = self._dense_masks(len(whole))
            for layer, slides in enumerate(self._slides()):
                if slides or not (chosen or algorithm == "streaming_llm"):
                    continue
                for position in range(first, len(whole)):
                    for head in range(masks[layer].shape[0]):
                        if chosen:
                            reads = chosen[layer][head]
                            seen = reads.entries | {*range(reads.tail_start, position + 1)}
                        else:
                            seen = self._streamed(position)
                        masks[layer][head, position] = False
                        masks[layer][head, position, sorted(seen)] = True
            logits, _ = self._forward(whole, masks, narrow)
            drafts.append(int(logits[-1].argmax()))
        return drafts

    def _narrow_by_quest(self, first: int) -> Narrow:
        """Narrows the masks of rows from `first` on as each row's own query has it."""
        per_head = self.config.scope == "kv_head"

        def narrow(layer: int, query: Tensor, key: Tensor, mask: Tensor) -> None:
            if self._slides()[layer]:
                return
            group = query.shape[0] // key.shape[0]
            for position in range(first, query.shape[1]):
                seen = slow_baselines.quest(self.config, query[:, position], key[:, : position + 1])
                for head, entries in enumerate(
                    repeat(seen, group) if per_head else seen * query.shape[0]
                ):
                    mask[head, position] = False
                    mask[head, position, sorted(entries)] = True

        return narrow


def repeat(per_kv_head: Sequence[T], group: int) -> list[T]:
    """One entry per query head."""
    return [entry for entry in per_kv_head for _ in range(group)]


@cache
def slow_model(architecture: str, seed: int = 0) -> PreTrainedModel:
    """The same weights with the oracle's attention."""
    return make_tiny(architecture, seed=seed, attn_implementation="slow_oracle")
