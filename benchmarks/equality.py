"""Tests of "the same output": how often they alarm without cause is stated, not felt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import chi2_contingency, fisher_exact

# Tokens expected fewer times than this are counted together: below it the chi-square is none.
LEAST_EXPECTED = 10


@dataclass(frozen=True)
class DistributionTest:
    """Whether two samples of a token may come from one distribution.

    Attributes:
        p_value: chance of a difference as large if they do; small means they do not.
        num_categories: tokens told apart, the rest counting as one.
        n: samples of each arm.
    """

    p_value: float
    num_categories: int
    n: tuple[int, int]

    def alarms(self, false_alarm_rate: float) -> bool:
        """Whether equality is refused, at a given rate of refusing it wrongly."""
        return self.p_value < false_alarm_rate


def compare_samples(ours: Sequence[int], theirs: Sequence[int]) -> DistributionTest:
    """Chi-square test of homogeneity over the tokens drawn at one position.

    Args:
        ours: tokens of one arm.
        theirs: tokens of the other.

    Raises:
        ValueError: fewer than two tokens are frequent enough to be told apart.
    """
    counts = (Counter(ours), Counter(theirs))
    share = min(len(ours), len(theirs)) / (len(ours) + len(theirs))
    pooled = counts[0] + counts[1]
    kept = sorted(token for token, count in pooled.items() if count * share >= LEAST_EXPECTED)
    table = [
        [*(one[token] for token in kept), sum(one.values()) - sum(one[token] for token in kept)]
        for one in counts
    ]
    columns = [column for column in zip(*table, strict=True) if sum(column)]
    # What is left over is a category of its own only where it is frequent enough.
    if columns and sum(columns[-1]) * share < LEAST_EXPECTED and len(columns) > len(kept):
        columns.pop()
    if len(columns) < 2:
        raise ValueError("the position always holds the same token; there is nothing to compare")
    result = chi2_contingency(list(zip(*columns, strict=True)), correction=False)
    return DistributionTest(float(result.pvalue), len(columns), (len(ours), len(theirs)))


def is_more_often(count: int, of: int, control: int, control_of: int) -> float:
    """P-value of "this happens more often here than in the control arm" (Fisher's exact test).

    Args:
        count: how often it happened here.
        of: how often it could have.
        control: how often it happened in the control arm.
        control_of: how often it could have there.
    """
    table = [[count, of - count], [control, control_of - control]]
    return float(fisher_exact(table, alternative="greater").pvalue)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token in which two outputs differ; None when one begins with the other."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((index for index, (one, other) in pairs if one != other), None)
