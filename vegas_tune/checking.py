"""`check` from end to end: tier 1 without an engine, then tier 2 (and 3) on the engine at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vegas_runtime.backend import (
    choose_backend,
    find_checkpoint,
    open_backend,
    open_vllm,
)
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import EXIT_CODES, UsageError
from vegas_runtime.profile import WILDCARD, Profile, load_profile
from vegas_runtime.profile_sections import Workload as Description
from vegas_runtime.protocol import Capacity, Engine
from vegas_tune.apply import match_profile, raise_on_hard
from vegas_tune.gate import Status, Verdict, replay_decisions
from vegas_tune.request import parse_duration_s
from vegas_tune.split import check_gpus, check_split
from vegas_tune.workload import Workload, workload_from_description

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Check:
    """Every tier's verdict on one profile.

    Attributes:
        profile_id: of the profile.
        verdicts: in the order they were taken.
    """

    profile_id: str
    verdicts: tuple[Verdict, ...]

    @property
    def status(self) -> Status:
        """The worst verdict: regressed, then inconclusive, then ok."""
        found = {verdict.status for verdict in self.verdicts}
        if "regressed" in found:
            return "regressed"
        return "inconclusive" if "inconclusive" in found else "ok"

    @property
    def exit_code(self) -> int:
        """0, 3 or 6."""
        return EXIT_CODES[self.status]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "verdict": self.status,
            "profile_id": self.profile_id,
            "tiers": [verdict.to_dict() for verdict in self.verdicts],
        }

    def to_text(self, _: object = None) -> str:
        """One line per tier, then the verdict."""
        lines = [f"{v.tier:<10} {v.status:<12} {v.why}" for v in self.verdicts]
        return "\n".join([*lines, self.status])


def run(
    path: Path,
    *,
    replay_only: bool,
    speedup: bool,
    model: str | None,
    data: Path | None,
    budget: str,
    tensor_parallel_size: int | None,
    dtype: str,
    device: str,
    report: Report,
) -> Check:
    """Check a profile.

    Args:
        path: of the profile; its records lie beside it.
        replay_only: stop after tier 1.
        speedup: also run tier 3, on a device of the profile's class.
        model: where the model is, when not at the profile's id.
        data: the workload's file, for a profile tuned on one.
        budget: hard limit on the time of the tiers that measure.
        tensor_parallel_size: GPUs to split the model over; None for as many as the profile's.
        dtype: see `ReferenceEngine.open`; `auto` is the profile's own.
        device: see `ReferenceEngine.open`.
        report: told what takes long.

    Raises:
        ProfileInvalidError: it cannot be read.
        ProfileMismatchError: the engine at hand runs another model, dtype or device.
        WorkloadError: the recorded prompts cannot be made again here.
    """
    profile = load_profile(path)
    replayed = replay_decisions(profile, path.parent)
    if replay_only or replayed.status != "ok":
        return Check(profile_id=profile.profile_id, verdicts=(replayed,))
    return Check(
        profile_id=profile.profile_id,
        verdicts=(
            replayed,
            *_measure(
                profile,
                path.parent,
                speedup=speedup,
                model=model,
                data=data,
                budget_s=parse_duration_s(budget),
                tensor_parallel_size=tensor_parallel_size,
                dtype=dtype,
                device=device,
                report=report,
            ),
        ),
    )


def _measure(
    profile: Profile,
    folder: Path,
    *,
    speedup: bool,
    model: str | None,
    data: Path | None,
    budget_s: float,
    tensor_parallel_size: int | None,
    dtype: str,
    device: str,
    report: Report,
) -> list[Verdict]:
    from vegas_tune.recheck import check_acceptance, check_speedup

    recorded = profile.match.model
    name = model or recorded.id
    if name is None or name == WILDCARD or profile.workload is None:
        raise UsageError(
            "the profile does not say which model and text it was measured with, so acceptance "
            "cannot be measured again.",
            hint="Use --replay-only.",
        )
    if dtype == "auto" and recorded.dtype not in (None, WILDCARD):
        dtype = str(recorded.dtype)
    engine, workload = _open(
        profile,
        profile.workload,
        name,
        data=data,
        tensor_parallel_size=tensor_parallel_size,
        dtype=dtype,
        device=device,
        report=report,
    )
    try:
        findings = match_profile(profile, engine.info)
        # Acceptance hardly depends on the machine; only tier 3 needs the profile's own device.
        raise_on_hard(f for f in findings if speedup or not f.field.startswith("device."))
        verdicts = [check_acceptance(folder, engine, workload.blocks, budget_s=budget_s)]
        if speedup:
            verdicts.append(check_speedup(folder, engine, workload.blocks, budget_s=budget_s))
        return verdicts
    finally:
        engine.close()


def _open(
    profile: Profile,
    described: Description,
    model: str,
    *,
    data: Path | None,
    tensor_parallel_size: int | None,
    dtype: str,
    device: str,
    report: Report,
) -> tuple[Engine, Workload]:
    """The engine to measure on, and the recorded text made again.

    A profile of vLLM is checked on vLLM where that runs; acceptance on any engine.
    """
    settings = _settings(profile)
    backend, reason = "reference", f"reference engine: the profile's is {profile.backend}"
    if profile.backend == "vllm":
        backend, reason = choose_backend()
    report(f"backend: {backend}")
    if tensor_parallel_size is None:
        recorded = profile.match.device.tp
        tensor_parallel_size = recorded if backend == "vllm" and isinstance(recorded, int) else 1
    check_split(tensor_parallel_size, backend, reason)
    if backend == "vllm":
        check_gpus(tensor_parallel_size)
        checkpoint = find_checkpoint(model, dtype=dtype, report=report)
        workload = workload_from_description(
            described.to_facts(),
            checkpoint.tokenizer,
            data,
            max_model_len=checkpoint.facts.get("max_model_len"),
        )
        capacity = Capacity.of(
            workload.blocks,
            gammas=[config.num_speculative_tokens for config in settings],
            ratios=[config.sparsity_ratio for config in settings],
            config=profile.selected.default,
            tensor_parallel_size=tensor_parallel_size,
        )
        return open_vllm(checkpoint, capacity, report=report), workload
    engine, _ = open_backend(
        "reference",
        model=model,
        max_num_speculative_tokens=max(config.num_speculative_tokens for config in settings),
        dtype=dtype,
        device=device,
        report=report,
    )
    try:
        workload = workload_from_description(
            described.to_facts(),
            engine.tokenizer,
            data,
            max_model_len=engine.info.model.get("max_model_len"),
        )
    except BaseException:
        engine.close()
        raise
    return engine, workload


def _settings(profile: Profile) -> list[SpeculationConfig]:
    """Every setting of the profile that a tier may want to run again; one that drafts is sure."""
    points = (*profile.curves.gamma, *profile.curves.refine, *profile.curves.validation)
    default = profile.selected.default
    return [
        default,
        *(
            default.replace(
                num_speculative_tokens=point.num_speculative_tokens,
                sparsity_ratio=point.sparsity_ratio,
            )
            for point in points
            if point.num_speculative_tokens
        ),
    ]
