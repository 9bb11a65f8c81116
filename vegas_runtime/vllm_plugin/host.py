"""The process a `VllmEngine` runs vLLM in: `python -m vegas_runtime.vllm_plugin.host FD`.

vLLM starts processes of its own and may take all of them down with it. They all live in this one's
session, apart from the tuner, which can therefore outlive any of their deaths and end them all by
one signal. Orders come as pickled (name, arguments) over the pipe whose file descriptor is given;
every order gets exactly one reply: `("done", value)` or `("failed", kind, message, hint)`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Final

from vegas_runtime.config import SamplingConfig
from vegas_runtime.errors import BackendError, ConfigError, VegasError
from vegas_runtime.machine import device_facts, runtime_facts
from vegas_runtime.vllm_plugin.core import Core, CoreFacts, CoreOutput, Emission
from vegas_runtime.vllm_plugin.driving import Driver

OpenCore = Callable[..., Core]

_WATCH_S: Final = 1.0


def serve(pipe: Connection, open_core: OpenCore) -> None:
    """Carry out orders until told to close, or until the other end is gone.

    Args:
        pipe: to the `VllmEngine`.
        open_core: starts an engine; gets the arguments of the `open` order.
    """
    orders: dict[str, Callable[..., Any]] = {}

    def opened(**arguments: Any) -> CoreFacts:
        core = open_core(**arguments)
        driver = Driver(core)
        orders.update(
            prepare=driver.prepare,
            run=driver.run,
            generate=driver.generate,
            call=lambda utility, args: core.call(utility, *args),
            close=core.close,
        )
        return core.facts

    orders |= {"open": opened, "close": lambda: None}
    # The tuner may die at any moment; then nobody is left to tell.
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            name, arguments = pipe.recv()
            pipe.send(_carry_out(orders[name], arguments))
            if name == "close":
                return


def _carry_out(order: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    try:
        return "done", order(**arguments)
    except ConfigError as error:
        return "failed", "config", error.message, error.hint
    except VegasError as error:
        return "failed", "backend", error.message, error.hint
    except Exception as error:  # whatever vLLM raises; the other end knows what to make of it
        return "failed", "crash", f"{type(error).__name__}: {error}", ""


class VllmCore:
    """vLLM's engine behind `core.Core`: requests in, step outputs out, no text in between.

    Args:
        options: fields of vLLM's `EngineArgs`.
        has_plugin: whether this project's plugin is to be active.
    """

    def __init__(self, *, options: Mapping[str, Any], has_plugin: bool) -> None:
        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine import EngineCoreEventType
        from vllm.v1.engine.exceptions import EngineDeadError
        from vllm.v1.engine.llm_engine import LLMEngine

        self._make_params = SamplingParams
        self._dead_error = EngineDeadError
        self._scheduled_event = EngineCoreEventType.SCHEDULED
        # `vllm serve`'s context: its defaults are what a user has today.
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(**options), usage_context=UsageContext.OPENAI_API_SERVER
        )
        self._core = self._engine.engine_core
        self._tasks = self._engine.get_supported_tasks()
        self._facts = self._describe(has_plugin=has_plugin)

    @property
    def facts(self) -> CoreFacts:
        """See `Core`."""
        return self._facts

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingConfig,
        *,
        seed: int,
        max_tokens: int,
        num_logprobs: int = 0,
    ) -> None:
        """See `Core`."""
        params = self._make_params(
            **sampling_params(sampling, seed=seed, max_tokens=max_tokens),
            logprobs=num_logprobs or None,
            detokenize=False,
        )
        request = self._engine.input_processor.process_inputs(
            request_id, {"prompt_token_ids": list(prompt)}, params, supported_tasks=self._tasks
        )
        # Past the engine's own output processor: it makes text, of which there is no use here,
        # and keeps no account of single steps.
        self._core.add_request(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `Core`."""
        if request_ids:
            self._core.abort_requests(list(request_ids))

    def poll(self) -> CoreOutput:
        """See `Core`."""
        # What comes without statistics is no step's output.
        while (stats := (outputs := self._core.get_output()).scheduler_stats) is None:
            continue
        return CoreOutput(
            end_s=outputs.timestamp,
            emissions=[self._emission(output) for output in outputs.outputs],
            num_running=stats.num_running_reqs,
            num_waiting=stats.num_waiting_reqs,
        )

    def call(self, utility: str, *args: Any) -> Any:
        """See `Core`.

        Raises:
            BackendError: the engine core refused it; it goes on running.
        """
        try:
            return self._call_core(utility, *args)
        except self._dead_error:
            raise
        except Exception as error:  # what was raised over there arrives as a bare `Exception`
            raise BackendError(f"vLLM's engine core refused {utility}: {error}") from error

    def close(self) -> None:
        """See `Core`."""
        self._core.shutdown()

    def _call_core(self, utility: str, *args: Any) -> Any:
        return self._core.call_utility(utility, *args)

    def _emission(self, output: Any) -> Emission:
        emission = Emission(
            request_id=output.request_id,
            token_ids=list(output.new_token_ids),
            finish_reason="" if output.finish_reason is None else str(output.finish_reason),
            top_logprobs=_top_logprobs(output.new_logprobs),
        )
        prefill = output.prefill_stats
        if prefill is None:
            return emission
        admitted = [e.timestamp for e in output.events or () if e.type == self._scheduled_event]
        return replace(
            emission,
            num_prompt_tokens=prefill.num_prompt_tokens,
            num_cached_tokens=prefill.num_cached_tokens,
            scheduled_s=admitted[0] if admitted else 0.0,
        )

    def _describe(self, *, has_plugin: bool) -> CoreFacts:
        config = self._engine.vllm_config
        cache, scheduler = config.cache_config, config.scheduler_config
        status: dict[str, Any] = {}
        if has_plugin:
            status = dict(self.call("vegas_status"))
        return CoreFacts(
            block_size=cache.block_size,
            num_kv_tokens=cache.kv_cache_size_tokens or cache.num_gpu_blocks * cache.block_size,
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=config.model_config.max_model_len,
            device=device_facts("cuda") | {"tp": config.parallel_config.tensor_parallel_size},
            runtime={
                **runtime_facts("cuda"),
                "kv_cache_dtype": str(cache.cache_dtype),
                "async_scheduling": bool(scheduler.async_scheduling),
            },
            status=status,
        )


