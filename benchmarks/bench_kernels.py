"""What the kernels take on one GPU, side by side with vLLM's FlashAttention-3 on the same cache.

    python -m benchmarks.bench_kernels [--quick] [--shapes NAME ...] [--no-write]

How calls are timed stands in `replay_times`. Rows go to results/kernels_h200.json.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernel_batch import BLOCK, Batch, Shape, make_batch
from benchmarks.replay_times import graphed, row, times_us
from benchmarks.results_file import Row, write_rows
from vegas_runtime.kernels import ops
from vegas_runtime.kernels.budgets import kv_budgets

SHAPES = {
    "qwen3-8b": Shape(
        name="qwen3-8b", heads=32, kv_heads=8, head_dim=128, batch=4, context=131072, layers=36
    ),
    "qwen3-8b-b64": Shape(
        name="qwen3-8b", heads=32, kv_heads=8, head_dim=128, batch=64, context=16384, layers=36
    ),
    "qwen3-30b-a3b": Shape(
        name="qwen3-30b-a3b", heads=32, kv_heads=4, head_dim=128, batch=5, context=122880, layers=48
    ),
    "gpt-oss-20b": Shape(
        name="gpt-oss-20b", heads=64, kv_heads=8, head_dim=64, batch=20, context=122880, layers=12
    ),
    "smollm2-135m": Shape(
        name="smollm2-135m", heads=9, kv_heads=3, head_dim=64, batch=256, context=8192, layers=30
    ),
    "qwen3-8b-unequal": Shape(
        name="qwen3-8b",
        heads=32,
        kv_heads=8,
        head_dim=128,
        batch=4,
        context=120000,
        layers=36,
        shortest=96000,
    ),
}


def copy_tb_s(rounds: int) -> float:
    """Device-to-device copy, bytes read plus written."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    # A kernel: copies inside a graph take the slower copy engine.
    replay = graphed(lambda: torch.mul(source, 1.0, out=target))
    times_us([replay], 100)  # clocks rise
    return 8 * source.numel() / float(times_us([replay], rounds).median()) / 1e6


