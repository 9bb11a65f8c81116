"""Compiles every kernel for both targets against its register budget; needs nvcc, no GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from vegas_runtime.kernels import build

pytestmark = pytest.mark.slow
BUDGET = "register_budget.json"
# Exact scores of more than 64 rows at head dim 64, an ablation: 16 bytes, outside the main loop.
SPILLS = {"Li64ELi2ELi128ELi4ELi1ELNS_4CopyE0ELNS_9ScoreModeE2": 16}


@pytest.mark.parametrize("architecture", build.ARCHITECTURES)
def test_kernels_neither_spill_nor_exceed_their_registers(
    architecture: str, tmp_path: Path
) -> None:
    folder = build.source_dir()
    if folder is None or shutil.which("nvcc") is None:
        pytest.skip("needs the sources and nvcc")
    budget = json.loads((folder / BUDGET).read_text())
    seen = set()
    for source in build.sources(folder)[:-1]:
        report = subprocess.run(
            [
                *("nvcc", "-std=c++17", "-O3", "-Xptxas=-v", "-Werror=all-warnings"),
                f"-gencode=arch=compute_{architecture},code=sm_{architecture}",
                *("-c", str(source), "-o", str(tmp_path / "out.o")),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert report.returncode == 0, report.stderr[-2000:]
        assert "C75" not in report.stderr, "ptxas serialised wgmma or ignored setmaxnreg"
        for name, used in build.resource_usage(report.stderr).items():
            kind = next(kind for kind in budget if kind in name)
            seen.add(kind)
            allowed = next((n for part, n in SPILLS.items() if part in name), 0)
            assert used["spill_bytes"] <= allowed, name
            assert used["stack_bytes"] == 0 or allowed > 0, name
            assert used["registers"] <= budget[kind], name
    assert seen == set(budget)