def sampling_params(sampling: SamplingConfig, *, seed: int, max_tokens: int) -> dict[str, Any]:
    """How tokens are drawn, in the fields of vLLM's `SamplingParams`.

    Args:
        sampling: in this project's terms.
        seed: of this request.
        max_tokens: its output limit.
    """
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        # Greedy requests draw nothing; a seed would only put them on vLLM's slower seeded path.
        "seed": None if sampling.is_greedy else seed,
        "max_tokens": max_tokens,
    }


def _top_logprobs(logprobs: Any) -> list[list[tuple[int, float]]]:
    """Turn vLLM's arrays into pairs; its first column is the token drawn, likely or not."""
    if logprobs is None:
        return []
    return [
        [(int(token), float(value)) for token, value in zip(ids[1:], values[1:], strict=True)]
        for ids, values in zip(logprobs.logprob_token_ids, logprobs.logprobs, strict=True)
    ]


def end_with(parent: int) -> None:
    """End this process's whole group once its parent is gone, however it went.

    An order under way would notice a closed pipe only at its end, and vLLM's own processes not at
    all: they would keep the GPU's memory.

    Args:
        parent: process id, as `os.getppid` tells it while the parent lives.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="vegas-parent-watch", daemon=True).start()


def main() -> None:
    """Serve the pipe whose file descriptor is the first argument."""
    end_with(os.getppid())
    serve(Connection(int(sys.argv[1])), VllmCore)


if __name__ == "__main__":
    main()
