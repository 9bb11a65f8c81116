"""Progress of a sweep on stderr: one lasting line per point, and a live line on a terminal."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.status import Status

from vegas_tune.decide import Decision
from vegas_tune.measure import Estimate
from vegas_tune.outcomes import Measured, Outcome

_STEPS: Final = {
    "0-stock": "stock",
    "1-sparsity": "1/4",
    "2-gamma": "2/4",
    "3-refine": "3/4",
    "4-validate": "4/4",
}
# Where nothing can be redrawn, long waits still get a line this often.
_QUIET_S: Final = 15.0


class SweepProgress:
    """Tells a sweep's progress; a context manager that owns the live line.

    An interrupt that leaves it says how to go on.

    Args:
        resume_command: shown when the user interrupts.
    """

    def __init__(self, resume_command: str) -> None:
        self.resume_command = resume_command
        self._console = Console(stderr=True, soft_wrap=True, highlight=False)
        self._status: Status | None = None
        self._last_s = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(
                f"Everything measured is kept; go on with: {self.resume_command}"
            ) from None

    def note(self, message: str) -> None:
        """A lasting line."""
        self._console.print(message, markup=False)

    def waiting(self, message: str) -> None:
        """What is going on now; redrawn on a terminal, printed now and then elsewhere."""
        if self._status is not None:
            self._status.update(message)
            return
        if time.monotonic() - self._last_s >= _QUIET_S:
            self._last_s = time.monotonic()
            self.note(message)

    def started(self, step: str, what: str) -> None:
        """A step starts."""
        self.note(f"step {_STEPS.get(step, step)}  {what}")

    def measured(self, outcome: Outcome, spent_s: float) -> None:
        """A point is done: its line stays."""
        config = outcome.point.config
        gamma = config.num_speculative_tokens
        setting = f"gamma {gamma:>2}" + (f"  ratio {config.sparsity_ratio:<5g}" if gamma else "")
        where = f"  step {_STEPS.get(outcome.point.step, outcome.point.step)}  {setting:<22}"
        if isinstance(outcome, Measured):
            figures = outcome.figures
            accepted = figures.accepted
            shown = f"{_plus_minus(figures.decode_tok_s):>16} tok/s"
            shown += f"   accepted {accepted.est:.2f}" if accepted is not None else " " * 16
        else:
            shown = f"failed ({outcome.kind}): {outcome.reason}"
        # Tries before this one were rejected; the report says why.
        tries = f"   try {outcome.attempt + 1}" if outcome.attempt else ""
        self.note(f"{where}{shown}   {spent_s:6.1f} s{tries}")
        self.waiting(f"measuring; {spent_s:.0f} s of the budget spent")

    def decided(self, decision: Decision) -> None:
        """A decision was taken."""
        self.note(f"  => {decision.why}")


def _plus_minus(estimate: Estimate) -> str:
    return f"{estimate.est:.1f} +-{(estimate.high - estimate.low) / 2:.1f}"
