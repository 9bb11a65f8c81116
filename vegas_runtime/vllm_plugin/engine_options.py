"""What vLLM is told in its own words: options of its start, and values it changes while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.protocol import Capacity, StockMethod
from vegas_runtime.vllm_plugin.config import ALGORITHMS_KEY, ROWS_KEY
from vegas_runtime.vllm_plugin.geometry import with_bounds
from vegas_runtime.vllm_plugin.graph_sizes import capture_sizes

# Tokens of one step that vLLM takes by default when it serves; larger graphs could not be used.
_MOST_STEP_TOKENS: Final = 8192

# What selecting costs is measured against it.
WINDOW: Final = "streaming_llm"
_QUEST: Final = "quest"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model on this machine's disk.

    Attributes:
        folder: what vLLM is given to load.
        tokenizer: the model's own (transformers'); None where only its speed is asked for.
        facts: as `EngineInfo.model`; `dtype` is what it is served in.
    """

    folder: Path
    tokenizer: Any
    facts: Mapping[str, Any]


def engine_options(
    checkpoint: Checkpoint,
    capacity: Capacity,
    *,
    is_stock: bool,
    drafting: StockMethod | None = None,
) -> dict[str, Any]:
    """Fields of vLLM's `EngineArgs`; what is not named here is left at vLLM's default.

    Both arms get what the workload needs and nothing else, so that their difference is the plugin.
    Where stock vLLM drafts, it also gets the CUDA graphs that verifying its batch takes, as the
    plugin does: vLLM's default ends at 512 tokens, 73 requests at gamma 6.
    """
    options: dict[str, Any] = {
        "model": str(checkpoint.folder),
        "served_model_name": str(checkpoint.facts.get("id", checkpoint.folder.name)),
        "dtype": str(checkpoint.facts["dtype"]),
        "max_model_len": capacity.max_model_len,
        "max_num_seqs": capacity.batch_size,
        "gpu_memory_utilization": capacity.gpu_memory_utilization,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "load_format": capacity.load_format,
        "tensor_parallel_size": capacity.tensor_parallel_size,
        # Token ids go in and come out; a folder without a tokenizer is as good.
        "skip_tokenizer_init": checkpoint.tokenizer is None,
    }
    if capacity.kv_cache_bytes is not None:
        options["kv_cache_memory_bytes"] = capacity.kv_cache_bytes
    if drafting is not None:
        gamma = drafting.num_speculative_tokens
        options["speculative_config"] = drafting.to_vllm()
        options["cudagraph_capture_sizes"] = capture_sizes(
            (gamma,), capacity.batch_size, _MOST_STEP_TOKENS
        )
    if is_stock:
        return options
    start = capacity.config.replace(
        num_speculative_tokens=max(capacity.gammas),
        sparsity_ratio=min(capacity.config.sparsity_ratio, capacity.max_ratio),
    )
    if capacity.kv_cache_bytes is not None and _QUEST in algorithms_of(capacity):
        # The cache is as large as stock's; the bounds of its pages come on top.
        options["kv_cache_memory_bytes"] = with_bounds(capacity.kv_cache_bytes)
    speculative = start.to_rfc() | {
        "sparse_attn_num_speculative_tokens_set": list(capacity.gammas),
        "sparse_attn_max_ratio": capacity.max_ratio,
        **declared_besides(capacity),
        **capacity.speculative_options,
    }
    return options | {"speculative_config": speculative}


def algorithms_of(capacity: Capacity) -> set[str]:
    """Every algorithm that will be configured."""
    return {config.algorithm for config in (capacity.config, *capacity.also)}


def declared_besides(capacity: Capacity) -> dict[str, list[str]]:
    """Methods and row sets to be configured besides those the engine starts with.

    A window is among them wherever something else is: what selecting costs is measured against it.
    """
    first = capacity.config
    algorithms = [config.algorithm for config in capacity.also]
    if algorithms:
        algorithms.append(WINDOW)
    wanted: dict[str, tuple[str, Sequence[str]]] = {
        ALGORITHMS_KEY: (first.algorithm, algorithms),
        ROWS_KEY: (first.rows, [config.rows for config in capacity.also]),
    }
    besides = {
        key: [name for name in dict.fromkeys(names) if name != own]
        for key, (own, names) in wanted.items()
    }
    return {key: names for key, names in besides.items() if names}


def control_values(config: SpeculationConfig, limit: int | None) -> dict[str, Any]:
    """What the plugin is told to change at run time.

    Args:
        config: the setting; at gamma 0 nothing of it but gamma means anything.
        limit: most requests to keep running; None for the engine's own limit.
    """
    if config.num_speculative_tokens == 0:
        return {"num_speculative_tokens": 0, "max_num_running": limit}
    return {**config.to_dict(), "max_num_running": limit}
