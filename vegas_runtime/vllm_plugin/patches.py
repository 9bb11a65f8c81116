"""Every place where vLLM is changed, and every place the plugin leans on, with the reason.

What vLLM offers as an extension point (entry point, `worker_cls`, attention registry) needs nothing
here. The rest is listed in `HOOKS`; `check_hooks` compares each with the installed vLLM before
Vegas starts, so that a moved target is one sentence and not a wrong result. Checked on 0.33.0.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from vegas_runtime.config import RFC_METHOD
from vegas_runtime.errors import BackendError, ConfigError
from vegas_runtime.vllm_plugin import control
from vegas_runtime.vllm_plugin.config import (
    WORKER_CLASS,
    is_ours,
    settings_of,
    translate,
    with_settings,
)
from vegas_runtime.vllm_plugin.graph_sizes import GRAPH_REQUESTS, capture_sizes
from vegas_runtime.vllm_plugin.refusals import refuse, refuse_model
from vegas_runtime.vllm_plugin.setting_warnings import setting_warnings

SUPPORTED: Final = (0, 33)
REQUIREMENT: Final = "vllm>=0.33,<0.34"


@dataclass(frozen=True, kw_only=True)
class Hook:
    """One place in vLLM that is changed or leaned on.

    Attributes:
        target: module and qualified name, `module:Class.method`.
        reason: why no extension point serves.
        parameters: names of its parameters, in order; what callers rely on.
        uses: attributes that must occur in its body.
    """

    target: str
    reason: str
    parameters: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()

    def deviation(self) -> str:
        """How the installed vLLM differs from what this hook needs; empty when it does not."""
        module, _, name = self.target.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return f"{self.target} does not exist"
        function = inspect.unwrap(found)
        if self.parameters:
            parameters = tuple(inspect.signature(function).parameters)
            if parameters != self.parameters:
                return f"{self.target} takes {parameters}, not {self.parameters}"
        missing = [use for use in self.uses if use not in function.__code__.co_names]
        return f"{self.target} no longer uses {missing[0]}" if missing else ""


_ARGS: Final = "vllm.engine.arg_utils:EngineArgs"
_CORE: Final = "vllm.v1.engine.core:EngineCore"

HOOKS: Final = (
    Hook(
        target=f"{_ARGS}.create_speculative_config",
        reason="the speculative config is a closed dataclass with a fixed list of methods, so the "
        "RFC's method and keys have to be translated before it is built",
        parameters=("self", "target_model_config", "target_parallel_config"),
        uses=("speculative_config", "spec_method", "spec_model", "spec_tokens"),
    ),
    Hook(
        target=f"{_ARGS}._set_default_max_num_seqs_and_batched_tokens_args",
        reason="only here is it known how many requests may run, which decides the sizes CUDA "
        "graphs are captured for; vLLM's own limit of 512 tokens covers 73 requests at gamma 6",
        parameters=("self", "usage_context", "model_config", "parallel_config"),
        uses=("max_num_seqs", "max_num_batched_tokens"),
    ),
    Hook(
        target=f"{_ARGS}.create_engine_config",
        reason="what cannot be served is known once the whole configuration is there; refusing it "
        "later would cost the user a model load",
        parameters=("self", "usage_context", "headless"),
        uses=("create_speculative_config", "additional_config", "cudagraph_capture_sizes"),
    ),
    Hook(
        target=f"{_ARGS}.add_cli_args",
        reason="argparse refuses `--spec-method sparse_attn` by its list of choices",
        parameters=("parser",),
    ),
    Hook(
        target=f"{_CORE}.collective_rpc",
        reason="the engine core's methods are what a client can call by name; run-time control "
        "adds some, because the scheduler, which decides gamma, lives there",
        parameters=("self", "method", "timeout", "args", "kwargs"),
    ),
    Hook(
        target="vllm.v1.engine.core:EngineCoreProc._handle_client_request",
        reason="calls of the methods added to the engine core are looked up by name here",
        uses=("_invoke_utility_method",),
    ),
    Hook(
        target="vllm.v1.core.sched.scheduler:Scheduler.__init__",
        reason="these decide gamma by batch size and how many requests run; they may change "
        "between two steps",
        uses=(
            "dynamic_sd_lookup",
            "num_spec_tokens",
            "max_num_running_reqs",
            "max_num_active_reqs",
        ),
    ),
    Hook(
        target="vllm.v1.core.sched.scheduler:Scheduler.schedule",
        reason="both are read afresh in every step",
        uses=("dynamic_sd_lookup", "max_num_active_reqs"),
    ),
)


def vllm_version() -> str:
    """The installed vLLM's version."""
    from vllm.version import __version__

    return str(__version__)


