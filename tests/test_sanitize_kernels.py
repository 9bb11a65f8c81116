"""What the sanitizer script runs and how it reads a tool's output; no GPU."""

from __future__ import annotations

import pytest
import sanitize_kernels
import torch

RACE = """verify sm90 d128 q16 hint
========= Warning: Race reported between Write access at vegas::k(int)+0x10 and Read access
=========     at void vegas::sm90_verify_kernel<Config>(Params)+0x40
=========     at void vegas::sm90_verify_kernel<Config>(Params)+0x40
ran 7 of 60 calls
========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)
"""


def test_a_verdict_names_what_was_found_and_how_much_ran() -> None:
    line, *found = sanitize_kernels.verdict("racecheck", RACE, "; stopped after 9 s").splitlines()
    assert line == (
        "racecheck: 1 hazard displayed (0 errors, 1 warning); 7 of 60 calls; stopped after 9 s"
    )
    assert "2 x at void vegas::sm90_verify_kernel" in found[0]
    assert len(found) == 2


def test_a_tool_that_died_has_no_verdict() -> None:
    line = sanitize_kernels.verdict("memcheck", "========= Error: Device not supported\n\n", "")
    assert line == "memcheck: no verdict; last line: ========= Error: Device not supported"


@pytest.mark.parametrize("kind", ["verify", "sparse", "select"])
def test_its_calls_are_valid(kind: str) -> None:
    calls = getattr(sanitize_kernels, f"{kind}_calls")()
    assert len({call.name for call in calls}) == len(calls)
    for call in calls[:: 4 if kind == "verify" else 1]:
        call.run(torch.device("cpu"))
