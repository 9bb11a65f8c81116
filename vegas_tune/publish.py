"""A sweep's result as a profile: the setting, what it is for, and all the evidence."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from vegas_runtime import __version__
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import ProfileInvalidError
from vegas_runtime.profile import Match, Profile, Workload, load_profile
from vegas_runtime.protocol import EngineInfo, PromptBlock
from vegas_tune.measure import (
    NUM_BATCHES,
    Estimate,
    accepted,
    mean_ratio,
    significant,
    survival,
)
from vegas_tune.outcomes import Failed, Measured, Outcome
from vegas_tune.plan import GAMMA, REFINE, SPARSITY, VALIDATE
from vegas_tune.stock import EngineUse, StockFigures
from vegas_tune.sweep import SweepResult

PROTOCOL_ID: Final = "steady-rounds-v2"
_CURVES: Final = {
    "sparsity": SPARSITY, "gamma": GAMMA, "refine": REFINE, "validate": VALIDATE,
}  # fmt: skip
_ENOUGH_PASSES: Final = 6
# Listed one by one in a profile; all of them are counted.
_MOST_REJECTED: Final = 30
_NORMAL_95: Final = 1.96
_ONE: Final = Estimate(est=1.0, low=1.0, high=1.0, n=1)


def build_profile(
    result: SweepResult,
    info: EngineInfo,
    blocks: Sequence[PromptBlock],
    workload: Mapping[str, Any],
    *,
    artifacts: Mapping[str, str],
    created: str,
    rejected: Sequence[Failed] = (),
    stock: StockFigures | None = None,
    use: EngineUse | None = None,
) -> Profile:
    """Put a sweep's result into a sealed profile.

    Args:
        result: of the sweep.
        info: of the engine that measured.
        blocks: the workload.
        workload: its description.
        artifacts: SHA-256 by name of the files beside the profile.
        created: when, `YYYY-MM-DDTHH:MM:SSZ`.
        rejected: tries that were rejected and made again.
        stock: measured before and after, where the engine is vLLM.
        use: what it took of the machine, where that is known.
    """
    plan = result.plan
    lens = [len(prompt) for block in blocks for prompt in block.prompts]
    longest = max(lens) + max(block.max_new_tokens for block in blocks)
    match = Match.from_facts(
        model=info.model,
        device=info.device,
        runtime=info.runtime,
        sampling=blocks[0].sampling.to_dict(),
    )
    values: dict[str, Any] = {
        "status": result.status,
        "created": created,
        "tool": {"version": __version__},
        "backend": info.backend,
        "match": match.model_dump(mode="json", by_alias=True, exclude_none=True),
        "selected": {"default": result.selected.to_dict()},
        "validity": {
            "batch": [plan.batch_size, plan.batch_size + 1],
            "context": [min(lens), longest + 1],
        },
        "workload": Workload.from_facts(workload).model_dump(
            mode="json", by_alias=True, exclude_none=True
        ),
        "protocol": _protocol(result, info, rejected, stock, use),
        "decisions": [decision.to_dict() for decision in result.decisions],
        "curves": {
            curve: _curve(result.outcomes, step, plan.plain, result.noise_floor_cv)
            for curve, step in _CURVES.items()
        }
        | _not_measured(result, rejected),
        "artifacts": [{"name": name, "sha256": sha} for name, sha in sorted(artifacts.items())],
        "host": {"cpu": info.device["class"]} if info.device.get("kind") == "cpu" else {},
    }
    results = _results(result, stock)
    if results is not None:
        values["results"] = results
    return Profile.model_validate(values).seal()


def creation_time(path: Path, artifacts: Mapping[str, str]) -> str:
    """When a run was published: as the profile there says if it rests on the same records."""
    try:
        before = load_profile(path)
    except ProfileInvalidError:
        return _now()
    rests_on = {artifact.name: artifact.sha256 for artifact in before.artifacts}
    return before.created if before.created and rests_on == dict(artifacts) else _now()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _protocol(
    result: SweepResult,
    info: EngineInfo,
    rejected: Sequence[Failed],
    stock: StockFigures | None,
    use: EngineUse | None,
) -> dict[str, Any]:
    plan = result.plan
    values: dict[str, Any] = {
        "id": PROTOCOL_ID,
        "budget_s": plan.budget_s,
        "replicates": plan.rounds,
        "order": "rounds, each other one backwards",
        "num_batch_means": NUM_BATCHES,
        "max_num_speculative_tokens": info.max_num_speculative_tokens,
        "sparsity_ratio_candidates": list(plan.ratios),
        "num_speculative_tokens_candidates": [0, *plan.gammas],
    }
    if result.num_rounds:
        values["pairs"] = result.num_rounds
    if math.isfinite(result.noise_floor_cv):
        values["noise_floor_cv"] = result.noise_floor_cv
    other = _watched([*result.outcomes, *rejected])
    if rejected:
        other["rejected_windows"] = dict(Counter(failed.kind for failed in rejected))
    if plan.places > 1:
        other["places"] = plan.places
    if use is not None:
        other |= use.to_dict()
    if stock is not None and stock.passes:
        other["prefix_cache_hit_share"] = significant(_hit_share(result))
        rates = [one.figures.decode_tok_s.est for one in stock.passes]
        other["stock_tok_s"] = [significant(rate) for rate in rates]
        if stock.drift is not None:
            other["stock_after_over_before"] = stock.drift.to_dict()
    return values | ({"other": other} if other else {})


def _not_measured(result: SweepResult, rejected: Sequence[Failed]) -> dict[str, Any]:
    """Settings that were not tried, and tries that do not count; empty without any."""
    values: dict[str, Any] = {}
    if result.dominated:
        values["dropped"] = [
            _setting(config)
            | {"status": "failed", "failure": {"kind": "dominated", "message": reason}}
            for config, reason in result.dominated.items()
        ]
    if rejected:
        values["rejected"] = [
            _setting(failed.point.config)
            | {
                "step": failed.point.step,
                "attempt": failed.attempt,
                "failure": {"kind": failed.kind, "message": failed.reason},
            }
            for failed in rejected[:_MOST_REJECTED]
        ]
    return values


def _setting(config: SpeculationConfig) -> dict[str, Any]:
    return {
        "sparsity_ratio": config.sparsity_ratio,
        "num_speculative_tokens": config.num_speculative_tokens,
    }


def gpu_warnings(profile: Profile) -> list[str]:
    """What the user should know of the GPU while it was measured."""
    if profile.protocol is None or profile.match.device.kind != "cuda":
        return []
    gpu = profile.protocol.other.get("gpu")
    if not isinstance(gpu, Mapping):
        return [
            "WARNING: what the GPU did meanwhile (clocks, power, temperature, throttling, other "
            "processes) was not recorded; vegas-tune doctor says what is missing."
        ]
    warnings = []
    if gpu["foreign_processes"]:
        warnings.append(
            f"WARNING: up to {gpu['foreign_processes']} processes of others used the GPU while it "
            "was measured; its figures are theirs as well."
        )
    if gpu["throttled_windows"]:
        warnings.append(
            f"WARNING: {gpu['throttled_windows']} windows were rejected because the GPU was slowed "
            "down by heat or its power brake."
        )
    return warnings


def _watched(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What the GPU did over all windows that were watched; nothing where none was."""
    seen = [outcome.telemetry for outcome in outcomes if outcome.telemetry is not None]
    if not seen:
        return {}
    foreign = [one["num_foreign"] for one in seen if one["num_foreign"] is not None]
    return {
        "gpu": {
            **{
                name: [min(one[name][0] for one in seen), max(one[name][2] for one in seen)]
                for name in ("sm_clock_mhz", "power_w", "temperature_c")
            },
            "clock_reasons": sorted({reason for one in seen for reason in one["reasons"]}),
            "throttled_windows": sum(
                isinstance(outcome, Failed) and outcome.kind == "thermal" for outcome in outcomes
            ),
            "foreign_processes": max(foreign) if foreign else None,
        }
    }


