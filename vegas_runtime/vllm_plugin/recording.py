"""What each engine step did, seen from the engine core, and its translation into `StepRecord`s.

The scheduler knows who ran, what was drafted and what was accepted; the worker knows how long each
phase took on the GPU. Both are joined by the step's number, which the scheduler writes on the
order it hands to the worker (`STEP_ATTRIBUTE`): warm-up steps and steps that nobody records carry
none, so no offsets have to be kept in agreement between processes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from vegas_runtime.records import StepRecord

STEP_ATTRIBUTE: Final = "vegas_step"
_RECORDER_ATTRIBUTE: Final = "vegas_recorder"
_PHASES: Final = ("draft_s", "select_s", "verify_s")

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class EngineStep:
    """One executed step as the engine core saw it; plain values, fit for any transport.

    Attributes:
        number: of the step, ascending.
        duration_s: wall time since the previous step's results were there, or, when the engine
            had been idle, since this step was scheduled.
        num_running: requests that held a place in the batch.
        num_waiting: requests ready to take a free place.
        num_context_tokens: the most prompt tokens that any one request had processed in the step,
            beside the row that samples: 0 while decoding, below one block after a full prefix hit.
        request_ids: the engine's ids of the requests whose output counts. A request that ended
            while the step was in flight is not among them.
        num_draft_tokens: per request, tokens drafted.
        num_accepted_tokens: per request, drafts accepted.
        num_emitted_tokens: per request, tokens added to its output; fewer than accepted where a
            limit cut them.
        phases_s: GPU seconds by phase (`verify_s`, `select_s`, `sample_s`, `draft_s`); empty when
            the worker does not tell.
    """

    number: int
    duration_s: float
    num_running: int
    num_waiting: int
    num_context_tokens: int
    request_ids: list[str]
    num_draft_tokens: list[int]
    num_accepted_tokens: list[int]
    num_emitted_tokens: list[int]
    phases_s: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        return cls(**values)


def start(engine_core: Any, clock: Clock = time.monotonic) -> None:
    """Record every step that an engine core schedules from now on; forget earlier ones.

    Args:
        engine_core: vLLM's `EngineCore`; its scheduler instance is wrapped, once.
        clock: seconds.
    """
    recorder = getattr(engine_core, _RECORDER_ATTRIBUTE, None)
    if recorder is None:
        recorder = StepRecorder(engine_core.scheduler, clock)
        setattr(engine_core, _RECORDER_ATTRIBUTE, recorder)
    # Times of steps that were recorded and never asked for.
    engine_core.model_executor.collective_rpc("vegas_step_times")
    recorder.start()


def drain(engine_core: Any) -> list[dict[str, Any]]:
    """Stop recording and hand over what was recorded, phase times joined.

    Args:
        engine_core: as in `start`.

    Returns:
        `EngineStep.to_dict()` of each step whose results are there, in order.
    """
    recorder = getattr(engine_core, _RECORDER_ATTRIBUTE, None)
    if recorder is None:
        return []
    steps = recorder.stop()
    times = engine_core.model_executor.collective_rpc("vegas_step_times")
    # Ranks of one tensor-parallel group wait for each other: the first speaks for all.
    return [step.to_dict() for step in join_times(steps, times[0])]


def join_times(
    steps: Iterable[EngineStep], times: Iterable[Mapping[str, float]]
) -> list[EngineStep]:
    """Give each step the phase times that carry its number.

    Args:
        steps: from the scheduler's side.
        times: from the worker's side: `step` and seconds by phase.
    """
    by_number = {
        int(row["step"]): {name: float(row[name]) for name in row if name != "step"}
        for row in times
    }
    return [replace(step, phases_s=by_number.get(step.number, {})) for step in steps]


class StepRecorder:
    """Listens to one scheduler: what it schedules, and what comes back.

    Args:
        scheduler: vLLM's; `schedule` and `update_from_output` of this instance are wrapped.
        clock: seconds.
    """

    def __init__(self, scheduler: Any, clock: Clock = time.monotonic) -> None:
        self._scheduler = scheduler
        self._now_s = clock
        self._is_recording = False
        self._next = 0
        # Scheduled, results outstanding: time, places taken and requests waiting, by number.
        self._open: dict[int, tuple[float, int, int]] = {}
        self._closed: list[EngineStep] = []
        self._last_end_s: float | None = None
        scheduler.schedule = self._after_schedule(scheduler.schedule)
        scheduler.update_from_output = self._after_update(scheduler.update_from_output)

    def start(self) -> None:
        """Record from the next step on."""
        self._open.clear()
        self._closed.clear()
        self._last_end_s = None
        self._is_recording = True

    def stop(self) -> list[EngineStep]:
        """Stop, and hand over the steps whose results are there."""
        self._is_recording = False
        self._open.clear()
        steps, self._closed = self._closed, []
        return steps

    def _after_schedule(self, schedule: Any) -> Any:
        @functools.wraps(schedule)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            order = schedule(*args, **kwargs)
            if self._is_recording and order.total_num_scheduled_tokens:
                running, waiting = self._scheduler.get_request_counts()
                setattr(order, STEP_ATTRIBUTE, self._next)
                self._open[self._next] = (self._now_s(), running, waiting)
                self._next += 1
            return order

        return wrapped

    def _after_update(self, update_from_output: Any) -> Any:
        @functools.wraps(update_from_output)
        def wrapped(order: Any, results: Any) -> Any:
            number = getattr(order, STEP_ATTRIBUTE, None)
            if number not in self._open:
                return update_from_output(order, results)
            # Counted before: vLLM cuts these very lists where a request reaches its limit.
            tokens = results.sampled_token_ids
            sampled = {
                request: len(tokens[row]) if tokens else 0
                for request, row in results.req_id_to_index.items()
            }
            outputs = update_from_output(order, results)
            self._close(number, order, sampled, outputs)
            return outputs

        return wrapped

    def _close(
        self, number: int, order: Any, sampled: Mapping[str, int], outputs: Mapping[int, Any]
    ) -> None:
        end_s = self._now_s()
        scheduled_s, running, waiting = self._open.pop(number)
        start_s = scheduled_s if self._last_end_s is None else self._last_end_s
        # With work left the time until the next schedule is the engine's own; without, it is idle.
        is_busy = bool(self._open) or sum(self._scheduler.get_request_counts()) > 0
        self._last_end_s = end_s if is_busy else None
        emitted = {
            output.request_id: len(output.new_token_ids)
            for group in outputs.values()
            for output in group.outputs
            if output.new_token_ids
        }
        drafts = order.scheduled_spec_decode_tokens
        drafted = [len(drafts.get(request, ())) for request in emitted]
        self._closed.append(
            EngineStep(
                number=number,
                duration_s=end_s - start_s,
                num_running=running,
                num_waiting=waiting,
                num_context_tokens=max(
                    count - 1 - len(drafts.get(request, ()))
                    for request, count in order.num_scheduled_tokens.items()
                ),
                request_ids=list(emitted),
                num_draft_tokens=drafted,
                num_accepted_tokens=[
                    # One of the sampled tokens is the target's own.
                    sampled[request] - 1 if has_drafts else 0
                    for request, has_drafts in zip(emitted, drafted, strict=True)
                ],
                num_emitted_tokens=list(emitted.values()),
            )
        )


def to_records(
    steps: Sequence[EngineStep], places: Mapping[str, int], *, block_size: int
) -> list[StepRecord]:
    """Translate an engine's steps into the runtime's records.

    Steps in which none of the requests asked about took part, and which processed no prompt text
    either, belong to someone else and are left out.

    Args:
        steps: in order.
        places: index in the prompt block by the engine's request id; other requests' output is
            left out.
        block_size: tokens of a KV block. After a full prefix hit up to one block is computed again,
            which every served request does: such a step counts as decoding (DESIGN decision 5).
    """
    records = []
    for step in steps:
        rows = [
            (places[request], drafted, accepted, emitted)
            for request, drafted, accepted, emitted in zip(
                step.request_ids,
                step.num_draft_tokens,
                step.num_accepted_tokens,
                step.num_emitted_tokens,
                strict=True,
            )
            if request in places
        ]
        is_prefill = step.num_context_tokens >= block_size
        if not rows and not is_prefill:
            continue
        columns = list(zip(*rows, strict=True)) if rows else [(), (), (), ()]
        records.append(
            StepRecord(
                kind="prefill" if is_prefill else "decode",
                num_running=step.num_running,
                num_waiting=step.num_waiting,
                request_ids=columns[0],
                num_draft_tokens=columns[1],
                num_accepted_tokens=columns[2],
                num_emitted_tokens=columns[3],
                **_phases(step),
            )
        )
    return records


def _phases(step: EngineStep) -> dict[str, float]:
    """A step's wall time by phase; their sum is the wall time exactly.

    GPU times of a pipelined engine jitter against wall times of single steps. The wall time is
    what throughput rests on, so where they exceed it the phases are cut in proportion.
    """
    gpu = {name: step.phases_s.get(name, 0.0) for name in _PHASES}
    if not step.phases_s:
        # Not told apart: what plain decoding does is a forward pass over the whole cache.
        return {"draft_s": 0.0, "select_s": 0.0, "verify_s": step.duration_s, "other_s": 0.0}
    total = sum(gpu.values())
    share = min(1.0, step.duration_s / total) if total > 0 else 1.0
    cut = {name: value * share for name, value in gpu.items()}
    return cut | {"other_s": max(0.0, step.duration_s - sum(cut.values()))}
