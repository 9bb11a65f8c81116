"""What the doctor says of the vLLM plugin, and that it asks vLLM itself."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from importlib import metadata
from typing import Any

import pytest

from vegas_tune import doctor, plugin_state
from vegas_tune.plugin_state import PluginState, look_at_plugin

READY = PluginState(
    vllm="0.33.0",
    is_registered=True,
    collection="fused",
    draft_attention="fa3",
    reason="fastest that runs here",
)


def _with(**changes: Any) -> PluginState:
    return PluginState(**{**vars(READY), **changes})


@pytest.mark.parametrize(
    ("state", "says", "fix"),
    [
        (PluginState(vllm=None), "vLLM is not installed", None),
        (_with(is_registered=False), "does not find it", "pip install vegas-tune"),
        (_with(is_allowed=False), "VLLM_PLUGINS leaves 'vegas' out", "unset VLLM_PLUGINS"),
        (_with(error="vLLM 0.40 is installed."), "vLLM 0.40 is installed", "vegas-tune[vllm]"),
        (_with(collection=""), "no CUDA device to serve on", None),
        (READY, "collection fused, draft attention fa3 (fastest that runs here)", None),
    ],
)
def test_every_state_is_said_and_mended(state: PluginState, says: str, fix: str | None) -> None:
    assert says in state.to_text()
    problem = state.problem()
    assert (problem is None) == (fix is None)
    if problem is not None and fix is not None:
        assert fix in problem[1]
    assert state.is_ready == state.to_text().startswith("ready")


def test_the_doctor_shows_it_and_names_what_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "look_at_plugin", lambda: _with(is_allowed=False))
    diagnosis = doctor.diagnose()
    text = diagnosis.to_text()
    assert "vLLM plugin" in text
    assert "VLLM_PLUGINS does not name 'vegas'" in text
    problem = next(one for one in diagnosis.problems if "VLLM_PLUGINS" in one.what)
    assert not problem.is_blocking
    assert diagnosis.to_dict()["plugin"]["is_allowed"] is False


def _installed(monkeypatch: pytest.MonkeyPatch, *, code: int, out: str = "", err: str = "") -> None:
    entry = metadata.EntryPoint("vegas", "vegas_runtime.vllm_plugin:register", "g")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(plugin_state.metadata, "entry_points", lambda group: [entry])
    monkeypatch.setattr(plugin_state, "_version", lambda: "0.33.0")
    done = subprocess.CompletedProcess([], code, stdout=out, stderr=err)
    monkeypatch.setattr(plugin_state.subprocess, "run", lambda *_, **__: done)


def test_what_vllm_prints_while_it_loads_is_not_taken_for_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    answer = {"collection": "fa3", "draft_attention": "fa3", "reason": "so"}
    _installed(monkeypatch, code=0, out=f"INFO loading\n{json.dumps(answer)}\n")
    state = look_at_plugin()
    assert state.is_ready
    assert state.collection == "fa3"


def test_a_vllm_that_does_not_import_is_told_by_its_last_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "vegas,other")
    _installed(monkeypatch, code=1, err="Traceback ...\nImportError: libcuda.so.1\n")
    state = look_at_plugin()
    assert state.is_allowed
    assert state.error == "vLLM cannot be imported: ImportError: libcuda.so.1"


@pytest.mark.parametrize(("value", "is_allowed"), [("", False), ("other", False), ("vegas", True)])
def test_the_environment_may_leave_the_plugin_out(
    monkeypatch: pytest.MonkeyPatch, value: str, is_allowed: bool
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", value)
    _installed(monkeypatch, code=0, out="{}\n")
    assert look_at_plugin().is_allowed is is_allowed


@pytest.mark.vllm
def test_the_installed_vllm_is_the_one_the_plugin_was_made_for() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed (extra `vllm`)")
    assert look_at_plugin().error == ""
