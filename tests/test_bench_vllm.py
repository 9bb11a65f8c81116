"""The GPU benchmark's own logic, on the fake engine: what it asks for and would publish."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import FAST, Clock, checkpoint, inline_engine

from benchmarks import vllm_arms, vllm_lossless, vllm_shape, vllm_sweeps, vllm_throughput
from benchmarks.results_file import RESULTS, Row
from benchmarks.vllm_sweeps import agree, kept_records
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.protocol import Capacity, StockMethod
from vegas_runtime.records import Run, read_json_lines
from vegas_runtime.vllm_plugin.engine import VllmEngine
from vegas_runtime.vllm_plugin.engine_options import Checkpoint
from vegas_tune.gate import result_of
from vegas_tune.measure import measure
from vegas_tune.plan import VALIDATE
from vegas_tune.steady import Unsteady


@pytest.fixture
def arms(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Fake engines in place of vLLM; holds which arm each start was of."""
    started: list[bool] = []
    clock = Clock()

    def engine(
        source: Checkpoint,
        capacity: Capacity,
        *,
        is_stock: bool = False,
        drafting: StockMethod | None = None,
        **_: Any,
    ) -> VllmEngine:
        started.append(is_stock)
        # By what an engine is, not by when it starts: they start side by side. The pass behind
        # `acceptance_length` is short (6 % wide), so a bound below needs one fixed course.
        seed = 4000 + 2 * capacity.batch_size + is_stock
        gamma = drafting.num_speculative_tokens if drafting else 0

        own = {"source": source, "size": capacity, "drafting": drafting}
        return inline_engine(clock, is_stock=is_stock, seed=seed + 2 * gamma, **own)[0]

    def prompts(_: Any, count: int, length: int = 40) -> list[tuple[int, ...]]:
        return [(place, *range(length - 1)) for place in range(count)]

    monkeypatch.setattr(vllm_arms, "VllmEngine", engine)
    for module in (vllm_throughput, vllm_lossless):
        monkeypatch.setattr(module, "source_prompts", prompts)
    monkeypatch.setattr(vllm_throughput, "CONTEXT", 40)
    monkeypatch.setattr(vllm_arms, "TOKENS_PER_REQUEST", 96)
    monkeypatch.setattr(vllm_arms, "TOKENS_PER_PASS", 0)
    shape = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 64}
    source = replace(checkpoint(), facts={**checkpoint().facts, **shape})
    monkeypatch.setattr(vllm_throughput, "find_checkpoint", lambda *_, **__: source)
    return started


def _by_claim(rows: Sequence[Row], claim: str) -> dict[str, Row]:
    return {row.case: row for row in rows if row.claim == claim}


def test_throughput_publishes_every_claim_of_every_batch(arms: list[bool], tmp_path: Path) -> None:
    rows: list[Row] = []
    vllm_throughput.throughput("fake", [4, 8], rows, seconds=150.0, data=tmp_path)
    assert sorted(arms) == [False, True, True], "one start of stock a batch, one of the plugin"
    for claim in ("speedup_vs_stock", "speedup_vs_gamma0", "vegas_vs_streaming_llm"):
        assert set(_by_claim(rows, claim)) == {"b4", "b8"}
    # The fake knows no algorithm: both are the same engine at much the same setting.
    against = _by_claim(rows, "vegas_vs_streaming_llm")["b8"]
    assert against.value == pytest.approx(1.0, abs=0.09)
    assert _by_claim(rows, "plugin_gamma0_vs_stock")["b4"].value == pytest.approx(1.0, abs=0.05)
    p = FAST.agreement(0.07)
    length = _by_claim(rows, "acceptance_length")["b8 gamma 6, ratio 0.07"]
    assert length.value == pytest.approx(1 + sum(p**i for i in range(1, 7)), rel=0.07)
    assert length.low is not None
    assert length.low < length.value
    # 4 or 8 requests decode in the same time here, so the best setting is the same; it drafts.
    speedups = _by_claim(rows, "speedup_vs_stock")
    assert all(row.value > 1.2 for row in speedups.values())


def test_every_pass_of_throughput_is_kept_raw(arms: list[bool], tmp_path: Path) -> None:
    vllm_throughput.throughput("fake", [4], [], seconds=100.0, data=tmp_path)
    rows = list(read_json_lines(tmp_path / "vllm_h200_4.jsonl.z"))
    kinds = {row["what"].split()[0] for row in rows}
    assert kinds == {"stock", "tune", "race", "closed", "b4"}
    assert all(Run.from_dict(row["run"]).steps for row in rows)


