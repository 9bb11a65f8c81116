"""Every metric, one function each: raw counters or times in, one number out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def acceptance_rate(num_accepted_tokens: int, num_draft_tokens: int) -> float:
    """Accepted over drafted tokens, in [0, 1]; NaN when nothing was drafted."""
    return num_accepted_tokens / num_draft_tokens if num_draft_tokens else float("nan")


def accepted_per_iteration(num_accepted_tokens: int, num_drafts: int) -> float:
    """Accepted draft tokens per verification, bonus token excluded; NaN without any."""
    return num_accepted_tokens / num_drafts if num_drafts else float("nan")


def acceptance_length(num_accepted_tokens: int, num_drafts: int) -> float:
    """Tokens emitted per verification, bonus token included; NaN without any."""
    return 1 + accepted_per_iteration(num_accepted_tokens, num_drafts)


def survival(num_accepted_tokens: Sequence[int], num_speculative_tokens: int) -> list[float]:
    """P(the first i drafts were all accepted), i = 1..gamma.

    Args:
        num_accepted_tokens: accepted tokens of each verification.
        num_speculative_tokens: gamma; every verification drafted that many.
    """
    count = len(num_accepted_tokens)
    if not count:
        return [float("nan")] * num_speculative_tokens
    return [
        sum(accepted >= i for accepted in num_accepted_tokens) / count
        for i in range(1, num_speculative_tokens + 1)
    ]


def per_position_acceptance(
    num_accepted_tokens: Sequence[int], num_speculative_tokens: int
) -> list[float]:
    """P(draft i accepted | drafts 1..i-1 accepted), i = 1..gamma; the paper's Figure 4."""
    reached = [1.0, *survival(num_accepted_tokens, num_speculative_tokens)]
    return [after / before if before else float("nan") for before, after in pairwise(reached)]


def decode_throughput(num_emitted_tokens: int, duration_s: float) -> float:
    """Tokens emitted per second of decoding."""
    return num_emitted_tokens / duration_s


def ttft_s(arrival_s: float, first_token_s: float) -> float:
    """Time to first token: request to first token, in seconds."""
    return first_token_s - arrival_s


def tpot_s(total_s: float, time_to_first_token_s: float, num_output_tokens: int) -> float:
    """Time per output token after the first, in seconds; NaN for a single token."""
    if num_output_tokens < 2:
        return float("nan")
    return (total_s - time_to_first_token_s) / (num_output_tokens - 1)
