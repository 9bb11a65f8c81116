"""The doctor: what it sees, what it calls blocking, and that it changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from vegas_runtime.engine.packaged import SMOLLM2
from vegas_tune import doctor, requirements, surroundings
from vegas_tune.doctor import Diagnosis, diagnose
from vegas_tune.plugin_state import PluginState
from vegas_tune.requirements import Package, RequirementsUnknownError, read_packages
from vegas_tune.surroundings import Cache, Machine, Torch, look_at_cache, probe_torch

CPU = {"kind": "cpu", "class": "Test CPU", "count": 1, "memory_gib": 24.0}
GPU = {"kind": "cuda", "class": "NVIDIA H200", "sm": "9.0", "count": 2, "memory_gib": 139.8}


def machine(**changes: Any) -> Machine:
    values: dict[str, Any] = {
        "python": "3.11.9 (CPython)",
        "platform": "Linux x86_64",
        "cpu": "Test CPU",
        "num_cores": 2,
        "memory_bytes": 24 << 30,
        "available_bytes": 20 << 30,
        "has_nvidia_driver": False,
    }
    return Machine(**values | changes)


def torch(**changes: Any) -> Torch:
    values: dict[str, Any] = {
        "version": "2.13.0+cpu",
        "build": "CPU",
        "threads": 2,
        "device": CPU,
        "has_native_bfloat16": True,
        "kernels": {"path": "reference", "reason": "torch sees no CUDA device", "fix": ""},
    }
    return Torch(**values | changes)


def cache(**changes: Any) -> Cache:
    values: dict[str, Any] = {
        "path": "~/.cache/vegas-tune",
        "size_bytes": 600_000_000,
        "free_bytes": 50_000_000_000,
        "is_writable": True,
        "packaged_model": "ready",
    }
    return Cache(**values | changes)


def package(name: str, **changes: Any) -> Package:
    values: dict[str, Any] = {"required": ">=2", "extra": "", "version": "2.1", "fits": True}
    return Package(name=name, **values | changes)


def missing(name: str, extra: str = "") -> Package:
    return package(name, version=None, fits=False, extra=extra)


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Diagnose a made-up machine; what is not given is as it should be."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)

    def diagnosis(
        *,
        machine_: Machine | None = None,
        torch_: Torch | None = None,
        cache_: Cache | None = None,
        plugin_: PluginState = PluginState(vllm=None),  # noqa: B008 - frozen
        packages: tuple[Package, ...] = (package("torch"), package("gguf", extra="demo")),
    ) -> Diagnosis:
        monkeypatch.setattr(doctor, "look_at_machine", lambda: machine_ or machine())
        monkeypatch.setattr(doctor, "probe_torch", lambda: torch_ or torch())
        monkeypatch.setattr(doctor, "look_at_cache", lambda: cache_ or cache())
        monkeypatch.setattr(doctor, "look_at_plugin", lambda: plugin_)
        monkeypatch.setattr(doctor, "read_packages", lambda: packages)
        return diagnose()

    return diagnosis


def only_problem(diagnosis: Diagnosis) -> tuple[str, str, bool]:
    assert len(diagnosis.problems) == 1, diagnosis.problems
    problem = diagnosis.problems[0]
    return problem.what, problem.fix, problem.is_blocking


class TestVerdict:
    def test_a_complete_machine_is_ready_without_a_word_too_many(self, look: Any) -> None:
        diagnosis = look()
        assert diagnosis.ok
        assert diagnosis.problems == ()
        assert diagnosis.to_text().endswith("ready: vegas-tune sweep --model smollm2-135m")

    def test_a_gpu_without_kernels_is_said_with_the_remedy(self, look: Any) -> None:
        kernels = {"path": "reference", "reason": "nvcc was not found", "fix": "install CUDA"}
        diagnosis = look(torch_=torch(build="CUDA 13.0", device=GPU, kernels=kernels))
        what, fix, is_blocking = only_problem(diagnosis)
        assert "nvcc was not found" in what
        assert fix == "install CUDA"
        assert not is_blocking
        assert "PyTorch reference: nvcc was not found" in diagnosis.to_text()

    @pytest.mark.parametrize("path", ["prebuilt", "compiled", "pending"])
    def test_kernels_that_are_there_are_no_problem(self, look: Any, path: str) -> None:
        kernels = {"path": path, "reason": "compiled at installation", "fix": ""}
        diagnosis = look(torch_=torch(build="CUDA 13.0", device=GPU, kernels=kernels))
        assert diagnosis.problems == ()
        assert "CUDA: compiled at installation" in diagnosis.to_text()

    def test_a_missing_required_package_blocks(self, look: Any) -> None:
        diagnosis = look(packages=(missing("transformers"),))
        assert only_problem(diagnosis) == (
            "transformers is missing.",
            "pip install 'transformers>=2'",
            True,
        )
        assert not diagnosis.ok

    def test_a_version_outside_the_range_is_said_and_does_not_block(self, look: Any) -> None:
        diagnosis = look(
            packages=(package("optuna", required=">=5,<6", version="4.9", fits=False),)
        )
        what, fix, is_blocking = only_problem(diagnosis)
        assert "optuna 4.9 is outside >=5,<6" in what
        assert fix == "pip install 'optuna>=5,<6'"
        assert not is_blocking

    @pytest.mark.parametrize(
        ("state", "is_blocking"), [("ready", False), ("fetched", True), ("absent", True)]
    )
    def test_converters_are_needed_until_the_model_is_converted(
        self, look: Any, state: str, is_blocking: bool
    ) -> None:
        diagnosis = look(packages=(missing("gguf", "demo"),), cache_=cache(packaged_model=state))
        _, fix, blocks = only_problem(diagnosis)
        assert fix == "pip install 'vegas-tune[demo]'"
        assert blocks is is_blocking
        assert diagnosis.ok is not is_blocking

    def test_a_drawing_library_never_blocks(self, look: Any) -> None:
        diagnosis = look(
            packages=(missing("matplotlib", "demo"),), cache_=cache(packaged_model="absent")
        )
        assert diagnosis.ok

    def test_vllm_is_missed_only_where_there_is_a_gpu(self, look: Any) -> None:
        packages = (missing("vllm", "vllm"),)
        assert look(packages=packages).problems == ()
        cuda = torch(version="2.14.0", build="CUDA 13.0", device=GPU, driver="595.91")
        on_gpu = look(packages=packages, torch_=cuda, machine_=machine(has_nvidia_driver=True))
        assert only_problem(on_gpu)[1] == "pip install 'vegas-tune[vllm]'"
        assert on_gpu.ok
        text = on_gpu.to_text()
        assert "2 x NVIDIA H200, CUDA capability 9.0, 140 GiB each, driver 595.91" in text

    def test_without_nvml_it_says_what_is_not_recorded_where_there_is_a_gpu(
        self, look: Any
    ) -> None:
        packages = (missing("nvidia-ml-py", "gpu"),)
        assert look(packages=packages).problems == ()
        kernels = {"path": "compiled", "reason": "compiled at installation", "fix": ""}
        cuda = torch(build="CUDA 13.0", device=GPU, kernels=kernels)
        what, fix, is_blocking = only_problem(look(packages=packages, torch_=cuda))
        assert what.startswith("nvidia-ml-py is missing: ")
        for lost in ("clocks", "throttle reasons", "not rejected", "other processes"):
            assert lost in what
        assert fix == "pip install 'vegas-tune[gpu]'"
        assert not is_blocking
        there = (package("nvidia-ml-py", extra="gpu"),)
        assert look(packages=there, torch_=cuda).problems == ()

    def test_a_torch_that_cannot_be_imported_blocks_and_says_why(self, look: Any) -> None:
        diagnosis = look(torch_=Torch(error="ImportError: libcudart.so.13: no such file"))
        what, fix, is_blocking = only_problem(diagnosis)
        assert "libcudart.so.13" in what
        assert "force-reinstall" in fix
        assert is_blocking

    def test_a_cpu_build_beside_a_driver_is_said(self, look: Any) -> None:
        diagnosis = look(machine_=machine(has_nvidia_driver=True))
        assert "torch is a CPU build" in only_problem(diagnosis)[0]
        assert diagnosis.ok

    def test_a_cuda_build_that_sees_no_device_is_said(self, look: Any) -> None:
        diagnosis = look(machine_=machine(has_nvidia_driver=True), torch_=torch(build="CUDA 13.0"))
        assert "(CUDA 13.0) sees no device" in only_problem(diagnosis)[0]

    @pytest.mark.parametrize(("state", "is_ok"), [("ready", True), ("absent", False)])
    def test_a_read_only_cache_blocks_until_the_model_is_there(
        self, look: Any, state: str, is_ok: bool
    ) -> None:
        diagnosis = look(cache_=cache(is_writable=False, packaged_model=state))
        what, fix, is_blocking = only_problem(diagnosis)
        assert "cannot be written to" in what
        assert "VEGAS_TUNE_CACHE" in fix
        assert diagnosis.ok is is_ok is not is_blocking

    @pytest.mark.parametrize(("state", "is_ok"), [("ready", True), ("fetched", False)])
    def test_a_full_disk_blocks_until_the_model_is_there(
        self, look: Any, state: str, is_ok: bool
    ) -> None:
        diagnosis = look(cache_=cache(free_bytes=100_000_000, packaged_model=state))
        assert diagnosis.ok is is_ok
        if not is_ok:
            assert only_problem(diagnosis)[0].startswith("100 MB are free")

    @pytest.mark.parametrize(
        ("state", "is_ok"), [("ready", True), ("fetched", True), ("absent", False)]
    )
    def test_offline_blocks_only_what_must_be_fetched(
        self, look: Any, monkeypatch: pytest.MonkeyPatch, state: str, is_ok: bool
    ) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        diagnosis = look(cache_=cache(packaged_model=state))
        assert diagnosis.is_offline
        assert "fetching is switched off" in diagnosis.to_text()
        assert diagnosis.ok is is_ok

    def test_no_pip_blocks_fetching(self, look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        hide(monkeypatch, doctor, "pip")
        assert look().ok
        diagnosis = look(cache_=cache(packaged_model="absent"))
        assert "-m ensurepip" in only_problem(diagnosis)[1]
        assert not diagnosis.ok

    def test_little_memory_is_said_and_does_not_block(self, look: Any) -> None:
        diagnosis = look(machine_=machine(available_bytes=2_000_000_000))
        what, fix, is_blocking = only_problem(diagnosis)
        assert what.startswith("2 GB of memory are free")
        assert "--batch 2" in fix
        assert not is_blocking

    def test_blocking_problems_come_first(self, look: Any) -> None:
        diagnosis = look(
            packages=(package("rich", version="1.0", fits=False), missing("numpy")),
            machine_=machine(available_bytes=1),
        )
        assert [each.is_blocking for each in diagnosis.problems] == [True, False, False]
        assert "not ready" in diagnosis.to_text()

    def test_requirements_that_cannot_be_read_are_said(
        self, look: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        look()

        def refuse() -> tuple[Package, ...]:
            raise RequirementsUnknownError("vegas-tune is not installed", is_incomplete=False)

        monkeypatch.setattr(doctor, "read_packages", refuse)
        diagnosis = diagnose()
        assert "versions could not be checked" in only_problem(diagnosis)[0]
        assert diagnosis.ok

    def test_is_one_json_document(self, look: Any) -> None:
        values = json.loads(json.dumps(look(packages=(missing("numpy"),)).to_dict()))
        assert values["ok"] is False
        assert values["packages"][0]["name"] == "numpy"
        assert values["problems"][0]["is_blocking"] is True


class TestPackages:
    def fake(self, monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
        lines = [
            "optuna<6,>=5",
            "torch>=2.11",
            'gguf>=0.17; extra == "demo"',
            'vllm<0.34,>=0.33; extra == "vllm"',
            'pytest>=9; extra == "dev"',
            'pywin32>=1; sys_platform == "win32"',
        ]

        class Described:
            def get_all(self, _: str) -> list[str]:
                return ["demo", "vllm", "dev"]

        def version(name: str) -> str:
            if name not in installed:
                raise metadata.PackageNotFoundError(name)
            return installed[name]

        monkeypatch.setattr(metadata, "requires", lambda _: lines)
        monkeypatch.setattr(metadata, "metadata", lambda _: Described())
        monkeypatch.setattr(metadata, "version", version)

    def test_ranges_extras_and_platforms_are_told_apart(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.fake(monkeypatch, {"optuna": "4.9.0", "torch": "2.13.0+cpu"})
        found = {each.name: each for each in read_packages()}
        assert list(found) == ["optuna", "torch", "gguf", "vllm"]
        assert (found["optuna"].required, found["optuna"].fits) == (">=5,<6", False)
        assert found["torch"].fits
        assert (found["gguf"].extra, found["gguf"].version) == ("demo", None)
        assert found["vllm"].requirement == "vllm>=0.33,<0.34"

    def test_a_pre_release_in_the_range_fits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake(monkeypatch, {"torch": "2.15.0.dev20261101+cu130"})
        assert next(each for each in read_packages() if each.name == "torch").fits

    def test_a_project_that_is_not_installed_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(name: str) -> list[str]:
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "requires", refuse)
        with pytest.raises(RequirementsUnknownError, match="not installed as a package") as caught:
            read_packages()
        assert not caught.value.is_incomplete

    def test_without_packaging_the_installation_is_incomplete(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "packaging.requirements", None)
        with pytest.raises(RequirementsUnknownError, match="packaging is missing") as caught:
            read_packages()
        assert caught.value.is_incomplete

    def test_this_environment_is_read_as_it_is(self) -> None:
        found = {each.name: each for each in read_packages()}
        assert found["typer"].version == metadata.version("typer")
        assert found["torch"].fits
        assert requirements.PROJECT not in found


class TestCache:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = tmp_path / "not" / "there"
        monkeypatch.setenv("VEGAS_TUNE_CACHE", str(folder))
        return folder

    def test_a_folder_that_is_not_there_is_not_made(self, folder: Path, tmp_path: Path) -> None:
        seen = look_at_cache()
        assert (seen.size_bytes, seen.is_writable, seen.packaged_model) == (0, True, "absent")
        assert seen.free_bytes > 0
        assert list(tmp_path.iterdir()) == []

    def test_what_is_in_it_is_counted(self, folder: Path) -> None:
        (folder / "wheels").mkdir(parents=True)
        (folder / "wheels" / SMOLLM2.wheel).write_bytes(b"x" * 1000)
        (folder / "other").write_bytes(b"x" * 234)
        seen = look_at_cache()
        assert seen.size_bytes == 1234
        assert seen.packaged_model == "fetched"
        assert len(list(folder.iterdir())) == 2

    def test_a_cut_off_conversion_is_not_ready(self, folder: Path) -> None:
        stem = Path(SMOLLM2.member).stem
        checkpoint = folder / "checkpoints" / f"{stem}-{SMOLLM2.gguf_sha256[:12]}-v1"
        checkpoint.mkdir(parents=True)
        origin = {"gguf": "x", "gguf_sha256": "y", "quant": "q", "files": {"model": 5}}
        (checkpoint / "converted_from.json").write_text(json.dumps(origin))
        assert look_at_cache().packaged_model == "absent"
        (checkpoint / "model").write_bytes(b"12345")
        assert look_at_cache().packaged_model == "ready"

    @pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
    def test_a_read_only_folder_is_seen(self, folder: Path, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        try:
            assert not look_at_cache().is_writable
        finally:
            tmp_path.chmod(0o700)

    def test_a_disk_that_refuses_is_seen_whatever_the_permissions_say(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(**_: Any) -> None:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
        assert not look_at_cache().is_writable

    def test_the_home_folder_is_not_spelled_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("VEGAS_TUNE_CACHE", str(tmp_path / "models"))
        assert look_at_cache().path == "~/models"


class TestTorch:
    def test_is_asked_in_a_process_of_its_own(self) -> None:
        script = (
            "import sys; from vegas_tune.doctor import diagnose; diagnosis = diagnose(); "
            "assert 'torch' not in sys.modules; print(diagnosis.torch.version)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == metadata.version("torch")

    def test_missing_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hide(monkeypatch, surroundings, "torch")
        assert probe_torch() == Torch(error="not installed")

    def test_the_reason_of_a_failed_import_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(surroundings, "_PROBE", "raise ImportError('libtorch.so: cannot open')")
        assert probe_torch().error == "ImportError: libtorch.so: cannot open"

    def test_a_process_that_dies_without_a_word_is_said(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(surroundings, "_PROBE", "import os; os._exit(9)")
        assert probe_torch().error == "it ended with 9"

    def test_an_import_that_hangs_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(surroundings, "_PROBE", "import threading; threading.Event().wait()")
        monkeypatch.setattr(surroundings, "_PROBE_TIMEOUT_S", 0.2)
        assert "took more than 0.2 s" in probe_torch().error


def hide(monkeypatch: pytest.MonkeyPatch, module: Any, package_name: str) -> None:
    """Make one package look as if it were not installed."""
    find = module.importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == package_name else find(name, *rest)

    monkeypatch.setattr(module.importlib.util, "find_spec", without)
