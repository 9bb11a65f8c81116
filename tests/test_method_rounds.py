"""Methods side by side on a synthetic engine whose truth is known."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from synthetic import make_blocks
from synthetic_methods import SHAPES, MethodsEngine

from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.errors import BackendError, StorageError
from vegas_tune.bench import Silent
from vegas_tune.laboratory import MemoryStore
from vegas_tune.measure import Estimate
from vegas_tune.method_rounds import (
    MAX_ROUNDS,
    OVERHEAD_PAIRS,
    ComparisonLab,
    SideBySide,
    _order,
    measure_side_by_side,
)
from vegas_tune.method_table import (
    MethodRow,
    main_table,
    method_rows,
    position_table,
    selection_overhead,
)
from vegas_tune.methods import PLAIN
from vegas_tune.plan import Plan, make_plan
from vegas_tune.record_folder import RecordFolder

BASE = SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0, min_tokens=32)
SETTINGS = {
    "vegas": BASE.replace(num_speculative_tokens=6, sparsity_ratio=0.05),
    "streaming_llm": BASE.replace(
        algorithm="streaming_llm", num_speculative_tokens=4, sparsity_ratio=0.1
    ),
    "quest": BASE.replace(algorithm="quest", num_speculative_tokens=5, sparsity_ratio=0.1),
}
BLOCKS = make_blocks(3, sampling=SamplingConfig(temperature=0.6))


def plan(budget_s: float = 1e6, tokens: int = 2400) -> Plan:
    return make_plan(BASE, BLOCKS, budget_s=budget_s, tokens=tokens)


class Comparison:
    """One comparison of the synthetic methods."""

    def __init__(
        self,
        engine: MethodsEngine | None = None,
        store: MemoryStore | RecordFolder | None = None,
        *,
        budget_s: float = 1e6,
        can_skip: bool = True,
    ) -> None:
        self.engine = engine or MethodsEngine()
        self.store = store or MemoryStore()
        self.plan = plan(budget_s)
        self.lab = ComparisonLab(self.plan, self.engine, BLOCKS, store=self.store)
        self.measured: SideBySide = measure_side_by_side(
            self.plan, SETTINGS, self.lab, Silent(), can_skip_selection=can_skip
        )

    @property
    def rows(self) -> dict[str, MethodRow]:
        return {row.name: row for row in method_rows(SETTINGS, self.plan.plain, self.measured)}


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return Comparison()


def true_rate(name: str) -> float:
    config = SETTINGS[name]
    return SHAPES[name].rate(config.num_speculative_tokens, config.sparsity_ratio)


def covers(estimate: Estimate | None, truth: float, slack: float) -> bool:
    assert estimate is not None
    return estimate.low * (1 - slack) <= truth <= estimate.high * (1 + slack)


# ------------------------------------------------------------------ the table


def test_rows_come_fastest_first_with_plain_decoding_last(comparison: Comparison) -> None:
    rates = sorted(SETTINGS, key=lambda name: -true_rate(name))
    assert list(comparison.rows) == [*rates, PLAIN]


def test_throughput_and_its_ratios_are_the_engines_own(comparison: Comparison) -> None:
    plain = SHAPES["vegas"].rate(0, 1.0)
    for name in SETTINGS:
        row = comparison.rows[name]
        others = [true_rate(each) for each in SETTINGS if each != name]
        # 1 % beyond a 95 % interval of a ten-round mean at 1.5 % noise: five of its errors.
        assert covers(row.decode_tok_s, true_rate(name), 0.01)
        assert covers(row.vs_plain, true_rate(name) / plain, 0.01)
        assert covers(row.vs_best_other, true_rate(name) / max(others), 0.01)
        assert true_rate(row.best_other) == max(others)


def test_selection_overhead_is_the_time_the_same_drafts_save_without_it(
    comparison: Comparison,
) -> None:
    for name, config in SETTINGS.items():
        shape, gamma = SHAPES[name], config.num_speculative_tokens
        whole = (
            gamma * shape.draft_s(config.sparsity_ratio)
            + shape.select_s
            + shape.verify_s(gamma)
            + shape.other_s
        )
        overhead = comparison.rows[name].selection_overhead
        assert overhead is not None
        assert overhead.n == OVERHEAD_PAIRS
        # Run-to-run noise of 1.5 % in both passes of six pairs: 2 % covers three of its errors.
        assert overhead.est == pytest.approx(shape.select_s / whole, abs=0.02)
        assert overhead.low <= overhead.est <= overhead.high


def test_tokens_per_iteration_and_acceptance_by_position(comparison: Comparison) -> None:
    for name, config in SETTINGS.items():
        row, gamma = comparison.rows[name], config.num_speculative_tokens
        truth = 1 + SHAPES[name].accepted(gamma, config.sparsity_ratio)
        assert covers(row.tokens_per_iteration, truth, 0.01)
        assert len(row.position_acceptance) == gamma
        first = row.position_acceptance[0]
        # Three binomial errors of the thousand and more first drafts.
        assert first.est == pytest.approx(SHAPES[name].agreement(config.sparsity_ratio), abs=0.03)


def test_at_one_gamma_every_method_drafts_as_far_as_the_first(comparison: Comparison) -> None:
    measured = comparison.measured
    assert measured.gamma == 6
    for name, passes in measured.same_gamma.items():
        assert {one.point.config.num_speculative_tokens for one in passes} == {6}
        assert {one.point.config.sparsity_ratio for one in passes} == {
            SETTINGS[name].sparsity_ratio
        }
    tokens = {name: comparison.rows[name].tokens_at_one_gamma for name in SETTINGS}
    assert all(tokens.values())
    assert tokens["vegas"].est > tokens["quest"].est > tokens["streaming_llm"].est  # type: ignore[union-attr]


def test_tables_hold_every_method_and_position(comparison: Comparison) -> None:
    rows = tuple(comparison.rows.values())
    table = main_table(rows)
    assert [cells[0] for cells in table.rows] == [row.name for row in rows]
    assert all(len(cells) == len(table.columns) for cells in table.rows)
    positions = position_table(rows)
    assert positions.columns[-1] == "draft 6"
    assert all(len(cells) == len(positions.columns) for cells in positions.rows)
    json.dumps([row.to_dict() for row in rows], allow_nan=False)


# ------------------------------------------------------------------ how it is measured


def test_every_round_holds_every_method_on_the_same_text_and_seed(comparison: Comparison) -> None:
    measured = comparison.measured
    assert len(measured.rounds) == MAX_ROUNDS
    for found in measured.rounds:
        assert set(found) == {*SETTINGS, PLAIN}
        assert len({(one.point.block, one.point.replicate) for one in found.values()}) == 1
        # Held out: no setting was chosen on this text.
        assert next(iter(found.values())).point.block in comparison.plan.validation_blocks
    replicates = [next(iter(found.values())).point.replicate for found in measured.rounds]
    assert len(set(replicates)) == MAX_ROUNDS


def test_no_method_always_follows_the_same_one() -> None:
    names = [*SETTINGS, PLAIN]
    orders = [_order(names, number) for number in range(MAX_ROUNDS)]
    assert all(sorted(order) == sorted(names) for order in orders)
    first = Counter(order[0] for order in orders)
    assert max(first.values()) <= MAX_ROUNDS // 2
    after = Counter((one, other) for order in orders for one, other in pairwise(order))
    assert max(after.values()) <= MAX_ROUNDS // 2


def test_pairs_draft_the_same_tokens(comparison: Comparison) -> None:
    for pairs in comparison.measured.overhead.values():
        assert len(pairs) == OVERHEAD_PAIRS
        for with_it, without in pairs:
            assert [s.num_accepted_tokens for s in with_it.run.steps] == [
                s.num_accepted_tokens for s in without.run.steps
            ]


def test_a_stopped_comparison_goes_on_without_measuring_anything_twice(tmp_path: Path) -> None:
    def stop(config: SpeculationConfig, number: int) -> None:
        if number == 37:
            raise KeyboardInterrupt

    broken = MethodsEngine(faults=stop)
    with pytest.raises(KeyboardInterrupt):
        Comparison(broken, RecordFolder(tmp_path))
    kept = len(list(tmp_path.glob("*.z")))
    assert kept > 20
    engine = MethodsEngine()
    resumed = Comparison(engine, RecordFolder(tmp_path))
    complete = len(list(tmp_path.glob("*.z")))
    # Recordings are made anew: they are no measurements.
    recordings = len(engine.passes) - (complete - kept)
    assert 0 <= recordings <= len(SETTINGS)
    again = Comparison(MethodsEngine(faults=_never), RecordFolder(tmp_path))
    assert again.engine.passes == []
    assert {n: r.to_dict() for n, r in again.rows.items()} == {
        n: r.to_dict() for n, r in resumed.rows.items()
    }


def _never(config: SpeculationConfig, number: int) -> None:
    raise AssertionError("nothing was left to measure")


def test_a_record_of_another_setting_is_measured_again(tmp_path: Path) -> None:
    Comparison(store=RecordFolder(tmp_path))
    shorter = plan(tokens=1200)
    engine = MethodsEngine()
    lab = ComparisonLab(shorter, engine, BLOCKS, store=RecordFolder(tmp_path))
    measure_side_by_side(shorter, SETTINGS, lab, Silent(), can_skip_selection=True)
    assert len(engine.passes) > MAX_ROUNDS * len(SETTINGS)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    Comparison(store=RecordFolder(tmp_path))
    victim = sorted(tmp_path.glob("*.z"))[0]
    victim.write_bytes(victim.read_bytes()[:40])
    with pytest.raises(StorageError, match=victim.name):
        RecordFolder(tmp_path)


def test_the_budget_ends_the_rounds(tmp_path: Path) -> None:
    full = Comparison()
    half_s = full.measured.spent_s / 2
    half = Comparison(budget_s=half_s)
    assert half.measured.spent_s <= half_s * 1.1
    assert 2 <= len(half.measured.rounds) < MAX_ROUNDS


def test_without_time_the_rows_say_what_is_missing() -> None:
    rows = Comparison(budget_s=20.0).rows
    for name in SETTINGS:
        assert rows[name].vs_plain is None
        assert "rounds" in rows[name].note


def test_an_engine_that_cannot_skip_selection_says_so_in_the_rows() -> None:
    comparison = Comparison(can_skip=False)
    assert comparison.measured.overhead == {}
    rows = method_rows(
        SETTINGS, comparison.plan.plain, comparison.measured, why_no_overhead="it cannot"
    )
    assert {row.note for row in rows if row.name != PLAIN} == {"it cannot"}
    assert all(row.selection_overhead is None for row in rows)


def test_a_method_that_fails_leaves_no_complete_round() -> None:
    def fail(config: SpeculationConfig, number: int) -> None:
        if config.algorithm == "quest":
            raise BackendError("the engine lost its head.")

    comparison = Comparison(MethodsEngine(faults=fail))
    assert comparison.measured.rounds == ()
    assert {f.point.config.algorithm for f in comparison.measured.failures} == {"quest"}
    assert "0 complete rounds" in comparison.rows["vegas"].note


def test_an_untuned_method_keeps_its_row() -> None:
    comparison = Comparison()
    rows = method_rows({**SETTINGS, "snapkv": None}, comparison.plan.plain, comparison.measured)
    assert rows[-1].name == "snapkv"
    assert rows[-1].config is None
    assert rows[-1].note


def test_one_pair_gives_no_overhead(comparison: Comparison) -> None:
    pairs = comparison.measured.overhead["quest"]
    assert selection_overhead(pairs[:1]) is None
    assert selection_overhead(pairs[:2]) is not None
