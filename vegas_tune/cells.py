"""Cells of (batch, context): what to tune next, and what the answers say of the ranges between.

The best setting depends on how many requests run and how long their contexts are. Each cell is a
sweep of its own; all of them run on one engine.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import UsageError
from vegas_tune.measure import Measurement
from vegas_tune.steady import FloatArray

_SIZES: Final = {"": 1, "k": 1024, "m": 1024**2}
# Worth of knowing a cell where no gain is predicted, as a gain: that drafting does not pay there is
# an answer too.
_LEAST_WORTH: Final = 0.05

Measurements = Sequence[tuple[SpeculationConfig, Measurement]]


class CellKey(NamedTuple):
    """Requests kept running, and tokens of each prompt."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        """Fit for a file name."""
        return f"b{self.batch}-c{self.context}"


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """Counts of `8`, `1,8,32` or `4k,16k`, in the order given; k is 1,024.

    Raises:
        UsageError: anything else.
    """
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)([km]?)", part.strip().lower())
        if match is None or int(match[1]) == 0:
            raise UsageError(
                f"{option} is {text!r}; whole numbers above 0 are needed, several with commas: "
                "8, 1,8,32 or 4k,16k."
            )
        found.append(int(match[1]) * _SIZES[match[2]])
    return tuple(dict.fromkeys(found))


def make_cells(batches: Sequence[int], contexts: Sequence[int]) -> tuple[CellKey, ...]:
    """Every pair; the first is the pair of the first two, whose setting becomes the default."""
    return tuple(CellKey(*pair) for pair in itertools.product(batches, contexts))


# --------------------------------------------------------------------------- what to measure next


class CostModel:
    """Speed-up to expect in a cell, from the cells measured.

    Times are linear in what is computed and read:

        draft of a token    d0 + d1 * batch * context * ratio
        verification        v0 + v1 * batch * (gamma + 1) + v2 * batch * context

    with factors of at least 0; acceptance is that of the measured cell with the nearest context.
    It orders cells; no figure of it is ever reported.
    """

    def __init__(self, measured: Mapping[CellKey, Measurements]) -> None:
        draft, verify, rest = [], [], []
        self._survival: dict[int, dict[float, tuple[float, ...]]] = {}
        for cell, pairs in measured.items():
            for config, figures in pairs:
                gamma, ratio = config.num_speculative_tokens, config.sparsity_ratio
                times = {phase: estimate.est for phase, estimate in figures.phases.items()}
                kv = float(cell.batch * cell.context)
                verify.append(([1.0, cell.batch * (gamma + 1.0), kv], times["verify_s"]))
                rest.append(times["other_s"] + times["select_s"])
                if gamma and figures.survival:
                    draft.append(([1.0, kv * ratio], times["draft_s"] / gamma))
                    known = self._survival.setdefault(cell.context, {})
                    if len(figures.survival) > len(known.get(ratio, ())):
                        known[ratio] = figures.survival
        self._draft, self._verify = _fitted(draft, 2), _fitted(verify, 3)
        self._rest = sum(rest) / len(rest) if rest else 0.0

    def speedup(self, cell: CellKey) -> float:
        """Best predicted rate over plain decoding's; 1 where nothing drafts or nothing is known."""
        if not self._survival:
            return 1.0
        nearest = min(self._survival, key=lambda known: abs(math.log(known / cell.context)))
        plain_s = self._step_s(cell, 0, 0.0)
        best = 1.0
        for ratio, survival in self._survival[nearest].items():
            for gamma in range(1, len(survival) + 1):
                tokens = 1 + sum(survival[:gamma])
                best = max(best, tokens * plain_s / self._step_s(cell, gamma, ratio))
        return best

    def _step_s(self, cell: CellKey, gamma: int, ratio: float) -> float:
        kv = float(cell.batch * cell.context)
        verify = float(self._verify @ [1.0, cell.batch * (gamma + 1.0), kv])
        draft = float(self._draft @ [1.0, kv * ratio])
        return max(verify + gamma * draft + self._rest, 1e-9)


