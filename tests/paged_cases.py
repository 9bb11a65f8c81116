"""Random paged caches, poisoned where nothing may be read, and float64 checks of the kernels."""

# ruff: noqa: N806 - tensor letters: B, S, T, N, H, D, R

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.kernels import ops, paged
from vegas_runtime.kernels.budgets import kv_budgets

# Relative Frobenius error of the output: bfloat16 probabilities and outputs round at 2^-9 each.
OUT_TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-5}
LSE_TOLERANCE = 1e-3
# log2 of the score: rounding of the stored value, plus sums of up to 20 bfloat16 values.
SCORE_TOLERANCE = {torch.uint8: math.log2(1 + 1 / 16) + 0.03, torch.bfloat16: 0.04}
CANARY = 12345.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One batch."""

    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    lens: tuple[int, ...] = (40, 17, 130)
    queries: tuple[int, ...] = (4, 1, 8)
    block_size: int = 16
    layout: str = "interleaved"
    window: int = 0
    sinks: str = "none"  # none, small, -inf, large
    mode: str = "off"  # off, hint, hint_bf16, exact, all, mask
    gain: float = 1.0  # of the queries: larger makes attention peaked
    seed: int = 0
    shared_prefix: bool = False
    path: str = "auto"

    @property
    def batch(self) -> int:
        return len(self.lens)


@dataclass
class Paged:
    """A filled cache and everything an attention call needs."""

    case: Case
    device: torch.device
    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    lens: Tensor
    query_start: Tensor
    sinks: Tensor | None
    hint: Tensor
    rows: Tensor | None
    dense_k: list[Tensor] = field(default_factory=list)
    dense_v: list[Tensor] = field(default_factory=list)


def make_views(case: Case, blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """K and V views [blocks, block size, Hkv, D] of a cache full of NaN."""
    N, S, H, D = blocks, case.block_size, case.kv_heads, case.head_dim
    kwargs: dict[str, Any] = {"dtype": case.dtype, "device": device}
    if case.layout == "split":
        buffer = torch.full((N, 2, S, H, D), math.nan, **kwargs)
        return buffer[:, 0], buffer[:, 1]
    if case.layout == "interleaved":
        buffer = torch.full((N, S, H, 2 * D), math.nan, **kwargs)
        return buffer[..., :D], buffer[..., D:]
    assert case.layout == "hnd"
    buffer = torch.full((N, H, S, 2 * D), math.nan, **kwargs).transpose(1, 2)
    return buffer[..., :D], buffer[..., D:]


def make_paged(case: Case, device: torch.device) -> Paged:
    """Random tokens in scattered blocks; NaN everywhere else, also behind each last token."""
    rng = torch.Generator().manual_seed(case.seed)
    size = case.block_size
    needed = [math.ceil(n / size) for n in case.lens]
    blocks = sum(needed) + 3
    k, v = make_views(case, blocks, device)
    order = torch.randperm(blocks, generator=rng)
    # A block id that must never be followed.
    table = torch.full((case.batch, max(needed) + 1), 1 << 28, dtype=torch.int32)
    dense_k, dense_v, at = [], [], 0
    for b, n in enumerate(case.lens):
        own = order[at : at + needed[b]]
        at += needed[b]
        if case.shared_prefix and b > 0:
            shared = min(needed[b], needed[0], case.lens[0] // size, n // size)
            own[:shared] = table[0, :shared]
        table[b, : needed[b]] = own
        shape = (n, case.kv_heads, case.head_dim)
        new_k = torch.randn(shape, generator=rng).to(case.dtype)
        new_v = torch.randn(shape, generator=rng).to(case.dtype)
        if case.shared_prefix and b > 0:
            new_k[: shared * size] = dense_k[0][: shared * size].cpu()
            new_v[: shared * size] = dense_v[0][: shared * size].cpu()
        positions = torch.arange(n)
        where = (own[positions // size].to(device), (positions % size).to(device))
        k[where] = new_k.to(device)
        v[where] = new_v.to(device)
        dense_k.append(new_k.to(device))
        dense_v.append(new_v.to(device))
    T = sum(case.queries)
    q = case.gain * torch.randn(T, case.heads, case.head_dim, generator=rng)
    starts = torch.tensor([0, *case.queries]).cumsum(0)
    sinks = {"none": None, "small": torch.randn(case.heads, generator=rng).bfloat16().float()}
    sinks |= {"-inf": torch.full((case.heads,), -math.inf)}
    sinks |= {"large": torch.full((case.heads,), 50.0)}
    sink = sinks[case.sinks]
    rows = None
    if case.mode in ("all", "mask"):
        masks = [(1 << n) - 1 if case.mode == "all" else 0b1011 for n in case.queries]
        rows = torch.tensor(masks, dtype=torch.int32, device=device)
    return Paged(
        case=case,
        device=device,
        q=q.to(case.dtype).to(device),
        k=k,
        v=v,
        table=table.to(device),
        lens=torch.tensor(case.lens, dtype=torch.int32, device=device),
        query_start=starts.to(torch.int32).to(device),
        sinks=None if sink is None else sink.to(device),
        hint=torch.zeros(case.batch, case.heads, device=device),
        rows=rows,
        dense_k=dense_k,
        dense_v=dense_v,
    )


def oracle(this: Paged) -> list[paged.RequestAttention]:
    """Every request in float64."""
    case = this.case
    results = []
    for b in range(case.batch):
        begin, end = int(this.query_start[b]), int(this.query_start[b + 1])
        results.append(
            paged.verify_request(
                this.q[begin:end].double(),
                this.dense_k[b].double(),
                this.dense_v[b].double(),
                scale=case.head_dim**-0.5,
                window=case.window,
                sinks=None if this.sinks is None else this.sinks.double(),
            )
        )
    return results


@dataclass
class Result:
    """What a call wrote, poisoned before."""

    out: Tensor
    lse: Tensor
    score: Tensor | None
    prefix: Tensor


def make_score(case: Case, device: torch.device) -> Tensor | None:
    """A poisoned score buffer of the case's mode."""
    length = -(-max(*case.lens, 1) // 64) * 64
    shape: tuple[int, ...] = (case.batch, case.kv_heads, length)
    if case.mode == "off":
        return None
    if case.mode == "hint_bf16":
        return torch.full(shape, math.nan, dtype=torch.bfloat16, device=device)
    if case.mode == "exact":
        group = case.heads // case.kv_heads
        shape = (*shape[:2], length // 64, 2 * group, 64)
    return torch.full(shape, 255, dtype=torch.uint8, device=device)


def verify(
    this: Paged,
    *,
    lens: Tensor,
    prefix: Tensor,
    out: Tensor,
    lse: Tensor,
    workspace: ops.Workspace,
    score: Tensor | None,
) -> None:
    """The operation alone, over a case's queries and cache."""
    case = this.case
    ops.verify_attention(
        this.q,
        this.k,
        this.v,
        block_table=this.table,
        seq_lens=lens,
        query_start=this.query_start,
        prefix=prefix,
        max_queries=max(*case.queries, 1),
        scale=case.head_dim**-0.5,
        out=out,
        lse=lse,
        workspace=workspace,
        window=case.window,
        sinks=this.sinks,
        score=score,
        hint=None if score is None else this.hint,
        rows=None if score is None else this.rows,
        path=case.path,
    )


def run_verify(this: Paged, workspace: ops.Workspace, mode: str | None = None) -> Result:
    """Call the operation as an engine would."""
    case = this.case if mode is None else replace(this.case, mode=mode)
    T = this.q.shape[0]
    padded = torch.full(
        (T + 2, case.heads, case.head_dim), CANARY, dtype=case.dtype, device=this.device
    )
    padded[1:-1] = math.nan
    lse = torch.full((T, case.heads), math.nan, device=this.device)
    score = make_score(case, this.device)
    prefix = torch.full((case.batch + 1,), -1, dtype=torch.int32, device=this.device)
    ops.build_schedule(this.lens, prefix, query_start=this.query_start, window=case.window)
    verify(
        this,
        lens=this.lens,
        prefix=prefix,
        out=padded[1:-1],
        lse=lse,
        workspace=workspace,
        score=score,
    )
    assert bool((padded[0] == CANARY).all() and (padded[-1] == CANARY).all()), "canary"
    assert not bool(workspace.counters.any()), "counters are not zero again"
    return Result(out=padded[1:-1], lse=lse, score=score, prefix=prefix)


def new_workspace(case: Case, device: torch.device) -> ops.Workspace:
    return ops.make_workspace(
        device,
        batch=case.batch,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
    )


def check_verify(case: Case, device: torch.device) -> dict[str, float]:
    """Run one case against float64; the errors found.

    Raises:
        AssertionError: a tolerance is missed.
    """
    this = make_paged(case, device)
    truth = oracle(this)
    for b, done in enumerate(truth):
        if done.lse.numel():
            this.hint[b] = done.lse[-1].float().nan_to_num(neginf=0.0)
    workspace = new_workspace(case, device)
    first = run_verify(this, workspace)
    again = run_verify(this, workspace)
    assert torch.equal(first.out, again.out), "output differs between runs"
    assert torch.equal(first.lse, again.lse), "lse differs between runs"
    errors = compare_outputs(this, truth, first.out, first.lse)
    if first.score is not None:
        assert again.score is not None
        assert torch.equal(_bits(first.score), _bits(again.score)), "score differs between runs"
        plain = run_verify(this, workspace, "off")
        assert torch.equal(first.out, plain.out), "collection changes the output"
        errors["score"] = compare_scores(this, truth, first.score)
        this.hint.fill_(math.nan)
        broken = run_verify(this, workspace)
        assert torch.equal(first.out, broken.out), "a broken hint changes the output"
    return errors


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def compare_outputs(
    this: Paged, truth: list[paged.RequestAttention], out: Tensor, lse: Tensor
) -> dict[str, float]:
    """Largest relative error of a request's output, and largest absolute one of its lse."""
    worst, worst_lse = 0.0, 0.0
    for b, done in enumerate(truth):
        rows = slice(int(this.query_start[b]), int(this.query_start[b + 1]))
        if rows.start == rows.stop or this.case.lens[b] == 0:
            assert bool(out[rows].isnan().all()), "a padded row was written"
            continue
        assert bool(out[rows].isfinite().all()), f"request {b}: output is not finite"
        error = (out[rows].double() - done.out).norm() / done.out.norm().clamp(min=1e-30)
        worst = max(worst, float(error))
        worst_lse = max(worst_lse, float((lse[rows].double() - done.lse).abs().max()))
    assert worst <= OUT_TOLERANCE[this.case.dtype], f"output error {worst:.2e}"
    assert worst_lse <= LSE_TOLERANCE, f"lse error {worst_lse:.2e}"
    return {"out": worst, "lse": worst_lse}


def compare_scores(this: Paged, truth: list[paged.RequestAttention], score: Tensor) -> float:
    """Largest error of log2(score) where it can be represented."""
    case, worst = this.case, 0.0
    for b, done in enumerate(truth):
        n, S = case.lens[b], case.queries[b]
        if n == 0 or S == 0:
            continue
        hint = this.hint[b].double()
        if case.mode == "exact":
            rows = paged.packed_queries(S)[:2]
            octave = paged.octaves(this.hint[b]).double()
            weights = torch.exp2(done.logits[rows] * 1.4426950408889634 - octave[:, None])
            wanted = weights.view(len(rows), case.kv_heads, -1, n).permute(1, 3, 0, 2).flatten(2)
            positions = paged.exact_positions(score.device)
            tokens = score[b][..., positions].transpose(-1, -2).flatten(1, 2)
            got = tokens[:, :n, : wanted.shape[-1]]
        else:
            masks = {"all": range(S), "mask": [r for r in (0, 1, 3) if r < S]}
            rows = list(masks.get(case.mode, sorted({0, S - 1})))
            wanted = paged.hint_scores(done.logits, hint, rows, case.kv_heads)
            got = score[b, :, :n]
        value = (paged.decode_scores(got) if got.dtype == torch.uint8 else got).double()
        seen = (wanted > 2.0**-22) & (wanted < 200)
        assert bool(seen.any()), "no score to compare"
        error = (value[seen].log2() - wanted[seen].log2()).abs().max()
        worst = max(worst, float(error))
        hidden = wanted < 2.0**-26
        floor = 2.0**-22
        assert bool((value[hidden] < floor).all()), "a hidden entry has a score"
    tolerance = SCORE_TOLERANCE[score.dtype]
    assert worst <= tolerance, f"score error {worst:.3f} octaves"
    return worst


@dataclass(frozen=True, kw_only=True)
class SparseCase:
    """Selected lists and tails over a `Case` of one query per request."""

    case: Case
    counts: tuple[int, ...]
    tails: tuple[int, ...]
    per_head: bool = False


def check_sparse(sparse: SparseCase, device: torch.device) -> dict[str, float]:
    """Sparse attention against float64 over the same tokens."""
    case = sparse.case
    this = make_paged(case, device)
    rng = torch.Generator().manual_seed(case.seed + 1)
    lists = case.kv_heads if sparse.per_head else 1
    slots = torch.full((case.batch, lists, max(*sparse.counts, 1)), 1 << 30, dtype=torch.int32)
    truth = []
    for b, n in enumerate(case.lens):
        count, tail = sparse.counts[b], sparse.tails[b]
        chosen = torch.stack(
            [torch.randperm(tail, generator=rng)[:count].sort().values for _ in range(lists)]
        )
        blocks = this.table[b].cpu()[chosen // case.block_size]
        slots[b, :, :count] = blocks * case.block_size + chosen % case.block_size
        if n == 0:
            truth.append(None)
            continue
        columns = chosen.expand(case.kv_heads, count).T.to(device)
        heads = torch.arange(case.kv_heads, device=device)
        keys = torch.cat((this.dense_k[b][columns, heads], this.dense_k[b][tail:])).double()
        values = torch.cat((this.dense_v[b][columns, heads], this.dense_v[b][tail:])).double()
        visible = torch.ones(1, keys.shape[0], dtype=torch.bool, device=device)
        sinks = None if this.sinks is None else this.sinks.double()
        scale = case.head_dim**-0.5
        query = this.q[b : b + 1].double()
        truth.append(paged.attend(query, keys, values, visible, scale=scale, sinks=sinks))
    counts = torch.tensor(sparse.counts, dtype=torch.int32, device=device)
    tails = torch.tensor(sparse.tails, dtype=torch.int32, device=device)
    prefix = torch.full((case.batch + 1,), -1, dtype=torch.int32, device=device)
    workspace = new_workspace(case, device)
    ops.build_schedule(this.lens, prefix, counts=counts, tail_start=tails)
    slots = slots.to(device)
    results = [
        (
            torch.full_like(this.q, math.nan),
            torch.full((case.batch, case.heads), math.nan).to(device),
        )
        for _ in range(3)
    ]
    for i, (out, lse) in enumerate(results):  # the last two run into each other
        ops.sparse_attention(
            this.q,
            this.k,
            this.v,
            slots=slots,
            counts=counts,
            block_table=this.table,
            tail_start=tails,
            seq_lens=this.lens,
            prefix=prefix,
            scale=case.head_dim**-0.5,
            out=out,
            lse=lse,
            workspace=workspace,
            sinks=this.sinks,
            overlap=i > 0,
        )
    assert not bool(workspace.counters.any()), "counters are not zero again"
    worst, worst_lse = 0.0, 0.0
    for b, done in enumerate(truth):
        out, lse = results[0]
        if done is None:
            assert bool(out[b].isnan().all()), "a padded row was written"
            continue
        for other, _ in results[1:]:
            assert torch.equal(out[b], other[b]), "output differs between runs"
        assert bool(out[b].isfinite().all()), f"request {b}: output is not finite"
        error = (out[b].double() - done.out[0]).norm() / done.out.norm().clamp(min=1e-30)
        worst = max(worst, float(error))
        worst_lse = max(worst_lse, float((lse[b].double() - done.lse[0]).abs().max()))
    assert worst <= OUT_TOLERANCE[case.dtype], f"output error {worst:.2e}"
    assert worst_lse <= LSE_TOLERANCE, f"lse error {worst_lse:.2e}"
    return {"out": worst, "lse": worst_lse}


@dataclass(frozen=True, kw_only=True)
class SelectCase:
    """A selection problem."""

    layers: int = 2
    lens: tuple[int, ...] = (100, 1, 64)
    kv_heads: int = 2
    group: int = 2
    ratio: float = 0.1
    extra: int = 7
    min_tokens: int = 4
    sinks: int = 0
    recent: int = 0
    per_head: bool = False
    kind: str = "u8"  # u8, bf16, exact
    spread: int = 40  # distinct codes: small makes many ties
    planted: int = 0  # code of 8 tokens in 128: an even sample of a long row sees no others
    translate: bool = False
    seed: int = 0


def check_select(case: SelectCase, device: torch.device) -> dict[str, float]:
    """Selection: exactly the reference's lists on the kernel's own keys.

    Raises:
        AssertionError: a list differs.
    """
    rng = torch.Generator().manual_seed(case.seed)
    R, B, H = case.layers, len(case.lens), case.kv_heads
    n = -(-max(*case.lens, 1) // 64) * 64
    shape: tuple[int, ...] = (R, B, H, n)
    reference = lse = starts = None
    if case.kind == "exact":
        shape = (R, B, H, n // 64, 2 * case.group, 64)
        heads = H * case.group
        reference = torch.randn(R, B, heads, generator=rng)
        lse = torch.randn(R, B, 2, heads, generator=rng)
        starts = torch.arange(B + 1, dtype=torch.int32) * 2
    codes = torch.randint(100, 100 + case.spread, shape, generator=rng).to(torch.uint8)
    if case.planted:
        assert case.kind != "exact"
        codes[..., torch.arange(n) % 128 < 8] = case.planted
    score = codes
    if case.kind == "bf16":
        score = paged.decode_scores(codes).to(torch.bfloat16)
    heads_out = H if case.per_head else 1
    capacity = max(n, 16)
    table = None
    if case.translate:
        table = torch.stack([torch.randperm(n // 16, generator=rng) for _ in range(B)])
        table = table.to(torch.int32)

    candidates = torch.tensor(case.lens, dtype=torch.int32)
    budgets = kv_budgets(
        candidates,
        sparsity_ratio=case.ratio,
        num_speculative_tokens=case.extra,
        min_tokens=case.min_tokens,
    )

    def call(on: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        keys = torch.full((R, B, heads_out, n), -1, dtype=torch.int16, device=on)
        slots = torch.full((R, B, heads_out, capacity), -7, dtype=torch.int32, device=on)
        counts = torch.full((B,), -7, dtype=torch.int32, device=on)
        move = [None if t is None else t.to(on) for t in (table, reference, lse, starts)]
        ops.select(
            score.to(on),
            candidates=candidates.to(on),
            budgets=budgets.to(on),
            sinks=case.sinks,
            recent=case.recent,
            keys=keys,
            slots=slots,
            counts=counts,
            block_table=move[0],
            reference=move[1],
            lse=move[2],
            query_start=move[3],
        )
        return keys.cpu(), slots.cpu(), counts.cpu()

    keys, slots, counts = call(device)
    again = call(device)
    assert torch.equal(slots, again[1]), "lists differ between runs"
    if case.kind == "exact":
        # The exponential differs in the last bit, so keys may: rank the kernel's own.
        assert counts.tolist() == [expected_budget(case, length) for length in case.lens]
        for b, length in enumerate(case.lens):
            forced = (min(case.sinks, length), min(case.recent, max(length - case.sinks, 0)))
            for layer in range(R):
                for head in range(heads_out):
                    row = keys[layer, b, head, :length].to(torch.int64) & 0xFFFF
                    wanted = paged.pick_row(row, int(counts[b]), sinks=forced[0], recent=forced[1])
                    if table is not None:
                        wanted = table[b][wanted // 16].long() * 16 + wanted % 16
                    got = slots[layer, b, head, : int(counts[b])].long()
                    assert torch.equal(got, wanted), "list is not the best of its own keys"
    else:
        _, slots_cpu, counts_cpu = call(torch.device("cpu"))
        assert torch.equal(counts, counts_cpu), "counts differ from the reference"
        assert torch.equal(slots, slots_cpu), "lists differ from the reference"
    return {"kept": float(counts.sum())}


def expected_budget(case: SelectCase, length: int) -> int:
    forced = min(case.sinks + case.recent, length)
    asked = max(math.ceil(case.ratio * (length + case.extra)), case.min_tokens, forced)
    return min(asked, length)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Whatever waits for the GPU raises."""
    with warnings.catch_warnings():
        # torch warns, once, that the mode is a prototype.
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_graph_replays(path: str, device: torch.device) -> None:
    """Schedule, verification and selection in one captured graph, replayed with other lengths.

    Raises:
        AssertionError: a replay is wrong, or depends on an earlier one.
    """
    base = Case(lens=(3000, 40, 900), queries=(8, 8, 8), mode="hint", path=path)
    this = make_paged(base, device)
    workspace = new_workspace(base, device)
    lens = this.lens.clone()
    prefix = torch.zeros(4, dtype=torch.int32, device=device)
    out = torch.zeros_like(this.q)
    lse = torch.zeros(this.q.shape[:2], device=device)
    score = make_score(base, device)
    assert score is not None
    shape = (1, 3, 1)
    keys = torch.zeros(*shape, score.shape[2], dtype=torch.int16, device=device)
    slots = torch.zeros(*shape, score.shape[2], dtype=torch.int32, device=device)
    counts = torch.zeros(3, dtype=torch.int32, device=device)
    ratio = torch.full((1,), 0.1, dtype=torch.float64, device=device)
    gamma, floor = (torch.full((1,), n, dtype=torch.int32, device=device) for n in (7, 4))

    def step() -> None:
        ops.build_schedule(lens, prefix, query_start=this.query_start)
        verify(this, lens=lens, prefix=prefix, out=out, lse=lse, workspace=workspace, score=score)
        ops.select(
            score[None],
            candidates=lens,
            budgets=kv_budgets(
                lens, sparsity_ratio=ratio, num_speculative_tokens=gamma, min_tokens=floor
            ),
            keys=keys,
            slots=slots,
            counts=counts,
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    batches = ((3000, 40, 900), (2500, 39, 17), (16, 40, 0), (3000, 8, 899), (9, 0, 0))
    for i, lengths in enumerate(batches):
        lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        config = SpeculationConfig(
            sparsity_ratio=(0.1, 0.07, 0.3)[i % 3],
            num_speculative_tokens=(7, 3)[i % 2],
            min_tokens=(4, 20)[i % 2],
        )
        ratio.fill_(config.sparsity_ratio)
        gamma.fill_(config.num_speculative_tokens)
        floor.fill_(config.min_tokens)
        out.fill_(math.nan)
        # A replay may not wait for the host.
        with no_synchronisation():
            graph.replay()
        assert not bool(workspace.counters.any()), "counters are not zero again"
        for b, n in enumerate(lengths):
            rows = slice(8 * b, 8 * b + 8)
            if n == 0:
                assert bool(out[rows].isnan().all()), "a padded row was written"
                continue
            done = paged.verify_request(
                this.q[rows].double(),
                this.dense_k[b][:n].double(),
                this.dense_v[b][:n].double(),
                scale=0.125,
                window=0,
                sinks=None,
            )
            error = (out[rows].double() - done.out).norm() / done.out.norm()
            assert float(error) <= OUT_TOLERANCE[base.dtype], f"{lengths}: {float(error):.2e}"
            ranked = paged.selection_keys(score[None], per_head=False)[0, b, 0, :n]
            budget = config.kv_budget(n - 1)
            assert int(counts[b]) == budget
            wanted = paged.pick_row(ranked.cpu(), budget, sinks=0, recent=0)
            assert torch.equal(slots[0, b, 0, :budget].long().cpu(), wanted)


def check_changing_lengths(path: str, device: torch.device) -> None:
    """Calls end although another stream rewrites the lengths under them, and later ones are right.

    What such a call computes is undefined, but its warps must agree on the tiles: they wait for
    each other.

    Raises:
        AssertionError: calls did not end, or left something behind.
    """
    for head_dim, queries in itertools.product((64, 128), (8, 16)):
        case = Case(
            heads=16,
            head_dim=head_dim,
            lens=(40000, 20000, 9000),
            queries=(queries,) * 3,
            mode="hint",
            path=path,
        )
        this = make_paged(case, device)
        workspace = new_workspace(case, device)
        before = run_verify(this, workspace)
        score = make_score(case, device)
        lens, side = this.lens.clone(), torch.cuda.Stream()
        rng = torch.Generator().manual_seed(0)
        others = (torch.rand(64, 3, generator=rng) * this.lens.cpu()).clamp(min=queries)
        others = others.to(torch.int32).to(device)
        torch.cuda.synchronize()
        for i in range(100):
            with torch.cuda.stream(side):
                for j in range(8):
                    this.lens.copy_(others[(8 * i + j) % 64])
            verify(
                this,
                lens=this.lens,
                prefix=before.prefix,
                out=torch.empty_like(this.q),
                lse=torch.empty_like(before.lse),
                workspace=workspace,
                score=score,
            )
        ended = torch.cuda.Event()
        ended.record()
        deadline = time.monotonic() + 20
        while not ended.query():
            assert time.monotonic() < deadline, "calls wait for themselves"
            time.sleep(0.01)
        torch.cuda.synchronize()
        this.lens.copy_(lens)
        after = run_verify(this, workspace)
        assert torch.equal(before.out, after.out), "a call left something behind"
