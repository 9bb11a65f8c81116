"""What the collector does for which method, and what of it a running engine may change.

Method, row set and granularity are flags on the device that captured kernels read: changing one
costs no recapture. A collector has buffers for the methods declared when it is made, and runs only
those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, get_args

import torch

from vegas_runtime.config import Granularity, Rows, SpeculationConfig
from vegas_runtime.errors import ConfigError
from vegas_runtime.vllm_plugin.methods import (
    LATE_ROWS,
    METHODS,
    ROW_SETS,
    DraftKind,
    ListSource,
    declared_algorithms,
    declared_rows,
    slowed_by,
    source_of,
)

_NAMES: Final = tuple(METHODS)
_ALL_ROWS: Final = (*ROW_SETS, *LATE_ROWS)
_GRANULARITIES: Final[tuple[Granularity, ...]] = get_args(Granularity)


class Switches:
    """Method, row set and granularity in force.

    Args:
        config: the method, rows and granularity to start with.
        device: where.
        algorithms: methods that may be switched to besides.
        rows: row sets likewise.

    Attributes:
        sources: what lists are ever made from.
        unscored: [1] int32, 0 while a verify pass sums scores.
        window: [1] int32, 0 while drafts read selected lists.
        kept: [1] int32, 1 while verify rows are kept until acceptance is known.
        bounded: [1] int32, 1 while pages are picked by the draft step's query.
        row_set: [1] int32 index into `ROW_SETS`.
        in_pages: [1] int32, 1 while whole pages compete.
        source: what lists come from now.
        held: the method in force, as last set.
        held_rows: the row set in force, likewise.
        held_granularity: what competes, likewise.
        scores_per_head: whether `scope` asks for a list per KV head.

    Raises:
        ConfigError: a method or switch that vLLM steps cannot serve yet.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        device: torch.device,
        *,
        algorithms: Sequence[str] = (),
        rows: Sequence[Rows] = (),
    ) -> None:
        self._algorithms = declared_algorithms(config, algorithms)
        self._rows = declared_rows(config, rows)
        self.scores_per_head = config.scope == "kv_head"
        for algorithm in self._algorithms:
            check_method(config, algorithm)
        self.sources = {
            source_of(algorithm, one) for algorithm in self._algorithms for one in self._rows
        }
        if len(self._algorithms) > 1 and "everything" in self.sources:
            raise ConfigError("'dense' was declared beside other methods; it runs alone.")
        flags = torch.zeros(9, dtype=torch.int32, device=device)
        self._algorithm_flag, self._rows_flag, *rest = (flags[i : i + 1] for i in range(9))
        self._granularity_flag, self.unscored, self.window, *rest = rest
        self.kept, self.bounded, self.row_set, self.in_pages = rest
        self.source: ListSource
        self.held: str
        self.held_rows: Rows
        self.held_granularity: Granularity
        self._set(config.algorithm, config.rows, config.granularity)

    @property
    def is_scored(self) -> bool:
        """Whether verify steps can be scored at all."""
        return "scores" in self.sources

    @property
    def keeps_rows(self) -> bool:
        """Whether verify rows can be kept until acceptance is known."""
        return "accepted" in self.sources

    @property
    def collects(self) -> bool:
        """Whether verify steps are ever scored, or their rows kept."""
        return self.is_scored or self.keeps_rows

    @property
    def listed_from(self) -> ListSource:
        """What buffers of lists must have room for: selected entries, unless none are selected."""
        if self.sources & {"scores", "accepted", "prompt"}:
            return "scores"
        return "query" if "query" in self.sources else self.source

    @property
    def per_head(self) -> bool:
        """Whether the method in force reads a list per KV head."""
        return self.is_per_head(self.held)

    @property
    def shapes(self) -> tuple[bool, ...]:
        """Whether there is a list per KV head, for each shape of list that is ever read."""
        return tuple(sorted({self.is_per_head(name) for name in self._algorithms}))

    @property
    def has_long_tail(self) -> bool:
        """Whether a method that may be chosen reads tails of any length."""
        return any(METHODS[name].has_long_tail for name in self._algorithms)

    @property
    def kind(self) -> DraftKind:
        """What a draft step of the method in force runs."""
        return self._kind(self.held)

    @property
    def kinds(self) -> tuple[DraftKind, ...]:
        """What draft steps ever run."""
        return tuple(sorted({self._kind(name) for name in self._algorithms}))

    def _kind(self, algorithm: str) -> DraftKind:
        by_query = METHODS[algorithm].source == "query"
        return DraftKind(per_head=self.is_per_head(algorithm), by_query=by_query)

    @property
    def named_per_head(self) -> str:
        """The first method that reads a list per KV head, for a sentence about it."""
        return next(repr(name) for name in self._algorithms if self.is_per_head(name))

    @property
    def late(self) -> list[tuple[str, Rows]]:
        """Methods that may be chosen and wait for acceptance, with their rows."""
        return [
            (name, rows)
            for name in self._algorithms
            for rows in (self._rows if name == "vegas" else ROW_SETS[:1])
            if source_of(name, rows) == "accepted"
        ]

    def is_per_head(self, algorithm: str) -> bool:
        """Whether a method reads a list per KV head.

        A window means the same in either shape, so it takes the one that other methods need.
        """
        method = METHODS[algorithm]
        if method.source in ("scores", "query"):
            return self.scores_per_head
        if method.source == "window":
            others = [name for name in self._algorithms if METHODS[name].source != "window"]
            return bool(others) and all(self.is_per_head(name) for name in others)
        return method.per_head

    @property
    def algorithm(self) -> str:
        """The method in force, read from the device."""
        return _NAMES[int(self._algorithm_flag.item())]

    @property
    def rows(self) -> Rows:
        """The row set in force, read from the device."""
        return _ALL_ROWS[int(self._rows_flag.item())]

    @property
    def granularity(self) -> Granularity:
        """What competes, read from the device."""
        return _GRANULARITIES[int(self._granularity_flag.item())]

    @property
    def slowed_by(self) -> dict[str, str]:
        """What slows which of the declared methods and row sets."""
        named = {algorithm: slowed_by(algorithm, "two") for algorithm in self._algorithms}
        late = {f"vegas, rows {rows}": slowed_by("vegas", rows) for rows in self._rows}
        return {
            name: why
            for name, why in (named | (late if "vegas" in self._algorithms else {})).items()
            if why
        }

    def set_algorithm(self, algorithm: str) -> None:
        """See `Collector.set_algorithm`."""
        if algorithm not in self._algorithms:
            raise ConfigError(
                f"`algorithm` is {algorithm!r}; this engine was started for "
                f"{', '.join(self._algorithms)}.",
                hint="Start it with that algorithm, or name it in `sparse_attn_algorithm_set`.",
            )
        self._set(algorithm, self.held_rows, self.held_granularity)

    def set_rows(self, rows: Rows, *, path: str) -> None:
        """See `Collector.set_rows`; `path` is how scores are collected."""
        if rows not in self._rows:
            raise ConfigError(
                f"`rows` is {rows!r}, which is known only after acceptance; this engine was "
                f"started for {', '.join(self._rows)} and kept no room for it.",
                hint="Start it with those rows, or name them in `sparse_attn_rows_set`.",
            )
        if path == "fused_exact" and rows in ROW_SETS and rows != "two":
            raise ConfigError(
                f"`rows` is {rows!r}; an engine started with collection 'fused_exact' scores rows "
                "'two' only.",
                hint="Start it with `sparse_attn_collection` 'fused'.",
            )
        self._set(self.held, rows, self.held_granularity)

    def set_granularity(self, granularity: Granularity) -> None:
        """See `Collector.set_granularity`."""
        self._set(self.held, self.held_rows, granularity)

    def _set(self, algorithm: str, rows: Rows, granularity: Granularity) -> None:
        self.held, self.held_rows, self.held_granularity = algorithm, rows, granularity
        self.source = source = source_of(algorithm, rows)
        self._algorithm_flag.fill_(_NAMES.index(algorithm))
        self._rows_flag.fill_(_ALL_ROWS.index(rows))
        self._granularity_flag.fill_(_GRANULARITIES.index(granularity))
        takes_pages = METHODS[algorithm].source == "scores" and granularity == "page"
        self.in_pages.fill_(int(takes_pages or METHODS[algorithm].in_pages))
        self.unscored.fill_(int(source != "scores"))
        self.window.fill_(int(source in ("window", "everything")))
        self.kept.fill_(int(source == "accepted"))
        self.bounded.fill_(int(source == "query"))
        self.row_set.fill_(ROW_SETS.index(rows) if rows in ROW_SETS else 0)


def check_method(config: SpeculationConfig, algorithm: str) -> None:
    """Refuse what no collector can do.

    Args:
        config: the setting at start.
        algorithm: a method that it may run.

    Raises:
        ConfigError: a method or switch that vLLM steps cannot serve yet.
    """
    if algorithm not in METHODS:
        raise ConfigError(
            f"`algorithm` is {algorithm!r}; on vLLM {', '.join(METHODS)} are supported.",
            hint="The reference engine runs every method.",
        )
    if METHODS[algorithm].source == "scores" and config.metric != "weight":
        raise ConfigError(
            f"`metric` is {config.metric!r}; on vLLM a token's score is one byte of attention "
            "weight.",
            hint="Use metric 'weight', or the reference engine.",
        )
