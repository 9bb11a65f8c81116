"""Tiny random decoders of every architecture the reference engine must run, made on the spot.

They are small enough to run in milliseconds, and initialised widely enough that what a layer
attends to changes the next token: on a model whose attention is nearly uniform, a wrong mask or
a wrong KV selection would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

ARCHITECTURES: Final = ("llama", "qwen3", "qwen3_moe", "gpt_oss", "gemma3")
SLIDING_WINDOW: Final = 16

_CONFIGS: Final[dict[str, Callable[..., PreTrainedConfig]]] = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "gpt_oss": GptOssConfig,
    "gemma3": Gemma3TextConfig,
}

_SHARED: Final[dict[str, Any]] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    # At 0.3, drafting with the top 5 % of each full layer's KV entries agrees with the whole model
    # on 10-80 % of the tokens, with the top 50 % on 80-100 %: tests meet both accepts and rejects.
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    # No token ends a text, so that every test gets the length it asks for; override to test EOS.
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

_EXPERTS: Final[dict[str, Any]] = {"num_experts_per_tok": 2}

_OWN: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 48},
    # Layers alternate sliding, full by GptOssConfig's own default. Its YaRN RoPE is kept, stretched
    # from a context that fits max_position_embeddings (transformers warns when they disagree).
    "gpt_oss": {
        **_EXPERTS,
        "num_local_experts": 4,
        "sliding_window": SLIDING_WINDOW,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "gemma3": {
        "query_pre_attn_scalar": 16,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 6,
    },
}

# Where queries and keys are RMS-normalised, initializer_range does not reach the attention
# logits (their spread is 1, nearly uniform); a gain on the query norm restores the spread.
_QUERY_GAIN: Final = 3.0


def make_tiny(
    architecture: str,
    *,
    seed: int = 0,
    attn_implementation: str = "eager",
    **overrides: Any,
) -> PreTrainedModel:
    """Build a seeded random model: float32, CPU, eval mode, no gradients.

    Args:
        architecture: one of `ARCHITECTURES`.
        seed: fixes every weight; the global generator is left as it was.
        attn_implementation: name in transformers' attention registry.
        **overrides: configuration values to change, by the architecture's own names.
    """
    values = {**_SHARED, **_OWN[architecture], **overrides}
    config = _CONFIGS[architecture](**values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=attn_implementation, dtype=torch.float32
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_norm.weight"):
                # Gemma scales by (1 + weight), everyone else by weight.
                parameter.fill_(_QUERY_GAIN - 1 if architecture == "gemma3" else _QUERY_GAIN)
    return model.eval().requires_grad_(False)


def tiny_prompt(length: int, *, seed: int = 0, vocab_size: int = 128) -> list[int]:
    """Seeded random token ids, 1 <= id < vocab_size."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(1, vocab_size, (length,), generator=generator).tolist()
    return ids
