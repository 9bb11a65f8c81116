"""Which settings of a ladder are measured: around the best one, then the close ones again.

A ladder is a list of settings along one knob, cheapest first. Throughput along it is taken to have
one peak: a setting faster than both its neighbours needs no others measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from vegas_runtime.config import SpeculationConfig
from vegas_tune.bench import Bench
from vegas_tune.decide import is_look
from vegas_tune.plan import GAMMA, REFINE, Plan
from vegas_tune.racing import drop_outs

# The steps whose settings are compared with each other, for speed.
SEARCH: Final = (GAMMA, REFINE)
# Settings this far behind the leader are not measured again.
CONTENDER_LOSS: Final = 0.05
MAX_CONTENDERS: Final = 4


class LadderSearch:
    """Measures ladders on one bench.

    Args:
        plan: gives blocks, rounds and looks.
        bench: measures, and knows what is measured.
    """

    def __init__(self, plan: Plan, bench: Bench) -> None:
        self._plan = plan
        self._bench = bench

    def climb(
        self,
        step: str,
        ladder: Sequence[SpeculationConfig],
        start: SpeculationConfig,
        *,
        anchors: Iterable[SpeculationConfig] = (),
    ) -> None:
        """Measure around `start` until the fastest rung has both neighbours measured.

        Later rounds repeat the contenders in the opposite order, so that drift cancels.
        """
        bench, blocks = self._bench, self._plan.search_blocks
        bench.open_round(blocks)
        near = [start, *neighbours(ladder, start)]
        bench.measure_all(step, dict.fromkeys([*anchors, *near]))
        self._bracket(step, ladder)
        for _ in range(self._plan.rounds - 1):
            again = self.contenders(ladder)
            if len(again) < 2:
                break
            bench.open_round(blocks)
            bench.measure_all(step, again[::-1])
            self._bracket(step, ladder)

    def _bracket(self, step: str, ladder: Sequence[SpeculationConfig]) -> None:
        given_up: set[SpeculationConfig] = set()
        while tried := self.tried(ladder):
            rates = self._bench.rates(*SEARCH)
            open_ends = [
                config
                for config in neighbours(ladder, rates.leader(tried))
                if config not in rates and config not in given_up
            ]
            num_drafting = sum(config.num_speculative_tokens > 0 for config in tried)
            if not open_ends or num_drafting >= self._plan.max_settings:
                return
            best = self._bench.predictor().best(open_ends)[0]
            if not self._bench.measure(step, best):
                given_up.add(best)

    def race(self, step: str, ladder: Sequence[SpeculationConfig]) -> dict[SpeculationConfig, int]:
        """Repeat the contenders side by side; the surely slower ones drop out at each look.

        Returns:
            After how many rounds each of them dropped out.
        """
        plan, bench = self._plan, self._bench
        racing = self.contenders(ladder)
        rounds: list[dict[SpeculationConfig, float]] = []
        dropped: dict[SpeculationConfig, int] = {}
        turn = 0
        while len(racing) > 1 and len(rounds) < max(plan.race_looks, default=0):
            bench.open_round(plan.search_blocks)
            found = bench.compare(step, racing, is_backwards=turn % 2 == 1)
            if not found:
                break
            turn += 1
            rounds += found
            if is_look(plan.race_looks, len(rounds) - len(found), len(rounds)):
                slower = drop_outs(rounds, racing, num_looks=len(plan.race_looks))
                dropped |= dict.fromkeys(slower, len(rounds))
                racing = [config for config in racing if config not in dropped]
        return dropped

    def contenders(self, ladder: Sequence[SpeculationConfig]) -> list[SpeculationConfig]:
        """The measured settings that may be the fastest, fastest first."""
        tried = self.tried(ladder)
        if not tried:
            return []
        rates = self._bench.rates(*SEARCH)
        ranked = [config for config in rates.ranked() if config in tried]
        close = [c for c in ranked if rates.ratio(c, ranked[0]).est >= 1 - CONTENDER_LOSS]
        return close[:MAX_CONTENDERS]

    def tried(self, ladder: Sequence[SpeculationConfig]) -> list[SpeculationConfig]:
        """The settings of the ladder that are measured, in its order."""
        known = {measured.point.config for measured in self._bench.measured(*SEARCH)}
        return [config for config in ladder if config in known]


def neighbours(
    ladder: Sequence[SpeculationConfig], config: SpeculationConfig
) -> list[SpeculationConfig]:
    """The rungs below and above a setting."""
    at = ladder.index(config)
    return [ladder[i] for i in (at - 1, at + 1) if 0 <= i < len(ladder)]
