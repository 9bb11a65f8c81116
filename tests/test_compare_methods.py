"""A comparison of methods from end to end on a synthetic engine, in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic import Shape, SyntheticEngine, make_blocks
from synthetic_methods import SHAPES, MethodsEngine
from test_request import options

from vegas_runtime.backend import refusal_by_vllm, slowed_on_vllm
from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.errors import (
    BackendError,
    BudgetSpentError,
    ConfigError,
    NoValidTrialError,
    StorageError,
    UsageError,
)
from vegas_runtime.gpu_memory import UNKNOWN
from vegas_runtime.protocol import Capacity, StockMethod
from vegas_tune import compare_bed, compare_methods, figure_files, stock_methods
from vegas_tune.compare_methods import CompareOutcome, CompareRequest
from vegas_tune.method_report import small_print, verdict
from vegas_tune.method_table import MethodRow
from vegas_tune.methods import PLAIN, STOCK
from vegas_tune.progress import SweepProgress
from vegas_tune.request import SweepRequest
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
    "gammas": None, "tensor_parallel_size": 1, "seed": 0, "dtype": "auto", "device": "auto",
    "new": False,
}  # fmt: skip


class Session:
    """Runs comparisons of one folder on engines of its own making."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder = folder
        self.engine: SyntheticEngine = MethodsEngine()
        self.stock: list[SyntheticEngine] = []
        self.own: list[OwnEngine] = []
        self.own_shape = OWN_SHAPE
        self.own_faults: Mapping[int, Exception] = {}
        self.refused: dict[str, str] = {}
        self.slowed: dict[str, str] = {}
        workload = Workload(
            spec=WorkloadSpec(batch_size=8), blocks=BLOCKS, replays=1, mix={}, source={}
        )
        for name, value in (
            ("open_backend", lambda *_, **__: (self.engine, "as asked for")),
            ("build_workload", lambda *_, **__: workload),
            ("find_checkpoint", self._find),
            ("open_vllm", self._open_vllm),
            ("refusal_by_vllm", lambda config: self.refused.get(config.algorithm, "")),
            ("slowed_on_vllm", lambda config: self.slowed.get(config.algorithm, "")),
        ):
            monkeypatch.setattr(compare_bed, name, value)
        # Drawing takes as long as all the rest; `test_compare_cli` and `test_method_report` draw.
        monkeypatch.setattr(figure_files, "can_draw", lambda: False)
        self._monkeypatch = monkeypatch

    def on_vllm(self) -> None:
        """From here on the engine is vLLM's, with one without the plugin beside it."""
        self._monkeypatch.setattr(compare_bed, "resolve_backend", lambda _: ("vllm", "vLLM"))

    @staticmethod
    def _find(model: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(tokenizer=None, facts=FACTS, folder=Path("/models", model))

    def _open_vllm(
        self,
        _: object,
        capacity: Capacity,
        *,
        is_stock: bool,
        drafting: StockMethod | None = None,
        **__: Any,
    ) -> SyntheticEngine:
        self.capacity = capacity
        if drafting is not None:
            assert all(engine.is_closed for engine in [*self.stock, *self.own])
            if drafting.num_speculative_tokens in self.own_faults:
                raise self.own_faults[drafting.num_speculative_tokens]
            self.own.append(OwnEngine(self.own_shape, seed=len(self.own), drafting=drafting))
            return self.own[-1]
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
    memory = UNKNOWN


# Stock vLLM: verification takes half as long.
STOCK_SHAPE = replace(SHAPES["vegas"], verify_s=lambda gamma: SHAPES["vegas"].verify_s(gamma) / 2)


# Drafts for nothing, accepts little: best at few drafted tokens.
OWN_SHAPE = replace(
    STOCK_SHAPE,
    agreement=lambda ratio: 0.45,
    draft_s=lambda ratio: 0.0,
    verify_s=lambda gamma: STOCK_SHAPE.verify_s(0) * (1 + 0.3 * gamma),
)


class OwnEngine(Served):
    """vLLM with a method of its own: what it was started with, and nothing else."""

    def __init__(self, shape: Shape, *, seed: int, drafting: StockMethod) -> None:
        super().__init__(shape, seed=seed)
        self.drafting = drafting

    def configure(self, config: SpeculationConfig) -> None:
        if config != self.drafting.config:
            raise ConfigError("it cannot change while it runs.")
        super().configure(config)


class Bare(SyntheticEngine):
    """Cannot draft without selecting."""

    def configure(self, config: SpeculationConfig) -> None:
        super().configure(config)
        self.shape = SHAPES[config.algorithm]


class Windowed(Bare):
    """Cannot play drafts back, but draft from a window, as vLLM's plugin does."""

    def without_selection(self, config: SpeculationConfig) -> SpeculationConfig | None:
        window = config.replace(algorithm="streaming_llm")
        return None if config == window else window


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


def test_an_engine_that_cannot_skip_selection_tells_phase_times(session: Session) -> None:
    session.engine = Bare(SHAPES["vegas"])
    outcome = session.run()
    assert outcome.comparison.status == "complete"
    for row in outcome.comparison.rows[:-1]:
        assert row.overhead_from == "phases"
        assert row.selection_overhead is not None
        assert row.selection_overhead.est == pytest.approx(true_overhead(row), abs=0.003)
        assert row.vs_plain is not None
    assert "(phases) |" in (session.folder / "table.md").read_text()
    assert "missing (phases)" in small_print(outcome.comparison)


def test_a_window_in_place_of_selecting_tells_what_selecting_costs(session: Session) -> None:
    session.engine = Windowed(SHAPES["vegas"])
    outcome = session.run()
    assert outcome.comparison.status == "complete"
    rows = {row.name: row for row in outcome.comparison.rows}
    for name in ("vegas", "quest"):
        overhead = rows[name].selection_overhead
        assert overhead is not None
        assert rows[name].overhead_from == "window"
        # Noise of 1.5 % in both passes of six pairs: 2 % covers three of its errors.
        assert overhead.est == pytest.approx(true_overhead(rows[name]), abs=0.02)
        assert overhead.low < overhead.est < overhead.high
    # The window itself has nothing to be compared with.
    assert rows["streaming_llm"].overhead_from == "phases"


def true_overhead(row: MethodRow) -> float:
    assert row.config is not None
    shape, gamma = SHAPES[row.name], row.config.num_speculative_tokens
    whole = gamma * shape.draft_s(row.config.sparsity_ratio) + shape.select_s
    return shape.select_s / (whole + shape.verify_s(gamma) + shape.other_s)


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


# ------------------------------------------------------------------ vLLM's own methods


OWN = "vegas,streaming_llm,ngram,suffix,draft_model"


@dataclass
class Finished:
    """A finished comparison with vLLM's own methods in it."""

    session: Session
    outcome: CompareOutcome
    rows: dict[str, MethodRow]
    again: Finished | None = None

    @property
    def drafting(self) -> list[MethodRow]:
        return [row for row in self.rows.values() if row.decode_tok_s and row.name not in BASES]


BASES = (PLAIN, STOCK)


def with_own(session: Session, *, shape: Shape, **options: Any) -> Finished:
    session.on_vllm()
    session.own_shape = shape
    session.engine = Bare(SHAPES["vegas"])
    outcome = session.run(**{"methods": OWN, "budget": "25m", **options})
    return Finished(session, outcome, {row.name: row for row in outcome.comparison.rows})


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stock_methods.importlib.util, "find_spec", lambda name: None)
        session = Session(patch, tmp_path_factory.mktemp("own"))
        found = with_own(session, shape=OWN_SHAPE)
        found.again = with_own(session, shape=OWN_SHAPE)
        return found


