"""Compile the plugin's Triton kernels as a collector launches them, for a GPU that is not there.

    TRITON_INTERPRET=0 python tests/compile_triton.py 90

Every launch is turned into a compilation for that compute capability, and a collector is walked
through a step on each path. Prints the names of the kernels compiled.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.kernels import ops
from vegas_runtime.policies.snapkv import PROMPT_ROWS
from vegas_runtime.vllm_plugin import paths
from vegas_runtime.vllm_plugin.collection import Collector
from vegas_runtime.vllm_plugin.draft_lists import DraftLists
from vegas_runtime.vllm_plugin.geometry import AttentionShape, Limits
from vegas_runtime.vllm_plugin.late_rows import AcceptedStep
from vegas_runtime.vllm_plugin.quest_pages import QuestPages
from vegas_runtime.vllm_plugin.triton_select import WHOLE_ROW, Units

GAMMA, BATCH = 6, 4
COMPILED: set[str] = set()


class NoGPU:
    """What Triton asks its driver on the way to a compilation."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compile_instead_of_launching() -> None:
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        COMPILED.add(self.__name__)
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = run


def without_compiled_kernels() -> None:
    """FlashAttention and csrc/ have nothing to do with what is compiled here."""
    paths.why_not_fa3 = lambda device: None
    paths.flash_attention = lambda: lambda *, q, out, **_: (out, torch.zeros(q.shape[1::-1]))
    for name in ("verify_attention", "sparse_attention", "build_schedule"):
        setattr(ops, name, lambda *_, **__: None)


def shape_of(heads: int, kv_heads: int, head_dim: int) -> AttentionShape:
    return AttentionShape(
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        block_size=16,
        scale=head_dim**-0.5,
    )


def limits_of(length: int) -> Limits:
    return Limits(max_batch=BATCH, max_len=length, max_rows=GAMMA + 1, max_ratio=0.3, min_tokens=16)


