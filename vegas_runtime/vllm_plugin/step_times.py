"""Phase times of a step from CUDA events, read without ever waiting for the GPU."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any, Final

import torch

# Steps that may be unread; older ones are dropped, so an engine nobody asks holds little.
CAPACITY: Final = 8192
_MARKS: Final = ("start", "verified", "sampled", "drafted")


class StepTimes:
    """Records when the phases of numbered steps ended.

    Args:
        is_enabled: whether the device has events; without them every list is empty.
    """

    def __init__(self, *, is_enabled: bool) -> None:
        self._is_enabled = is_enabled
        self._free: list[tuple[Any, ...]] = []
        self._done: deque[tuple[int, tuple[Any, ...]]] = deque()
        self._open: tuple[int, tuple[Any, ...]] | None = None

    def begin(self, step: int | None) -> None:
        """Start timing.

        Args:
            step: the number this step is reported under; None times nothing.
        """
        self._open = None
        if step is None or not self._is_enabled:
            return
        if len(self._done) >= CAPACITY:
            self._free.append(self._done.popleft()[1])
        events = self._free.pop() if self._free else self._make()
        self._open = step, events
        self.mark("start")

    def mark(self, name: str) -> None:
        """The phase that ends here: `verified`, `sampled` or `drafted`, which closes the step."""
        if self._open is None:
            return
        self._open[1][_MARKS.index(name)].record()
        if name == _MARKS[-1]:
            self._done.append(self._open)
            self._open = None

    def drain(self) -> list[dict[str, float | int]]:
        """Steps the GPU has finished, oldest first; each is told once.

        Returns:
            `step` and, in seconds, `verify_s`, `select_s`, `sample_s` and `draft_s`. Selection runs
            inside the verification graph, so `select_s` is 0 and its time is part of `verify_s`.
        """
        steps = []
        while self._done and self._done[0][1][-1].query():
            step, events = self._done.popleft()
            times = [
                1e-3 * before.elapsed_time(after) for before, after in itertools.pairwise(events)
            ]
            steps.append(
                {
                    "step": step,
                    "verify_s": times[0],
                    "select_s": 0.0,
                    "sample_s": times[1],
                    "draft_s": times[2],
                }
            )
            self._free.append(events)
        return steps

    def _make(self) -> tuple[Any, ...]:
        return tuple(
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in _MARKS
        )
