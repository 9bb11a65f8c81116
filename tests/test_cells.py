from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic import PLATEAU, Shape, SyntheticEngine, make_blocks
from test_request import options

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import UsageError
from vegas_runtime.profile import load_profile
from vegas_runtime.protocol import PromptBlock
from vegas_runtime.records import Run
from vegas_tune import cells_tune
from vegas_tune.cells import (
    CellAnswer,
    CellKey,
    CostModel,
    Measurements,
    dominated_by,
    make_buckets,
    make_cells,
    next_cell,
    parse_counts,
)
from vegas_tune.evidence import unpack_records
from vegas_tune.gate import replay_decisions
from vegas_tune.laboratory import Laboratory
from vegas_tune.outcomes import Measured
from vegas_tune.plan import GAMMA, Point, make_plan
from vegas_tune.request import SweepRequest
from vegas_tune.sweep_outcome import SweepOutcome
from vegas_tune.workload import Workload

PLAIN = SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0, min_tokens=32)
GRID = make_cells((8, 1, 32), (16384, 1024))


def shape_of(cell: CellKey) -> Shape:
    """A machine on which drafting pays where much KV is read, and not where little is."""
    kv_s = 4e-6 * cell.batch * cell.context
    return replace(
        PLATEAU,
        draft_s=lambda ratio: 0.030 + kv_s * ratio,
        verify_s=lambda gamma: 0.030 + kv_s + 0.0005 * cell.batch * gamma,
    )


class CellEngine(SyntheticEngine):
    """Runs each block as fast as its cell's machine; `too_big` cells run out of memory."""

    too_big: Callable[[CellKey], bool] = staticmethod(lambda cell: False)

    def run(self, block: PromptBlock, **more: Any) -> Run:
        cell = CellKey(block.batch_size, len(block.prompts[0]))
        if self.too_big(cell):
            raise MemoryError("out of memory")
        self.shape = shape_of(cell)
        return super().run(block, **more)


def _measured(cell: CellKey) -> Measurements:
    """Gamma 15 and plain decoding of a cell, measured without noise."""
    blocks = make_blocks(1, batch_size=cell.batch, prompt_tokens=cell.context)
    plan = make_plan(PLAIN, blocks, budget_s=1e9, tokens=150 * cell.batch)
    engine = SyntheticEngine(shape_of(cell), run_cv=0.0, step_cv=0.0)
    lab = Laboratory(plan, engine, blocks)
    found = []
    for gamma, ratio in ((0, 1.0), (15, 0.05), (15, 0.5)):
        config = plan.config(gamma, ratio)
        point = Point(step=GAMMA, config=config, block=0, replicate=0, max_tokens=plan.tokens)
        outcome = lab.measure(point)
        assert isinstance(outcome, Measured)
        found.append((config, outcome.figures))
    return found


# ------------------------------------------------------------------ reading


def test_counts_are_read_in_the_order_given() -> None:
    assert parse_counts("--context", "4k,16K, 512") == (4096, 16384, 512)
    assert parse_counts("--batch", "8,1,8") == (8, 1)
    for text in ("", "4k,", "0", "1.5k", "-3", "many"):
        with pytest.raises(UsageError, match="whole numbers above 0"):
            parse_counts("--batch", text)


def test_one_option_of_each_is_one_cell_and_several_are_a_grid() -> None:
    one = SweepRequest.from_options(options(batch="4", context="2k"))
    assert one.cells == ((4, 2048),)
    assert (one.spec.batch_size, one.spec.context_len) == (4, 2048)
    several = SweepRequest.from_options(options(batch="1,8", context="2k,4k"))
    assert several.cells == ((1, 2048), (1, 4096), (8, 2048), (8, 4096))
    assert several.spec.batch_size == 1
    assert len(SweepRequest.from_options(options()).cells) == 1


# ------------------------------------------------------------------ the cost model orders


