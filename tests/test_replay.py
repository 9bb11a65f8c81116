from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from synthetic import PLATEAU, SyntheticEngine, make_blocks

from vegas_runtime.backend import open_backend
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import BackendError, ConfigError, StorageError
from vegas_runtime.protocol import Engine, PromptBlock
from vegas_runtime.records import Run, write_json_lines
from vegas_runtime.replay import ReplayEngine
from vegas_tune.laboratory import Laboratory
from vegas_tune.performer import rounded
from vegas_tune.plan import make_plan
from vegas_tune.sweep import run_sweep

PLAIN = SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0, min_tokens=32)
GAMMAS, RATIOS = (1, 2, 3, 4, 5, 7), (0.02, 0.05, 0.1, 0.25)
BLOCKS = make_blocks(2)
REPLICATES = 3


def _grid(**changes: Any) -> list[dict[str, Any]]:
    engine = SyntheticEngine(PLATEAU, max_num_speculative_tokens=7)
    settings = [PLAIN] + [
        PLAIN.replace(num_speculative_tokens=gamma, sparsity_ratio=ratio)
        for gamma in GAMMAS
        for ratio in RATIOS
    ]
    header: dict[str, Any] = {
        "kind": "grid",
        "info": asdict(engine.info),
        "workload": {"max_new_tokens": 128, "sampling": {"temperature": 0.6}},
        "blocks": [
            {"sha256": block.sha256, "prompt_lens": [100, 200], "prefill_s": 30.0}
            for block in BLOCKS
        ],
    }
    rows = [header | changes]
    for block in BLOCKS:
        for replicate in range(REPLICATES):
            for config in settings:
                engine.configure(config)
                run = engine.run(block, replicate=replicate, max_tokens=900, deadline_s=1e9)
                rows.append({"block": block.index, "replicate": replicate, "run": run.to_dict()})
    return rows


GRID = _grid()


def _run(
    engine: Engine, gamma: int = 3, ratio: float = 0.05, block: int = 0, **options: Any
) -> Run:
    engine.configure(PLAIN.replace(num_speculative_tokens=gamma, sparsity_ratio=ratio))
    given = {"replicate": 0, "max_tokens": 10**9, "deadline_s": 1e9} | options
    return engine.run(BLOCKS[block], **given)


def _by_setting() -> dict[tuple[int, float, int, int], Run]:
    found = {}
    for row in GRID[1:]:
        run = Run.from_dict(row["run"])
        config = run.config
        place = (row["block"], row["replicate"])
        found[config.num_speculative_tokens, config.sparsity_ratio, *place] = run
    return found


RECORDED = _by_setting()


def test_a_recorded_pass_comes_back_as_it_was() -> None:
    engine = ReplayEngine(GRID)
    for replicate in range(REPLICATES):
        run = rounded(_run(engine, replicate=replicate))
        assert run == RECORDED[3, 0.05, 0, replicate]


def test_the_clock_goes_by_recorded_times() -> None:
    engine = ReplayEngine(GRID)
    assert engine.now_s() == 0.0
    first = _run(engine)
    assert engine.now_s() == pytest.approx(30.0 + first.elapsed_s)
    second = _run(engine, replicate=1)
    assert engine.now_s() == pytest.approx(30.0 + first.elapsed_s + second.elapsed_s)
    engine.prepare(BLOCKS[1])
    engine.prepare(BLOCKS[1])
    assert engine.now_s() == pytest.approx(60.0 + first.elapsed_s + second.elapsed_s)


def test_fewer_tokens_cut_the_pass_short() -> None:
    whole, cut = _run(ReplayEngine(GRID)), _run(ReplayEngine(GRID), max_tokens=200)
    assert cut.steps == whole.steps[: len(cut.steps)]
    emitted = [sum(step.num_emitted_tokens) for step in cut.steps]
    assert sum(emitted[:-1]) < 200 <= sum(emitted)
    left_out = sum(step.duration_s for step in whole.steps[len(cut.steps) :])
    assert cut.elapsed_s == pytest.approx(whole.elapsed_s - left_out)


def test_the_deadline_cuts_the_pass_short() -> None:
    engine = ReplayEngine(GRID)
    run = _run(engine, deadline_s=31.0)
    assert 31.0 <= engine.now_s() < 31.0 + run.steps[-1].duration_s
    with pytest.raises(BackendError, match="deadline"):
        _run(ReplayEngine([*GRID[:1], *_prefill_only()]), deadline_s=1e9)


def _prefill_only() -> list[dict[str, Any]]:
    rows = [row for row in GRID[1:] if row["replicate"] == 0]
    return [
        row | {"run": row["run"] | {"steps": [row["run"]["steps"][0] | {"kind": "prefill"}]}}
        for row in rows
    ]


