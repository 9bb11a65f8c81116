"""What a comparison runs on: an engine with its workload, one plan per method, a folder.

An engine that grows is opened first and asked for its tokenizer. vLLM is sized for its workload at
the start, so the prompts come first; what a user has today, vLLM without the plugin, is another
engine, measured before and after.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vegas_runtime.backend import (
    Capacity,
    Engine,
    find_checkpoint,
    open_backend,
    open_vllm,
    resolve_backend,
)
from vegas_runtime.errors import UsageError
from vegas_tune.methods import Method
from vegas_tune.plan import Plan
from vegas_tune.request import SweepRequest
from vegas_tune.tune import plan_sweep, run_folder, usable_ratios
from vegas_tune.workload import Workload, build_workload

if TYPE_CHECKING:
    from vegas_runtime.vllm_plugin.engine import VllmEngine
    from vegas_tune.progress import SweepProgress
    from vegas_tune.stock import StockArm


@dataclass(frozen=True, kw_only=True)
class Bed:
    """Everything to measure with and on.

    Attributes:
        engine: configured to every method in turn.
        workload: its prompts.
        plans: by method name.
        folder: of the run; no other process uses it.
        opened_s: when opening the engine began, `time.monotonic`.
        backend_reason: which engine was taken, and why.
        stock: the engine without the plugin; None where there is none. Its second half is
            measured when the bed is left.
    """

    engine: Engine
    workload: Workload
    plans: Mapping[str, Plan]
    folder: Path
    opened_s: float
    backend_reason: str
    stock: StockArm | None = None


def open_bed(
    sweep: SweepRequest, methods: tuple[Method, ...], progress: SweepProgress
) -> AbstractContextManager[Bed]:
    """Open the engine that was asked for, for these methods.

    Raises:
        UsageError: a replay, which holds no text.
        ConfigError: a method that the engine lacks.
        VegasError: as opening an engine and making a workload raise.
    """
    backend, reason = resolve_backend(sweep.backend)
    if backend == "replay":
        raise UsageError("a replay holds no text, so methods cannot be compared on it.")
    progress.note(f"backend: {reason}")
    make = _on_vllm if backend == "vllm" else _on_reference
    return make(sweep, methods, progress, reason)


@contextmanager
def _on_reference(
    sweep: SweepRequest, methods: tuple[Method, ...], progress: SweepProgress, reason: str
) -> Iterator[Bed]:
    opened_s = time.monotonic()
    engine, _ = open_backend(
        "reference",
        model=sweep.model,
        max_num_speculative_tokens=max(sweep.gammas or (sweep.max_gamma,)),
        dtype=sweep.dtype,
        device=sweep.device,
        report=progress.waiting,
    )
    try:
        workload = build_workload(
            sweep.spec, engine.tokenizer, max_model_len=engine.info.model.get("max_model_len")
        )
        plans = _plans(sweep, methods, engine.info.model, workload)
        _try(engine, plans)
        with _folder(sweep, plans, progress) as folder:
            yield Bed(
                engine=engine,
                workload=workload,
                plans=plans,
                folder=folder,
                opened_s=opened_s,
                backend_reason=reason,
            )
    finally:
        engine.close()


@contextmanager
def _on_vllm(
    sweep: SweepRequest, methods: tuple[Method, ...], progress: SweepProgress, reason: str
) -> Iterator[Bed]:
    from vegas_tune.record_folder import RecordFolder
    from vegas_tune.stock import StockArm

    checkpoint = find_checkpoint(sweep.model, dtype=sweep.dtype, report=progress.waiting)
    workload = build_workload(
        sweep.spec, checkpoint.tokenizer, max_model_len=checkpoint.facts.get("max_model_len")
    )
    plans = _plans(sweep, methods, checkpoint.facts, workload)
    any_plan = next(iter(plans.values()))
    # An engine started to collect scores also runs what needs none; the reverse does not hold.
    scored = [plan.base for plan in plans.values() if plan.base.algorithm == "vegas"]
    capacity = Capacity.of(
        workload.blocks,
        gammas=any_plan.gammas,
        ratios=any_plan.ratios,
        config=scored[0] if scored else any_plan.base,
    )

    def start(*, is_stock: bool) -> VllmEngine:
        return open_vllm(checkpoint, capacity, is_stock=is_stock, report=progress.waiting)

    with _folder(sweep, plans, progress) as folder:
        store = RecordFolder(folder / "stock")
        stock = StockArm(any_plan, workload.blocks, store, lambda: start(is_stock=True), progress)
        stock.measure("before")
        opened_s = time.monotonic()
        engine = start(is_stock=False)
        try:
            _try(engine, plans)
            yield Bed(
                engine=engine,
                workload=workload,
                plans=plans,
                folder=folder,
                opened_s=opened_s,
                backend_reason=reason,
                stock=stock,
            )
        finally:
            engine.close()
        stock.measure("after")
        for failure in stock.failures:
            progress.note(f"WARNING: a pass of stock vLLM failed: {failure.reason}")


def _plans(
    sweep: SweepRequest, methods: tuple[Method, ...], model: Mapping[str, Any], workload: Workload
) -> dict[str, Plan]:
    ratios = usable_ratios(sweep, workload)
    return {
        method.name: plan_sweep(replace(sweep, base=method.base), model, workload.blocks, ratios)
        for method in methods
    }


def _try(engine: Engine, plans: Mapping[str, Plan]) -> None:
    """A method the engine lacks is said before anything is prefilled."""
    for plan in plans.values():
        engine.configure(plan.config(plan.gammas[-1], plan.ratios[0]))


@contextmanager
def _folder(
    sweep: SweepRequest, plans: Mapping[str, Plan], progress: SweepProgress
) -> Iterator[Path]:
    from vegas_tune.study import folder_lock

    text = json.dumps([[name, plan.identity] for name, plan in plans.items()])
    identity = hashlib.sha256(text.encode()).hexdigest()
    folder = run_folder(sweep, identity, prefix="compare-")
    progress.note(f"run folder: {folder}")
    with folder_lock(folder):
        yield folder
