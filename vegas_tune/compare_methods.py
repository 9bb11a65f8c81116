"""`compare --model` from end to end: one engine, every method tuned, then all side by side."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from vegas_runtime.backend import resolve_backend
from vegas_runtime.config import SWITCHES, SpeculationConfig
from vegas_runtime.errors import EXIT_CODES, BudgetSpentError, NoValidTrialError, UsageError
from vegas_runtime.protocol import Engine, PromptBlock, SelectionRecorder
from vegas_runtime.records import replace_file
from vegas_tune.compare_bed import Bed, open_bed, tuning_folder
from vegas_tune.methods import (
    DEFAULT_METHODS,
    DEFAULT_ON_VLLM,
    Method,
    parse_methods,
    split_own,
)
from vegas_tune.plan import BUDGET_SHARES, REFINE, Plan
from vegas_tune.request import SweepRequest
from vegas_tune.stock_methods import OwnMethod, own_method
from vegas_tune.tune import first_interrupt_finishes

if TYPE_CHECKING:
    from vegas_runtime.protocol import EngineInfo
    from vegas_tune.method_report import MethodComparison
    from vegas_tune.method_rounds import SideBySide
    from vegas_tune.progress import SweepProgress
    from vegas_tune.sweep import Search

# Of the time for measuring, what tuning all methods may take; comparing gets the rest.
_TUNING_SHARE: Final = 0.55

COMPARISON_FILE: Final = "comparison.json"
TABLE_FILE: Final = "table.md"
REPORT_FILE: Final = "report.html"
FIGURES_FOLDER: Final = "figures"
_SETUP_FILE: Final = "setup.json"


@dataclass(frozen=True, kw_only=True)
class CompareRequest:
    """One comparison of methods, defaults filled in.

    Attributes:
        sweep: what every method's tuning has in common; its algorithm is not used.
        methods: what to compare of what selects KV entries, in the order given.
        own: vLLM's own methods, likewise.
    """

    sweep: SweepRequest
    methods: tuple[Method, ...]
    own: tuple[OwnMethod, ...] = ()

    @classmethod
    def from_options(cls, given: Mapping[str, Any]) -> Self:
        """Read the command's options: those of `sweep`, what to compare, `gamma`; no profiles.

        Raises:
            UsageError: an option that cannot be read or does not go with another.
        """
        options = dict(given)
        profiles = [options.pop("first"), options.pop("second")]
        if profiles[0] is not None:
            raise UsageError(
                f"--model {options['model']} compares methods, {profiles[0]} is a profile to "
                "compare; one of the two is meant."
            )
        gamma = options.pop("gamma")
        models = {key: options.pop(key, None) or "" for key in ("draft_model", "eagle_head")}
        names, own = _named(options.pop("methods"), options["backend"], models)
        if gamma != "auto":
            if options["gammas"] is not None:
                raise UsageError(
                    f"--gamma {gamma} fixes gamma and --gammas {options['gammas']} asks to tune "
                    "it; one of them is enough."
                )
            if not gamma.isdecimal() or int(gamma) < 1:
                raise UsageError(f"--gamma is {gamma!r}; `auto` or a whole number is needed.")
            options |= {"gammas": gamma, "max_gamma": int(gamma)}
        # The method's own, put in its place below.
        shared = {"algorithm": "vegas", **{name: values[0] for name, values in SWITCHES.items()}}
        sweep = SweepRequest.from_options(options | shared)
        methods = parse_methods(names, sweep.base)
        if options["budget"] is None:
            # The default is one sweep's; here every method is tuned.
            sweep = replace(sweep, budget_s=sweep.budget_s * len(methods))
        return cls(
            sweep=sweep,
            methods=methods,
            own=tuple(own_method(name, **models) for name in own),
        )


def _named(
    methods: str | None, backend: str, models: Mapping[str, str]
) -> tuple[str, tuple[str, ...]]:
    """What `--methods` names, vLLM's own methods apart; a model to draft with names its method."""
    if methods is None:
        methods = DEFAULT_METHODS
        if resolve_backend(backend)[0] == "vllm":
            methods = f"{methods},{DEFAULT_ON_VLLM}"
    named = {"draft_model": "draft_model", "eagle_head": "eagle3"}
    methods = ",".join([methods, *(named[key] for key, model in models.items() if model)])
    return split_own(methods)


