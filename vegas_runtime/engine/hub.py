"""Hub checkpoints: found in the local Hub cache or fetched into it; quick to say no.

Files are fetched in two steps, small ones first, so that a model this engine cannot run is
refused before its gigabytes are.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from vegas_runtime.config import is_offline
from vegas_runtime.engine.packaged import SMOLLM2, SWITCHED_OFF, Report, first_line
from vegas_runtime.errors import ModelError, StorageError

# Bounds the one question asked before anything is fetched. The Hub client's own downloads retry
# an unreachable network for 23 s (measured), once per file.
_PROBE_TIMEOUT_S: Final = 5.0

_SMALL_FILES: Final = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
# Files in subfolders are other formats of the same weights (`original/`, `metal/`, `onnx/`).
_OTHER_FORMATS: Final = "*/*"


def hub_checkpoint(
    repo_id: str, revision: str, inspect: Callable[[Path], Any], report: Report
) -> Path:
    """Local folder of a Hub model, named for its commit; fetched when it is not complete.

    Args:
        repo_id: `owner/name`.
        revision: branch, tag or commit; empty for the default branch.
        inspect: called with the folder before weights are fetched; raises to refuse the model.
        report: told what takes long.

    Raises:
        ModelError: the model does not exist, is refused, or is missing and cannot be fetched.
        StorageError: the Hub cache is full or cannot be written.
    """
    cached = _cached_folder(repo_id, revision)
    if cached and is_commit(revision) and has_tokenizer(cached) and not missing_weights(cached):
        return cached
    if is_offline():
        reason = SWITCHED_OFF
    else:
        reason = _why_unreachable(repo_id, revision)
        if not reason:
            return _download(repo_id, revision, inspect, report)
        if cached:
            report(f"{reason}; using {repo_id} as cached")
    if cached is None:
        raise _not_here(repo_id, "is not in the local Hub cache", reason)
    missing = missing_weights(cached)
    if missing:
        what = f"is only partly in the local Hub cache ({missing[0]} is missing)"
        raise _not_here(repo_id, what, reason)
    return cached


def is_commit(revision: str) -> bool:
    """Whether a revision is a full commit hash, which never moves."""
    return re.fullmatch("[0-9a-f]{40}", revision) is not None


def weight_files(checkpoint: Path) -> list[str]:
    """Names of the safetensors files a checkpoint's weights are in, sorted.

    Raises:
        ModelError: the index cannot be read.
    """
    index = checkpoint / "model.safetensors.index.json"
    if not index.exists():
        return ["model.safetensors"]
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} is not an index of safetensors files: {error!r}.") from error


def missing_weights(checkpoint: Path) -> list[str]:
    """Weight files that a checkpoint's folder lacks."""
    return [name for name in weight_files(checkpoint) if not (checkpoint / name).exists()]


def has_tokenizer(checkpoint: Path) -> bool:
    """Whether a checkpoint's folder holds the files of a tokenizer."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
    return any((checkpoint / name).exists() for name in names)


def _cached_folder(repo_id: str, revision: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo_id, "config.json", revision=revision or None)
    return Path(config).parent if isinstance(config, str) else None


def _why_unreachable(repo_id: str, revision: str) -> str:
    """Ask the Hub for the model once; empty when it has it, else why nobody answered.

    Raises:
        ModelError: the Hub answered that there is no such model, revision or access.
    """
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    try:
        url = hf_hub_url(repo_id, "config.json", revision=revision or None)
        get_hf_file_metadata(url, timeout=_PROBE_TIMEOUT_S)
    except errors.GatedRepoError as error:
        raise ModelError(
            f"access to {repo_id} must be granted by its owner.",
            hint="Accept its terms on the Hub, then log in with `hf auth login`.",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"the Hub has no model {repo_id}, or it is private.",
            hint="Check the spelling; for a private model, log in with `hf auth login`.",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{repo_id} has no revision {revision!r}.") from error
    except errors.EntryNotFoundError as error:
        raise ModelError(
            f"{repo_id} has no config.json, so it is not a transformers checkpoint.",
            hint="For a GGUF file, download it and pass its path.",
        ) from error
    except Exception as error:  # the HTTP library under the Hub client changes between releases
        return f"the Hub cannot be reached ({first_line(error)})"
    return ""


def _download(repo_id: str, revision: str, inspect: Callable[[Path], Any], report: Report) -> Path:
    """Fetch small files, inspect, then fetch exactly the weights the index names."""
    from huggingface_hub import snapshot_download

    def fetch(wanted: str, patterns: Sequence[str], ignored: str | None = None) -> Path:
        return Path(
            snapshot_download(
                repo_id,
                revision=wanted or None,
                allow_patterns=list(patterns),
                ignore_patterns=ignored,
                etag_timeout=_PROBE_TIMEOUT_S,
            )
        )

    try:
        # By the name asked for, so that the cache can tell later, offline, what it stands for.
        folder = fetch(revision, _SMALL_FILES, ignored=_OTHER_FORMATS)
        inspect(folder)
        missing = missing_weights(folder)
        if missing:
            size = _weights_bytes(repo_id, folder) / 1e9
            files = f"{len(missing)} weight file{'s' * (len(missing) > 1)}"
            report(f"fetching {repo_id} at {folder.name[:12]}: {files}, {size:.2f} GB in all")
            fetch(folder.name, missing)
    except ModelError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EACCES, errno.EROFS}:
            raise StorageError(
                f"cannot store {repo_id}: {error.strerror}.",
                hint="Free some space, or set `HF_HOME` to another folder.",
            ) from error
        reason = f"fetching broke off ({first_line(error)})"
        raise _not_here(repo_id, "is not completely in the local Hub cache", reason) from error
    return folder


def _weights_bytes(repo_id: str, folder: Path) -> int:
    """Size of a model's weights: as its index says, or as the Hub does of a single file."""
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    index = folder / "model.safetensors.index.json"
    if index.exists():
        return int(json.loads(index.read_text()).get("metadata", {}).get("total_size", 0))
    url = hf_hub_url(repo_id, "model.safetensors", revision=folder.name)
    try:
        return get_hf_file_metadata(url, timeout=_PROBE_TIMEOUT_S).size or 0
    except errors.EntryNotFoundError as error:
        raise ModelError(
            f"{repo_id} has no model.safetensors; weights are read from safetensors files only."
        ) from error


def _not_here(repo_id: str, what: str, reason: str) -> ModelError:
    return ModelError(
        f"{repo_id} {what}, and {reason}.",
        hint=f"Three ways to provide it: run `hf download {repo_id}` on a connected machine and "
        "copy its `HF_HOME` folder here; pass the path of a checkpoint folder instead; or use "
        f"`{SMOLLM2.id}`, which comes from the Python package index.",
    )
