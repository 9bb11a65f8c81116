"""What a workload can be asked to be: source, lengths, batch, sampling."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from vegas_runtime.config import SamplingConfig
from vegas_runtime.errors import WorkloadError

WorkloadName = Literal["stdlib", "jsonl", "aime25", "codeelo", "longbench-v2"]

# Below this a question and its chat template leave no text to ask about.
_LEAST_CONTEXT_LEN: Final = 128

# The paper samples LongBench-v2 requests of 96K to 120K tokens (section 5.3).
_LONGBENCH_V2_RANGE: Final = (96 * 1024, 120 * 1024)


@dataclass(frozen=True, kw_only=True)
class WorkloadSpec:
    """What to measure on.

    Attributes:
        name: `stdlib` (files of the running Python's standard library), `jsonl` (one prompt a
            line), or one of the paper's sets from local files.
        path: file or folder; for all but `stdlib`.
        context_len: exact tokens of each prompt, 2048 unless given; for `stdlib` only.
        min_context_len: shorter prompts are left out; for files. LongBench-v2: 96K unless given.
        max_context_len: longer prompts are left out; for files. LongBench-v2: 120K unless given.
        batch_size: requests kept running.
        num_waiting: spare prompts of each block, which take a place when a request ends.
        num_blocks: blocks of prompts that are measured apart.
        max_new_tokens: output limit of each request.
        sampling: how tokens are drawn.
        seed: decides which prompts are taken, and in which order.
        allow_replay: use prompts again when there are too few different ones (the paper's
            appendix E.3 replays AIME25's 30 questions 32 times); yes for the paper's sets and no
            for the others unless given.

    Raises:
        WorkloadError: a value is outside its range, or does not go with `name`.
    """

    name: WorkloadName = "stdlib"
    path: Path | None = None
    context_len: int | None = None
    min_context_len: int | None = None
    max_context_len: int | None = None
    batch_size: int = 8
    num_waiting: int = 0
    num_blocks: int = 3
    max_new_tokens: int = 128
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    seed: int = 0
    allow_replay: bool | None = None

    def __post_init__(self) -> None:
        if self.name not in get_args(WorkloadName):
            raise WorkloadError(
                f"workload {self.name!r} is unknown; known are {', '.join(get_args(WorkloadName))}."
            )
        self._check_path()
        self._set_defaults()
        for name, least in (
            ("context_len", _LEAST_CONTEXT_LEN),
            ("min_context_len", 1),
            ("max_context_len", self.min_context_len or 1),
            ("batch_size", 1),
            ("num_waiting", 0),
            ("num_blocks", 1),
            ("max_new_tokens", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise WorkloadError(f"`{name}` is {value!r}; a whole number is needed.")
            if value < least:
                raise WorkloadError(f"`{name}` is {value}; at least {least} is needed.")

    def _check_path(self) -> None:
        if self.name == "stdlib" and self.path is not None:
            raise WorkloadError(
                f"`path` is {self.path}, but the `stdlib` workload reads no file of yours.",
                hint='For prompts of your own use the workload "jsonl".',
            )
        if self.name != "stdlib" and self.path is None:
            raise WorkloadError(
                f"the `{self.name}` workload needs `path`: its data is read from a local file and "
                "never fetched."
            )

    def _set_defaults(self) -> None:
        """Put the values in force where nothing was given, so that they are what is recorded."""
        is_stdlib = self.name == "stdlib"
        wrong = ("min_context_len", "max_context_len") if is_stdlib else ("context_len",)
        for name in wrong:
            if getattr(self, name) is not None:
                raise WorkloadError(
                    f"`{name}` is {getattr(self, name)}, which does not go with `{self.name}`.",
                    hint="Prompts of `stdlib` are cut to exactly `context_len` tokens; prompts "
                    "from files keep their length and are chosen by `min_context_len` and "
                    "`max_context_len`.",
                )
        shortest, longest = _LONGBENCH_V2_RANGE if self.name == "longbench-v2" else (None, None)
        defaults = {
            "context_len": 2048 if is_stdlib else None,
            "min_context_len": shortest,
            "max_context_len": longest,
            "allow_replay": self.name in ("aime25", "codeelo", "longbench-v2"),
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def num_prompts(self) -> int:
        """Prompts of all blocks together."""
        return self.num_blocks * (self.batch_size + self.num_waiting)

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name; of the path only its last part, which is no secret."""
        values = asdict(self)
        values["path"] = self.path.name if self.path else None
        return values
