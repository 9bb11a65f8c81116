"""What pip makes of the project: with nvcc, without, editable, and as a source archive."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest
import torch

ROOT: Final = Path(__file__).parent.parent
LIBRARY: Final = "vegas_runtime/kernels/vegas_kernels.so"
# Seen by a build where there is no CUDA toolkit.
WITHOUT_NVCC: Final = {"PATH": "/usr/bin:/bin", "CUDA_HOME": "/nonexistent"}


@pytest.fixture
def backend() -> ModuleType:
    """csrc/build_backend.py, as pip imports it."""
    pytest.importorskip("scikit_build_core")
    spec = importlib.util.spec_from_file_location("backend", ROOT / "csrc" / "build_backend.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call_backend(hook: str, folder: Path) -> None:
    """Call a hook as pip does, in a process of its own: it changes what Python imports with."""
    code = f"import build_backend; build_backend.{hook}({str(folder)!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "csrc")}
    command = [sys.executable, "-c", code]
    subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True)


class TestDecision:
    def test_the_kernels_are_compiled_where_nvcc_is(
        self, backend: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(backend, "find_nvcc", lambda: "/opt/cuda/bin/nvcc")
        monkeypatch.setattr(backend, "find_torch", lambda: "/env/torch")
        settings = backend.with_decision(None)
        assert settings["wheel.cmake"] == "true"
        assert settings["wheel.py-api"] == "cp311"
        assert settings["cmake.define.CMAKE_CUDA_COMPILER"] == "/opt/cuda/bin/nvcc"
        assert settings["cmake.define.TORCH_ROOT"] == "/env/torch"

    def test_without_nvcc_the_wheel_is_pure_and_the_build_says_why(
        self,
        backend: ModuleType,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(backend, "find_nvcc", lambda: None)
        assert backend.with_decision({}) == {"wheel.cmake": "false"}
        assert "nvcc was not found" in capsys.readouterr().out

    def test_the_switch_overrules_what_is_found(
        self, backend: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(backend, "find_nvcc", lambda: "/opt/cuda/bin/nvcc")
        assert backend.with_decision({"wheel.cmake": "false"}) == {"wheel.cmake": "false"}

    @pytest.mark.parametrize(("torch_folder", "is_needed"), [("", True), ("/env/torch", False)])
    def test_torch_is_fetched_for_a_build_only_where_there_is_none(
        self,
        backend: ModuleType,
        monkeypatch: pytest.MonkeyPatch,
        torch_folder: str,
        is_needed: bool,
    ) -> None:
        monkeypatch.setattr(backend, "find_nvcc", lambda: "/opt/cuda/bin/nvcc")
        monkeypatch.setattr(backend, "find_torch", lambda: torch_folder)
        monkeypatch.setattr(backend.scikit, "get_requires_for_build_wheel", lambda _: ["ninja"])
        expected = ["ninja", "torch>=2.11"] if is_needed else ["ninja"]
        assert backend.get_requires_for_build_wheel(None) == expected

    def test_an_editable_install_never_compiles(self, backend: ModuleType, tmp_path: Path) -> None:
        assert backend.get_requires_for_build_editable(None) == ["setuptools>=69"]
        if importlib.util.find_spec("setuptools") is None:
            pytest.skip("needs setuptools")
        call_backend("build_editable", tmp_path)
        (wheel,) = tmp_path.glob("*.whl")
        with zipfile.ZipFile(wheel) as opened:
            names = opened.namelist()
        assert wheel.name.endswith("py3-none-any.whl")
        assert not any(name.endswith((".so", ".cu")) for name in names)

    def test_torch_is_found_from_inside_an_isolated_build(
        self, backend: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Isolation works through PYTHONPATH; the search must not see what that adds or hides.
        monkeypatch.setenv("PYTHONPATH", "/nonexistent")
        assert Path(backend.find_torch()) == Path(torch.__file__).parent


def pip(*arguments: str, python: str = sys.executable, **environment: str) -> None:
    subprocess.run(
        [python, "-m", "pip", "--quiet", *arguments],
        check=True,
        cwd=ROOT,
        env={**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": "2", **environment},
    )


def build_wheel(folder: Path, **environment: str) -> Path:
    """Build a wheel as pip does; skipped where the build needs what is not installed."""
    pytest.importorskip("scikit_build_core")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), ".", **environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> str:
    """Install a wheel alone into a fresh environment that sees this one's packages; its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    pip("install", "--no-deps", "--no-index", str(wheel), python=python)
    (site,) = folder.glob("lib/python3*/site-packages")
    # Behind the new environment's own packages, so that the wheel wins over an editable install.
    lines = [sysconfig.get_path("purelib"), *(p for p in sys.path if p.endswith("-packages"))]
    (site / "outer.pth").write_text("\n".join(dict.fromkeys(lines)) + "\n")
    return python


