"""The kernel operations on the CPU: the oracle behind the schemas, and clear refusals."""

from __future__ import annotations

import math

import kernel_grids
import paged_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import Case, SelectCase, SparseCase

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import UsageError
from vegas_runtime.kernels import ops, paged, reference
from vegas_runtime.kernels.budgets import kv_budgets

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", kernel_grids.small_verify_cases(), ids=str)
def test_verification_attention_matches_float64(case: Case) -> None:
    paged_cases.check_verify(case, CPU)


@pytest.mark.parametrize("case", kernel_grids.small_sparse_cases(), ids=str)
def test_sparse_attention_matches_float64(case: SparseCase) -> None:
    paged_cases.check_sparse(case, CPU)


@pytest.mark.parametrize("case", kernel_grids.small_select_cases(), ids=str)
def test_selection_keeps_the_best_of_its_own_keys(case: SelectCase) -> None:
    paged_cases.check_select(case, CPU)


def test_paged_attention_agrees_with_the_dense_reference() -> None:
    this = paged_cases.make_paged(Case(lens=(50,), queries=(4,), dtype=torch.float32), CPU)
    high = torch.arange(47, 51)[None]
    window = reference.Window(low=None, high=high, min_high=47, num_columns=50)
    spec = reference.ScoreSpec(rows=(0, 3), metric="weight", per_kv_head=True, reduce_rows=True)
    wanted, scores = reference.attention(
        this.q[None].transpose(1, 2),
        this.dense_k[0][None].transpose(1, 2),
        this.dense_v[0][None].transpose(1, 2),
        scale=0.125,
        window=window,
        score=spec,
    )
    done = paged_cases.oracle(this)[0]
    torch.testing.assert_close(done.out.float(), wanted[0], rtol=1e-5, atol=1e-5)
    # The reference averages over a group of four heads; each row has its own normaliser there.
    assert scores is not None
    weights = torch.exp(done.logits - done.lse[..., None])[[0, 3]]
    group_mean = weights.view(2, 2, 4, 50).mean(2).sum(0)
    torch.testing.assert_close(scores[0].double(), group_mean, rtol=1e-4, atol=1e-6)


def test_selection_agrees_with_varlen_topk() -> None:
    generator = torch.Generator().manual_seed(3)
    score = torch.rand(1, 2, 1, 128, generator=generator).to(torch.bfloat16)
    candidates = torch.tensor([100, 77], dtype=torch.int32)
    slots = torch.full((1, 2, 1, 32), -1, dtype=torch.int32)
    counts = torch.zeros(2, dtype=torch.int32)
    ops.select(
        score,
        candidates=candidates,
        budgets=torch.tensor([21, 16], dtype=torch.int32),
        keys=torch.zeros(1, 2, 1, 128, dtype=torch.int16),
        slots=slots,
        counts=counts,
    )
    assert counts.tolist() == [21, 16]
    wanted = reference.varlen_topk(score[0, :, 0].float(), candidates.long(), counts.long())
    assert torch.equal(slots[0, :, 0, : wanted.shape[1]].long(), wanted)


