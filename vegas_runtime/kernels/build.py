"""Finds, compiles and caches csrc/: one extension library, keyed by what goes into it.

A wheel built on a machine with nvcc carries the library; otherwise it is compiled on first use
where nvcc and a CUDA build of torch exist, and everywhere else the reference path runs and
`unavailable_reason` says why.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch

from vegas_runtime.config import cache_dir
from vegas_runtime.errors import BackendError

LIBRARY_NAME: Final = "vegas_kernels.so"
ARCHITECTURES: Final = ("80", "90a")
# Oldest torch whose stable ABI the binding asks for (2.10).
_TORCH_TARGET: Final = "0x020a000000000000ULL"
_CUDA_FLAGS: Final = ("-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", "-Xptxas=-v")
_CXX_FLAGS: Final = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden")


def source_dir() -> Path | None:
    """The checkout's csrc/, or None in an installation without sources."""
    folder = Path(__file__).parents[2] / "csrc"
    return folder if (folder / "bindings.cpp").exists() else None


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
    described = (architectures, _CUDA_FLAGS, _CXX_FLAGS, torch.__version__, torch.version.cuda)
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
    target = cache_dir() / "kernels" / source_hash(folder, architectures)
    library = target / LIBRARY_NAME
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
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
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
    _run([*link, f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lc10"])
    return [report, library]


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
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return f"the GPU has compute capability {capability[0]}.{capability[1]}; 8.0 is needed"
    packaged = Path(__file__).parent / LIBRARY_NAME
    try:
        library = packaged if packaged.exists() else build()
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except (BackendError, OSError) as error:
        return str(error)
    return None
