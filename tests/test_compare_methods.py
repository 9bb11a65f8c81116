"""A comparison of methods from end to end on a synthetic engine, in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic import Shape, SyntheticEngine, make_blocks
from synthetic_methods import SHAPES, MethodsEngine

from vegas_runtime.backend import Capacity
from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.errors import (
    BudgetSpentError,
    ConfigError,
    NoValidTrialError,
    StorageError,
)
from vegas_tune import compare_bed, compare_methods, figure_files
from vegas_tune.compare_methods import CompareOutcome, CompareRequest
from vegas_tune.progress import SweepProgress
from vegas_tune.study import folder_lock
from vegas_tune.workload import Workload
from vegas_tune.workload_spec import WorkloadSpec

BLOCKS = make_blocks(3, sampling=SamplingConfig(temperature=0.6))
OPTIONS: Mapping[str, Any] = {
    "first": None, "second": None, "model": "synthetic", "methods": "vegas,streaming_llm,quest",
    "gamma": "auto", "backend": "reference", "budget": "3h", "workload": "stdlib", "data": None,
    "context": 4096, "batch": 8, "blocks": 3, "waiting": 0, "max_new_tokens": 128, "tokens": 400,
    "rounds": 2, "temperature": 0.6, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
    "repetition_penalty": 1.0, "min_tokens": 32, "max_gamma": 10, "ratios": "0.03,0.05,0.1,0.25",
    "gammas": None, "seed": 0, "dtype": "auto", "device": "auto", "new": False,
}  # fmt: skip


class Session:
    """Runs comparisons of one folder on engines of its own making."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder = folder
        self.engine: SyntheticEngine = MethodsEngine()
        self.stock: list[SyntheticEngine] = []
        workload = Workload(
            spec=WorkloadSpec(batch_size=8), blocks=BLOCKS, replays=1, mix={}, source={}
        )
        for name, value in (
            ("open_backend", lambda *_, **__: (self.engine, "as asked for")),
            ("build_workload", lambda *_, **__: workload),
            ("find_checkpoint", lambda *_, **__: SimpleNamespace(tokenizer=None, facts=FACTS)),
            ("open_vllm", self._open_vllm),
        ):
            monkeypatch.setattr(compare_bed, name, value)
        # Drawing takes as long as all the rest; `test_compare_cli` and `test_method_report` draw.
        monkeypatch.setattr(figure_files, "can_draw", lambda: False)
        self._monkeypatch = monkeypatch

    def on_vllm(self) -> None:
        """From here on the engine is vLLM's, with one without the plugin beside it."""
        self._monkeypatch.setattr(compare_bed, "resolve_backend", lambda _: ("vllm", "vLLM"))

    def _open_vllm(
        self, _: object, capacity: Capacity, *, is_stock: bool, **__: Any
    ) -> SyntheticEngine:
        self.capacity = capacity
        if not is_stock:
            # One GPU: the other arm must have freed it.
            assert all(engine.is_closed for engine in self.stock)
            return self.engine
        assert not self.stock or self.engine.is_closed
        self.stock.append(Served(STOCK_SHAPE, seed=len(self.stock)))
        return self.stock[-1]

    def run(self, **options: Any) -> CompareOutcome:
        request = CompareRequest.from_options({**OPTIONS, "run_dir": self.folder, **options})
        return compare_methods.run(request, SweepProgress("the same command"))


FACTS = {"id": "synthetic", "config_sha256": "0" * 64, "max_model_len": 8192}


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Session:
    return Session(monkeypatch, tmp_path / "run")


class Served(SyntheticEngine):
    """An engine of which vLLM would say how often it started, and for how long."""

    num_starts = 1
    held_s = 60.0


# Stock vLLM: verification takes half as long.
STOCK_SHAPE = replace(SHAPES["vegas"], verify_s=lambda gamma: SHAPES["vegas"].verify_s(gamma) / 2)


class Bare(SyntheticEngine):
    """Cannot draft without selecting."""

    def configure(self, config: SpeculationConfig) -> None:
        super().configure(config)
        self.shape = SHAPES[config.algorithm]


def best_rate(shape: Shape, gammas: tuple[int, ...], ratios: tuple[float, ...]) -> float:
    return max(shape.rate(gamma, ratio) for gamma in gammas for ratio in ratios)


def test_every_method_is_tuned_for_itself(session: Session) -> None:
    outcome = session.run()
    assert outcome.exit_code == 0
    assert outcome.comparison.status == "complete"
    for row in outcome.comparison.rows[:-1]:
        assert row.config is not None
        shape = SHAPES[row.name]
        best = best_rate(shape, (1, 2, 3, 4, 5, 7, 10), (0.03, 0.05, 0.1, 0.25))
        own = shape.rate(row.config.num_speculative_tokens, row.config.sparsity_ratio)
        # What the sweep promises of its choice.
        assert own > 0.97 * best, row.name
    rows = {row.name: row for row in outcome.comparison.rows}
    # What selects in every draft step pays for each of them.
    assert rows["quest"].selection_overhead.est > rows["vegas"].selection_overhead.est  # type: ignore[union-attr]
    assert session.engine.is_closed


def test_an_engine_that_cannot_skip_selection_leaves_one_column_empty(session: Session) -> None:
    session.engine = Bare(SHAPES["vegas"])
    outcome = session.run()
    assert outcome.comparison.status == "complete"
    for row in outcome.comparison.rows[:-1]:
        assert row.selection_overhead is None
        assert "cannot draft without selecting" in row.note
        assert row.vs_plain is not None
    assert "figure-10b" not in {each.key for each in outcome.comparison.figures}


