"""Which kernels a process gets: the wheel's, compiled ones, or the reference and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from vegas_runtime.errors import BackendError
from vegas_runtime.kernels import build


@dataclass
class Loader:
    """A made-up machine: what was compiled and loaded there.

    Attributes:
        broken: libraries that do not load.
    """

    packaged: Path
    cached: Path
    broken: set[Path] = field(default_factory=set)
    loaded: list[Path] = field(default_factory=list)
    compiled: list[tuple[str, ...]] = field(default_factory=list)

    def load(self, library: Path) -> str | None:
        self.loaded.append(library)
        return "libcudart.so.13: cannot open" if library in self.broken else None

    def build(self, *, architectures: tuple[str, ...]) -> Path:
        self.compiled.append(architectures)
        return self.cached


@pytest.fixture
def loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loader]:
    """A Hopper GPU, csrc/ and nvcc, and nothing compiled yet."""
    packaged, cached = tmp_path / "kernels" / build.LIBRARY_NAME, tmp_path / "cache" / "lib.so"
    for path in (packaged, cached):
        path.parent.mkdir()
    made = Loader(packaged, cached)
    monkeypatch.setattr(build, "__file__", str(packaged.parent / "build.py"))
    monkeypatch.setattr(build, "source_dir", lambda: tmp_path)
    monkeypatch.setattr(build, "find_nvcc", lambda: Path("/opt/cuda/bin/nvcc"))
    monkeypatch.setattr(build, "_cached_library", lambda *_: cached)
    monkeypatch.setattr(build, "_load_library", made.load)
    monkeypatch.setattr(build, "build", made.build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    build.load.cache_clear()
    build.unavailable_reason.cache_clear()
    yield made
    build.load.cache_clear()
    build.unavailable_reason.cache_clear()


def test_the_wheels_own_library_comes_first(loader: Loader) -> None:
    loader.packaged.touch()
    loader.cached.touch()
    assert build.load().path == "prebuilt"
    assert build.unavailable_reason() is None
    assert loader.loaded == [loader.packaged]
    assert loader.compiled == []


def test_a_library_compiled_before_is_taken_without_a_compiler(
    loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader.cached.touch()
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    assert build.load().path == "compiled"
    assert loader.compiled == []


@pytest.mark.parametrize(
    ("capability", "architecture"), [((8, 6), "80"), ((9, 0), "90a"), ((12, 0), "80")]
)
def test_first_use_compiles_for_the_gpu_that_is_there(
    loader: Loader,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    architecture: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert build.load().path == "compiled"
    assert loader.compiled == [(architecture,)]
    assert "Compiling the CUDA kernels" in caplog.text


def test_a_look_compiles_nothing(loader: Loader) -> None:
    found = build.load(may_compile=False)
    assert found.path == "pending"
    assert "/opt/cuda/bin/nvcc" in found.reason
    assert loader.compiled == loader.loaded == []


def test_an_installed_library_that_does_not_load_gives_way_to_a_compiled_one(
    loader: Loader,
) -> None:
    loader.packaged.touch()
    loader.broken.add(loader.packaged)
    assert build.load().path == "compiled"
    assert loader.loaded == [loader.packaged, loader.cached]


def test_without_a_compiler_the_reference_says_all_that_went_wrong(
    loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader.packaged.touch()
    loader.broken.add(loader.packaged)
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    found = build.load()
    assert found.path == "reference"
    assert "libcudart.so.13" in found.reason
    assert "nvcc was not found" in found.reason
    assert "install the CUDA toolkit" in found.fix
    assert build.unavailable_reason() == found.reason


def test_a_failed_compilation_is_the_reason(
    loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: Any) -> Path:
        raise BackendError("Compiling the CUDA kernels failed at select.cu: error: no")

    monkeypatch.setattr(build, "build", fail)
    found = build.load()
    assert found.path == "reference"
    assert "failed at select.cu" in found.reason
    assert found.fix


def test_an_old_gpu_and_no_gpu_are_named(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    loader.packaged.touch()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert build.load().reason == "the GPU has compute capability 7.5; 8.0 is needed"
    build.load.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = build.load()
    assert (found.path, found.reason) == ("reference", "torch sees no CUDA device")
    assert loader.loaded == []


def test_the_newest_gpus_get_ptx_and_each_target_has_its_own_key() -> None:
    folder = build.source_dir()
    assert folder is not None
    assert build.source_hash(folder, ("80",)) != build.source_hash(folder, ("90a",))
    assert build._gencode("80").endswith("code=[sm_80,compute_80]")
    assert build._gencode("90a").endswith("code=sm_90a")
