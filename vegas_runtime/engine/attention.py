"""The attention function we register with transformers: dense or packed keys, collecting or not.

A forward pass carries an `AttentionPass` as keyword argument; transformers' models hand unknown
keywords down to the attention function. The pass says which columns each row sees and what to
collect; the function itself knows nothing of drafting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from vegas_runtime.kernels.reference import ScoreSpec, Window, attention

ATTENTION_NAME: Final = "vegas_tune"
PASS_KEYWORD: Final = "attention_pass"

# Of a layer, its queries [B, H, S, D], keys and values [B, Hkv, N, D]: the keys and values to
# attend to instead and their columns, or None for all of them.
Narrow = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Window] | None]
# Of a layer, its queries [B, H, S, D], the factor on query-key products and the sink logits [H] or
# None: the attention's output [B, S, H, D]. Keys and values are known to it (`paged.py`).
LayerAttention = Callable[[int, Tensor, float, Tensor | None], Tensor]


@dataclass(kw_only=True)
class AttentionPass:
    """One forward pass, as the attention layers see it.

    Attributes:
        windows: per sliding window (None for full attention), the columns each row sees; not
            looked at where `run` is given.
        sliding_windows: per layer, its window or None.
        score: what full-attention layers collect, or None.
        narrow: picks, from a full-attention layer's own queries, what the layer attends to.
        run: attends in the layers' stead, and collects by itself; None for the reference.
        num_queries: full-attention layers keep the queries of so many last rows.
        scores: filled by the pass: layer index to collected scores.
        queries: filled by the pass: layer index to kept queries [B, H, num_queries, D].
    """

    windows: dict[int | None, Window]
    sliding_windows: tuple[int | None, ...]
    score: ScoreSpec | None = None
    narrow: Narrow | None = None
    run: LayerAttention | None = None
    num_queries: int = 0
    scores: dict[int, Tensor] = field(default_factory=dict)
    queries: dict[int, Tensor] = field(default_factory=dict)


def make_window(high: Tensor, low: Tensor | None = None) -> Window:
    """Column ranges [B, S], with the two bounds that need a look at the device."""
    bounds = torch.stack((high.min(), high.max())).tolist()
    return Window(low=low, high=high, min_high=bounds[0], num_columns=bounds[1])


def windows_for_positions(
    positions: Tensor, sliding_windows: tuple[int | None, ...]
) -> dict[int | None, Window]:
    """Causal column ranges where column = position.

    Args:
        positions: [B, S] int64, the rows' positions.
        sliding_windows: per layer; a row at position p sees p - window + 1 .. p.
    """
    windows: dict[int | None, Window] = {}
    high = positions + 1
    for window in set(sliding_windows):
        low = None if window is None else (high - window).clamp(min=0)
        windows[window] = make_window(high, low)
    return windows


def register() -> str:
    """Make the attention function known to transformers; idempotent.

    Returns:
        The name to load a model with.
    """
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    return ATTENTION_NAME


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over what the cache returned; transformers' attention-function signature.

    Args:
        module: the attention module; its `layer_idx` names the layer.
        query: [B, H, S, D].
        key: [B, Hkv, N, D].
        value: [B, Hkv, N, D].
        attention_mask: None; an unregistered mask type makes transformers build none.
        scaling: factor on query-key products.
        s_aux: [H] sink logits, or None.
        softcap: soft cap on logits, or None.
        **kwargs: holds the `AttentionPass`.

    Returns:
        [B, S, H, D], and no weights.
    """
    this: AttentionPass = kwargs[PASS_KEYWORD]
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    window = this.sliding_windows[layer]
    if window is None and this.num_queries:
        # A copy: a view would keep the whole pass's queries.
        this.queries[layer] = query[:, :, -this.num_queries :].to(key.dtype, copy=True)
    if this.run is not None:
        assert softcap is None, "planned for a model that does not cap its logits"
        return this.run(layer, query.to(key.dtype), scaling, s_aux).to(query.dtype), None
    columns = this.windows[window]
    if window is None and this.narrow is not None:
        narrowed = this.narrow(layer, query, key, value)
        key, value, columns = (key, value, columns) if narrowed is None else narrowed
    output, scores = attention(
        query.to(key.dtype),
        key,
        value,
        scale=scaling,
        window=columns,
        sinks=s_aux,
        softcap=softcap,
        score=this.score if window is None else None,
    )
    if scores is not None:
        this.scores[layer] = scores
    return output.to(query.dtype), None
