"""A guess at every setting's throughput from a few that were measured.

It orders and prunes what is measured next, and is never reported as a result.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from vegas_runtime.config import SpeculationConfig
from vegas_tune.measure import Measurement


class Predictor:
    """Decode throughput at any setting, from survival and phase times of measured ones.

    One pass at gamma g holds the survival S_i of every i <= g. With the time per draft token at
    the ratio and the verify time at the gamma, the rate is

        batch * (1 + sum of S_i, i <= gamma) / (gamma * t_draft + t_select + t_verify + t_other).

    It is approximate: the verified block, and so the KV selection, changes with gamma.
    """

    def __init__(
        self, batch_size: int, measured: Iterable[tuple[SpeculationConfig, Measurement]]
    ) -> None:
        draft, select, verify, other = (defaultdict[float, list[float]](list) for _ in range(4))
        survivals: dict[float, list[tuple[float, ...]]] = defaultdict(list)
        for config, measurement in measured:
            gamma, ratio = config.num_speculative_tokens, config.sparsity_ratio
            times = {phase: estimate.est for phase, estimate in measurement.phases.items()}
            verify[gamma].append(times["verify_s"])
            other[gamma].append(times["other_s"])
            if gamma and measurement.survival:
                draft[ratio].append(times["draft_s"] / gamma)
                select[ratio].append(times["select_s"])
                survivals[ratio].append(measurement.survival)
        self._batch_size = batch_size
        # Drafting with more KV entries cannot be faster; noise between passes says otherwise.
        self._draft = _Curve(draft, is_log=True, rises=True)
        self._select = _Curve(select, is_log=True, rises=True)
        self._verify = _Curve(verify, is_log=False, rises=True)
        self._other = _Curve(other, is_log=False, rises=False)
        self._survival = {ratio: _longest_mean(found) for ratio, found in survivals.items()}

    def rate(self, config: SpeculationConfig) -> float:
        """Predicted decode throughput, tokens per second; NaN where nothing is known."""
        gamma, ratio = config.num_speculative_tokens, config.sparsity_ratio
        time = self._verify(gamma) + self._other(gamma)
        if gamma:
            time += gamma * self._draft(ratio) + self._select(ratio)
        return self._batch_size * (1 + self._accepted(gamma, ratio)) / time

    def best(self, configs: Iterable[SpeculationConfig]) -> list[SpeculationConfig]:
        """The settings, best predicted first; those without a prediction last, order kept."""
        return sorted(configs, key=lambda config: -np.nan_to_num(self.rate(config), nan=-1.0))

    def _accepted(self, gamma: int, ratio: float) -> float:
        if not gamma:
            return 0.0
        if not self._survival:
            return float("nan")
        nearest = min(self._survival, key=lambda known: abs(np.log(known / ratio)))
        known = self._survival[nearest]
        head = list(known[:gamma])
        if len(head) < gamma and head[-1]:
            # Beyond what was drafted: go on at the mean acceptance of the positions seen.
            step = head[-1] ** (1 / len(head))
            head += [head[-1] * step**i for i in range(1, gamma - len(head) + 1)]
        return float(sum(head))


class _Curve:
    """Mean value by position, linear in between, flat outside."""

    def __init__(
        self, values: Mapping[float, Sequence[float]], *, is_log: bool, rises: bool
    ) -> None:
        self._is_log = is_log
        positions = sorted(values)
        means = np.array([float(np.mean(values[position])) for position in positions])
        if rises and positions:
            # Half a second to import, which no command waits for that only reads or refuses.
            from scipy.optimize import isotonic_regression

            weights = np.array([len(values[position]) for position in positions], dtype=float)
            means = isotonic_regression(means, weights=weights).x
        known = np.array(positions, dtype=float)
        self._known = np.log(known) if is_log else known
        self._means = means

    def __call__(self, position: float) -> float:
        if not len(self._known):
            return float("nan")
        wanted = math.log(position) if self._is_log else position
        return float(np.interp(wanted, self._known, self._means))


def _longest_mean(survivals: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Mean over the passes that drafted furthest: they hold every shorter gamma too."""
    longest = max(map(len, survivals))
    return tuple(np.mean([s for s in survivals if len(s) == longest], axis=0).tolist())
