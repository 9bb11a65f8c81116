"""The GPU benchmark of all methods, on the fake engine: what it asks for and would publish."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fake_vllm
import numpy as np
import pytest
from fake_vllm import FAST, Clock, FakeEngineCore, checkpoint, inline_engine

from benchmarks import bench_vllm_methods, render_readme, vllm_arms
from benchmarks.bench_vllm_methods import Bench
from benchmarks.results_file import Row
from benchmarks.vllm_arms import Evidence
from benchmarks.vllm_method_rows import logs_of, paired_ratio, publish, recorded, sparse_rows
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.protocol import Capacity, StockMethod
from vegas_runtime.records import Run, read_json_lines
from vegas_runtime.vllm_plugin.engine import VllmEngine
from vegas_runtime.vllm_plugin.engine_options import Checkpoint
from vegas_tune.methods import parse_methods

SELECT_S = 0.001
METHODS = "vegas,all_rows,streaming_llm,quest"


class Selecting(FakeEngineCore):
    """Selecting takes its time, and a window none."""

    def _execute(self, order: Any) -> tuple[float, Any]:
        is_window = self.setting["algorithm"] == "streaming_llm"
        self._shape = replace(FAST, select_s=0.0 if is_window else SELECT_S)
        return super()._execute(order)


def on_fakes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Fake engines in place of vLLM; holds which arm each start was of, and its own gamma."""
    started: list[tuple[bool, int]] = []
    clock = Clock()

    def engine(
        source: Checkpoint,
        capacity: Capacity,
        *,
        is_stock: bool = False,
        drafting: StockMethod | None = None,
        **_: Any,
    ) -> VllmEngine:
        gamma = drafting.num_speculative_tokens if drafting else 0
        started.append((is_stock, gamma))

        own = {"source": source, "size": capacity, "drafting": drafting}
        return inline_engine(clock, is_stock=is_stock, seed=100 + 2 * gamma + is_stock, **own)[0]

    def prompts(_: Any, count: int, length: int) -> list[tuple[int, ...]]:
        return [(place, *range(length - 1)) for place in range(count)]

    monkeypatch.setattr(fake_vllm, "FakeEngineCore", Selecting)
    monkeypatch.setattr(vllm_arms, "VllmEngine", engine)
    monkeypatch.setattr(bench_vllm_methods, "source_prompts", prompts)
    monkeypatch.setattr(bench_vllm_methods, "CONTEXT", 40)
    monkeypatch.setattr(bench_vllm_methods, "refusal_by_vllm", _refusal)
    return started


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    return on_fakes(monkeypatch)


def _refusal(config: SpeculationConfig) -> str:
    return "it is not\nserved here." if config.algorithm == "quest" else ""


def _bench(folder: Path, rows: list[Row], *, seconds: float = 1e4) -> Bench:
    shape = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 64}
    source = replace(checkpoint(), facts={**checkpoint().facts, **shape})
    evidence = Evidence(folder / "passes.jsonl.z")
    return Bench(source, 8, evidence, rows, until_s=time.monotonic() + seconds)


def _of(rows: Sequence[Row], claim: str, method: str) -> Row:
    (found,) = [
        one for one in rows if one.claim == claim and f" method={method}," in f"{one.case},"
    ]
    return found


@dataclass
class Part:
    """A finished part.

    Attributes:
        rows: what it would publish.
        starts: which arm each start was of.
        passes: its records.
    """

    rows: list[Row]
    starts: list[tuple[bool, int]]
    passes: list[dict[str, Any]]


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Part:
    folder = tmp_path_factory.mktemp("sparse")
    rows: list[Row] = []
    with pytest.MonkeyPatch.context() as patch:
        started = on_fakes(patch)
        _bench(folder, rows).sparse(parse_methods(METHODS, vllm_arms.BASE))
    return Part(rows, started, list(read_json_lines(folder / "passes.jsonl.z")))


@pytest.fixture
def sparse(part: Part) -> list[Row]:
    return part.rows


def test_every_method_that_is_served_is_tuned_and_raced(part: Part) -> None:
    sparse = part.rows
    assert sorted(part.starts) == [(False, 0), (True, 0)], "one start of stock, one of the plugin"
    for method in ("vegas", "all_rows", "streaming_llm"):
        for claim in ("decode", "speedup_vs_stock", "speedup_vs_gamma0", "vs_best_other"):
            found = _of(sparse, claim, method)
            assert found.low is not None
            assert found.high is not None
            assert found.low <= found.value <= found.high
        tokens = _of(sparse, "tokens_per_iteration", method)
        gamma, ratio = (float(part.split()[-1]) for part in tokens.case.split(", ")[1:])
        p = FAST.agreement(ratio)
        truth = 1 + sum(p**i for i in range(1, int(gamma) + 1))
        # 8 requests over three passes of 192 tokens each: three errors of their mean.
        assert tokens.value == pytest.approx(truth, rel=0.05)
    assert {row["what"].split()[0] for row in part.passes} == {"stock", "tune", "race"}
    assert all(Run.from_dict(row["run"]).steps for row in part.passes)


def test_few_rounds_of_many_arms_tell_a_ratio_and_how_well() -> None:
    rng = np.random.default_rng(5)
    covered, widths = 0, []
    for _ in range(400):
        drift = rng.normal(0, 0.1, size=2)
        rates = {
            f"arm {place}": np.exp(0.05 * place + drift + rng.normal(0, 0.03, size=2)).tolist()
            for place in range(12)
        }
        ratio = paired_ratio(logs_of(rates), "arm 3", "arm 1")
        covered += ratio.low <= math.exp(0.1) <= ratio.high
        widths.append(ratio.high / ratio.low - 1)
    assert 0.92 <= covered / 400 <= 0.98
    # A single pair's two differences would reach a factor of 1.5 either way.
    assert np.mean(widths) == pytest.approx(2 * 2.2 * 0.03, rel=0.1)


