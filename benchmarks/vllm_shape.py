"""Time per step and memory of vLLM, stock and with the plugin, at a large model's shape."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.results_file import Row
from benchmarks.vllm_arms import (
    BASE,
    REPORTED,
    SAMPLED,
    Evidence,
    block_of,
    engine_of,
    mean_of,
    row,
    say,
)
from vegas_runtime.config import SamplingConfig
from vegas_runtime.gpu_memory import first_device, used_bytes
from vegas_runtime.machine import nvidia_smi
from vegas_runtime.protocol import Capacity, PromptBlock
from vegas_runtime.vllm_plugin.engine import VllmEngine
from vegas_runtime.vllm_plugin.engine_options import Checkpoint

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "vocab_size": 151936, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
SHAPE_CONTEXT = 122_001
SHAPE_BATCH = 4
SHAPE_TOKENS = 4 * 64


def shape(data: Path, rows: list[Row], *, tensor_parallel_size: int = 1) -> None:
    """Time of a step at Qwen3-8B's shape, both arms.

    Weights are random: what of a sparse draft is accepted means nothing. On several GPUs, where no
    other benchmark runs, what is accepted at ratio 1 is told: every draft, or the plugin is wrong.

    Args:
        data: folder of the raw records.
        rows: gains the figures.
        tensor_parallel_size: GPUs that the model is split over.
    """
    folder = data / "qwen3_8b_shape"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    facts = {"id": "Qwen3-8B's shape", "dtype": "bfloat16"}
    checkpoint = Checkpoint(folder=folder, tokenizer=None, facts=facts)
    capacity = Capacity(
        batch_size=SHAPE_BATCH,
        max_model_len=SHAPE_CONTEXT + 1024,
        gammas=(0, 6),
        max_ratio=REPORTED.sparsity_ratio if tensor_parallel_size == 1 else 1.0,
        config=BASE,
        load_format="dummy",
        tensor_parallel_size=tensor_parallel_size,
    )
    prompts = [
        tuple((31 * place + 7 * index) % 150_000 for index in range(SHAPE_CONTEXT))
        for place in range(SHAPE_BATCH)
    ]
    # Long enough that nobody ends and is prefilled again while the steps are timed.
    block = block_of(prompts, SHAPE_BATCH, max_new_tokens=1000)
    case, name = f"Qwen3-8B's shape, {SHAPE_BATCH} x {SHAPE_CONTEXT}", "vllm_h200_shape"
    if tensor_parallel_size > 1:
        case += f", {tensor_parallel_size} GPUs"
        name += f"_tp{tensor_parallel_size}"
    evidence = Evidence(data / f"{name}.jsonl.z")
    for arm in ("stock", "plugin"):
        with engine_of(checkpoint, capacity, is_stock=arm == "stock") as engine:
            started_s = time.monotonic()
            engine.prepare(block)
            say(f"prefilled in {time.monotonic() - started_s:.0f} s")
            if arm == "plugin":
                engine.configure(REPORTED)
            run = engine.run(
                block, replicate=0, max_tokens=SHAPE_TOKENS, deadline_s=engine.now_s() + 60
            )
            evidence.keep(arm, run)
            steps = [one for one in run.steps if one.kind == "decode"][2:]
            for phase in ("verify_s", "draft_s", "select_s", "other_s"):
                values = [getattr(step, phase) for step in steps]
                if any(values):
                    named = f"{case}, {arm} {phase.removesuffix('_s')}"
                    rows.append(row("step_ms", named, 1000 * mean_of(values), "ms"))
            rows.append(
                row("step_ms", f"{case}, {arm}", 1000 * mean_of(s.duration_s for s in steps), "ms")
            )
            rows += _memory_rows(f"{case}, {arm}", capacity)
            if arm == "plugin":
                buffers = _buffers(engine.status)
                rows.append(row("plugin_buffers_gib", case, buffers / 2**30, "GiB"))
                if tensor_parallel_size > 1:
                    rows.append(_full_acceptance(engine, block, evidence, case))
    evidence.write()


def _full_acceptance(engine: VllmEngine, block: PromptBlock, evidence: Evidence, case: str) -> Row:
    """Share of drafts accepted where they read everything, behind no cut of the distribution."""
    warm = replace(block, sampling=SamplingConfig(temperature=SAMPLED.temperature, seed=17))
    engine.prepare(warm)
    engine.configure(REPORTED.replace(sparsity_ratio=1.0))
    figures = evidence.take(engine, warm, "ratio 1", replicate=1, tokens=SHAPE_TOKENS)
    assert figures.accepted is not None, "the plugin drafts here"
    share = figures.accepted.est / REPORTED.num_speculative_tokens
    named = f"{case}, T {SAMPLED.temperature}, gamma {REPORTED.num_speculative_tokens}"
    return row("acceptance_at_ratio_1", named, share, "share", digits=6)


def _memory_rows(case: str, capacity: Capacity) -> list[Row]:
    """GPU memory in use now, everything of the process counted, and what it may be."""
    device = first_device()
    used, total = used_bytes(device), nvidia_smi("memory.total", device=str(device))
    rows = []
    if used is not None:
        rows.append(row("gpu_memory_used_gib", case, used / 2**30, "GiB"))
    if total is not None and total.isdecimal():
        allowed = int(total) / 2**10 * capacity.gpu_memory_utilization
        rows.append(row("gpu_memory_allowed_gib", case, allowed, "GiB"))
    return rows


def _buffers(status: Mapping[str, Any]) -> int:
    """Bytes of score, index and draft buffers on one GPU."""
    worker = status["workers"][0]
    return int(worker["collector_bytes"] + worker["draft_bytes"])
