"""vLLM's real engine core and scheduler around an executor without a model; see `vllm_process`."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from typing import Any


class Executor:
    """Workers of which only the plugin's remote calls exist, two ranks."""

    def __init__(self, held: Mapping[str, Any]) -> None:
        self.ranks = [dict(held), dict(held)]

    def collective_rpc(
        self, method: str, timeout: float | None, args: tuple[Any, ...], kwargs: Any
    ) -> list[Any]:
        if method == "vegas_configure":
            for rank in self.ranks:
                rank.update(args[0])
            return [dict(rank) for rank in self.ranks]
        assert method == "vegas_status"
        return [{"collection": "triton"} for _ in self.ranks]


def make_core(config: Any, held: Mapping[str, Any]) -> Any:
    """vLLM's `EngineCoreProc` as it is when it waits for the next order; no process, no sockets."""
    import torch
    from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
    config.cache_config.block_size = 16
    config.cache_config.num_gpu_blocks = 4096
    cache = KVCacheConfig(
        num_blocks=4096, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    core = object.__new__(EngineCoreProc)
    core.vllm_config = config
    core.model_executor = Executor(held)
    core.scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
        hash_block_size=16,
    )
    core.output_queue = queue.Queue()
    core.shutdown_state = EngineShutdownState.RUNNING
    return core


def utility(core: Any, name: str, *args: Any) -> dict[str, Any]:
    """Call a method of the engine core as a client in another process does, bytes and all."""
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    order = MsgpackEncoder().encode((0, 7, name, args))
    core._handle_client_request(EngineCoreRequestType.UTILITY, MsgpackDecoder().decode(order))
    _, outputs = core.output_queue.get_nowait()
    answer = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))
    output = answer.utility_output
    if output.failure_message is not None:
        return {"failed": output.failure_message}
    return {"result": output.result.result}


def add_requests(core: Any, count: int, *, first: int = 0) -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    for index in range(first, first + count):
        core.scheduler.add_request(
            Request(
                request_id=str(index),
                prompt_token_ids=list(range(20)),
                sampling_params=SamplingParams(max_tokens=512, ignore_eos=True),
                pooling_params=None,
            )
        )


def schedule(core: Any) -> dict[str, Any]:
    """One step: who runs with how many rows, and how many tokens are to be drafted after it."""
    order = core.scheduler.schedule()
    return {
        "rows": dict(order.num_scheduled_tokens),
        "drafts": order.num_spec_tokens_to_schedule,
        "running": len(core.scheduler.running),
    }


def finish(core: Any, request_ids: list[str]) -> None:
    from vllm.v1.request import RequestStatus

    core.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)


def play(config: Any, held: Mapping[str, Any], script: list[list[Any]]) -> list[Any]:
    """Carry out lines of [action, *arguments] on one core and say what each gave."""
    core = make_core(config, held)
    actions = {
        "add": lambda count, first=0: add_requests(core, count, first=first),
        "schedule": lambda: schedule(core),
        "finish": lambda *ids: finish(core, list(ids)),
        "utility": lambda name, *args: utility(core, name, *args),
        "tamper": lambda rank, values: core.model_executor.ranks[rank].update(values),
        "is_async": lambda: type(core.scheduler).__name__,
    }
    return [actions[name](*arguments) for name, *arguments in script]
