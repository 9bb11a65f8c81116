"""The recording of a grid on vLLM, on the fake engine: what is kept, replayed and raced."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import FAST, Clock, InlineChild, checkpoint

from benchmarks import bench_ablation, vllm_arms, vllm_grid
from benchmarks.grid import Grid
from benchmarks.results_file import RESULTS, Row
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.protocol import Capacity
from vegas_runtime.records import Run, read_json_lines
from vegas_runtime.vllm_plugin.engine import VllmEngine
from vegas_runtime.vllm_plugin.engine_options import Checkpoint
from vegas_tune.measure import mean_ratio

BATCH = 8
NUM_SETTINGS = 1 + 6 * 5


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[VllmEngine]:
    """Fake engines in place of vLLM, on one clock; holds those that were started."""
    started: list[VllmEngine] = []
    clock = Clock()

    def engine(source: Checkpoint, capacity: Capacity, **_: Any) -> VllmEngine:
        def launch(stock: bool) -> Any:
            return InlineChild(clock, seed=7)

        started.append(VllmEngine(source, capacity, launch=launch, clock=clock))
        return started[-1]

    def prompts(_: Any, count: int) -> list[tuple[int, ...]]:
        return [(place, *range(39)) for place in range(count)]

    monkeypatch.setattr(vllm_arms, "VllmEngine", engine)
    monkeypatch.setattr(vllm_grid, "source_prompts", prompts)
    monkeypatch.setattr(vllm_grid, "CONTEXT", 40)
    monkeypatch.setattr(vllm_grid, "find_checkpoint", lambda *_, **__: checkpoint())
    return started


Record = Callable[..., list[Row]]


@pytest.fixture
def record(starts: list[VllmEngine], tmp_path: Path) -> Record:
    def call(seconds: float) -> list[Row]:
        rows: list[Row] = []
        vllm_grid.record_and_race(
            "fake", tmp_path / "grid.jsonl.z", rows, batch_size=BATCH, seconds=seconds
        )
        return rows

    return call


def test_every_setting_is_recorded_and_the_choices_are_raced_in_one_start(
    record: Record, starts: list[VllmEngine], tmp_path: Path
) -> None:
    rows = record(vllm_grid.RACE_S + 40)
    assert len(starts) == 1
    assert starts[0].num_starts == 1
    grid = Grid.open(tmp_path / "grid.jsonl.z")
    assert len(grid.settings) == NUM_SETTINGS
    assert len(grid.rows) > 2 * NUM_SETTINGS, "several replicates of each"
    # What was measured is what the fake's own speed says.
    for gamma, ratio in ((2, 0.02), (4, 0.05), (8, 0.1)):
        p = FAST.agreement(ratio)
        tokens = BATCH * sum(p**i for i in range(gamma + 1))
        time_s = gamma * FAST.draft_s(ratio) + FAST.select_s + FAST.verify_s(gamma)
        expected = tokens / (time_s + FAST.other_s + 0.0001)
        assert grid.rates[vllm_grid.setting(gamma, ratio)] == pytest.approx(expected, rel=0.05)
    claims = {row.claim for row in rows}
    assert "live_speedup_vs_gamma0" in claims
    live = [row for row in rows if row.claim == "live_speedup_vs_gamma0"]
    assert all(row.low is not None and row.low <= row.value for row in live)
    ours = next(row for row in live if row.case.startswith("three-step"))
    recorded = grid.rates[grid.best] / grid.rates[grid.plain]
    assert ours.value == pytest.approx(recorded, rel=0.06), "within the sweep's regret and noise"


def test_a_cut_recording_goes_on_where_it_stopped(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = 0
    take = vllm_grid.take

    def cut(*args: Any) -> str:
        nonlocal taken
        taken += 1
        if taken > 20:
            raise KeyboardInterrupt
        return take(*args)

    monkeypatch.setattr(vllm_grid, "take", cut)
    with pytest.raises(KeyboardInterrupt):
        record(1000.0)
    parts = sorted((tmp_path / "grid.jsonl.z.parts").glob("pass-*.z"))
    assert len(parts) == 20
    kept = [path.read_bytes() for path in parts]
    monkeypatch.setattr(vllm_grid, "take", take)
    record(vllm_grid.RACE_S + 40)
    parts = sorted((tmp_path / "grid.jsonl.z.parts").glob("pass-*.z"))
    assert [path.read_bytes() for path in parts[:20]] == kept
    _, *rows = read_json_lines(tmp_path / "grid.jsonl.z")
    passes = [(json.dumps(one["run"]["config"]), one["replicate"]) for one in rows]
    assert len(passes) == len(set(passes)), "nothing was recorded twice"
    assert len(Grid.open(tmp_path / "grid.jsonl.z").settings) == NUM_SETTINGS


def test_too_little_time_records_what_it_can_and_races_nothing(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert record(vllm_grid.RACE_S + 3) == []
    assert 0 < len(Grid.open(tmp_path / "grid.jsonl.z").settings) < NUM_SETTINGS
    assert "the same command goes on" in capsys.readouterr().out


def test_passes_over_other_prompts_are_not_mixed_in(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(vllm_grid.RACE_S + 3)
    monkeypatch.setattr(vllm_grid, "source_prompts", lambda _, count: [(9, *range(39))] * count)
    with pytest.raises(SystemExit, match="other prompts"):
        record(vllm_grid.RACE_S + 3)


def test_a_recorded_grid_can_be_raced_later(
    starts: list[VllmEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_grid, "GAMMAS", (2, 4))
    monkeypatch.setattr(vllm_grid, "RATIOS", (0.03, 0.1))
    monkeypatch.setattr(vllm_grid, "searches", _searched)
    path = tmp_path / "grid.jsonl.z"
    both: list[list[Row]] = [[], []]
    vllm_grid.record_and_race("fake", path, both[0], batch_size=BATCH, seconds=vllm_grid.RACE_S + 3)
    recorded = path.read_bytes()
    vllm_grid.race_recorded("fake", path, both[1], batch_size=BATCH, seconds=3)
    assert path.read_bytes() == recorded
    assert len(starts) == 2
    for rows in both:
        assert [one.claim for one in rows] == ["live_ratio", *["live_speedup_vs_gamma0"] * 2]
        assert rows[0].case.startswith("three-step, TPE, the grid's best (gamma 4, ")
        assert rows[0].low is not None
        assert rows[0].low <= rows[0].value
        assert 1 < rows[0].value < 1.3
    arms = [row["what"] for row in read_json_lines(tmp_path / "grid_race.jsonl.z")]
    assert len(set(arms)) == 3
    # Forth and back.
    assert arms[:3] == arms[5:2:-1]


def test_the_published_race_is_its_passes() -> None:
    path = RESULTS.parent / "data" / "grid_smollm2_h200_race.jsonl.z"
    logs: dict[str, list[float]] = {}
    for one in read_json_lines(path):
        figures, _ = vllm_arms.figures_of(Run.from_dict(one["run"]))
        logs.setdefault(one["what"], []).append(math.log(figures.decode_tok_s.est))
    assert len({len(own) for own in logs.values()}) == 1
    published = json.loads((RESULTS / "ablation_h200.json").read_text())["rows"]
    raced = [row for row in published if row["claim"].startswith("live_")]
    assert [row["claim"] for row in raced] == ["live_ratio", *["live_speedup_vs_gamma0"] * 2]
    for row in raced:
        one, other = (logs[f"race {arm}"] for arm in re.findall(r"\((gamma [^)]*)\)", row["case"]))
        ratio = mean_ratio([a - b for a, b in zip(one, other, strict=True)])
        assert (row["value"], row["low"], row["high"]) == pytest.approx(
            (ratio.est, ratio.low, ratio.high), rel=1e-3
        )


def _searched(grid: Grid, *_: Any) -> list[tuple[str, SpeculationConfig, int]]:
    """What searches choose: the best, and another one."""
    other = next(one for one in grid.settings if one not in (grid.best, grid.plain))
    return [("three-step", grid.best, 3), ("random", other, 3), ("TPE", grid.best, 3)]


def test_the_recorded_grid_is_compared_as_it_came(record: Record, tmp_path: Path) -> None:
    record(vllm_grid.RACE_S + 40)
    grid = Grid.open(tmp_path / "grid.jsonl.z")
    assert not grid.phases, "a GPU's passes are played with their own times"
    rows = bench_ablation.compare(grid, 2)
    regrets = [row for row in rows if row.claim == "regret_pct"]
    assert {row.case.split(";")[0] for row in regrets} == {
        "three-step", "full grid", "random", "TPE",
    }  # fmt: skip
    assert all(0 <= row.value <= 10 for row in regrets)
    (spread,) = [row for row in rows if row.claim == "pass_to_pass_cv_pct"]
    assert 0 < spread.value < 5
