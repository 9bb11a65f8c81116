"""The ablation's own rules: the same time for all, and no rival that is made of straw."""

from __future__ import annotations

from contextlib import suppress

import pytest

from benchmarks.grid import Grid
from benchmarks.rivals import RIVALS, Measurer, SpentError


@pytest.fixture(scope="module")
def grid() -> Grid:
    return Grid.open()


@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_spends_its_time_and_finds_a_good_setting(grid: Grid, name: str) -> None:
    engine = grid.engine()
    ask = Measurer(grid, engine, budget_s=400.0)
    with suppress(SpentError):
        RIVALS[name](grid, ask, 0)
    num_passes = sum(map(len, ask.rates.values()))
    assert num_passes >= 30
    # Passes as they were recorded: 10 % between single ones. A straw man would not come so close.
    assert grid.regret(ask.best()) < 0.2
    assert grid.regret(ask.best()) < grid.regret(grid.plain) or name == "random"


def test_a_rewound_engine_starts_over(grid: Grid) -> None:
    engine = grid.engine()
    first = Measurer(grid, engine, 1e9)(grid.plain)
    again = Measurer(grid, engine, 1e9)(grid.plain)
    assert first == again
    assert engine.now_s() == 0.0
