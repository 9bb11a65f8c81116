"""Which settings drop out of a race: Optuna's Wilcoxon pruner over paired rounds.

The pruner's p-value is meant for one look. Here each look gets its part of `FAMILY_ALPHA`, so that
looking again and again does not make a good setting fall out by chance.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache

import optuna
from optuna.trial import TrialState, create_trial

from vegas_runtime.config import SpeculationConfig
from vegas_tune.plan import FAMILY_ALPHA

# Log throughput by setting; settings of one round share text, seeds and the machine's mood.
Round = Mapping[SpeculationConfig, float]


def drop_outs(
    rounds: Sequence[Round], racing: Sequence[SpeculationConfig], *, num_looks: int
) -> list[SpeculationConfig]:
    """The settings that are surely slower than the one with the highest mean.

    Args:
        rounds: complete rounds of the race so far, in order.
        racing: settings still in it; each is in every round.
        num_looks: looks the whole race takes.
    """
    mean = {config: sum(logs[config] for logs in rounds) / len(rounds) for config in racing}
    leader = max(racing, key=mean.__getitem__)
    pruner = _pruner(FAMILY_ALPHA / num_looks)
    study = optuna.create_study(
        direction="maximize", storage=optuna.storages.InMemoryStorage(), pruner=pruner
    )
    logs_of = {config: dict(enumerate(logs[config] for logs in rounds)) for config in racing}
    study.add_trial(create_trial(value=mean[leader], intermediate_values=logs_of[leader]))
    return [
        config
        for config in racing
        if config != leader and pruner.prune(study, _running(logs_of[config]))
    ]


def _running(values: dict[int, float]) -> optuna.trial.FrozenTrial:
    return create_trial(state=TrialState.RUNNING, intermediate_values=values)


@cache
def _pruner(p_threshold: float) -> optuna.pruners.WilcoxonPruner:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.pruners.WilcoxonPruner(p_threshold=p_threshold, n_startup_steps=2)
