"""Which selection methods run on vLLM, what each one's lists come from, and what slows it.

Imports neither torch nor vLLM: the keys of `--speculative-config` are checked against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from vegas_runtime.config import Rows, SpeculationConfig

# scores      summed inside the verify pass, ranked behind its last layer
# accepted    rows of the verify pass that are kept, and scored once acceptance is known
# prompt      the last rows of the prompt, once
# window      lengths alone, anew at each draft step
# query       bounds of each page's keys and the draft step's own query, anew at each draft step
# everything  nothing is left out
ListSource = Literal["scores", "accepted", "prompt", "window", "query", "everything"]

# Row sets that are known before acceptance, in the order of the device's flag.
ROW_SETS: Final[tuple[Rows, ...]] = ("two", "first_middle_last", "all")
# Row sets that are not.
LATE_ROWS: Final[tuple[Rows, ...]] = ("last_accepted", "accepted_only")

_PER_STEP: Final = (
    "every layer of every draft step selects for its own query: two more kernels, and bounds of "
    "all pages are read, a sixteenth of the KV cache"
)
_SECOND_PASS: Final = "a second pass over K scores the rows, because acceptance decides which"


class DraftKind(NamedTuple):
    """What a draft step's graph is captured for.

    Attributes:
        per_head: lists are one per KV head.
        by_query: each layer lists pages for the step's own query before it attends.
    """

    per_head: bool
    by_query: bool


@dataclass(frozen=True, kw_only=True)
class Method:
    """How one method is served.

    Attributes:
        source: what its lists come from.
        per_head: one list per KV head by its definition; of `vegas` the scope decides.
        in_pages: whole pages compete by its definition; of `vegas` the granularity decides.
        has_long_tail: drafts may read densely without bound: a text not yet selected from, or
            everything generated since.
        slowed_by: what it costs beside the drafts themselves, of what another way of serving it
            would save; empty for methods at full speed.
    """

    source: ListSource
    per_head: bool = False
    in_pages: bool = False
    has_long_tail: bool = False
    slowed_by: str = ""


METHODS: Final[dict[str, Method]] = {
    "vegas": Method(source="scores"),
    "streaming_llm": Method(source="window"),
    "spec_extend": Method(source="accepted", in_pages=True, slowed_by=_SECOND_PASS),
    "sparse_spec": Method(
        source="accepted",
        per_head=True,
        has_long_tail=True,
        slowed_by="a second pass over K scores all rows apart by KV head, because the budget "
        "depends on acceptance",
    ),
    "snapkv": Method(
        source="prompt",
        per_head=True,
        has_long_tail=True,
        slowed_by="the last 32 prompt rows run a second time when a request drafts first, outside "
        "CUDA graphs; prefilling leaves them out where the prefix cache has them",
    ),
    "quest": Method(source="query", slowed_by=_PER_STEP),
    "dense": Method(source="everything"),
}
# What `sparse_attn_algorithm` may name; dense drafting saves nothing and is for measurements.
ALGORITHMS: Final = tuple(name for name in METHODS if name != "dense")


def source_of(algorithm: str, rows: Rows) -> ListSource:
    """What a method's lists come from when it sums these rows of the verify block."""
    source = METHODS[algorithm].source
    return "accepted" if source == "scores" and rows in LATE_ROWS else source


def slowed_by(algorithm: str, rows: Rows) -> str:
    """What slows a method here; empty for nothing."""
    late = source_of(algorithm, rows) == "accepted"
    return METHODS[algorithm].slowed_by or (_SECOND_PASS if late else "")


def declared_algorithms(config: SpeculationConfig, more: Sequence[str]) -> tuple[str, ...]:
    """Methods that an engine can run, the one it starts with first.

    Args:
        config: the setting at start.
        more: methods that were declared besides.
    """
    # A window costs an engine that scores nothing.
    free = ("streaming_llm",) if config.algorithm == "vegas" else ()
    return tuple(dict.fromkeys((config.algorithm, *free, *more)))


def declared_rows(config: SpeculationConfig, more: Sequence[Rows]) -> tuple[Rows, ...]:
    """Row sets that an engine can run; those known before acceptance cost nothing.

    Args:
        config: the setting at start.
        more: row sets that were declared besides.
    """
    return tuple(dict.fromkeys((*ROW_SETS, config.rows, *more)))
