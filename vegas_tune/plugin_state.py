"""Whether vLLM would draft here if asked to, and by which paths; asked in a process of its own."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

from vegas_runtime.config import allowed_vllm_plugins
from vegas_runtime.errors import VegasError
from vegas_runtime.vllm_plugin.child import PLUGIN_GROUP, PLUGIN_NAME
from vegas_tune.wording import line

_PROBE_TIMEOUT_S: Final = 180
_PROBE: Final = (
    "import sys; sys.path[:] = sys.argv[1:]; from vegas_tune.plugin_state import print_probe; "
    "print_probe()"
)
# A model like those the plugin is for, 16 drafts at most: which paths run depends on the device.
_EXAMPLE: Final = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}


@dataclass(frozen=True, kw_only=True)
class PluginState:
    """What stands between this machine and a drafting vLLM.

    Attributes:
        vllm: installed version; None without one.
        is_registered: whether vLLM finds the plugin among the installed packages.
        is_allowed: whether `VLLM_PLUGINS` lets it be loaded.
        error: why it would refuse to start; empty when it would not.
        collection: how scores would be read off the verify pass; empty without a CUDA device.
        draft_attention: how drafts would attend; empty without a CUDA device.
        reason: why these paths.
    """

    vllm: str | None
    is_registered: bool = False
    is_allowed: bool = True
    error: str = ""
    collection: str = ""
    draft_attention: str = ""
    reason: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether `--speculative-config` with method `sparse_attn` would be understood."""
        return self.vllm is not None and self.is_registered and self.is_allowed and not self.error

    def to_text(self) -> str:
        """One line."""
        if self.vllm is None:
            return "inactive: vLLM is not installed"
        if not self.is_registered:
            return f"inactive: vLLM {self.vllm} does not find it among the installed packages"
        if not self.is_allowed:
            return f"inactive: VLLM_PLUGINS leaves {PLUGIN_NAME!r} out"
        if self.error:
            return f"inactive: {self.error}"
        if not self.collection:
            return f"ready in vLLM {self.vllm}; no CUDA device to serve on"
        return (
            f"ready in vLLM {self.vllm}; collection {self.collection}, draft attention "
            f"{self.draft_attention} ({self.reason})"
        )

    def problem(self) -> tuple[str, str] | None:
        """What is wrong, and what mends it; None when nothing is, or vLLM is not there at all."""
        if self.vllm is None or self.is_ready:
            return None
        if not self.is_registered:
            return (
                "vLLM is installed and does not find the plugin, so it would refuse a profile's "
                "speculative config.",
                "pip install vegas-tune, into the environment that vLLM is in",
            )
        if not self.is_allowed:
            return (
                f"VLLM_PLUGINS does not name {PLUGIN_NAME!r}, so vLLM leaves the plugin out.",
                f"unset VLLM_PLUGINS, or add {PLUGIN_NAME} to it",
            )
        return f"the plugin cannot run: {self.error}", "pip install 'vegas-tune[vllm]'"


def look_at_plugin() -> PluginState:
    """Ask vLLM, in a process of its own, where it is installed."""
    if importlib.util.find_spec("vllm") is None:
        return PluginState(vllm=None)
    allowed = allowed_vllm_plugins()
    state: dict[str, Any] = {
        "vllm": _version(),
        "is_registered": PLUGIN_NAME
        in {entry.name for entry in metadata.entry_points(group=PLUGIN_GROUP)},
        "is_allowed": allowed is None or PLUGIN_NAME in allowed,
    }
    command = [sys.executable, "-c", _PROBE, *sys.path]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return PluginState(**state, error=f"importing vLLM took more than {_PROBE_TIMEOUT_S} s.")
    except OSError as error:
        return PluginState(**state, error=f"a second Python process could not be started: {error}.")
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
        return PluginState(**state, error=f"vLLM cannot be imported: {line(last[0])}")
    return PluginState(**state, **json.loads(done.stdout.splitlines()[-1]))


def print_probe() -> None:
    """What `look_at_plugin` runs in its process: print what only vLLM itself can tell, as JSON."""
    sys.stdout.write(json.dumps(_probe()) + "\n")


def _probe() -> dict[str, str]:
    try:
        _plugin("patches").check_hooks()
    except VegasError as error:
        return {"error": error.message}
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return {}
    geometry, paths = _plugin("geometry"), _plugin("paths")
    shape = geometry.AttentionShape(
        num_layers=1, dtype=torch.bfloat16, block_size=16, scale=1.0, **_EXAMPLE
    )
    limits = geometry.Limits(max_batch=1, max_len=4096, max_rows=16, max_ratio=0.1, min_tokens=16)
    device = torch.device("cuda")
    collection, why = paths.choose_verify("auto", shape, limits, device, rows="two")
    draft_attention, why_draft = paths.choose_draft("auto", shape, limits, device)
    reason = why if why == why_draft else f"{why}; drafts: {why_draft}"
    return {"collection": collection, "draft_attention": draft_attention, "reason": reason}


def _plugin(name: str) -> Any:
    """A module that loads vLLM, which nothing else in this package may."""
    return importlib.import_module(f"vegas_runtime.vllm_plugin.{name}")


def _version() -> str:
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return "of unknown version"
