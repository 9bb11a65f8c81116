"""Run-time control, on the side of vLLM's engine core: change the setting, read it back.

The functions here become methods of vLLM's `EngineCore` (see `patches`), so a client reaches them
by `call` whether the core runs in its own process or not. The scheduler decides how many tokens
are drafted; ratio, floor and policy live on the devices.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from vegas_runtime.config import RFC_METHOD, SWITCHES
from vegas_runtime.errors import BackendError, ConfigError, VegasError
from vegas_runtime.vllm_plugin.config import (
    SCHEDULE_KEY,
    PluginSettings,
    check_gamma,
    is_whole,
    read_schedule,
    schedule_at,
    settings_of,
)
from vegas_runtime.vllm_plugin.setting_warnings import setting_warnings

MAX_NUM_RUNNING: Final = "max_num_running"

# What a worker's `vegas_configure` reports as its device holds it, whatever it was told. It is
# told these, and `num_speculative_tokens` when that changed; the scheduler decides the width of
# each step, so the worker takes gamma for granted from each step's output.
ON_THE_DEVICE: Final = ("algorithm", "sparsity_ratio", "min_tokens", *SWITCHES)


def configure(core: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Change what is drafted while the engine runs; an empty mapping only reads back.

    Args:
        core: vLLM's `EngineCore`.
        values: fields of `SpeculationConfig` that change; `num_speculative_tokens` for every batch
            size, or `num_speculative_tokens_per_batch_size`; `max_num_running`, a cap on requests
            running at once (None lifts it; requests above it finish, none is preempted).

    Returns:
        What is in force, read back from the scheduler and from every device; see `in_force`.
        `warnings` holds sentences about values that are allowed but change nothing.

    Raises:
        ConfigError: a value that cannot be set in this engine; nothing was changed.
        BackendError: a worker holds something else than it was told.
    """
    settings, scheduler = _settings(core), core.scheduler
    change = dict(values)
    cap = change.pop(MAX_NUM_RUNNING, ...)
    limit = scheduler.max_num_running_reqs
    if cap not in (..., None) and not (is_whole(cap) and 1 <= cap <= limit):
        raise ConfigError(
            f"`{MAX_NUM_RUNNING}` is {cap!r}; 1 to {limit} requests fit this engine.",
            hint="Start it with a larger max_num_seqs to run more.",
        )
    schedule = read_schedule(change.pop(SCHEDULE_KEY, None))
    if schedule and "num_speculative_tokens" in change:
        raise ConfigError(
            f"`num_speculative_tokens` and `{SCHEDULE_KEY}` were both given; only one can hold."
        )
    for _, _, gamma in schedule:
        check_gamma(gamma, settings.gammas)
    max_model_len = core.vllm_config.model_config.max_model_len
    held = in_force(core)
    config = settings.change({**_fields(held, settings), **change}, max_model_len=max_model_len)

    if change:
        told = {name: getattr(config, name) for name in (*ON_THE_DEVICE, *change)}
        core.collective_rpc("vegas_configure", args=(told,))
    if schedule:
        scheduler.dynamic_sd_lookup = [schedule_at(schedule, batch) for batch in range(limit + 1)]
    elif "num_speculative_tokens" in change:
        scheduler.dynamic_sd_lookup = [config.num_speculative_tokens] * (limit + 1)
    if cap is not ...:
        scheduler.max_num_active_reqs = _own_limit(core) if cap is None else cap
        core.vegas_max_num_running = cap
    result = in_force(core)
    for name in ON_THE_DEVICE:
        if result[name] != getattr(config, name):
            raise BackendError(
                f"the devices hold {name} {result[name]!r} after {getattr(config, name)!r} was "
                "set; what is served is not what was asked for.",
                hint="Restart the engine.",
            )
    return {**result, "warnings": setting_warnings(config, max_model_len=max_model_len)}