def test_time_that_runs_out_is_inconclusive_and_more_time_goes_on(session: Session) -> None:
    outcome = session.run(budget="5m")
    assert outcome.comparison.status == "inconclusive"
    assert outcome.exit_code == 6
    kept = len(session.engine.passes)  # type: ignore[attr-defined]
    session.engine = MethodsEngine()
    whole = session.run(budget="3h")
    assert whole.comparison.status == "complete"
    assert whole.comparison.num_measurements > kept


def test_loading_and_prefilling_count_as_when_the_comparison_began(session: Session) -> None:
    session.folder.mkdir(parents=True)
    (session.folder / "setup.json").write_text(json.dumps({"setup_s": 700.0}))
    with pytest.raises(BudgetSpentError, match="prefilled"):
        session.run(budget="10m")


def test_an_interruption_keeps_everything_and_says_how_to_go_on(session: Session) -> None:
    def stop(config: SpeculationConfig, number: int) -> None:
        if number == 60:
            raise KeyboardInterrupt

    session.engine = MethodsEngine(faults=stop)
    with pytest.raises(KeyboardInterrupt, match="the same command"):
        session.run()
    setup = (session.folder / "setup.json").read_bytes()
    kept = {path: path.read_bytes() for path in session.folder.rglob("*.z")}
    assert len(kept) == 60
    session.engine = MethodsEngine()
    outcome = session.run()
    assert outcome.comparison.status == "complete"
    assert (session.folder / "setup.json").read_bytes() == setup
    assert {path: path.read_bytes() for path in kept} == kept
    first = (session.folder / "comparison.json").read_bytes()
    session.engine = MethodsEngine()
    session.run()
    assert session.engine.passes == []
    assert (session.folder / "comparison.json").read_bytes() == first


def test_a_folder_serves_one_process_at_a_time(session: Session) -> None:
    with folder_lock(session.folder), pytest.raises(StorageError, match="in use by another"):
        session.run()


def test_a_method_the_engine_lacks_is_refused_before_prefilling(session: Session) -> None:
    with pytest.raises(ConfigError, match="snapkv"):
        session.run(methods="vegas,snapkv")
    assert session.engine.now_s() == 0.0
    assert session.engine.is_closed
    assert not session.folder.exists()


def test_nothing_that_drafts_is_an_error(session: Session) -> None:
    def fail(config: SpeculationConfig, number: int) -> None:
        if config.num_speculative_tokens:
            raise MemoryError("out of memory")

    session.engine = MethodsEngine(faults=fail)
    with pytest.raises(NoValidTrialError, match="of 3 methods none"):
        session.run()


def test_one_method_without_a_setting_leaves_the_others(session: Session) -> None:
    def fail(config: SpeculationConfig, number: int) -> None:
        if config.num_speculative_tokens and config.algorithm == "quest":
            raise MemoryError("out of memory")

    session.engine = MethodsEngine(faults=fail)
    outcome = session.run()
    rows = {row.name: row for row in outcome.comparison.rows}
    assert rows["quest"].config is None
    assert rows["vegas"].vs_plain is not None
    assert outcome.comparison.status == "inconclusive"
    assert "quest" in outcome.comparison.reason


def test_without_matplotlib_the_report_still_holds_the_figures(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = session.run()
    assert [path.name for path in outcome.files] == ["comparison.json", "table.md", "report.html"]
    assert "vegas-tune[demo]" in capsys.readouterr().err
    assert "figure-8" in (session.folder / "report.html").read_text()


def test_on_vllm_the_engine_without_the_plugin_has_a_row(session: Session) -> None:
    session.on_vllm()
    session.engine = Bare(SHAPES["vegas"])
    outcome = session.run()
    assert outcome.comparison.status == "complete"
    # Sized for every setting, and to collect scores for the methods that need them.
    assert session.capacity.gammas[-1] == 10
    assert session.capacity.max_ratio == 0.25
    assert session.capacity.config.algorithm == "vegas"
    rows = {row.name: row for row in outcome.comparison.rows}
    stock, plain = rows["stock"], rows["plain"]
    assert stock.decode_tok_s is not None
    assert plain.decode_tok_s is not None
    faster = STOCK_SHAPE.rate(0, 1.0) / SHAPES["vegas"].rate(0, 1.0)
    assert plain.vs_stock is not None
    assert plain.vs_stock.est == pytest.approx(1 / faster, rel=0.03)
    for name in ("vegas", "streaming_llm", "quest"):
        row = rows[name]
        assert row.vs_stock is not None
        assert row.vs_plain is not None
        assert row.vs_stock.est == pytest.approx(row.vs_plain.est / faster, rel=0.03)
    # Before and after; neither beside the engine that is compared.
    assert len(session.stock) == 2
    assert all(engine.is_closed for engine in [*session.stock, session.engine])
    assert "| stock | its own defaults |" in (session.folder / "table.md").read_text()
    session.stock.clear()
    session.engine = Bare(SHAPES["vegas"])
    session.run()
    assert session.stock == []
    assert session.engine.num_passes == 0


def test_vllm_is_started_to_collect_for_the_first_method_that_needs_it(session: Session) -> None:
    session.on_vllm()
    session.engine = Bare(SHAPES["vegas"])
    session.run(methods="streaming_llm,all_rows,vegas", budget="20m")
    assert (session.capacity.config.algorithm, session.capacity.config.rows) == ("vegas", "all")


def test_the_default_budget_is_one_sweep_per_method() -> None:
    one = CompareRequest.from_options(
        {**OPTIONS, "run_dir": None, "budget": None, "methods": "vegas"}
    )
    three = CompareRequest.from_options({**OPTIONS, "run_dir": None, "budget": None})
    assert three.sweep.budget_s == 3 * one.sweep.budget_s
