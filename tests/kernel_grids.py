"""The shapes, lengths and layouts that the kernels are checked on; see `paged_cases.py`."""

from __future__ import annotations

from dataclasses import replace

import torch
from paged_cases import Case, SelectCase, SparseCase

# heads, KV heads, head dim of the models that matter, then the largest group.
MODELS = ((32, 8, 128), (32, 4, 128), (64, 8, 64), (9, 3, 64), (14, 2, 64), (16, 1, 64))
MODES = ("off", "hint", "hint_bf16", "exact", "all", "mask")
EDGES = (1, 15, 16, 17, 18, 63, 64, 65, 127, 128, 129, 4095, 4096, 4097)


def small_verify_cases() -> list[Case]:
    """What a CPU checks in seconds."""
    cases = [
        Case(mode=mode, layout=layout, sinks="small")
        for mode in MODES
        for layout in ("split", "interleaved", "hnd")
    ]
    cases += [Case(window=20), Case(window=20, layout="hnd", sinks="small")]
    cases += [Case(lens=(0, 5, 70), queries=(0, 5, 2)), Case(lens=(33,), queries=(17,))]
    cases += [Case(sinks="-inf"), Case(sinks="large")]
    cases += [Case(block_size=48, shared_prefix=True), Case(window=3, queries=(8, 4, 8))]
    return cases


def _fit(mode: str, heads: int, kv_heads: int, queries: int) -> bool:
    """Whether the mode takes these rows."""
    return mode not in ("all", "mask") or heads // kv_heads * queries <= 128


def verify_cases() -> list[Case]:
    """Every kernel instance, every edge."""
    cases = []
    for i, (heads, kv_heads, dim) in enumerate(MODELS):
        shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim}
        for queries in (1, 2, 4, 8, 12, 16, 17):
            for mode in MODES:
                if not _fit(mode, heads, kv_heads, queries):
                    continue
                dtype = torch.float16 if (i + queries) % 5 == 0 else torch.bfloat16
                lens = (1000 + 37 * queries, queries, 129 + queries)
                many = (queries, queries, max(1, queries - 1))
                layout = ("split", "interleaved", "hnd")[(i + queries) % 3]
                cases.append(
                    Case(**shape, dtype=dtype, lens=lens, queries=many, layout=layout, mode=mode)
                )
    for heads, kv_heads, dim in ((32, 8, 128), (64, 8, 64)):
        shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim}
        for queries in (1, 4, 8, 16):
            lens = tuple(max(n, queries) for n in EDGES)
            many = (queries,) * len(lens)
            cases.append(Case(**shape, lens=lens, queries=many, mode="all", sinks="small"))
            cases.append(Case(**shape, lens=lens, queries=many, mode="exact"))
            cases.append(Case(**shape, lens=lens, queries=many, window=128))
            cases.append(Case(**shape, lens=lens, queries=many, window=5, layout="hnd"))
        mixed = {"lens": (0, 70000, 17, 300, 5000), "queries": (0, 8, 17 % 16, 0, 16)}
        for mode in ("all", "exact"):
            cases.append(Case(**shape, **mixed, mode=mode, layout="split"))
        cases += [
            Case(**shape, lens=(131071, 131072), queries=(8, 8), mode="all"),
            Case(**shape, lens=(3000, 200), queries=(8, 8), sinks="-inf", mode="hint"),
            Case(**shape, lens=(3000, 200), queries=(8, 8), sinks="large"),
            Case(**shape, lens=(3000, 200), queries=(8, 8), gain=30.0, mode="hint"),
            Case(**shape, lens=(3000, 200), queries=(8, 8), gain=1e-3, mode="exact"),
            Case(**shape, lens=(3000, 2900), queries=(8, 8), shared_prefix=True, mode="all"),
            Case(**shape, lens=tuple(range(1, 513)), queries=(1,) * 512, mode="hint"),
            Case(**shape, lens=(3000, 200), queries=(8, 8), block_size=48, mode="all"),
            Case(**shape, lens=(3000, 200), queries=(8, 8), block_size=128, layout="hnd"),
        ]
    return cases


