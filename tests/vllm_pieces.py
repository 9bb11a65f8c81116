"""Pieces of the worker that need vLLM's modules but no engine; prints what they did, as JSON.

A process of its own, like `vllm_scenarios`.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import vllm_bed  # noqa: F401  (lets vLLM's GPU modules be imported)
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.vllm_plugin import graphs
from vegas_runtime.vllm_plugin.attention import (
    DraftMetadata,
    VegasAttentionImpl,
    VegasMetadataBuilder,
)
from vegas_runtime.vllm_plugin.config import PluginSettings, with_settings
from vegas_runtime.vllm_plugin.graphs import DraftGraphs, VerifyGraphs
from vegas_runtime.vllm_plugin.step_inputs import StepInputs


def main() -> None:
    """Print every piece's answers."""
    pieces = (dispatch, splits, budgets, sinks)
    sys.stdout.write(json.dumps({piece.__name__: piece() for piece in pieces}))


def managed(kind: Any) -> Any:
    """A graph manager of 32 requests, gammas 0, 4 and 6, as it is after its captures."""
    config = SpeculationConfig(num_speculative_tokens=6, sparsity_ratio=0.07)
    settings = PluginSettings(config=config, gammas=(0, 4, 6))
    manager = object.__new__(kind)
    manager.vllm_config = SimpleNamespace(additional_config=with_settings({}, settings))
    manager.compilation_config = SimpleNamespace(
        cudagraph_capture_sizes=[1, 2, 4, 8, 16, 24, 32, 64, 128, 224]
    )
    manager.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    manager.max_num_reqs = 32
    manager._capture_descs = {}
    manager._init_candidates()
    manager._graphs_captured = True
    return manager


def dispatch() -> dict[str, Any]:
    """Which graph each batch replays."""
    found: dict[str, Any] = {}

    def ask(name: str, rows: list[int], *, needs_lists: bool = True) -> None:
        manager = managed(VerifyGraphs)
        manager.longest_query, manager.needs_lists = max(rows), needs_lists
        uniform = rows[0] if len({*rows}) == 1 else None
        desc = manager.dispatch(len(rows), sum(rows), uniform, 0)
        found[name] = told(desc)

    ask("even", [7] * 10)
    ask("other_gamma", [5] * 10)
    ask("uneven", [7] * 9 + [3])
    ask("arrival", [7] * 29 + [1, 1])
    ask("mostly_single", [7] + [1] * 20)
    ask("prompt_chunk", [7] * 4 + [30])
    ask("long_prompt", [7] * 4 + [400])
    ask("plain", [1] * 10, needs_lists=False)
    ask("drafting_begins", [1] * 10)
    manager = managed(VerifyGraphs)
    found["dummy"] = told(manager.dispatch(16, 16 * 7, 7, 0))
    manager._graphs_captured = False
    found["before_capture"] = told(manager.dispatch(10, 70, 7, 0))
    drafts = managed(DraftGraphs)
    found["drafts"] = [drafts.find(batch).num_reqs for batch in (1, 3, 9, 32)]
    found["padding_limit"] = graphs.MAX_PADDING
    return found


def told(desc: BatchExecutionDescriptor) -> list[Any]:
    """Mode, requests, tokens, rows a request."""
    return [desc.cg_mode.name, desc.num_reqs, desc.num_tokens, desc.uniform_token_count]


def splits() -> dict[str, Any]:
    """How verifications split by rows, with at most 7 rows a verification."""
    builder = object.__new__(VegasMetadataBuilder)
    found: dict[str, Any] = {}
    for name, rows in {
        "verify_only": [7, 7, 3, 1],
        "with_chunks": [7, 7, 2, 20, 64],
        "chunks_only": [16, 30],
        "unsorted": [20, 7],
    }.items():
        starts = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0).int()
        common = SimpleNamespace(
            query_start_loc_cpu=starts, query_start_loc=starts, num_reqs=len(rows)
        )
        try:
            split = builder._split(common, 7)
        except AssertionError as error:
            found[name] = str(error)
            continue
        long = split.long_query_start
        found[name] = [
            split.num_short,
            split.num_short_tokens,
            None if long is None else long.tolist(),
        ]
    return found


def budgets() -> dict[str, Any]:
    """Budgets of a batch: verifying, cut short, after a prompt, padding."""
    inputs = StepInputs(max_requests=6, max_rows=7, num_layers=1, device=torch.device("cpu"))
    inputs.ratio.fill_(0.07)
    inputs.min_tokens.fill_(64)
    import numpy as np

    inputs.load(
        np.array([4, 2, 0, 5]), np.array([6, 2, 0, 6]), np.array([False, False, True, False])
    )
    is_prompt = inputs.is_prompt.tolist()
    seq_lens = torch.tensor([7400, 5000, 3000, 40, 0, 0], dtype=torch.int32)
    held = inputs.budgets(seq_lens, inputs.rows).tolist()
    inputs.load(np.array([1]), None, np.array([False]))
    return {
        "held": held,
        "is_prompt": is_prompt,
        "rows": inputs.rows.tolist(),
        "request_ids": inputs.request_ids.tolist(),
    }


def sinks() -> list[Any]:
    """Type and values of the sinks that a draft step hands on, of a model in bfloat16."""
    found: list[Any] = []

    def draft(*_: Any, sinks: torch.Tensor, **__: Any) -> None:
        found.extend([str(sinks.dtype), sinks.tolist()])

    impl: Any = object.__new__(VegasAttentionImpl)
    impl.sinks = torch.tensor([0.5, -2.0], dtype=torch.bfloat16)
    collector: Any = SimpleNamespace(begin_draft=lambda **_: None, draft=draft)
    inputs = StepInputs(max_requests=1, max_rows=1, num_layers=1, device=torch.device("cpu"))
    impl.attach(collector, inputs, 0)
    none = torch.zeros(1, dtype=torch.int32)
    rows = torch.zeros(1, 2, 8)
    metadata = DraftMetadata(block_table=none[None], seq_lens=none, request_ids=none)
    impl.forward(None, rows, rows, rows, torch.zeros(1, 2, 16, 16), metadata, rows)
    return found


if __name__ == "__main__":
    main()
