"""Errors a user can cause or meet, and the exit code each one ends the command line with.

    VegasError                    1
    ├── UsageError                2   a value, a file name or a combination that cannot work
    │   ├── ConfigError           2   a knob outside its range, an unknown key
    │   ├── ModelError            2   a model that cannot be found, fetched or run
    │   └── WorkloadError         2   prompts that cannot be read or would tune nothing
    ├── StorageError              1   a folder that is full, read-only or in use
    ├── BackendError              1   an engine that cannot start or died
    │   └── GpuMemoryError        1   memory of a GPU that did not come back after one ended
    ├── ProfileMismatchError      4   a profile made for something else than this machine
    ├── ProfileInvalidError       5   a profile that is broken, or newer than this release
    ├── BudgetSpentError          6   the budget ended before a decision was reached
    └── NoValidTrialError         7   every measurement failed

Regression (3), inconclusive (6) and interruption (130) are outcomes, not errors: `EXIT_CODES`.
"""

from __future__ import annotations

from typing import ClassVar, Final

EXIT_CODES: Final = {
    "ok": 0,
    "unexpected": 1,
    "usage": 2,
    "regressed": 3,
    "mismatch": 4,
    "invalid_profile": 5,
    "inconclusive": 6,
    "no_valid_trial": 7,
    "interrupted": 130,
}


class VegasError(Exception):
    """A failure the user can understand and act on.

    Args:
        message: what happened, with the value, and why it matters.
        hint: what to do next; empty when the message already says it.
    """

    code: ClassVar[str] = "unexpected"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    @property
    def exit_code(self) -> int:
        """Process exit code for this error."""
        return EXIT_CODES[self.code]

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()


class UsageError(VegasError):
    """The request itself cannot be carried out."""

    code = "usage"


class ConfigError(UsageError):
    """A knob is outside its range or unknown."""


class ModelError(UsageError):
    """A model cannot be found, fetched or run."""


class WorkloadError(UsageError):
    """Prompts cannot be read, or tuning on them would mean nothing."""


class StorageError(VegasError):
    """A folder is full, read-only, or used by another run."""


class BackendError(VegasError):
    """An engine cannot start, or died."""


class GpuMemoryError(BackendError):
    """Memory of a GPU is still in use after the engine that used it has ended."""


class ProfileMismatchError(VegasError):
    """The profile was made for another model, device or runtime."""

    code = "mismatch"


class ProfileInvalidError(VegasError):
    """The profile cannot be read by this release."""

    code = "invalid_profile"


class BudgetSpentError(VegasError):
    """The time budget ended before a decision was reached."""

    code = "inconclusive"


class NoValidTrialError(VegasError):
    """Every measurement failed, so there is nothing to choose from."""

    code = "no_valid_trial"
