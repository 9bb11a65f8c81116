"""The command line: parse, call, print. Every command is a few lines; the work is elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from vegas_runtime.errors import EXIT_CODES
from vegas_tune.console import Console, guard, options_given

_HELP: Final = """Find, prove and serve the fastest lossless self-speculative decoding setting.

Examples:

\b
  vegas-tune sweep --model smollm2-135m      tune; leaves a profile
  vegas-tune apply profile.yaml              what vLLM is told
  vegas-tune check profile.yaml              CI: ok, regressed or inconclusive
  vegas-tune compare --model smollm2-135m    every method at its best, side by side

Exit codes: 0 ok, 1 unexpected, 2 usage, 3 regression found, 4 profile does not match this
machine, 5 profile invalid or too new, 6 inconclusive or budget spent, 7 no valid trial,
130 interrupted.
"""

# Options of `sweep` that say nothing about what is measured.
_NOT_ASKED: Final = ("as_json", "debug", "dry_run", "workers", "storage")

app = typer.Typer(
    name="vegas-tune",
    help=_HELP,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_show_locals=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON document on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
ProfileFile = Annotated[Path, typer.Argument(metavar="PROFILE", help="A profile.yaml.")]
Backend = Annotated[str, typer.Option(help="auto, reference or vllm.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
TensorParallel = Annotated[int, typer.Option(help="GPUs that vLLM splits the model over.")]


@app.command(rich_help_panel="Tune")
def sweep(
    model: Annotated[str, typer.Option(help="Hub id, local path, GGUF file, or an alias.")],
    backend: Backend = "auto",
    budget: Annotated[
        str | None, typer.Option(help="Hard limit on time, e.g. 90s, 12m, 1h.")
    ] = None,
    workload: Annotated[
        str, typer.Option(help="stdlib, FILE.jsonl, aime25, codeelo or longbench-v2.")
    ] = "stdlib",
    data: Annotated[Path | None, typer.Option(help="File or folder of a named data set.")] = None,
    context: Annotated[
        str | None, typer.Option(help="Tokens of each prompt (stdlib workload), e.g. 4k or 4k,16k.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="Requests kept running, e.g. 8 or 1,8,32.")
    ] = None,
    blocks: Annotated[int | None, typer.Option(help="Blocks of prompts measured apart.")] = None,
    waiting: Annotated[int | None, typer.Option(help="Spare prompts of each block.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Output limit of a request.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of one measurement.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Interleaved rounds of a search step.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 keeps all.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 keeps all.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is none.")] = 1.0,
    algorithm: Annotated[str, typer.Option(help="KV selection policy.")] = "vegas",
    rows: Annotated[
        str | None, typer.Option(help="Verify rows summed (vegas).", show_default="two; vLLM: all")
    ] = None,
    metric: Annotated[str, typer.Option(help="weight or logit (vegas).")] = "weight",
    scope: Annotated[str, typer.Option(help="layer or kv_head (vegas).")] = "layer",
    granularity: Annotated[
        str | None, typer.Option(help="token or page (vegas).", show_default="token; vLLM: page")
    ] = None,
    min_tokens: Annotated[
        int | None, typer.Option(help="Floor of the KV budget; 256, packaged model 32.")
    ] = None,
    max_gamma: Annotated[int, typer.Option(help="Most tokens drafted per iteration.")] = 15,
    ratios: Annotated[
        str | None, typer.Option(help="Candidate sparsity ratios (kept), e.g. 0.02,0.05,0.1.")
    ] = None,
    gammas: Annotated[str | None, typer.Option(help="Candidate gammas, e.g. 1,2,4,8.")] = None,
    seed: Annotated[int, typer.Option(help="Seeds prompts, sampling and bootstraps.")] = 0,
    tensor_parallel_size: TensorParallel = 1,
    dtype: Dtype = "auto",
    device: Device = "auto",
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of the run; named for its plan by default.")
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Start over instead of resuming.")] = False,
    workers: Annotated[
        int, typer.Option(help="GPUs, or groups of them, that each measure every point.")
    ] = 1,
    storage: Annotated[
        str | None,
        typer.Option(
            help="postgresql+psycopg://USER@HOST/DB, for `vegas-tune worker` on any host."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and its cost; measure nothing.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run the three-step sweep and write a profile; the same command resumes a stopped run."""
    given = {k: v for k, v in locals().items() if k not in _NOT_ASKED}
    console = Console(as_json=as_json, debug=debug)
    with guard(console):
        from vegas_tune import tune
        from vegas_tune.request import SweepRequest

        request = SweepRequest.from_options(given)
        if dry_run:
            console.result(tune.describe(request), tune.describe_text)
            return
        progress = console.progress(tune.resume_command(sys.argv))
        shares = workers != 1 or storage is not None
        if len(request.cells) > 1:
            from vegas_tune import cells_tune

            outcome = cells_tune.run(request, progress, shares=shares)
        elif not shares:
            outcome = tune.run(request, progress)
        else:
            from vegas_tune import fleet_tune

            outcome = fleet_tune.run(request, progress, storage=storage, num_workers=workers)
        console.result(outcome.to_dict(), outcome.to_text)
        raise typer.Exit(outcome.exit_code)


