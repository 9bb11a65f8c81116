"""What the worker leans on inside vLLM; checked where a worker starts, which is where it is loaded.

`patches.HOOKS` holds what the plugin changes in processes that hold no GPU. Nothing here is
changed: these are classes that are subclassed and functions whose behaviour is relied on.
"""

from __future__ import annotations

from typing import Final

from vegas_runtime.vllm_plugin.patches import Hook

_GPU: Final = "vllm.v1.worker.gpu"
_RUNNER: Final = f"{_GPU}.model_runner:GPUModelRunner"
_SPECULATOR: Final = f"{_GPU}.spec_decode.speculator:DraftModelSpeculator"
_GRAPHS: Final = f"{_GPU}.cudagraph_utils"
_FLASH: Final = "vllm.v1.attention.backends.flash_attn"

WORKER_HOOKS: Final = (
    Hook(
        target="vllm.v1.worker.gpu_worker:Worker._make_model_runner",
        reason="puts the runner below in the worker",
        parameters=("self",),
    ),
    Hook(
        target="vllm.v1.worker.gpu_worker:Worker.determine_available_memory",
        reason="bounds of the cache's pages take their part of what it returns",
        parameters=("self",),
    ),
    Hook(
        target=f"{_RUNNER}.__init__",
        reason="makes the speculator that is replaced",
        parameters=("self", "vllm_config", "device"),
        uses=("speculator", "req_states"),
    ),
    Hook(
        target=f"{_RUNNER}.profile_run",
        reason="buffers made before it are counted as memory in use",
        parameters=("self", "randomize_inputs"),
    ),
    Hook(
        target=f"{_RUNNER}.initialize_kv_cache",
        reason="makes the graph manager that is replaced, and the metadata builder that is told",
        parameters=("self", "kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
        uses=("cudagraph_manager", "attn_groups", "set_attn", "init_cudagraph_manager"),
    ),
    Hook(
        target=f"{_RUNNER}.profile_cudagraph_memory",
        reason="captures draft graphs that must not outlive it",
        parameters=("self",),
    ),
    Hook(
        target=f"{_RUNNER}.capture_model",
        reason="runs every graph once before capturing it, which is where a kernel may not end",
        parameters=("self", "profile_only"),
    ),
    Hook(
        target=f"{_RUNNER}.execute_model",
        reason="a step's graph is dispatched here, after it is known whether drafts follow",
        uses=("dispatch_cg_and_sync_dp", "prepare_inputs", "num_spec_tokens_to_schedule"),
    ),
    Hook(
        target=f"{_RUNNER}.prepare_inputs",
        reason="rows to collect, and the rows a graph was captured for, are set behind it",
        parameters=(
            "self",
            "scheduler_output",
            "batch_req_state",
            "batch_desc",
            "num_active_loras",
        ),
    ),
    Hook(
        target=f"{_RUNNER}.sample_tokens",
        reason="KV is committed before drafts are proposed",
        parameters=("self", "grammar_output"),
        uses=("sample", "postprocess_sampled", "propose"),
    ),
    Hook(
        target=f"{_GPU}.model_runner:sort_batch_req_ids",
        reason="requests with few rows come first; prompt chunks are split off behind them",
        parameters=("num_tokens_per_req", "draft_tokens", "decode_query_len"),
    ),
    Hook(
        target=f"{_SPECULATOR}.__init__",
        reason="allocates q with the dtype asked for",
        parameters=("self", "vllm_config", "device"),
        uses=("draft_logits_spec", "draft_logits", "num_speculative_steps"),
    ),
    Hook(
        target=f"{_SPECULATOR}.load_draft_model",
        reason="returns the target",
        parameters=("self", "target_model", "target_attn_layer_names"),
    ),
    Hook(
        target=f"{_SPECULATOR}.set_attn",
        reason="hands over the target's block tables",
        parameters=(
            "self",
            "model_state",
            "kv_cache_config",
            "block_tables",
            "target_input_buffers",
            "target_attn_groups",
        ),
    ),
    Hook(
        target=f"{_SPECULATOR}.propose",
        reason="runs the draft loop",
        parameters=(
            "self",
            "input_batch",
            "attn_metadata",
            "slot_mappings",
            "last_hidden_states",
            "aux_hidden_states",
            "num_sampled",
            "num_rejected",
            "last_sampled",
            "next_prefill_tokens",
            "temperature",
            "seeds",
            "dp_sync_state",
            "dummy_run",
            "skip_attn_for_dummy_run",
            "mm_inputs",
            "is_profile",
            "num_speculative_tokens",
        ),
    ),
    Hook(
        target=f"{_GRAPHS}:CudaGraphManager.dispatch",
        reason="uneven batches are dispatched to FULL graphs too",
        parameters=(
            "self",
            "num_reqs",
            "num_tokens",
            "uniform_token_count",
            "num_active_loras",
            "max_query_len",
            "num_ubatches",
        ),
    ),
    Hook(
        target=f"{_GRAPHS}:CudaGraphManager.capture",
        reason="captures what the lists below name",
        parameters=("self", "create_forward_fn", "progress_bar_desc"),
        uses=("_capture_descs", "graphs"),
    ),
    Hook(
        target=f"{_GRAPHS}:ModelCudaGraphManager.run_fullgraph",
        reason="reads the output buffer that is allocated for the largest graph",
        uses=("hidden_states",),
    ),
    Hook(
        target=f"{_FLASH}:FlashAttentionMetadataBuilder.build",
        reason="how a verification splits is added to its metadata",
        parameters=("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    Hook(
        target=f"{_FLASH}:FlashAttentionImpl.forward",
        reason="runs every pass that is neither collected nor a draft",
        parameters=(
            "self",
            "layer",
            "query",
            "key",
            "value",
            "kv_cache",
            "attn_metadata",
            "output",
            "output_scale",
            "output_block_scale",
        ),
    ),
    Hook(
        target=f"{_FLASH}:FlashAttentionImpl.do_kv_cache_update",
        reason="every pass writes its keys here, before it attends; their bounds follow",
        parameters=("self", "layer", "key", "value", "kv_cache", "slot_mapping"),
    ),
    Hook(
        target=f"{_GPU}.spec_decode.rejection_sampler:RejectionSampler.__call__",
        reason="q is read by request state and draft step, before temperature",
        parameters=("self", "logits", "input_batch", "draft_logits", "invalid_drafts"),
    ),
)
