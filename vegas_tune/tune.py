"""`sweep` from end to end: engine, workload, plan, laboratory, sweep, profile."""

from __future__ import annotations

import re
import shlex
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Protocol

from vegas_runtime.backend import open_backend, resolve_backend
from vegas_runtime.errors import UsageError
from vegas_runtime.protocol import PromptBlock
from vegas_tune.datasets import data_files
from vegas_tune.plan import Plan, make_plan
from vegas_tune.request import SERVED, SweepRequest
from vegas_tune.split import check_gpus
from vegas_tune.sweep_outcome import SweepOutcome, publish_run
from vegas_tune.workload import Workload, active_ratios, build_workload, check_budget_floor

if TYPE_CHECKING:
    from vegas_runtime.vllm_plugin.engine import VllmEngine
    from vegas_tune.progress import SweepProgress

RUNS_FOLDER: Final = Path("vegas-runs")
# Facts of a model that make another plan of the same command line.
_MODEL_IDENTITY: Final = ("id", "revision", "config_sha256", "weights_sha256", "dtype", "quant")


class Stoppable(Protocol):
    """What can be asked to stop once the measurement in progress is kept."""

    def stop_soon(self) -> None:
        """Raise KeyboardInterrupt then."""


def run(request: SweepRequest, progress: SweepProgress) -> SweepOutcome:
    """Carry out a sweep, resuming what an earlier call left.

    Raises:
        VegasError: as the exit codes say.
        KeyboardInterrupt: interrupted; everything measured is kept.
    """
    with progress:
        return _run(request, progress)


def _run(request: SweepRequest, progress: SweepProgress) -> SweepOutcome:
    backend, reason = resolve_backend(request.backend)
    if backend == "replay":
        raise UsageError(
            "a replay holds no text, so nothing can be swept on it from here.",
            hint="`check` replays a profile's own records.",
        )
    progress.note(f"backend: {reason}")
    carry_out = _on_vllm if backend == "vllm" else _on_one_engine
    return carry_out(request, progress, reason)


def _on_one_engine(request: SweepRequest, progress: SweepProgress, reason: str) -> SweepOutcome:
    """Sweep an engine that grows with what it is given: opened first, asked for its tokenizer."""
    from vegas_tune.laboratory import Laboratory
    from vegas_tune.study import RunFolder
    from vegas_tune.sweep import run_sweep

    if request.spec.path is not None:
        # A file that is not there is said before a model is loaded.
        data_files(request.spec.name, request.spec.path)
    opened_s = time.monotonic()
    engine, _ = open_backend(
        "reference",
        model=request.model,
        max_num_speculative_tokens=max(request.gammas or (request.max_gamma,)),
        dtype=request.dtype,
        device=request.device,
        report=progress.waiting,
    )
    try:
        workload = build_workload(
            request.spec, engine.tokenizer, max_model_len=engine.info.model.get("max_model_len")
        )
        blocks = workload.blocks
        plan = plan_sweep(request, engine.info.model, blocks, usable_ratios(request, workload))
        folder = run_folder(request, plan.identity)
        progress.note(f"run folder: {folder}")
        with RunFolder.open(folder, plan) as store:
            load_s = time.monotonic() - opened_s
            lab = Laboratory(plan, engine, blocks, store=store, load_s=load_s)
            with first_interrupt_finishes(lab, progress):
                result = run_sweep(plan, lab, progress)
            return publish_run(
                result, engine.info, blocks, workload.describe(), store, reason, progress
            )
    finally:
        engine.close()