@dataclass(frozen=True, kw_only=True)
class CompareOutcome:
    """What a comparison leaves behind.

    Attributes:
        comparison: its figures.
        folder: where they are written.
        files: what was written, in order.
        backend_reason: which engine was taken, and why.
    """

    comparison: MethodComparison
    folder: Path
    files: tuple[Path, ...]
    backend_reason: str

    @property
    def exit_code(self) -> int:
        """0 when the whole table was measured, else 6."""
        return EXIT_CODES["ok" if self.comparison.status == "complete" else "inconclusive"]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **self.comparison.to_dict(),
            "backend": self.backend_reason,
            "files": [str(path) for path in self.files],
        }

    def to_text(self, _: object = None) -> str:
        """The tables, and where everything lies."""
        from vegas_tune.method_report import render_comparison_text

        return f"{render_comparison_text(self.comparison)}\nwritten to {self.folder}"


def run(request: CompareRequest, progress: SweepProgress) -> CompareOutcome:
    """Carry out a comparison, resuming what an earlier call left.

    Raises:
        VegasError: as the exit codes say.
        KeyboardInterrupt: interrupted; everything measured is kept.
    """
    with progress:
        return _run(request, progress)


def _run(request: CompareRequest, progress: SweepProgress) -> CompareOutcome:
    with open_bed(request.sweep, request.methods, request.own, progress) as bed:
        searches, measured = _measure_all(bed, request.sweep.budget_s, progress)
        info = bed.engine.info
    comparison = _conclude(bed, searches, measured, info)
    return CompareOutcome(
        comparison=comparison,
        folder=bed.folder,
        files=_write(comparison, bed.folder, progress),
        backend_reason=bed.backend_reason,
    )


def _measure_all(
    bed: Bed, whole_s: float, progress: SweepProgress
) -> tuple[dict[str, Search], SideBySide]:
    """Prefill, tune, compare, within the budget."""
    blocks = bed.workload.blocks
    budget_s = whole_s - _setup_s(bed.folder, bed.engine, blocks, bed.opened_s)
    if budget_s <= 0:
        raise BudgetSpentError(
            f"the budget of {whole_s:g} s ended while the model was loaded and the prompts "
            "prefilled.",
            hint="Raise --budget, or use fewer, shorter prompts.",
        )
    searches = _tune(bed.plans, bed.engine, blocks, bed.folder, budget_s, progress)
    return searches, _compare(searches, bed.engine, blocks, bed.folder, budget_s, progress)


def _setup_s(folder: Path, engine: Engine, blocks: Sequence[PromptBlock], opened_s: float) -> float:
    """Time to load and prefill, as it was when the comparison began.

    A resumed comparison counts what the first start took: with its own, it would have another
    budget and could decide otherwise over the same measurements.
    """
    path = folder / _SETUP_FILE
    if path.exists():
        return float(json.loads(path.read_bytes())["setup_s"])
    for block in blocks:
        engine.prepare(block)
    setup_s = round(time.monotonic() - opened_s, 3)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps({"setup_s": setup_s}).encode())
    return setup_s


def _tune(
    plans: Mapping[str, Plan],
    engine: Engine,
    blocks: Sequence[PromptBlock],
    folder: Path,
    budget_s: float,
    progress: SweepProgress,
) -> dict[str, Search]:
    """Each method's own three steps, on the same prompts and prefills."""
    from vegas_tune.laboratory import Laboratory
    from vegas_tune.study import RunFolder
    from vegas_tune.sweep import run_search

    searches = {}
    # A search ends within its steps' share of its plan's budget.
    each_s = budget_s * _TUNING_SHARE / len(plans) / BUDGET_SHARES[REFINE]
    for number, (name, plan) in enumerate(plans.items(), start=1):
        progress.note(f"tuning {name} ({number} of {len(plans)})")
        own = replace(plan, budget_s=round(each_s, 3))
        with RunFolder.open(tuning_folder(folder, name), own) as store:
            lab = Laboratory(own, engine, blocks, store=store)
            with first_interrupt_finishes(lab, progress):
                searches[name] = run_search(own, lab, progress)
    if not any(search.chosen for search in searches.values()):
        raise NoValidTrialError(
            f"of {len(searches)} methods none has a setting that could be measured.",
            hint="Raise --budget, or use fewer methods or shorter prompts.",
        )
    return searches


