"""The plugin's Triton kernels against plain PyTorch: in the interpreter, or compiled on a GPU."""

# ruff: noqa: N806 - tensor letters: B, H

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.collector_cases import DTYPE, competing, make_config, vegas_positions
from tests.paged_cases import OUT_TOLERANCE, Case, compare_outputs, make_paged, oracle
from vegas_runtime.kernels import paged
from vegas_runtime.policies.base import SelectionInput
from vegas_runtime.policies.streaming_llm import StreamingLLMPolicy
from vegas_runtime.vllm_plugin import triton_select
from vegas_runtime.vllm_plugin.methods import ROW_SETS
from vegas_runtime.vllm_plugin.triton_attention import ListedEntries, TritonAttention
from vegas_runtime.vllm_plugin.triton_hints import keep, recall, sum_heads
from vegas_runtime.vllm_plugin.triton_score import score
from vegas_runtime.vllm_plugin.triton_select import Selector, Units
from vegas_runtime.vllm_plugin.triton_steps import draft_lengths, step_lengths, window_lists

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
if torch.cuda.is_available():  # kernels are compiled for the GPU then, not interpreted
    DEVICES = DEVICES[1:]
# On a GPU float32 is multiplied in TF32, which no tolerance here is meant for.
DTYPES = [DTYPE] if torch.cuda.is_available() else [torch.float32, DTYPE]
on_each_device = pytest.mark.parametrize("device", DEVICES)


def ints(*values: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@on_each_device
@pytest.mark.parametrize("rows", ROW_SETS)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("layout", ["interleaved", "hnd", "split"])
def test_codes_are_the_weights_of_the_collected_rows(
    device: str, rows: str, per_head: bool, layout: str
) -> None:
    case = Case(dtype=DTYPE, lens=(70, 5, 0, 129), queries=(4, 1, 0, 2), layout=layout, gain=2.0)
    this = make_paged(case, torch.device(device))
    truth = oracle(this)
    lse = torch.cat([done.lse for done in truth]).float().to(device)
    candidates = ints(67, 5, 0, 128, device=device)
    codes = torch.full((4, 2 if per_head else 1, 192), 7, dtype=torch.uint8, device=device)
    score(
        this.q,
        this.k,
        lse,
        block_table=this.table,
        query_start=this.query_start,
        rows=ints(4, 1, 0, 2, device=device),
        candidates=candidates,
        scale=case.head_dim**-0.5,
        row_set=ints(ROW_SETS.index(rows), device=device),
        codes=codes,
    )
    chosen = {4: {"two": [0, 3], "first_middle_last": [0, 1, 3], "all": [0, 1, 2, 3]}}
    chosen |= {1: {name: [0] for name in ROW_SETS}, 2: {name: [0, 1] for name in ROW_SETS}}
    for b, n in enumerate(candidates.tolist()):
        assert bool((codes[b, :, n:] == 7).all()), "written beyond the candidates"
        if n == 0:
            continue
        picked = chosen[case.queries[b]][rows]
        weights = torch.exp(truth[b].logits - truth[b].lse[..., None])[picked]
        weights = weights.view(len(picked), 2, -1, case.lens[b]).sum(dim=(0, 2))[:, :n]
        if not per_head:
            weights = weights.sum(0, keepdim=True)
        off = (codes[b, :, :n].int() - paged.encode_scores(weights.float()).int()).abs()
        # A weight near a code's edge may fall on either side.
        assert int(off.max()) <= 1
        assert float(off.float().mean()) < 0.05


@st.composite
def selections(draw: st.DrawFn) -> tuple[list[int], int, int, float, int, int]:
    lens = draw(st.lists(st.integers(0, 90), min_size=1, max_size=4))
    return (
        lens,
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 3])),
        draw(st.sampled_from([0.05, 0.3, 1.0])),
        draw(st.sampled_from([1, 16, 500])),
        draw(st.integers(0, 1 << 16)),
    )


@settings(max_examples=30, deadline=None)
@given(selections(), st.sampled_from([2, 30, 256]), st.sampled_from(["token", "page"]))
def test_selection_is_the_policys_on_the_same_scores(
    given_: tuple[list[int], int, int, float, int, int], levels: int, granularity: str
) -> None:
    lens, layers, heads, ratio, floor, seed = given_
    # Sums of fewer levels than these are exact, in whatever order they are made.
    levels = min(levels, 80) if granularity == "page" else levels
    check_selection(
        lens,
        layers=layers,
        heads=heads,
        ratio=ratio,
        floor=floor,
        seed=seed,
        levels=levels,
        granularity=granularity,
    )