def test_a_pass_that_is_not_steady_is_flagged_and_ends_nothing(
    arms: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    judged: list[Run] = []

    def judge(run: Run) -> Any:
        judged.append(run)
        if len(judged) % 3 == 0:
            return Unsteady(kind="unsteady", reason="another process.")
        return measure(run)

    monkeypatch.setattr(vllm_arms, "measure", judge)
    rows: list[Row] = []
    vllm_throughput.throughput("fake", [4], rows, seconds=100.0, data=tmp_path)
    (flagged,) = _by_claim(rows, "passes_not_steady").values()
    assert flagged.value == len(judged) // 3
    assert "stock b4" in flagged.case
    assert "NOT STEADY: stock b4: another process." in capsys.readouterr().out
    assert "b4" in _by_claim(rows, "speedup_vs_stock")


def test_lossless_finds_the_fake_lossless_and_says_how_often_it_would_not(
    arms: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The fake draws tokens uniformly and never deterministically, whatever it is told; it has no
    # collective_rpc to plant a bug with.
    monkeypatch.setattr(vllm_lossless, "_plant", lambda engine: None)
    monkeypatch.setattr(vllm_lossless, "_gap", lambda stock, prefix: 0.1)
    monkeypatch.setattr(vllm_lossless, "NUM_GREEDY", 16)
    monkeypatch.setattr(vllm_lossless, "GREEDY_TOKENS", 24)
    monkeypatch.setattr(vllm_lossless, "GREEDY_CONTEXT", 65)
    monkeypatch.setattr(vllm_lossless, "BATCH", 32)
    rows: list[Row] = []
    vllm_lossless.lossless(checkpoint(), rows, num_samples=3000)
    # Stock, the plugin, n-gram drafts, the plugin on another path; then the first two once more.
    assert sorted(arms) == [*[False] * 3, *[True] * 3]
    tests = _by_claim(rows, "same_distribution_p")
    modes = [case.split(",")[0].split(":")[0] for case in tests]
    assert modes == [*["as served"] * 8, *["batch-invariant"] * 2, "a planted bug"]
    assert all(row.value > vllm_lossless.FALSE_ALARM_RATE for row in tests.values())
    shares = _by_claim(rows, "greedy_outputs_differing")
    assert [row.value for row in shares.values()] == [1.0] * 6
    assert sum("n-gram" in case for case in (*tests, *shares)) == 3
    assert [row.value for row in _by_claim(rows, "greedy_p").values()] == [1.0, 1.0]
    assert len(_by_claim(rows, "acceptance_at_ratio_1")) == 3


def test_the_invariant_half_tells_its_engines_so(
    arms: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    started = vllm_lossless.side_by_side

    def spy(*args: Any, **kwargs: Any) -> Any:
        told.append(kwargs.get("environment"))
        return started(*args, **kwargs)

    monkeypatch.setattr(vllm_lossless, "side_by_side", spy)
    monkeypatch.setattr(vllm_lossless, "_plant", lambda engine: None)
    monkeypatch.setattr(vllm_lossless, "_gap", lambda stock, prefix: 0.1)
    for name, value in (("NUM_GREEDY", 8), ("GREEDY_TOKENS", 16), ("GREEDY_CONTEXT", 65)):
        monkeypatch.setattr(vllm_lossless, name, value)
    vllm_lossless.invariant(checkpoint(), [], num_samples=1000)
    assert told == [{"VLLM_BATCH_INVARIANT": "1"}]


def test_both_parts_run_on_the_same_engines(
    arms: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_lossless, "_plant", lambda engine: None)
    monkeypatch.setattr(vllm_lossless, "_gap", lambda stock, prefix: 0.1)
    for name, value in (("NUM_GREEDY", 8), ("GREEDY_TOKENS", 16), ("GREEDY_CONTEXT", 65)):
        monkeypatch.setattr(vllm_lossless, name, value)
    rows: list[Row] = []
    vllm_throughput.throughput("fake", [4, 8], rows, seconds=150.0, data=tmp_path, num_samples=2000)
    assert sorted(arms) == [False, True, True], "two of stock and one of the plugin"
    claims = {row.claim for row in rows}
    assert {"speedup_vs_stock", "rows_all_vs_two", "same_distribution_p", "greedy_p"} <= claims


def test_shape_tells_steps_of_both_arms(arms: list[bool], tmp_path: Path) -> None:
    rows: list[Row] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_shape, "SHAPE_CONTEXT", 400)
        patch.setattr(vllm_shape, "_buffers", lambda status: 2**30)
        vllm_shape.shape(tmp_path, rows)
    steps = _by_claim(rows, "step_ms")
    plain = next(row for case, row in steps.items() if case.endswith(", stock"))
    drafting = next(row for case, row in steps.items() if case.endswith(", plugin"))
    assert plain.value == pytest.approx(1000 * FAST.verify_s(0), rel=0.15)
    assert drafting.value > 2 * plain.value
    assert (tmp_path / "vllm_h200_shape.jsonl.z").exists()


def test_shape_on_two_gpus_tells_what_is_accepted_at_ratio_1(
    arms: list[bool], tmp_path: Path
) -> None:
    rows: list[Row] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_shape, "SHAPE_CONTEXT", 400)
        patch.setattr(vllm_shape, "_buffers", lambda status: 2**30)
        vllm_shape.shape(tmp_path, rows, tensor_parallel_size=2)
    ((case, accepted),) = _by_claim(rows, "acceptance_at_ratio_1").items()
    assert ", 2 GPUs, " in case
    assert 0 < accepted.value <= 1
    assert (tmp_path / "vllm_h200_shape_tp2.jsonl.z").exists()


def test_source_prompts_are_distinct_and_of_exact_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(3):
        (tmp_path / f"m{index}.py").write_text("".join(f"x{n} = {index}\n" for n in range(2000)))
    monkeypatch.setattr(vllm_arms.sys, "path", [str(tmp_path)])

    def tokenizer(texts: list[str], verbose: bool) -> dict[str, Any]:
        return {"input_ids": [[index, *map(ord, text)] for index, text in enumerate(texts)]}

    found = vllm_arms.source_prompts(tokenizer, 12, 500)
    assert {len(prompt) for prompt in found} == {500}
    assert len(set(found)) == 12
    with pytest.raises(SystemExit, match="prompts of 500 tokens were found"):
        vllm_arms.source_prompts(tokenizer, 10_000, 500)


# ------------------------------------------------------------------ sweeps


def test_published_sweeps_are_their_records() -> None:
    records = kept_records(RESULTS.parent / "data")
    assert len(records) > 1
    rows: list[Row] = []
    agree(records, rows)
    published = json.loads((RESULTS / "sweep_h200.json").read_text())["rows"]
    by_case = {(one["claim"], one["case"]): one["value"] for one in published}
    for one in rows:
        assert by_case[one.claim, one.case] == pytest.approx(one.value, rel=1e-3)
    # What the run itself said, before its records were read again.
    first, setting = rows[0], rows[0].case.split(": ")[1].rpartition(",")[0]
    said = [value for (claim, case), value in by_case.items() if claim == "decode_tok_s"]
    assert said[0] == pytest.approx(first.value, rel=1e-3)
    assert any(setting in case for claim, case in by_case if claim == "decode_tok_s")


def test_sweeps_that_choose_alike_do_not_differ(tmp_path: Path) -> None:
    (first, *_) = kept_records(RESULTS.parent / "data")
    rows: list[Row] = []
    agree([first, first], rows)
    apart = [(one.claim, one.value) for one in rows if one.case.startswith("2 runs, ")]
    assert apart == [("gamma_difference", 0.0), ("decode_difference_pct", 0.0)] * 2
    assert kept_records(tmp_path) == []


@pytest.mark.parametrize(
    ("num_workers", "file", "named"),
    [(1, "sweep_h200_1.npz", "run 1"), (2, "sweep_h200_2_gpus.npz", "2 GPUs")],
)
def test_a_sweep_is_timed_and_its_records_are_kept(
    num_workers: int, file: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        folder = Path(command[command.index("--run-dir") + 1])
        folder.mkdir()
        (folder / "records.npz").write_bytes(b"records")
        told = {
            "selected": SpeculationConfig(num_speculative_tokens=5, sparsity_ratio=0.05).to_dict(),
            "status": "validated",
            "engine_use": {"engine_starts": 1, "stock_engine_starts": 2, "gpu_minutes": 5.0},
            "results": {"decode_tok_s": {"est": 100.0, "low": 99.0, "high": 101.0}},
        }
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps(told))

    monkeypatch.setattr(vllm_sweeps.subprocess, "run", run)
    rows: list[Row] = []
    vllm_sweeps.sweep("m", tmp_path, rows, num_workers=num_workers)
    (command,) = asked
    assert command[command.index("--workers") + 1] == str(num_workers)
    assert (tmp_path / file).read_bytes() == b"records"
    assert {row.case for row in rows} == {f"default plan, {named}: gamma 5, ratio 0.05 (validated)"}
    figures = {row.claim: row.value for row in rows}
    wall_s = figures.pop("wall_s")
    assert 0 <= wall_s < 60
    assert figures == {
        "engine_starts": 1.0, "stock_engine_starts": 2.0, "gpu_minutes": 5.0, "decode_tok_s": 100.0,
    }  # fmt: skip


def test_the_sweep_on_two_gpus_is_its_records() -> None:
    result = result_of(RESULTS.parent / "data" / "sweep_h200_2_gpus.npz")
    chosen = result.selected
    published = json.loads((RESULTS / "sweep_h200.json").read_text())["rows"]
    setting = f"gamma {chosen.num_speculative_tokens}, ratio {chosen.sparsity_ratio:g}"
    case = f"default plan, 2 GPUs: {setting} ({result.status})"
    by_claim = {row["claim"]: row["value"] for row in published if row["case"] == case}
    assert result.validation is not None
    gain = result.validation.speedups[chosen]
    assert by_claim["speedup_vs_gamma0"] == pytest.approx(gain.est, rel=1e-3)
    # Each GPU has measured every point of validation.
    places = [one.point.place for one in result.measured(VALIDATE)]
    assert places.count(0) == places.count(1) > 0


def test_sweeps_are_compared_by_what_they_decided_and_by_todays_rule() -> None:
    records = kept_records(RESULTS.parent / "data")
    rows: list[Row] = []
    agree(records[1:3], rows)
    own, again = (one for one in rows if one.claim == "gamma_difference")
    assert own.case == "2 runs, as decided (gamma 5, 7)"
    assert again.case == "2 runs, decided again: fewer drafts tie within 1% (gamma 4, 5)"
    assert (own.value, again.value) == (2.0, 1.0)
