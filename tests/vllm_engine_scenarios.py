"""The tuner's engine over vLLM itself on the CPU test bed; prints what it did, as JSON.

A process of its own, as the bed replaces parts of vLLM, whose imports take longer than all of it.
Orders go through `host` and `driving` to a real engine core; only the pipe and the process are left
out. Arms run one after another, the plugin's last: it changes vLLM's classes for good.

    python tests/vllm_engine_scenarios.py FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import torch
import vllm_bed as bed
from plain_collector import PlainCollector

from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.gpu_memory import UNKNOWN, MemoryCheck
from vegas_runtime.protocol import Capacity, PromptBlock, StockMethod
from vegas_runtime.records import Run
from vegas_runtime.vllm_plugin import host
from vegas_runtime.vllm_plugin.core import Core, CoreFacts
from vegas_runtime.vllm_plugin.driving import Driver
from vegas_runtime.vllm_plugin.engine import VllmEngine
from vegas_runtime.vllm_plugin.engine_options import Checkpoint

SAMPLED = SamplingConfig(temperature=0.7, top_k=20, top_p=0.95, repetition_penalty=1.2, seed=5)
BED: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "block_size": bed.BLOCK_SIZE,
    "max_num_batched_tokens": 64,
    "enforce_eager": True,
}


# Of vLLM's own: what needs nothing, and the target as its own draft model.
DRAFTING: Final[Mapping[str, Callable[[Path], StockMethod]]] = {
    "ngram": lambda folder: StockMethod(
        name="ngram", num_speculative_tokens=3, options={"prompt_lookup_max": 2}
    ),
    "draft_model": lambda folder: StockMethod(
        name="draft_model", num_speculative_tokens=3, model=str(folder)
    ),
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
        self.scheduler = self._core._core.engine_core.scheduler
        return self._core.facts

    def end(self, *, report: Any) -> MemoryCheck:
        self._core.close()
        return UNKNOWN


def main() -> None:
    """Print what every arm did, by its name."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    host.device_facts = lambda kind: {"kind": kind, "class": "bed"}  # type: ignore[assignment]
    host.runtime_facts = lambda kind: {"vllm": "0.33"}  # type: ignore[assignment]
    bed.save_tiny_llama(folder)
    report = {arm: _arm(arm, folder) for arm in ("stock", *DRAFTING)}
    # It prepares the plugin and then starts an engine, of which only the former is wanted.
    bed.start = lambda *_, **__: None
    bed.start_plugin(folder, collector=PlainCollector)
    report["plugin"] = _arm("plugin", folder)
    sys.stdout.write(json.dumps(report) + "\n")


def _arm(arm: str, folder: Path) -> dict[str, Any]:
    child = SameProcess()
    engine = VllmEngine(
        Checkpoint(folder=folder, tokenizer=None, facts={"id": "tiny", "dtype": "float32"}),
        Capacity(
            batch_size=4,
            max_model_len=128,
            gammas=(0, 2, 3),
            max_ratio=1.0,
            config=SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0, min_tokens=4),
        ),
        is_stock=arm != "plugin",
        drafting=DRAFTING[arm](folder) if arm in DRAFTING else None,
        launch=lambda is_stock: child,  # type: ignore[arg-type,return-value]
    )
    arms = {"stock": _stock, "plugin": _plugin}
    report = arms[arm](engine) if arm in arms else _drafting(engine, child.scheduler)
    report["info"] = asdict(engine.info)
    engine.close()
    return report


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


def _drafting(engine: VllmEngine, scheduler: Any) -> dict[str, Any]:
    """A pass, and what vLLM's scheduler itself says was drafted and accepted in it."""
    said: list[tuple[int, int]] = []
    original = scheduler.make_spec_decoding_stats

    def listening(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *rest: Any) -> Any:
        said.append((num_draft_tokens, num_accepted_tokens))
        return original(stats, num_draft_tokens, num_accepted_tokens, *rest)

    def by_name(stats: Any, **named: Any) -> Any:
        order = ("num_draft_tokens", "num_accepted_tokens", "num_invalid_spec_tokens", "request_id")
        return listening(stats, *(named[name] for name in order))

    greedy = replace(_block(), sampling=SamplingConfig(), max_new_tokens=40)
    engine.prepare(greedy)
    scheduler.make_spec_decoding_stats = by_name
    run = _run(engine, greedy, tokens=400)
    return {"run": run, "said": said}


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
