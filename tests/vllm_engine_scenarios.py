"""The tuner's engine over vLLM itself on the CPU test bed; prints what it did, as JSON.

A process of its own, as the bed replaces parts of vLLM. Both arms run in this process: orders go
through `host` and `driving` to a real engine core; only the pipe and the process are left out.

    python tests/vllm_engine_scenarios.py stock|plugin FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import vllm_bed as bed
from plain_collector import PlainCollector

from vegas_runtime.backend import Capacity, PromptBlock
from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.records import Run
from vegas_runtime.vllm_plugin import host
from vegas_runtime.vllm_plugin.driving import Core, CoreFacts, Driver
from vegas_runtime.vllm_plugin.engine import Checkpoint, VllmEngine

SAMPLED = SamplingConfig(temperature=0.7, top_k=20, top_p=0.95, repetition_penalty=1.2, seed=5)
BED: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "block_size": bed.BLOCK_SIZE,
    "max_num_batched_tokens": 64,
    "enforce_eager": True,
}


class BedCore(host.VllmCore):
    """vLLM's in-process client has no utility calls; its core has."""

    def _call_core(self, utility: str, *args: Any) -> Any:
        return getattr(self._core.engine_core, utility)(*args)


class SameProcess:
    """`child.Child` without a process."""

    is_healthy = True
    age_s = 0.0
    guard = None

    def ask(
        self, order: str, /, *, timeout_s: float, quiet_s: float | None = None, **arguments: Any
    ) -> Any:
        if order == "open":
            return self._open(**arguments)
        if order == "call":
            return self._core.call(arguments["utility"], *arguments["args"])
        return getattr(self._driver, order)(**arguments)

    def _open(self, *, options: Mapping[str, Any], has_plugin: bool) -> CoreFacts:
        options = {**options, **BED}
        options.pop("gpu_memory_utilization")
        self._core: Core = BedCore(options=options, has_plugin=has_plugin)
        self._driver = Driver(self._core)
        return self._core.facts

    def end(self, *, report: Any) -> None:
        self._core.close()


def main() -> None:
    """Run one arm."""
    arm, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    host.device_facts = lambda kind: {"kind": kind, "class": "bed"}  # type: ignore[assignment]
    host.runtime_facts = lambda kind: {"vllm": "0.33"}  # type: ignore[assignment]
    if not (folder / "config.json").exists():
        bed.save_tiny_llama(folder)
    if arm == "plugin":
        # It prepares the plugin and then starts an engine, of which only the former is wanted.
        bed.start = lambda *_, **__: None
        bed.start_plugin(folder, collector=PlainCollector)
    engine = VllmEngine(
        Checkpoint(folder=folder, tokenizer=None, facts={"id": "tiny", "dtype": "float32"}),
        Capacity(
            batch_size=4,
            max_model_len=128,
            gammas=(0, 2, 3),
            max_ratio=1.0,
            config=SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0, min_tokens=4),
        ),
        is_stock=arm == "stock",
        launch=lambda is_stock: SameProcess(),  # type: ignore[arg-type,return-value]
    )
    report = _stock(engine) if arm == "stock" else _plugin(engine)
    report["info"] = asdict(engine.info)
    engine.close()
    sys.stdout.write(json.dumps(report) + "\n")


def _block(batch_size: int = 4) -> PromptBlock:
    prompts = tuple(
        tuple((7 * place + 3 * index) % bed.VOCABULARY for index in range(33)) for place in range(6)
    )
    return PromptBlock(
        index=0, prompts=prompts, batch_size=batch_size, max_new_tokens=12, sampling=SAMPLED
    )


def _run(engine: VllmEngine, block: PromptBlock | None = None, tokens: int = 60) -> dict[str, Any]:
    run: Run = engine.run(
        block or _block(), replicate=0, max_tokens=tokens, deadline_s=time.monotonic() + 300
    )
    return run.to_dict()


def _stock(engine: VllmEngine) -> dict[str, Any]:
    block = _block()
    greedy = engine.generate(
        block.prompts, max_new_tokens=8, sampling=SamplingConfig(), num_logprobs=2
    )
    return {"plain": _run(engine), "greedy": [asdict(one) for one in greedy]}


def _plugin(engine: VllmEngine) -> dict[str, Any]:
    full = SpeculationConfig(num_speculative_tokens=3, sparsity_ratio=1.0, min_tokens=4)
    sparse = full.replace(num_speculative_tokens=2, sparsity_ratio=0.25)
    report: dict[str, Any] = {}
    for name, config in (("full", full), ("sparse", sparse), ("plain", full)):
        gamma = 0 if name == "plain" else config.num_speculative_tokens
        engine.configure(config.replace(num_speculative_tokens=gamma))
        report[name] = _run(engine)
    report["two_at_a_time"] = _run(engine, _block(batch_size=2), tokens=20)
    engine.configure(full)
    greedy = engine.generate(_block().prompts, max_new_tokens=8, sampling=SamplingConfig())
    return report | {"greedy": [asdict(one) for one in greedy]}


if __name__ == "__main__":
    main()