def test_replicates_beyond_the_recorded_go_round_shifted_and_repeatably() -> None:
    engine = ReplayEngine(GRID)

    def place(replicate: int, gamma: int) -> int:
        run = rounded(_run(engine, gamma, replicate=replicate))
        return next(r for r in range(REPLICATES) if run.steps == RECORDED[gamma, 0.05, 0, r].steps)

    laps = {
        gamma: [tuple(place(3 * lap + i, gamma) for i in range(3)) for lap in range(8)]
        for gamma in (3, 4)
    }
    for gamma, found in laps.items():
        assert found[0] == (0, 1, 2)
        assert all(sorted(lap) == [0, 1, 2] for lap in found)
        assert found == [tuple(place(3 * lap + i, gamma) for i in range(3)) for lap in range(8)]
    # Two settings do not meet in the same pairs on every lap.
    assert laps[3] != laps[4]


def test_plain_decoding_is_one_setting_whatever_its_ratio() -> None:
    engine = ReplayEngine(GRID)
    run = _run(engine, 0, 0.07)
    assert run.config == engine.config
    assert run.config.sparsity_ratio == 0.07
    assert run.steps == RECORDED[0, 1.0, 0, 0].steps


def test_what_was_not_recorded_is_named() -> None:
    with pytest.raises(BackendError, match=r"gamma 6 at ratio 0\.05 .* block 0") as caught:
        _run(ReplayEngine(GRID), 6)
    assert "gammas [0, 1, 2, 3, 4, 5, 7]" in caught.value.message
    with pytest.raises(BackendError, match=r"ratio 0\.06"):
        _run(ReplayEngine(GRID), 3, 0.06)
    other = make_blocks(3)[2]
    with pytest.raises(BackendError, match="block 2 was not recorded"):
        ReplayEngine(GRID).prepare(other)
    with pytest.raises(ConfigError, match="at most 7"):
        _run(ReplayEngine(GRID), 9)


def test_the_engine_says_that_it_replays() -> None:
    engine = ReplayEngine(GRID)
    assert engine.info.backend == "replay"
    assert engine.info.model["id"] == "synthetic/plateau"
    assert engine.tokenizer is None
    engine.close()


def test_blocks_have_the_recorded_shape_and_no_text() -> None:
    blocks = ReplayEngine(GRID).blocks
    assert [block.index for block in blocks] == [0, 1]
    assert [len(prompt) for prompt in blocks[0].prompts] == [100, 200]
    assert blocks[0].batch_size == BLOCKS[0].batch_size
    assert blocks[0].max_new_tokens == 128
    assert blocks[0].sampling.temperature == 0.6
    assert isinstance(blocks[0], PromptBlock)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"kind": "something"}],
        [{"kind": "grid"}],
        [GRID[0] | {"info": {"backend": "reference"}}],
        [GRID[0], {"block": 0}],
        [GRID[0], {"block": 0, "replicate": 0, "run": {"config": {}}}],
        [GRID[0], GRID[1] | {"run": GRID[1]["run"] | {"config": {"sparsity_ratio": 0.1}}}],
        [GRID[0]],
    ],
)
def test_a_damaged_grid_is_refused(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(StorageError):
        ReplayEngine(rows)


def test_a_grid_is_opened_by_path(tmp_path: Path) -> None:
    path = tmp_path / "grid.jsonl.z"
    write_json_lines(path, GRID)
    engine, reason = open_backend("replay", model=str(path), max_num_speculative_tokens=7)
    assert engine.info.backend == "replay"
    assert "replay" in reason
    with pytest.raises(StorageError, match="does not exist"):
        ReplayEngine.open(tmp_path / "missing.z")


def test_a_sweep_over_a_recorded_grid_ends_near_its_best() -> None:
    engine = ReplayEngine(GRID)
    plan = make_plan(PLAIN, engine.blocks, budget_s=1e5, tokens=900, gammas=GAMMAS, ratios=RATIOS)
    result = run_sweep(plan, Laboratory(plan, engine, engine.blocks))
    chosen = result.selected
    best = PLATEAU.best_rate(GAMMAS, RATIOS)
    rate = PLATEAU.rate(chosen.num_speculative_tokens, chosen.sparsity_ratio)
    # 900 tokens leave some 3 % of noise in each of three recordings.
    assert rate >= 0.95 * best
    assert result.num_settings < len(GAMMAS) * len(RATIOS)
    again = run_sweep(plan, Laboratory(plan, ReplayEngine(GRID), engine.blocks))
    assert [d.to_dict() for d in again.decisions] == [d.to_dict() for d in result.decisions]
