from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from tiny_models import ARCHITECTURES, make_tiny, tiny_prompt
from torch import Tensor

from vegas_runtime.engine.attention import register
from vegas_runtime.engine.model import describe_model, prefill
from vegas_runtime.kernels.reference import ScoreSpec, Window, attention

# Both sides differ only in rounding: sums of at most 16 (head dimension) and 40 (columns) float32
# products of size ~1 against float64, where an error of a few units of 2^-24 per term stays
# below 1e-5.
FLOAT32_TOLERANCE = 1e-5
# Logits, weights and output are each rounded to 8 bits of mantissa (2^-9 relative); outputs are
# averages of values of size ~1, logits reach ~10.
BFLOAT16_TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs of one call; `high` and `low` are the visible columns per row."""

    query: Tensor
    key: Tensor
    value: Tensor
    low: Tensor | None
    high: Tensor
    sinks: Tensor | None
    softcap: float | None

    @property
    def window(self) -> Window:
        return Window(
            low=self.low,
            high=self.high,
            min_high=int(self.high.min()),
            num_columns=int(self.high.max()),
        )

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.query.shape[-1])


def make_case(
    seed: int,
    *,
    heads: int,
    kv_heads: int,
    rows: int = 3,
    batch: int = 3,
    columns: int = 40,
    sliding: bool = False,
    sinks: bool = False,
    softcap: float | None = None,
) -> Case:
    """Random tensors, ragged windows; the last column is never visible."""
    random = torch.Generator().manual_seed(seed)
    dim = 16
    query = 2 * torch.randn(batch, heads, rows, dim, generator=random)
    key = torch.randn(batch, kv_heads, columns, dim, generator=random)
    value = torch.randn(batch, kv_heads, columns, dim, generator=random)
    committed = torch.randint(0, columns - rows, (batch, 1), generator=random)
    high = committed + torch.arange(1, rows + 1)
    low = (high - 7).clamp(min=0) if sliding else None
    return Case(
        query=query,
        key=key,
        value=value,
        low=low,
        high=high,
        sinks=torch.randn(heads, generator=random) if sinks else None,
        softcap=softcap,
    )


def call(case: Case, score: ScoreSpec | None = None) -> tuple[Tensor, Tensor | None]:
    return attention(
        case.query,
        case.key,
        case.value,
        scale=case.scale,
        window=case.window,
        sinks=case.sinks,
        softcap=case.softcap,
        score=score,
    )


def slow_attention(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, one number at a time, in float64.

    Returns:
        Output [B, S, H, D]; weights and raw products [B, S, H, N], zero where not visible.
    """
    batch, heads, rows, dim = case.query.shape
    group = heads // case.key.shape[1]
    columns = case.window.num_columns
    output = torch.zeros(batch, rows, heads, dim, dtype=torch.float64)
    weights = torch.zeros(batch, rows, heads, columns, dtype=torch.float64)
    raw = torch.zeros_like(weights)
    for b, s, h in itertools.product(range(batch), range(rows), range(heads)):
        low = 0 if case.low is None else int(case.low[b, s])
        high = int(case.high[b, s])
        q = case.query[b, h, s].double().tolist()
        logits = {}
        for j in range(low, high):
            k = case.key[b, h // group, j].double().tolist()
            product = math.fsum(x * y for x, y in zip(q, k, strict=True))
            raw[b, s, h, j] = product
            logit = product * case.scale
            if case.softcap is not None:
                logit = case.softcap * math.tanh(logit / case.softcap)
            logits[j] = logit
        total = math.fsum(math.exp(logit) for logit in logits.values())
        if case.sinks is not None:
            total += math.exp(float(case.sinks[h]))
        for j, logit in logits.items():
            weights[b, s, h, j] = math.exp(logit) / total
            output[b, s, h] += weights[b, s, h, j] * case.value[b, h // group, j].double()
    return output, weights, raw


def slow_scores(values: Tensor, score: ScoreSpec, kv_heads: int) -> Tensor:
    """Scores out of per-row, per-head values [B, S, H, N], as `attention` documents them."""
    batch, _, heads, columns = values.shape
    group = heads // kv_heads
    owners = (
        [range(k * group, (k + 1) * group) for k in range(kv_heads)]
        if score.per_kv_head
        else [range(heads)]
    )
    kept = torch.zeros(batch, len(score.rows), len(owners), columns, dtype=torch.float64)
    for place, row in enumerate(score.rows):
        for head, members in enumerate(owners):
            for member in members:
                kept[:, place, head] += values[:, row, member] / len(members)
    return kept.sum(dim=1) if score.reduce_rows else kept


SHAPES = [
    pytest.param({"heads": 4, "kv_heads": 4}, id="mha"),
    pytest.param({"heads": 6, "kv_heads": 2}, id="gqa"),
    pytest.param({"heads": 4, "kv_heads": 1}, id="mqa"),
    pytest.param({"heads": 4, "kv_heads": 2, "rows": 1}, id="one-row"),
    pytest.param({"heads": 4, "kv_heads": 2, "batch": 1, "rows": 8}, id="one-request"),
    pytest.param({"heads": 4, "kv_heads": 2, "sliding": True}, id="sliding"),
    pytest.param({"heads": 6, "kv_heads": 3, "sinks": True}, id="sinks"),
    pytest.param({"heads": 4, "kv_heads": 2, "softcap": 1.5}, id="softcap"),
    pytest.param(
        {"heads": 4, "kv_heads": 2, "sliding": True, "sinks": True, "softcap": 2.0}, id="all"
    ),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_output_is_the_definition(shape: dict[str, int], seed: int) -> None:
    case = make_case(seed, **shape)  # type: ignore[arg-type]
    output, collected = call(case)
    expected, _, _ = slow_attention(case)
    assert collected is None
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("metric", ["weight", "logit"])
@pytest.mark.parametrize("per_kv_head", [False, True])
@pytest.mark.parametrize("reduce_rows", [False, True])
@pytest.mark.parametrize("rows", [(0,), (0, 2), (0, 1, 2)])
def test_collected_scores_are_the_definition(
    metric: str, per_kv_head: bool, reduce_rows: bool, rows: tuple[int, ...]
) -> None:
    case = make_case(3, heads=6, kv_heads=3, sinks=True, softcap=3.0)
    score = ScoreSpec(rows=rows, metric=metric, per_kv_head=per_kv_head, reduce_rows=reduce_rows)
    _, collected = call(case, score)
    _, weights, raw = slow_attention(case)
    expected = slow_scores(weights if metric == "weight" else raw, score, kv_heads=3)
    assert collected is not None
    assert collected.dtype == torch.float32
    assert collected.shape == expected.shape
    # Logits are undefined where a row cannot see; candidates end where row 0 does.
    for b, count in enumerate(case.high[:, 0].tolist()):
        torch.testing.assert_close(
            collected[b, ..., :count].double(),
            expected[b, ..., :count],
            rtol=0,
            # Raw products are unscaled: sums of 16 products of size ~4, three rows together.
            atol=FLOAT32_TOLERANCE if metric == "weight" else 8 * FLOAT32_TOLERANCE,
        )


def test_collected_weights_are_zero_outside_the_window() -> None:
    case = make_case(4, heads=4, kv_heads=2, sliding=True)
    score = ScoreSpec(rows=(0, 1, 2), metric="weight", per_kv_head=True, reduce_rows=False)
    _, collected = call(case, score)
    assert collected is not None
    assert case.low is not None
    columns = torch.arange(case.window.num_columns)
    outside = (columns < case.low[..., None]) | (columns >= case.high[..., None])
    assert bool(outside.any())
    assert collected[outside[:, :, None].expand_as(collected)].abs().max() == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("metric", ["weight", "logit"])
def test_collecting_does_not_touch_the_output(
    shape: dict[str, int], dtype: torch.dtype, metric: str
) -> None:
    case = cast(make_case(5, **shape), dtype)  # type: ignore[arg-type]
    last = case.query.shape[2] - 1
    score = ScoreSpec(
        rows=tuple(sorted({0, last})), metric=metric, per_kv_head=False, reduce_rows=True
    )
    plain, _ = call(case)
    collecting, collected = call(case, score)
    assert collected is not None
    assert torch.equal(plain, collecting)


@pytest.mark.parametrize("shape", SHAPES)
def test_content_outside_the_window_does_not_matter(shape: dict[str, int]) -> None:
    case = make_case(6, **shape)  # type: ignore[arg-type]
    score = ScoreSpec(rows=(0,), metric="weight", per_kv_head=False, reduce_rows=True)
    before, scores_before = call(case, score)
    garbage = Case(
        query=case.query,
        key=case.key.clone(),
        value=case.value.clone(),
        low=case.low,
        high=case.high,
        sinks=case.sinks,
        softcap=case.softcap,
    )
    for b in range(case.query.shape[0]):
        stop = int(case.high[b].max())
        start = 0 if case.low is None else int(case.low[b].min())
        for tensor in (garbage.key, garbage.value):
            tensor[b, :, stop:] = 1e30
            tensor[b, :, :start] = -1e30
    after, scores_after = call(garbage, score)
    assert torch.equal(before, after)
    assert scores_before is not None
    assert scores_after is not None
    assert torch.equal(scores_before, scores_after)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 20])
def test_bfloat16_output_is_near(shape: dict[str, int], rows: int) -> None:
    # 1 and 20 rows times the group size lie on both sides of the switch between the two forms
    # of the query-key product.
    case = cast(make_case(7, **{**shape, "rows": rows}), torch.bfloat16)  # type: ignore[arg-type]
    output, _ = call(case)
    expected, _, _ = slow_attention(case)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=BFLOAT16_TOLERANCE)


