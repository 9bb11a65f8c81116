"""An engine without a model: it answers from a recorded grid, on a clock of recorded times.

A grid is a file of JSON lines (`records.write_json_lines`). The first row is the header, each
further row one recorded pass:

    {"kind": "grid", "info": {EngineInfo's fields}, "workload": {...}, "blocks": [
        {"sha256": "...", "prompt_lens": [2048, ...], "prefill_s": 31.5}, ...]}
    {"block": 0, "replicate": 0, "run": {Run.to_dict()}}
"""

from __future__ import annotations

import copy
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, Self

from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.errors import BackendError, ConfigError, StorageError
from vegas_runtime.protocol import EngineInfo, PromptBlock
from vegas_runtime.records import Run, read_json_lines

GRID_KIND: Final = "grid"

_Setting = tuple[int, SpeculationConfig]


class ReplayEngine:
    """Implements `protocol.Engine` over recorded passes.

    A pass answers with the recording of its replicate. Replicates beyond those recorded go round
    again, each time shifted by a hash of setting, block and lap, so that the same recordings do
    not meet in the same pairs; such repeats add no information, and intervals over them are
    narrower than they would be on an engine.

    Args:
        rows: header and recorded passes, see the module; a pass may be a `Run` already.

    Raises:
        StorageError: no header, or a damaged row.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        remaining = iter(rows)
        header = next(remaining, {})
        if header.get("kind") != GRID_KIND:
            raise StorageError(
                f"the recording starts with kind {header.get('kind')!r}; a grid starts with "
                f"{GRID_KIND!r}.",
                hint="Record one with `python -m benchmarks.record_grid`.",
            )
        self._runs: dict[_Setting, list[Run]] = {}
        try:
            self._info = _read_info(header["info"])
            self._prefill_s = [float(row.get("prefill_s", 0)) for row in header["blocks"]]
            recorded = defaultdict[_Setting, dict[int, Run]](dict)
            for row in remaining:
                run = row["run"] if isinstance(row["run"], Run) else Run.from_dict(row["run"])
                recorded[_setting(row["block"], run.config)][int(row["replicate"])] = run
            self._runs = {
                setting: [run for _, run in sorted(runs.items())]
                for setting, runs in recorded.items()
            }
            self._blocks = tuple(
                self._read_block(index, header) for index in range(len(self._prefill_s))
            )
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
            raise StorageError(
                f"the recorded grid is damaged: {type(error).__name__} {error}."
            ) from error
        self._config = SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0)
        self._prepared: set[int] = set()
        self._clock_s = 0.0

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read a recorded grid.

        Raises:
            StorageError: the file is missing, cut off, or not a grid.
        """
        return cls(read_json_lines(path))

    def rewound(self) -> Self:
        """The same recording with its clock at 0 and no block prepared."""
        other = copy.copy(self)
        other._prepared = set()
        other._clock_s = 0.0
        return other

    @property
    def info(self) -> EngineInfo:
        """What was running when the grid was recorded; the backend is `replay`."""
        return self._info

    @property
    def tokenizer(self) -> None:
        """None: a replay reads no text."""

    @property
    def blocks(self) -> tuple[PromptBlock, ...]:
        """The recorded blocks. Their prompts are zeros of the recorded lengths: no text is read."""
        return self._blocks

    @property
    def config(self) -> SpeculationConfig:
        """The setting in force."""
        return self._config

    def configure(self, config: SpeculationConfig) -> None:
        """Change the setting; whether it was recorded shows when it runs.

        Raises:
            ConfigError: gamma above the largest one recorded.
        """
        largest = self._info.max_num_speculative_tokens
        if config.num_speculative_tokens > largest:
            raise ConfigError(
                f"`num_speculative_tokens` is {config.num_speculative_tokens}; the recorded engine "
                f"was opened for at most {largest}."
            )
        self._config = config

    def prepare(self, block: PromptBlock) -> None:
        """Let the recorded time to prefill a block pass, once.

        Raises:
            BackendError: the block was not recorded.
        """
        if block.index >= len(self._prefill_s):
            raise BackendError(
                f"block {block.index} was not recorded; the grid has {len(self._prefill_s)} blocks."
            )
        if block.index not in self._prepared:
            self._prepared.add(block.index)
            self._clock_s += self._prefill_s[block.index]

    def run(self, block: PromptBlock, *, replicate: int, max_tokens: int, deadline_s: float) -> Run:
        """Play a recorded pass, cut where `max_tokens` or the deadline ends it.

        A recording that is shorter than asked for is played to its end.

        Raises:
            BackendError: the setting was not recorded on this block, or the deadline came first.
        """
        self.prepare(block)
        recorded = self._runs.get(_setting(block.index, self._config))
        if recorded is None:
            raise BackendError(self._missing(block.index))
        run = recorded[self._place(block.index, replicate, len(recorded))]
        # What the steps do not hold, e.g. restoring prefills, passes before the first of them.
        clock_s = self._clock_s + run.elapsed_s - sum(step.duration_s for step in run.steps)
        steps, emitted = [], 0
        for step in run.steps:
            steps.append(step)
            clock_s += step.duration_s
            if step.kind == "decode" and step.num_running == run.batch_size:
                emitted += sum(step.num_emitted_tokens)
            if emitted >= max_tokens or clock_s >= deadline_s:
                break
        elapsed_s = clock_s - self._clock_s
        self._clock_s = clock_s
        if not any(step.kind == "decode" for step in steps):
            raise BackendError("the deadline came before the first decode step ended.")
        return replace(run, config=self._config, steps=tuple(steps), elapsed_s=elapsed_s)

    def now_s(self) -> float:
        """Recorded time played so far, seconds."""
        return self._clock_s

    def close(self) -> None:
        """Nothing to free."""

    def _place(self, block: int, replicate: int, count: int) -> int:
        lap = replicate // count
        if lap == 0:
            return replicate
        name = f"{self._config!r}/{block}/{lap}"
        shift = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        return (replicate + shift) % count

    def _missing(self, block: int) -> str:
        config = self._config
        here = [known for index, known in self._runs if index == block]
        gammas = sorted({known.num_speculative_tokens for known in here})
        ratios = sorted({known.sparsity_ratio for known in here if known.num_speculative_tokens})
        return (
            f"gamma {config.num_speculative_tokens} at ratio {config.sparsity_ratio:g} "
            f"({config.algorithm}, floor {config.min_tokens}) was not recorded on block {block}; "
            f"recorded are gammas {gammas} and ratios {ratios}."
        )

    def _read_block(self, index: int, header: Mapping[str, Any]) -> PromptBlock:
        workload = header.get("workload", {})
        sizes = {runs[0].batch_size for (block, _), runs in self._runs.items() if block == index}
        if len(sizes) != 1:
            raise ValueError(f"block {index} was recorded with batch sizes {sorted(sizes)}")
        return PromptBlock(
            index=index,
            prompts=tuple((0,) * length for length in header["blocks"][index]["prompt_lens"]),
            batch_size=sizes.pop(),
            max_new_tokens=int(workload.get("max_new_tokens", 1)),
            sampling=SamplingConfig(**workload.get("sampling", {})),
        )


def _setting(block: int, config: SpeculationConfig) -> _Setting:
    """Key of a recording; plain decoding is one setting whatever its ratio says."""
    if config.num_speculative_tokens == 0:
        config = SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0, min_tokens=1)
    return int(block), config


def _read_info(values: Mapping[str, Any]) -> EngineInfo:
    known = {field.name for field in fields(EngineInfo)}
    if set(values) != known:
        odd = sorted(known.symmetric_difference(values))
        raise ValueError(f"engine fact {odd[0]!r} is missing or unknown")
    return EngineInfo(**{**values, "backend": "replay"})