def test_the_model_tells_cells_where_drafting_pays_from_those_where_it_does_not() -> None:
    known = [CellKey(8, 16384), CellKey(1, 1024)]
    model = CostModel({cell: _measured(cell) for cell in known})
    for cell in GRID:
        truth = max(
            shape_of(cell).rate(gamma, 0.05, cell.batch) for gamma in range(1, 16)
        ) / shape_of(cell).rate(0, 1.0, cell.batch)
        predicted = model.speedup(cell)
        # Two cells fix three factors of which one is small: good enough to order by.
        assert abs(math.log(predicted / max(truth, 1.0))) < 0.35, (cell, truth, predicted)


def test_the_next_cell_is_far_from_what_is_known_and_promises_a_gain() -> None:
    first = next_cell(GRID, {})
    assert first == GRID[0] == CellKey(8, 16384)
    left = [cell for cell in GRID if cell != first]
    second = next_cell(left, {first: _measured(first)})
    assert second in {CellKey(1, 1024), CellKey(32, 1024), CellKey(1, 16384), CellKey(32, 16384)}
    # Equally far from what is known: the one that reads much KV goes first.
    known = {cell: _measured(cell) for cell in (CellKey(8, 4096), CellKey(2, 1024))}
    pair = [CellKey(8, 1024), CellKey(8, 16384)]
    assert next_cell(pair, known) == CellKey(8, 16384)


def test_nothing_known_predicts_no_gain() -> None:
    assert CostModel({}).speedup(CellKey(8, 4096)) == 1.0


# ------------------------------------------------------------------ buckets


def _answer(batch: int, context: int, gamma: int, status: str = "validated") -> CellAnswer:
    config = SpeculationConfig(num_speculative_tokens=gamma, sparsity_ratio=0.05)
    return CellAnswer(cell=CellKey(batch, context), status=status, why=".", config=config)


def test_buckets_are_half_open_and_end_where_the_next_cell_starts() -> None:
    answers = [_answer(8, 4096, 3), _answer(1, 4096, 0), _answer(1, 16384, 5)]
    answers.append(_answer(8, 16384, 7, status="inconclusive"))
    buckets = make_buckets(answers, num_output_tokens=128)
    shown = [(b["batch"], b["context"], b["config"]["num_speculative_tokens"]) for b in buckets]
    assert shown == [
        ([1, 8], [4096, 16384], 0),
        ([1, 8], [16384, 16384 + 129], 5),
        ([8, 9], [4096, 16384], 3),
    ]


def test_what_needs_more_memory_than_what_failed_is_not_tried() -> None:
    failed = CellAnswer(cell=CellKey(8, 4096), status="failed", why="all failed (oom)")
    assert dominated_by(CellKey(8, 16384), [failed]) == CellKey(8, 4096)
    assert dominated_by(CellKey(4, 16384), [failed]) is None
    other = replace(failed, why="all failed (engine)")
    assert dominated_by(CellKey(8, 16384), [other]) is None


# ------------------------------------------------------------------ from end to end