def _hit_share(result: SweepResult) -> float:
    """Prompt tokens that were found in the prefix cache, of all; 0 where there is none."""
    runs = [one.run for one in result.measured()]
    asked = sum(run.num_prompt_tokens for run in runs)
    return sum(run.num_cached_tokens for run in runs) / asked if asked else 0.0


def _results(result: SweepResult, stock: StockFigures | None) -> dict[str, Any] | None:
    """The selected setting's figures from validation alone; None when it was not validated."""
    runs = _by_config(result.measured(VALIDATE))
    plain, selected = result.plan.plain, result.selected
    if result.validation is None or plain not in runs or selected not in runs:
        return None
    own, noise_cv = runs[selected], result.noise_floor_cv
    speedup = _ONE if selected == plain else result.validation.speedups[selected]
    values: dict[str, Any] = {
        "decode_tok_s": _throughput(own, noise_cv).to_dict(),
        "baseline_tok_s": _throughput(runs[plain], noise_cv).to_dict(),
        "speedup_vs_gamma0": speedup.to_dict(),
        "phase_ms": {
            phase.removesuffix("_s"): _mean_phase(own, phase).scaled(1000).to_dict()
            for phase in own[0].figures.phases
        },
    }
    # Where nothing is drafted, stock vLLM is what will be served.
    against = stock.speedup(own) if stock is not None and selected != plain else None
    if against is not None:
        values["speedup_vs_stock"] = against.to_dict()
    if selected != plain:
        counts = _accepted(own)
        values["accepted_per_iteration"] = counts.to_dict()
        values["acceptance_length"] = Estimate(
            est=counts.est + 1, low=counts.low + 1, high=counts.high + 1, n=counts.n
        ).to_dict()
        values["survival"] = _survival(own)
    return values