def test_vllm_s_own_method_is_a_row_tuned_over_gamma(own: Finished) -> None:
    assert own.outcome.comparison.status == "complete"
    row = own.rows["ngram"]
    assert row.config is not None
    # Each gamma is an engine of its own; the best one has every neighbour measured.
    assert [engine.drafting.num_speculative_tokens for engine in own.session.own] == [3, 2, 1]
    assert all(engine.is_closed for engine in own.session.own)
    assert (row.config.algorithm, row.config.num_speculative_tokens) == ("ngram", 1)
    assert row.tokens_per_iteration is not None
    # 1 % of what 8 requests draft in three passes: two binomial errors.
    assert row.tokens_per_iteration.est == pytest.approx(1 + OWN_SHAPE.accepted(1, 1.0), rel=0.04)
    assert len(row.position_acceptance) == 1
    assert row.selection_overhead is None


def test_vllm_s_own_method_is_compared_unpaired_and_said_to_be(own: Finished) -> None:
    row = own.rows["ngram"]
    assert not row.is_interleaved
    assert row.vs_plain is None
    assert row.vs_stock is not None
    truth = OWN_SHAPE.rate(1, 1.0) / STOCK_SHAPE.rate(0, 1.0)
    # Noise of 1.5 % a pass and of some 300 drafts, over three passes: three errors.
    assert row.vs_stock.est == pytest.approx(truth, rel=0.05)
    table = (own.session.folder / "table.md").read_text()
    assert "| ngram | gamma 1 |" in table
    assert ", unpaired) |" in table
    assert "compared unpaired" in table