def _fitted(rows: Sequence[tuple[list[float], float]], width: int) -> FloatArray:
    """Factors of at least 0, each row weighed by its own size: times span orders of magnitude."""
    if not rows:
        return np.zeros(width)
    terms = np.array([row for row, _ in rows])
    values = np.array([value for _, value in rows])
    weights = 1 / np.maximum(values, 1e-9)
    scale = np.maximum(terms.max(axis=0), 1e-9)
    # See `plan._Curve`.
    from scipy.optimize import nnls

    factors, _ = nnls(terms / scale * weights[:, None], values * weights)
    fitted: FloatArray = factors / scale
    return fitted


def next_cell(left: Sequence[CellKey], measured: Mapping[CellKey, Measurements]) -> CellKey:
    """The cell most worth measuring: far from what is known, and where much is to be gained.

    Args:
        left: not measured yet, in the order given; the first is taken while nothing is known.
        measured: figures of those that are.
    """
    if not measured:
        return left[0]
    model = CostModel(measured)

    def worth(cell: CellKey) -> float:
        gap = min(
            math.hypot(math.log2(cell.batch / one.batch), math.log2(cell.context / one.context))
            for one in measured
        )
        return gap * max(model.speedup(cell) - 1, _LEAST_WORTH)

    return max(left, key=worth)


# --------------------------------------------------------------------------- answers


@dataclass(frozen=True, kw_only=True)
class CellAnswer:
    """What was found for a cell.

    Attributes:
        cell: which.
        status: `validated`, `inconclusive`, `failed` or `dropped`.
        why: one sentence.
        config: the setting; None where there is none.
        speedup: over plain decoding, estimate with interval as plain values; None at gamma 0.
        speedup_vs_stock: over stock vLLM, the same; None where that was not measured.
        records: name of its records beside the profile.
    """

    cell: CellKey
    status: str
    why: str
    config: SpeculationConfig | None = None
    speedup: Mapping[str, Any] | None = None
    speedup_vs_stock: Mapping[str, Any] | None = None
    records: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the profile."""
        values: dict[str, Any] = {
            "batch": self.cell.batch,
            "context": self.cell.context,
            "status": self.status,
            "why": self.why,
        }
        return values | ({"records": self.records} if self.records else {})


def dominated_by(cell: CellKey, answers: Sequence[CellAnswer]) -> CellKey | None:
    """A cell that needs no more memory than this one, and had too little; None without one."""
    for answer in answers:
        smaller = answer.cell
        is_smaller = smaller.batch <= cell.batch and smaller.context <= cell.context
        if answer.status == "failed" and "oom" in answer.why and is_smaller:
            return smaller
    return None


def make_buckets(answers: Sequence[CellAnswer], *, num_output_tokens: int) -> list[dict[str, Any]]:
    """Half-open ranges of batch and context, each with the setting of the cell at its lower corner.

    A setting holds from its own cell up to the next one that was measured, and at the largest
    cells no further than they were measured: nothing is extrapolated. Where drafting does not pay
    the setting is gamma 0. Cells that settled nothing leave a gap, served without drafting.

    Args:
        answers: one per cell.
        num_output_tokens: output limit of the requests; contexts grow by it while decoding.
    """
    batches = sorted({answer.cell.batch for answer in answers})
    contexts = sorted({answer.cell.context for answer in answers})
    buckets = []
    for answer in sorted(answers, key=lambda answer: answer.cell):
        if answer.status != "validated" or answer.config is None:
            continue
        batch, context = answer.cell
        bucket: dict[str, Any] = {
            "batch": [batch, _after(batches, batch, batch + 1)],
            "context": [context, _after(contexts, context, context + num_output_tokens + 1)],
            "config": answer.config.to_dict(),
        }
        if answer.speedup is not None:
            bucket["speedup_vs_gamma0"] = dict(answer.speedup)
        if answer.speedup_vs_stock is not None:
            bucket["speedup_vs_stock"] = dict(answer.speedup_vs_stock)
        buckets.append(bucket)
    return buckets


def _after(sizes: Sequence[int], size: int, end: int) -> int:
    """The next size measured; `end` behind the last."""
    return next((other for other in sizes if other > size), end)
