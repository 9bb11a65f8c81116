"""A worker's steps in small: a paged cache, a collector, and what its lists and drafts must be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.paged_cases import Case, Paged, make_paged
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.kernels import paged
from vegas_runtime.policies.base import Collection, SelectionInput
from vegas_runtime.policies.topk import PAGE_SIZE
from vegas_runtime.policies.vegas import VegasPolicy
from vegas_runtime.vllm_plugin.collection import Collector
from vegas_runtime.vllm_plugin.geometry import AttentionShape, Limits
from vegas_runtime.vllm_plugin.late_rows import AcceptedStep

LAYERS = 2
GAMMA = 3
# Triton's interpreter multiplies bfloat16 as if it were integers.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def flash_attention_stand_in(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    block_table: Tensor,
    return_softmax_lse: bool = False,
    s_aux: Tensor | None = None,
    fa_version: int,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
) -> Any:
    """What `flash_attn_varlen_func` computes with a page table, request by request."""
    assert causal
    assert fa_version == 3
    assert s_aux is None or s_aux.dtype == torch.bfloat16
    assert int(seqused_k.max()) <= max_seqlen_k <= block_table.shape[1] * k.shape[1]
    lse = torch.full((q.shape[1], q.shape[0]), math.nan, device=q.device)
    for b in range(seqused_k.shape[0]):
        begin, end, used = (int(t) for t in (*cu_seqlens_q[b : b + 2], seqused_k[b]))
        assert end - begin <= max_seqlen_q
        if begin == end:
            continue
        keys, values = (paged.gather_tokens(c, block_table[b], used).double() for c in (k, v))
        done = paged.verify_request(
            q[begin:end].double(),
            keys,
            values,
            scale=softmax_scale,
            window=0,
            sinks=None if s_aux is None else s_aux.double(),
        )
        out[begin:end] = done.out
        lse[:, begin:end] = done.lse.T
    return (out, lse) if return_softmax_lse else out


def make_config(**changes: Any) -> SpeculationConfig:
    values = {"num_speculative_tokens": GAMMA, "sparsity_ratio": 0.2, "min_tokens": 4}
    return SpeculationConfig(**(values | changes))


def make_collector(
    case: Case,
    config: SpeculationConfig,
    *,
    path: str,
    draft_path: str = "triton",
    device: str = "cpu",
    layers: int = LAYERS,
    extra_batch: int = 1,
    **declared: Any,
) -> Collector:
    """A collector for batches like `case`, with room for one more request.

    Methods and row sets to switch to are passed on as `declared`.
    """
    shape = AttentionShape(
        num_layers=layers,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        block_size=case.block_size,
        scale=case.head_dim**-0.5,
        sinks=case.sinks != "none",
    )
    limits = Limits(
        max_batch=case.batch + extra_batch,
        max_len=max(*case.lens, 1) + 2,
        max_rows=config.num_speculative_tokens + 1,
        max_ratio=config.sparsity_ratio,
        min_tokens=config.min_tokens,
        max_requests=100,
    )
    return Collector(
        shape=shape,
        limits=limits,
        config=config,
        device=torch.device(device),
        ratio=torch.tensor([config.sparsity_ratio], dtype=torch.float64, device=device),
        min_tokens=torch.tensor([config.min_tokens], dtype=torch.int32, device=device),
        path=path,
        draft_path=draft_path,
        **declared,
    )


def budgets_of(case: Case, config: SpeculationConfig, rows: Sequence[int]) -> list[int]:
    """Entries each request keeps; 0 for padding."""
    return [config.kv_budget(n - r) if n and r else 0 for n, r in zip(case.lens, rows, strict=True)]


def takes_pages(config: SpeculationConfig) -> bool:
    """Whether whole pages compete."""
    return config.algorithm == "spec_extend" or config.granularity == "page"


def competing(
    config: SpeculationConfig, counts: Sequence[int], ends: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Entries kept and where candidates end: whole pages of both where pages compete."""
    if not takes_pages(config):
        return list(counts), list(ends)
    ends = [end // PAGE_SIZE * PAGE_SIZE for end in ends]
    kept = zip(counts, ends, strict=True)
    return [min(count // PAGE_SIZE * PAGE_SIZE, end) for count, end in kept], ends


def ranked_scores(codes: Tensor, config: SpeculationConfig) -> Tensor:
    """What codes [..., n] stand for in the ranking: each its own weight, or its page's."""
    scores = paged.decode_scores(codes.cpu())
    if not takes_pages(config):
        return scores
    pages = paged.encode_scores(scores.unflatten(-1, (-1, PAGE_SIZE)).sum(-1))
    return paged.decode_scores(pages).repeat_interleave(PAGE_SIZE, -1)


def most_weight(scores: Tensor, count: int, config: SpeculationConfig) -> float:
    """The most that so many of the entries [n] can hold."""
    if takes_pages(config):
        scores = scores[: len(scores) // PAGE_SIZE * PAGE_SIZE].unflatten(0, (-1, PAGE_SIZE)).sum(1)
        count //= PAGE_SIZE
    return float(scores.topk(count).values.sum())


@dataclass
class Step:
    """A verify step that ran on a collector."""

    this: Paged
    config: SpeculationConfig
    collector: Collector
    out: Tensor
    queries: list[Tensor]

    @property
    def case(self) -> Case:
        return self.this.case


def run_step(
    case: Case,
    config: SpeculationConfig,
    *,
    path: str,
    draft_path: str = "triton",
    device: str = "cpu",
    collector: Collector | None = None,
    request_ids: Sequence[int] | None = None,
) -> Step:
    """Verify every request of a case, layer by layer with other queries each, and select."""
    this = make_paged(case, torch.device(device))
    if collector is None:
        collector = make_collector(case, config, path=path, draft_path=draft_path, device=device)
    collector.bind(this.k)
    ids = list(range(case.batch)) if request_ids is None else list(request_ids)
    budgets = budgets_of(case, config, case.queries)
    collector.begin_step(
        block_table=this.table,
        seq_lens=this.lens,
        query_start=this.query_start,
        budgets=torch.tensor(budgets, dtype=torch.int32, device=device),
        request_ids=torch.tensor(ids, device=device),
    )
    queries = [this.q, this.q.flip(0).contiguous()]
    out = torch.full_like(this.q, math.nan)
    for layer, q in enumerate(queries):
        collector.verify(
            layer,
            q,
            this.k,
            this.v,
            block_table=this.table,
            seq_lens=this.lens,
            query_start=this.query_start,
            max_queries=max(*case.queries, 1),
            out=out,
            max_len=this.table.shape[1] * case.block_size,
            sinks=this.sinks,
        )
    collector.end_step(block_table=this.table)
    return Step(this=this, config=config, collector=collector, out=out, queries=queries)


def accept(
    step: Step,
    emitted: Sequence[int],
    *,
    request_ids: Sequence[int] | None = None,
    is_prompt: Sequence[int] | None = None,
) -> None:
    """The accept test has run: so many tokens of each request stood, the bonus token among them.

    Args:
        step: what was verified.
        emitted: per request; 0 for padding and incomplete prompts.
        request_ids: persistent states; counted up unless given.
        is_prompt: per request; requests of one row unless given.
    """
    this, case = step.this, step.case
    ints = {"dtype": torch.int32, "device": this.device}
    prompts = [int(rows == 1) for rows in case.queries] if is_prompt is None else is_prompt
    step.collector.accepted(
        AcceptedStep(
            keys=[this.k] * LAYERS,
            block_table=this.table,
            seq_lens=this.lens,
            query_start=this.query_start,
            num_sampled=torch.tensor(emitted, **ints),
            budgets=torch.tensor(budgets_of(case, step.config, case.queries), **ints),
            request_ids=torch.tensor(request_ids or range(case.batch), **ints),
            is_prompt=torch.tensor(prompts, **ints),
        )
    )


def exact_scores(
    step: Step, layer: int, b: int, *, rows: Sequence[int] | None = None, per_head: bool = False
) -> Tensor:
    """[1 or Hkv, L + 1] float64: summed weights of the collected rows over all candidates.

    The fused path weighs against the hints it was given, one per head for all rows.

    Args:
        rows: of the verify block, where the configuration's name does not say.
        per_head: apart by KV head, whatever the scope.
    """
    this, case = step.this, step.case
    begin, end = int(this.query_start[b]), int(this.query_start[b + 1])
    done = paged.verify_request(
        step.queries[layer][begin:end].double(),
        this.dense_k[b].double(),
        this.dense_v[b].double(),
        scale=case.head_dim**-0.5,
        window=0,
        sinks=None if this.sinks is None else this.sinks.double(),
    )
    is_early = rows is None
    rows = Collection(rows=step.config.rows).row_indices(end - begin) if rows is None else rows
    normaliser = done.lse[rows]
    if is_early and step.collector.path == "fused":
        verify: Any = step.collector._verify
        normaliser = verify.normalisers.hints[layer, b].double().expand_as(normaliser)
    weights = torch.exp(done.logits[rows] - normaliser[..., None])
    weights = weights.view(len(rows), case.kv_heads, -1, case.lens[b]).sum(dim=(0, 2))
    weights = weights[:, : case.lens[b] - (end - begin) + 1]
    apart = per_head or step.config.scope == "kv_head"
    return weights if apart else weights.sum(0, keepdim=True)


def vegas_positions(codes: Tensor, prefix_lens: Sequence[int], config: SpeculationConfig) -> Tensor:
    """The policy's lists for the scores that codes stand for: [B, 1 or Hkv, K], -1 padded."""
    lens = torch.tensor(prefix_lens)
    selection = VegasPolicy(config).select(
        SelectionInput(
            prefix_lens=lens,
            committed_lens=lens + 1,
            current_lens=lens + 1,
            scores=ranked_scores(codes, config),
        )
    )
    return selection.positions


def listed_positions(step: Step, layer: int, b: int) -> list[list[int]]:
    """Positions that a layer's lists of one request hold, list by list."""
    this, collector = step.this, step.collector
    lists, counts = collector.selected(layer, step.case.batch)
    units = collector.units
    where = {}
    for position in range(step.case.lens[b]):
        block = int(this.table[b, position // step.case.block_size])
        within = position % step.case.block_size
        where[block * units.block + within * units.token] = position
    return [
        [where[int(unit) - head * units.head] for unit in row[: int(counts[b])]]
        for head, row in enumerate(lists[b])
    ]


def draft_oracle(
    this: Paged, q: Tensor, b: int, chosen: Sequence[Sequence[int]], tail_start: int, length: int
) -> Tensor:
    """[H, D] float64: attention of one row over each head's list and the tail."""
    case = this.case
    group = case.heads // case.kv_heads
    results = []
    for head in range(case.kv_heads):
        listed = chosen[head if len(chosen) > 1 else 0]
        positions = torch.tensor([*listed, *range(tail_start, length)], device=q.device)
        keys, values = (d[b][positions, head : head + 1] for d in (this.dense_k, this.dense_v))
        mine = slice(head * group, (head + 1) * group)
        done = paged.attend(
            q[b : b + 1, mine].double(),
            keys.double(),
            values.double(),
            torch.ones(1, len(positions), dtype=torch.bool, device=q.device),
            scale=case.head_dim**-0.5,
            sinks=None if this.sinks is None else this.sinks[mine].double(),
        )
        results.append(done.out[0])
    return torch.cat(results)
