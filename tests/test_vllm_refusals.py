"""Everything the plugin does not serve is refused before a model is loaded, by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_process import Refused, VllmProcess, write_model

from vegas_runtime.errors import ConfigError
from vegas_runtime.vllm_plugin import refusals

RFC = {"method": "sparse_attn", "sparse_attn_ratio": 0.07, "num_speculative_tokens": 4}


def refusal(vllm: VllmProcess, **arguments: Any) -> str:
    with pytest.raises(Refused) as refused:
        vllm.ask("build", arguments={"speculative_config": RFC, **arguments})
    assert refused.value.kind == "ConfigError", refused.value
    return str(refused.value)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"data_parallel_size": 2}, "data parallelism"),
        (
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
            "decode context parallelism",
        ),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"enable_dbo": True}, "dual batch overlap"),
        ({"worker_cls": "my.module.Worker"}, "a worker class of your own"),
        ({"scheduler_cls": "my.module.Scheduler"}, "a scheduler class of your own"),
        ({"enable_lora": True}, "LoRA"),
        ({"enable_prompt_embeds": True}, "prompt embeddings"),
        ({"enable_sleep_mode": True}, "sleep mode"),
        ({"kv_cache_dtype": "fp8"}, "a quantized KV cache"),
        ({"kv_sharing_fast_prefill": True}, "KV sharing fast prefill"),
        ({"kv_offloading_size": 1.0}, "a KV connector"),
        (
            {"attention_backend": "TRITON_ATTN"},
            "another attention backend (attention_backend) (TRITON_ATTN)",
        ),
        ({"attention_config": {"backend": "FLASHINFER"}}, "another attention backend"),
        (
            {"attention_config": {"backend_per_kind": {"full_attention": "TRITON_ATTN"}}},
            "full_attention: TRITON_ATTN",
        ),
        ({"watermark_config": {"key": 1}}, "watermarking"),
    ],
)
def test_an_option_that_is_not_served(
    vllm: VllmProcess, llama: str, arguments: dict[str, Any], said: str
) -> None:
    assert said in refusal(vllm, model=llama, **arguments)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {
                "architectures": ["MistralForCausalLM"],
                "model_type": "mistral",
                "sliding_window": 1024,
            },
            "less than the whole context (sliding_window 1024)",
        ),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "model_type": "gemma3_text",
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 512,
                "head_dim": 16,
            },
            "less than the whole context (sliding_attention)",
        ),
        (
            {
                "architectures": ["DeepseekV2ForCausalLM"],
                "model_type": "deepseek_v2",
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 16,
                "v_head_dim": 16,
            },
            "multi-head latent attention",
        ),
        (
            {
                "architectures": ["MambaForCausalLM"],
                "model_type": "mamba",
                "state_size": 16,
            },
            "linear or Mamba layers",
        ),
    ],
)
def test_a_model_that_is_not_served(
    vllm: VllmProcess, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    assert said in refusal(vllm, model=write_model(tmp_path / "model", **changes))


@pytest.mark.vllm
def test_adaptive_verification_and_other_sampling_are_refused(
    vllm: VllmProcess, llama: str
) -> None:
    for key, value, said in (
        ("enable_adaptive_verification", True, "means nothing to method"),
        ("draft_sample_method", "greedy", "needs 'probabilistic'"),
        ("rejection_sample_method", "block", "needs 'standard'"),
        ("parallel_drafting", True, "means nothing to method"),
    ):
        assert said in refusal(vllm, model=llama, speculative_config={**RFC, key: value})


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ({"environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}, "V1 model runner"),
        ({"capability": [7, 5]}, "compute capability 7.5"),
        ({"is_nvidia": False}, "needs an NVIDIA GPU"),
    ],
)
def test_a_machine_that_cannot_run_it(
    vllm: VllmProcess, llama: str, machine: dict[str, Any], said: str
) -> None:
    # float16: what the oldest of these GPUs still takes.
    arguments = {"model": llama, "speculative_config": RFC, "dtype": "float16"}
    with pytest.raises(Refused, match=said) as refused:
        vllm.ask("build", arguments=arguments, **machine)
    assert refused.value.kind == "ConfigError", refused.value
    assert vllm.ask("build", arguments=arguments)["settings"]["gammas"] == [0, 4]


@pytest.mark.vllm
def test_what_is_served_is_not_refused(vllm: VllmProcess, tmp_path: Path) -> None:
    """The tables must not catch the models the plugin is made for."""
    qwen = write_model(
        tmp_path / "qwen",
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        head_dim=16,
        use_sliding_window=False,
        sliding_window=None,
        max_window_layers=2,
        layer_types=["full_attention", "full_attention"],
    )
    window_off = write_model(
        tmp_path / "mistral",
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        sliding_window=1024,
    )
    for arguments in (
        {"model": qwen, "tensor_parallel_size": 2},
        {"model": qwen, "kv_cache_dtype": "bfloat16", "attention_backend": "FLASH_ATTN"},
        {"model": window_off, "disable_sliding_window": True},
    ):
        found = vllm.ask("build", arguments={"speculative_config": RFC, **arguments})
        assert found["settings"]["gammas"] == [0, 4]


# ---------------------------------------------------------------------------- without vLLM


def model(**changes: Any) -> SimpleNamespace:
    """Stands in for vLLM's `ModelConfig` where no small checkpoint has the feature."""
    text = {"layer_types": None, **changes.pop("text", {})}
    plain = {
        "runner_type": "generate",
        "is_diffusion": False,
        "is_encoder_decoder": False,
        "use_mla": False,
        "is_hybrid": False,
        "is_attention_free": False,
        "has_inner_state": False,
        "disable_sliding_window": False,
        "get_sliding_window": lambda: None,
        "uses_alibi": False,
        "is_multimodal_model": False,
        "multimodal_config": None,
        "enable_prompt_embeds": False,
        "enable_sleep_mode": False,
        "hf_text_config": SimpleNamespace(**text),
    }
    return SimpleNamespace(**{**plain, **changes})


def check_model(config: SimpleNamespace) -> None:
    for refusal in refusals.MODEL:
        refusal.check(config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"runner_type": "pooling"}, "a pooling model"),
        ({"is_diffusion": True}, "a diffusion model"),
        ({"is_encoder_decoder": True}, "an encoder-decoder model"),
        ({"is_hybrid": True}, "linear or Mamba layers"),
        ({"text": {"layer_types": ["linear_attention"]}}, "linear or Mamba layers"),
        ({"text": {"attention_chunk_size": 8192}}, "attention_chunk_size 8192"),
        ({"text": {"num_kv_shared_layers": 4}}, "share another layer's KV cache (4)"),
        ({"text": {"attn_logit_softcapping": 50.0}}, "soft-capped attention logits (50.0)"),
        ({"uses_alibi": True}, "ALiBi"),
        (
            {
                "is_multimodal_model": True,
                "multimodal_config": SimpleNamespace(language_model_only=False),
            },
            "a multimodal model",
        ),
    ],
)
def test_a_model_feature_that_is_not_served(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot be combined with method 'sparse_attn'"
    ) as raised:
        check_model(model(**changes))
    assert said in raised.value.message
    assert raised.value.hint


def test_the_language_part_of_a_multimodal_model_is_served() -> None:
    text_only = model(
        is_multimodal_model=True, multimodal_config=SimpleNamespace(language_model_only=True)
    )
    check_model(text_only)
