"""Finds, compiles and caches csrc/: one extension library, keyed by what goes into it.

    prebuilt    in the wheel, where nvcc was at installation (csrc/build_backend.py)
    compiled    on first use, for the GPU that is there, kept under a hash of what went in
    reference   plain PyTorch everywhere else; `Kernels.reason` says why, `fix` what to do

The first of these that works is taken.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch

from vegas_runtime.config import cache_dir
from vegas_runtime.errors import BackendError

LIBRARY_NAME: Final = "vegas_kernels.so"
ARCHITECTURES: Final = ("80", "90a")
# Oldest torch whose stable ABI the binding asks for (2.10).
_TORCH_TARGET: Final = "0x020a000000000000ULL"
_CUDA_FLAGS: Final = ("-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", "-Xptxas=-v")
_CXX_FLAGS: Final = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden")
_OLDEST_GPU: Final = (8, 0)
_TOOLKIT: Final = "install the CUDA toolkit, so that `nvcc` is on PATH; the next run compiles them"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Which implementation of the operations runs in this process.

    Attributes:
        path: `prebuilt` or `compiled` CUDA kernels, the `reference`, or `pending`: compiled by the
            next process that loads them.
        reason: why that one, for people.
        fix: what to do about `reference`; empty where nothing can be done.
    """

    path: Literal["prebuilt", "compiled", "pending", "reference"]
    reason: str
    fix: str = ""


def source_dir() -> Path | None:
    """csrc/ of the checkout, or the copy in an installation; None where there is neither."""
    installed = Path(__file__).parent / "csrc"
    for folder in (Path(__file__).parents[2] / "csrc", installed):
        if (folder / "bindings.cpp").exists():
            return folder
    return None


def sources(folder: Path) -> list[Path]:
    """Files to compile, kernels first."""
    kernels = sorted((*folder.glob("*.cu"), *folder.glob("instances/*.cu")))
    return [*kernels, folder / "bindings.cpp"]


def find_nvcc() -> Path | None:
    """The CUDA compiler: on PATH, or under `CUDA_HOME`'s usual place."""
    found = shutil.which("nvcc")
    if found is None and Path("/usr/local/cuda/bin/nvcc").exists():
        found = "/usr/local/cuda/bin/nvcc"
    return None if found is None else Path(found)


def source_hash(folder: Path, architectures: Sequence[str] = ARCHITECTURES) -> str:
    """Key of a build: every source, the flags and torch's version."""
    digest = hashlib.sha256()
    files = sorted(
        path for suffix in ("*.cu", "*.cuh", "*.h", "*.cpp") for path in folder.rglob(suffix)
    )
    for path in files:
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    targets = [_gencode(architecture) for architecture in architectures]
    described = (targets, _CUDA_FLAGS, _CXX_FLAGS, torch.__version__, torch.version.cuda)
    digest.update(repr(described).encode())
    return digest.hexdigest()[:16]


def build(*, architectures: Sequence[str] = ARCHITECTURES, jobs: int | None = None) -> Path:
    """Compile the kernels unless the cache holds them.

    Args:
        architectures: compute capabilities, e.g. `80` and `90a`.
        jobs: compilers at a time; by default one per core.

    Returns:
        The library. `ptxas.txt` beside it holds the assembler's resource report.

    Raises:
        BackendError: no sources, no compiler, or a compile error.
    """
    folder, nvcc = source_dir(), find_nvcc()
    if folder is None or nvcc is None:
        missing = "csrc/ is not installed" if folder is None else "nvcc was not found"
        raise BackendError(
            f"The CUDA kernels cannot be compiled: {missing}.",
            hint="Install the CUDA toolkit, or use the reference path.",
        )
    library = _cached_library(folder, architectures)
    target = library.parent
    if library.exists():
        return library
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = _compile(folder, nvcc, Path(scratch), architectures, jobs or os.cpu_count() or 1)
        target.mkdir(exist_ok=True)
        for path in made:
            os.replace(path, target / path.name)  # the library last: its presence means done
    return library


def _compile(
    folder: Path, nvcc: Path, scratch: Path, architectures: Sequence[str], jobs: int
) -> list[Path]:
    """Compile and link into `scratch`; the report and the library."""
    targets = [_gencode(architecture) for architecture in architectures]
    root = Path(torch.__file__).parent

    def compile_one(source: Path) -> tuple[Path, str]:
        made = scratch / f"{source.parent.name}_{source.stem}.o"
        if source.suffix == ".cu":
            command = [str(nvcc), *_CUDA_FLAGS, *targets, "-c", str(source), "-o", str(made)]
        else:
            command = [
                os.environ.get("CXX", "g++"),
                *_CXX_FLAGS,
                f"-DTORCH_TARGET_VERSION={_TORCH_TARGET}",
                f"-I{root / 'include'}",
                "-c",
                str(source),
                "-o",
                str(made),
            ]
        return made, _run(command)

    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(compile_one, sources(folder)))
    report = scratch / "ptxas.txt"
    report.write_text("\n".join(text for _, text in results))
    library = scratch / LIBRARY_NAME
    objects = [str(made) for made, _ in results]
    link = [str(nvcc), "-shared", "-cudart=shared", *objects, "-o", str(library)]
    # libtorch alone, which depends on torch's CUDA part where it has one: see CMakeLists.txt.
    _run([*link, f"-L{root / 'lib'}", "-Xlinker=--no-as-needed", "-ltorch"])
    return [report, library]


