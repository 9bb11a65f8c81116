"""What the plugin does not serve, each with the reason, before a model is loaded for it.

The tables read attributes of vLLM's configuration objects; no import of vLLM is needed. What only
shows once the layers exist (one attention backend, one KV cache group) is checked by the worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from vegas_runtime.config import RFC_METHOD
from vegas_runtime.errors import ConfigError

_FLOAT_KV_CACHES: Final = ("auto", "bfloat16", "float16")
_MIN_CAPABILITY: Final = (8, 0)


@dataclass(frozen=True)
class Refusal:
    """One thing that is not served.

    Attributes:
        feature: its name, as in "<feature> is on".
        found: what of it the configuration holds; falsy when nothing.
        reason: why it is not served.
        hint: what to do instead.
    """

    feature: str
    found: Callable[[Any], object]
    reason: str
    hint: str = "Switch it off, or serve without --speculative-config."

    def check(self, config: Any) -> None:
        """Refuse a configuration that has it.

        Raises:
            ConfigError: it does.
        """
        found = self.found(config)
        if found:
            shown = "" if found is True else f" ({found})"
            raise ConfigError(
                f"{self.feature}{shown} cannot be combined with method {RFC_METHOD!r}: "
                f"{self.reason}.",
                hint=self.hint,
            )


_OTHER_MODEL: Final = "Serve this model without --speculative-config."


def _short_layers(model: Any) -> str:
    """Layers that do not keep the whole context, by what the model's own configuration says."""
    text = model.hf_text_config
    kinds = {*(getattr(text, "layer_types", None) or ())} - {"full_attention", "attention"}
    if "linear_attention" in kinds:
        return ""
    if kinds:
        return ", ".join(sorted(map(str, kinds)))
    if not model.disable_sliding_window and model.get_sliding_window():
        return f"sliding_window {model.get_sliding_window()}"
    chunk = getattr(text, "attention_chunk_size", None)
    return f"attention_chunk_size {chunk}" if chunk else ""


def _linear_layers(model: Any) -> bool:
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    return bool(
        model.is_hybrid
        or model.is_attention_free
        or model.has_inner_state
        or "linear_attention" in kinds
    )


def _reads_images(model: Any) -> bool:
    multimodal = model.multimodal_config
    text_only = multimodal is not None and multimodal.language_model_only
    return bool(model.is_multimodal_model) and not text_only


MODEL: Final = (
    Refusal(
        "a pooling model",
        lambda model: model.runner_type != "generate" and model.runner_type,
        "it decodes nothing",
        _OTHER_MODEL,
    ),
    Refusal(
        "a diffusion model",
        lambda model: model.is_diffusion,
        "it does not decode token by token",
        _OTHER_MODEL,
    ),
    Refusal(
        "an encoder-decoder model",
        lambda model: model.is_encoder_decoder,
        "drafts attend to a selection of one decoder cache only",
        _OTHER_MODEL,
    ),
    Refusal(
        "multi-head latent attention (MLA)",
        lambda model: model.use_mla,
        "its cache holds latents, which the selection does not read",
        _OTHER_MODEL,
    ),
    Refusal(
        "linear or Mamba layers",
        _linear_layers,
        "drafting would move their recurrent state, which cannot be rolled back",
        _OTHER_MODEL,
    ),
    Refusal(
        "attention over less than the whole context",
        _short_layers,
        "such layers form a second KV cache group, which drafting does not handle yet",
        "Serve this model without --speculative-config; where the model allows it, "
        "--disable-sliding-window makes every layer full attention.",
    ),
    Refusal(
        "layers that share another layer's KV cache",
        lambda model: getattr(model.hf_text_config, "num_kv_shared_layers", 0),
        "a shared cache would be selected from twice",
        _OTHER_MODEL,
    ),
    Refusal(
        "soft-capped attention logits",
        lambda model: getattr(model.hf_text_config, "attn_logit_softcapping", None),
        "the kernels that read scores off verification do not cap them",
        _OTHER_MODEL,
    ),
    Refusal(
        "ALiBi position biases",
        lambda model: model.uses_alibi,
        "a selected entry would lose its distance",
        _OTHER_MODEL,
    ),
    Refusal(
        "a multimodal model",
        _reads_images,
        "drafts are made from token ids, not embeddings",
        "Serve its text alone with --language-model-only.",
    ),
    Refusal(
        "prompt embeddings (enable_prompt_embeds)",
        lambda model: model.enable_prompt_embeds,
        "drafts are made from token ids, not embeddings",
    ),
    Refusal(
        "sleep mode (enable_sleep_mode)",
        lambda model: model.enable_sleep_mode,
        "waking up with the drafter's captured graphs and buffers is not tested",
    ),
)

