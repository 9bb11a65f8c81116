"""Which batches get CUDA graphs. Pure numbers; used where vLLM is configured and where it captures.

vLLM derives its sizes from one gamma and captures up to 512 tokens, 73 requests at gamma 6. With
several gammas it captures the product of all sizes and all gammas; here each gamma gets the batches
it can run, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

# vLLM's own ceiling, in requests of a decode batch and in tokens of a mixed one.
GRAPH_REQUESTS: Final = 512
# vLLM's own steps.
STOCK_SIZES: Final = (1, 2, 4, *range(8, 256, 8), *range(256, GRAPH_REQUESTS + 1, 16))
# A server declares 0 and its gamma, rarely one more; a tuner declares all it will try.
MAX_GAMMAS_SERVING: Final = 3


def capture_sizes(gammas: Sequence[int], max_num_seqs: int, max_tokens: int) -> list[int]:
    """Token counts to capture CUDA graphs for: decode batches at every gamma, and mixed ones.

    Args:
        gammas: tokens drafted per iteration that may be chosen.
        max_num_seqs: requests that may run at once.
        max_tokens: most tokens of one step.

    Returns:
        Ascending; batches of up to `GRAPH_REQUESTS` requests are covered at every gamma.
    """
    full = {
        batch * (gamma + 1)
        for batch in graph_batches(max_num_seqs, len(gammas))
        for gamma in gammas
    }
    return sorted(size for size in {*full, *STOCK_SIZES} if size <= max_tokens)


def graph_batches(max_num_seqs: int, num_gammas: int) -> list[int]:
    """Numbers of requests that decode graphs are captured for; a batch takes the next larger one.

    Few gammas (serving) get vLLM's own steps. Many (tuning) get powers of two and one step between
    each pair: every batch is captured at every gamma, and all of vLLM's would take minutes.

    Args:
        max_num_seqs: requests that may run at once; always among them, up to `GRAPH_REQUESTS`.
        num_gammas: how many gammas are declared.
    """
    most = min(max_num_seqs, GRAPH_REQUESTS)
    coarse = [1, *(step << doublings for doublings in range(9) for step in (2, 3))]
    chosen = STOCK_SIZES if num_gammas <= MAX_GAMMAS_SERVING else coarse
    return sorted({batch for batch in chosen if batch < most} | {most})


def full_graphs(
    gammas: Sequence[int], max_num_seqs: int, sizes: Sequence[int]
) -> dict[int, list[int]]:
    """Decode graphs to capture: for each gamma the numbers of requests, ascending.

    Args:
        gammas: tokens drafted per iteration that may be chosen.
        max_num_seqs: requests that may run at once.
        sizes: token counts vLLM was configured to capture; the largest is a ceiling here, so that
            a user who lowers it gets fewer graphs.
    """
    most = max(sizes, default=0)
    batches = graph_batches(max_num_seqs, len(gammas))
    return {gamma: [b for b in batches if b * (gamma + 1) <= most] for gamma in gammas}


def mixed_graphs(sizes: Sequence[int]) -> list[int]:
    """Token counts of piecewise graphs, which serve steps that prefill as well.

    Args:
        sizes: token counts vLLM was configured to capture.
    """
    stock = [size for size in sizes if size in STOCK_SIZES]
    return stock or list(sizes)
