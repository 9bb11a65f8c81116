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
from statistics import fmean

from benchmarks.results_file import Row
from benchmarks.vllm_arms import SAMPLED, row, setting_of
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import EXIT_CODES
from vegas_tune.decide import Validation
from vegas_tune.evidence import RECORDS_NAME, unpack_records
from vegas_tune.laboratory import Measured
from vegas_tune.measure import Measurement, mean_ratio, measure
from vegas_tune.plan import VALIDATE
from vegas_tune.validation import judge

STARTS = ("engine_starts", "stock_engine_starts")
FIGURES = {"decode_tok_s": "tok/s", "speedup_vs_stock": "x", "speedup_vs_gamma0": "x"}
_RECORDS = "sweep_h200_{}.npz"


def sweep(model: str, data: Path, rows: list[Row]) -> None:
    """The default sweep of the command line, a process of its own; its records are kept.

    Args:
        model: to sweep.
        data: folder that gains the run's folder, and its records.
        rows: gains figures.
    """
    folder = data / f"sweep_h200_{time.time_ns()}"
    command = [
        sys.executable, "-m", "vegas_tune.cli", "sweep", "--model", model, "--backend", "vllm",
        "--temperature", str(SAMPLED.temperature), "--top-p", str(SAMPLED.top_p),
        "--top-k", str(SAMPLED.top_k), "--run-dir", str(folder), "--json",
    ]  # fmt: skip
    started_s = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    wall_s = time.monotonic() - started_s
    if done.returncode not in (EXIT_CODES["ok"], EXIT_CODES["inconclusive"]):
        raise SystemExit(f"the sweep ended with {done.returncode}: {done.stdout}")
    outcome = json.loads(done.stdout)
    number = len(kept_records(data)) + 1
    shutil.copyfile(folder / RECORDS_NAME, data / _RECORDS.format(number))
    selected = SpeculationConfig.from_dict(outcome["selected"])
    case = f"default plan, run {number}: {setting_of(selected)} ({outcome['status']})"
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
    """What each sweep's validation says, from its records, and how far apart two of them are.

    Args:
        paths: records of each sweep.
        rows: gains figures.
    """
    rates: list[float] = []
    gammas: list[int] = []
    for number, path in enumerate(paths, start=1):
        verdict, rounds = validation_of(path)
        chosen = verdict.selected
        logs = [found[chosen] for found in rounds]
        case = f"run {number}: {setting_of(chosen)}, {len(rounds)} rounds"
        rows.append(row("validated_decode", case, mean_ratio(logs), "tok/s"))
        rows.append(row("validated_speedup", case, verdict.speedups[verdict.winner], "x"))
        rates.append(math.exp(fmean(logs)))
        gammas.append(chosen.num_speculative_tokens)
    if len(paths) > 1:
        case = f"{len(paths)} runs"
        apart = 100 * (max(rates) / min(rates) - 1)
        rows.append(row("gamma_difference", case, float(max(gammas) - min(gammas)), "tokens"))
        rows.append(row("decode_difference_pct", case, apart, "% of decode throughput"))


def validation_of(path: Path) -> tuple[Validation, list[dict[SpeculationConfig, float]]]:
    """A sweep's verdict once more, and the log throughput of each complete round.

    Args:
        path: its records.
    """
    plan, outcomes = unpack_records(path)
    by_round: dict[int, dict[SpeculationConfig, float]] = {}
    for one in outcomes:
        figures = measure(one.run) if isinstance(one, Measured) else None
        if one.point.step == VALIDATE and isinstance(figures, Measurement):
            logs = by_round.setdefault(one.point.replicate, {})
            logs[one.point.config] = math.log(figures.decode_tok_s.est)
    settings = {config for logs in by_round.values() for config in logs}
    rounds = [logs for _, logs in sorted(by_round.items()) if len(logs) == len(settings)]
    finalists = sorted(
        settings - {plan.plain},
        key=lambda config: (config.num_speculative_tokens, config.sparsity_ratio),
    )
    return judge(plan, rounds, finalists), rounds
