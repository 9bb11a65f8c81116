"""A synthetic engine whose methods differ by known amounts, selecting at a known cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from synthetic import PLATEAU, Shape, SyntheticEngine, _lognormal

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import BackendError, ConfigError
from vegas_runtime.protocol import EngineInfo, PromptBlock
from vegas_runtime.records import Run

# All requests alike: eight draws from a population would hide the truth behind their spread.
_EVEN = replace(PLATEAU, request_spread=0.0)

# Selecting: nothing, once per iteration, in each draft step. Acceptance: worst, best, middling.
SHAPES: Mapping[str, Shape] = {
    "vegas": replace(_EVEN, name="vegas", select_s=0.012),
    "streaming_llm": replace(
        _EVEN,
        name="streaming_llm",
        agreement=lambda ratio: PLATEAU.agreement(ratio) - 0.12,
        select_s=0.0001,
    ),
    "quest": replace(
        _EVEN,
        name="quest",
        agreement=lambda ratio: PLATEAU.agreement(ratio) - 0.06,
        select_s=0.060,
    ),
}


@dataclass
class MethodsEngine(SyntheticEngine):
    """Takes its shape from the algorithm in force; records and plays back.

    Attributes:
        shapes: the truth, by algorithm.
        passes: every pass that started: algorithm, gamma, ratio, block, replicate.
    """

    shape: Shape = _EVEN
    shapes: Mapping[str, Shape] = field(default_factory=lambda: SHAPES)
    passes: list[tuple[str, int, float, int, int]] = field(default_factory=list)
    _recorded: tuple[SpeculationConfig, PromptBlock, int, int] | None = None

    @property
    def info(self) -> EngineInfo:
        """The same model, whatever it was configured to last."""
        return replace(super().info, model={"id": "synthetic", "config_sha256": "0" * 64})

    def configure(self, config: SpeculationConfig) -> None:
        if config.algorithm not in self.shapes:
            raise ConfigError(f"`algorithm` is {config.algorithm!r}; not in this engine.")
        super().configure(config)
        self.shape = self.shapes[config.algorithm]

    def run(self, block: PromptBlock, *, replicate: int, max_tokens: int, deadline_s: float) -> Run:
        config = self.config
        self.passes.append(
            (
                config.algorithm,
                config.num_speculative_tokens,
                config.sparsity_ratio,
                block.index,
                replicate,
            )
        )
        return super().run(block, replicate=replicate, max_tokens=max_tokens, deadline_s=deadline_s)

    def record_selections(
        self, block: PromptBlock, *, replicate: int, max_tokens: int, deadline_s: float
    ) -> Run:
        self._recorded = (self.config, block, replicate, max_tokens)
        return self.run(block, replicate=replicate, max_tokens=max_tokens, deadline_s=deadline_s)

    def run_recorded(self, *, deadline_s: float) -> Run:
        if self._recorded is None or self._recorded[0] != self.config:
            raise BackendError("nothing is recorded.")
        _, block, replicate, max_tokens = self._recorded
        with_it = self.shape
        self.shape = replace(with_it, select_s=0.0)
        try:
            return self.run(
                block, replicate=replicate, max_tokens=max_tokens, deadline_s=deadline_s
            )
        finally:
            self.shape = with_it

    def _pace(self, random: np.random.Generator) -> float:
        # The machine's mood is each pass's own, also when the tokens come again.
        own = np.random.default_rng([self.seed, 17, self.num_passes])
        return float(_lognormal(own, self.run_cv, 1)[0])
