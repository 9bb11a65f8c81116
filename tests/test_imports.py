"""Who imports whom (STYLE), and that asking for help loads no model library."""

from __future__ import annotations

import ast
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent.parent
PACKAGES: Final = ("vegas_runtime", "vegas_tune")

# Each row may import itself and the rows above it. A name stands for the module, and for the
# whole package when it is one.
LAYERS: Final = (
    (
        "errors",
        "config",
        "metrics",
        "records",
        "record_arrays",
        "machine",
        "gpu_memory",
        "protocol",
    ),
    ("profile", "profile_errors", "profile_sections", "profile_values", "profile_yaml"),
    ("kernels",),
    ("policies",),
    ("engine", "vllm_plugin"),
    ("backend", "replay"),
)
NEVER_EACH_OTHER: Final = ("engine", "vllm_plugin")

# Third-party packages that belong to some modules alone.
OWNERS: Final = {
    "yaml": ("vegas_runtime.profile",),
    "typer": ("vegas_tune",),
    "optuna": ("vegas_tune",),
    "vllm": ("vegas_runtime.vllm_plugin",),
}

# These take a second or more to load, so only what runs a model may ask for them outright.
HEAVY: Final = ("torch", "transformers", "vllm")
RUNS_MODELS: Final = (
    "vegas_runtime.kernels",
    "vegas_runtime.policies",
    "vegas_runtime.engine",
    "vegas_runtime.vllm_plugin",
)


@dataclass(frozen=True)
class Import:
    """One imported name.

    Attributes:
        importer: the module it stands in.
        target: what is imported, with the name behind `from ... import`.
        line: where.
        at_load: executed when the importer is loaded, so not inside a function or for types only.
    """

    importer: str
    target: str
    line: int
    at_load: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def module_files() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports_of(module: str, path: Path) -> Iterator[Import]:
    """Every import statement of a file, wherever it stands."""

    def walk(node: ast.AST, at_load: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for name in child.names:
                    yield Import(module, name.name, child.lineno, at_load)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{module}:{child.lineno} imports relatively"
                for name in child.names:
                    yield Import(module, f"{child.module}.{name.name}", child.lineno, at_load)
            else:
                deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
                yield from walk(child, at_load and not deferred and not for_types)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), True)


ALL_IMPORTS: Final = [
    found for module, path in module_files() for found in imports_of(module, path)
]


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def part_of(module: str) -> str | None:
    """The part of `vegas_runtime` a dotted name lies in; None for what is not its module."""
    head, _, rest = module.partition(".")
    part = rest.partition(".")[0]
    known = any(part in row for row in LAYERS)
    return part if head == "vegas_runtime" and known else None


def row_of(part: str) -> int:
    return next(row for row, parts in enumerate(LAYERS) if part in parts)


