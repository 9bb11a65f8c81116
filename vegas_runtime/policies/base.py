"""The contract of a KV selection policy: what it asks of an engine, what it answers.

A policy knows no engine. It declares what it needs (`Needs`), is handed what it declared
(`SelectionInput`), and answers which KV entries the next draft steps read (`KVSelection`).

Positions count from the start of the text. `L` is the prefix committed before the verify pass;
that pass fed gamma + 1 rows at positions L..L+gamma, of which row 0 is the last emitted token.
Candidates are 0..L; the tail (L+1 and later) could not be scored and is always attended. A
method's own definition may start its tail earlier, never later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Final

from torch import Tensor

from vegas_runtime.config import SWITCHES, Metric, Rows, Scope, SpeculationConfig
from vegas_runtime.errors import ConfigError

# Rows that are known before acceptance is: they can be reduced inside the attention pass.
EARLY_ROWS: Final = frozenset({"two", "all", "first_middle_last"})

# Most prompt rows a policy may ask for. A prompt is prefilled once and serves every policy after
# that, so an engine keeps the queries of so many rows whichever policy is in force.
MAX_PROMPT_ROWS: Final = 32


@dataclass(frozen=True, kw_only=True)
class Collection:
    """Scores the verify pass must yield.

    Attributes:
        rows: which query rows are summed; rows that depend on acceptance are kept apart
            until it is known.
        metric: softmax weights, or scaled logits.
        scope: averaged over all query heads, or over each KV head's group.
    """

    rows: Rows
    metric: Metric = "weight"
    scope: Scope = "layer"

    def row_indices(self, num_rows: int) -> list[int]:
        """Rows of a verify block that must be collected before acceptance is known.

        Args:
            num_rows: gamma + 1, or 1 after a prefill.
        """
        last = num_rows - 1
        if self.rows == "two":
            return sorted({0, last})
        if self.rows == "first_middle_last":
            return sorted({0, last // 2, last})
        return list(range(num_rows))


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a policy must be handed.

    Attributes:
        collection: scores of the verify pass, or None.
        prompt_rows: queries of this many last prompt rows, and the prompt's keys (SnapKV). The
            policy is then asked once per request, right after its prefill, and the engine
            holds the answer for the request's life; at most `MAX_PROMPT_ROWS`, 0 for none.
        page_size: elementwise bounds of the cached keys over pages of this many tokens, kept
            up to date as tokens are appended and rolled back (Quest); 0 for none. Bounds, not
            keys: reading every key at each draft step costs what dense drafting costs.
        query: the draft step's own query; the policy then selects anew, layer by layer, at
            each draft step.
        per_draft_step: select anew at each draft step, from lengths alone.
        dense_first_phase: the engine drafts densely for a request, whatever its neighbours
            do, until a verify pass over its drafts has been scored (SparseSpec).
    """

    collection: Collection | None = None
    prompt_rows: int = 0
    page_size: int = 0
    query: bool = False
    per_draft_step: bool = False
    dense_first_phase: bool = False


@dataclass(frozen=True, kw_only=True)
class SelectionInput:
    """What an engine hands to `select`, for one layer or several layers at once.

    The leading dimensions `...` are layers, if any, then B requests; an engine is free to ask
    for all layers in one call. Everything not declared in `Needs` is None.

    Attributes:
        prefix_lens: [B] int64, L: keys committed before the last verify pass.
        committed_lens: [B] int64, keys committed now, L + 1 + accepted.
        current_lens: [B] int64, keys the next draft query sees densely, itself excluded.
        scores: [..., B, 1 or Hkv, Lmax] float32, reduced over the asked rows; undefined
            beyond position L.
        prompt_queries: [..., B, H, R, D], the last R prompt rows' queries after RoPE; row
            R - 1 is the prompt's last token, at position L. R may fall short of
            `Needs.prompt_rows` if every prompt does; rows before a prompt's start are undefined.
        keys: [..., B, Hkv, Lmax, D] after RoPE, handed over with `prompt_queries`; undefined
            beyond position L.
        page_low: [..., B, Hkv, P, D], elementwise minimum of each page's keys. Page p holds
            positions p * page_size and up; undefined unless `current_lens` fills the page.
        page_high: [..., B, Hkv, P, D], elementwise maximum, likewise.
        query: [..., B, H, D], the draft step's query after RoPE, at position `current_lens`.
    """

    prefix_lens: Tensor
    committed_lens: Tensor
    current_lens: Tensor
    scores: Tensor | None = None
    prompt_queries: Tensor | None = None
    keys: Tensor | None = None
    page_low: Tensor | None = None
    page_high: Tensor | None = None
    query: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class KVSelection:
    """Which KV entries a draft step reads besides itself.

    Attributes:
        positions: [..., B, 1 or Hkv, K] int64, ascending, no position twice, padded with -1.
            The third-last dimension may be absent when every layer shares one list.
        tail_starts: [B] int64; every position from here on is attended too, so a position
            in the list is always below it.
    """

    positions: Tensor
    tail_starts: Tensor


class KVSelectionPolicy(ABC):
    """One selection method.

    Args:
        config: the knobs in force.

    Raises:
        ConfigError: a switch this method does not have.
    """

    name: ClassVar[str]
    needs: Needs

    def __init__(self, config: SpeculationConfig) -> None:
        self.config = config
        self.needs = self._needs()

    @abstractmethod
    def _needs(self) -> Needs:
        """What `select` must be handed, given the configuration."""

    @abstractmethod
    def select(self, given: SelectionInput) -> KVSelection | None:
        """Choose KV entries for the coming draft steps.

        Returns:
            The selection, or None for every entry (dense drafting).
        """

    def _refuse_switches(self, *names: str) -> None:
        """Refuse switches that would change nothing here.

        Args:
            *names: the switches this method lacks; all of them when none is named.
        """
        for name in names or SWITCHES:
            value = getattr(self.config, name)
            if value != SpeculationConfig.__dataclass_fields__[name].default:
                raise ConfigError(
                    f"`{name}` is {value!r}, but {self.name!r} has no such switch, so it would "
                    "change nothing.",
                    hint=f"Leave `{name}` out, or use algorithm 'vegas'.",
                )