def _compare(
    searches: Mapping[str, Search],
    engine: Engine,
    blocks: Sequence[PromptBlock],
    folder: Path,
    budget_s: float,
    progress: SweepProgress,
) -> SideBySide:
    from vegas_tune.method_rounds import ComparisonLab, measure_side_by_side
    from vegas_tune.record_folder import RecordFolder

    left_s = budget_s - sum(search.spent_s for search in searches.values())
    plan = replace(next(iter(searches.values())).plan, budget_s=round(left_s, 3))
    settings = {name: search.chosen for name, search in searches.items() if search.chosen}
    lab = ComparisonLab(plan, engine, blocks, store=RecordFolder(folder / "rounds"))
    with first_interrupt_finishes(lab, progress):
        return measure_side_by_side(
            plan,
            settings,
            lab,
            progress,
            can_skip_selection=lab.can_skip_selection,
            window_of=lab.window_of if lab.drafts_from_windows else None,
        )


def _conclude(
    bed: Bed, searches: Mapping[str, Search], measured: SideBySide, info: EngineInfo
) -> MethodComparison:
    from vegas_tune.method_figures import paper_figures
    from vegas_tune.method_report import MethodComparison, title_of
    from vegas_tune.method_table import (
        method_rows,
        refused_rows,
        with_notes,
        with_own,
        with_stock,
    )

    can_skip = isinstance(bed.engine, SelectionRecorder)
    settings: dict[str, SpeculationConfig | None] = {
        name: search.chosen for name, search in searches.items()
    }
    plain = next(iter(searches.values())).plan.plain
    rows = method_rows(
        settings,
        plain,
        measured,
        why_no_overhead=""
        if can_skip
        else f"the {info.backend} engine told nothing of what selecting costs",
        from_phases=not can_skip,
    )
    if bed.stock is not None:
        rows = with_stock(rows, measured, bed.stock)
    rows = with_notes(with_own(rows, bed.own, measured, bed.stock), bed.slowed)
    rows = (*rows, *refused_rows(bed.refused))
    # What this engine cannot measure is said in the table, and no reason to measure more.
    missing = [
        f"{row.name}: {row.note}"
        for row in rows
        if row.name in settings
        and (row.vs_plain is None or (can_skip and row.selection_overhead is None))
    ]
    facts = {
        "model": info.model,
        "device": info.device,
        "runtime": info.runtime,
        "workload": bed.workload.describe(),
    }
    side = [one for found in measured.rounds for one in found.values()]
    side += [one for pairs in measured.overhead.values() for pair in pairs for one in pair]
    tuning = [one for search in searches.values() for one in search.outcomes]
    own = [one for result in bed.own for one in result.outcomes]
    unmeasured = len(bed.refused) + sum(not result.is_measured for result in bed.own)
    return MethodComparison(
        title=f"{len(searches) + len(bed.own) + len(bed.refused)} methods, {title_of(facts)}",
        status="inconclusive" if missing else "complete",
        reason="; ".join(missing)
        if missing
        else f"every method that runs here was measured; {unmeasured} do not run here."
        if unmeasured
        else "every method was measured.",
        facts=facts,
        rows=rows,
        figures=paper_figures(rows, searches, measured),
        num_rounds=len(measured.rounds),
        num_measurements=len(tuning) + len(own) + len(side),
        spent_s=measured.spent_s
        + sum(search.spent_s for search in searches.values())
        + sum(one.cost_s for one in own),
        overhead_from=measured.overhead_from,
    )


def _write(comparison: MethodComparison, folder: Path, progress: SweepProgress) -> tuple[Path, ...]:
    """Everything a reader may want: JSON, Markdown, HTML, and the figures as files."""
    from vegas_tune import figure_files
    from vegas_tune.method_report import render_comparison_html, render_comparison_text

    document = json.dumps(comparison.to_dict(), indent=1, allow_nan=False) + "\n"
    texts = {
        COMPARISON_FILE: document,
        TABLE_FILE: render_comparison_text(comparison),
        REPORT_FILE: render_comparison_html(comparison),
    }
    files = []
    for name, text in texts.items():
        replace_file(folder / name, text.encode())
        files.append(folder / name)
    if figure_files.can_draw():
        files += figure_files.write_figures(comparison.figures, folder / FIGURES_FOLDER)
    else:
        progress.note(
            "figures are in the report only: PNG and SVG files need matplotlib "
            "(pip install 'vegas-tune[demo]')"
        )
    return tuple(files)
