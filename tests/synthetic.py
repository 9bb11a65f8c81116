"""An engine without a model: known acceptance, known phase times, a virtual clock.

Its best setting can be computed, so the tuner's choice can be judged by what it gives up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.errors import BackendError, ConfigError
from vegas_runtime.protocol import EngineInfo, PromptBlock
from vegas_runtime.records import Run, StepRecord

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and a machine.

    Attributes:
        name: for test ids.
        agreement: ratio -> P(a draft is accepted | those before it were), for a median request.
        draft_s: ratio -> seconds per drafted token, whole batch.
        verify_s: gamma -> seconds of a verification; at 0, of a plain step.
        request_spread: standard deviation of requests' logit agreement.
    """

    name: str
    agreement: Callable[[float], float]
    draft_s: Callable[[float], float]
    verify_s: Callable[[int], float]
    select_s: float = 0.004
    other_s: float = 0.002
    request_spread: float = 0.25

    def accepted(self, gamma: int, ratio: float) -> float:
        """Expected accepted drafts per iteration over the population of requests."""
        nodes, weights = np.polynomial.hermite_e.hermegauss(15)
        p = _shifted(self.agreement(ratio), self.request_spread * nodes)
        sums = sum(p**i for i in range(1, gamma + 1))
        return float((weights * sums).sum() / weights.sum()) if gamma else 0.0

    def rate(self, gamma: int, ratio: float, batch_size: int = 8) -> float:
        """True decode throughput, tokens per second."""
        time = self.verify_s(gamma) + self.other_s
        if gamma:
            time += gamma * self.draft_s(ratio) + self.select_s
        return batch_size * (1 + self.accepted(gamma, ratio)) / time

    def best_rate(self, gammas: tuple[int, ...], ratios: tuple[float, ...]) -> float:
        """The best true throughput on a grid, plain decoding included."""
        grid = [self.rate(gamma, ratio) for gamma in gammas for ratio in ratios]
        return max(self.rate(0, 1.0), *grid)


def _interpolated(knots: dict[float, float]) -> Callable[[float], float]:
    x, y = np.log(list(knots)), list(knots.values())
    return lambda ratio: float(np.interp(math.log(ratio), x, y))


# The paper's Figure 8: acceptance is flat from about 5 % on; drafting cheaper than plain decoding.
PLATEAU = Shape(
    name="plateau",
    agreement=_interpolated({
        0.01: 0.70, 0.02: 0.82, 0.03: 0.868, 0.05: 0.893, 0.07: 0.895, 0.5: 0.897,
    }),
    draft_s=lambda ratio: 0.030 + 0.060 * ratio,
    verify_s=lambda gamma: 0.100 + 0.004 * gamma,
)  # fmt: skip

# SmolLM2-135M at 4K on two cores: no plateau below half of the cache, costly verification.
RISING = Shape(
    name="rising",
    agreement=_interpolated({
        0.01: 0.745, 0.02: 0.82, 0.03: 0.863, 0.05: 0.905, 0.07: 0.917, 0.1: 0.94, 0.15: 0.949,
        0.25: 0.972, 0.5: 0.983,
    }),
    draft_s=lambda ratio: 0.110 + 0.40 * ratio,
    verify_s=lambda gamma: 0.344 + 0.050 * gamma,
)  # fmt: skip

# Short contexts: a draft costs nearly a plain step, so that nothing beats plain decoding.
HOPELESS = Shape(
    name="hopeless",
    agreement=_interpolated({0.01: 0.55, 0.05: 0.70, 0.1: 0.78, 0.5: 0.90}),
    draft_s=lambda ratio: 0.085 + 0.02 * ratio,
    verify_s=lambda gamma: 0.100 + 0.020 * gamma,
)

SHAPES = (PLATEAU, RISING, HOPELESS)


def make_blocks(
    count: int = 3,
    *,
    batch_size: int = 8,
    prompt_tokens: int = 4096,
    sampling: SamplingConfig | None = None,
) -> tuple[PromptBlock, ...]:
    """Prompt blocks with nothing to read in them; sampled by default."""
    return tuple(
        PromptBlock(
            index=index,
            prompts=((index,) * prompt_tokens,) * batch_size,
            batch_size=batch_size,
            max_new_tokens=10_000,
            sampling=sampling or SamplingConfig(temperature=0.6),
        )
        for index in range(count)
    )