def _gencode(architecture: str) -> str:
    """Option that asks nvcc for a target; the oldest brings PTX, which GPUs newer than 9.0 run."""
    code = f"sm_{architecture}"
    if architecture == ARCHITECTURES[0]:
        code = f"[{code},compute_{architecture}]"
    return f"-gencode=arch=compute_{architecture},code={code}"


def _run(command: Sequence[str]) -> str:
    """Run a compiler; its messages.

    Raises:
        BackendError: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        errors = [line for line in lines if "error" in line][:8] or lines[-8:]
        raise BackendError(
            f"Compiling the CUDA kernels failed at {command[-3]}: " + "; ".join(errors)
        )
    return done.stderr + done.stdout


def resource_usage(report: str) -> dict[str, dict[str, int]]:
    """Registers, stack and spills per kernel and architecture, from ptxas's report.

    Args:
        report: text of `ptxas.txt`.

    Returns:
        `name@sm` to registers, stack_bytes, spill_bytes.
    """
    usage: dict[str, dict[str, int]] = {}
    name = ""
    for line in report.splitlines():
        entry = re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line)
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", line)
        registers = re.search(r"Used (\d+) registers", line)
        if entry:
            name = f"{entry[1]}@{entry[2]}"
            usage[name] = {}
        elif stack and name:
            usage[name] |= {"stack_bytes": int(stack[1]), "spill_bytes": int(stack[2])}
        elif registers and name:
            usage[name]["registers"] = int(registers[1])
    return usage


@functools.cache
def unavailable_reason() -> str | None:
    """Load the kernels; None when they are there, else why not, for people."""
    kernels = load()
    return kernels.reason if kernels.path == "reference" else None


@functools.cache
def load(*, may_compile: bool = True) -> Kernels:
    """Load the first library that works: the wheel's own, else one compiled here.

    Args:
        may_compile: compile where nothing is compiled yet; a minute or so, once per machine.
    """
    if not torch.cuda.is_available():
        return Kernels(path="reference", reason="torch sees no CUDA device")
    capability = torch.cuda.get_device_capability()
    if capability < _OLDEST_GPU:
        has, needs = (".".join(map(str, each)) for each in (capability, _OLDEST_GPU))
        return Kernels(
            path="reference",
            reason=f"the GPU has compute capability {has}; {needs} is needed",
        )
    packaged, failures = Path(__file__).parent / LIBRARY_NAME, []
    if packaged.exists():
        problem = _load_library(packaged)
        if problem is None:
            return Kernels(path="prebuilt", reason="compiled at installation")
        failures.append(f"the installed library does not load ({problem})")
    return _load_compiled(capability, may_compile, failures)


def _load_compiled(capability: tuple[int, int], may_compile: bool, failures: list[str]) -> Kernels:
    """The second path: csrc/ compiled for this GPU; `failures` say what went wrong before."""
    folder, nvcc = source_dir(), find_nvcc()
    architectures = (ARCHITECTURES[1] if capability == (9, 0) else ARCHITECTURES[0],)
    library = None if folder is None else _cached_library(folder, architectures)
    if library is None or (nvcc is None and not library.exists()):
        missing = "nvcc was not found" if library else "csrc/ is not in this installation"
        why = "; ".join([*failures, f"the kernels are not compiled, and {missing}"])
        return Kernels(path="reference", reason=why, fix=_TOOLKIT)
    if not library.exists() and not may_compile:
        return Kernels(path="pending", reason=f"the next run compiles them with {nvcc}")
    try:
        if not library.exists():
            _log.warning("Compiling the CUDA kernels for this GPU, once; it takes about a minute.")
            build(architectures=architectures)
        problem = _load_library(library)
    except BackendError as error:
        problem = str(error)
    if problem is None:
        return Kernels(
            path="compiled", reason=f"compiled on this machine, kept in {library.parent}"
        )
    return Kernels(
        path="reference",
        reason="; ".join([*failures, problem]),
        fix=f"delete {library.parent} and use a CUDA toolkit as old as torch's CUDA "
        f"({torch.version.cuda}) or newer",
    )


def _cached_library(folder: Path, architectures: Sequence[str]) -> Path:
    return cache_dir() / "kernels" / source_hash(folder, architectures) / LIBRARY_NAME


def _load_library(library: Path) -> str | None:
    """Load an extension library; what is wrong with it, or None."""
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        return str(error)
    return None