@app.command(rich_help_panel="Tune")
def worker(
    storage: Annotated[str, typer.Option(help="As the sweep was given, or journal:FILE.")],
    run: Annotated[str | None, typer.Option(help="The run, where several are open.")] = None,
    model: Annotated[str | None, typer.Option(help="Where the model is here.")] = None,
    data: Annotated[Path | None, typer.Option(help="The workload's file here.")] = None,
    device: Device = "auto",
    follow: Annotated[int | None, typer.Option(help="End with this parent process.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure for a sweep that runs elsewhere, until it is over: one worker per GPU.

    Where the sweep splits the model, one per group: the first GPUs that the worker may use.
    """
    console = Console(as_json=as_json, debug=debug)
    with guard(console):
        from vegas_tune.worker import run_worker

        done = run_worker(
            storage,
            run=run,
            model=model,
            data=data,
            device=device,
            follow=follow,
            report=console.report,
        )
        console.result({"measurements": done}, lambda _: f"{done} measurements handed back")


@app.command(rich_help_panel="Serve")
def apply(
    profile: ProfileFile,
    output: Annotated[
        str, typer.Option("--format", help="yaml (vLLM's --config), args, python or env.")
    ] = "yaml",
    model: Annotated[str | None, typer.Option(help="Model to serve, if not the profile's.")] = None,
    context: Annotated[
        int | None, typer.Option(help="Context length served, when the profile's settings differ.")
    ] = None,
    only_check: Annotated[
        bool, typer.Option("--check", help="Only compare profile and machine.")
    ] = False,
    prompt: Annotated[
        str | None, typer.Option("--run", help="Generate from this prompt, with and without.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate with --run.")] = 128,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Match a profile against this machine and print what vLLM is told, or run it here."""
    console = Console(as_json=as_json, debug=debug)
    with guard(console):
        from vegas_runtime.profile import load_profile
        from vegas_tune import apply as applying

        loaded = load_profile(profile)
        if prompt is not None:
            from vegas_tune import demo

            shown = demo.run_prompt(
                loaded,
                prompt,
                model=model,
                max_new_tokens=max_new_tokens,
                dtype=dtype,
                device=device,
                report=console.report,
            )
            console.findings(shown.findings)
            console.result(shown.to_dict(), shown.to_text)
            return
        findings = applying.match_profile(loaded, applying.machine_facts(loaded, model=model))
        applying.raise_on_hard(findings)
        console.findings(findings)
        if only_check:
            matched = {"profile_id": loaded.profile_id, "matches": True}
            console.result(
                {**matched, "findings": [vars(finding) for finding in findings]},
                lambda _: f"{profile} matches this machine.",
            )
            return
        text = applying.render(loaded, output, model=model, context=context)
        console.result({"format": output, "text": text}, lambda _: text.rstrip("\n"))


@app.command(rich_help_panel="Serve")
def check(
    profile: ProfileFile,
    replay_only: Annotated[
        bool, typer.Option("--replay-only", help="Only tier 1: replay the recorded run.")
    ] = False,
    speedup: Annotated[
        bool, typer.Option("--speedup", help="Also tier 3: the speed-up, on the profile's device.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Where the model is, if not at the profile's id.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="The workload's file, for tier 2 of a file workload.")
    ] = None,
    budget: Annotated[str, typer.Option(help="Hard limit on each measuring tier.")] = "5m",
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(
            help="GPUs that vLLM splits the model over.", show_default="as in the profile"
        ),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """CI: replay the recorded decision, then re-measure acceptance; ok, regressed or unsure."""
    console = Console(as_json=as_json, debug=debug)
    with guard(console):
        from vegas_tune import checking

        verdict = checking.run(
            profile,
            replay_only=replay_only,
            speedup=speedup,
            model=model,
            data=data,
            budget=budget,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            device=device,
            report=console.report,
        )
        console.result(verdict.to_dict(), verdict.to_text)
        raise typer.Exit(verdict.exit_code)


@app.command(rich_help_panel="Look")
def report(
    profile: ProfileFile,
    output: Annotated[str, typer.Option("--format", help="table, md, html or json.")] = "table",
    out: Annotated[Path | None, typer.Option("--out", help="Write here, not to stdout.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a profile: curves with intervals, decisions, every measured point."""
    console = Console(as_json=as_json, debug=debug)
    with guard(console):
        from vegas_runtime.profile import load_profile
        from vegas_tune import report as reporting

        loaded = load_profile(profile)
        if output == "table" and out is None and not as_json:
            console.show(reporting.render_table(loaded))
            return
        text = reporting.render(loaded, "json" if as_json else output, path=str(profile))
        console.write(text, out)


@app.command(rich_help_panel="Look")
def compare(
    context_of_call: typer.Context,
    first: Annotated[
        Path | None, typer.Argument(metavar="A", help="A profile.yaml.", show_default=False)
    ] = None,
    second: Annotated[
        Path | None, typer.Argument(metavar="B", help="Another one.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Compare methods on this model: Hub id, path or alias.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Policies, with switches: quest:scope=kv_head, last_accepted; and ngram, "
            "suffix, draft_model, eagle3, mtp of vLLM itself.",
            show_default="vegas,streaming_llm,quest,spec_extend; on vLLM all_rows_pages, ngram and "
            "suffix as well",
        ),
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="Compare vLLM's draft_model with this model as well.")
    ] = None,
    eagle_head: Annotated[
        str | None, typer.Option(help="Compare vLLM's eagle3 with this head as well.")
    ] = None,
    gamma: Annotated[str, typer.Option(help="auto tunes it; a number fixes it for all.")] = "auto",
    backend: Backend = "auto",
    budget: Annotated[
        str | None, typer.Option(help="Hard limit on time; default: a sweep's, per method.")
    ] = None,
    workload: Annotated[str, typer.Option(help="As in sweep.")] = "stdlib",
    data: Annotated[Path | None, typer.Option(help="As in sweep.")] = None,
    context: Annotated[int | None, typer.Option(help="As in sweep.")] = None,
    batch: Annotated[int | None, typer.Option(help="As in sweep.")] = None,
    blocks: Annotated[int | None, typer.Option(help="As in sweep.")] = None,
    waiting: Annotated[int | None, typer.Option(help="As in sweep.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="As in sweep.")] = None,
    tokens: Annotated[int | None, typer.Option(help="As in sweep.")] = None,
    rounds: Annotated[int | None, typer.Option(help="As in sweep.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 keeps all.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 keeps all.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is none.")] = 1.0,
    min_tokens: Annotated[int | None, typer.Option(help="As in sweep.")] = None,
    max_gamma: Annotated[int, typer.Option(help="As in sweep.")] = 15,
    ratios: Annotated[str | None, typer.Option(help="As in sweep.")] = None,
    gammas: Annotated[str | None, typer.Option(help="As in sweep.")] = None,
    seed: Annotated[int, typer.Option(help="As in sweep.")] = 0,
    tensor_parallel_size: TensorParallel = 1,
    dtype: Dtype = "auto",
    device: Device = "auto",
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run and its files.")] = None,
    new: Annotated[bool, typer.Option("--new", help="Start over instead of resuming.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare two profiles (A B), or tune and measure methods on a model (--model).

    With --model each method is tuned for itself, then all are measured side by side: a table,
    the paper's figures and an HTML report. The same command resumes a stopped run.
    """
    given = {k: v for k, v in locals().items() if k not in ("as_json", "debug", "context_of_call")}
    console = Console(as_json=as_json, debug=debug)
    with guard(console):
        if model is None:
            from vegas_tune.compare import compare_files

            comparison = compare_files(first, second, options=options_given(context_of_call))
            console.result(comparison.to_dict(), lambda _: comparison.to_markdown())
            return
        from vegas_tune import compare_methods, tune

        request = compare_methods.CompareRequest.from_options(given)
        progress = console.progress(tune.resume_command(sys.argv))
        outcome = compare_methods.run(request, progress)
        console.result(outcome.to_dict(), outcome.to_text)
        raise typer.Exit(outcome.exit_code)


@app.command(rich_help_panel="Look")
def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """Say what this machine has and lacks, and how to get it."""
    console = Console(as_json=as_json, debug=debug)
    with guard(console):
        from vegas_tune.doctor import diagnose

        diagnosis = diagnose()
        console.result(diagnosis.to_dict(), lambda _: diagnosis.to_text())
        raise typer.Exit(EXIT_CODES["ok" if diagnosis.ok else "unexpected"])


@app.command(rich_help_panel="Look")
def schema(debug: Debug = False) -> None:
    """Print the JSON Schema of a profile."""
    console = Console(as_json=True, debug=debug)
    with guard(console):
        from vegas_runtime.profile import json_schema

        document: dict[str, Any] = json_schema()
        console.result(document, lambda _: "")


def main() -> None:
    """Entry point of `vegas-tune`."""
    app()


if __name__ == "__main__":
    main()