def _on_vllm(request: SweepRequest, progress: SweepProgress, reason: str) -> SweepOutcome:
    """Sweep vLLM: sized for the workload, started once, stock vLLM measured on both sides of it."""
    from vegas_runtime.backend import find_checkpoint, open_vllm
    from vegas_runtime.protocol import Capacity
    from vegas_tune.laboratory import Laboratory
    from vegas_tune.stock import EngineUse, StockArm
    from vegas_tune.study import RunFolder
    from vegas_tune.sweep import run_sweep

    check_gpus(request.tensor_parallel_size)
    checkpoint = find_checkpoint(request.model, dtype=request.dtype, report=progress.waiting)
    workload = build_workload(
        request.spec, checkpoint.tokenizer, max_model_len=checkpoint.facts.get("max_model_len")
    )
    blocks = workload.blocks
    plan = plan_sweep(request, checkpoint.facts, blocks, usable_ratios(request, workload))
    capacity = Capacity.of(
        blocks,
        gammas=plan.gammas,
        ratios=plan.ratios,
        config=plan.base,
        tensor_parallel_size=plan.tensor_parallel_size,
    )
    folder = run_folder(request, plan.identity)
    progress.note(f"run folder: {folder}")

    def start(*, is_stock: bool) -> VllmEngine:
        return open_vllm(checkpoint, capacity, is_stock=is_stock, report=progress.waiting)

    with RunFolder.open(folder, plan) as store:
        stock = StockArm(plan, blocks, store, lambda: start(is_stock=True), progress)
        with first_interrupt_finishes(stock, progress):
            stock.measure("before")
        opened_s = time.monotonic()
        engine = start(is_stock=False)
        try:
            load_s = time.monotonic() - opened_s
            lab = Laboratory(plan, engine, blocks, store=store, load_s=load_s)
            with first_interrupt_finishes(lab, progress):
                result = run_sweep(plan, lab, progress)
            info = engine.info
        finally:
            engine.close()
        with first_interrupt_finishes(stock, progress):
            stock.measure("after")
        return publish_run(
            result,
            info,
            blocks,
            workload.describe(),
            store,
            reason,
            progress,
            stock=stock,
            use=EngineUse.of(engine, stock.engine),
        )


def usable_ratios(request: SweepRequest, workload: Workload) -> tuple[float, ...]:
    """The candidate ratios that the floor leaves distinct.

    Raises:
        WorkloadError: too few are left for tuning the ratio to mean anything.
    """
    ratios, floor = request.ratios, request.base.min_tokens
    check_budget_floor(workload, floor, ratios, num_speculative_tokens=request.max_gamma)
    return active_ratios(workload, floor, ratios, num_speculative_tokens=request.max_gamma)


def plan_sweep(
    request: SweepRequest,
    model: Mapping[str, Any],
    blocks: Sequence[PromptBlock],
    ratios: Sequence[float],
) -> Plan:
    """The plan of a sweep as asked for, over these blocks and ratios."""
    return make_plan(
        request.base,
        blocks,
        budget_s=request.budget_s,
        tokens=request.tokens,
        max_num_speculative_tokens=request.max_gamma,
        ratios=ratios,
        gammas=request.gammas,
        seed=request.seed,
        rounds=request.rounds,
        looks=request.looks,
        stop_precision=request.stop_precision,
        num_finalists=request.num_finalists,
        preparation_share=request.preparation_share,
        shares_after_preparation=True,
        tensor_parallel_size=request.tensor_parallel_size,
        model={key: str(model[key]) for key in _MODEL_IDENTITY if key in model},
    )


def run_folder(request: SweepRequest, identity: str, *, prefix: str = "") -> Path:
    """The run's folder: the one given, or one named for model and plan; `--new` takes a free one.

    Args:
        request: the options given.
        identity: hash of what is measured.
        prefix: in front of the name.

    Raises:
        UsageError: `--new` with a folder that holds a run already.
    """
    if request.run_dir is not None:
        if request.new and request.run_dir.exists() and any(request.run_dir.iterdir()):
            raise UsageError(
                f"--new was asked for, but {request.run_dir} holds a run already.",
                hint="Name another folder, or leave --new out to go on there.",
            )
        return request.run_dir
    slug = re.sub(r"[^a-z0-9.]+", "-", Path(request.model).name.lower()).strip("-")
    base = RUNS_FOLDER / f"{prefix}{slug}-{identity[:8]}"
    number = 1
    while _numbered(base, number + 1).exists():
        number += 1
    if request.new and _numbered(base, number).exists():
        number += 1
    return _numbered(base, number)


