"""Scripts of this folder in processes of their own: what they print, or why they failed.

vLLM's imports take longer than most scenarios and change classes of its own, and Triton decides
while it is imported whether it interprets: neither may happen in the process of the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

TESTS: Final = Path(__file__).parent


def run_script(
    name: str, *arguments: str, timeout_s: float, environment: Mapping[str, str] | None = None
) -> str:
    """What a script of this folder prints; the test fails with its errors if it does not end well.

    Args:
        name: file name.
        arguments: its arguments.
        timeout_s: after this it counts as hung.
        environment: variables that differ from this process's.
    """
    done = subprocess.run(
        [sys.executable, str(TESTS / name), *arguments],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
        | dict(environment or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def report_of(name: str, *arguments: str, timeout_s: float) -> dict[str, Any]:
    """What a script reports: one JSON object, on the last line it prints."""
    report: dict[str, Any] = json.loads(
        run_script(name, *arguments, timeout_s=timeout_s).splitlines()[-1]
    )
    return report


def compiled_kernels(name: str, *, capability: int, cache: Path) -> set[str]:
    """Triton kernels that a script compiled for a GPU that is not there.

    Args:
        name: file name.
        capability: ten times the GPU's compute capability.
        cache: an empty folder.
    """
    environment = {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_DEFAULT_FP_FUSION": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return {*run_script(name, str(capability), timeout_s=300, environment=environment).split()}