@on_each_device
@pytest.mark.parametrize(("levels", "granularity"), [(1, "token"), (256, "token"), (80, "page")])
@pytest.mark.parametrize(
    ("whole_row", "lens", "seed"),
    [
        (triton_select.WHOLE_ROW, [7400, 4096, 1, 0, 300], 2),
        (100, [3 * triton_select.CHUNK + 17, triton_select.CHUNK, 1, 2 * triton_select.CHUNK], 1),
    ],
    ids=["whole", "too long for registers"],
)
def test_selection_from_long_rows(
    device: str,
    whole_row: int,
    lens: list[int],
    seed: int,
    levels: int,
    granularity: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_select, "WHOLE_ROW", whole_row)
    check_selection(
        lens,
        layers=2,
        heads=1,
        ratio=0.07,
        floor=64,
        seed=seed,
        levels=levels,
        device=device,
        granularity=granularity,
    )


def check_selection(
    lens: list[int],
    *,
    layers: int,
    heads: int,
    ratio: float,
    floor: int,
    seed: int,
    levels: int,
    device: str = "cpu",
    granularity: str = "token",
) -> None:
    """Compare lists with the policy's; a length of 0 is padding and must be left alone."""
    rng = torch.Generator().manual_seed(seed)
    B, longest = len(lens), max(lens)
    config = make_config(sparsity_ratio=ratio, min_tokens=floor, granularity=granularity)
    counts = [config.kv_budget(n - 1) if n else 0 for n in lens]
    counts, ends = competing(config, counts, lens)
    width = -(-max(longest, 1) // 64) * 64
    codes = torch.randint(0, levels, (layers, B, heads, width), generator=rng).byte()
    table = torch.stack([torch.randperm(longest // 16 + 1, generator=rng) for _ in lens]).int()
    units = Units(block=16 * heads, token=heads, head=1) if heads > 1 else Units(block=16)
    lists = torch.full((layers, B, heads, max(*counts, 1) + 3), -7, dtype=torch.int32)
    lists, table, codes = (t.to(device) for t in (lists, table, codes))
    selector = Selector(
        rows=layers * B * heads,
        max_len=max(longest, 1),
        device=torch.device(device),
        in_pages=ints(int(granularity == "page"), device=device),
    )
    selector.select(
        codes,
        candidates=ints(*ends, device=device),
        counts=ints(*counts, device=device),
        block_table=table,
        block_size=16,
        units=units,
        lists=lists,
    )
    real = [b for b, n in enumerate(lens) if n]
    for layer in range(layers):
        expected = (
            vegas_positions(codes[layer][real], [lens[b] - 1 for b in real], config) if real else []
        )
        for place, b in enumerate(real):
            for head in range(heads):
                positions = expected[place, head, : counts[b]].to(device)
                blocks = table[b][positions // 16]
                wanted = blocks * units.block + positions % 16 * units.token + head * units.head
                assert torch.equal(lists[layer, b, head, : counts[b]].long(), wanted.long())
    for b, count in enumerate(counts):
        assert bool((lists[:, b, :, count:] == -7).all()), "written beyond the budget"


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sinks", ["none", "small"])
@pytest.mark.parametrize("units", [1, 100])
def test_dense_attention(device: str, dtype: torch.dtype, sinks: str, units: int) -> None:
    case = Case(
        heads=12, lens=(40, 17, 0, 230), queries=(7, 1, 0, 5), dtype=dtype, sinks=sinks, head_dim=64
    )
    this = make_paged(case, torch.device(device))
    attention = TritonAttention(
        num_heads=12,
        num_kv_heads=2,
        head_dim=64,
        max_batch=4,
        max_rows=7,
        units=units,
        device=torch.device(device),
    )
    out = torch.full_like(this.q, math.nan)
    lse = torch.full(this.q.shape[:2], math.nan, device=device)
    attention.attend(
        this.q,
        this.k,
        this.v,
        block_table=this.table,
        seq_lens=this.lens,
        query_start=this.query_start,
        max_queries=7,
        scale=case.head_dim**-0.5,
        out=out,
        lse=lse,
        sinks=this.sinks,
    )
    compare_outputs(this, oracle(this), out, lse)


@on_each_device
@pytest.mark.parametrize("lists", [1, 2])
def test_listed_attention_reads_list_then_tail_and_nothing_else(device: str, lists: int) -> None:
    case = Case(lens=(80, 33, 0), queries=(1, 1, 1), dtype=DTYPE)
    this = make_paged(case, torch.device(device))
    tails, lengths = (70, 30, 5), (78, 33, 0)
    chosen = [[[3, 17, 64], [0, 1, 69]][:lists], [[0, 29, 7], [5, 6, 8]][:lists], [[0] * 3] * lists]
    slots = torch.zeros((3, lists, 5), dtype=torch.int32, device=device)
    for b in range(2):
        for head in range(lists):
            positions = torch.tensor(chosen[b][head], device=device)
            slots[b, head, :3] = this.table[b][positions // 16] * 16 + positions % 16
    out = torch.full_like(this.q, math.nan)
    attention = TritonAttention(
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        max_batch=3,
        max_rows=1,
        units=20,
        device=torch.device(device),
    )
    attention.attend(
        this.q,
        this.k,
        this.v,
        block_table=this.table,
        seq_lens=ints(*lengths, device=device),
        query_start=ints(0, 1, 2, 3, device=device),
        max_queries=1,
        scale=0.125,
        out=out,
        lse=torch.zeros(3, 8, device=device),
        listed=ListedEntries(
            slots=slots,
            counts=ints(3, 3, 3, device=device),
            tail_start=ints(*tails, device=device),
        ),
    )
    for b in range(2):
        for head in range(2):
            listed = chosen[b][head if lists > 1 else 0]
            positions = torch.tensor([*listed, *range(tails[b], lengths[b])], device=device)
            done = paged.attend(
                this.q[b : b + 1, head * 4 : head * 4 + 4].double(),
                this.dense_k[b][positions, head : head + 1].double(),
                this.dense_v[b][positions, head : head + 1].double(),
                torch.ones(1, len(positions), dtype=torch.bool, device=device),
                scale=0.125,
                sinks=None,
            )
            error = (out[b, head * 4 : head * 4 + 4] - done.out[0]).norm() / done.out[0].norm()
            assert float(error) < OUT_TOLERANCE[DTYPE]
    assert bool((out[2] == 0).all()), "a request without tokens has no output"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40), st.integers(0, 9)), min_size=1),
    st.sampled_from(ROW_SETS),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_step_lengths(
    requests: list[tuple[int, int, int]],
    row_set: str,
    explicit: bool,
    scored: bool,
    in_pages: bool,
) -> None:
    spans = [min(span, length) for length, span, _ in requests]
    lens = [length if span else 0 for (length, _, _), span in zip(requests, spans, strict=True)]
    rows = [min(rows, span) for (*_, rows), span in zip(requests, spans, strict=True)]
    rows = rows if explicit else spans
    written = {name: torch.full((len(lens),), -9, dtype=torch.int32) for name in "rcntm"}
    step_lengths(
        seq_lens=ints(*lens),
        query_start=torch.tensor([0, *spans]).cumsum(0).int(),
        given_rows=ints(*rows) if explicit else None,
        budgets=torch.full((len(lens),), 25, dtype=torch.int32),
        algorithm=ints(0 if scored else 1),
        row_set=ints(ROW_SETS.index(row_set)),
        in_pages=ints(int(in_pages)),
        capacity=20,
        rows=written["r"],
        candidates=written["c"],
        counts=written["n"],
        tail_start=written["t"],
        row_mask=written["m"],
    )
    for b, (length, span) in enumerate(zip(lens, spans, strict=True)):
        own = rows[b] if scored and length else 0
        candidates = length - own + 1 if own else 0
        budget = min(20, candidates)
        if in_pages:
            candidates = candidates // 16 * 16
            budget = min(budget // 16 * 16, candidates)
        expected = [own, candidates, budget, candidates]
        assert [int(written[name][b]) for name in "rcnt"] == expected
        last = own - 1
        collected = {
            "two": {0, last},
            "first_middle_last": {0, last // 2, last},
            "all": set(range(own)),
        }[row_set]
        mask = sum(1 << (span - own + row) for row in collected if own)
        if span <= 31:
            assert int(written["m"][b]) == mask


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=5),
    st.sampled_from([0.01, 0.07, 0.33, 1.0]),
    st.sampled_from([1, 16, 40]),
    st.sampled_from([16, 32]),
)
def test_windows_are_the_policys(
    lens: list[int], ratio: float, floor: int, block_size: int
) -> None:
    B = len(lens)
    table = torch.stack([torch.randperm(300 // block_size + 1) for _ in lens]).int()
    counts, tails = torch.full((2, B), -9, dtype=torch.int32)
    slots = torch.full((B, 1, 16), -9, dtype=torch.int32)
    pages = torch.full((B, 24), -9, dtype=torch.int32)
    used = torch.full((B,), -9, dtype=torch.int32)
    controls = {
        "ratio": torch.tensor([ratio], dtype=torch.float64),
        "min_tokens": ints(floor),
    }
    window_lists(
        seq_lens=ints(*lens),
        **controls,
        dense=False,
        block_table=table,
        block_size=block_size,
        block_pages=block_size // 16,
        slots=slots,
        counts=counts,
        tail_start=tails,
        pages=pages,
        used=used,
    )
    # The same window as entries of every layer's list, tail and all.
    lists = torch.full((2, B, 1, 400), -9, dtype=torch.int32)
    list_used = torch.full((B,), -9, dtype=torch.int32)
    draft_lengths(
        seq_lens=ints(*lens),
        algorithm=ints(1),
        **controls,
        block_table=table,
        block_size=block_size,
        units=Units(block=block_size),
        with_tail=True,
        lists=lists,
        counts=counts.clone(),
        tail_start=tails.clone(),
        used=list_used,
    )
    policy = StreamingLLMPolicy(
        make_config(algorithm="streaming_llm", sparsity_ratio=ratio, min_tokens=floor)
    )
    for b, n in enumerate(lens):
        if n == 0:
            assert [int(t[b]) for t in (counts, used, list_used)] == [0, 0, 0]
            continue
        current = torch.tensor([n - 1])
        wanted = policy.select(
            SelectionInput(prefix_lens=current, committed_lens=current, current_lens=current)
        )
        sinks = [p for p in wanted.positions[0, 0].tolist() if p >= 0]
        start = int(wanted.tail_starts[0])
        assert (int(counts[b]), int(tails[b])) == (len(sinks), start)
        all_positions = torch.tensor([*sinks, *range(start, n)])
        expected = table[b][all_positions // block_size] * block_size + all_positions % block_size
        in_pages = (pages[b].repeat_interleave(16) * 16 + torch.arange(16).repeat(24))[: used[b]]
        assert in_pages.tolist() == expected.tolist()
        assert bool((lists[:, b, 0, : list_used[b]] == expected).all())
        assert bool((lists[:, b, 0, list_used[b] :] == -9).all())
        if sinks:
            assert torch.equal(slots[b, 0], table[b, 0] * block_size + torch.arange(16).int())


@on_each_device
def test_normalisers_follow_the_request_and_never_the_row(device: str) -> None:
    known = torch.arange(2 * 4 * 3, device=device, dtype=torch.float32).view(2, 4, 3)
    hints = torch.full_like(known, math.nan)
    row_of = torch.zeros(10, dtype=torch.int32, device=device)
    owners = torch.full((4,), -1, dtype=torch.int32, device=device)

    def step(*ids: int) -> list[torch.Tensor]:
        recall(
            torch.tensor(ids, device=device),
            row_of=row_of,
            owners=owners,
            normalisers=known,
            hints=hints,
        )
        return [hints[1, row] for row in range(len(ids))]

    step(7, 5, 9)
    moved = step(9, 3, 7, -1)
    assert torch.equal(moved[0], known[1, 2])
    assert torch.equal(moved[2], known[1, 0])
    # Unknown requests and padding borrow row 0's; 5 has left, and 9 stood in row 2.
    assert torch.equal(moved[1], known[1, 0])
    assert torch.equal(step(5)[0], known[1, 0])
    known[:, 0] = math.inf
    assert bool((step(4)[0] == 0).all()), "a hint is always finite"


@on_each_device
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_heads_are_summed_as_the_oracle_does(device: str, heads: int) -> None:
    rng = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 256, (3, heads, 4160), generator=rng).byte().to(device)
    codes = torch.zeros((3, 1, 4160), dtype=torch.uint8, device=device)
    lse = torch.randn(13, 6, generator=rng).to(device)
    kept = torch.full((3, 6), math.nan, device=device)
    kept_alone = kept.clone()
    query_start = ints(0, 4, 4, 13, device=device)
    candidates = ints(4100, 0, 70, device=device)
    sum_heads(
        scores,
        candidates=candidates,
        codes=codes,
        lse=lse,
        query_start=query_start,
        kept=kept,
    )
    keep(lse, query_start, kept_alone)
    for b, n in enumerate(candidates.tolist()):
        total = torch.zeros(n)
        for head in range(heads):
            total = total + paged.decode_scores(scores[b, head, :n].cpu())
        assert torch.equal(codes[b, 0, :n].cpu(), paged.encode_scores(total))
    assert bool((codes[0, 0, 4160:] == 0).all())
    for result in (kept, kept_alone):
        torch.testing.assert_close(result[0], lse[:4].mean(0))
        torch.testing.assert_close(result[2], lse[5:13].mean(0))  # the newest 8 of 9
        assert bool(result[1].isnan().all()), "padding is left alone"
