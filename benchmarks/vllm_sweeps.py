"""The default sweep on vLLM, timed from outside, and whether several of them agree."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results_file import Row
from benchmarks.vllm_arms import SAMPLED, row, setting_of
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import EXIT_CODES
from vegas_tune.evidence import RECORDS_NAME
from vegas_tune.gate import result_of
from vegas_tune.measure import Estimate, mean_ratio
from vegas_tune.plan import VALIDATE, Plan
from vegas_tune.sweep import SweepResult

STARTS = ("engine_starts", "stock_engine_starts")
FIGURES = {"decode_tok_s": "tok/s", "speedup_vs_stock": "x", "speedup_vs_gamma0": "x"}
_RECORDS = "sweep_h200_{}.npz"


def sweep(model: str, data: Path, rows: list[Row], *, num_workers: int = 1) -> None:
    """The default sweep of the command line, a process of its own; its records are kept.

    Args:
        model: to sweep.
        data: folder that gains the run's folder, and its records.
        rows: gains figures.
        num_workers: GPUs that measure every point; `agree` compares sweeps of one.
    """
    folder = data / f"sweep_h200_{time.time_ns()}"
    command = [
        sys.executable, "-m", "vegas_tune.cli", "sweep", "--model", model, "--backend", "vllm",
        "--temperature", str(SAMPLED.temperature), "--top-p", str(SAMPLED.top_p),
        "--top-k", str(SAMPLED.top_k), "--run-dir", str(folder), "--json",
        "--workers", str(num_workers),
    ]  # fmt: skip
    started_s = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    wall_s = time.monotonic() - started_s
    if done.returncode not in (EXIT_CODES["ok"], EXIT_CODES["inconclusive"]):
        raise SystemExit(f"the sweep ended with {done.returncode}: {done.stdout}")
    outcome = json.loads(done.stdout)
    if num_workers == 1:
        number = len(kept_records(data)) + 1
        file, run = _RECORDS.format(number), f"run {number}"
    else:
        file, run = _RECORDS.format(f"{num_workers}_gpus"), f"{num_workers} GPUs"
    shutil.copyfile(folder / RECORDS_NAME, data / file)
    selected = SpeculationConfig.from_dict(outcome["selected"])
    case = f"default plan, {run}: {setting_of(selected)} ({outcome['status']})"
    use = outcome["engine_use"]
    rows += [
        *(row(name, case, float(use[name]), "starts") for name in STARTS),
        row("gpu_minutes", case, use["gpu_minutes"], "min"),
        row("wall_s", case, wall_s, "s"),
    ]
    for claim, unit in FIGURES.items():
        found = (outcome["results"] or {}).get(claim)
        if found is not None:
            ends = {"low": found.get("low"), "high": found.get("high")}
            rows.append(Row(claim=claim, case=case, value=found["est"], unit=unit, **ends))


def kept_records(data: Path) -> list[Path]:
    """Records of the sweeps run so far, in order."""
    return sorted(data.glob(_RECORDS.format("[0-9]")))


def agree(paths: Sequence[Path], rows: list[Row]) -> None:
    """What each sweep decides, over its records once more, and how far apart they are.

    How far by the rules that each was run with, and by today's on what ties with the fastest.

    Args:
        paths: records of each sweep.
        rows: gains figures.
    """
    own = [result_of(path) for path in paths]
    for number, result in enumerate(own, start=1):
        verdict = result.validation
        if verdict is None:
            raise SystemExit(f"{paths[number - 1]} holds too few rounds of validation.")
        case = f"run {number}: {setting_of(result.selected)}, {result.num_rounds} rounds"
        rows.append(row("validated_decode", case, _rate_of(result), "tok/s"))
        rows.append(row("validated_speedup", case, verdict.speedups[verdict.winner], "x"))
    if len(own) > 1:
        tie = Plan.gamma_tie_tolerance
        again = [result_of(path, gamma_tie_tolerance=tie) for path in paths]
        rows += _apart(own, f"{len(own)} runs, as decided")
        rows += _apart(again, f"{len(own)} runs, decided again: fewer drafts tie within {tie:.0%}")


def _rate_of(result: SweepResult) -> Estimate:
    """Decode throughput of what a sweep chose, in its validation."""
    chosen = [one for one in result.measured(VALIDATE) if one.point.config == result.selected]
    return mean_ratio([math.log(one.figures.decode_tok_s.est) for one in chosen])


def _apart(results: Sequence[SweepResult], case: str) -> list[Row]:
    gammas = [one.selected.num_speculative_tokens for one in results]
    rates = [_rate_of(one).est for one in results]
    case = f"{case} (gamma {', '.join(map(str, gammas))})"
    apart = 100 * (max(rates) / min(rates) - 1)
    return [
        row("gamma_difference", case, float(max(gammas) - min(gammas)), "tokens"),
        row("decode_difference_pct", case, apart, "% of decode throughput"),
    ]
