"""How calls on a GPU are timed: captured in CUDA graphs, replayed in turn, told with intervals.

Clocks and neighbours hit what is replayed in turn alike. A ratio is the median over paired
replays, with a bootstrap 95 % interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.results_file import Row


def graphed(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a graph replay."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()

    def replay(keep: object = call) -> None:  # the call owns the tensors that the graph works on
        graph.replay()

    return replay


def times_us(calls: Sequence[Callable[[], object]], rounds: int, inner: int = 1) -> Tensor:
    """Times [rounds, calls] of replays in turn, each divided by `inner`."""
    marks = [
        [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in calls
        ]
        for _ in range(rounds)
    ]
    for row in marks:
        for call, (start, end) in zip(calls, row, strict=True):
            start.record()
            call()
            end.record()
    torch.cuda.synchronize()
    return torch.tensor([[s.elapsed_time(e) * 1e3 / inner for s, e in row] for row in marks])


def interval(samples: Tensor) -> tuple[float, float, float]:
    """Median with its bootstrap 95 % interval."""
    draw = torch.randint(
        len(samples), (2000, len(samples)), generator=torch.Generator().manual_seed(0)
    )
    medians = samples[draw].median(dim=1).values
    low, high = torch.quantile(medians, torch.tensor([0.025, 0.975])).tolist()
    return float(samples.median()), low, high


def row(claim: str, case: str, samples: Tensor, unit: str) -> Row:
    """One figure, printed as well."""
    value, low, high = interval(samples)
    print(f"{claim:28s} {case:64s} {value:9.3f} [{low:.3f}, {high:.3f}] {unit}", flush=True)
    return Row(claim=claim, case=case, value=value, low=low, high=high, unit=unit)
