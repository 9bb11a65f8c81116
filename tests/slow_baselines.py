"""The baselines' selections with loops and Python numbers, as `algorithms.md` words them.

They share no code with the policies. Ties are left to `sorted`: lowest position first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from vegas_runtime.config import SpeculationConfig

PAGE = 16


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What one head reads: some entries, and everything from `tail_start` on."""

    entries: set[int]
    tail_start: int


def shared_budget(config: SpeculationConfig, prefix: int) -> int:
    """B = ceil(rho * (L + gamma + 1)), at least the floor, at most the candidates 0..L."""
    asked = math.ceil(config.sparsity_ratio * (prefix + config.num_speculative_tokens + 1))
    return min(max(asked, config.min_tokens), prefix + 1)


def best(scores: Sequence[float], count: int) -> set[int]:
    """Places of the largest scores."""
    return {*sorted(range(len(scores)), key=lambda place: -scores[place])[: max(count, 0)]}


def softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    powers = [math.exp(logit - top) for logit in logits]
    return [power / math.fsum(powers) for power in powers]


def tokens_of(pages: set[int]) -> set[int]:
    return {page * PAGE + offset for page in pages for offset in range(PAGE)}


def spec_extend(config: SpeculationConfig, row: Tensor, prefix: int) -> Reads:
    """Full pages with the largest mean weight in row a, [H, N]."""
    return whole_pages(config, row.double().mean(dim=0).tolist(), prefix)


def whole_pages(config: SpeculationConfig, weights: Sequence[float], prefix: int) -> Reads:
    """Full pages with the largest mean of what each entry weighs."""
    num_full = (prefix + 1) // PAGE
    spans = [weights[page * PAGE : (page + 1) * PAGE] for page in range(num_full)]
    scores = [math.fsum(span) / PAGE for span in spans]
    pages = best(scores, shared_budget(config, prefix) // PAGE)
    return Reads(entries=tokens_of(pages), tail_start=num_full * PAGE)


def sparse_spec(
    config: SpeculationConfig, block: Tensor, group: int, prefix: int, accepted: int
) -> list[Reads]:
    """Per KV head, from the weights [H, gamma + 1, N] of a verify block."""
    committed = prefix + 1 + accepted
    num_recent = accepted + 1 + 1
    budget = max(config.min_tokens, math.ceil(config.sparsity_ratio * committed))
    num_candidates = max(committed - num_recent, 0)
    heads, num_rows, _ = block.shape
    weights = block.double().tolist()
    reads = []
    for first in range(0, heads, group):
        scores = []
        for j in range(num_candidates):
            terms = [
                weights[head][row][j]
                for head in range(first, first + group)
                for row in range(num_rows)
                if prefix + row >= j
            ]
            scores.append(math.fsum(terms) / len(terms))
        entries = best(scores, budget - num_recent)
        reads.append(Reads(entries=entries, tail_start=num_candidates))
    return reads


def snapkv(
    config: SpeculationConfig, logits: Tensor, group: int, scale: float = 1.0
) -> list[Reads]:
    """Per KV head, from a prompt's query-key products [H, S, S]."""
    heads, length, _ = logits.shape
    budget = shared_budget(config, length - 1)
    window = min(32, budget)
    num_candidates = length - window
    reads = []
    for first in range(0, heads, group):
        votes = [0.0] * num_candidates
        for head in range(first, first + group):
            sums = [0.0] * num_candidates
            for row in range(max(length - 32, 0), length):
                products = (logits[head, row, : row + 1].double() * scale).tolist()
                for j, weight in enumerate(softmax(products)[:num_candidates]):
                    sums[j] += weight
            for j in range(num_candidates):
                near = [sums[i] for i in range(j - 2, j + 3) if 0 <= i < num_candidates]
                votes[j] += math.fsum(near) / 5
        reads.append(Reads(entries=best(votes, budget - window), tail_start=num_candidates))
    return reads


def quest(config: SpeculationConfig, query: Tensor, keys: Tensor) -> list[set[int]]:
    """Everything a draft step reads, itself included; once, or per KV head by the scope.

    Args:
        config: the knobs.
        query: [H, D].
        keys: [Hkv, N, D]; the last one is the query's own token's.
    """
    heads, dim = query.shape
    kv_heads, count, _ = keys.shape
    budget = shared_budget(config, count - 1)
    starts = range(0, count, PAGE)
    last = len(starts) - 1
    num_others = last if budget >= count else min(max(budget // PAGE - 1, 0), last)
    group = heads // kv_heads
    shares: list[list[float]] = []
    for head in range(heads):
        bounds = []
        for start in list(starts)[:last]:
            page = keys[head // group, start : start + PAGE].double()
            low, high = page.min(dim=0).values.tolist(), page.max(dim=0).values.tolist()
            terms = zip(query[head].double().tolist(), low, high, strict=True)
            bounds.append(math.fsum(max(q * m, q * n) for q, m, n in terms) / math.sqrt(dim))
        shares.append(softmax(bounds) if bounds else [])
    owners = (
        [range(k * group, (k + 1) * group) for k in range(kv_heads)]
        if config.scope == "kv_head"
        else [range(heads)]
    )
    reads = []
    for members in owners:
        means = [
            math.fsum(shares[head][page] for head in members) / len(members) for page in range(last)
        ]
        reads.append(tokens_of(best(means, num_others)) | {*range(last * PAGE, count)})
    return reads
