"""Where the plugin changes or leans on vLLM: contracts, versions, and what registering costs."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from vllm_process import ROOT, Refused, VllmProcess, need_vllm

from vegas_runtime.vllm_plugin.patches import HOOKS, Hook, is_supported

RFC = {"method": "sparse_attn", "sparse_attn_ratio": 0.07, "num_speculative_tokens": 4}


# ---------------------------------------------------------------------------- without vLLM


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = project["entry-points"]["vllm.general_plugins"]
    module, _, name = declared["vegas"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_the_configuration_loads_neither_torch_nor_vllm() -> None:
    """A front end without a GPU build of either reads it, and so does the tuner."""
    code = (
        "import sys, vegas_runtime.vllm_plugin, vegas_runtime.vllm_plugin.config, "
        "vegas_runtime.vllm_plugin.control, vegas_runtime.vllm_plugin.patches\n"
        "print(*{name.split('.')[0] for name in sys.modules} & {'torch', 'vllm', 'transformers'})"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert found.stdout.strip() == ""


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.33.0", True),
        ("0.33.1+cu129", True),
        ("0.33.0rc2", True),
        ("0.34.0", False),
        ("0.3.3", False),
        ("1.33.0", False),
        ("0.330.0", False),
    ],
)
def test_supported_versions(version: str, supported: bool) -> None:
    assert is_supported(version) is supported


def test_every_hook_says_why() -> None:
    assert len({hook.target for hook in HOOKS}) == len(HOOKS)
    for hook in HOOKS:
        assert len(hook.reason.split()) > 5, hook.target
        assert hook.parameters or hook.uses, hook.target


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (Hook(target="json:dumped", reason=""), "json:dumped does not exist"),
        (Hook(target="no_such_module:f", reason=""), "no_such_module:f does not exist"),
        (Hook(target="bisect:insort", reason="", parameters=("a", "x")), "not ('a', 'x')"),
        (
            Hook(target="json.decoder:JSONDecoder.decode", reason="", uses=("raw_decode", "eval")),
            "no longer uses eval",
        ),
        (
            Hook(target="json:loads", reason="", uses=("JSONDecodeError",)),
            "",
        ),
    ],
)
def test_a_hook_tells_how_its_target_moved(hook: Hook, said: str) -> None:
    found = hook.deviation()
    assert said in found
    assert bool(found) is bool(said)


# -------------------------------------------------------------------------------- with vLLM


@pytest.mark.vllm
def test_the_installed_vllm_is_as_every_hook_needs_it(vllm: VllmProcess) -> None:
    assert vllm.ask("deviations") == {hook.target: "" for hook in HOOKS}


@pytest.mark.vllm
def test_a_moved_target_stops_the_start_with_one_sentence(vllm: VllmProcess) -> None:
    target = "vllm.v1.core.sched.scheduler:Scheduler.schedule"
    with pytest.raises(Refused, match="is not the one the plugin") as refused:
        vllm.ask("moved", target=target, parameters=["self"])
    assert refused.value.kind == "BackendError"
    assert target in str(refused.value)
    vllm.ask("moved", target=target, parameters=["self", "throttle_prefills"])


@pytest.mark.vllm
def test_registering_loads_nothing_that_needs_cuda(vllm: VllmProcess) -> None:
    loaded = {*vllm.ask("loaded")}
    heavy = {
        "vllm.v1.engine.core",
        "vllm.v1.worker.gpu_worker",
        "vllm.v1.worker.gpu.model_runner",
        "vllm.v1.attention.backends.flash_attn",
        "vllm.vllm_flash_attn",
        "vegas_runtime.vllm_plugin.worker",
        "vegas_runtime.kernels.ops",
    }
    assert not loaded & heavy


@pytest.mark.vllm
def test_registering_twice_wraps_once(vllm: VllmProcess) -> None:
    assert vllm.ask("wrapped_times") == {
        "create_speculative_config": 1,
        "_set_default_max_num_seqs_and_batched_tokens_args": 1,
        "create_engine_config": 1,
        "add_cli_args": 1,
    }


@pytest.mark.vllm
def test_a_spawned_engine_core_gets_its_methods_by_registering(vllm: VllmProcess) -> None:
    """Its process imports the core, then calls the entry point; nobody builds arguments there."""
    with VllmProcess() as spawned:
        assert spawned.ask("core_methods") == [
            "vegas_configure",
            "vegas_drain_records",
            "vegas_start_recording",
            "vegas_status",
        ]


@pytest.mark.vllm
def test_another_version_refuses_vegas_and_serves_everything_else(llama: str) -> None:
    need_vllm()
    with VllmProcess(FAKE_VERSION="0.34.0") as newer:
        plain = newer.ask("build", arguments={"model": llama})
        assert plain["worker_cls"] == "vllm.v1.worker.gpu_worker.Worker"
        for asking in (
            {"speculative_config": RFC},
            {"spec_method": "sparse_attn", "spec_tokens": 4},
        ):
            with pytest.raises(Refused, match=r"vLLM 0\.34\.0 is installed; .* vllm>=0\.33,<0\.34"):
                newer.ask("build", arguments={"model": llama, **asking})


@pytest.mark.vllm
def test_the_command_line_offers_the_method(vllm: VllmProcess, llama: str, tmp_path: Path) -> None:
    argv = ["--model", llama, "--spec-method", "sparse_attn"]
    with pytest.raises(Refused, match="`num_speculative_tokens` is missing"):
        vllm.ask("build", arguments={}, argv=argv)
    with pytest.raises(Refused) as refused:
        vllm.ask("build", arguments={}, argv=["--model", llama, "--spec-method", "sparse"])
    assert refused.value.kind == "SystemExit"
