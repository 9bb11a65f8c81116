"""What a comparison runs on: an engine with its workload, one plan per method, a folder.

An engine that grows is opened first and asked for its tokenizer. vLLM is sized for its workload at
the start, so the prompts come first; what a user has today, vLLM without the plugin, is another
engine, measured before and after, and so is each of vLLM's own methods, measured before.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vegas_runtime.backend import (
    find_checkpoint,
    open_backend,
    open_vllm,
    refusal_by_vllm,
    resolve_backend,
    slowed_on_vllm,
)
from vegas_runtime.errors import BackendError, ConfigError, UsageError
from vegas_runtime.protocol import Capacity, Engine, StockMethod
from vegas_tune.methods import Method, slug
from vegas_tune.plan import Plan
from vegas_tune.request import SweepRequest
from vegas_tune.split import check_gpus
from vegas_tune.tune import plan_sweep, run_folder, usable_ratios
from vegas_tune.workload import Workload, build_workload

if TYPE_CHECKING:
    from vegas_runtime.vllm_plugin.engine import VllmEngine
    from vegas_tune.progress import SweepProgress
    from vegas_tune.stock import StockArm
    from vegas_tune.stock_methods import OwnMethod, OwnResult


@dataclass(frozen=True, kw_only=True)
class Bed:
    """Everything to measure with and on.

    Attributes:
        engine: configured to every method in turn.
        workload: its prompts.
        plans: by method name, of the methods that the engine runs.
        folder: of the run; no other process uses it.
        opened_s: when opening the engine began, `time.monotonic`.
        backend_reason: which engine was taken, and why.
        stock: the engine without the plugin; None where there is none. Its second half is
            measured when the bed is left.
        refused: by method name, why the engine does not run it.
        slowed: by method name, what the engine cannot do at full speed yet.
        own: vLLM's own methods, measured on engines of their own.
    """

    engine: Engine
    workload: Workload
    plans: Mapping[str, Plan]
    folder: Path
    opened_s: float
    backend_reason: str
    stock: StockArm | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    slowed: Mapping[str, str] = field(default_factory=dict)
    own: tuple[OwnResult, ...] = ()


def open_bed(
    sweep: SweepRequest,
    methods: tuple[Method, ...],
    own: tuple[OwnMethod, ...],
    progress: SweepProgress,
) -> AbstractContextManager[Bed]:
    """Open the engine that was asked for, for these methods.

    Args:
        sweep: what every method's tuning has in common.
        methods: that select KV entries.
        own: vLLM's own methods, asked for as well.
        progress: told what goes on.

    Raises:
        UsageError: a replay, which holds no text.
        ConfigError: a method that no engine has, or none that this engine runs.
        VegasError: as opening an engine and making a workload raise.
    """
    backend, reason = resolve_backend(sweep.backend)
    if backend == "replay":
        raise UsageError("a replay holds no text, so methods cannot be compared on it.")
    progress.note(f"backend: {reason}")
    make = _on_vllm if backend == "vllm" else _on_reference
    return make(sweep, methods, own, progress, reason)


@contextmanager
def _on_reference(
    sweep: SweepRequest,
    methods: tuple[Method, ...],
    own: tuple[OwnMethod, ...],
    progress: SweepProgress,
    reason: str,
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
        for plan in plans.values():
            _try(engine, plan)
        lacking = "it is a method of vLLM's own, and this is the reference engine"
        with _folder(sweep, plans, own, progress) as folder:
            yield Bed(
                engine=engine,
                workload=workload,
                plans=plans,
                folder=folder,
                opened_s=opened_s,
                backend_reason=reason,
                refused={one.name: lacking for one in own},
            )
    finally:
        engine.close()


@contextmanager
def _on_vllm(
    sweep: SweepRequest,
    methods: tuple[Method, ...],
    own: tuple[OwnMethod, ...],
    progress: SweepProgress,
    reason: str,
) -> Iterator[Bed]:
    from vegas_tune.record_folder import RecordFolder
    from vegas_tune.stock import StockArm
    from vegas_tune.stock_methods import MAX_GAMMAS, OwnMethods

    refused = {method.name: refusal_by_vllm(method.base) for method in methods}
    refused = {name: why for name, why in refused.items() if why}
    served = tuple(method for method in methods if method.name not in refused)
    if not served:
        raise _none_served(refused)
    check_gpus(sweep.tensor_parallel_size)
    checkpoint = find_checkpoint(sweep.model, dtype=sweep.dtype, report=progress.waiting)
    own = tuple(_with_folder(one, sweep, progress) for one in own)
    workload = build_workload(
        sweep.spec, checkpoint.tokenizer, max_model_len=checkpoint.facts.get("max_model_len")
    )
    plans = _plans(sweep, served, checkpoint.facts, workload)
    any_plan = next(iter(plans.values()))
    capacity = capacity_for(list(plans.values()), workload)

    def start(*, is_stock: bool, drafting: StockMethod | None = None) -> VllmEngine:
        return open_vllm(
            checkpoint, capacity, is_stock=is_stock, drafting=drafting, report=progress.waiting
        )

    with _folder(sweep, plans, own, progress) as folder:
        store = RecordFolder(folder / "stock")
        stock = StockArm(any_plan, workload.blocks, store, lambda: start(is_stock=True), progress)
        stock.measure("before")
        arms = OwnMethods(
            any_plan,
            workload.blocks,
            lambda one: RecordFolder(folder / "vllm" / slug(one.name)),
            lambda drafting: start(is_stock=True, drafting=drafting),
            progress,
        )
        if starting := [one.name for one in own if not one.reason]:
            progress.note(
                f"vLLM's own {', '.join(starting)}: up to {MAX_GAMMAS} engine starts each, beyond "
                "the budget"
            )
        results = tuple(arms.measure(one) for one in own)
        opened_s = time.monotonic()
        engine = start(is_stock=False)
        try:
            refused |= _refused(engine, plans)
            plans = {name: plan for name, plan in plans.items() if name not in refused}
            if not plans:
                raise _none_served(refused)
            for name, why in refused.items():
                progress.note(f"WARNING: {name} is not measured: {why}")
            yield Bed(
                engine=engine,
                workload=workload,
                plans=plans,
                folder=folder,
                opened_s=opened_s,
                backend_reason=reason,
                stock=stock,
                refused=refused,
                slowed={name: slowed_on_vllm(plan.base) for name, plan in plans.items()},
                own=results,
            )
        finally:
            engine.close()
        stock.measure("after")
        for failure in stock.failures:
            progress.note(f"WARNING: a pass of stock vLLM failed: {failure.reason}")


def capacity_for(plans: Sequence[Plan], workload: Workload) -> Capacity:
    """What one plugin engine must be able to hold to run all of these methods.

    Args:
        plans: of the methods; but for the method they are the same.
        workload: what they are measured on.
    """
    # An engine started to collect scores also runs what needs none; the reverse does not hold.
    # Switches that the plugin may refuse are left for the running engine to refuse.
    bases = [plan.base for plan in plans]
    first = min(
        bases,
        key=lambda base: (
            base.algorithm != "vegas",
            base.metric != "weight" or base.rows in ("last_accepted", "accepted_only"),
        ),
    )
    return Capacity.of(
        workload.blocks,
        gammas=plans[0].gammas,
        ratios=plans[0].ratios,
        config=first,
        also=bases,
        tensor_parallel_size=plans[0].tensor_parallel_size,
    )


def _none_served(refused: Mapping[str, str]) -> ConfigError:
    reasons = " ".join(f"{name}: {why}" for name, why in refused.items())
    return ConfigError(
        f"of {len(refused)} methods that select KV entries vLLM runs none here. {reasons}",
        hint="The reference engine runs every method: --backend reference.",
    )


def _with_folder(one: OwnMethod, sweep: SweepRequest, progress: SweepProgress) -> OwnMethod:
    """A draft model where it lies on this machine; it may be named as any model may."""
    if one.name != "draft_model" or one.reason:
        return one
    found = find_checkpoint(one.model, dtype=sweep.dtype, report=progress.waiting)
    return replace(one, model=str(found.folder))


def _plans(
    sweep: SweepRequest, methods: tuple[Method, ...], model: Mapping[str, Any], workload: Workload
) -> dict[str, Plan]:
    ratios = usable_ratios(sweep, workload)
    return {
        method.name: plan_sweep(replace(sweep, base=method.base), model, workload.blocks, ratios)
        for method in methods
    }


def _try(engine: Engine, plan: Plan) -> None:
    """A method the engine lacks is said before anything is prefilled."""
    engine.configure(plan.config(plan.gammas[-1], plan.ratios[0]))


def _refused(engine: Engine, plans: Mapping[str, Plan]) -> dict[str, str]:
    """Methods that a running engine does not take, each with its sentence."""
    refused = {}
    for name, plan in plans.items():
        try:
            _try(engine, plan)
        except (BackendError, ConfigError) as error:
            refused[name] = error.message
    return refused


@contextmanager
def _folder(
    sweep: SweepRequest,
    plans: Mapping[str, Plan],
    own: Sequence[OwnMethod],
    progress: SweepProgress,
) -> Iterator[Path]:
    from vegas_tune.study import check_plan, folder_lock, keep_plan

    asked = [[name, plan.identity] for name, plan in plans.items()]
    asked += [[one.name, one.model] for one in own]
    identity = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
    folder = run_folder(sweep, identity, prefix="compare-")
    progress.note(f"run folder: {folder}")
    with folder_lock(folder):
        # Before an engine starts, and before stock's passes are taken for this comparison's.
        own_folders = {name: tuning_folder(folder, name) for name in plans}
        for name, path in own_folders.items():
            check_plan(path, plans[name])
        for name, path in own_folders.items():
            path.mkdir(parents=True, exist_ok=True)
            keep_plan(path, plans[name])
        yield folder


def tuning_folder(folder: Path, method: str) -> Path:
    """Where the tuning of one method is kept."""
    return folder / "tuning" / slug(method)