@dataclass
class Verify:
    """Verification calls over one batch and one number of rows."""

    batch: Batch
    queries: int

    def __post_init__(self) -> None:
        shape, device = self.batch.shape, "cuda"
        rows = shape.batch * self.queries
        self.q = torch.randn(rows, shape.heads, shape.head_dim, device=device).to(torch.bfloat16)
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(rows, shape.heads, device=device)
        starts = torch.arange(shape.batch + 1, device=device) * self.queries
        self.query_start = starts.to(torch.int32)
        self.prefix = torch.zeros(shape.batch + 1, dtype=torch.int32, device=device)
        ops.build_schedule(self.batch.lens, self.prefix, query_start=self.query_start)
        self.hint = torch.full((shape.batch, shape.heads), math.log(shape.context) + 0.5)
        self.hint = self.hint.to(device)
        self.all_rows = torch.full(
            (shape.batch,), (1 << self.queries) - 1, dtype=torch.int32, device=device
        )

    def call(self, mode: str, path: str = "auto") -> Callable[[], object]:
        """off, hint (first and last row), all (every row) or exact."""
        shape = self.batch.shape
        n = -(-shape.context // 64) * 64
        size: tuple[int, ...] = (shape.batch, shape.kv_heads, n)
        if mode == "exact":
            size = (*size[:2], n // 64, 2 * shape.heads // shape.kv_heads, 64)
        score = None if mode == "off" else torch.zeros(size, dtype=torch.uint8, device="cuda")
        return lambda: ops.verify_attention(
            self.q,
            self.batch.k,
            self.batch.v,
            block_table=self.batch.table,
            seq_lens=self.batch.lens,
            query_start=self.query_start,
            prefix=self.prefix,
            max_queries=self.queries,
            scale=shape.head_dim**-0.5,
            out=self.out,
            lse=self.lse,
            workspace=self.batch.workspace,
            score=score,
            hint=None if score is None else self.hint,
            rows=self.all_rows if mode == "all" else None,
            path=path,
        )

    def fa3(self) -> Callable[[], object] | None:
        """FlashAttention-3 as vLLM calls it, or None without vLLM."""
        try:
            from vllm.vllm_flash_attn import flash_attn_varlen_func
        except ImportError:
            return None
        shape = self.batch.shape
        out = torch.empty_like(self.q)
        return lambda: flash_attn_varlen_func(
            self.q,
            self.batch.k,
            self.batch.v,
            max_seqlen_q=self.queries,
            cu_seqlens_q=self.query_start,
            max_seqlen_k=shape.context,
            seqused_k=self.batch.lens,
            softmax_scale=shape.head_dim**-0.5,
            causal=True,
            block_table=self.batch.table,
            fa_version=3,
            out=out,
        )


def bench_verify(
    batch: Batch, queries: int, modes: Sequence[str], copy: float, rounds: int
) -> list[Row]:
    """Collection overhead and the comparison with FlashAttention-3."""
    verify = Verify(batch, queries)
    case = f"{batch.shape.label} q{queries}"
    calls = {mode: graphed(verify.call(mode)) for mode in modes}
    fa3 = verify.fa3()
    if fa3 is not None:
        calls["fa3"] = graphed(fa3)
    samples = times_us(list(calls.values()), rounds)
    columns = dict(zip(calls, samples.T, strict=True))
    off = columns["off"]
    rows = [row("k1_us", f"{case} off", off, "us")]
    rows.append(row("copy_fraction", f"k1 {case} off", batch.kv_bytes / off / 1e6 / copy, ""))
    for mode in modes[1:]:
        kept = {"hint": "hint two", "all": "hint all", "exact": "exact two"}[mode]
        percent = 100 * (columns[mode] / off - 1)
        rows.append(row("k1_collection_overhead_pct", f"{case} {kept}", percent, "%"))
    if fa3 is not None:
        rows.append(row("fa3_us", case, columns["fa3"], "us"))
        rows.append(row("k1_vs_fa3", case, columns["fa3"] / off, "x"))
    return rows


def bench_sparse(batch: Batch, ratio: float, copy: float, rounds: int) -> list[Row]:
    """Sparse attention with per-layer and per-KV-head lists against page size 1."""
    shape, device = batch.shape, torch.device("cuda")
    count = math.ceil(ratio * shape.context)
    tail = 8
    q = torch.randn(shape.batch, shape.heads, shape.head_dim, device=device).to(torch.bfloat16)
    out, lse = torch.empty_like(q), torch.empty(shape.batch, shape.heads, device=device)
    counts = torch.full((shape.batch,), count, dtype=torch.int32, device=device)
    tails = batch.lens - tail
    prefix = torch.zeros(shape.batch + 1, dtype=torch.int32, device=device)
    ops.build_schedule(batch.lens, prefix, counts=counts, tail_start=tails)
    inner = 4  # lists in turn, so that the L2 cache does not serve the next call

    def lists(heads: int) -> list[Tensor]:
        made = []
        for _ in range(inner):
            noise = torch.rand(shape.batch, heads, shape.context - tail, device=device)
            position = noise.topk(count, dim=-1).indices.sort(dim=-1).values
            block = torch.gather(
                batch.table[:, None].expand(-1, heads, -1).long(), 2, position // BLOCK
            )
            made.append((block * BLOCK + position % BLOCK).to(torch.int32))
        return made

    def ours(slots: list[Tensor]) -> Callable[[], object]:
        def call() -> None:
            for one in slots:
                ops.sparse_attention(
                    q,
                    batch.k,
                    batch.v,
                    slots=one,
                    counts=counts,
                    block_table=batch.table,
                    tail_start=tails,
                    seq_lens=batch.lens,
                    prefix=prefix,
                    scale=shape.head_dim**-0.5,
                    out=out,
                    lse=lse,
                    workspace=batch.workspace,
                    overlap=True,  # as in an engine, lists are older than the kernel in front
                )

        return call

    shared = lists(1)
    calls = {"layer": graphed(ours(shared))}
    if shape.batch * shape.kv_heads * shape.context < 1 << 25:
        calls["kv_head"] = graphed(ours(lists(shape.kv_heads)))
    fa3 = page1_fa3(batch, q, shared, tails)
    if fa3 is not None:
        calls["fa3"] = graphed(fa3)
    samples = times_us(list(calls.values()), rounds, inner)
    columns = dict(zip(calls, samples.T, strict=True))
    moved = shape.batch * shape.kv_heads * (count + tail) * shape.head_dim * 4
    case, rows = f"{shape.label} {ratio:.0%}", []
    for kind in ("layer", "kv_head"):
        if kind in columns:
            rows.append(row("k3_us", f"{case} {kind} lists", columns[kind], "us"))
            fraction = moved / columns[kind] / 1e6 / copy
            rows.append(row("copy_fraction", f"k3 {case} {kind} lists", fraction, ""))
    if fa3 is not None:
        rows.append(row("fa3_page1_us", case, columns["fa3"], "us"))
        rows.append(row("k3_vs_fa3_page1", case, columns["fa3"] / columns["layer"], "x"))
    return rows


def page1_fa3(
    batch: Batch, q: Tensor, slots: list[Tensor], tails: Tensor
) -> Callable[[], object] | None:
    """FlashAttention-3 over pages of one token: the lists, then the tail's slots."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    shape = batch.shape
    tail = int(batch.lens[0] - tails[0])
    position = tails[:, None].long() + torch.arange(tail, device=q.device)
    tail_slots = batch.table.gather(1, position // BLOCK) * BLOCK + position % BLOCK
    tables = [torch.cat((one[:, 0], tail_slots), dim=1).to(torch.int32) for one in slots]
    k = batch.k.view(-1, 1, shape.kv_heads, shape.head_dim) if batch.k.is_contiguous() else None
    if k is None:
        size = (batch.k.shape[0] * BLOCK, 1, shape.kv_heads, shape.head_dim)
        stride = (batch.k.stride(1), batch.k.stride(1), batch.k.stride(2), 1)
        k = batch.k.as_strided(size, stride, batch.k.storage_offset())
        v = batch.v.as_strided(size, stride, batch.v.storage_offset())
    else:
        v = batch.v.view(-1, 1, shape.kv_heads, shape.head_dim)
    count = tables[0].shape[1]
    used = torch.full((shape.batch,), count, dtype=torch.int32, device=q.device)
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=q.device)
    out = torch.empty_like(q)

    def call() -> None:
        for table in tables:
            flash_attn_varlen_func(
                q,
                k,
                v,
                max_seqlen_q=1,
                cu_seqlens_q=starts,
                max_seqlen_k=count,
                seqused_k=used,
                softmax_scale=shape.head_dim**-0.5,
                causal=True,
                block_table=table,
                fa_version=3,
                out=out,
            )

    return call


def bench_select(shape: Shape, rounds: int) -> list[Row]:
    """Selection for all layers of a model, per layer and per KV head."""
    device = torch.device("cuda")
    n = -(-shape.context // 64) * 64
    size = (shape.layers, shape.batch, shape.kv_heads, n)
    if math.prod(size) > 4 << 30:
        return []
    score = torch.empty(size, dtype=torch.uint8, device=device)
    for part in score.flatten(0, 1):
        part.copy_((60 + 16 * torch.randn(part.shape, device=device)).clamp(1, 255))
    candidates = torch.full((shape.batch,), shape.context - 8, dtype=torch.int32, device=device)
    counts = torch.zeros(shape.batch, dtype=torch.int32, device=device)
    capacity = math.ceil(0.08 * n)
    budgets = kv_budgets(candidates, sparsity_ratio=0.07, num_speculative_tokens=7, min_tokens=256)
    rows = []
    for kind, heads in (("layer", 1), ("kv_head", shape.kv_heads)):
        slots = torch.zeros(*size[:2], heads, capacity, dtype=torch.int32, device=device)
        keys = torch.zeros(*size[:2], 1, n, dtype=torch.int16, device=device)

        def call(slots: Tensor = slots, keys: Tensor = keys) -> None:
            ops.select(
                score,
                candidates=candidates,
                budgets=budgets,
                keys=keys,
                slots=slots,
                counts=counts,
            )

        samples = times_us([graphed(call)], rounds)[:, 0]
        case = f"{shape.label} 7% all {shape.layers} layers, {kind} lists"
        rows.append(row("k2_total_us", case, samples, "us"))
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and row counts")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--queries", nargs="*", type=int, default=[4, 8, 12, 16])
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    torch.manual_seed(0)
    rounds = 20 if options.quick else 60
    copy = copy_tb_s(rounds)
    print(f"copy {copy:.3f} TB/s")
    rows = [Row(claim="copy_tb_s", case="1 GiB", value=copy, low=None, high=None, unit="TB/s")]
    for name in options.shapes:
        shape = SHAPES[name]
        batch = make_batch(shape)
        for queries in options.queries:
            modes = ["off", "hint", "exact"]
            if queries in (8, 16):
                modes.insert(2, "all")
            rows += bench_verify(batch, queries, modes, copy, rounds)
        if not shape.shortest:
            for ratio in (0.03, 0.07) if not options.quick else (0.07,):
                rows += bench_sparse(batch, ratio, copy, rounds)
        del batch
        torch.cuda.empty_cache()
        if not shape.shortest:
            rows += bench_select(shape, rounds)
            torch.cuda.empty_cache()
        if not options.no_write:
            print(write_rows("kernels_h200", rows, device="cuda"), flush=True)


if __name__ == "__main__":
    main()