def in_force(core: Any) -> dict[str, Any]:
    """What this engine drafts with right now, from where it is held.

    Args:
        core: vLLM's `EngineCore`.

    Returns:
        The `ON_THE_DEVICE` fields as every worker reports them; from the scheduler
        `num_speculative_tokens` (None while it depends on the batch size),
        `num_speculative_tokens_by_batch` (entry b: tokens drafted with b requests running) and
        `max_num_running` (None without a cap); `gammas`, those that may be chosen.

    Raises:
        BackendError: the workers disagree.
    """
    settings, scheduler = _settings(core), core.scheduler
    reports = core.collective_rpc("vegas_configure", args=({},))
    device = {name: reports[0][name] for name in ON_THE_DEVICE}
    for rank, report in enumerate(reports):
        other = {name: report[name] for name in ON_THE_DEVICE}
        if other != device:
            raise BackendError(
                f"worker {rank} drafts with {other}, worker 0 with {device}; ranks would sample "
                "different drafts.",
                hint="Restart the engine.",
            )
    lookup = scheduler.dynamic_sd_lookup or [scheduler.num_spec_tokens] * (
        scheduler.max_num_running_reqs + 1
    )
    by_batch = list(lookup[1:])
    is_uncapped = getattr(
        core, "vegas_max_num_running", None
    ) is None and scheduler.max_num_active_reqs == _own_limit(core)
    return {
        **device,
        "num_speculative_tokens": by_batch[0] if len({*by_batch}) == 1 else None,
        "num_speculative_tokens_by_batch": [by_batch[0], *by_batch],
        MAX_NUM_RUNNING: None if is_uncapped else scheduler.max_num_active_reqs,
        "gammas": list(settings.gammas),
    }


def status(core: Any) -> dict[str, Any]:
    """Whether the plugin is active, with what, and on which paths.

    Args:
        core: vLLM's `EngineCore`.

    Returns:
        `in_force`, and under `workers` what each worker's `vegas_status` says.
    """
    return {**in_force(core), "workers": core.collective_rpc("vegas_status")}


def start_recording(core: Any) -> None:
    """Record every engine step from now on; see `recording.start`."""
    _recording().start(core)


def drain_records(core: Any) -> Any:
    """Stop recording and hand over the steps recorded; see `recording.drain`."""
    return _recording().drain(core)


def _recording() -> Any:
    # Loaded when asked for: a server that nobody tunes has no use for it.
    return importlib.import_module("vegas_runtime.vllm_plugin.recording")


# Name of the method on vLLM's `EngineCore` -> what it does.
UTILITIES: Final[Mapping[str, Callable[..., Any]]] = {
    "vegas_configure": configure,
    "vegas_status": status,
    "vegas_start_recording": start_recording,
    "vegas_drain_records": drain_records,
}


def call(client: Any, name: str, *args: Any) -> Any:
    """Call one of `UTILITIES` from the client's side.

    Args:
        client: vLLM's synchronous engine core client, `llm.llm_engine.engine_core`.
        name: a key of `UTILITIES`.
        args: its arguments behind the core; plain values.

    Raises:
        BackendError: the plugin is not active there, the engine died, or the call was refused.
    """
    core = getattr(client, "engine_core", None)
    try:
        # vLLM's in-process client holds the core itself and has no utility calls.
        if core is not None and not hasattr(client, "call_utility"):
            return getattr(core, name)(*args)
        return client.call_utility(name, *args)
    except VegasError:
        raise
    except Exception as error:
        raise BackendError(f"vLLM's engine core did not carry out {name}: {error}") from error


def _settings(core: Any) -> PluginSettings:
    settings = settings_of(core.vllm_config)
    if settings is None:
        raise BackendError(
            "this engine was started without the Vegas plugin, so there is nothing to control.",
            hint=f'Start it with --speculative-config \'{{"method": "{RFC_METHOD}", ...}}\'.',
        )
    return settings


def _own_limit(core: Any) -> int:
    """Requests this engine runs at once without a cap."""
    own = core.vllm_config.scheduler_config.max_num_active_seqs
    return int(core.scheduler.max_num_running_reqs if own is None else own)


def _fields(held: Mapping[str, Any], settings: PluginSettings) -> dict[str, Any]:
    """The setting that a change starts from; under a schedule any declared gamma stands in."""
    gamma = held["num_speculative_tokens"]
    own = {name: held[name] for name in ON_THE_DEVICE}
    fallback = settings.config.num_speculative_tokens
    return {**own, "num_speculative_tokens": fallback if gamma is None else gamma}
