"""Where words go: results to stdout, everything else to stderr, and one exit code.

rich is imported when something is shown, so that `--help` stays quick.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vegas_runtime.errors import EXIT_CODES, VegasError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from vegas_tune.apply import MatchFinding
    from vegas_tune.progress import SweepProgress


class Console:
    """One command's output.

    Args:
        as_json: stdout carries exactly one JSON document, also when the command fails.
        debug: tracebacks are shown.
    """

    def __init__(self, *, as_json: bool, debug: bool) -> None:
        self.as_json = as_json
        self.debug = debug

    def result(self, values: Mapping[str, Any], to_text: Callable[[Any], str]) -> None:
        """Print the command's one result, as JSON or as text."""
        text = json.dumps(values, indent=2, allow_nan=False) if self.as_json else to_text(values)
        self.write(text, None)

    def write(self, text: str, path: Path | None) -> None:
        """Print text, or write it to a file.

        Raises:
            StorageError: the file cannot be written.
        """
        if path is None:
            sys.stdout.write(text.rstrip("\n") + "\n")
            return
        from vegas_runtime.records import replace_file

        replace_file(path, text.encode())
        self.report(f"wrote {path}")

    def show(self, renderable: RenderableType) -> None:
        """Print a rich table to stdout."""
        from rich.console import Console as RichConsole

        RichConsole().print(renderable)

    def report(self, message: str) -> None:
        """Tell something on stderr."""
        sys.stderr.write(message + "\n")
        sys.stderr.flush()

    def findings(self, findings: Iterable[MatchFinding]) -> None:
        """Tell what differs between profile and machine, on stderr."""
        for finding in findings:
            label = {"hard": "mismatch", "soft": "warning", "info": "note"}[finding.level]
            self.report(f"{label}: {finding.message}")

    def progress(self, resume_command: str) -> SweepProgress:
        """Progress of a sweep on stderr: one lasting line per point."""
        from vegas_tune.progress import SweepProgress

        return SweepProgress(resume_command)

    def failure(self, code: str, message: str, hint: str) -> None:
        """Tell why the command failed."""
        if self.as_json:
            error = {"code": code, "message": message, "hint": hint}
            sys.stdout.write(json.dumps({"error": error}, indent=2) + "\n")
        self.report(f"error: {message} {hint}".rstrip())


def options_given(context: typer.Context) -> tuple[str, ...]:
    """Options that stand on the command line, as written there."""

    def is_given(name: str | None) -> bool:
        source = context.get_parameter_source(name or "")
        return source is not None and source.name == "COMMANDLINE"

    return tuple(
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.param_type_name == "option" and is_given(parameter.name)
    )


@contextmanager
def guard(console: Console) -> Iterator[None]:
    """Turn what a command raises into one line and its exit code."""
    try:
        yield
    except VegasError as error:
        if console.debug:
            traceback.print_exc()
        console.failure(error.code, error.message, error.hint)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt as error:
        console.failure("interrupted", "interrupted.", str(error))
        raise typer.Exit(EXIT_CODES["interrupted"]) from error
    except typer.Exit:
        raise
    except BrokenPipeError as error:
        # The reader went away (`| head`); silence the interpreter's own complaint at exit.
        sys.stderr.close()
        raise typer.Exit(EXIT_CODES["unexpected"]) from error
    except Exception as error:
        if console.debug:
            traceback.print_exc()
        console.failure(
            "unexpected",
            f"{type(error).__name__}: {error}",
            "" if console.debug else "Run again with --debug for the traceback.",
        )
        raise typer.Exit(EXIT_CODES["unexpected"]) from error