PARALLEL: Final = (
    Refusal(
        "pipeline parallelism (pipeline_parallel_size)",
        lambda parallel: parallel.pipeline_parallel_size > 1 and parallel.pipeline_parallel_size,
        "the drafter needs every layer on one rank",
        "Use tensor parallelism instead.",
    ),
    Refusal(
        "data parallelism (data_parallel_size)",
        lambda parallel: parallel.data_parallel_size > 1 and parallel.data_parallel_size,
        "a rank without requests drafts nothing, and the others' collectives would wait for it",
        "Start one engine per GPU behind a router.",
    ),
    Refusal(
        "decode context parallelism (decode_context_parallel_size)",
        lambda parallel: (
            (parallel.decode_context_parallel_size or 1) > 1
            and parallel.decode_context_parallel_size
        ),
        "scores would be spread over ranks",
    ),
    Refusal(
        "prefill context parallelism (prefill_context_parallel_size)",
        lambda parallel: (
            parallel.prefill_context_parallel_size > 1 and parallel.prefill_context_parallel_size
        ),
        "the last prompt row, which the first selection is made from, would be on one rank",
    ),
    Refusal(
        "dual batch overlap (enable_dbo)",
        lambda parallel: parallel.enable_dbo or parallel.use_ubatching,
        "collection works on whole verify batches, not on microbatches",
    ),
    Refusal(
        "elastic expert parallelism (enable_elastic_ep)",
        lambda parallel: parallel.enable_elastic_ep,
        "captured draft graphs do not survive a change of ranks",
    ),
    Refusal(
        "a worker class of your own (worker_cls)",
        lambda parallel: parallel.worker_cls != "auto" and parallel.worker_cls,
        "the plugin's worker takes that place",
        "Leave worker_cls out; worker_extension_cls may add methods.",
    ),
)

ARGUMENTS: Final = (
    Refusal(
        "LoRA (enable_lora)",
        lambda args: args.enable_lora,
        "adapters are mapped to the rows of the verify batch, not to draft steps",
    ),
    Refusal(
        "watermarking (watermark_config)",
        lambda args: args.watermark_config,
        "drafts would have to be watermarked alike",
    ),
    Refusal(
        "another attention backend (attention_backend)",
        lambda args: (
            _other_backend(args.attention_backend)
            or _other_backend(args.attention_config.backend)
            or ", ".join(
                f"{kind}: {_name(b)}" for kind, b in args.attention_config.backend_per_kind.items()
            )
        ),
        "scores are collected in the plugin's own, which replaces FLASH_ATTN",
        "Leave it out; the plugin chooses.",
    ),
    Refusal(
        "a scheduler class of your own (scheduler_cls)",
        lambda args: args.scheduler_cls,
        "the number of drafted tokens is changed in vLLM's own scheduler",
    ),
    Refusal(
        "a KV connector (kv_transfer_config, kv_offloading_size)",
        lambda args: args.kv_transfer_config is not None or args.kv_offloading_size is not None,
        "loading and saving KV around draft steps is not tested",
    ),
    Refusal(
        "KV sharing fast prefill (kv_sharing_fast_prefill)",
        lambda args: args.kv_sharing_fast_prefill,
        "layers that share a cache are not served",
    ),
)

ENGINE: Final = (
    Refusal(
        "the V1 model runner",
        lambda config: not config.use_v2_model_runner,
        "the drafter is written for Model Runner V2",
        "Unset VLLM_USE_V2_MODEL_RUNNER and have Triton installed.",
    ),
    Refusal(
        "a quantized KV cache (kv_cache_dtype)",
        lambda config: (
            str(config.cache_config.cache_dtype) not in _FLOAT_KV_CACHES
            and config.cache_config.cache_dtype
        ),
        "scores read off it are not tested",
        "Set --kv-cache-dtype auto.",
    ),
    Refusal(
        "a decoder's KV layers in several data types (kv_cache_dtype_skip_layers)",
        lambda config: config.cache_config.kv_cache_dtype_skip_layers,
        "such layers form a second KV cache group, which drafting does not handle yet",
        "Leave it out.",
    ),
    Refusal(
        "encoder disaggregation (ec_transfer_config)",
        lambda config: config.ec_transfer_config is not None,
        "multimodal requests are not served",
    ),
)


def _name(backend: Any) -> str:
    return str(getattr(backend, "name", backend))


def _other_backend(backend: Any) -> str:
    """A backend's name when it is another one than the plugin's; else nothing."""
    name = "" if backend is None else _name(backend)
    return "" if name.upper() in ("", "AUTO", "FLASH_ATTN") else name


def refuse_model(model: Any, parallel: Any, args: Any) -> None:
    """Refuse what is known before vLLM's own configuration is complete.

    Args:
        model: vLLM's `ModelConfig`.
        parallel: its `ParallelConfig`.
        args: its `EngineArgs`.

    Raises:
        ConfigError: something that is not served.
    """
    for table, config in ((MODEL, model), (PARALLEL, parallel), (ARGUMENTS, args)):
        for refusal in table:
            refusal.check(config)


def refuse(config: Any) -> None:
    """Refuse what only the complete `VllmConfig` shows, and machines that cannot run it.

    Raises:
        ConfigError: something that is not served.
    """
    for refusal in ENGINE:
        refusal.check(config)
    _check_platform()


def _check_platform() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        raise ConfigError(
            f"vLLM runs on {current_platform.device_type or 'no device'} here; method "
            f"{RFC_METHOD!r} needs an NVIDIA GPU.",
            hint="Elsewhere the reference engine runs: --backend reference.",
        )
    capability = current_platform.get_device_capability()
    if capability is not None and (capability.major, capability.minor) < _MIN_CAPABILITY:
        raise ConfigError(
            f"the GPU has compute capability {capability.major}.{capability.minor}; method "
            f"{RFC_METHOD!r} needs 8.0 or later (Ampere)."
        )
