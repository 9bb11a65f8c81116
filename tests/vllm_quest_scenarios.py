"""Runs Quest beside Vegas in one engine on the CPU test bed; prints what it did, as JSON.

A process of its own, like `vllm_scenarios`, whose helpers it uses.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import vllm_bed as bed
from vllm.v1.worker import gpu_worker
from vllm_scenarios import (
    GAMMA,
    GREEDY,
    MIXED,
    NEW,
    OWN_COLLECTOR,
    SAMPLED,
    configurer,
    counted,
    rfc,
    worker_of,
)

from vegas_runtime.vllm_plugin import control
from vegas_runtime.vllm_plugin.worker import VegasWorker

SPARSE: dict[str, Any] = {
    "num_speculative_tokens": GAMMA,
    "sparsity_ratio": 0.4,
    "min_tokens": 24,
}
FEW = MIXED[:3]


def main() -> None:
    """Print the scenarios' results."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    bed.save_tiny_llama(folder)
    stock = bed.generate(bed.start(folder), MIXED, max_tokens=NEW, **GREEDY)
    report = {"stock": stock, "prompts": FEW, "sparse_setting": SPARSE, **run(folder)}
    sys.stdout.write(json.dumps(report))


def run(folder: Path) -> dict[str, Any]:
    """Few KV blocks: requests are preempted, their blocks reused, prefixes found again."""
    engine = bed.start_plugin(
        folder,
        collector=OWN_COLLECTOR,
        speculative_config=rfc(1.0) | {"sparse_attn_algorithm_set": ["quest"]},
        num_gpu_blocks_override=12,
        max_model_len=128,
    )
    (status,) = control.call(engine.llm_engine.engine_core, "vegas_status")["workers"]
    configure = configurer(engine)
    found: dict[str, Any] = {
        "slowed_by": status["slowed_by"],
        "collector_bytes": status["collector_bytes"],
        "bounds_bytes": worker_of(engine).model_runner.collector.pages._bounds.nbytes,
        "memory": memory_of_17_mib(engine),
    }
    configure(algorithm="quest")
    with counted(engine) as found["everything"]:
        bed.generate(engine, MIXED[:4], max_tokens=NEW, **SAMPLED)
    held = configure(**SPARSE)
    with counted(engine) as found["few"]:
        bed.generate(engine, FEW, max_tokens=NEW, **GREEDY)
    with counted(engine) as found["sparse"]:
        found["tokens"] = bed.generate(engine, MIXED, max_tokens=NEW, **GREEDY)
    found["held"] = held["algorithm"]
    found["bounds"] = judge_bounds(engine)
    configure(algorithm="vegas")
    found["vegas_tokens"] = bed.generate(engine, FEW, max_tokens=NEW, **GREEDY)
    found["stale"] = judge_bounds(engine)
    configure(algorithm="quest")
    found["rebuilt"] = judge_bounds(engine)
    return found


def judge_bounds(engine: Any) -> dict[str, int]:
    """Quest's bounds of every block that is known to be full, against the cache's own keys."""
    runner = worker_of(engine).model_runner
    pool = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    full = [block.block_id for block in pool.blocks if block.block_hash is not None]
    wrong = 0
    for layer, keys in enumerate(runner._keys):
        bounds = runner.collector.pages.bounds(layer)
        for block in full:
            own = torch.stack([keys[block].amin(0), keys[block].amax(0)], dim=1)
            wrong += not torch.equal(bounds[block], own)
    return {"checked": len(full), "wrong": wrong}


def memory_of_17_mib(engine: Any) -> int:
    """What the worker offers vLLM for the KV cache where vLLM itself found 17 MiB."""
    measured = gpu_worker.Worker.determine_available_memory
    gpu_worker.Worker.determine_available_memory = lambda _: 17 << 20
    try:
        return VegasWorker.determine_available_memory(worker_of(engine))
    finally:
        gpu_worker.Worker.determine_available_memory = measured


if __name__ == "__main__":
    main()