def test_the_figures_can_be_had_again_from_the_passes(part: Part) -> None:
    found = recorded(part.passes)
    again = sparse_rows("b8", found.arms, found.base)
    first = {(one.claim, one.case): one for one in part.rows}
    for one in again:
        # Times are kept to the microsecond.
        assert one.value == pytest.approx(first[one.claim, one.case].value, rel=2e-3)
    others = {one.claim for one in part.rows} - {one.claim for one in again}
    assert others == {"not_served", "passes_not_steady"}


def test_what_selecting_costs_is_measured_against_a_window_as_wide(sparse: list[Row]) -> None:
    for method in ("vegas", "all_rows"):
        found = _of(sparse, "selection_overhead", method)
        gamma, ratio = (float(part.split()[-1]) for part in found.case.split(", ")[1:])
        rest = gamma * FAST.draft_s(ratio) + FAST.verify_s(int(gamma)) + FAST.other_s
        # Steps in which requests arrive are longer, by a few per cent of what is told apart here.
        assert found.value == pytest.approx(SELECT_S / (SELECT_S + rest), rel=0.15)
    assert not [one for one in sparse if "window" in one.case]
    assert not [
        one
        for one in sparse
        if one.claim == "selection_overhead" and "method=streaming_llm" in one.case
    ]


def test_a_method_that_is_refused_is_a_row_with_the_reason(sparse: list[Row]) -> None:
    (found,) = [one for one in sparse if one.claim == "not_served"]
    assert found.case == "b8 method=quest: it is not served here."


def test_vllm_s_own_methods_are_engines_of_their_own(
    starts: list[tuple[bool, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_vllm_methods, "own_method", _own_method)
    rows: list[Row] = []
    _bench(tmp_path, rows).own()
    assert starts == [(True, 0), (True, 3), (True, 4), (True, 6)]
    speedup = _of(rows, "speedup_vs_stock", "ngram")
    # The fake drafts as by a policy that keeps everything.
    gamma, p = int(speedup.case.split()[-1]), FAST.agreement(1.0)
    step_s = gamma * FAST.draft_s(1.0) + FAST.verify_s(gamma) + SELECT_S + FAST.other_s
    tokens = 1 + sum(p**i for i in range(1, gamma + 1))
    truth = tokens / step_s * (FAST.verify_s(0) + FAST.other_s)
    # Steps in which requests arrive are left out of neither, and are longer while drafting.
    assert speedup.value == pytest.approx(truth, rel=0.06)
    refused = {one.case for one in rows if one.claim == "not_served"}
    assert "b8 method=suffix: a package is missing" in refused
    assert len(refused) == 4


def _own_method(name: str) -> Any:
    from vegas_tune.stock_methods import OwnMethod

    return OwnMethod(name=name, reason="a package is missing" if name == "suffix" else "")


def test_without_time_for_further_engines_the_gammas_measured_are_published(
    starts: list[tuple[bool, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_vllm_methods, "own_method", _own_method)
    rows: list[Row] = []
    _bench(tmp_path, rows, seconds=60.0).own()
    assert starts == [(True, 0), (True, 3)]
    assert "gamma 3" in _of(rows, "decode", "ngram").case


def test_both_parts_lie_in_one_file_and_are_compared_through_stock(
    sparse: list[Row], tmp_path: Path
) -> None:
    facts = {"claim": "speedup_vs_stock", "unit": "x"}
    own = Row(case="b8 method=ngram, gamma 3", value=1.25, low=1.2, high=1.3, **facts)
    publish(sparse, "sparse", folder=tmp_path)
    path = publish([own], "own", folder=tmp_path)
    document = json.loads(path.read_text())
    (against,) = [row for row in document["rows"] if row["claim"] == "fastest_vs_own"]
    fastest = max(
        (one for one in sparse if one.claim == "speedup_vs_stock"), key=lambda one: one.value
    )
    assert against["value"] == pytest.approx(fastest.value / 1.25, rel=1e-3)
    assert against["low"] < against["value"] < against["high"]
    # Another run of a part that chose another setting leaves nothing of the one before.
    later = replace(own, case="b8 method=ngram, gamma 6", value=1.1, low=1.0)
    flag = Row(claim="passes_not_steady", case="b8, part own: own ngram", value=1, low=None,
               high=None, unit="passes")  # fmt: skip
    publish([flag], "own", folder=tmp_path)
    document = json.loads(publish([later], "own", folder=tmp_path).read_text())
    flagged = [row["case"] for row in document["rows"] if row["claim"] == flag.claim]
    assert flagged == ["b8, part sparse: none"]
    cases = {row["case"] for row in document["rows"] if "ngram" in row["case"]}
    assert own.case not in cases
    assert len([row for row in document["rows"] if row["claim"] == "fastest_vs_own"]) == 1
    lines = render_readme.methods_table(document["rows"]).strip().splitlines()
    assert lines[0].startswith("| method | tokens per iteration |")
    shown = [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]]
    assert shown[-1] == "quest (b8)"
    assert {name.partition(",")[0] for name in shown[:-1]} == {
        "vegas", "all_rows", "streaming_llm", "ngram",
    }  # fmt: skip
    assert len({line.count(" | ") for line in lines[2:-1]}) == 1
    assert "did not run: it is not served here." in lines[-1]


def test_results_without_methods_have_no_table() -> None:
    rows = [{"claim": "decode", "case": "b8", "value": 1.0, "low": None, "high": None}]
    assert render_readme.methods_table(rows) == ""
