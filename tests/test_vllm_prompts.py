"""Lists chosen by the end of a prompt: SnapKV's own, and held for the request's life."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.collector_cases import (
    DTYPE,
    LAYERS,
    Step,
    accept,
    draft_oracle,
    listed_positions,
    make_collector,
    make_config,
)
from tests.paged_cases import OUT_TOLERANCE, Case, Paged, make_paged
from vegas_runtime.errors import ConfigError
from vegas_runtime.kernels import paged
from vegas_runtime.policies.base import SelectionInput
from vegas_runtime.policies.snapkv import PROMPT_ROWS, SnapKVPolicy
from vegas_runtime.vllm_plugin.collection import Collector

CPU = pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="no CPU"))
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
on_each_device = pytest.mark.parametrize("device", [CPU, CUDA])

# Whole prompts: longer than the rows looked at, shorter, one with a partial block.
CASE = Case(dtype=DTYPE, lens=(70, 20, 150), queries=(1, 1, 1), gain=0.5)
CONFIG = make_config(algorithm="snapkv", sparsity_ratio=0.3, min_tokens=36)


def last_rows(this: Paged, layer: int) -> Tensor:
    """[B, 32, H, D] queries of each prompt's last rows."""
    case = this.case
    rng = torch.Generator().manual_seed(layer)
    shape = (case.batch, PROMPT_ROWS, case.heads, case.head_dim)
    return (case.gain * torch.randn(shape, generator=rng)).to(case.dtype).to(this.device)


def unscaled_normalisers(this: Paged, q: Tensor) -> Tensor:
    """[B * 32, H]: log of what each row sums over the keys it sees, NaN before the start."""
    group = this.case.heads // this.case.kv_heads
    found = []
    for b, length in enumerate(this.case.lens):
        keys = this.dense_k[b].double().repeat_interleave(group, 1)
        logits = torch.einsum("qhd,khd->qhk", q[b].double(), keys)
        rows = torch.arange(length - PROMPT_ROWS, length, device=q.device)
        hidden = torch.arange(length, device=q.device) > rows[:, None]
        lse = logits.masked_fill(hidden[:, None], -math.inf).logsumexp(-1)
        lse[rows < 0] = math.nan
        found.append(lse.float())
    return torch.cat(found)


def choose(
    collector: Collector, this: Paged, rows: Sequence[int], states: Sequence[int]
) -> list[Tensor]:
    """A pass over some prompts' last rows; each layer's codes."""
    lists, codes = collector.prompt_lists, []
    chosen = torch.tensor(rows, device=this.device)
    lens = this.lens[chosen]
    lists.begin(torch.tensor(states, device=this.device), lens, num_drafts=3)
    lists.hold(np.array(states))
    for layer in range(LAYERS):
        q = last_rows(this, layer)
        lse = unscaled_normalisers(this, q).view(this.case.batch, PROMPT_ROWS, -1)
        lists.choose(
            layer,
            q[chosen].flatten(0, 1),
            this.k,
            lse[chosen].flatten(0, 1),
            block_table=this.table[chosen],
            lens=lens,
        )
        codes.append(lists.codes[: len(rows)].clone())
    return codes


def bound(device: str = "cpu", **options: Any) -> tuple[Paged, Collector]:
    this = make_paged(CASE, torch.device(device))
    collector = make_collector(CASE, CONFIG, path="triton", device=device, **options)
    collector.bind(this.k)
    return this, collector


def step_of(this: Paged, collector: Collector) -> Step:
    return Step(this=this, config=CONFIG, collector=collector, out=this.q, queries=[])


