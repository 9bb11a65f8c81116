"""Tiny checkpoints on disk, as folders, GGUF files and wheels, for the loading tests."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy
from tiny_models import make_tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from vegas_runtime.engine.packaged import WheelModel

# Byte-level tokens for printable ASCII, space and newline, after three special ones; one merge.
SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENS: Final = (*SPECIAL, *(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "th")
COMMIT: Final = "0123456789abcdef0123456789abcdef01234567"


def save_checkpoint(folder: Path, architecture: str = "llama", **overrides: Any) -> PreTrainedModel:
    """Write a tiny model and its tokenizer as `save_pretrained` does."""
    model = make_tiny(architecture, **overrides)
    model.save_pretrained(folder)
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return model


def write_gguf(path: Path, **overrides: Any) -> PreTrainedModel:
    """Write a tiny Llama as a float32 GGUF file; returns the model it holds."""
    from gguf import GGUFWriter, LlamaFileType, TokenType

    model = make_tiny("llama", vocab_size=len(TOKENS), **overrides)
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(TOKENS))
    kinds = [TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(TOKENS) - len(SPECIAL))
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        target = _gguf_name(name)
        values = weight.numpy()
        for part, count in heads.items():
            if part in target:
                values = _interleave(values, count)
        writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def write_wheel(folder: Path) -> WheelModel:
    """Write a wheel that carries a tiny GGUF file, and describe it as the runtime pins one."""
    gguf = folder / "tiny-llama.gguf"
    write_gguf(gguf)
    info, member = "tiny_llama-1.0.dist-info", "tiny_llama/tiny-llama.gguf"
    wheel = folder / "tiny_llama-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, member)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-llama\nVersion: 1.0"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        archive.writestr(f"{info}/RECORD", "")
    model = WheelModel(
        id="tiny-llama",
        requirement="tiny-llama==1.0",
        wheel=wheel.name,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member=member,
        gguf_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
    )
    gguf.unlink()
    return model


def _gguf_name(name: str) -> str:
    """llama.cpp's name of a Llama weight."""
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for theirs, own in parts.items():
        name = name.replace(theirs, own)
    return name


def _interleave(weight: numpy.ndarray, heads: int) -> numpy.ndarray:
    """Rows from transformers' RoPE order (two halves) to llama.cpp's (pairs), head by head."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)
