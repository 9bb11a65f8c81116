"""Runs every method of the plugin in one engine on the CPU test bed; prints what it did, as JSON.

A process of its own, like `vllm_scenarios`, whose helpers it uses.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import vllm_bed as bed
from vllm_scenarios import (
    GAMMA,
    GREEDY,
    MIXED,
    NEW,
    OWN_COLLECTOR,
    SAMPLED,
    configurer,
    counted,
    prompt,
    rfc,
    worker_of,
)

from vegas_runtime.vllm_plugin import control

METHODS: dict[str, dict[str, str]] = {
    "last_accepted": {"algorithm": "vegas", "rows": "last_accepted"},
    "accepted_only": {"algorithm": "vegas", "rows": "accepted_only"},
    "spec_extend": {"algorithm": "spec_extend", "rows": "two"},
    "sparse_spec": {"algorithm": "sparse_spec", "rows": "two"},
    "snapkv": {"algorithm": "snapkv", "rows": "two"},
    "page": {"algorithm": "vegas", "rows": "all", "granularity": "page"},
    "vegas": {"algorithm": "vegas", "rows": "two"},
}
HELD = ("algorithm", "rows", "granularity")
SPARSE: dict[str, Any] = {
    "num_speculative_tokens": GAMMA,
    "sparsity_ratio": 0.2,
    "min_tokens": 6,
}
# Four that need 16 KV blocks where there are 12.
CROWD = MIXED[2:]
DECLARED = {
    "sparse_attn_algorithm_set": sorted({one["algorithm"] for one in METHODS.values()}),
    "sparse_attn_rows_set": ["last_accepted", "accepted_only"],
}


def main() -> None:
    """Print the scenarios' results."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    bed.save_tiny_llama(folder)
    stock = bed.generate(bed.start(folder), MIXED, max_tokens=NEW, **GREEDY)
    report: dict[str, Any] = {"stock": stock, "prompts": MIXED, "sparse_setting": SPARSE}
    report["stock_crowd"] = stock[len(MIXED) - len(CROWD) :]
    report |= {**run_methods(folder), **run_crowded(folder)}
    sys.stdout.write(json.dumps(report))


def run_methods(folder: Path) -> dict[str, Any]:
    """One engine that changes from method to method."""
    engine = bed.start_plugin(
        folder, collector=OWN_COLLECTOR, speculative_config=rfc(1.0) | DECLARED
    )
    configure = configurer(engine)
    (worker,) = control.call(engine.llm_engine.engine_core, "vegas_status")["workers"]
    found: dict[str, Any] = {"slowed_by": worker["slowed_by"], "methods": {}}
    for name, knobs in METHODS.items():
        configure(**{"granularity": "token"} | knobs | SPARSE | {"sparsity_ratio": 1.0})
        with counted(engine) as everything:
            bed.generate(engine, MIXED, max_tokens=NEW, **SAMPLED)
        held = configure(**SPARSE)
        with counted(engine) as sparse:
            tokens = bed.generate(engine, MIXED, max_tokens=NEW, **GREEDY)
        found["methods"][name] = {
            "held": {key: held[key] for key in HELD},
            "everything": everything,
            "sparse": sparse,
            "tokens": tokens,
        }
    found["prompt_rows"] = compare_prompt_rows(engine)
    found["counts_left"] = int(
        worker_of(engine).model_runner.sampler.penalties_state.output_bin_counts.min()
    )
    return found


def compare_prompt_rows(engine: Any) -> dict[str, float]:
    """Queries of a prompt's last rows: as it was prefilled, read again, and read from a cache hit.

    Returns:
        Largest difference from the prefilled ones, and by how much their rows differ anyway.
    """
    from vegas_runtime.vllm_plugin.attention import PromptMetadata, VegasAttentionImpl

    configurer(engine)(**METHODS["snapkv"])
    seen: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    forward = VegasAttentionImpl.forward

    def spy(self: Any, layer: Any, query: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if self.layer_index == 1:
            seen[isinstance(rest[3], PromptMetadata)].append(query.clone())
        return forward(self, layer, query, *rest, **options)

    VegasAttentionImpl.forward = spy  # type: ignore[assignment,method-assign]
    fresh = prompt(60, 99)
    for _ in range(2):
        bed.generate(engine, [fresh], max_tokens=4, **GREEDY)
    VegasAttentionImpl.forward = forward  # type: ignore[method-assign]
    prefilled = seen[False][0][60 - 32 : 60]
    again, cached = seen[True]
    return {
        "again": float((again - prefilled).abs().max()),
        "cached": float((cached - prefilled).abs().max()),
        "rows": float((prefilled[1:] - prefilled[:-1]).abs().max()),
        "hits": bed.metrics(engine)["prefix_cache_hits"],
    }


def run_crowded(folder: Path) -> dict[str, Any]:
    """Too few KV blocks for all that run: requests are preempted and resumed."""
    engine = bed.start_plugin(
        folder,
        collector=OWN_COLLECTOR,
        speculative_config=rfc(0.5) | DECLARED,
        num_gpu_blocks_override=12,
        max_model_len=128,
    )
    configure = configurer(engine)
    found: dict[str, Any] = {}
    for name, knobs in METHODS.items():
        configure(**{"granularity": "token"} | knobs)
        with counted(engine) as counts:
            tokens = bed.generate(engine, CROWD, max_tokens=NEW, **GREEDY)
        found[name] = {"counts": counts, "tokens": tokens}
    return {"crowded": found}


if __name__ == "__main__":
    main()