def is_supported(version: str) -> bool:
    """Whether the hooks were checked on this version of vLLM."""
    return tuple(version.split(".")[:2]) == tuple(map(str, SUPPORTED))


def check_hooks(hooks: tuple[Hook, ...] = HOOKS) -> None:
    """Compare what the plugin leans on with the installed vLLM.

    Raises:
        BackendError: another version, or a hook's target is not as it was.
    """
    version = vllm_version()
    hint = f'Install one that is: pip install "{REQUIREMENT}".'
    if not is_supported(version):
        raise BackendError(
            f"vLLM {version} is installed; method {RFC_METHOD!r} is served by a plugin for "
            f"{REQUIREMENT} and cannot run in it.",
            hint=hint,
        )
    deviations = [found for hook in hooks if (found := hook.deviation())]
    if deviations:
        raise BackendError(
            f"this build of vLLM {version} is not the one the plugin for method {RFC_METHOD!r} was "
            f"made for: {deviations[0]}.",
            hint=hint,
        )


def install() -> None:
    """Wrap vLLM's argument handling, and extend its engine core where one is loaded; idempotent.

    The engine core is not imported for it: in a process that starts one it is there already, and
    processes that only read arguments are spared its cost.
    """
    from vllm.engine.arg_utils import EngineArgs

    wrappers: dict[str, Callable[[Any], Any]] = {
        "create_speculative_config": _translating,
        "_set_default_max_num_seqs_and_batched_tokens_args": _sizing_graphs,
        "create_engine_config": _refusing,
    }
    if not is_supported(vllm_version()):
        wrappers = {"create_speculative_config": _checking_version}
    for name, wrap in wrappers.items():
        original = getattr(EngineArgs, name)
        if not hasattr(original, "vegas"):
            wrapped = wrap(original)
            wrapped.vegas = True
            setattr(EngineArgs, name, wrapped)
    add_cli_args = EngineArgs.add_cli_args
    if not hasattr(add_cli_args, "vegas"):
        EngineArgs.add_cli_args = staticmethod(_offering_method(add_cli_args))
    if "vllm.v1.engine.core" in sys.modules:
        install_core()


def install_core() -> None:
    """Give vLLM's engine core the methods of `control.UTILITIES`; idempotent."""
    from vllm.v1.engine.core import EngineCore

    for name, function in control.UTILITIES.items():
        setattr(EngineCore, name, function)


def requested(args: Any) -> dict[str, Any] | None:
    """What `EngineArgs` asks this plugin for, from every way to write it.

    Args:
        args: vLLM's `EngineArgs`.

    Returns:
        The RFC's keys; None when Vegas is not asked for.

    Raises:
        ConfigError: keys of `sparse_attn` beside another method, or a flag and a key that say the
            same.
    """
    values = {
        key.replace("-", "_"): value for key, value in (args.speculative_config or {}).items()
    }
    flags = {
        "method": ("--spec-method", args.spec_method),
        "model": ("--spec-model", args.spec_model),
        "num_speculative_tokens": ("--spec-tokens", args.spec_tokens),
    }
    given = {key: value for key, (_, value) in flags.items() if value is not None}
    if not is_ours(values | given):
        return None
    twice = [key for key in given if key in values]
    if twice:
        raise ConfigError(
            f"{flags[twice[0]][0]} and `{twice[0]}` of --speculative-config were both given.",
            hint="Keep one of them.",
        )
    return values | given


# What is written into `EngineArgs` on the way to a `VllmConfig`, and put back afterwards: the same
# arguments may be turned into a configuration again.
_TOUCHED: Final = (
    "speculative_config",
    "spec_method",
    "spec_model",
    "spec_tokens",
    "additional_config",
    "attention_backend",
    "cudagraph_capture_sizes",
    "max_num_batched_tokens",
)