@dataclass
class SyntheticEngine:
    """Draws what `shape` says, times what it says, multiplied by noise.

    Attributes:
        shape: the truth.
        seed: of everything random.
        run_cv: lognormal spread of all times of a pass: the run-to-run noise.
        step_cv: lognormal spread of the times of each step.
        drift_per_s: relative slowdown per second of virtual time.
        prefill_s: virtual time to prepare a block.
        faults: called before a pass with (config, how many passes ran); may raise.
    """

    shape: Shape
    seed: int = 0
    run_cv: float = 0.015
    step_cv: float = 0.03
    drift_per_s: float = 0.0
    prefill_s: float = 5.0
    max_num_speculative_tokens: int = 15
    faults: Callable[[SpeculationConfig, int], None] | None = None
    num_passes: int = 0
    is_closed: bool = False
    _clock_s: float = 0.0
    _prepared: set[int] = field(default_factory=set)
    _config: SpeculationConfig = field(
        default_factory=lambda: SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=0.07)
    )

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            backend="reference",
            model={"id": f"synthetic/{self.shape.name}", "config_sha256": "0" * 64},
            device={"class": "none", "kind": "cpu"},
            runtime={"vegas_runtime": "0.1.0"},
            max_num_speculative_tokens=self.max_num_speculative_tokens,
        )

    @property
    def tokenizer(self) -> None:
        return None

    @property
    def config(self) -> SpeculationConfig:
        return self._config

    def configure(self, config: SpeculationConfig) -> None:
        if config.num_speculative_tokens > self.max_num_speculative_tokens:
            raise ConfigError("gamma is above what this engine was opened for.")
        self._config = config

    def prepare(self, block: PromptBlock) -> None:
        if block.index not in self._prepared:
            self._prepared.add(block.index)
            self._clock_s += self.prefill_s

    def now_s(self) -> float:
        return self._clock_s

    def close(self) -> None:
        self.is_closed = True

    def run(self, block: PromptBlock, *, replicate: int, max_tokens: int, deadline_s: float) -> Run:
        self.prepare(block)
        if self.faults is not None:
            self.faults(self._config, self.num_passes)
        self.num_passes += 1
        started_s = self._clock_s
        steps = self._steps(block, replicate, max_tokens, deadline_s)
        if not steps:
            raise BackendError("no step finished before the deadline.")
        return Run(
            config=self._config,
            batch_size=block.batch_size,
            steps=tuple(steps),
            elapsed_s=self._clock_s - started_s,
        )

    def _steps(
        self, block: PromptBlock, replicate: int, max_tokens: int, deadline_s: float
    ) -> list[StepRecord]:
        gamma, ratio = self._config.num_speculative_tokens, self._config.sparsity_ratio
        key = [self.seed, block.index, replicate, gamma, round(ratio * 10_000)]
        random = np.random.default_rng(key)
        pace = self._pace(random) * (1 + self.drift_per_s * self._clock_s)
        lanes = tuple(range(block.batch_size))
        drafted = (gamma,) * block.batch_size
        phases = np.array([
            gamma * self.shape.draft_s(ratio), self.shape.select_s if gamma else 0.0,
            self.shape.verify_s(gamma), self.shape.other_s,
        ])  # fmt: skip
        steps: list[StepRecord] = []
        emitted = 0
        while emitted < max_tokens and self._clock_s < deadline_s:
            kept = self._accepted(random, block, 16)
            noise = _lognormal(random, self.step_cv, 16)
            for row, times in zip(
                kept.tolist(), (phases * pace * noise[:, None]).tolist(), strict=True
            ):
                steps.append(
                    StepRecord(
                        kind="decode",
                        num_running=block.batch_size,
                        num_waiting=0,
                        request_ids=lanes,
                        num_draft_tokens=drafted,
                        num_accepted_tokens=tuple(row),
                        num_emitted_tokens=tuple(count + 1 for count in row),
                        draft_s=times[0],
                        select_s=times[1],
                        verify_s=times[2],
                        other_s=times[3],
                    )
                )  # fmt: skip
                self._clock_s += sum(times)
                emitted += sum(row) + len(row)
                if emitted >= max_tokens or self._clock_s >= deadline_s:
                    break
        return steps

    def _pace(self, random: np.random.Generator) -> float:
        return float(_lognormal(random, self.run_cv, 1)[0])

    def _accepted(
        self, random: np.random.Generator, block: PromptBlock, num_steps: int
    ) -> NDArray[np.int64]:
        gamma, ratio = self._config.num_speculative_tokens, self._config.sparsity_ratio
        if not gamma:
            return np.zeros((num_steps, block.batch_size), dtype=np.int64)
        texts = np.random.default_rng([self.seed, block.index]).standard_normal(block.batch_size)
        p = _shifted(self.shape.agreement(ratio), self.shape.request_spread * texts)
        agrees = random.random((num_steps, block.batch_size, gamma)) < p[None, :, None]
        kept: NDArray[np.int64] = np.cumprod(agrees, axis=2).sum(axis=2)
        return kept


def _shifted(probability: float, by: FloatArray) -> FloatArray:
    logit = math.log(probability / (1 - probability))
    return 1 / (1 + np.exp(-(logit + by)))


def _lognormal(random: np.random.Generator, cv: float, count: int) -> FloatArray:
    sigma = math.sqrt(math.log1p(cv**2))
    return np.exp(sigma * random.standard_normal(count))
