from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from vegas_runtime.engine.host_memory import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_memory_of_freed_tensors_is_used_again() -> None:
    def faults(how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    # 64 MiB each time, in pages of 4 KiB, or of 2 MiB where those are transparent.
    given_back = faults("given back")
    assert given_back >= 20 * 32
    assert faults("kept") < given_back / 10
