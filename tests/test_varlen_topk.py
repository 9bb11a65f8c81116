from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vegas_runtime.kernels.reference import varlen_topk

# Few distinct values, so that ties are the rule; extremes, so that order among them counts.
FLOAT32_MAX = 3.4028234663852886e38
VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 1.0, -1.0, 1e-45, FLOAT32_MAX, -FLOAT32_MAX]),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.floats(width=32),
)


@st.composite
def rows_and_budgets(draw: st.DrawFn) -> tuple[list[list[float]], list[int], list[int]]:
    """Score rows of one length, and per row its valid entries and its budget."""
    length = draw(st.integers(1, 24))
    count = draw(st.integers(1, 5))
    scores = [draw(st.lists(VALUES, min_size=length, max_size=length)) for _ in range(count)]
    lens = [draw(st.integers(1, length)) for _ in range(count)]
    budgets = [draw(st.integers(1, valid)) for valid in lens]
    return scores, lens, budgets


def stable_sort_topk(scores: list[float], count: int, budget: int) -> list[int]:
    """The definition: sort by score, NaN lowest, earlier positions first among equals."""
    keys = [-math.inf if math.isnan(score) else score for score in scores[:count]]
    ranked = sorted(range(count), key=lambda position: -keys[position])
    return sorted(ranked[:budget])


def padded(row: list[int], width: int) -> list[int]:
    return row + [-1] * (width - len(row))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(rows_and_budgets())
@example(([[FLOAT32_MAX, math.inf]], [2], [1]))
@example(([[-math.inf, -FLOAT32_MAX]], [2], [1]))
@example(([[math.nan, -math.inf, math.nan]], [3], [2]))
@example(([[1e-45, 1.401298464324817e-45]], [2], [1]))
def test_it_is_a_stable_sort(case: tuple[list[list[float]], list[int], list[int]]) -> None:
    rows, lens, budgets = case
    scores = torch.tensor(rows)
    chosen = varlen_topk(scores, torch.tensor(lens), torch.tensor(budgets))
    width = max(budgets)
    assert chosen.dtype == torch.int64
    assert chosen.tolist() == [
        padded(stable_sort_topk(row, count, budget), width)
        # Back from float32, where numbers may have become equal.
        for row, count, budget in zip(scores.tolist(), lens, budgets, strict=True)
    ]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 2)])
def test_leading_dimensions_are_independent_rows(shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(0)
    # 12 levels over 50 columns: every row has ties at its threshold.
    scores = torch.randint(0, 12, (*shape, 50), generator=random).float()
    lens = torch.randint(1, 51, shape, generator=random)
    budgets = (lens * torch.rand(shape, generator=random)).long().clamp(min=1)
    chosen = varlen_topk(scores, lens, budgets)
    assert chosen.shape == (*shape, int(budgets.max()))
    flat = chosen.reshape(-1, chosen.shape[-1]).tolist()
    rows = zip(
        scores.reshape(-1, 50).tolist(),
        lens.reshape(-1).tolist(),
        budgets.reshape(-1).tolist(),
        strict=True,
    )
    expected = [stable_sort_topk(row, count, budget) for row, count, budget in rows]
    assert flat == [padded(row, chosen.shape[-1]) for row in expected]


def test_a_uniform_row_keeps_its_first_entries() -> None:
    chosen = varlen_topk(torch.ones(1, 9), torch.tensor([7]), torch.tensor([4]))
    assert chosen.tolist() == [[0, 1, 2, 3]]


def test_entries_beyond_the_context_are_ignored_whatever_they_hold() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, math.inf, math.nan, 1e30]])
    chosen = varlen_topk(scores, torch.tensor([3]), torch.tensor([2]))
    assert chosen.tolist() == [[1, 2]]


def test_the_argument_is_left_as_it_was() -> None:
    scores = torch.tensor([[math.nan, math.inf, -math.inf, 1.0]])
    before = scores.clone()
    varlen_topk(scores, torch.tensor([4]), torch.tensor([2]))
    assert same_bits(scores, before)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))