def small_sparse_cases() -> list[SparseCase]:
    """What a CPU checks in seconds."""
    base = Case(lens=(40, 17, 130), queries=(1, 1, 1), sinks="small")
    return [
        SparseCase(case=base, counts=(5, 0, 60), tails=(30, 10, 125), per_head=per_head)
        for per_head in (False, True)
    ]


def sparse_cases() -> list[SparseCase]:
    """Every instance; empty lists, whole lists, tails that start anywhere."""
    cases = []
    for i, (heads, kv_heads, dim) in enumerate(MODELS):
        lens = (40, 17, 130, 0, 5000, 1, 2049)
        base = Case(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            lens=lens,
            queries=(1,) * len(lens),
            sinks=("none", "small", "-inf", "large")[i % 4],
            layout=("split", "interleaved", "hnd")[i % 3],
            dtype=torch.float16 if i == 2 else torch.bfloat16,
            block_size=(16, 48, 64)[i % 3],
        )
        for per_head in (False, True):
            for counts, tails in (
                ((5, 0, 60, 0, 400, 0, 129), (30, 10, 125, 0, 4990, 0, 2033)),
                ((30, 10, 100, 0, 4990, 0, 16), (30, 10, 128, 0, 4990, 0, 2048)),
                ((0, 0, 0, 0, 0, 0, 0), (0, 16, 64, 0, 3000, 0, 2047)),
            ):
                cases.append(SparseCase(case=base, counts=counts, tails=tails, per_head=per_head))
        long = Case(
            heads=heads, kv_heads=kv_heads, head_dim=dim, lens=(60000, 9000), queries=(1, 1)
        )
        cases.append(SparseCase(case=long, counts=(4200, 650), tails=(59990, 8993), per_head=True))
    for many in (70, 300):  # more requests than a block keeps the lengths of, or has threads for
        lens = tuple(1 + 37 * i % 90 for i in range(many))
        base = Case(lens=lens, queries=(1,) * many)
        counts = tuple(n // 3 for n in lens)
        cases.append(SparseCase(case=base, counts=counts, tails=tuple(n // 2 for n in lens)))
    return cases


def small_select_cases() -> list[SelectCase]:
    """What a CPU checks in seconds."""
    return [
        SelectCase(kind=kind, per_head=per_head, sinks=sinks, recent=recent, translate=sinks > 0)
        for kind in ("u8", "bf16", "exact")
        for per_head in (False, True)
        for sinks, recent in ((0, 0), (3, 2))
    ]


def select_cases() -> list[SelectCase]:
    """Ties, forced entries, tiny and long rows, every kind of score."""
    cases = small_select_cases()
    for kind in ("u8", "bf16", "exact"):
        for per_head in (False, True):
            for spread in (1, 3, 120):
                cases += [
                    SelectCase(
                        kind=kind,
                        per_head=per_head,
                        spread=spread,
                        lens=(5000, 16, 0, 4096, 1, 9999),
                        ratio=ratio,
                        sinks=sinks,
                        recent=2 * sinks,
                        translate=sinks > 0,
                        kv_heads=4,
                    )
                    for ratio, sinks in ((0.07, 0), (0.5, 4), (1.0, 0))
                ]
            cases.append(
                SelectCase(kind=kind, per_head=per_head, lens=(131072, 70001), ratio=0.03, layers=1)
            )
    # Samples that mislead: thresholds between two leading bytes, tokens that differ at even spaces.
    edge = SelectCase(kind="bf16", kv_heads=1, lens=(131072, 30000), spread=8, extra=0, layers=1)
    cases += [
        replace(edge, ratio=ratio, seed=seed) for ratio in (0.49, 0.5, 0.51) for seed in (1, 2)
    ]
    cases += [
        SelectCase(lens=(131072,), ratio=ratio, layers=1, planted=planted)
        for planted in (20, 200)
        for ratio in (0.03, 0.2)
    ]
    return cases
