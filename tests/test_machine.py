from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from profiles import GPU, make_profile
from vegas_runtime import machine
from vegas_tune.apply import machine_facts, match_profile


def test_reading_the_machine_does_not_import_torch() -> None:
    code = (
        "import sys; from vegas_runtime.machine import device_facts, runtime_facts;"
        "print(device_facts('cpu'), runtime_facts('cpu'), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip().endswith("False")
    assert "'vegas_runtime'" in done.stdout


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (
            "processor : 0\nmodel name\t: AMD EPYC  9B14 96-Core\nmodel name : x\n",
            "AMD EPYC 9B14 96-Core",
        ),
        ("processor : 0\nCPU implementer : 0x41\nCPU part : 0xd40\n", "machine 0x41 0xd40"),
        ("", "processor"),
    ],
)
def test_a_cpu_is_named_as_well_as_the_system_can(
    cpuinfo: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo)
    monkeypatch.setattr(machine, "_CPUINFO", path)
    monkeypatch.setattr("platform.machine", lambda: "machine")
    monkeypatch.setattr("platform.processor", lambda: "processor")

    assert machine.cpu_name() == expected


def test_a_container_limit_counts_as_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, unlimited = tmp_path / "limit", tmp_path / "unlimited"
    limit.write_text("1073741824\n")
    unlimited.write_text("max\n")

    monkeypatch.setattr(machine, "_MEMORY_LIMITS", (unlimited, tmp_path / "none", limit))
    assert machine.memory_bytes() == 2**30
    monkeypatch.setattr(machine, "_MEMORY_LIMITS", (unlimited,))
    assert (machine.memory_bytes() or 0) > 2**30


@pytest.fixture
def gpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with two GPUs, as torch and the driver would describe it."""
    driver = tmp_path / "version"
    driver.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  595.91  Tue Nov 3 2026\nGCC: 13\n"
    )
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, total_memory=139.8 * 2**30, uuid="abc"
    )
    torch = SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: 2,
            get_device_properties=lambda _: properties,
        ),
        version=SimpleNamespace(cuda="13.0"),
        get_num_threads=lambda: 4,
    )
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ncase "$*" in *power.limit*GPU-abc) echo 700.00;; *) exit 9;; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(machine, "_DRIVER", driver)
    monkeypatch.setattr("shutil.which", lambda _: str(tool))
    return SimpleNamespace(torch=torch, tool=tool)


@pytest.mark.usefixtures("gpu_machine")
def test_a_gpu_is_described_and_matched() -> None:
    profile = make_profile(**GPU)

    assert machine.device_facts() == {
        "kind": "cuda",
        "class": "NVIDIA H200",
        "sm": "9.0",
        "memory_gib": 139.8,
        "count": 2,
        "power_limit_w": 700.0,
    }
    facts = machine.runtime_facts("cuda")
    assert (facts["cuda"], facts["driver"], facts["threads"]) == ("13.0", "595.91", 4)
    assert "cuda" not in machine.runtime_facts("cpu")
    findings = match_profile(profile, machine_facts(profile))
    assert [finding for finding in findings if finding.level == "hard"] == []
    # A profile for the CPU is compared with the CPU.
    assert machine_facts(make_profile()).device["kind"] == "cpu"


@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 9\n", "#!/bin/sh\necho '[N/A]'\n", "no program"])
def test_a_driver_tool_that_does_not_tell_leaves_the_fact_out(
    text: str, gpu_machine: SimpleNamespace
) -> None:
    gpu_machine.tool.write_text(text)

    assert "power_limit_w" not in machine.device_facts()


def test_gpus_are_counted_by_what_may_be_used_then_by_the_driver_tool(
    gpu_machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    gpu_machine.tool.write_text(
        '#!/bin/sh\ncase "$*" in *=index*-i*) exit 9;; *=index*) printf "0\\n1\\n2\\n";; esac\n'
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.num_gpus() == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5f")
    assert machine.num_gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.num_gpus() == 0
    assert "torch" not in sys.modules

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert machine.num_gpus() is None


def test_a_driver_without_a_usable_gpu_means_the_cpu(gpu_machine: SimpleNamespace) -> None:
    gpu_machine.torch.cuda.is_available = lambda: False

    assert machine.device_facts("cuda")["kind"] == "cpu"