def test_every_row_is_set_against_the_fastest_other_one_whatever_its_engine(own: Finished) -> None:
    rates = {row.name: row.decode_tok_s.est for row in own.drafting if row.decode_tok_s}
    assert set(rates) == {"vegas", "streaming_llm", "ngram"}
    assert list(rates.values()) == sorted(rates.values(), reverse=True)
    for row in own.drafting:
        other = max((name for name in rates if name != row.name), key=rates.__getitem__)
        assert row.best_other == other
        assert row.is_best_other_paired == ("ngram" not in (row.name, other))
        assert row.vs_best_other is not None
        assert row.vs_best_other.est == pytest.approx(rates[row.name] / rates[other], rel=0.01)


def test_what_is_missing_for_a_method_is_its_row_s_reason(own: Finished) -> None:
    assert "arctic-inference, which is not installed" in own.rows["suffix"].note
    assert "--draft-model names nothing" in own.rows["draft_model"].note
    assert own.rows["suffix"].decode_tok_s is None
    assert "2 do not run here" in own.outcome.comparison.reason
    assert own.outcome.exit_code == 0


def test_own_methods_are_not_started_twice(own: Finished) -> None:
    assert own.again is not None
    # One of each side of stock vLLM, and each gamma: all from the first time.
    assert (len(own.session.own), len(own.session.stock)) == (3, 2)
    assert [row.to_dict() for row in own.again.outcome.comparison.rows] == [
        row.to_dict() for row in own.outcome.comparison.rows
    ]


def test_the_fastest_may_be_one_of_vllm_s_own(session: Session) -> None:
    fast = replace(OWN_SHAPE, agreement=lambda ratio: 0.97)
    comparison = with_own(session, shape=fast, methods="vegas,ngram").outcome.comparison
    assert comparison.rows[0].name == "ngram"
    assert verdict(comparison).startswith("ngram is fastest: ")
    assert "stock vLLM, " in verdict(comparison)