def run(python: str, code: str, folder: Path, **environment: str) -> str:
    """What a program prints that runs outside the checkout."""
    outside = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**outside, "VEGAS_TUNE_CACHE": str(folder / "cache"), **environment},
    )
    return done.stdout.strip()


WHERE_FROM: Final = """
import vegas_runtime
from pathlib import Path
print(Path(vegas_runtime.__file__).parent.parent)
"""

SELECT_ON_THE_CPU: Final = """
import torch
from vegas_runtime.kernels import ops
score = torch.arange(64.0, dtype=torch.bfloat16).view(1, 1, 1, 64)
one = lambda n: torch.tensor([n], dtype=torch.int32)
slots, counts = torch.zeros(1, 1, 1, 4, dtype=torch.int32), one(0)
ops.select(score, candidates=one(60), budgets=one(3), slots=slots, counts=counts,
           keys=torch.empty(1, 1, 1, 64, dtype=torch.int16))
print(slots.flatten()[:3].tolist(), counts.item())
"""

# Without a GPU, a stub stands for the one symbol that only torch's CUDA part has.
LOAD_THE_LIBRARY: Final = """
import ctypes, sys, torch
from pathlib import Path
import vegas_runtime.kernels.ops
from vegas_runtime.kernels import build
if sys.argv[1:]:
    for library in sys.argv[1:]:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(Path(build.__file__).parent / build.LIBRARY_NAME)
else:
    assert build.load().path == "prebuilt", build.load()
names = ("build_schedule", "verify_attention", "sparse_attention", "select")
print([torch._C._dispatch_has_kernel_for_dispatch_key(f"vegas::{n}", "CUDA") for n in names])
"""


@pytest.mark.slow
def test_with_nvcc_the_wheel_carries_kernels_that_load(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    wheel = build_wheel(tmp_path / "wheel")
    assert "-cp311-abi3-linux_" in wheel.name
    python = install(wheel, tmp_path / "venv")
    assert str(tmp_path) in run(python, WHERE_FROM, tmp_path)
    (library,) = tmp_path.glob(f"venv/lib/python3*/site-packages/{LIBRARY}")
    undefined = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    # Names of torch's own C++ would tie the wheel to one version of torch.
    assert re.search(r"_ZNK?(3c10|2at|5torch)", undefined) is None
    arguments: list[str] = []
    if not torch.cuda.is_available():
        stub = tmp_path / "stub.c"
        stub.write_text("int aoti_torch_get_current_cuda_stream(int d, void** s) { return 1; }\n")
        made = stub.with_suffix(".so")
        subprocess.run(["gcc", "-shared", "-fPIC", str(stub), "-o", str(made)], check=True)
        nvcc = Path(shutil.which("nvcc", path="/usr/local/cuda/bin") or shutil.which("nvcc") or "")
        runtime = next(nvcc.resolve().parents[1].glob("lib*/libcudart.so.*"), None)
        if runtime is None:
            pytest.skip("the CUDA runtime is not beside nvcc")
        arguments = [str(runtime), str(made)]
    program = tmp_path / "load.py"
    program.write_text(LOAD_THE_LIBRARY)
    code = f"import runpy, sys; sys.argv[1:] = {arguments!r}; runpy.run_path({str(program)!r})"
    assert run(python, code, tmp_path) == "[True, True, True, True]"


@pytest.mark.slow
def test_without_nvcc_it_installs_pure_and_runs_on_the_reference(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path / "wheel", **WITHOUT_NVCC)
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert LIBRARY not in names
    # The second path compiles from these when a toolkit comes later.
    assert "vegas_runtime/kernels/csrc/bindings.cpp" in names
    assert "vegas_runtime/kernels/csrc/instances/verify_bf16_d64.cu" in names
    python = install(wheel, tmp_path / "venv")
    assert str(tmp_path) in run(python, WHERE_FROM, tmp_path)
    assert run(python, SELECT_ON_THE_CPU, tmp_path) == "[57, 58, 59] 3"
    script = str(tmp_path / "venv" / "bin" / "vegas-tune")
    doctor = subprocess.run(
        [script, "doctor"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    expected = "CUDA:" if torch.cuda.is_available() else "PyTorch reference: torch sees no CUDA"
    (row,) = [line for line in doctor.stdout.splitlines() if line.startswith("kernels")]
    assert expected in row


@pytest.mark.slow
def test_the_source_archive_holds_what_the_kernels_are_built_from(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    call_backend("build_sdist", tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    folder = ROOT / "csrc"
    sources = {p for kind in ("*.cu", "*.cuh", "*.h", "*.cpp", "*.py") for p in folder.rglob(kind)}
    sources.add(folder / "CMakeLists.txt")
    assert {str(path.relative_to(ROOT)) for path in sources} <= inside
    assert {"pyproject.toml", "README.md", "LICENSE", "vegas_tune/cli.py"} <= inside
