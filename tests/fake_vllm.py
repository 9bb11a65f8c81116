"""vLLM's engine core without a model: its scheduler's protocol, a GPU of known speed.

Faithful where the plugin's engine looks: two queues and a cap on running requests, a prefix cache
of whole blocks, steps that are scheduled before the results of the last one are there, results
that ended requests still occupy, accepted drafts cut by output limits, utilities called by name.

Run as a program it serves a pipe as `vegas_runtime.vllm_plugin.host` does.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from synthetic import Shape

from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.gpu_memory import UNKNOWN, MemoryCheck
from vegas_runtime.protocol import Capacity
from vegas_runtime.vllm_plugin import recording
from vegas_runtime.vllm_plugin.child import Child, launch
from vegas_runtime.vllm_plugin.core import CoreFacts, CoreOutput, Emission
from vegas_runtime.vllm_plugin.driving import Driver
from vegas_runtime.vllm_plugin.engine import VllmEngine
from vegas_runtime.vllm_plugin.engine_options import Checkpoint

BLOCK_SIZE = 16
NUM_KV_TOKENS = 200_000

# An H200 on a small model, batch 32: the optimum drafts, and lies inside the ladders.
FAST = Shape(
    name="fast",
    agreement=lambda ratio: 0.98 - 0.02 / (0.02 + ratio) * 0.25,
    draft_s=lambda ratio: 0.0010 + 0.002 * ratio,
    verify_s=lambda gamma: 0.0034 + 0.00012 * gamma,
    select_s=0.0004,
    other_s=0.0002,
)


class Clock:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeRequest:
    """One request in the scheduler."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    num_computed: int = 0
    num_cached: int = 0
    scheduled_s: float = 0.0
    output: list[int] = field(default_factory=list)
    is_finished: bool = False


