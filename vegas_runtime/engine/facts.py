"""What identifies a loaded checkpoint: hashes of its config and weights, and its shape."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vegas_runtime.engine.hub import weight_files
from vegas_runtime.engine.packaged import file_sha256, read_origin

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# What differs between two copies of the same model: who wrote the file, and where it was.
_VOLATILE_KEYS: Final = {"transformers_version", "_name_or_path", "_model_name_or_path"}


def model_facts(folder: Path, config: PreTrainedConfig, dtype: str) -> dict[str, Any]:
    """Plain values by the names of a profile's `match.model`, id and revision apart.

    Args:
        folder: the checkpoint.
        config: its configuration; a loaded model's own, which says whether quantised weights were
            dequantised, or as it was read.
        dtype: what it computes in.

    Returns:
        config_sha256, weights_sha256, dtype, quant, max_model_len, num_layers,
        num_query_heads, num_kv_heads, head_dim, num_sliding_layers.
    """
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    return {
        "config_sha256": _config_sha256(folder),
        "weights_sha256": _weights_sha256(folder),
        "dtype": dtype.removeprefix("torch."),
        "quant": _quantisation(folder, config),
        "max_model_len": getattr(text, "max_position_embeddings", None),
        "num_layers": text.num_hidden_layers,
        "num_query_heads": heads,
        "num_kv_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "num_sliding_layers": _num_sliding_layers(text),
    }


def _num_sliding_layers(text: Any) -> int:
    layers = getattr(text, "layer_types", None)
    if layers:
        return sum(layer == "sliding_attention" for layer in layers)
    # Without a list per layer (Mistral), one window means every layer.
    return int(text.num_hidden_layers) if getattr(text, "sliding_window", None) else 0


def _config_sha256(folder: Path) -> str:
    """Hash of config.json as canonical JSON, less what differs between copies of one model."""
    values = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in values.items() if key not in _VOLATILE_KEYS}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _weights_sha256(folder: Path) -> str:
    """Hash of the weights a model came with.

    A single file's is its own SHA-256; of several, that of what `sha256sum *.safetensors` prints.
    A converted model has its GGUF file's, which no change of the converter moves.
    """
    origin = read_origin(folder)
    if origin:
        return str(origin["gguf_sha256"])
    names = weight_files(folder)
    digests = [file_sha256(folder / name) for name in names]
    if len(names) == 1:
        return digests[0]
    listing = "".join(f"{d}  {n}\n" for d, n in zip(digests, names, strict=True))
    return hashlib.sha256(listing.encode()).hexdigest()


def _quantisation(folder: Path, config: PreTrainedConfig) -> str:
    """How the weights were quantised (`none`, `fp8`, `mxfp4`, `gguf-q4_1`), and if undone."""
    origin = read_origin(folder)
    if origin:
        plain = origin["quant"] in ("f32", "f16", "bf16")
        return "none" if plain else f"gguf-{origin['quant']} dequantised"
    values = json.loads((folder / "config.json").read_text()).get("quantization_config")
    if not values:
        return "none"
    method = str(values.get("quant_method", "unknown"))
    still = getattr(config, "quantization_config", None)
    undone = still is None or getattr(still, "dequantize", False)
    return f"{method} dequantised" if undone else method
