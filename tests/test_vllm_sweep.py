"""`sweep --backend vllm` from end to end, on the fake engine: three starts, one profile."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoints import save_checkpoint
from fake_vllm import FAST, Clock, InlineChild
from test_request import options

from vegas_runtime import backend
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import BackendError, ProfileMismatchError, UsageError
from vegas_runtime.profile import load_profile
from vegas_runtime.protocol import Capacity
from vegas_runtime.vllm_plugin.engine import VllmEngine
from vegas_runtime.vllm_plugin.engine_options import Checkpoint
from vegas_tune import checking, tune
from vegas_tune import request as request_module
from vegas_tune.evidence import unpack_records
from vegas_tune.gate import replay_decisions
from vegas_tune.measure import unpaired_ratio
from vegas_tune.outcomes import Measured
from vegas_tune.plan import STOCK
from vegas_tune.progress import SweepProgress
from vegas_tune.render import render
from vegas_tune.request import VLLM, SweepRequest
from vegas_tune.stock import PASSES, EngineUse
from vegas_tune.sweep_outcome import SweepOutcome

GAMMAS = (1, 2, 3, 4, 6)


class Garage:
    """Hands out fake engines on one clock, and remembers them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.engines: list[VllmEngine] = []
        self.children: list[InlineChild] = []
        self.capacities: list[Capacity] = []
        self.stock_options: dict[str, Any] = {}
        self.plugin_options: dict[str, Any] = {}
        self.on_start: Callable[[bool], None] = lambda is_stock: None
        monkeypatch.setattr(backend, "open_vllm", self.open)

    def open(
        self, checkpoint: Checkpoint, capacity: Capacity, *, is_stock: bool = False, **_: Any
    ) -> VllmEngine:
        assert all(engine._child is None for engine in self.engines), "two engines at a time"
        self.on_start(is_stock)
        self.capacities.append(capacity)
        arm = self.stock_options if is_stock else self.plugin_options

        def launch(stock: bool) -> Any:
            self.children.append(InlineChild(self.clock, seed=len(self.children), **arm))
            return self.children[-1]

        engine = VllmEngine(
            checkpoint, capacity, is_stock=is_stock, launch=launch, clock=self.clock
        )
        self.engines.append(engine)
        return engine

    @property
    def starts(self) -> list[str]:
        return ["stock" if engine._is_stock else "plugin" for engine in self.engines]


