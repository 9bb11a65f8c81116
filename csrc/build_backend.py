"""Builds wheels with scikit-build-core, which compiles the kernels where nvcc is, not elsewhere.

The hooks of PEP 517 and 660. One decision is made here, from what the machine has:

    nvcc is found        csrc/ is compiled into the wheel, for Python 3.11 and later (abi3)
    no nvcc              a pure wheel; the kernels run on the reference path
    editable install     never compiled: the checkout compiles on first use (`kernels/build.py`)

pip's `-C wheel.cmake=true` or `false` overrules it. Imported by pip before anything is installed,
so it needs nothing of this project.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from scikit_build_core import build as scikit

Settings = dict[str, Any] | None

SWITCH: Final = "wheel.cmake"
# The stable ABI that the binding asks for is in 2.10; the kernels are tested from 2.11 on.
_TORCH: Final = "torch>=2.11"
# The library calls no Python, so one wheel serves every later version, too.
_PYTHON_TAG: Final = "cp311"
_FIND_TORCH: Final = """
import importlib.util, pathlib
found = importlib.util.find_spec("torch")
print(pathlib.Path(found.origin).parent if found and found.origin else "")
"""

build_sdist = scikit.build_sdist
get_requires_for_build_sdist = scikit.get_requires_for_build_sdist


def find_nvcc() -> str | None:
    """The CUDA compiler: on PATH, else under `CUDA_HOME` (/usr/local/cuda)."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(home / "bin"))


def find_torch() -> str:
    """Folder of the torch that the wheel will run with; empty when it is not installed.

    An isolated build hides it, and a second copy would be a download of gigabytes for some
    headers, so a Python outside the isolation is asked.
    """
    command = [sys.executable, "-I", "-c", _FIND_TORCH]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def with_decision(settings: Settings) -> dict[str, Any]:
    """The settings, with `wheel.cmake` decided and CMake told where its tools are."""
    decided = dict(settings or {})
    nvcc = find_nvcc()
    if SWITCH not in decided:
        decided[SWITCH] = "false" if nvcc is None else "true"
    if decided[SWITCH] == "false":
        why = "nvcc was not found" if nvcc is None else f"{SWITCH} is false"
        print(f"vegas-tune: no CUDA kernels in this wheel: {why}.")
        return decided
    # Not in pyproject.toml: there it would make setuptools run CMake for an editable install, too.
    decided.setdefault("cmake.source-dir", "csrc")
    decided.setdefault("wheel.py-api", _PYTHON_TAG)
    torch = find_torch()
    if nvcc is not None:
        decided.setdefault("cmake.define.CMAKE_CUDA_COMPILER", nvcc)
    if torch:
        decided.setdefault("cmake.define.TORCH_ROOT", torch)
    print(f"vegas-tune: compiling the CUDA kernels with {nvcc}, torch from {torch or 'the build'}.")
    return decided


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """CMake, ninja and torch's headers, where the kernels are compiled and they are missing."""
    settings = with_decision(config_settings)
    needed = list(scikit.get_requires_for_build_wheel(settings))
    if settings[SWITCH] != "false" and not find_torch():
        needed.append(_TORCH)
    return needed


def prepare_metadata_for_build_wheel(directory: str, config_settings: Settings = None) -> str:
    """The wheel's metadata, without a build."""
    return scikit.prepare_metadata_for_build_wheel(directory, with_decision(config_settings))


def build_wheel(
    directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel into `directory`; its name."""
    return scikit.build_wheel(directory, with_decision(config_settings), metadata_directory)


# Editable installs are setuptools': its path entry comes last, so that PYTHONPATH can name another
# checkout. scikit-build-core's import hook comes first.


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """What an editable install is made with."""
    return ["setuptools>=69"]


def prepare_metadata_for_build_editable(directory: str, config_settings: Settings = None) -> str:
    """The metadata of an editable install."""
    from setuptools import build_meta

    return str(build_meta.prepare_metadata_for_build_editable(directory, config_settings))


def build_editable(
    directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """A wheel that points at the checkout."""
    from setuptools import build_meta

    return str(build_meta.build_editable(directory, config_settings, metadata_directory))
