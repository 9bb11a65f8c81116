"""A loaded model as the loop sees it: its cache's sizes, one forward call, and prefill."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vegas_runtime.engine.attention import PASS_KEYWORD, AttentionPass, windows_for_positions
from vegas_runtime.engine.kv_cache import CacheShape, KVCache, SavedPrefill
from vegas_runtime.errors import ModelError
from vegas_runtime.policies.base import MAX_PROMPT_ROWS

PREFILL_CHUNK: Final = 512

# Layer kinds (transformers' `layer_types`) whose attention this engine runs.
FULL_KIND: Final = "full_attention"
SLIDING_KIND: Final = "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class DecoderModel:
    """A loaded model and what the loop must know of it.

    Attributes:
        model: a causal language model loaded with our attention function.
        shape: sizes of its cache.
        num_heads: query heads.
        has_softcap: whether its attention logits are capped.
        max_positions: longest text it can hold.
        eos_token_ids: tokens that end a text.
        cache_keyword: the name its `forward` takes a cache by.
    """

    model: PreTrainedModel
    shape: CacheShape
    num_heads: int
    has_softcap: bool
    max_positions: int
    eos_token_ids: frozenset[int]
    cache_keyword: str

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: object, this: AttentionPass, keep: int = 0
    ) -> Tensor:
        """Logits [B, S, V] of the last `keep` rows, or of all rows when 0."""
        extra: dict[str, Any] = {self.cache_keyword: cache, PASS_KEYWORD: this}
        output = self.model(
            input_ids=tokens,
            # Rows beyond the longest text are discarded later; an index error would not be.
            position_ids=positions.clamp(max=self.max_positions - 1),
            use_cache=True,
            logits_to_keep=keep,
            **extra,
        )
        logits: Tensor = output.logits
        return logits

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return torch.device(self.model.device)


def describe_model(model: PreTrainedModel) -> DecoderModel:
    """Read what the loop must know off a model's configuration.

    Raises:
        ModelError: a kind of layer that this engine does not run.
    """
    config = model.config.get_text_config(decoder=True)
    layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = [SLIDING_KIND if window else FULL_KIND] * layers
    foreign = sorted(set(kinds) - {FULL_KIND, SLIDING_KIND})
    if foreign:
        raise ModelError(
            f"the model has layers of kind {foreign[0]!r}; the reference engine runs "
            f"{FULL_KIND} and {SLIDING_KIND} layers."
        )
    if FULL_KIND not in kinds:
        raise ModelError(
            "every layer of the model uses a sliding window, so no KV entry could be left out "
            "and there is nothing to tune."
        )
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    parameters = inspect.signature(model.forward).parameters
    ends = model.generation_config.eos_token_id if model.generation_config else None
    ends = config.eos_token_id if ends is None else ends
    return DecoderModel(
        model=model,
        shape=CacheShape(
            num_kv_heads=(kv_heads,) * layers,
            head_dims=(head_dim,) * layers,
            sliding_windows=tuple(window if kind == SLIDING_KIND else None for kind in kinds),
        ),
        num_heads=heads,
        has_softcap=getattr(config, "attn_logit_softcapping", None) is not None,
        max_positions=config.max_position_embeddings,
        eos_token_ids=frozenset([ends] if isinstance(ends, int) else ends or []),
        # transformers renamed the argument in 5.2x; the old name warns there.
        cache_keyword="cache" if "cache" in parameters else "past_key_values",
    )


@torch.inference_mode()
def prefill(
    model: DecoderModel, prompt: Sequence[int], on_chunk: Callable[[int], None] | None = None
) -> SavedPrefill:
    """Cache all of a prompt but its last token.

    Args:
        model: what to run.
        prompt: token ids, at least one.
        on_chunk: called with the tokens done so far.
    """
    count = len(prompt) - 1
    cache = KVCache(
        model.shape,
        num_lanes=1,
        capacity=count,
        dtype=model.model.dtype,
        device=model.device,
    )
    tokens = torch.tensor([list(prompt)], device=model.device)
    # The prompt's last token is a row of the first pass; the others' queries are kept here.
    first_kept = count - (MAX_PROMPT_ROWS - 1)
    queries: dict[int, list[Tensor]] = {}
    for start in range(0, count, PREFILL_CHUNK):
        stop = min(start + PREFILL_CHUNK, count)
        positions = torch.arange(start, stop, device=model.device)[None]
        cache.begin(positions, 0)
        windows = windows_for_positions(positions, model.shape.sliding_windows)
        this = AttentionPass(
            windows=windows,
            sliding_windows=model.shape.sliding_windows,
            num_queries=max(stop - max(start, first_kept), 0),
        )
        model.forward(tokens[:, start:stop], positions, cache, this, keep=1)
        for layer, rows in this.queries.items():
            queries.setdefault(layer, []).append(rows[0])
        if on_chunk is not None:
            on_chunk(stop)
    return SavedPrefill(
        prompt=tuple(prompt),
        keys=[key[0, :, :count] for key in cache.keys],
        values=[value[0, :, :count] for value in cache.values],
        queries={layer: torch.cat(rows, dim=1) for layer, rows in queries.items()},
    )
