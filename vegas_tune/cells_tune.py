"""`sweep --batch 1,8,32 --context 4k,16k`: one sweep per cell, on one engine, in one profile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vegas_runtime.backend import Capacity, Engine, open_backend
from vegas_runtime.errors import BudgetSpentError, NoValidTrialError, UsageError, VegasError
from vegas_runtime.profile import Profile, write_profile
from vegas_runtime.profile_sections import Artifact, Selected
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
from vegas_tune.plan import gamma_ladder
from vegas_tune.publish import build_profile, creation_time
from vegas_tune.request import SweepRequest
from vegas_tune.study import RunFolder
from vegas_tune.sweep import SweepResult, run_sweep
from vegas_tune.tune import (
    PROFILE_FILE,
    SweepOutcome,
    first_interrupt_finishes,
    plan_sweep,
    run_folder,
    usable_ratios,
)
from vegas_tune.workload import Workload, build_workload

if TYPE_CHECKING:
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
        opened_s = time.monotonic()
        engine, reason = _open(request, progress)
        try:
            progress.note(f"backend: {reason}")
            load_s = time.monotonic() - opened_s
            folder = run_folder(request, identity(request))
            sweeps = CellSweeps(request, progress, engine, folder, load_s)
            return sweeps.run(request.cells, reason)
        finally:
            engine.close()


def _open(request: SweepRequest, progress: SweepProgress) -> tuple[Engine, str]:
    """One engine for the largest of the cells, and with it for all."""
    gammas = request.gammas or gamma_ladder(request.max_gamma)
    longest = max(cell.context for cell in request.cells) + request.spec.max_new_tokens
    return open_backend(
        request.backend,
        model=request.model,
        max_num_speculative_tokens=max(gammas),
        dtype=request.dtype,
        device=request.device,
        capacity=Capacity(
            batch_size=max(cell.batch for cell in request.cells),
            max_model_len=longest,
            gammas=(0, *sorted(set(gammas) - {0})),
            max_ratio=max(request.ratios),
            config=request.base,
        ),
        report=progress.waiting,
    )


class CellSweeps:
    """The sweeps of one call.

    Args:
        request: what to tune.
        progress: told what goes on.
        engine: open, for all of them.
        folder: of the run; each cell has one of its own in it.
        load_s: time that opening took; charged to the first cell.
    """

    def __init__(
        self,
        request: SweepRequest,
        progress: SweepProgress,
        engine: Engine,
        folder: Path,
        load_s: float = 0.0,
    ) -> None:
        self._request = request
        self._progress = progress
        self._engine = engine
        self._folder = folder
        self._load_s = load_s
        self._spent_s = 0.0
        self._artifacts: dict[str, str] = {}

    def run(self, cells: Sequence[CellKey], reason: str) -> SweepOutcome:
        """All cells, best first; then the profile."""
        answers: list[CellAnswer] = []
        measured: dict[CellKey, Measurements] = {}
        left = list(cells)
        default: tuple[SweepResult, Workload] | None = None
        while left:
            cell = next_cell(left, measured)
            left.remove(cell)
            smaller = dominated_by(cell, answers)
            if smaller is not None:
                why = f"batch {smaller.batch} at context {smaller.context} ran out of memory."
                answers.append(CellAnswer(cell=cell, status="dropped", why=why))
                continue
            self._progress.note(f"cell batch {cell.batch}, context {cell.context}")
            try:
                result, workload = self._sweep(cell, 1 + len(left))
            except (NoValidTrialError, BudgetSpentError) as error:
                if default is None:
                    raise
                answers.append(_failed(cell, error))
                continue
            default = default or (result, workload)
            measured[cell] = [(one.point.config, one.figures) for one in result.measured()]
            answers.append(self._answer(cell, result))
        assert default is not None
        return self._publish(*default, answers, reason)

    def _sweep(self, cell: CellKey, num_left: int) -> tuple[SweepResult, Workload]:
        """One cell's sweep, with an equal part of what time is left."""
        first = self._request.spec.batch_size
        request = replace(
            self._request,
            spec=replace(self._request.spec, batch_size=cell.batch, context_len=cell.context),
            # As many steps as in the first cell.
            tokens=max(1, self._request.tokens * cell.batch // first),
            budget_s=max(self._request.budget_s - self._spent_s, 1.0) / num_left,
        )
        limit = self._engine.info.model.get("max_model_len")
        workload = build_workload(request.spec, self._engine.tokenizer, max_model_len=limit)
        ratios = usable_ratios(request, workload)
        plan = plan_sweep(request, self._engine.info.model, workload.blocks, ratios)
        folder = self._folder / CELLS_FOLDER / cell.name
        with RunFolder.open(folder, plan) as store:
            lab = Laboratory(plan, self._engine, workload.blocks, store=store, load_s=self._load_s)
            self._load_s = 0.0
            try:
                with first_interrupt_finishes(lab, self._progress):
                    result = run_sweep(plan, lab, self._progress)
            finally:
                self._spent_s += lab.spent_s
            name = RECORDS_NAME if not self._artifacts else cell_records_name(*cell)
            self._artifacts[name] = store.pack(self._folder / name)
        return result, workload

    def _answer(self, cell: CellKey, result: SweepResult) -> CellAnswer:
        speedup = None
        if result.validation is not None and result.selected in result.validation.speedups:
            speedup = result.validation.speedups[result.selected].to_dict()
        return CellAnswer(
            cell=cell,
            status=result.status,
            why=result.reason,
            config=result.selected,
            speedup=speedup,
            records=list(self._artifacts)[-1],
        )

    def _publish(
        self,
        result: SweepResult,
        workload: Workload,
        answers: Sequence[CellAnswer],
        reason: str,
    ) -> SweepOutcome:
        path = self._folder / PROFILE_FILE
        first = {RECORDS_NAME: self._artifacts[RECORDS_NAME]}
        profile = with_cells(
            build_profile(
                result,
                self._engine.info,
                workload.blocks,
                workload.describe(),
                artifacts=first,
                created=creation_time(path, self._artifacts),
            ),
            answers,
            self._artifacts,
            num_output_tokens=self._request.spec.max_new_tokens,
        )
        write_profile(profile, path)
        return SweepOutcome(result=result, profile=profile, path=path, backend_reason=reason)


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


def _failed(cell: CellKey, error: VegasError) -> CellAnswer:
    return CellAnswer(cell=cell, status="failed", why=error.message)