def _translating(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_speculative_config(
        self: Any, target_model_config: Any, target_parallel_config: Any
    ) -> Any:
        values = requested(self)
        if values is None:
            return original(self, target_model_config, target_parallel_config)
        check_hooks()
        refuse_model(target_model_config, target_parallel_config, self)
        model = target_model_config.model_weights or target_model_config.model
        ours, settings = translate(values, model=model)
        ours |= {
            "revision": target_model_config.revision,
            "code_revision": target_model_config.code_revision,
        }
        self.speculative_config = ours
        self.spec_method = self.spec_model = self.spec_tokens = None
        speculative = original(self, target_model_config, target_parallel_config)
        # The draft model is the target itself: one that was read a second time would lose what the
        # user overrode (rope scaling, context length) and could cut max_model_len.
        speculative.method = "draft_model"
        speculative.draft_model_config = target_model_config
        speculative.draft_parallel_config = target_parallel_config
        target_parallel_config.worker_cls = WORKER_CLASS
        self.additional_config = with_settings(self.additional_config, settings)
        self.attention_backend = "FLASH_ATTN"
        # A forked engine core inherits its methods; a spawned one gets them by `install`.
        install_core()
        return speculative

    return create_speculative_config


def _sizing_graphs(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_defaults(self: Any, usage_context: Any, model_config: Any, parallel_config: Any) -> Any:
        is_default = self.max_num_batched_tokens is None
        result = original(self, usage_context, model_config, parallel_config)
        settings = settings_of(self)
        if settings is None:
            return result
        widest = self.max_num_seqs * (settings.max_num_speculative_tokens + 1)
        if is_default and self.max_num_batched_tokens < widest:
            self.max_num_batched_tokens = widest
        chosen = (
            self.cudagraph_capture_sizes,
            self.max_cudagraph_capture_size,
            self.compilation_config.cudagraph_capture_sizes,
            self.compilation_config.max_cudagraph_capture_size,
        )
        if not any(chosen) and not self.enforce_eager:
            self.cudagraph_capture_sizes = capture_sizes(
                settings.gammas, self.max_num_seqs, self.max_num_batched_tokens
            )
        return result

    return set_defaults


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if requested(self) is None:
            return original(self, *args, **kwargs)
        with _restored(self):
            config = original(self, *args, **kwargs)
        settings = settings_of(config)
        assert settings is not None, "translated on the way"
        refuse(config)
        _warn(config)
        return config

    return create_engine_config


def _checking_version(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_speculative_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = {"method": getattr(self, "spec_method", None)}
        if is_ours(asked | dict(self.speculative_config or {})):
            check_hooks()
        return original(self, *args, **kwargs)

    return create_speculative_config


def _offering_method(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_cli_args(parser: Any) -> Any:
        result = original(parser)
        for action in parser._actions:
            if "--spec-method" in action.option_strings and action.choices is not None:
                action.choices = [*action.choices, RFC_METHOD]
        return result

    add_cli_args.vegas = True  # type: ignore[attr-defined]
    return add_cli_args


@contextmanager
def _restored(args: Any) -> Iterator[None]:
    before = {name: getattr(args, name) for name in _TOUCHED}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)


def _warn(config: Any) -> None:
    """Print what is allowed but will disappoint."""
    from vllm.logger import init_logger

    logger = init_logger("vllm.vegas")
    settings = settings_of(config)
    assert settings is not None
    max_model_len = config.model_config.max_model_len
    for sentence in setting_warnings(settings.config, max_model_len=max_model_len):
        logger.warning("Vegas: %s", sentence)
    width = settings.max_num_speculative_tokens + 1
    scheduler, graphs = config.scheduler_config, config.compilation_config
    widest = scheduler.max_num_seqs * width
    if scheduler.max_num_batched_tokens < widest:
        logger.warning(
            "Vegas: max_num_batched_tokens %d is less than max_num_seqs %d x %d rows to verify, so "
            "full batches take more than one step; raise it to %d.",
            scheduler.max_num_batched_tokens,
            scheduler.max_num_seqs,
            width,
            widest,
        )
    if not graphs.cudagraph_mode.has_full_cudagraphs():
        logger.warning(
            "Vegas: CUDA graphs are off for decoding (%s), so every layer of every draft step is "
            "launched from Python; expect no speed-up.",
            graphs.cudagraph_mode.name,
        )
    elif graphs.max_cudagraph_capture_size < min(widest, GRAPH_REQUESTS * width):
        logger.warning(
            "Vegas: CUDA graphs cover %d tokens, verification of %d requests takes %d; larger "
            "batches run without. Leave the capture sizes to the plugin.",
            graphs.max_cudagraph_capture_size,
            scheduler.max_num_seqs,
            widest,
        )
