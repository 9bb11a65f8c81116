"""`compare --backend vllm` from end to end over `VllmEngine`, on the fake engine core."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_vllm
import pytest
from fake_vllm import FAST, Clock, FakeEngineCore, InlineChild
from test_compare_methods import OPTIONS
from test_vllm_sweep import model

from vegas_runtime.protocol import Capacity, StockMethod
from vegas_runtime.vllm_plugin.config import ALGORITHMS_KEY
from vegas_runtime.vllm_plugin.engine import VllmEngine
from vegas_runtime.vllm_plugin.engine_options import Checkpoint, engine_options
from vegas_tune import compare_bed, compare_methods, figure_files, stock_methods
from vegas_tune.compare_methods import CompareRequest
from vegas_tune.progress import SweepProgress

__all__ = ["model"]

SELECT_S = 0.0012


class Core(FakeEngineCore):
    """Selecting takes its time and a window none; one method is not known."""

    def vegas_configure(self, values: Any) -> dict[str, Any]:
        if values.get("algorithm") == "spec_extend":
            raise ValueError("spec_extend has no room here.")
        return super().vegas_configure(values)

    def _execute(self, order: Any) -> tuple[float, Any]:
        is_window = self.setting["algorithm"] == "streaming_llm"
        self._shape = replace(FAST, select_s=0.0 if is_window else SELECT_S)
        return super()._execute(order)


class RefusingChild(InlineChild):
    """Says what the engine core refused as the process around vLLM does."""

    def ask(self, order: str, /, **arguments: Any) -> Any:
        try:
            return super().ask(order, **arguments)
        except ValueError as error:
            from vegas_runtime.errors import BackendError

            raise BackendError(f"vLLM's engine core refused it: {error}") from error


def test_every_method_is_a_row_of_one_table(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    starts: list[str] = []
    declared: list[Any] = []

    def open_vllm(
        source: Checkpoint,
        capacity: Capacity,
        *,
        is_stock: bool = False,
        drafting: StockMethod | None = None,
        **_: Any,
    ) -> VllmEngine:
        gamma = drafting.num_speculative_tokens if drafting else 0
        starts.append(f"ngram {gamma}" if drafting else "stock" if is_stock else "plugin")
        if not is_stock:
            options = engine_options(source, capacity, is_stock=False)
            declared.append(options["speculative_config"][ALGORITHMS_KEY])

        def launch(stock: bool) -> Any:
            return RefusingChild(clock, seed=10 * gamma + len(starts))

        return VllmEngine(
            source, capacity, is_stock=is_stock, drafting=drafting, launch=launch, clock=clock
        )

    monkeypatch.setattr(fake_vllm, "FakeEngineCore", Core)
    monkeypatch.setattr(compare_bed, "open_vllm", open_vllm)
    monkeypatch.setattr(figure_files, "can_draw", lambda: False)
    monkeypatch.setattr(stock_methods.importlib.util, "find_spec", lambda name: None)
    request = CompareRequest.from_options(
        {
            **OPTIONS, "model": str(model / "model"), "backend": "vllm", "budget": "500s",
            "workload": str(model / "prompts.jsonl"), "context": None, "batch": 4, "waiting": 2,
            "blocks": 2, "max_new_tokens": 64, "min_tokens": 4, "gammas": "2,4", "tokens": 600,
            "ratios": "0.05,0.1,0.3", "methods": "vegas,streaming_llm,spec_extend,ngram,suffix",
            "run_dir": tmp_path / "run",
        }
    )  # fmt: skip
    outcome = compare_methods.run(request, SweepProgress("vegas-tune compare ..."))
    assert outcome.comparison.status == "complete", outcome.comparison.reason
    # The ladder's rung nearest to where the search begins, and its only neighbour.
    assert starts == ["stock", "ngram 2", "ngram 4", "plugin", "stock"]
    assert declared == [["streaming_llm", "spec_extend"]]

    rows = {row.name: row for row in outcome.comparison.rows}
    assert set(rows) == {
        "vegas", "streaming_llm", "ngram", "stock", "plain", "suffix", "spec_extend",
    }  # fmt: skip
    assert "spec_extend has no room here" in rows["spec_extend"].note
    assert "arctic-inference" in rows["suffix"].note
    vegas, window, ngram = rows["vegas"], rows["streaming_llm"], rows["ngram"]
    assert vegas.config is not None
    assert vegas.selection_overhead is not None
    assert vegas.overhead_from == "window"
    gamma, ratio = vegas.config.num_speculative_tokens, vegas.config.sparsity_ratio
    rest = gamma * FAST.draft_s(ratio) + FAST.verify_s(gamma) + FAST.other_s + 0.0001
    # Steps in which requests arrive are longer and are few: a tenth of what is told apart.
    assert vegas.selection_overhead.est == pytest.approx(SELECT_S / (SELECT_S + rest), rel=0.1)
    assert window.selection_overhead is None
    for row in (vegas, window):
        assert row.vs_plain is not None
        assert row.vs_stock is not None
        # The fake's plugin costs plain decoding nothing, so both ratios say the same.
        assert row.vs_stock.est == pytest.approx(row.vs_plain.est, rel=0.03)
    assert ngram.config is not None
    assert ngram.tokens_per_iteration is not None
    own, p = ngram.config.num_speculative_tokens, FAST.agreement(1.0)
    truth = 1 + sum(p**i for i in range(1, own + 1))
    assert ngram.tokens_per_iteration.est == pytest.approx(truth, rel=0.03)
    assert ngram.vs_stock is not None
    assert ngram.best_other in ("vegas", "streaming_llm")
