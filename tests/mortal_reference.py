"""Sweeps of the reference engine on a tiny model, killed at random moments and resumed.

    python mortal_reference.py FOLDER MODEL PROMPTS NUM_KILLS SEED

Each attempt is a forked child, so that torch is imported once. A run that finishes before it could
be killed again is followed by another one. Printed as JSON: how many were killed, the runs'
folders, and which records were not byte for byte what they had been before a kill.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

# Before any fork, and without starting a thread.
import torch  # noqa: F401
import transformers  # noqa: F401
from test_request import options

from vegas_runtime.engine import reference  # noqa: F401
from vegas_tune import publish, study, sweep, tune  # noqa: F401
from vegas_tune.progress import SweepProgress
from vegas_tune.request import SweepRequest


def attempt(folder: Path, model: str, prompts: str) -> int:
    """Start the sweep, or go on with it, in a child; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        request = SweepRequest.from_options(
            options(
                model=model, workload=prompts, batch=2, waiting=0, blocks=2, max_new_tokens=48,
                tokens=60, min_tokens=4, max_gamma=3, budget="600s", ratios="0.05,0.1,0.3,0.6",
                dtype="float32", device="cpu", backend="reference", run_dir=folder,
            )
        )  # fmt: skip
        tune.run(request, SweepProgress("again"))
        code = 0
    finally:
        os._exit(code)
    return 0


def records_of(folder: Path) -> dict[str, bytes]:
    """Every record written so far."""
    return {path.name: path.read_bytes() for path in sorted((folder / "records").glob("*.z"))}


def main(base: Path, model: str, prompts: str, num_kills: int, seed: int) -> None:
    """Kill, resume, and look."""
    chance = random.Random(seed)
    killed, changed, folders = 0, [], []
    while killed < num_kills:
        folder = base / f"run-{len(folders)}"
        folders.append(str(folder))
        is_finished = False
        while not is_finished:
            pid = attempt(folder, model, prompts)
            if killed < num_kills:
                time.sleep(chance.uniform(0.2, 1.2))
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            kept = records_of(folder)
            if os.WIFSIGNALED(status):
                killed += 1
                # What a kill left must still be there, unchanged, when the next attempt ends.
                pid = attempt(folder, model, prompts)
                time.sleep(chance.uniform(0.2, 0.6))
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                killed += os.WIFSIGNALED(status)
                after = records_of(folder)
                changed += [name for name in kept if after.get(name) != kept[name]]
            is_finished = os.WIFEXITED(status)
            assert not is_finished or os.WEXITSTATUS(status) == 0, "a sweep failed"
    sys.stdout.write(json.dumps({"killed": killed, "folders": folders, "changed": changed}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
