from __future__ import annotations

import pytest
from synthetic import PLATEAU, RISING, Shape, SyntheticEngine, make_blocks

from vegas_runtime.config import SpeculationConfig
from vegas_tune.measure import Measurement, measure
from vegas_tune.predictor import Predictor

BASE = SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0, min_tokens=32)


def _figures(shape: Shape, gamma: int, ratio: float, tokens: int = 20_000) -> Measurement:
    engine = SyntheticEngine(shape, run_cv=0.0, step_cv=0.0)
    engine.configure(BASE.replace(num_speculative_tokens=gamma, sparsity_ratio=ratio))
    figures = measure(engine.run(make_blocks(1)[0], replicate=0, max_tokens=tokens, deadline_s=1e9))
    assert isinstance(figures, Measurement)
    return figures


def _fitted(shape: Shape, measured: list[tuple[int, float]]) -> Predictor:
    return Predictor(
        8,
        [
            (
                BASE.replace(num_speculative_tokens=gamma, sparsity_ratio=ratio),
                _figures(shape, gamma, ratio),
            )
            for gamma, ratio in measured
        ],
    )


@pytest.mark.parametrize("shape", [PLATEAU, RISING], ids=lambda shape: shape.name)
def test_a_pass_at_the_largest_gamma_predicts_the_smaller_ones(shape: Shape) -> None:
    predictor = _fitted(shape, [(0, 1.0), (15, 0.05), (15, 0.1)])
    for gamma in (1, 3, 5, 10):
        for ratio in (0.05, 0.1):
            config = BASE.replace(num_speculative_tokens=gamma, sparsity_ratio=ratio)
            truth = _figures(shape, gamma, ratio).decode_tok_s.est
            # One block of 8 requests at 20k tokens: about 1 % of acceptance noise on each side.
            assert predictor.rate(config) == pytest.approx(truth, rel=0.04)


def test_the_predictor_reads_between_ratios_and_beyond_gamma() -> None:
    predictor = _fitted(PLATEAU, [(0, 1.0), (5, 0.05), (5, 0.25)])
    between = predictor.rate(BASE.replace(num_speculative_tokens=5, sparsity_ratio=0.1))
    assert between == pytest.approx(PLATEAU.rate(5, 0.1), rel=0.05)
    beyond = predictor.rate(BASE.replace(num_speculative_tokens=10, sparsity_ratio=0.05))
    assert beyond == pytest.approx(PLATEAU.rate(10, 0.05), rel=0.25)


def test_the_predictor_orders_best_first_and_the_unknown_last() -> None:
    configs = [BASE.replace(num_speculative_tokens=g, sparsity_ratio=0.05) for g in (15, 1, 4)]
    known = _fitted(PLATEAU, [(0, 1.0), (15, 0.05)])
    assert [c.num_speculative_tokens for c in known.best(configs)] == [4, 1, 15]
    plain_only = _fitted(PLATEAU, [(0, 1.0)])
    assert plain_only.best([*configs, BASE])[0] == BASE
    assert Predictor(8, []).best(configs) == configs