class Told:
    """A progress that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.resume_command = "again"

    def note(self, message: str) -> None:
        self.notes.append(message)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def _sweeps(
    folder: Path, monkeypatch: pytest.MonkeyPatch, engine: SyntheticEngine, **given: Any
) -> tuple[cells_tune.CellSweeps, SweepRequest, Told]:
    values: dict[str, Any] = {
        "temperature": 0.6, "budget": "24h", "tokens": 1200, "gammas": "2,4,8",
        "ratios": "0.03,0.05,0.1",
    }  # fmt: skip
    request = SweepRequest.from_options(options(**values | given))

    def built(spec: Any, tokenizer: Any, **_: Any) -> Workload:
        blocks = make_blocks(3, batch_size=spec.batch_size, prompt_tokens=spec.context_len)
        return Workload(spec=spec, blocks=blocks, replays=1, mix={}, source={})

    monkeypatch.setattr(cells_tune, "build_workload", built)
    told = Told()
    progress: Any = told
    sweeps = cells_tune.CellSweeps(request, progress, folder, None, engine.info.model)
    return sweeps, request, told


def _carry_out(sweeps: cells_tune.CellSweeps, engine: SyntheticEngine) -> SweepOutcome:
    sweeps.tune(engine)
    return sweeps.publish(engine.info, "synthetic")


def test_each_cell_gets_its_own_setting_on_one_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = CellEngine(PLATEAU)
    sweeps, request, _ = _sweeps(tmp_path, monkeypatch, engine, batch="8,1", context="16k,1k")
    outcome = _carry_out(sweeps, engine)
    profile = load_profile(tmp_path / "profile.yaml")
    assert profile == outcome.profile

    # Much KV: drafting. Hardly any: gamma 0, as a setting of its own.
    assert profile.select(8, 16384).num_speculative_tokens > 0
    assert profile.selected.default == profile.select(8, 16384)
    assert profile.select(1, 1024).num_speculative_tokens == 0
    for bucket in profile.selected.buckets:
        cell = CellKey(bucket.batch[0], bucket.context[0])
        best = max(
            shape_of(cell).best_rate((2, 4, 8), request.ratios),
            shape_of(cell).rate(0, 1.0),
        )
        chosen = shape_of(cell).rate(
            bucket.config.num_speculative_tokens, bucket.config.sparsity_ratio
        )
        assert chosen >= 0.93 * best, cell
    # One more than measured is not measured.
    assert profile.select(9, 16384).num_speculative_tokens == 0
    listed = profile.protocol.other["cells"] if profile.protocol else []
    assert len(listed) == 4

    verdict = replay_decisions(profile, tmp_path)
    assert verdict.status == "ok", verdict.why
    num_further = sum(answer["status"] in ("validated", "inconclusive") for answer in listed) - 1
    assert f"{num_further} further cells" in verdict.why
    (tmp_path / "records-b1-c1024.npz").write_bytes(b"")
    assert replay_decisions(profile, tmp_path).status == "regressed"


def test_a_resumed_grid_measures_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = CellEngine(PLATEAU)
    sweeps, _, _ = _sweeps(tmp_path, monkeypatch, engine, batch="8", context="8k,1k")
    first = _carry_out(sweeps, engine)
    passes = engine.num_passes
    again, _, _ = _sweeps(tmp_path, monkeypatch, engine, batch="8", context="8k,1k")
    assert _carry_out(again, engine).profile == first.profile
    assert engine.num_passes == passes


def test_a_start_is_charged_to_the_first_cell_that_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts(engine: SyntheticEngine, load_s: float, context: str) -> list[list[float]]:
        sweeps, _, _ = _sweeps(tmp_path, monkeypatch, engine, batch="8", context=context)
        sweeps.tune(engine, load_s)
        sweeps.publish(engine.info, "synthetic")
        records = sorted(tmp_path.glob("records*.npz"))
        return [[one.load_s for one in unpack_records(path)[1] if one.load_s] for path in records]

    assert starts(CellEngine(PLATEAU), 40.0, "8k,1k") == [[], [40.0]]
    # All of the first two is kept; the second call's start is the third one's.
    assert starts(CellEngine(PLATEAU), 50.0, "8k,1k,4k") == [[], [50.0], [40.0]]


def test_a_cell_that_does_not_fit_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = CellEngine(PLATEAU)
    engine.too_big = lambda cell: cell.batch * cell.context >= 8 * 8192
    sweeps, _, _ = _sweeps(tmp_path, monkeypatch, engine, batch="1,8", context="4k,8k,16k")
    profile = _carry_out(sweeps, engine).profile
    assert profile.protocol is not None
    status = {
        (cell["batch"], cell["context"]): (cell["status"], cell["why"])
        for cell in profile.protocol.other["cells"]
    }
    lost = {cell: found for cell, found in status.items() if found[0] in ("failed", "dropped")}
    assert set(lost) == {(8, 8192), (8, 16384)}
    assert "oom" in str(lost) or "memory" in str(lost)
    assert profile.select(8, 8192).num_speculative_tokens == 0


def test_cells_and_workers_or_files_do_not_go_together() -> None:
    request = SweepRequest.from_options(options(batch="1,8"))
    progress: Any = Told()
    with pytest.raises(UsageError, match="--workers or --storage"):
        cells_tune.run(request, progress, shares=True)
    files = SweepRequest.from_options(options(batch="1,8", workload="prompts.jsonl"))
    with pytest.raises(UsageError, match="exact length"):
        cells_tune.run(files, progress)