def _curve(
    outcomes: Iterable[Outcome], step: str, plain: SpeculationConfig, noise_cv: float
) -> list[dict[str, Any]]:
    """A step's points, in the order they were first asked for; failed ones stay."""
    asked = [outcome for outcome in outcomes if outcome.point.step == step]
    runs = _by_config(outcome for outcome in asked if isinstance(outcome, Measured))
    points = []
    for config in dict.fromkeys(outcome.point.config for outcome in asked):
        point = _setting(config)
        if config in runs:
            own = runs[config]
            point["decode_tok_s"] = _throughput(own, noise_cv).to_dict()
            point["n_steps"] = sum(one.figures.num_steps for one in own)
            if config != plain:
                point["accepted_per_iteration"] = _accepted(own).to_dict()
        else:
            last = [o for o in asked if isinstance(o, Failed) and o.point.config == config][-1]
            point |= {"status": "failed", "failure": {"kind": last.kind, "message": last.reason}}
        points.append(point)
    return points


def _by_config(measured: Iterable[Measured]) -> dict[SpeculationConfig, list[Measured]]:
    runs: dict[SpeculationConfig, list[Measured]] = {}
    for one in measured:
        runs.setdefault(one.point.config, []).append(one)
    return runs


def _throughput(runs: Sequence[Measured], noise_cv: float) -> Estimate:
    """Within-pass interval of a single pass; over several, their geometric mean.

    A few passes say little about their own spread (two have one degree of freedom), so below
    `_ENOUGH_PASSES` the run-to-run noise of the whole sweep stands in for it.
    """
    if len(runs) == 1:
        return runs[0].figures.decode_tok_s
    logs = [math.log(one.figures.decode_tok_s.est) for one in runs]
    if len(runs) >= _ENOUGH_PASSES or not math.isfinite(noise_cv):
        return mean_ratio(logs)
    mean = sum(logs) / len(logs)
    reach = _NORMAL_95 * noise_cv / math.sqrt(len(logs))
    return Estimate(
        est=math.exp(mean),
        low=math.exp(mean - reach),
        high=math.exp(mean + reach),
        n=len(logs),
    )


def _accepted(runs: Sequence[Measured]) -> Estimate:
    return accepted(
        {(one.point.block, request): counts for request, counts in one.figures.counts.items()}
        for one in runs
    )


def _mean_phase(runs: Sequence[Measured], phase: str) -> Estimate:
    values = [one.figures.phases[phase].est for one in runs]
    if len(values) == 1 or min(values) <= 0:
        return runs[0].figures.phases[phase]
    return mean_ratio([math.log(value) for value in values])


def _survival(runs: Sequence[Measured]) -> list[dict[str, Any]]:
    """P(first i drafts accepted), with normal intervals over iterations."""
    alive = survival(one.run for one in runs)
    count = sum(counts.num_drafts for one in runs for counts in one.figures.counts.values())
    estimates = []
    for share in alive:
        reach = _NORMAL_95 * math.sqrt(share * (1 - share) / max(count, 1))
        estimates.append(
            Estimate(
                est=share, low=max(share - reach, 0.0), high=min(share + reach, 1.0), n=count
            ).to_dict()
        )
    return estimates