def _numbered(base: Path, number: int) -> Path:
    return base if number == 1 else base.with_name(f"{base.name}-{number}")


@contextmanager
def first_interrupt_finishes(lab: Stoppable, progress: SweepProgress) -> Iterator[None]:
    """Ctrl-C once finishes the measurement in progress; twice stops at once."""

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        lab.stop_soon()
        progress.note(
            "finishing this measurement; Ctrl-C again stops at once. "
            f"Go on later with: {progress.resume_command}"
        )

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def describe(request: SweepRequest) -> dict[str, Any]:
    """What a sweep would do; loads no model and measures nothing.

    Prompts of exact length need no tokenizer to be counted; those from files do, so for them
    only the plan's rules are shown.
    """
    length = request.spec.context_len or SERVED.context
    prompts = request.spec.batch_size + request.spec.num_waiting
    blocks = [
        PromptBlock(
            index=index,
            prompts=((0,) * length,) * prompts,
            batch_size=request.spec.batch_size,
            max_new_tokens=request.spec.max_new_tokens,
            sampling=request.spec.sampling,
        )
        for index in range(request.spec.num_blocks)
    ]
    workload = Workload(spec=request.spec, blocks=tuple(blocks), replays=1, mix={}, source={})
    active = usable_ratios(request, workload)
    plan = plan_sweep(request, {}, blocks, active)
    described = plan.describe(prompt_tokens=length * prompts * len(blocks))
    return {
        "model": request.model,
        "workload": request.spec.to_dict(),
        "prompt_tokens": length * prompts * len(blocks),
        "min_tokens": request.base.min_tokens,
        "inactive_ratios": sorted(set(request.ratios) - set(active)),
        "backend": resolve_backend(request.backend)[0],
        "tensor_parallel_size": plan.tensor_parallel_size,
        **described,
    }


def describe_text(described: Mapping[str, Any]) -> str:
    """The plan for a person."""
    workload = described["workload"]
    lines = [
        f"model {described['model']}",
        f"workload {workload['name']}: {workload['num_blocks']} blocks of "
        f"{workload['batch_size']} running and {workload['num_waiting']} waiting requests, "
        f"{described['prompt_tokens']} prompt tokens to prefill once",
        f"sparsity ratios {', '.join(f'{ratio:g}' for ratio in described['ratios'])}",
        f"gammas {', '.join(map(str, described['num_speculative_tokens']))}",
    ]
    inactive = described["inactive_ratios"]
    if inactive:
        lines.append(
            f"left out, below the floor of {described['min_tokens']} tokens: "
            + ", ".join(f"{ratio:g}" for ratio in inactive)
        )
    lines += [
        f"step {step['step']}: {step['fewest']} to {step['most']} measurements of "
        f"{step['tokens']} tokens"
        for step in described["steps"]
    ]
    lines += [
        f"time: at most {described['budget_s']:.0f} s (the budget), model load and prefill "
        "included; stops earlier when the decision is settled",
        f"disk: at most {described['disk_bytes'] / 1e6:.1f} MB",
    ]
    if described["backend"] == "vllm":
        size = described["tensor_parallel_size"]
        lines.append(
            "engine starts: one of vLLM with the plugin, within the budget, and one more each time "
            "the sweep is resumed; stock vLLM before and after, beyond it"
            + (f"; each on {size} GPUs" if size > 1 else "")
        )
    return "\n".join(lines)


def resume_command(arguments: Sequence[str]) -> str:
    """The command that goes on where this one stops: the same one, without `--new`."""
    words = [Path(arguments[0]).name, *(word for word in arguments[1:] if word != "--new")]
    return shlex.join(words)
