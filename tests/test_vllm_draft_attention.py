"""Draft attention: each path reads exactly a request's list and its tail, in any cache layout."""

from __future__ import annotations

import math

import pytest
import torch

from tests.collector_cases import (
    DTYPE,
    GAMMA,
    Step,
    draft_oracle,
    flash_attention_stand_in,
    listed_positions,
    make_collector,
    make_config,
    run_step,
)
from tests.paged_cases import OUT_TOLERANCE, Case, make_paged
from vegas_runtime.errors import ConfigError
from vegas_runtime.policies.base import SelectionInput
from vegas_runtime.policies.streaming_llm import StreamingLLMPolicy
from vegas_runtime.vllm_plugin import paths
from vegas_runtime.vllm_plugin.draft_attention import FlashDraft, entry_pages, token_pages
from vegas_runtime.vllm_plugin.geometry import AttentionShape, Limits

CPU = pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="no CPU"))
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
on_each_device = pytest.mark.parametrize("device", [CPU, CUDA])
on_each_path = pytest.mark.parametrize("draft_path", paths.DRAFT_PATHS)
LAYOUTS = ["interleaved", "hnd", "split"]

# Tokens beyond the verify step's are there: the drafts of the next steps.
CASE = Case(dtype=DTYPE, lens=(70, 40, 9, 150), queries=(4, 1, 2, 4), gain=2.0)


@pytest.fixture(autouse=True)
def flash_attention_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(paths, "why_not_fa3", lambda device: None)
        monkeypatch.setattr(paths, "flash_attention", lambda: flash_attention_stand_in)


def draft(step: Step, layer: int, lens: list[int]) -> torch.Tensor:
    """One draft step of a layer; row b is the b-th row of the layer's queries."""
    this = step.this
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=this.device)
    out = torch.full((len(lens), *this.q.shape[1:]), math.nan, dtype=this.q.dtype).to(this.device)
    step.collector.begin_draft(block_table=this.table, seq_lens=seq_lens)
    step.collector.draft(
        layer,
        this.q[: len(lens)],
        this.k,
        this.v,
        block_table=this.table,
        seq_lens=seq_lens,
        out=out,
        sinks=this.sinks,
    )
    return out


def check(
    step: Step, out: torch.Tensor, lens: list[int], chosen: list[list[list[int]]], tails: list[int]
) -> None:
    for b, length in enumerate(lens):
        if length == 0:
            continue
        truth = draft_oracle(step.this, step.this.q, b, chosen[b], tails[b], length)
        error = float((out[b].double() - truth).norm() / truth.norm())
        assert error <= OUT_TOLERANCE[step.case.dtype], f"request {b}: {error:.1e}"


@on_each_device
@on_each_path
@pytest.mark.parametrize(
    ("layout", "scope"),
    [("interleaved", "layer"), ("interleaved", "kv_head"), ("hnd", "kv_head"), ("split", "layer")],
)
def test_drafts_read_the_list_and_the_tail(
    device: str, draft_path: str, layout: str, scope: str
) -> None:
    case = Case(dtype=DTYPE, lens=CASE.lens, queries=CASE.queries, gain=2.0, layout=layout)
    config = make_config(scope=scope)
    step = run_step(case, config, path="triton", draft_path=draft_path, device=device)
    tails = [n - q + 1 for n, q in zip(case.lens, case.queries, strict=True)]
    # One accepted token, then a growing tail up to the last cached token; the third one pauses.
    for grown in range(GAMMA):
        lens = [min(t + 1 + grown, n) for t, n in zip(tails, case.lens, strict=True)]
        lens[2] = 0 if grown == 1 else lens[2]
        for layer in range(2):
            chosen = [listed_positions(step, layer, b) for b in range(case.batch)]
            check(step, draft(step, layer, lens), lens, chosen, tails)


@on_each_device
@on_each_path
@pytest.mark.parametrize(
    ("start", "sinks", "block_size"),
    [
        ("vegas", "none", 32),
        ("vegas", "small", 16),
        ("streaming_llm", "none", 32),
        ("streaming_llm", "small", 16),
        ("dense", "small", 32),
    ],
)
def test_windows_and_everything(
    device: str, draft_path: str, start: str, sinks: str, block_size: int
) -> None:
    case = Case(
        dtype=DTYPE, lens=CASE.lens, queries=CASE.queries, sinks=sinks, block_size=block_size
    )
    config = make_config(algorithm=start, sparsity_ratio=0.3, min_tokens=16)
    collector = make_collector(case, config, path="triton", draft_path=draft_path, device=device)
    if start == "vegas":
        collector.set_algorithm("streaming_llm")
    step = run_step(case, config, path="triton", device=device, collector=collector)
    lens = [69, 40, 0, 150]
    policy = StreamingLLMPolicy(config.replace(algorithm="streaming_llm"))
    current = torch.tensor(lens) - 1
    wanted = policy.select(
        SelectionInput(prefix_lens=current, committed_lens=current, current_lens=current)
    )
    sinks_read = [[[p for p in row[0].tolist() if p >= 0]] for row in wanted.positions]
    tails = wanted.tail_starts.tolist()
    if start == "dense":
        sinks_read, tails = [[[]]] * 4, [0] * 4
    check(step, draft(step, 1, lens), lens, sinks_read, tails)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("block_size", [16, 48])
def test_pages_are_views_of_single_entries(layout: str, per_head: bool, block_size: int) -> None:
    case = Case(
        dtype=DTYPE, lens=(100,), queries=(1,), layout=layout, block_size=block_size, kv_heads=4
    )
    this = make_paged(case, torch.device("cpu"))
    shape = AttentionShape(
        num_layers=1,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        dtype=case.dtype,
        block_size=block_size,
        scale=1.0,
    )
    limits = Limits(max_batch=1, max_len=100, max_rows=1, max_ratio=1.0, min_tokens=1)
    path = FlashDraft(shape, limits, torch.device("cpu"), attend=None)
    units = path.units(this.k, per_head=per_head)
    for cache in (this.k, this.v):
        pages = entry_pages(cache, per_head=per_head)
        assert pages.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
        for block, token, head in ((0, 0, 0), (this.k.shape[0] - 1, block_size - 1, 3), (1, 5, 2)):
            page = block * units.block + token * units.token + head * units.head
            found = pages[page, 0, 0 if per_head else head]
            assert found.data_ptr() == cache[block, token, head].data_ptr()
        sixteen = token_pages(cache)
        for block in (0, this.k.shape[0] - 1):
            page = block * (cache.stride(0) // (16 * cache.stride(1))) + 1 * (block_size > 16)
            offset = 16 * (block_size > 16) + 3
            assert sixteen[page, 3, 2].data_ptr() == cache[block, offset, 2].data_ptr()


def test_padded_blocks_are_refused_by_name() -> None:
    buffer = torch.zeros(4, 16 * 2 * 128 + 64)
    k = buffer[:, : 16 * 2 * 128].unflatten(1, (16, 2, 128))[..., :64]
    collector = make_collector(CASE, make_config(), path="triton", draft_path="fa3")
    with pytest.raises(ConfigError, match=r"draft_attention` to 'triton'"):
        collector.bind(k)
    make_collector(CASE, make_config(), path="triton", draft_path="triton").bind(k)
