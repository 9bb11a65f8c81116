"""`sweep --batch 4,2 --context ...` on vLLM, on the fake engine: stock beside every cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_vllm
import pytest
from test_request import options
from test_vllm_sweep import Garage, garage, model

from vegas_runtime.errors import UsageError
from vegas_runtime.profile import load_profile
from vegas_runtime.protocol import PromptBlock
from vegas_tune import cells_tune
from vegas_tune.evidence import unpack_records
from vegas_tune.gate import replay_decisions
from vegas_tune.plan import STOCK
from vegas_tune.progress import SweepProgress
from vegas_tune.report import render_markdown
from vegas_tune.request import SweepRequest
from vegas_tune.stock import PASSES
from vegas_tune.sweep_outcome import SweepOutcome
from vegas_tune.workload import Workload
from vegas_tune.workload_spec import WorkloadSpec

__all__ = ["garage", "model"]


def _workload(spec: WorkloadSpec, tokenizer: Any, **_: Any) -> Workload:
    """Prompts without text: the tiny tokenizer makes no question as short as these."""
    assert spec.context_len is not None
    count = spec.batch_size + spec.num_waiting
    blocks = tuple(
        PromptBlock(
            index=index,
            prompts=tuple((index, place, *range(spec.context_len - 2)) for place in range(count)),
            batch_size=spec.batch_size,
            max_new_tokens=spec.max_new_tokens,
            sampling=spec.sampling,
        )
        for index in range(spec.num_blocks)
    )
    return Workload(spec=spec, blocks=blocks, replays=1, mix={}, source={})


def _sweep(
    model: Path, run_dir: Path, garage: Garage, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> SweepOutcome:
    monkeypatch.setattr(cells_tune, "open_vllm", garage.open)
    monkeypatch.setattr(cells_tune, "build_workload", _workload)
    given: dict[str, Any] = {
        "model": str(model / "model"),
        "backend": "vllm",
        "batch": "4,2",
        "context": "128",
        "waiting": 2,
        "blocks": 2,
        "max_new_tokens": 64,
        "min_tokens": 4,
        "gammas": "2,4",
        "ratios": "0.05,0.1,0.3",
        "temperature": 0.6,
        "budget": "1200s",
        "run_dir": run_dir,
        **changes,
    }
    request = SweepRequest.from_options(options(**given))
    return cells_tune.run(request, SweepProgress("vegas-tune sweep ..."))


def test_every_cell_is_compared_with_stock_in_two_stock_starts(
    model: Path, tmp_path: Path, garage: Garage, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = _sweep(model, tmp_path / "run", garage, monkeypatch)
    assert garage.starts == ["stock", "plugin", "stock"]
    assert all(child.is_ended for child in garage.children)
    profile = load_profile(outcome.path)
    results = profile.results
    assert results is not None
    assert results.speedup_vs_stock is not None
    buckets = {bucket.batch[0]: bucket for bucket in profile.selected.buckets}
    assert set(buckets) == {2, 4}
    for bucket in buckets.values():
        stock, plain = bucket.speedup_vs_stock, bucket.speedup_vs_gamma0
        assert stock is not None
        assert plain is not None
        # The fake's plugin costs nothing at gamma 0, so both ratios must say the same.
        assert stock.est == pytest.approx(plain.est, rel=0.05)
    assert buckets[4].speedup_vs_stock == results.speedup_vs_stock
    facts = profile.protocol.to_facts() if profile.protocol else {}
    assert (facts["engine_starts"], facts["stock_engine_starts"]) == (1, 2)
    assert "1 start of the tuned engine, 2 of stock vLLM" in outcome.to_text()
    assert replay_decisions(profile, outcome.path.parent).status == "ok"
    for name in ("records.npz", "records-b2-c128.npz"):
        _, outcomes = unpack_records(outcome.path.parent / name)
        assert sum(one.point.step == STOCK for one in outcomes) == 2 * PASSES, name
    assert "against stock vLLM" in render_markdown(profile)


def test_the_same_command_again_starts_no_stock_engine_and_another_split_none(
    model: Path, tmp_path: Path, garage: Garage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    first = _sweep(model, tmp_path / "run", garage, monkeypatch, tensor_parallel_size=2)
    with pytest.raises(UsageError, match="`tensor_parallel_size` was 2, now it is 1"):
        _sweep(model, tmp_path / "run", garage, monkeypatch)
    assert [one.tensor_parallel_size for one in garage.capacities] == [2, 2, 2]
    again = _sweep(model, tmp_path / "run", garage, monkeypatch, tensor_parallel_size=2)
    assert garage.starts == ["stock", "plugin", "stock", "plugin"]
    assert again.profile.selected == first.profile.selected


def test_a_cell_that_vllm_cannot_hold_leaves_the_others(
    model: Path,
    tmp_path: Path,
    garage: Garage,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Room for four prompts of 128 tokens with their output, not for six.
    monkeypatch.setattr(fake_vllm, "NUM_KV_TOKENS", 4 * 128 + 2 * (64 + 4 * 16) + 10)
    outcome = _sweep(model, tmp_path / "run", garage, monkeypatch, batch="2,4")
    profile = load_profile(outcome.path)
    cells = profile.protocol.other["cells"] if profile.protocol else []
    assert [(cell["batch"], cell["status"]) for cell in cells] == [(2, "validated"), (4, "failed")]
    assert "the engine holds" in cells[1]["why"]
    assert [bucket.batch for bucket in profile.selected.buckets] == [(2, 4)]
    assert "stock vLLM cannot hold this cell" in capsys.readouterr().err