def test_imports_are_found_wherever_they_stand(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(
        "from typing import TYPE_CHECKING\n"
        "import a.b, c\n"
        "if TYPE_CHECKING:\n    from d import e\n"
        "class K:\n    import f\n    def g(self):\n        from h import i, j\n"
        "try:\n    import k\nexcept ImportError:\n    pass\n"
    )
    found = [(each.target, each.at_load) for each in imports_of("m", source)][1:]
    assert found == [
        ("a.b", True),
        ("c", True),
        ("d.e", False),
        ("f", True),
        ("h.i", False),
        ("h.j", False),
        ("k", True),
    ]


def test_every_module_has_its_place_in_the_layers() -> None:
    placed = {part for row in LAYERS for part in row}
    found = {
        module.split(".")[1]
        for module, _ in module_files()
        if is_in(module, "vegas_runtime") and "." in module
    }
    assert found <= placed


def test_runtime_parts_import_only_what_lies_above_them() -> None:
    wrong = []
    for found in ALL_IMPORTS:
        importer, target = part_of(found.importer), part_of(found.target)
        if importer is None or target is None:
            continue
        apart = {importer, target} == set(NEVER_EACH_OTHER)
        if apart or row_of(target) > row_of(importer):
            wrong.append(str(found))
    assert wrong == []


def test_the_runtime_never_imports_the_tuner() -> None:
    wrong = [
        str(found)
        for found in ALL_IMPORTS
        if is_in(found.importer, "vegas_runtime") and is_in(found.target, "vegas_tune")
    ]
    assert wrong == []


def test_the_tuner_uses_public_names_of_the_runtime_only() -> None:
    wrong = [
        str(found)
        for found in ALL_IMPORTS
        if is_in(found.importer, "vegas_tune")
        and is_in(found.target, "vegas_runtime")
        and any(part.startswith("_") and part != "__version__" for part in found.target.split("."))
    ]
    assert wrong == []


@pytest.mark.parametrize("package", OWNERS)
def test_a_package_is_imported_by_its_owner_alone(package: str) -> None:
    owners = OWNERS[package]
    wrong = [
        str(found)
        for found in ALL_IMPORTS
        if is_in(found.target, package)
        # `vegas_runtime.profile` stands for its sibling files too.
        and not any(is_in(found.importer, o) or found.importer.startswith(o + "_") for o in owners)
    ]
    assert wrong == []


def test_only_what_runs_models_loads_model_libraries_outright() -> None:
    wrong = [
        str(found)
        for found in ALL_IMPORTS
        if found.at_load
        and any(is_in(found.target, package) for package in HEAVY)
        and not any(is_in(found.importer, package) for package in RUNS_MODELS)
    ]
    assert wrong == []


def test_only_the_kernels_read_the_device_code() -> None:
    readers = {
        module
        for module, path in module_files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value == "csrc"
    }
    assert all(is_in(module, "vegas_runtime.kernels") for module in readers)


# -- what is really loaded ------------------------------------------------------------------------


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1"},
    )


LIST_HEAVY: Final = f"print([name for name in {HEAVY!r} if name in sys.modules])"

# Each module as if it were the first of ours; other libraries stay, and none of them is heavy.
IMPORT_EACH: Final = f"""
import importlib, sys
for module in sys.argv[1:]:
    for name in [name for name in sys.modules if name.split(".")[0] in {PACKAGES!r}]:
        del sys.modules[name]
    importlib.import_module(module)
    heavy = [name for name in {HEAVY!r} if name in sys.modules]
    if heavy:
        print(module, "loads", heavy)
        break
else:
    print("none of", len(sys.argv) - 1)
"""


def test_the_tuner_and_the_light_parts_of_the_runtime_load_no_model_library() -> None:
    light = ("errors", "config", "metrics", "records", "machine", "profile", "backend", "replay")
    modules = [module for module, _ in module_files() if is_in(module, "vegas_tune")]
    modules += [f"vegas_runtime.{name}" for name in light]
    shown = run_python("-c", IMPORT_EACH, *modules)
    assert shown.stdout.strip() == f"none of {len(modules)}"


CALL_HELP: Final = """
import sys
from vegas_tune.cli import main
sys.argv = ["vegas-tune", {arguments}]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
"""


def _children_s() -> float:
    """Processor time of every process that this one started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("arguments", ['"--help"', '"sweep", "--help"', '"apply", "--help"'])
def test_help_answers_at_once_and_loads_no_model_library(arguments: str) -> None:
    code = CALL_HELP.format(arguments=arguments) + LIST_HEAVY
    times, bare = [], []
    for _ in range(5):
        before = _children_s()
        shown = run_python("-c", code)
        times.append(_children_s() - before)
        assert "Usage: vegas-tune" in shown.stdout
        assert shown.stdout.splitlines()[-1] == "[]"
        before = _children_s()
        run_python("-c", "import typer, rich.console, yaml")
        bare.append(_children_s() - before)
    # Processor time, the best of five, beside what printing any such help takes on this machine.
    assert min(times) < 3 * min(bare)