def test_a_named_draft_model_is_found_where_it_lies(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    models = {"draft_model": "small", "eagle_head": "org/head"}
    found = with_own(session, shape=OWN_SHAPE, methods="vegas", gamma="2", **models)
    started = {(one.drafting.name, one.drafting.model) for one in found.session.own}
    assert "draft_model, eagle3: up to 4 engine starts each, beyond" in capsys.readouterr().err
    # vLLM fetches a head itself: it is no model of its own.
    assert started == {("draft_model", "/models/small"), ("eagle3", "org/head")}


def test_a_method_that_does_not_start_says_why_after_one_try(session: Session) -> None:
    session.own_faults = {3: BackendError("the model has no layers for it.")}
    found = with_own(session, shape=OWN_SHAPE, methods="vegas,mtp")
    assert found.rows["mtp"].note == "the model has no layers for it."
    assert session.own == []
    assert found.rows["vegas"].vs_plain is not None


def test_a_gamma_that_does_not_start_leaves_the_others(session: Session) -> None:
    session.own_faults = {2: BackendError("out of luck.")}
    found = with_own(session, shape=OWN_SHAPE, methods="vegas,ngram")
    assert [one.drafting.num_speculative_tokens for one in session.own] == [3, 4]
    assert found.rows["ngram"].config is not None
    assert found.rows["ngram"].decode_tok_s is not None


def test_on_the_reference_engine_vllm_s_own_methods_say_so(session: Session) -> None:
    outcome = session.run(methods="vegas,ngram", budget="1h")
    assert outcome.comparison.status == "complete"
    assert "method of vLLM's own" in outcome.comparison.rows[-1].note


def test_at_most_four_engines_are_started_for_a_method() -> None:
    ladder = (1, 2, 3, 4, 5, 7, 10, 15)
    rates: dict[int, float] = {}
    while (gamma := stock_methods.next_gamma(ladder, rates)) is not None:
        rates[gamma] = float(gamma)
    assert list(rates) == [3, 2, 4, 5]
    peaked: dict[int, float] = {}
    while (gamma := stock_methods.next_gamma(ladder, peaked)) is not None:
        peaked[gamma] = -abs(gamma - 3.0)
    assert list(peaked) == [3, 2, 4]


# ------------------------------------------------------------------ what the plugin refuses


def test_a_method_the_plugin_refuses_is_a_row_with_its_sentence(session: Session) -> None:
    session.on_vllm()
    session.engine = Bare(SHAPES["vegas"])
    session.refused = {"quest": "`algorithm` is 'quest'; not served."}
    session.slowed = {"streaming_llm": "it waits for a bus."}
    outcome = session.run(budget="25m")
    row = outcome.comparison.rows[-1]
    assert (row.name, row.note) == ("quest", "`algorithm` is 'quest'; not served.")
    # One that runs, if not at full speed, says what slows it.
    notes = {each.name: each.note for each in outcome.comparison.rows}
    assert "it waits for a bus." in notes["streaming_llm"]
    assert "bus" not in notes["vegas"]
    assert outcome.comparison.status == "complete"
    assert "1 do not run here" in outcome.comparison.reason
    assert "not served." in (session.folder / "table.md").read_text()
    # Not even asked for at the start, which would be refused as a whole.
    assert {base.algorithm for base in session.capacity.also} == {"vegas", "streaming_llm"}


def test_a_method_the_running_engine_refuses_is_a_row_as_well(session: Session) -> None:
    class Choosy(Bare):
        def configure(self, config: SpeculationConfig) -> None:
            if config.rows == "last_accepted":
                raise BackendError("vLLM's engine core refused it: rows known too late.")
            super().configure(config)

    session.on_vllm()
    session.engine = Choosy(SHAPES["vegas"])
    outcome = session.run(methods="last_accepted,vegas", budget="25m")
    # An engine started with what it refuses would not start.
    assert session.capacity.config.rows == "two"
    assert {base.rows for base in session.capacity.also} == {"two", "last_accepted"}
    rows = {row.name: row for row in outcome.comparison.rows}
    assert "rows known too late" in rows["last_accepted"].note
    assert rows["vegas"].vs_plain is not None


def test_with_nothing_that_runs_the_reasons_are_the_error(session: Session) -> None:
    session.on_vllm()
    session.refused = {"quest": "not today.", "snapkv": "nor this."}
    with pytest.raises(ConfigError, match=r"quest: not today. snapkv: nor this."):
        session.run(methods="quest,snapkv")
    assert session.stock == []


def test_what_the_plugin_serves_is_asked_of_the_plugin() -> None:
    plain = SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0)
    assert refusal_by_vllm(plain) == ""
    assert refusal_by_vllm(plain.replace(algorithm="streaming_llm")) == ""
    assert slowed_on_vllm(plain) == ""
    assert "second pass" in slowed_on_vllm(plain.replace(rows="last_accepted"))
    assert "'dense'" in refusal_by_vllm(plain.replace(algorithm="dense"))
    with pytest.raises(ConfigError, match="quests"):
        refusal_by_vllm(plain.replace(algorithm="quests"))


def test_vllm_s_own_methods_join_by_default_where_there_is_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def own(backend: str, **options: Any) -> list[str]:
        given = {**OPTIONS, "run_dir": None, "methods": None, "backend": backend, **options}
        return [one.name for one in CompareRequest.from_options(given).own]

    assert own("reference") == []
    assert own("vllm") == ["ngram", "suffix"]
    assert own("vllm", draft_model="d") == ["ngram", "suffix", "draft_model"]
    assert own("vllm", methods="vegas,mtp") == ["mtp"]


def test_what_a_sweep_tunes_on_vllm_is_among_the_methods_there() -> None:
    given = {**OPTIONS, "run_dir": None, "methods": None, "backend": "vllm"}
    tuned = SweepRequest.from_options(options(backend="vllm")).base
    bases = [method.base for method in CompareRequest.from_options(given).methods]
    assert tuned.replace(min_tokens=bases[0].min_tokens) in bases


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


def test_another_split_of_the_model_is_another_comparison(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    def interrupted(_: object, capacity: Capacity, **__: Any) -> None:
        opened.append(capacity.tensor_parallel_size)
        raise KeyboardInterrupt

    session.on_vllm()
    monkeypatch.setattr(compare_bed, "open_vllm", interrupted)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    def compare(size: int, methods: str) -> None:
        session.run(backend="vllm", methods=methods, tensor_parallel_size=size)

    with pytest.raises(KeyboardInterrupt):
        compare(2, "vegas")
    # Not even a method that is new in the folder is written down with the other split.
    with pytest.raises(UsageError, match="`tensor_parallel_size` was 2, now it is 1"):
        compare(1, "quest,vegas")
    assert opened == [2], "refused before an engine starts"
    with pytest.raises(KeyboardInterrupt):
        compare(2, "quest,vegas")
    assert opened == [2, 2]
    with pytest.raises(UsageError, match=r"split over 3 GPUs, which takes 3, .* may use 2"):
        compare(3, "vegas")
