"""compute-sanitizer over small calls of every kernel instance.

    PYTHONPATH=. python tests/sanitize_kernels.py [--tools NAME ...] [--seconds N] [--logs FOLDER]

One process per tool, all at the same time. Prints a line per tool: how many calls ran under it,
what it found, or why it did not run. Only whether memory is used properly is checked here; what the
kernels compute is `test_kernels_cuda.py`'s.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import paged_cases
import torch
from paged_cases import Case, SelectCase, SparseCase

from vegas_runtime.kernels import build

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")
RAN = re.compile(r"ran (\d+) of (\d+) calls")
# Heads, KV heads, head dim; queries that fill 16, 64 and 128 rows, so that every loader and every
# number of warps runs.
MODELS = ((16, 2, 128), (16, 2, 64))
QUERIES = (16, 8, 2)
MODES = ("off", "hint", "all", "exact", "hint_bf16")


@dataclass(frozen=True)
class Call:
    """One call of an operation, by name."""

    name: str
    run: Callable[[torch.device], None]


def say(line: str) -> None:
    """Print a line at once: a process that is stopped keeps what it said."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def verify_calls() -> list[Call]:
    """Verification on both paths, in every mode; one request is split between blocks."""
    calls = []
    for queries, mode, path, (heads, kv_heads, dim) in itertools.product(
        QUERIES, MODES, ("sm90", "mma"), MODELS
    ):
        case = Case(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            lens=(700, 70),
            queries=(queries, queries),
            mode=mode,
            path=path,
            layout="split" if mode == "exact" else "interleaved",
            dtype=torch.float16 if mode == "hint_bf16" else torch.bfloat16,
            sinks="small" if mode == "all" else "none",
        )

        def run(device: torch.device, case: Case = case) -> None:
            this = paged_cases.make_paged(case, device)
            paged_cases.run_verify(this, paged_cases.new_workspace(case, device))

        calls.append(Call(f"verify {path} d{dim} q{queries} {mode}", run))
    return calls


def sparse_calls() -> list[Call]:
    """Sparse attention, with calls that may begin while the one in front ends."""
    calls = []
    for heads, kv_heads, dim in (*MODELS, (16, 1, 64), (16, 1, 128)):
        case = Case(
            heads=heads, kv_heads=kv_heads, head_dim=dim, lens=(700, 0, 70), queries=(1, 1, 1)
        )
        for per_head in (False, True):
            sparse = SparseCase(
                case=case, counts=(300, 0, 20), tails=(690, 0, 60), per_head=per_head
            )

            def run(device: torch.device, sparse: SparseCase = sparse) -> None:
                paged_cases.check_sparse(sparse, device)

            calls.append(Call(f"sparse d{dim} group {heads // kv_heads} {per_head}", run))
    return calls


def select_calls() -> list[Call]:
    """Selection from every kind of score, with and without forced entries."""
    calls = []
    for kind, per_head, sinks in itertools.product(("u8", "bf16", "exact"), (False, True), (0, 3)):
        case = SelectCase(
            kind=kind,
            per_head=per_head,
            sinks=sinks,
            recent=sinks,
            translate=sinks > 0,
            lens=(3000, 1, 64),
        )

        def run(device: torch.device, case: SelectCase = case) -> None:
            paged_cases.check_select(case, device)

        calls.append(Call(f"select {kind} {'kv_head' if per_head else 'layer'} {sinks}", run))
    return calls


def run_calls(seconds: float) -> None:
    """Run the calls of all operations in turn until the time is up; what a tool watches."""
    start, device = time.monotonic(), torch.device("cuda")
    assert build.unavailable_reason() is None
    kinds = [verify_calls(), sparse_calls(), select_calls()]
    calls = [call for row in itertools.zip_longest(*kinds) for call in row if call is not None]
    ran = 0
    for call in calls:
        if time.monotonic() - start > seconds:
            break
        say(call.name)
        call.run(device)
        torch.cuda.synchronize()
        ran += 1
    say(f"ran {ran} of {len(calls)} calls")


def find_sanitizer() -> str | None:
    """compute-sanitizer: on PATH, or where CUDA toolkits keep it."""
    places = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(places)
    )


def watch(sanitizer: str, tool: str, seconds: float, logs: Path) -> str:
    """Run the calls under one tool; its verdict."""
    log = logs / f"{tool}.txt"
    # Every tensor its own allocation: else a call that leaves its tensor reads its neighbour's.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, f"--tool={tool}", "--print-limit=200"]
    if tool != "initcheck":  # which must see the writes of other kernels as well
        command += ["--kernel-name", "kns=vegas"]
    command += [sys.executable, __file__, "--calls", str(seconds / 2)]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment, start_new_session=True
        )
        try:
            process.wait(timeout=seconds)
            ended = ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its own session: the tool and the calls
            process.wait()
            ended = f"; stopped after {seconds:.0f} s"
    return verdict(tool, log.read_text(errors="replace"), ended)


def verdict(tool: str, text: str, ended: str) -> str:
    """What a tool's output says.

    Args:
        tool: its name.
        text: everything it and the calls printed.
        ended: why it was stopped early, or nothing.
    """
    summary, ran = SUMMARY.search(text), RAN.search(text)
    calls = f"{ran[1]} of {ran[2]} calls" if ran else "an unknown number of calls"
    if summary is None:
        last = [line for line in text.splitlines() if line.strip()][-1:]
        return f"{tool}: no verdict{ended}; last line: {' '.join(last)[:200]}"
    # What was found, by kind and kernel.
    found = Counter(
        line.removeprefix("=========").strip()[:150]
        for line in text.splitlines()
        if re.match(r"========= (Error|Warning|Invalid|Uninitialized|Barrier|Race|Hazard)", line)
        or re.match(r"=========\s+(?:at|and) .*vegas", line)
    )
    lines = [f"{tool}: {summary[1]}; {calls}{ended}"]
    lines += [f"    {count:5d} x {what}" for what, count in found.most_common(12)]
    return "\n".join(lines)


def main() -> None:
    """Run the tools side by side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--seconds", type=float, default=110.0, help="for each tool")
    parser.add_argument("--logs", type=Path, default=Path("sanitizer"))
    parser.add_argument("--calls", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.calls is not None:
        run_calls(options.calls)
        return
    reason = build.unavailable_reason()  # compiles, once, before the clock runs
    sanitizer = find_sanitizer()
    if reason is not None or sanitizer is None:
        sys.exit(f"not run: {reason or 'compute-sanitizer was not found; CUDA toolkits hold it'}")
    options.logs.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(options.tools)) as pool:
        for done in pool.map(
            lambda tool: watch(sanitizer, tool, options.seconds, options.logs), options.tools
        ):
            say(done)


if __name__ == "__main__":
    main()