@on_each_device
@pytest.mark.parametrize("draft_path", ["triton", "kernel"])
def test_lists_are_the_policys_and_drafts_read_them(device: str, draft_path: str) -> None:
    this, collector = bound(device, draft_path=draft_path)
    codes = choose(collector, this, [0, 1, 2], [5, 3, 8])
    step = step_of(this, collector)
    accept(step, [1, 1, 1], request_ids=[5, 3, 8])
    policy, lens = SnapKVPolicy(CONFIG), torch.tensor(CASE.lens)
    for layer in range(LAYERS):
        q = last_rows(this, layer).cpu()
        keys = torch.zeros(3, CASE.kv_heads, max(CASE.lens), CASE.head_dim, dtype=CASE.dtype)
        for b, length in enumerate(CASE.lens):
            keys[b, :, :length] = this.dense_k[b].transpose(0, 1).cpu()
        given = SelectionInput(
            prefix_lens=lens - 1,
            committed_lens=lens,
            current_lens=lens,
            prompt_queries=q.transpose(1, 2),
            keys=keys,
        )
        exact, pooled = policy.select(given), policy.pooled(given)
        coded = policy.choose(paged.decode_scores(codes[layer].cpu()), lens - 1)
        lengths: Any = collector._lengths
        assert lengths.tail_start[:3].tolist() == exact.tail_starts.tolist()
        for b in range(3):
            listed = listed_positions(step, layer, b)
            for head in range(CASE.kv_heads):
                wanted = [p for p in coded.positions[b, head].tolist() if p >= 0]
                assert listed[head] == wanted
                ideal = [p for p in exact.positions[b, head].tolist() if p >= 0]
                votes = pooled[b, head]
                # Codes rank in steps of an eighth of an octave, all of which one entry may miss.
                share = 0.985 if len(ideal) > 4 else 2**-0.125
                assert float(votes[wanted].sum()) >= share * float(votes[ideal].sum())
        out = torch.empty_like(this.q)
        collector.begin_draft(block_table=this.table, seq_lens=this.lens)
        collector.draft(
            *(layer, this.q, this.k, this.v),
            block_table=this.table,
            seq_lens=this.lens,
            out=out,
        )
        for b, length in enumerate(CASE.lens):
            chosen, tail = listed_positions(step, layer, b), int(lengths.tail_start[b])
            truth = draft_oracle(this, this.q, b, chosen, tail, length)
            assert float((out[b].double() - truth).norm() / truth.norm()) <= OUT_TOLERANCE[DTYPE]


def test_a_list_follows_its_request_through_the_batch_and_through_other_blocks() -> None:
    this, collector = bound()
    choose(collector, this, [0, 1, 2], [5, 3, 8])
    step = step_of(this, collector)
    accept(step, [1, 1, 1], request_ids=[5, 3, 8])
    before = [listed_positions(step, 1, b) for b in range(3)]
    # Other batch rows: row b holds the request that row order[b] held.
    order = [2, 0, 1]
    accept(step, [1, 0, 1], request_ids=[8, 5, 3])
    lists, counts = collector.selected(1, 3)
    assert counts.tolist() == [len(before[2][0]), 0, len(before[1][0])]
    this.table = this.table[order].contiguous()
    moved = step_of(this, collector)
    moved.this.case = Case(**{**vars(CASE), "lens": tuple(CASE.lens[b] for b in order)})
    accept(moved, [1, 1, 1], request_ids=[8, 5, 3])
    assert [listed_positions(moved, 1, b) for b in range(3)] == [before[b] for b in order]
    # The same request in other blocks, as after a preemption.
    this.table[0, :10] = this.table[0, :10].flip(0)
    accept(moved, [1, 1, 1], request_ids=[8, 5, 3])
    blocks = lists[0, 0, : len(before[2][0])] // 16
    assert blocks.tolist() == [int(this.table[0, p // 16]) for p in before[2][0]]


def test_requests_without_a_list_are_found() -> None:
    this, collector = bound()
    lists, states = collector.prompt_lists, np.array([5, 3, 8])
    all_of_them = np.array([True] * 3)
    assert lists.missing(states, np.array([True, False, True])) == [0, 2]
    choose(collector, this, [0, 2], [5, 8])
    assert lists.missing(states, all_of_them) == [1]
    # Another request took state 8, or the same one came back to it.
    lists.drop(np.array([8, 1]))
    assert lists.missing(states, all_of_them) == [1, 2]
    collector.set_algorithm("snapkv")
    assert lists.missing(states, all_of_them) == [1, 2]
    collector.forget()
    assert lists.missing(states, all_of_them) == [0, 1, 2]


def test_it_runs_beside_methods_of_other_lists() -> None:
    this = make_paged(CASE, torch.device("cpu"))
    collector = make_collector(
        CASE, make_config(sparsity_ratio=0.3, min_tokens=36), path="triton", algorithms=["snapkv"]
    )
    collector.bind(this.k)
    assert [kind.per_head for kind in collector.list_shapes] == [False, True]
    assert not collector.list_shape.per_head
    collector.set_algorithm("snapkv")
    assert collector.list_shape.per_head
    choose(collector, this, [0, 1, 2], [5, 3, 8])
    step = step_of(this, collector)
    accept(step, [1, 1, 1], request_ids=[5, 3, 8])
    mixed = [listed_positions(step, 1, b) for b in range(3)]
    _, alone = bound()
    choose(alone, this, [0, 1, 2], [5, 3, 8])
    step = step_of(this, alone)
    accept(step, [1, 1, 1], request_ids=[5, 3, 8])
    assert mixed == [listed_positions(step, 1, b) for b in range(3)]


def test_page_lists_have_no_room_for_all_that_is_generated() -> None:
    with pytest.raises(ConfigError, match="sparse_attn_draft_attention"):
        make_collector(CASE, CONFIG, path="triton", draft_path="fa3")
