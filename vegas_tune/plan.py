"""What may be measured, at what cost, and in which order.

`Plan` is everything a sweep's decisions depend on besides the measurements themselves; it is
written beside the records, so that a replay starts from the same place.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self

from vegas_runtime.config import MAX_SPECULATIVE_TOKENS, SpeculationConfig
from vegas_runtime.errors import UsageError, WorkloadError
from vegas_runtime.protocol import PromptBlock

# Not one of the sweep's own steps: another engine, which no decision rests on.
STOCK: Final = "0-stock"
SPARSITY: Final = "1-sparsity"
GAMMA: Final = "2-gamma"
REFINE: Final = "3-refine"
VALIDATE: Final = "4-validate"
STEPS: Final = (SPARSITY, GAMMA, REFINE, VALIDATE)

# Share of the budget, less the engine's starts and preparation, that may be spent when a step ends.
# What a step leaves, the next may use; validation keeps the rest, because an unvalidated winner is
# no answer.
BUDGET_SHARES: Final = {SPARSITY: 0.40, GAMMA: 0.60, REFINE: 0.70, VALIDATE: 1.0}

# Chance that any of the validation's looks excludes the truth.
FAMILY_ALPHA: Final = 0.05
# Rounds of a race after which settings drop out: fewer than six cannot reach the first level.
DEFAULT_RACE_LOOKS: Final = (6, 8, 10)
# Validation rounds, and pairs of a speed-up check, after which a verdict is tried.
DEFAULT_LOOKS: Final = (6, 10, 16, 24)

DEFAULT_MAX_SPECULATIVE_TOKENS: Final = 15
DEFAULT_RATIOS: Final = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.25, 0.5)
# Every step is about a factor of 1.4: throughput is flat enough around its optimum that the best
# rung of such a ladder is within a per cent or two of the best value.
_GAMMA_LADDER: Final = (1, 2, 3, 4, 5, 7, 10, 15, 21, 30, 43, MAX_SPECULATIVE_TOKENS)
_LAST_RUNG_GAP: Final = 1.15

# Upper bounds for `describe`. Synthetic sweeps of 8 requests took 2.3 to 2.7 KB a measurement at
# 300 tokens (1.7 KB of it journal) and 4.8 KB at 2400, record and packed copy counted.
_BYTES_PER_MEASUREMENT: Final = 3000
_BYTES_PER_TOKEN: Final = 3

# Rules that came later, as the plans recorded before them were carried out.
_RULES_BEFORE: Final[Mapping[str, Any]] = {
    "race_looks": [],
    "places": 1,
    "stop_precision": 0.05,
    "looks_around": 0,
    "tensor_parallel_size": 1,
    "num_finalists": 2,
    "preparation_share": 1e6,
    "shares_after_preparation": False,
}


def gamma_ladder(max_num_speculative_tokens: int) -> tuple[int, ...]:
    """Candidate tokens drafted per iteration, ascending, the largest always among them.

    Raises:
        UsageError: the largest is below 1 or above what the runtime supports.
    """
    if not 1 <= max_num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
        raise UsageError(
            f"the largest `num_speculative_tokens` is {max_num_speculative_tokens}; "
            f"1 to {MAX_SPECULATIVE_TOKENS} can be tuned."
        )
    below = (g for g in _GAMMA_LADDER if g * _LAST_RUNG_GAP < max_num_speculative_tokens)
    return (*below, max_num_speculative_tokens)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement to make.

    Attributes:
        step: one of `STEPS`, or `STOCK`.
        config: the setting.
        block: index of the prompt block.
        replicate: unlike in any earlier round, equal within a round; shifts the sampling seed.
        max_tokens: tokens to emit while the batch is full.
        place: which of the plan's devices measures it.
    """

    step: str
    config: SpeculationConfig
    block: int
    replicate: int
    max_tokens: int
    place: int = 0

    @property
    def key(self) -> str:
        """Name of the point, unique within a plan and fit for a file name."""
        gamma, ratio = self.config.num_speculative_tokens, self.config.sparsity_ratio
        place = f".p{self.place}" if self.place else ""
        return f"{self.step}.g{gamma}.s{ratio:g}.b{self.block}.r{self.replicate}{place}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        return cls(**{**values, "config": SpeculationConfig.from_dict(values["config"])})


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a sweep may measure and by which rules it decides.

    Attributes:
        base: algorithm, floor and switches; its gamma and ratio stand for plain decoding.
        ratios: ladder of sparsity ratios (fraction of KV entries kept), ascending.
        gammas: ladder of tokens drafted per iteration, ascending, without 0.
        budget_s: time for everything, model load and prefill included, seconds.
        batch_size: requests kept running.
        block_sha256: hash of each prompt block; a resumed run must find the same text.
        is_greedy: the same block always decodes to the same text, so repeating it renews the
            timing but not the acceptance.
        tokens: tokens of a search measurement.
        validation_tokens: tokens of a validation measurement.
        sparsity_rounds: most rounds of step 1; data that has not settled the plateau by then
            will not do so soon, and step 3 looks at the ratio again.
        rounds: interleaved rounds of a search step.
        settle_rounds: rounds in which the best of all search settings race each other.
        looks_around: how often the unmeasured settings beside the fastest, along both knobs, are
            measured before that race; each look may find a faster one.
        max_settings: settings a search step may try, gamma 0 not counted.
        plateau_tolerance: accepted tokens that may be given up on the plateau, a fraction.
        tie_tolerance: throughput that may be given up for a cheaper setting, a fraction.
        gamma_tie_tolerance: throughput that validation may give up for a finalist that drafts fewer
            tokens. More, since nothing follows that could add to it, and since fewer drafts lose
            less where other text is drafted less well; a smaller ratio loses more there.
        precision: largest half-width of a validated speed-up's interval, a fraction; a large
            gain's may be wider (`decide.validate`).
        stop_precision: half-width at which a validated verdict ends the rounds; where it is below
            `precision`, what is left of the budget goes into a narrower interval.
        looks: numbers of validation rounds after which a verdict is tried.
        race_looks: numbers of rounds of step 2's race after which slow settings drop out of it;
            none, no race.
        num_finalists: settings that draft which validation measures side by side.
        preparation_share: share of the budget that preparing all blocks may take; where it would
            take more, validation goes on with the search's text instead of text of its own.
        shares_after_preparation: whether the steps share what preparing the search's text leaves
            of the budget, as they share what the engine's starts leave.
        places: devices that measure at the same time; each measures every point.
        tensor_parallel_size: GPUs of each of these, over which the model is split.
        seed: seeds the bootstrap.
        model: facts that identify the model, for the hash.
    """

    base: SpeculationConfig
    ratios: tuple[float, ...]
    gammas: tuple[int, ...]
    budget_s: float
    batch_size: int
    block_sha256: tuple[str, ...]
    is_greedy: bool
    tokens: int
    validation_tokens: int
    sparsity_rounds: int = 12
    rounds: int = 2
    settle_rounds: int = 2
    looks_around: int = 2
    max_settings: int = 6
    plateau_tolerance: float = 0.02
    tie_tolerance: float = 0.005
    gamma_tie_tolerance: float = 0.01
    precision: float = 0.05
    stop_precision: float = 0.05
    looks: tuple[int, ...] = DEFAULT_LOOKS
    race_looks: tuple[int, ...] = DEFAULT_RACE_LOOKS
    num_finalists: int = 2
    preparation_share: float = 1e6
    shares_after_preparation: bool = False
    places: int = 1
    tensor_parallel_size: int = 1
    seed: int = 0
    model: tuple[tuple[str, str], ...] = ()

    @property
    def num_blocks(self) -> int:
        """Prompt blocks at hand."""
        return len(self.block_sha256)

    @property
    def validation_blocks(self) -> tuple[int, ...]:
        """Blocks kept for validation: a third, at least one; the only one when there is one."""
        held_out = max(1, self.num_blocks // 3)
        return tuple(range(self.num_blocks - held_out, self.num_blocks))

    @property
    def search_blocks(self) -> tuple[int, ...]:
        """Blocks the three search steps measure on."""
        if not self.is_held_out:
            return (0,)
        return tuple(range(self.validation_blocks[0]))

    @property
    def is_held_out(self) -> bool:
        """Whether validation uses text that no choice was made on."""
        return self.num_blocks > 1

    @property
    def most_sparsity_rounds(self) -> int:
        """Rounds after which step 1 learns nothing more: greedy text repeats itself."""
        if self.is_greedy:
            return min(self.sparsity_rounds, len(self.search_blocks))
        return self.sparsity_rounds

    @property
    def look_level(self) -> float:
        """Confidence of each look's intervals, so that all looks together keep 95 %."""
        return 1 - FAMILY_ALPHA / len(self.looks)

    @property
    def plain(self) -> SpeculationConfig:
        """Plain decoding: gamma 0."""
        return self.base.replace(num_speculative_tokens=0)

    def config(self, gamma: int, ratio: float) -> SpeculationConfig:
        """The setting at a gamma and a ratio; every gamma 0 is the same setting."""
        if gamma == 0:
            return self.plain
        return self.base.replace(num_speculative_tokens=gamma, sparsity_ratio=ratio)

    @property
    def identity(self) -> str:
        """Hash over all but the budget: with more time, the same measurements go on."""
        values = self.to_dict()
        del values["budget_s"]
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name, as JSON reads them back."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`.

        Raises:
            ValueError: keys are missing or unknown.
        """
        # Plans had one tolerance for both.
        tolerance = {"gamma_tie_tolerance": values.get("tie_tolerance")}
        values = {**_RULES_BEFORE, **tolerance, **values}
        known = {field.name for field in fields(cls)}
        if set(values) != known:
            odd = sorted(known.symmetric_difference(values))
            raise ValueError(f"plan key {odd[0]!r} is missing or unknown")
        plain: dict[str, Any] = {
            name: _as_tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        plain["base"] = SpeculationConfig.from_dict(values["base"])
        return cls(**plain)

    def describe(
        self, *, tok_s: float | None = None, prefill_tok_s: float | None = None, prompt_tokens: int
    ) -> dict[str, Any]:
        """What a sweep of this plan will do, before anything is measured.

        Args:
            tok_s: decode throughput to expect, tokens per second; None when unknown.
            prefill_tok_s: prefill throughput to expect; None when unknown.
            prompt_tokens: prompt tokens of all blocks together.

        Returns:
            `steps` (name, fewest and most measurements, tokens of each), `budget_s`,
            `expected_s` (the usual course; None without rates; never above the budget) and
            `disk_bytes` (upper bound).
        """
        ladder, search = len(self.ratios), self.max_settings
        race = max(self.race_looks, default=0)
        counts = {
            SPARSITY: (ladder + 1, 1 + ladder * self.most_sparsity_rounds, self.tokens),
            GAMMA: (4, (search + 1) * self.rounds + 4 * race, self.tokens),
            REFINE: (3, 2 * search * self.rounds + 4 * self.settle_rounds, self.tokens),
            VALIDATE: (3 * self.looks[0], 3 * self.looks[-1], self.validation_tokens),
        }
        steps = [
            {"step": step, "fewest": fewest, "most": most, "tokens": tokens}
            for step, (fewest, most, tokens) in counts.items()
        ]
        expected_s = None
        if tok_s is not None and prefill_tok_s is not None:
            usual = sum((few + most) / 2 * tokens for few, most, tokens in counts.values())
            expected_s = min(self.budget_s, usual / tok_s + prompt_tokens / prefill_tok_s)
        most_bytes = sum(
            most * (_BYTES_PER_MEASUREMENT + _BYTES_PER_TOKEN * tokens)
            for _, most, tokens in counts.values()
        )
        return {
            "steps": steps,
            "ratios": list(self.ratios),
            "num_speculative_tokens": [0, *self.gammas],
            "budget_s": self.budget_s,
            "expected_s": expected_s,
            "disk_bytes": most_bytes,
        }


def make_plan(
    base: SpeculationConfig,
    blocks: Sequence[PromptBlock],
    *,
    budget_s: float,
    tokens: int,
    validation_tokens: int | None = None,
    max_num_speculative_tokens: int = DEFAULT_MAX_SPECULATIVE_TOKENS,
    ratios: Sequence[float] = DEFAULT_RATIOS,
    gammas: Sequence[int] | None = None,
    seed: int = 0,
    model: Mapping[str, str] | None = None,
    **rules: Any,
) -> Plan:
    """Plan a sweep over prompt blocks.

    Args:
        base: algorithm, floor and switches to tune with.
        blocks: the workload.
        budget_s: time for everything, seconds.
        tokens: tokens of a search measurement.
        validation_tokens: tokens of a validation measurement; two thirds of `tokens` by default.
        max_num_speculative_tokens: largest gamma.
        ratios: candidate sparsity ratios, those above the floor (`workload.active_ratios`).
        gammas: candidate gammas; by default a ladder up to the largest.
        seed: seeds the bootstrap.
        model: facts that identify the model.
        **rules: other fields of `Plan`.

    Raises:
        UsageError: the budget is not positive, or no candidate drafts.
        ConfigError: a candidate is out of range.
        WorkloadError: there are no blocks.
    """
    if not budget_s > 0:
        raise UsageError(f"the budget is {budget_s:g} s; more than 0 is needed.")
    if not blocks:
        raise WorkloadError("the workload has no prompts; there is nothing to measure.")
    ladder = sorted(set(gammas or gamma_ladder(max_num_speculative_tokens)) - {0})
    if not ladder:
        raise UsageError("the only `num_speculative_tokens` to try is 0; there is nothing to tune.")
    for gamma, ratio in itertools.product(ladder, ratios):
        base.replace(num_speculative_tokens=gamma, sparsity_ratio=ratio)
    return Plan(
        base=base.replace(num_speculative_tokens=0),
        ratios=tuple(sorted(set(ratios))),
        gammas=tuple(ladder),
        budget_s=float(budget_s),
        batch_size=blocks[0].batch_size,
        block_sha256=tuple(block.sha256 for block in blocks),
        is_greedy=all(block.sampling.is_greedy for block in blocks),
        tokens=tokens,
        validation_tokens=validation_tokens or max(1, tokens * 2 // 3),
        seed=seed,
        model=tuple(sorted((model or {}).items())),
        **rules,
    )


def _as_tuple(value: list[Any]) -> tuple[Any, ...]:
    return tuple(_as_tuple(item) if isinstance(item, list) else item for item in value)