@pytest.fixture
def garage(monkeypatch: pytest.MonkeyPatch) -> Garage:
    return Garage(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_checkpoint(folder / "model", "llama")
    words = "the quick brown fox jumps over a lazy dog while rain falls on the old mill"
    rows = [
        json.dumps({"text": (" ".join(words.split()[start:] + words.split()) * 3)[start:][:180]})
        for start in range(12)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def _sweep(model: Path, run_dir: Path, **changes: Any) -> SweepOutcome:
    given: dict[str, Any] = {
        "model": str(model / "model"),
        "backend": "vllm",
        "workload": str(model / "prompts.jsonl"),
        "batch": 4,
        "waiting": 2,
        "blocks": 2,
        "max_new_tokens": 64,
        "min_tokens": 4,
        "gammas": ",".join(map(str, GAMMAS)),
        "ratios": "0.03,0.05,0.1,0.3",
        "temperature": 0.6,
        "budget": "600s",
        "run_dir": run_dir,
        **changes,
    }
    request = SweepRequest.from_options(options(**given))
    return tune.run(request, SweepProgress("vegas-tune sweep ..."))


@dataclass(frozen=True)
class Finished:
    """A finished sweep: what it found, the engines it took, what it told."""

    outcome: SweepOutcome
    garage: Garage
    told: str

    def copy(self, folder: Path) -> Path:
        """The run's folder, to go on in."""
        return Path(shutil.copytree(self.outcome.path.parent, folder))


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The sweep that every test looks at which changes nothing about it."""
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()) as told:
        garage = Garage(patch)
        outcome = _sweep(model, tmp_path_factory.mktemp("finished") / "run")
    return Finished(outcome, garage, told.getvalue())


def _rate(gamma: int, ratio: float) -> float:
    """The fake's throughput but for what ends and starts, up to a factor."""
    p = FAST.agreement(ratio)
    seconds = FAST.verify_s(gamma) + FAST.other_s
    if gamma:
        seconds += gamma * FAST.draft_s(ratio) + FAST.select_s
    return float(1 + sum(p**i for i in range(1, gamma + 1))) / seconds


def test_one_plugin_start_between_two_of_stock_leaves_a_replayable_profile(
    finished: Finished,
) -> None:
    outcome, garage = finished.outcome, finished.garage
    assert outcome.result.status == "validated", outcome.result.reason
    assert garage.starts == ["stock", "plugin", "stock"]
    assert all(child.is_ended for child in garage.children)

    chosen = outcome.result.selected
    best = max(_rate(g, r) for g in GAMMAS for r in (0.03, 0.05, 0.1, 0.3))
    # Of equals the cheapest is taken; endings and starts, which `_rate` leaves out, make settings
    # more alike than it says.
    assert _rate(chosen.num_speculative_tokens, chosen.sparsity_ratio) > 0.93 * best
    verdict = outcome.result.validation
    assert verdict is not None
    gains = {config: gain.est for config, gain in verdict.speedups.items()}
    assert gains[chosen] >= (1 - outcome.result.plan.gamma_tie_tolerance) * max(gains.values())

    profile = load_profile(outcome.path)
    assert profile.backend == "vllm"
    assert replay_decisions(profile, outcome.path.parent).status == "ok"
    results = profile.results
    assert results is not None
    assert results.speedup_vs_stock is not None
    # The fake's plugin costs nothing at gamma 0, so both ratios must say the same.
    assert results.speedup_vs_stock.est == pytest.approx(results.speedup_vs_gamma0.est, rel=0.03)
    assert results.speedup_vs_stock.low is not None
    assert results.speedup_vs_stock.high is not None
    assert results.speedup_vs_stock.low < results.speedup_vs_stock.est
    facts = profile.protocol.to_facts() if profile.protocol else {}
    assert (facts["engine_starts"], facts["stock_engine_starts"]) == (1, 2)
    assert facts["gpu_minutes"] == pytest.approx(
        sum(engine.held_s for engine in garage.engines) / 60, abs=0.02
    )
    assert len(facts["stock_tok_s"]) == 2 * PASSES
    assert facts["prefix_cache_hit_share"] > 0.8
    printed = outcome.to_text()
    assert "1 start of the tuned engine, 2 of stock vLLM" in printed
    assert "against stock vLLM: " in printed
    assert outcome.to_dict()["engine_use"]["engine_starts"] == 1
    assert "stock vLLM, before the sweep" in finished.told


def _check(
    path: Path,
    model: Path,
    garage: Garage,
    monkeypatch: pytest.MonkeyPatch,
    *,
    here: tuple[str, str] = ("vllm", "because"),
    **changes: Any,
) -> checking.Check:
    monkeypatch.setattr(checking, "open_vllm", garage.open)
    monkeypatch.setattr(checking, "choose_backend", lambda: here)
    given: dict[str, Any] = {
        "replay_only": False,
        "speedup": False,
        "model": str(model / "model"),
        "data": model / "prompts.jsonl",
        "budget": "10m",
        "tensor_parallel_size": None,
        "dtype": "auto",
        "device": "auto",
        "report": lambda _: None,
        **changes,
    }
    return checking.run(path, **given)


def test_a_profile_of_vllm_is_checked_on_vllm(
    model: Path, finished: Finished, garage: Garage, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = finished.outcome
    verdict = _check(outcome.path, model, garage, monkeypatch, speedup=True)
    assert garage.starts == ["plugin"]
    assert garage.children[-1].is_ended
    assert [one.tier for one in verdict.verdicts] == ["replay", "acceptance", "speedup"]
    assert verdict.status != "regressed", verdict.to_text()
    last = garage.capacities[-1]
    assert outcome.result.selected.num_speculative_tokens in last.gammas
    assert outcome.result.selected.sparsity_ratio <= last.max_ratio


# ------------------------------------------------------------------ a model split over GPUs


def test_both_arms_are_split_the_profile_serves_so_and_check_splits_alike(
    model: Path, tmp_path: Path, garage: Garage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    outcome = _sweep(
        model, tmp_path / "run", tensor_parallel_size=2, gammas="2,4", ratios="0.05,0.1,0.3"
    )
    assert garage.starts == ["stock", "plugin", "stock"]
    assert [one.tensor_parallel_size for one in garage.capacities] == [2, 2, 2]
    profile = load_profile(outcome.path)
    assert profile.match.device.tp == 2
    rendered = yaml.safe_load(render(profile, "yaml", model=str(model / "model")))
    assert rendered["tensor-parallel-size"] == 2
    facts = profile.protocol.to_facts() if profile.protocol else {}
    # Three starts of 40 s on two GPUs, and what they measured.
    assert facts["gpu_minutes"] > 2 * 3 * 40 / 60

    def check(**changes: Any) -> checking.Check:
        return _check(outcome.path, model, garage, monkeypatch, **changes)

    assert check().status == "ok"
    assert garage.capacities[-1].tensor_parallel_size == 2
    # Accepted tokens hardly depend on the machine; the speed-up does.
    assert check(tensor_parallel_size=1).status == "ok"
    assert garage.capacities[-1].tensor_parallel_size == 1
    with pytest.raises(ProfileMismatchError, match=r"`device\.tp` is 3 here and 2 in the profile"):
        check(tensor_parallel_size=3, speedup=True)

    num_starts = len(garage.starts)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with pytest.raises(UsageError, match=r"split over 2 GPUs, which takes 2, .* may use 1"):
        check()
    here = ("reference", "no GPU here")
    with pytest.raises(UsageError, match=r"size is 2, and only vLLM .* no GPU here"):
        check(tensor_parallel_size=2, here=here)
    opened: list[str] = []

    def open_backend(name: str, **_: Any) -> Any:
        opened.append(name)
        raise BackendError("seen")

    monkeypatch.setattr(checking, "open_backend", open_backend)
    with pytest.raises(BackendError, match="seen"):
        check(here=here)
    assert opened == ["reference"], "which splits nothing"
    assert len(garage.starts) == num_starts


def test_a_run_is_resumed_with_its_own_split_alone(
    model: Path, tmp_path: Path, garage: Garage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(is_stock: bool) -> None:
        if not is_stock:
            raise KeyboardInterrupt

    garage.on_start = stop
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    with pytest.raises(KeyboardInterrupt):
        _sweep(model, tmp_path / "run", tensor_parallel_size=2)
    with pytest.raises(UsageError, match="`tensor_parallel_size` was 2, now it is 1"):
        _sweep(model, tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        _sweep(model, tmp_path / "run", tensor_parallel_size=2)
    assert garage.starts == ["stock"], "refused before an engine starts, and found on resuming"


def test_more_gpus_than_may_be_used_are_refused_before_the_model_is_looked_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setattr(backend, "find_checkpoint", lambda *_, **__: pytest.fail("fetched"))
    with pytest.raises(UsageError, match=r"split over 4 GPUs, which takes 4, .* may use 2"):
        _sweep(model, tmp_path / "run", tensor_parallel_size=4)
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------ both arms


def test_both_arms_are_sized_alike_and_for_the_workload(finished: Finished) -> None:
    first, *others = finished.garage.capacities
    assert len(others) == 2
    assert all(capacity == first for capacity in others)
    assert first.batch_size == 4
    assert first.gammas == (0, *GAMMAS)
    assert first.max_ratio == 0.3


def test_the_serving_block_is_what_the_plugin_reads(model: Path, finished: Finished) -> None:
    outcome = finished.outcome
    profile = load_profile(outcome.path)
    rendered = yaml.safe_load(render(profile, "yaml", model=str(model / "model")))
    assert rendered["max-num-seqs"] == 4
    speculative = rendered["speculative-config"]
    assert SpeculationConfig.from_rfc(speculative) == outcome.result.selected


def test_a_slower_plugin_engine_shows_against_stock_and_not_against_gamma_0(
    model: Path, tmp_path: Path, garage: Garage, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fake_vllm import FakeEngineCore

    plain = FakeEngineCore._execute

    def slower(self: FakeEngineCore, order: Any) -> Any:
        duration_s, results = plain(self, order)
        return duration_s * (1.25 if len(self._gammas) > 1 else 1.0), results

    monkeypatch.setattr(FakeEngineCore, "_execute", slower)
    results = load_profile(_sweep(model, tmp_path / "run").path).results
    assert results is not None
    assert results.speedup_vs_stock is not None
    ratio = results.speedup_vs_gamma0.est / results.speedup_vs_stock.est
    assert ratio == pytest.approx(1.25, rel=0.03)


def test_the_same_command_again_measures_nothing_and_starts_no_stock_engine(
    model: Path, tmp_path: Path, finished: Finished, garage: Garage
) -> None:
    first = finished.outcome
    before = first.path.read_bytes()
    again = _sweep(model, finished.copy(tmp_path / "run"))
    assert garage.starts == ["plugin"]
    assert again.result.selected == first.result.selected
    older, newer = yaml.safe_load(before), yaml.safe_load(again.path.read_bytes())
    assert newer["results"] == older["results"]
    assert newer["decisions"] == older["decisions"]


def test_an_interrupt_before_the_end_keeps_stock_s_passes(
    model: Path, tmp_path: Path, garage: Garage
) -> None:
    def stop(is_stock: bool) -> None:
        if garage.starts == ["stock", "plugin"]:
            raise KeyboardInterrupt

    garage.on_start = stop
    with pytest.raises(KeyboardInterrupt, match="Everything measured is kept"):
        _sweep(model, tmp_path / "run")
    garage.on_start = lambda is_stock: None
    outcome = _sweep(model, tmp_path / "run")
    assert garage.starts == ["stock", "plugin", "plugin", "stock"]
    assert outcome.profile.results is not None
    assert outcome.profile.results.speedup_vs_stock is not None


def test_the_first_interrupt_lets_a_pass_of_stock_vllm_finish(
    model: Path, tmp_path: Path, garage: Garage, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = VllmEngine.run
    passes = 0

    def interrupted(self: VllmEngine, *args: Any, **options: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == 2:
            # In the middle of the second of three.
            os.kill(os.getpid(), signal.SIGINT)
        return run(self, *args, **options)

    monkeypatch.setattr(VllmEngine, "run", interrupted)
    with pytest.raises(KeyboardInterrupt, match="Everything measured is kept"):
        _sweep(model, tmp_path / "run")
    assert passes == 2
    assert all(child.is_ended for child in garage.children)
    assert len(list((tmp_path / "run" / "records").glob("0-stock.*"))) == 2, "that one included"


def test_stock_is_evidence_and_no_decision_rests_on_it(finished: Finished) -> None:
    outcome = finished.outcome
    plan, outcomes = unpack_records(outcome.path.parent / "records.npz")
    stock = [one for one in outcomes if one.point.step == STOCK]
    assert len(stock) == 2 * PASSES
    assert all(isinstance(one, Measured) for one in stock)
    assert {one.point.block for one in stock} <= set(plan.validation_blocks)
    assert all(one.point.step != STOCK for one in outcome.result.outcomes)


def test_an_engine_that_does_not_start_ends_the_sweep_with_its_reason(
    model: Path, tmp_path: Path, garage: Garage
) -> None:
    def refuse(is_stock: bool) -> None:
        if not is_stock:
            raise BackendError("vLLM failed at `open`: no GPU.")

    garage.on_start = refuse
    with pytest.raises(BackendError, match="no GPU"):
        _sweep(model, tmp_path / "run")
    assert all(child.is_ended for child in garage.children)


def test_a_setting_that_does_not_take_is_no_measurement(
    model: Path, tmp_path: Path, garage: Garage
) -> None:
    garage.plugin_options = {"stuck": {"sparsity_ratio": 0.1}}
    outcome = _sweep(model, tmp_path / "run")
    failed = {one.point.config.sparsity_ratio for one in outcome.result.failures}
    assert failed
    assert 0.1 not in failed
    assert "`sparsity_ratio` is 0.1 there" in outcome.result.failures[0].reason


# ------------------------------------------------------------------ requests


def test_vllm_has_defaults_of_its_own() -> None:
    request = SweepRequest.from_options(options(backend="vllm"))
    assert request.spec.batch_size == VLLM.batch
    assert request.tokens == request_module.VLLM_TOKENS_PER_REQUEST * VLLM.batch
    assert request.ratios == VLLM.ratios
    assert (request.base.rows, request.base.granularity) == ("all", "page")
    paper = SweepRequest.from_options(options(backend="vllm", rows="two", granularity="token"))
    assert (paper.base.rows, paper.base.granularity) == ("two", "token")
    window = SweepRequest.from_options(options(backend="vllm", algorithm="streaming_llm"))
    assert (window.base.rows, window.base.granularity) == ("two", "token"), "switches of vegas"
    logits = SweepRequest.from_options(options(backend="vllm", metric="logit"))
    assert (logits.base.rows, logits.base.granularity) == ("all", "token")
    # One token is left to compute after a hit on whole blocks.
    assert VLLM.context % 16 == 1
    large = SweepRequest.from_options(options(backend="vllm", batch=256))
    assert large.tokens == request_module.VLLM_TOKENS_PER_REQUEST * 256
    given = SweepRequest.from_options(options(backend="vllm", tokens=77, budget="1h"))
    assert (given.tokens, given.budget_s) == (77, 3600)


def test_default_starts_and_budget_leave_room_in_eight_minutes() -> None:
    # Starts of stock took 45 s on an H200, and 75 s on one whose disk held no compiled Python;
    # prefill and three passes add some ten.
    assert VLLM.budget == "220s"
    assert 300 + 2 * (75 + 10) <= 480


def test_a_dry_run_says_which_engines_it_starts() -> None:
    request = SweepRequest.from_options(options(backend="vllm"))
    text = tune.describe_text(tune.describe(request))
    assert "stock vLLM before and after" in text
    own = tune.describe_text(tune.describe(SweepRequest.from_options(options(backend="reference"))))
    assert "stock" not in own


def test_a_replay_is_refused_before_anything_is_opened(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no text"):
        _sweep(model, tmp_path / "run", backend="replay")


def test_gpu_minutes_are_rounded_to_the_second() -> None:
    use = EngineUse(plugin_starts=1, stock_starts=2, held_s=90.4)
    assert use.gpu_minutes == 1.5


# ------------------------------------------------------------------ the ratio of two groups


def test_an_unpaired_ratio_covers_the_truth_as_often_as_it_says() -> None:
    import numpy as np

    random = np.random.default_rng(1)
    covered = 0
    for _ in range(600):
        tuned = 2.0 * np.exp(0.02 * random.standard_normal(8))
        stock = np.exp(0.005 * random.standard_normal(6))
        ratio = unpaired_ratio(tuned.tolist(), stock.tolist())
        covered += ratio.low <= 2.0 <= ratio.high
    # 95 % of 600 is 570; three standard deviations of a binomial are 16.
    assert 554 <= covered <= 586


def test_equal_groups_have_ratio_one_and_no_width() -> None:
    ratio = unpaired_ratio([2.0, 2.0], [2.0, 2.0])
    assert (ratio.low, ratio.est, ratio.high) == (1.0, 1.0, 1.0)