@given(
    prefix_lens=st.lists(st.integers(0, 200_000), min_size=1, max_size=4),
    ratio=st.floats(1e-6, 1.0, exclude_min=True),
    gamma=st.integers(1, 16),
    floor=st.integers(1, 512),
    on_device=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_budget_is_the_configurations(
    prefix_lens: list[int], ratio: float, gamma: int, floor: int, on_device: bool
) -> None:
    config = SpeculationConfig(num_speculative_tokens=gamma, sparsity_ratio=ratio, min_tokens=floor)
    made = kv_budgets(
        torch.tensor(prefix_lens, dtype=torch.int32) + 1,
        sparsity_ratio=torch.tensor([ratio], dtype=torch.float64) if on_device else ratio,
        num_speculative_tokens=torch.tensor([gamma], dtype=torch.int32) if on_device else gamma,
        min_tokens=torch.tensor([floor], dtype=torch.int32) if on_device else floor,
    )
    assert made.dtype == torch.int32
    assert made.tolist() == [config.kv_budget(length) for length in prefix_lens]


def test_empty_requests_have_no_budget_and_float32_ratios_are_refused() -> None:
    knobs = {"num_speculative_tokens": 7, "min_tokens": 256}
    candidates = torch.tensor([0, 300], dtype=torch.int32)
    assert kv_budgets(candidates, sparsity_ratio=0.07, **knobs).tolist() == [0, 256]
    with pytest.raises(UsageError, match="float64"):
        kv_budgets(candidates, sparsity_ratio=torch.tensor([0.07]), **knobs)


@pytest.mark.parametrize(
    ("budget", "kept"), [(-3, 3), (0, 3), (3, 3), (17, 17), (50, 50), (51, 50), (10**9, 50)]
)
def test_selection_holds_budgets_within_their_bounds(budget: int, kept: int) -> None:
    slots = torch.full((1, 1, 1, 64), -1, dtype=torch.int32)
    counts = torch.zeros(1, dtype=torch.int32)
    ops.select(
        torch.arange(64, dtype=torch.uint8).view(1, 1, 1, 64),
        candidates=torch.tensor([50], dtype=torch.int32),
        budgets=torch.tensor([budget], dtype=torch.int32),
        keys=torch.zeros(0, dtype=torch.int16),
        slots=slots,
        counts=counts,
        sinks=2,
        recent=1,
    )
    assert int(counts[0]) == kept
    assert slots[0, 0, 0].ge(0).sum() == kept


@given(st.lists(st.floats(0, 1e6, width=32), min_size=2, max_size=50))
@settings(max_examples=100, deadline=None)
def test_score_codes_are_monotone_and_close(values: list[float]) -> None:
    weights = torch.tensor(sorted(values))
    codes = paged.encode_scores(weights)
    assert bool((codes.int().diff() >= 0).all())
    inside = (weights > 2.0**-23) & (weights < 240)
    back = paged.decode_scores(codes[inside])
    assert bool(((back / weights[inside]) - 1).abs().le(1 / 16 + 1e-6).all())


def test_broken_weights_have_no_code() -> None:
    weights = torch.tensor([math.nan, -1.0, 0.0, math.inf])
    assert paged.encode_scores(weights).tolist() == [0, 0, 0, 255]


@pytest.mark.parametrize("mode", ["off", "hint", "exact", "mask"])
def test_verification_schema_is_sound(mode: str) -> None:
    case = Case(mode=mode)
    this = paged_cases.make_paged(case, CPU)
    score = paged_cases.make_score(case, CPU)
    workspace = paged_cases.new_workspace(case, CPU)
    prefix = torch.zeros(4, dtype=torch.int32)
    ops.build_schedule(this.lens, prefix, query_start=this.query_start)
    arguments = (
        *(this.q, this.k, this.v, this.table, this.lens, this.query_start, prefix, 8),
        *(0.125, 0, None, None if score is None else this.hint, this.rows, 0),
        *(torch.zeros_like(this.q), torch.zeros(this.q.shape[:2]), score),
        *(workspace.partials, workspace.counters),
    )
    torch.library.opcheck(torch.ops.vegas.verify_attention.default, arguments)


def test_other_schemas_are_sound() -> None:
    case = Case(queries=(1, 1, 1))
    this = paged_cases.make_paged(case, CPU)
    workspace = paged_cases.new_workspace(case, CPU)
    prefix = torch.zeros(4, dtype=torch.int32)
    counts = torch.tensor([3, 2, 5], dtype=torch.int32)
    tails = torch.tensor([30, 10, 120], dtype=torch.int32)
    schedule = (this.lens, None, counts, tails, 0, prefix)
    torch.library.opcheck(torch.ops.vegas.build_schedule.default, schedule)
    slots = this.table[:, :1, None].expand(3, 1, 5).contiguous() * 16
    sparse = (
        *(this.q, this.k, this.v, slots, counts, this.table, tails, this.lens, prefix, 0.125),
        *(None, False, torch.zeros_like(this.q), torch.zeros(this.q.shape[:2])),
        *(workspace.partials, workspace.counters),
    )
    torch.library.opcheck(torch.ops.vegas.sparse_attention.default, sparse)
    score = torch.randint(0, 255, (2, 3, 2, 64), dtype=torch.uint8)
    budgets = torch.tensor([13, 1, 8], dtype=torch.int32)
    select = (
        *(score, torch.tensor([60, 1, 33], dtype=torch.int32), budgets, 1, 1, None, 16),
        *(None, None, None, torch.zeros(2, 3, 1, 64, dtype=torch.int16)),
        *(torch.zeros(2, 3, 1, 64, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)),
    )
    torch.library.opcheck(torch.ops.vegas.select.default, select)


def _verify(this: paged_cases.Paged, **changes: object) -> None:
    case = this.case
    score = paged_cases.make_score(case, CPU)
    arguments: dict[str, object] = {
        "q": this.q,
        "k": this.k,
        "v": this.v,
        "block_table": this.table,
        "seq_lens": this.lens,
        "query_start": this.query_start,
        "prefix": torch.zeros(case.batch + 1, dtype=torch.int32),
        "max_queries": max(case.queries),
        "scale": 0.125,
        "out": torch.zeros_like(this.q),
        "lse": torch.zeros(this.q.shape[:2]),
        "workspace": paged_cases.new_workspace(case, CPU),
        "score": score,
        "hint": None if score is None else this.hint,
        "rows": this.rows,
    }
    arguments |= changes
    q, k, v = (arguments.pop(name) for name in "qkv")
    ops.verify_attention(q, k, v, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_queries": 18}, "1 to 17 rows"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int64)}, "`seq_lens` is torch.int64"),
        ({"query_start": torch.zeros(3, dtype=torch.int32)}, "`query_start`"),
        ({"block_table": torch.zeros(2, 9, dtype=torch.int32)}, "`block_table`"),
        ({"q": torch.zeros(13, 7, 64, dtype=torch.bfloat16)}, "do not divide"),
        ({"q": torch.zeros(13, 8, 64)}, "one dtype"),
        ({"out": torch.zeros(13, 8, 64)}, "`out` is torch.float32"),
        ({"lse": torch.zeros(12, 8)}, "`lse`"),
        ({"hint": None}, "needs `hint`"),
        ({"hint": torch.zeros(3, 2)}, "`hint`"),
        ({"score": torch.zeros(3, 2, 100, dtype=torch.uint8)}, "multiple"),
        ({"score": torch.zeros(3, 2, 192, dtype=torch.float32)}, "`score` is torch.float32"),
        ({"score": torch.zeros(3, 2, 3, 6, 64, dtype=torch.uint8)}, "exact scores are contiguous"),
        ({"window": 64}, "window of 64"),
        ({"sinks": torch.zeros(8, dtype=torch.bfloat16)}, "`sinks`"),
        ({"path": "fastest"}, "`path` is 'fastest'"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, object], words: str) -> None:
    this = paged_cases.make_paged(Case(mode="hint"), CPU)
    with pytest.raises(UsageError, match=words):
        _verify(this, **changes)


def test_misaligned_caches_are_refused() -> None:
    this = paged_cases.make_paged(Case(), CPU)
    wide = torch.zeros(20, 16, 2, 2 * 64 + 4, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="multiples of 8"):
        _verify(this, k=wide[..., :64], v=wide[..., :64])
    with pytest.raises(UsageError, match="block size is 8"):
        _verify(this, k=this.k[:, :8], v=this.v[:, :8])
    odd = torch.zeros(20 * 16 * 2 * 64 + 1, dtype=torch.bfloat16)[1:].view(20, 16, 2, 64)
    with pytest.raises(UsageError, match="16 bytes"):
        _verify(this, k=odd, v=odd)


def test_too_many_rows_to_collect_are_refused() -> None:
    this = paged_cases.make_paged(
        Case(heads=16, kv_heads=1, lens=(40,), queries=(9,), mode="all"), CPU
    )
    with pytest.raises(UsageError, match="144 rows"):
        _verify(this)


def test_selection_refuses_what_does_not_fit() -> None:
    score = torch.zeros(1, 1, 2, 64, dtype=torch.uint8)
    common = {
        "candidates": torch.tensor([50], dtype=torch.int32),
        "budgets": torch.tensor([27], dtype=torch.int32),
        "keys": torch.zeros(1, 1, 1, 64, dtype=torch.int16),
        "slots": torch.zeros(1, 1, 1, 8, dtype=torch.int32),
        "counts": torch.zeros(1, dtype=torch.int32),
    }
    with pytest.raises(UsageError, match="do not fit"):
        ops.select(score, sinks=5, recent=5, **common)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="`budgets` is torch"):
        ops.select(score, **{**common, "budgets": torch.tensor([27])})  # type: ignore[arg-type]
    common["keys"] = torch.zeros(0, dtype=torch.int16)
    with pytest.raises(UsageError, match="`keys`"):
        ops.select(score, **common)  # type: ignore[arg-type]


def test_cpu_tensors_say_why_they_take_the_reference() -> None:
    assert ops.why_not_cuda(torch.zeros(1, 1, 64)) == "tensors are on cpu"
