"""vLLM's real configuration code in a process of its own, on a made-up H200.

vLLM binds its platform while it is imported, and the plugin changes classes of vLLM: neither may
leak into other tests. Run as a script it reads one JSON order per line from standard input and
answers each with one line; `VllmProcess` is the other end.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Self
from unittest import mock

import pytest

ROOT: Final = Path(__file__).parent.parent
LLAMA: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}


def write_model(folder: Path, **changes: Any) -> str:
    """A model of which only the configuration exists."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}), encoding="utf-8")
    return str(folder)


def need_vllm() -> None:
    """Skip the test, with the reason, where vLLM's Python is not installed."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed (extra `vllm`)")


class Refused(Exception):  # noqa: N818 - an answer, not a fault of the process
    """What vLLM or the plugin raised.

    Attributes:
        kind: its class name.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class VllmProcess:
    """The other end of this script."""

    def __init__(self, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                # Found by name it would be registered twice; the orders below register it.
                "VLLM_PLUGINS": "",
                # vLLM trusts Triton without a driver only where no GPU is visible yet.
                "CUDA_VISIBLE_DEVICES": "",
                "VLLM_LOGGING_PREFIX": "",
                **environment,
            },
        )

    def ask(self, order: str, **arguments: Any) -> Any:
        """Have an order carried out.

        Raises:
            Refused: it raised there.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([order, arguments]) + "\n")
        stdin.flush()
        while line := stdout.readline():
            if line.startswith("ANSWER "):
                answer = json.loads(line.removeprefix("ANSWER "))
                if "refused" in answer:
                    raise Refused(*answer["refused"])
                return answer["value"]
        raise AssertionError(f"the vLLM process ended with {self._process.wait()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(timeout=60)


# ------------------------------------------------------------------------- inside the process


def pretend_cuda() -> None:
    """Make vLLM see eight H200; its compiled modules are not loaded."""
    sys.modules["vllm._C_stable_libtorch"] = ModuleType("vllm._C_stable_libtorch")
    from vllm import platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability, PlatformEnum

    class FakeCuda(CudaPlatformBase):
        _enum = PlatformEnum.CUDA
        capability = (9, 0)

        def is_cumem_allocator_available(self) -> bool:
            return True

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*cls.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H200"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 141 << 30

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

    platforms._current_platform = FakeCuda()


def know_models() -> None:
    """Tell vLLM what its model classes support, instead of importing each with its kernels."""
    from vllm.model_executor.models import registry

    plain: dict[str, Any] = {
        field.name: False for field in dataclasses.fields(registry._ModelInfo)
    } | {
        "is_text_generation_model": True,
        "attn_type": "decoder",
        "default_seq_pooling_type": "LAST",
        "default_tok_pooling_type": "ALL",
        "score_type": "bi-encoder",
        "supports_pp": True,
        "supports_lora": True,
        "supported_video_pruning_methods": (),
    }
    special = {"MambaForCausalLM": {"is_attention_free": True, "has_inner_state": True}}

    def inspect(model: Any) -> Any:
        name = model.class_name
        return registry._ModelInfo(**{**plain, "architecture": name, **special.get(name, {})})

    registry._LazyRegisteredModel.inspect_model_cls = inspect


def engine_config(arguments: Mapping[str, Any], argv: list[str] | None = None) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if argv is None:
        args = EngineArgs(**arguments, skip_tokenizer_init=True)
    else:
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        args = EngineArgs.from_cli_args(parser.parse_args([*argv, "--skip-tokenizer-init"]))
    return args.create_engine_config(UsageContext.OPENAI_API_SERVER)


def describe(config: Any) -> dict[str, Any]:
    """What the tests look at."""
    from vegas_runtime.vllm_plugin.config import settings_of

    settings, speculative = settings_of(config), config.speculative_config
    graphs = config.compilation_config
    described: dict[str, Any] = {
        "worker_cls": config.parallel_config.worker_cls,
        "hash": config.compute_hash(),
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "is_v2": config.use_v2_model_runner,
        "capture_sizes": graphs.cudagraph_capture_sizes,
        "max_capture_size": graphs.max_cudagraph_capture_size,
        "cudagraph_mode": graphs.cudagraph_mode.name,
        "backend": getattr(config.attention_config.backend, "name", None),
        "num_lookahead_tokens": config.num_lookahead_tokens,
        "additional_keys": sorted(config.additional_config),
    }
    if speculative is not None:
        described["speculative"] = {
            "method": speculative.method,
            "num_speculative_tokens": speculative.num_speculative_tokens,
            "schedule": speculative.num_speculative_tokens_per_batch_size,
            "draft_sample_method": speculative.draft_sample_method,
            "drafts_with_target": speculative.draft_model_config is config.model_config,
        }
    if settings is not None:
        described["settings"] = {
            "config": settings.config.to_dict(),
            "gammas": settings.gammas,
            "max_ratio": settings.max_ratio,
            "collection": settings.collection,
            "draft_attention": settings.draft_attention,
        }
    return described


def serve(orders: Mapping[str, Callable[..., Any]]) -> None:
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"value": orders[name](**arguments)}
        except BaseException as error:
            answer = {"refused": [type(error).__name__, str(error)]}
        print("ANSWER " + json.dumps(answer), flush=True)  # noqa: T201 - the protocol


def main() -> None:
    pretend_cuda()
    know_models()
    if "FAKE_VERSION" in os.environ:
        from vllm import version

        version.__version__ = os.environ["FAKE_VERSION"]
    from vegas_runtime.vllm_plugin import register

    register()
    loaded = sorted(sys.modules)

    def build(
        arguments: dict[str, Any],
        argv: list[str] | None = None,
        capability: tuple[int, int] = (9, 0),
        is_nvidia: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        from vllm import platforms

        gpu = platforms.current_platform
        kind = platforms.PlatformEnum.CUDA if is_nvidia else platforms.PlatformEnum.OOT
        with (
            mock.patch.dict(os.environ, environment or {}),
            mock.patch.multiple(type(gpu), capability=tuple(capability), _enum=kind),
        ):
            return describe(engine_config(arguments, argv))

    def pickled(arguments: dict[str, Any]) -> dict[str, Any]:
        return describe(pickle.loads(pickle.dumps(engine_config(arguments))))

    def twice(arguments: dict[str, Any]) -> list[dict[str, Any]]:
        from vllm.engine.arg_utils import EngineArgs

        args = EngineArgs(**arguments, skip_tokenizer_init=True)
        return [describe(args.create_engine_config()) for _ in range(2)]

    def warned(arguments: dict[str, Any]) -> list[str]:
        lines: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("vllm.vegas")
        logger.addHandler(handler)
        try:
            engine_config(arguments)
        finally:
            logger.removeHandler(handler)
        return lines

    def lookup(table: list[list[int]], max_batch: int, most: int) -> list[int]:
        from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

        return build_dynamic_sd_schedule_lookup(table, max_batch, most)  # type: ignore[no-any-return]

    def play(arguments: dict[str, Any], script: list[list[Any]]) -> list[Any]:
        import vllm_core

        from vegas_runtime.vllm_plugin.config import settings_of

        config = engine_config(arguments)
        settings = settings_of(config)
        held = {} if settings is None else settings.config.to_dict()
        return vllm_core.play(config, held, script)

    def deviations() -> dict[str, str]:
        from vegas_runtime.vllm_plugin.patches import HOOKS

        return {hook.target: hook.deviation() for hook in HOOKS}

    def moved(target: str, **expected: list[str]) -> None:
        from vegas_runtime.vllm_plugin.patches import Hook, check_hooks

        contract = {name: tuple(values) for name, values in expected.items()}
        check_hooks((Hook(target=target, reason="a test", **contract),))

    def wrapped_times() -> dict[str, int]:
        """How often each wrapped method stands around vLLM's, after registering again."""
        from vllm.engine.arg_utils import EngineArgs

        register()
        counts = {}
        for name in vars(EngineArgs):
            count, function = 0, getattr(EngineArgs, name)
            while (
                hasattr(function, "__wrapped__")
                and "vegas_runtime" in function.__code__.co_filename
            ):
                count, function = count + 1, function.__wrapped__
            if count:
                counts[name] = count
        return counts

    def core_methods() -> list[str]:
        from vllm.v1.engine.core import EngineCore

        register()
        return sorted(name for name in vars(EngineCore) if name.startswith("vegas"))

    serve(
        {
            "play": play,
            "deviations": deviations,
            "moved": moved,
            "wrapped_times": wrapped_times,
            "core_methods": core_methods,
            "build": build,
            "pickled": pickled,
            "twice": twice,
            "warned": warned,
            "lookup": lookup,
            "loaded": lambda: loaded,
        }
    )


if __name__ == "__main__":
    main()
