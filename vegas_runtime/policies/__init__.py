"""KV selection policies by name."""

from __future__ import annotations

import difflib
from typing import Final

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import ConfigError
from vegas_runtime.policies.base import (
    Collection,
    KVSelection,
    KVSelectionPolicy,
    Needs,
    SelectionInput,
)
from vegas_runtime.policies.dense import DensePolicy
from vegas_runtime.policies.quest import QuestPolicy
from vegas_runtime.policies.snapkv import SnapKVPolicy
from vegas_runtime.policies.sparse_spec import SparseSpecPolicy
from vegas_runtime.policies.spec_extend import SpecExtendPolicy
from vegas_runtime.policies.streaming_llm import StreamingLLMPolicy
from vegas_runtime.policies.vegas import VegasPolicy

POLICIES: Final[dict[str, type[KVSelectionPolicy]]] = {
    policy.name: policy
    for policy in (
        DensePolicy,
        StreamingLLMPolicy,
        QuestPolicy,
        SpecExtendPolicy,
        SparseSpecPolicy,
        SnapKVPolicy,
        VegasPolicy,
    )
}


def make_policy(config: SpeculationConfig) -> KVSelectionPolicy:
    """The policy a configuration names.

    Raises:
        ConfigError: no policy has that name, or it lacks a switch that is set.
    """
    if config.algorithm not in POLICIES:
        near = difflib.get_close_matches(config.algorithm, POLICIES, n=1)
        raise ConfigError(
            f"`algorithm` is {config.algorithm!r}; known are {', '.join(sorted(POLICIES))}.",
            hint=f"Did you mean {near[0]!r}?" if near else "",
        )
    return POLICIES[config.algorithm](config)


__all__ = [
    "POLICIES",
    "Collection",
    "KVSelection",
    "KVSelectionPolicy",
    "Needs",
    "SelectionInput",
    "make_policy",
]