@dataclass
class Order:
    """vLLM's `SchedulerOutput`, as far as anyone reads it."""

    num_scheduled_tokens: dict[str, int]
    scheduled_spec_decode_tokens: dict[str, list[int]]

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class FakeScheduler:
    """First come, first served, one step ahead of its results."""

    def __init__(self, *, max_num_seqs: int, gamma: int, clock: Clock) -> None:
        self.max_num_active_reqs = self.max_num_seqs = max_num_seqs
        self.gamma = gamma
        self.max_step_tokens = 512
        self.running: list[FakeRequest] = []
        self.waiting: deque[FakeRequest] = deque()
        self.requests: dict[str, FakeRequest] = {}
        self.cached: set[tuple[int, ...]] = set()
        self._clock = clock

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def add_request(self, request: FakeRequest) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def finish_requests(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            request = self.requests.pop(request_id, None)
            if request is not None:
                request.is_finished = True
                self.running = [one for one in self.running if one is not request]
                self.waiting = deque(one for one in self.waiting if one is not request)

    def schedule(self) -> Order:
        while self.waiting and len(self.running) < self.max_num_active_reqs:
            request = self.waiting.popleft()
            hit = request.prompt in self.cached
            whole = (len(request.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
            request.num_cached = request.num_computed = whole if hit else 0
            request.scheduled_s = self._clock()
            self.running.append(request)
        tokens: dict[str, int] = {}
        drafts: dict[str, list[int]] = {}
        for request in self.running:
            left = len(request.prompt) - request.num_computed
            if left > 0:
                tokens[request.request_id] = min(left, self.max_step_tokens)
            else:
                tokens[request.request_id] = 1 + self.gamma
                if self.gamma:
                    drafts[request.request_id] = [-1] * self.gamma
            request.num_computed += tokens[request.request_id]
        return Order(tokens, drafts)

    def update_from_output(self, order: Order, results: Any) -> dict[int, Any]:
        outputs = []
        for request_id in order.num_scheduled_tokens:
            request = self.requests.get(request_id)
            sampled = results.sampled_token_ids[results.req_id_to_index[request_id]]
            if request is None or request.is_finished or not sampled:
                continue
            # As vLLM does: the very list of the results is cut at the limit.
            new = sampled
            del new[request.max_tokens - len(request.output) :]
            is_first = not request.output
            request.output += new
            reason = "length" if len(request.output) >= request.max_tokens else ""
            outputs.append(
                SimpleNamespace(
                    request_id=request_id, new_token_ids=new, finish_reason=reason,
                    request=request if is_first else None,
                )
            )  # fmt: skip
            self.cached.add(request.prompt)
            if reason:
                self.finish_requests([request_id])
        return {0: SimpleNamespace(outputs=outputs)}


class FakeEngineCore:
    """Scheduler and worker in one process; utilities as the plugin adds them."""

    def __init__(
        self,
        shape: Shape,
        clock: Clock,
        *,
        max_num_seqs: int,
        gammas: Sequence[int] = (0,),
        max_ratio: float = 1.0,
        seed: int = 0,
        stuck: Mapping[str, Any] | None = None,
    ) -> None:
        self.scheduler = FakeScheduler(max_num_seqs=max_num_seqs, gamma=0, clock=clock)
        self.model_executor = SimpleNamespace(collective_rpc=self._collective_rpc)
        self.setting: dict[str, Any] = {
            **SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0).to_dict(),
            "max_num_running": None,
        }
        self._shape = shape
        self._clock = clock
        self._gammas, self._max_ratio = tuple(gammas), max_ratio
        self._seed, self._num_steps = seed, 0
        self._stuck = dict(stuck or {})
        self._in_flight: deque[tuple[Order, Any]] = deque()
        self._times: list[dict[str, float]] = []

    # ---------------------------------------------------------------- vLLM's own

    def step(self) -> tuple[float, list[Any]]:
        """Schedule one step, and hand out the results of the one before."""
        while len(self._in_flight) < 2 and any(self.scheduler.get_request_counts()):
            order = self.scheduler.schedule()
            self._in_flight.append((order, self._execute(order)))
        if not self._in_flight:
            raise AssertionError("nobody would ever wake this engine")
        order, (duration_s, results) = self._in_flight.popleft()
        self._clock.now_s += duration_s
        outputs = self.scheduler.update_from_output(order, results)
        return self._clock(), outputs[0].outputs

    def get_supported_tasks(self) -> list[str]:
        return ["generate"]

    # ---------------------------------------------------------------- the plugin's

    def vegas_start_recording(self) -> None:
        recording.start(self, self._clock)

    def vegas_drain_records(self) -> list[dict[str, Any]]:
        return recording.drain(self)

    def vegas_configure(self, values: Mapping[str, Any]) -> dict[str, Any]:
        gamma = values["num_speculative_tokens"]
        if gamma not in self._gammas or (gamma and values["sparsity_ratio"] > self._max_ratio):
            raise ValueError(f"{dict(values)} was not declared at the start")
        self.setting |= values
        self.setting |= self._stuck
        self.scheduler.gamma = self.setting["num_speculative_tokens"]
        limit = self.setting["max_num_running"]
        self.scheduler.max_num_active_reqs = limit or self.scheduler.max_num_seqs
        return {name: self.setting[name] for name in values}

    def _collective_rpc(self, method: str) -> list[Any]:
        assert method == "vegas_step_times"
        times, self._times = self._times, []
        return [times]

    # ---------------------------------------------------------------- the GPU

    def _execute(self, order: Order) -> tuple[float, Any]:
        gamma, ratio = self.setting["num_speculative_tokens"], self.setting["sparsity_ratio"]
        random = np.random.default_rng([self._seed, self._num_steps])
        self._num_steps += 1
        pace = float(np.exp(0.02 * random.standard_normal()))
        phases = {
            "verify_s": self._shape.verify_s(gamma) * pace,
            "select_s": self._shape.select_s * pace if gamma else 0.0,
            "draft_s": gamma * self._shape.draft_s(ratio) * pace,
            "sample_s": self._shape.other_s,
        }
        step = getattr(order, recording.STEP_ATTRIBUTE, None)
        if step is not None:
            self._times.append({"step": step, **phases})
        prefilled = max(order.num_scheduled_tokens.values()) - 1 - gamma
        duration_s = sum(phases.values()) + 0.0001 + max(0, prefilled) * 1e-6
        ids = list(order.num_scheduled_tokens)
        sampled = [self._sample(one, order, random) for one in ids]
        results = SimpleNamespace(
            sampled_token_ids=sampled, req_id_to_index={one: i for i, one in enumerate(ids)}
        )
        return duration_s, results

    def _sample(self, request_id: str, order: Order, random: np.random.Generator) -> list[int]:
        request = self.scheduler.requests.get(request_id)
        if request is None or request.num_computed < len(request.prompt):
            return []
        drafted = len(order.scheduled_spec_decode_tokens.get(request_id, ()))
        p = self._shape.agreement(self.setting["sparsity_ratio"])
        draws = random.random(drafted).tolist()
        kept = next((place for place, draw in enumerate(draws) if draw >= p), drafted)
        tokens: list[int] = random.integers(0, 100, kept + 1).tolist()
        return tokens


class FakeCore:
    """`core.Core` over the fake engine core, as `host.VllmCore` is over vLLM's."""

    def __init__(
        self, engine_core: FakeEngineCore, *, has_plugin: bool = True, tp: int = 1
    ) -> None:
        self.engine_core = engine_core
        self._tp = tp
        self.is_closed = False
        self._has_plugin = has_plugin

    @property
    def facts(self) -> CoreFacts:
        return CoreFacts(
            block_size=BLOCK_SIZE,
            num_kv_tokens=NUM_KV_TOKENS,
            max_num_seqs=self.engine_core.scheduler.max_num_seqs,
            max_model_len=8192,
            device={
                "kind": "cuda", "class": "Fake GPU", "sm": "9.0", "count": self._tp, "tp": self._tp,
            },
            runtime={"vllm": "0.33.0", "kv_cache_dtype": "auto"},
            status={"workers": [{"collection": "fused", "draft_attention": "kernel"}]}
            if self._has_plugin
            else {},
        )  # fmt: skip

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
        request = FakeRequest(request_id, tuple(prompt), max_tokens, seed)
        self.engine_core.scheduler.add_request(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        self.engine_core.scheduler.finish_requests(request_ids)

    def poll(self) -> CoreOutput:
        end_s, outputs = self.engine_core.step()
        running, waiting = self.engine_core.scheduler.get_request_counts()
        return CoreOutput(
            end_s=end_s,
            emissions=[self._emission(one) for one in outputs],
            num_running=running,
            num_waiting=waiting,
        )

    def call(self, utility: str, *args: Any) -> Any:
        if utility.startswith("vegas") and not self._has_plugin:
            raise AttributeError(f"EngineCore has no {utility}")
        return getattr(self.engine_core, utility)(*args)

    def close(self) -> None:
        self.is_closed = True

    @staticmethod
    def _emission(output: Any) -> Emission:
        first = output.request
        return Emission(
            request_id=output.request_id,
            token_ids=output.new_token_ids,
            finish_reason=output.finish_reason,
            num_prompt_tokens=len(first.prompt) if first else 0,
            num_cached_tokens=first.num_cached if first else 0,
            scheduled_s=first.scheduled_s if first else 0.0,
        )


# --------------------------------------------------------------------------- engines


def open_core(
    *, options: Mapping[str, Any], has_plugin: bool, clock: Clock | None = None, **core: Any
) -> FakeCore:
    """What `host.VllmCore` is to vLLM; reads the same options."""
    speculative = options.get("speculative_config", {})
    is_ours = "sparse_attn_num_speculative_tokens_set" in speculative
    assert is_ours == has_plugin
    engine_core = FakeEngineCore(
        FAST,
        clock or Clock(),
        max_num_seqs=options["max_num_seqs"],
        gammas=speculative.get("sparse_attn_num_speculative_tokens_set", (0,)),
        max_ratio=speculative.get("sparse_attn_max_ratio", 1.0),
        **core,
    )
    if speculative and not is_ours:
        # A method of vLLM's own drafts as many as it was started with, and nothing changes that.
        gamma = speculative["num_speculative_tokens"]
        engine_core.scheduler.gamma = gamma
        engine_core.setting |= {"num_speculative_tokens": gamma}
    tp = options.get("tensor_parallel_size", 1)
    return FakeCore(engine_core, has_plugin=has_plugin, tp=tp)


class InlineChild:
    """`child.Child` without a process: orders are carried out where they are given."""

    def __init__(self, clock: Clock, *, start_s: float = 40.0, **core: Any) -> None:
        self._clock, self._core_options = clock, core
        self._started_s = clock()
        self._start_s = start_s
        self.is_ended = False
        self.is_healthy = True
        self.core: FakeCore | None = None
        self.guard: Any = None
        self.memory = UNKNOWN

    @property
    def age_s(self) -> float:
        return self._clock() - self._started_s

    def ask(
        self, order: str, /, *, timeout_s: float, quiet_s: float | None = None, **arguments: Any
    ) -> Any:
        if order == "open":
            self._clock.now_s += self._start_s
            self.core = open_core(**arguments, clock=self._clock, **self._core_options)
            self._driver = Driver(self.core, self._clock)
            return self.core.facts
        assert self.core is not None
        if order == "call":
            return self.core.call(arguments["utility"], *arguments["args"])
        return getattr(self._driver, order)(**arguments)

    def end(self, *, report: Callable[[str], None]) -> MemoryCheck:
        self.is_ended = True
        return self.memory


def checkpoint(folder: Path = Path("/models/fake")) -> Checkpoint:
    return Checkpoint(
        folder=folder,
        tokenizer=None,
        facts={"id": "fake/model", "config_sha256": "0" * 64, "dtype": "bfloat16"},
    )


def capacity(**changes: Any) -> Capacity:
    values: dict[str, Any] = {
        "batch_size": 8,
        "max_model_len": 4096,
        "gammas": (0, 2, 4, 6, 8),
        "max_ratio": 0.5,
        "config": SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0, min_tokens=32),
        **changes,
    }
    return Capacity(**values)


def inline_engine(
    clock: Clock | None = None, *, is_stock: bool = False, **options: Any
) -> tuple[VllmEngine, list[InlineChild]]:
    """An engine on the fake, in this process, and the children it started."""
    own_clock = clock or Clock()
    children: list[InlineChild] = []
    source = options.pop("source", checkpoint())
    size = options.pop("size", capacity())
    drafting = options.pop("drafting", None)

    def start(stock: bool) -> Child:
        assert stock == is_stock
        children.append(InlineChild(own_clock, **options))
        return children[-1]  # type: ignore[return-value]

    engine = VllmEngine(
        source, size, is_stock=is_stock, drafting=drafting, launch=start, clock=own_clock
    )
    return engine, children


def launch_fake(*arguments: str) -> Callable[[bool], Child]:
    """Launches this file as a process; `arguments` say how it misbehaves."""
    return lambda is_stock: launch([sys.executable, __file__, *arguments], is_stock=is_stock)


class Misbehaving(FakeCore):
    """Dies, hangs or fails in the middle of a pass, after a number of steps."""

    def __init__(self, engine_core: FakeEngineCore, how: str, after: int) -> None:
        super().__init__(engine_core)
        self._how, self._left = how, after

    def poll(self) -> CoreOutput:
        self._left -= 1
        if self._left == 0 and self._how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._left == 0 and self._how == "hang":
            time.sleep(3600)
        if self._left == 0 and self._how == "oom":
            sys.stderr.write(
                "(EngineCore pid=7) ERROR 11-30 core.py:1: torch.OutOfMemoryError: CUDA out of "
                "memory. Tried to allocate 9.00 GiB.\n"
                "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
            )
            sys.stderr.flush()
            raise RuntimeError("EngineCore encountered an issue.")
        return super().poll()


def main() -> None:
    from vegas_runtime.vllm_plugin import host

    how, after = (sys.argv[1], int(sys.argv[2])) if len(sys.argv) == 4 else ("", 0)
    if how == "capture":
        sys.stderr.write("Capturing CUDA graphs:  63%|######3   | 66/105\r")
        sys.stderr.flush()
        time.sleep(3600)
    if how == "start":
        sys.stderr.write("ValueError: No available memory for the cache blocks.\n")
        sys.exit(3)

    def opened(**arguments: Any) -> FakeCore:
        core = open_core(**arguments)
        return Misbehaving(core.engine_core, how, after) if how else core

    host.end_with(os.getppid())
    host.serve(Connection(int(sys.argv[-1])), opened)


if __name__ == "__main__":
    main()