def walk(
    heads: int,
    kv_heads: int,
    head_dim: int,
    path: str,
    draft_path: str,
    *,
    length: int = 512,
    **config: Any,
) -> None:
    """One verify step, a prompt's scores, and one draft step."""
    device = torch.device("cpu")
    collector = Collector(
        shape=shape_of(heads, kv_heads, head_dim),
        limits=limits_of(length),
        config=SpeculationConfig(num_speculative_tokens=GAMMA, sparsity_ratio=0.07, **config),
        device=device,
        ratio=torch.tensor([0.07], dtype=torch.float64),
        min_tokens=torch.tensor([16], dtype=torch.int32),
        path=path,
        draft_path=draft_path,
    )
    rows, blocks = GAMMA + 1, BATCH * length // 16
    cache = torch.zeros(blocks, 16, kv_heads, 2 * head_dim, dtype=torch.bfloat16)
    k, v = cache.split(head_dim, dim=-1)
    table = torch.arange(blocks, dtype=torch.int32).view(BATCH, -1)
    lens = torch.full((BATCH,), length, dtype=torch.int32)
    starts = torch.arange(BATCH + 1, dtype=torch.int32) * rows
    q = torch.zeros(BATCH * rows, heads, head_dim, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    collector.bind(k)
    collector.begin_step(
        block_table=table,
        seq_lens=lens,
        query_start=starts,
        budgets=torch.ones_like(lens),
        rows=torch.full_like(lens, rows),
        request_ids=torch.arange(BATCH),
    )
    collector.verify(
        0,
        q,
        k,
        v,
        block_table=table,
        seq_lens=lens,
        query_start=starts,
        max_queries=rows,
        out=out,
        max_len=length,
    )
    lse = torch.zeros(heads, BATCH * rows)
    collector.collect(0, q, k, lse, block_table=table, query_start=starts, first=0)
    collector.end_step(block_table=table)
    if collector.reads_prompts:
        lists, last = collector.prompt_lists, q[:1].repeat(BATCH * PROMPT_ROWS, 1, 1)
        lists.begin(torch.arange(BATCH), lens, num_drafts=GAMMA)
        norm = torch.zeros(heads, BATCH * PROMPT_ROWS)
        lists.choose(0, last, k, norm.T, block_table=table, lens=lens)
    collector.accepted(
        AcceptedStep(
            keys=[k],
            block_table=table,
            seq_lens=lens,
            query_start=starts,
            num_sampled=torch.ones_like(lens),
            budgets=torch.ones_like(lens),
            request_ids=torch.arange(BATCH, dtype=torch.int32),
            is_prompt=torch.zeros_like(lens),
            rows=torch.full_like(lens, rows),
        )
    )
    collector.begin_draft(block_table=table, seq_lens=lens)
    collector.draft(0, q[:BATCH], k, v, block_table=table, seq_lens=lens, out=out[:BATCH])


def walk_quest(heads: int, kv_heads: int, head_dim: int, *, length: int, per_head: bool) -> None:
    """Bounds of one layer and of the whole cache, and one draft step's pages."""
    device = torch.device("cpu")
    pages = QuestPages(
        shape_of(heads, kv_heads, head_dim),
        limits_of(length),
        device,
        is_in_force=torch.ones(1, dtype=torch.int32),
        ratio=torch.tensor([0.07], dtype=torch.float64),
        min_tokens=torch.tensor([16], dtype=torch.int32),
    )
    blocks, lists = BATCH * length // 16, kv_heads if per_head else 1
    k = torch.zeros(blocks, 16, kv_heads, 2 * head_dim, dtype=torch.bfloat16)[..., :head_dim]
    pages.bind(k)
    pages.written(0, k, torch.zeros(7, dtype=torch.int64))
    pages.rebuild([k])
    lens = torch.full((BATCH,), length, dtype=torch.int32)
    drafts = DraftLists(
        entries=torch.zeros(2, BATCH, lists, length, dtype=torch.int32),
        counts=torch.zeros_like(lens),
        tail_start=torch.zeros_like(lens),
        pages=None,
        used=torch.zeros(BATCH * lists, dtype=torch.int32),
    )
    pages.begin_draft(lens, drafts)
    pages.select(
        0,
        torch.zeros(BATCH, heads, head_dim, dtype=torch.bfloat16),
        block_table=torch.arange(blocks, dtype=torch.int32).view(BATCH, -1),
        seq_lens=lens,
        units=Units(block=32, token=2, head=int(per_head)),
        with_tail=per_head,
        lists=drafts,
    )


if __name__ == "__main__":
    driver.set_active(NoGPU(int(sys.argv[1])))
    compile_instead_of_launching()
    without_compiled_kernels()
    for shape in ((9, 3, 64), (32, 8, 128)):
        for path, draft_path in (("fused", "kernel"), ("fused_exact", "kernel"), ("fa3", "fa3")):
            walk(*shape, path, draft_path)
        walk(*shape, "triton", "triton")
        walk(*shape, "triton", "fa3", scope="kv_head")
    walk(9, 3, 64, "fa3", "fa3", algorithm="streaming_llm")
    walk(9, 3, 64, "fa3", "fa3", length=2 * WHOLE_ROW)
    walk(9, 3, 64, "triton", "triton", rows="accepted_only")
    walk(9, 3, 64, "fa3", "kernel", algorithm="spec_extend")
    walk(9, 3, 64, "fa3", "kernel", algorithm="sparse_spec")
    walk(9, 3, 64, "fa3", "kernel", algorithm="snapkv")
    walk(32, 8, 128, "fa3", "triton", algorithm="snapkv")
    walk_quest(9, 3, 64, length=512, per_head=False)
    walk_quest(32, 8, 128, length=131072, per_head=True)
    sys.stdout.write(" ".join(sorted(COMPILED)))
