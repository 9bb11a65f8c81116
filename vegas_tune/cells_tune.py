"""`sweep --batch 1,8,32 --context 4k,16k`: one sweep per cell, on one engine, in one profile."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vegas_runtime.backend import (
    find_checkpoint,
    open_backend,
    open_vllm,
    resolve_backend,
)
from vegas_runtime.errors import BudgetSpentError, ConfigError, NoValidTrialError, UsageError
from vegas_runtime.profile import Profile, write_profile
from vegas_runtime.profile_sections import Artifact, Selected
from vegas_runtime.protocol import Capacity, Engine
from vegas_tune.cells import (
    CellAnswer,
    CellKey,
    Measurements,
    dominated_by,
    make_buckets,
    next_cell,
)
from vegas_tune.evidence import RECORDS_NAME, cell_records_name
from vegas_tune.fleet_tune import identity
from vegas_tune.laboratory import Laboratory
from vegas_tune.plan import VALIDATE, Plan, gamma_ladder
from vegas_tune.publish import build_profile, creation_time
from vegas_tune.request import SweepRequest
from vegas_tune.split import check_gpus
from vegas_tune.stock import EngineUse, Side, StockEngine, StockFigures
from vegas_tune.study import RunFolder
from vegas_tune.sweep import SweepResult, run_sweep
from vegas_tune.sweep_outcome import PROFILE_FILE, SweepOutcome, warn_of_gpu, warn_of_stock
from vegas_tune.tune import (
    first_interrupt_finishes,
    plan_sweep,
    run_folder,
    usable_ratios,
)
from vegas_tune.workload import Workload, build_workload

if TYPE_CHECKING:
    from vegas_runtime.protocol import EngineInfo
    from vegas_runtime.vllm_plugin.engine import VllmEngine
    from vegas_tune.progress import SweepProgress

CELLS_FOLDER: Final = "cells"


def run(request: SweepRequest, progress: SweepProgress, *, shares: bool = False) -> SweepOutcome:
    """Tune every cell on one engine, as far as the budget goes; resume what an earlier call left.

    Args:
        request: what to tune; the first of its cells gives the profile's default setting.
        progress: told what goes on.
        shares: whether workers were asked for.

    Raises:
        VegasError: as the exit codes say; of a cell only when it is the first.
        KeyboardInterrupt: interrupted; everything measured is kept.
    """
    if shares:
        raise UsageError(
            "several cells are tuned on one engine, and --workers or --storage was given.",
            hint="Tune cell by cell with several workers, or all cells with one.",
        )
    if request.spec.name != "stdlib":
        raise UsageError(
            f"several cells need prompts of exact length, and `{request.spec.name}` has its own.",
            hint="Use the stdlib workload, or one --batch and no --context.",
        )
    with progress:
        backend, reason = resolve_backend(request.backend)
        progress.note(f"backend: {reason}")
        folder = run_folder(request, identity(request))
        carry_out = _on_vllm if backend == "vllm" else _on_one_engine
        return carry_out(request, progress, folder, reason)


def _on_one_engine(
    request: SweepRequest, progress: SweepProgress, folder: Path, reason: str
) -> SweepOutcome:
    """Cells on an engine that grows with what it is given."""
    opened_s = time.monotonic()
    engine, _ = open_backend(
        request.backend,
        model=request.model,
        max_num_speculative_tokens=_capacity(request).gammas[-1],
        dtype=request.dtype,
        device=request.device,
        capacity=_capacity(request),
        report=progress.waiting,
    )
    try:
        load_s = time.monotonic() - opened_s
        sweeps = CellSweeps(request, progress, folder, engine.tokenizer, engine.info.model)
        sweeps.tune(engine, load_s)
        return sweeps.publish(engine.info, reason)
    finally:
        engine.close()


def _on_vllm(
    request: SweepRequest, progress: SweepProgress, folder: Path, reason: str
) -> SweepOutcome:
    """Cells on one start of vLLM, between two of stock vLLM that measure every cell."""
    check_gpus(request.tensor_parallel_size)
    checkpoint = find_checkpoint(request.model, dtype=request.dtype, report=progress.waiting)
    sweeps = CellSweeps(request, progress, folder, checkpoint.tokenizer, checkpoint.facts)

    def start(*, is_stock: bool) -> VllmEngine:
        return open_vllm(checkpoint, _capacity(request), is_stock=is_stock, report=progress.waiting)

    stock = StockEngine(lambda: start(is_stock=True))
    with stock.session():
        sweeps.measure_stock("before", stock)
    opened_s = time.monotonic()
    engine = start(is_stock=False)
    try:
        sweeps.tune(engine, time.monotonic() - opened_s)
        info = engine.info
    finally:
        engine.close()
    with stock.session():
        sweeps.measure_stock("after", stock)
    return sweeps.publish(info, reason, use=EngineUse.of(engine, stock))


def _capacity(request: SweepRequest) -> Capacity:
    """What the largest of the cells takes, and with it all of them."""
    gammas = request.gammas or gamma_ladder(request.max_gamma)
    longest = max(cell.context for cell in request.cells) + request.spec.max_new_tokens
    return Capacity(
        batch_size=max(cell.batch for cell in request.cells),
        max_model_len=longest,
        gammas=(0, *sorted(set(gammas) - {0})),
        max_ratio=max(request.ratios),
        config=request.base,
        tensor_parallel_size=request.tensor_parallel_size,
    )


class CellSweeps:
    """The sweeps of one call: `tune`, then `publish`.

    Args:
        request: what to tune.
        progress: told what goes on.
        folder: of the run; each cell has one of its own in it.
        tokenizer: the model's.
        model: facts of it.
    """

    def __init__(
        self,
        request: SweepRequest,
        progress: SweepProgress,
        folder: Path,
        tokenizer: Any,
        model: Mapping[str, Any],
    ) -> None:
        self._request = request
        self._progress = progress
        self._folder = folder
        self._tokenizer = tokenizer
        self._model = model
        self._workloads: dict[CellKey, Workload] = {}
        self._spent_s = 0.0
        self._load_s = 0.0
        self._answers: list[CellAnswer] = []
        self._results: dict[CellKey, SweepResult] = {}
        self._stock: dict[CellKey, StockFigures] = {}

    def tune(self, engine: Engine, load_s: float = 0.0) -> None:
        """Sweep all cells, best first, as far as the budget goes.

        Args:
            engine: open, for all of them.
            load_s: time that opening took; charged to the first cell that measures.
        """
        self._load_s = load_s
        measured: dict[CellKey, Measurements] = {}
        left = list(self._request.cells)
        while left:
            cell = next_cell(left, measured)
            left.remove(cell)
            smaller = dominated_by(cell, self._answers)
            if smaller is not None:
                why = f"batch {smaller.batch} at context {smaller.context} ran out of memory."
                self._answers.append(CellAnswer(cell=cell, status="dropped", why=why))
                continue
            self._progress.note(f"cell batch {cell.batch}, context {cell.context}")
            try:
                result = self._sweep(cell, engine, 1 + len(left))
            except (NoValidTrialError, BudgetSpentError, ConfigError) as error:
                # A cell that does not fit is refused by vLLM's engine before anything is measured.
                if not self._results:
                    raise
                self._answers.append(CellAnswer(cell=cell, status="failed", why=error.message))
                continue
            self._results[cell] = result
            measured[cell] = [(one.point.config, one.figures) for one in result.measured()]
            self._answers.append(_answer(cell, result))

    def measure_stock(self, side: Side, stock: StockEngine) -> None:
        """Measure stock vLLM in every cell, afterwards only in those with an answer.

        Args:
            side: `before` or `after` the sweeps.
            stock: the engine; started when something is missing.
        """
        for cell in self._request.cells if side == "before" else list(self._results):
            self._progress.note(f"cell batch {cell.batch}, context {cell.context}")
            plan, blocks = self._plan(cell, self._request.budget_s), self._workload(cell).blocks
            with RunFolder.open(self._cell_folder(cell), plan) as store:
                figures = self._stock.get(cell)
                open_lab = functools.partial(stock.lab, plan, blocks, store)
                if figures is None:
                    figures = StockFigures(plan, store, open_lab, self._progress)
                else:
                    figures.go_on(store, open_lab)
                try:
                    with first_interrupt_finishes(figures, self._progress):
                        figures.measure(side)
                except ConfigError as error:
                    self._progress.note(f"stock vLLM cannot hold this cell: {error.message}")
                    continue
            self._stock[cell] = figures

    def publish(
        self, info: EngineInfo, reason: str, *, use: EngineUse | None = None
    ) -> SweepOutcome:
        """Pack the evidence and write the profile.

        Args:
            info: of the engine that measured.
            reason: which engine was taken, and why.
            use: what it took of the machine, where that is known.
        """
        artifacts = self._pack()
        default, result = next(iter(self._results.items()))
        workload, stock = self._workload(default), self._stock.get(default)
        path = self._folder / PROFILE_FILE
        first = {RECORDS_NAME: artifacts[RECORDS_NAME]}
        with RunFolder.open(self._cell_folder(default), result.plan) as store:
            rejected = store.rejected
        profile = with_cells(
            build_profile(
                result,
                info,
                workload.blocks,
                workload.describe(),
                artifacts=first,
                created=creation_time(path, artifacts),
                rejected=rejected,
                stock=stock,
                use=use,
            ),
            [self._published(answer) for answer in self._answers],
            artifacts,
            num_output_tokens=self._request.spec.max_new_tokens,
        )
        write_profile(profile, path)
        for figures in self._stock.values():
            warn_of_stock(figures, self._progress)
        warn_of_gpu(profile, self._progress)
        return SweepOutcome(
            result=result, profile=profile, path=path, backend_reason=reason, use=use
        )

    # ------------------------------------------------------------------ one cell

    def _cell_folder(self, cell: CellKey) -> Path:
        return self._folder / CELLS_FOLDER / cell.name

    def _asked(self, cell: CellKey, budget_s: float) -> SweepRequest:
        """What is asked for, as a request of this cell alone."""
        spec = self._request.spec
        return replace(
            self._request,
            spec=replace(spec, batch_size=cell.batch, context_len=cell.context),
            # As many steps as in the first cell.
            tokens=max(1, self._request.tokens * cell.batch // spec.batch_size),
            budget_s=budget_s,
        )

    def _workload(self, cell: CellKey) -> Workload:
        if cell not in self._workloads:
            spec = self._asked(cell, 1.0).spec
            limit = self._model.get("max_model_len")
            self._workloads[cell] = build_workload(spec, self._tokenizer, max_model_len=limit)
        return self._workloads[cell]

    def _plan(self, cell: CellKey, budget_s: float) -> Plan:
        request, workload = self._asked(cell, budget_s), self._workload(cell)
        ratios = usable_ratios(request, workload)
        return plan_sweep(request, self._model, workload.blocks, ratios)

    def _sweep(self, cell: CellKey, engine: Engine, num_left: int) -> SweepResult:
        """One cell's sweep, with an equal part of what time is left."""
        budget_s = max(self._request.budget_s - self._spent_s, 1.0) / num_left
        plan, blocks = self._plan(cell, budget_s), self._workload(cell).blocks
        with RunFolder.open(self._cell_folder(cell), plan) as store:
            lab = Laboratory(plan, engine, blocks, store=store, load_s=self._load_s)
            try:
                with first_interrupt_finishes(lab, self._progress):
                    return run_sweep(plan, lab, self._progress)
            finally:
                self._spent_s += lab.spent_s
                if lab.num_fresh:
                    self._load_s = 0.0

    def _pack(self) -> dict[str, str]:
        """The records of every cell that was swept, beside the profile: hashes by file name."""
        artifacts = {}
        for cell, result in self._results.items():
            with RunFolder.open(self._cell_folder(cell), result.plan) as store:
                name = self._records_name(cell)
                artifacts[name] = store.pack(self._folder / name)
        return artifacts

    def _records_name(self, cell: CellKey) -> str:
        return RECORDS_NAME if cell == next(iter(self._results)) else cell_records_name(*cell)

    def _published(self, answer: CellAnswer) -> CellAnswer:
        """An answer with what was found after its sweep: its file, and the ratio to stock vLLM."""
        result = self._results.get(answer.cell)
        if result is None:
            return answer
        stock, speedup = self._stock.get(answer.cell), None
        if stock is not None and result.selected.num_speculative_tokens:
            own = [m for m in result.measured(VALIDATE) if m.point.config == result.selected]
            speedup = stock.speedup(own)
        return replace(
            answer,
            records=self._records_name(answer.cell),
            speedup_vs_stock=None if speedup is None else speedup.to_dict(),
        )


def _answer(cell: CellKey, result: SweepResult) -> CellAnswer:
    speedup = None
    if result.validation is not None and result.selected in result.validation.speedups:
        speedup = result.validation.speedups[result.selected].to_dict()
    return CellAnswer(
        cell=cell,
        status=result.status,
        why=result.reason,
        config=result.selected,
        speedup=speedup,
    )


def with_cells(
    profile: Profile,
    answers: Sequence[CellAnswer],
    artifacts: dict[str, str],
    *,
    num_output_tokens: int,
) -> Profile:
    """The profile of the first cell with what was found for all of them."""
    values: dict[str, Any] = profile.to_dict()
    values.pop("profile_id")
    selected = Selected.model_validate(
        {
            **values["selected"],
            "buckets": make_buckets(answers, num_output_tokens=num_output_tokens),
        }
    )
    values["selected"] = selected.model_dump(mode="json", by_alias=True, exclude_none=True)
    protocol = values["protocol"]
    protocol["other"] = protocol.get("other", {}) | {
        "cells": [answer.to_dict() for answer in answers]
    }
    values["artifacts"] = [
        Artifact(name=name, sha256=sha).model_dump() for name, sha in sorted(artifacts.items())
    ]
    return Profile.model_validate(values).seal()
