from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm_process import VllmProcess, need_vllm, write_model

from vegas_runtime.engine.loading import ModelSource, fetch, resolve_model
from vegas_runtime.errors import ModelError

# Processes that tests start import the checkout's packages and `benchmarks` as well.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
)

# Without a GPU Triton's kernels run in its interpreter, which is chosen when they are defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton") is not None:
        from triton_interpreter import remember_builtins

        remember_builtins()


@pytest.fixture(scope="session")
def smollm2_source() -> ModelSource:
    """SmolLM2-135M from the cache, fetched and converted at first use.

    Where it can be had in no way the test is skipped with the reason; CI (`CI=true`) fails.
    """
    try:
        return fetch(resolve_model("smollm2-135m"), report=print)
    except ModelError as error:
        if os.environ.get("CI", "").lower() in ("true", "1"):
            pytest.fail(f"CI must run the tests on SmolLM2: {error}")
        pytest.skip(str(error))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runtime's cache folder: not there yet, and nothing keeps it from fetching."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("VEGAS_TUNE_CACHE", str(folder))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture(scope="session")
def vllm() -> Iterator[VllmProcess]:
    """vLLM's own configuration, scheduler and engine core on a made-up GPU, plugin registered."""
    need_vllm()
    with VllmProcess() as process:
        yield process


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of which only the configuration exists."""
    return write_model(tmp_path_factory.mktemp("llama"))
