"""The plugin's Triton kernels in its compiler, which refuses much that the interpreter takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_runs import TESTS, compiled_kernels


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_kernels_compile_for_a_gpu_that_is_not_there(capability: int, tmp_path: Path) -> None:
    folder = TESTS.parent / "vegas_runtime" / "vllm_plugin"
    defined = {
        line.split("(")[0].removeprefix("def ")
        for path in folder.glob("triton_*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def _") and "_kernel(" in line
    }
    assert compiled_kernels("compile_triton.py", capability=capability, cache=tmp_path) == defined