def cast(case: Case, dtype: torch.dtype) -> Case:
    return Case(
        query=case.query.to(dtype),
        key=case.key.to(dtype),
        value=case.value.to(dtype),
        low=case.low,
        high=case.high,
        sinks=case.sinks,
        softcap=case.softcap,
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_registered_attention_prefills_what_transformers_caches(architecture: str) -> None:
    prompt = tiny_prompt(60)
    oracle = make_tiny(architecture)
    model = describe_model(make_tiny(architecture, attn_implementation=register()))
    saved = prefill(model, prompt)
    ids = torch.tensor([prompt[:-1]])
    expected = oracle(ids, attention_mask=torch.ones_like(ids), use_cache=True).past_key_values
    assert len(saved.keys) == len(expected.layers) == model.shape.num_layers
    for layer, held in enumerate(expected.layers):
        # transformers drops what a sliding layer can no longer see; ours keeps it.
        count = held.keys.shape[2]
        for own, other in ((saved.keys, held.keys), (saved.values, held.values)):
            assert own[layer].shape[1] == len(prompt) - 1
            # Float32 rounding of differently ordered sums, carried through the layers; entries
            # are of size 1 to 10.
            torch.testing.assert_close(own[layer][:, -count:], other[0], rtol=1e-4, atol=1e-4)


def test_registering_twice_is_harmless() -> None:
    assert register() == register()
