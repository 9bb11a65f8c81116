"""What the collector does for which method, and what of it a running engine may change.

Algorithm and row set are flags on the device that captured kernels read: changing one costs no
recapture. A collector made for Vegas can draft with StreamingLLM's window instead, and scores
nothing meanwhile; one made for a window has no buffers for scores.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import torch

from vegas_runtime.config import Rows, SpeculationConfig
from vegas_runtime.errors import ConfigError
from vegas_runtime.vllm_plugin.triton_score import ROW_SETS

ListSource = Literal["scores", "window", "everything"]

# What a method's lists come from. Others need what no collector yields yet: Quest the draft
# step's own query, SnapKV the prompt's last 32 rows, SpecExtend and SparseSpec rows that are known
# only after acceptance, hence scores kept per row.
METHODS: Final[dict[str, ListSource]] = {
    "vegas": "scores",
    "streaming_llm": "window",
    "dense": "everything",
}
# What one collector can switch between while running; the flag on the device is the index.
_SWITCHABLE: Final = ("vegas", "streaming_llm")


class Switches:
    """Method and row set in force.

    Args:
        config: the method and rows to start with.
        device: where.

    Attributes:
        list_source: what lists are made from at start.
        algorithm_flag: [1] int32, 0 while lists come from scores.
        row_set: [1] int32 index into `ROW_SETS`.

    Raises:
        ConfigError: a method or switch that vLLM steps cannot serve yet.
    """

    def __init__(self, config: SpeculationConfig, device: torch.device) -> None:
        check_method(config)
        self._started_with = config.algorithm
        self.list_source = METHODS[config.algorithm]
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.algorithm_flag = torch.full((1,), int(not self.is_scored), **ints)
        rows = ROW_SETS.index(config.rows) if self.is_scored else 0
        self.row_set = torch.full((1,), rows, **ints)

    @property
    def is_scored(self) -> bool:
        """Whether verify steps can be scored at all."""
        return self.list_source == "scores"

    @property
    def algorithm(self) -> str:
        """The method in force, read from the device."""
        if not self.is_scored:
            return self._started_with
        return _SWITCHABLE[int(self.algorithm_flag.item())]

    @property
    def rows(self) -> Rows:
        """The row set in force, read from the device."""
        return ROW_SETS[int(self.row_set.item())]

    def set_algorithm(self, algorithm: str) -> None:
        """See `Collector.set_algorithm`."""
        allowed = _SWITCHABLE if self.is_scored else (self._started_with,)
        if algorithm not in allowed:
            raise ConfigError(
                f"`algorithm` is {algorithm!r}; an engine started with "
                f"{self._started_with!r} can run {', '.join(allowed)}.",
                hint="Start the engine with that algorithm.",
            )
        if self.is_scored:
            self.algorithm_flag.fill_(_SWITCHABLE.index(algorithm))

    def set_rows(self, rows: Rows, *, path: str) -> None:
        """See `Collector.set_rows`; `path` is how scores are collected."""
        check_rows(rows)
        if path == "fused_exact" and rows != "two":
            raise ConfigError(
                f"`rows` is {rows!r}; an engine started with collection 'fused_exact' scores rows "
                "'two' only.",
                hint="Start it with `sparse_attn_collection` 'fused'.",
            )
        self.row_set.fill_(ROW_SETS.index(rows))


def check_method(config: SpeculationConfig) -> None:
    """Refuse what no collector can do.

    Raises:
        ConfigError: a method or switch that vLLM steps cannot serve yet.
    """
    if config.algorithm not in METHODS:
        raise ConfigError(
            f"`algorithm` is {config.algorithm!r}; on vLLM {', '.join(METHODS)} are supported.",
            hint="The reference engine runs every method.",
        )
    if METHODS[config.algorithm] != "scores":
        return
    check_rows(config.rows)
    if config.metric != "weight":
        raise ConfigError(
            f"`metric` is {config.metric!r}; on vLLM a token's score is one byte of attention "
            "weight.",
            hint="Use metric 'weight', or the reference engine.",
        )


def check_rows(rows: Rows) -> None:
    """Refuse row sets that are known only after acceptance.

    Raises:
        ConfigError: such a row set.
    """
    if rows not in ROW_SETS:
        raise ConfigError(
            f"`rows` is {rows!r}, which is known only after acceptance; on vLLM scores are "
            f"summed inside the verify pass, so {', '.join(ROW_SETS)} are supported.",
            hint="The reference engine runs every row set.",
        )
