"""The collector: each path's lists are the policy's on its own codes, and near the oracle's."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch

from tests.collector_cases import (
    DTYPE,
    GAMMA,
    budgets_of,
    competing,
    exact_scores,
    flash_attention_stand_in,
    listed_positions,
    make_collector,
    make_config,
    most_weight,
    run_step,
    vegas_positions,
)
from tests.paged_cases import OUT_TOLERANCE, Case, make_paged, oracle
from vegas_runtime.errors import ConfigError, UsageError
from vegas_runtime.vllm_plugin import paths, ranking

CPU = pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="no CPU"))
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
on_each_device = pytest.mark.parametrize("device", [CPU, CUDA])
on_each_path = pytest.mark.parametrize("path", paths.VERIFY_PATHS)

# Ragged: a full block, a request just prefilled, padding, one shorter than the floor, a long one.
CASE = Case(dtype=DTYPE, lens=(70, 40, 0, 6, 150), queries=(4, 1, 0, 2, 4), gain=2.0)


@pytest.fixture(autouse=True)
def flash_attention_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the engine's kernel is stood in for by what it is documented to compute."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(paths, "why_not_fa3", lambda device: None)
        monkeypatch.setattr(paths, "flash_attention", lambda: flash_attention_stand_in)


@on_each_device
@on_each_path
@pytest.mark.parametrize(
    ("rows", "granularity"),
    [("two", "token"), ("first_middle_last", "token"), ("all", "token"), ("two", "page")],
)
@pytest.mark.parametrize("scope", ["layer", "kv_head"])
def test_lists_are_the_policys_and_hold_the_oracles_weight(
    device: str, path: str, rows: str, scope: str, granularity: str
) -> None:
    if path == "fused_exact" and rows != "two":
        pytest.skip("exact scores are of two rows")
    config = make_config(rows=rows, scope=scope, granularity=granularity)
    if granularity == "page":
        config = config.replace(sparsity_ratio=0.5)
    step = run_step(CASE, config, path=path, device=device)
    if path.startswith("fused"):  # the first step knows no normalisers, the second one has them
        step = run_step(CASE, config, path=path, device=device, collector=step.collector)
    real = [b for b, n in enumerate(CASE.lens) if n]
    counts = budgets_of(CASE, config, CASE.queries)
    tails = [
        n - queries + 1 if n else 0 for n, queries in zip(CASE.lens, CASE.queries, strict=True)
    ]
    counts, tails = competing(config, counts, tails)
    assert step.collector.selected(0, 5)[1].tolist() == counts
    assert cast(Any, step.collector)._lengths.tail_start[:5].tolist() == tails
    for layer in range(2):
        codes = step.collector.codes(layer, 5)
        assert codes is not None
        prefix = [CASE.lens[b] - CASE.queries[b] for b in real]
        wanted = vegas_positions(codes[real], prefix, config)
        for place, b in enumerate(real):
            lists = listed_positions(step, layer, b)
            scores = exact_scores(step, layer, b).cpu()
            for head, chosen in enumerate(lists):
                assert chosen == wanted[place, head, : counts[b]].tolist()
                best = most_weight(scores[head, : tails[b]], counts[b], config)
                # Codes rank in steps of an eighth of an octave, which a few pages may all miss.
                share = 2**-0.125 if granularity == "page" else 0.985
                assert float(scores[head, chosen].sum()) >= share * best


@on_each_device
@on_each_path
@pytest.mark.parametrize("sinks", ["none", "small"])
def test_verification_is_full_attention(device: str, path: str, sinks: str) -> None:
    case = Case(dtype=DTYPE, lens=CASE.lens, queries=CASE.queries, sinks=sinks)
    step = run_step(case, make_config(), path=path, device=device)
    truth = oracle(step.this)
    step.this.q = step.queries[1]
    truth = oracle(step.this)
    for b, n in enumerate(case.lens):
        if n:
            rows = slice(int(step.this.query_start[b]), int(step.this.query_start[b + 1]))
            error = (step.out[rows].double() - truth[b].out).norm() / truth[b].out.norm()
            assert float(error) <= OUT_TOLERANCE[case.dtype]


@on_each_device
@on_each_path
@pytest.mark.parametrize("batch", [1, 5, pytest.param(256, marks=pytest.mark.gpu)])
def test_a_step_of_nothing_but_its_own_rows(device: str, path: str, batch: int) -> None:
    """What vLLM runs before it captures a size: requests whose whole text is the verify block."""
    case = Case(dtype=DTYPE, lens=(GAMMA + 1,) * batch, queries=(GAMMA + 1,) * batch)
    step = run_step(case, make_config(), path=path, device=device)
    assert step.collector.selected(0, batch)[1].tolist() == [1] * batch
    for b in range(0, batch, 13):
        assert listed_positions(step, 1, b) == [[0]]
    assert bool(step.out.isfinite().all())


def test_codes_of_exact_paths_agree() -> None:
    config = make_config()
    codes = {}
    for path in ("fa3", "triton", "fused_exact"):
        step = run_step(CASE, config, path=path)
        found = run_step(CASE, config, path=path, collector=step.collector).collector.codes(1, 5)
        assert found is not None
        codes[path] = found
    for b, (n, queries) in enumerate(zip(CASE.lens, CASE.queries, strict=True)):
        known = n - queries + 1 if n else 0
        for path, steps in (("triton", 1), ("fused_exact", 2)) if known else ():
            # A weight near a code's edge may fall on either side; exact scores are coded twice.
            off = codes[path][b, 0, :known].int() - codes["fa3"][b, 0, :known].int()
            assert int(off.abs().max()) <= steps


def test_a_mixed_batch_scores_the_last_row_of_a_prompt() -> None:
    """Short requests verify; a prompt's attention ran elsewhere and is only scored."""
    case = Case(dtype=DTYPE, lens=(70, 150, 40), queries=(4, 20, 9), gain=2.0)
    this = make_paged(case, torch.device("cpu"))
    config = make_config()
    rows = (4, 1, 1)
    budgets = torch.tensor(budgets_of(case, config, rows), dtype=torch.int32)
    for path in paths.VERIFY_PATHS:
        collector = make_collector(case, config, path=path)
        collector.bind(this.k)
        collector.begin_step(
            block_table=this.table,
            seq_lens=this.lens,
            query_start=this.query_start,
            budgets=budgets,
            rows=torch.tensor(rows, dtype=torch.int32),
            request_ids=torch.arange(3),
        )
        truth = oracle(this)
        lse = torch.cat([done.lse for done in truth]).float()
        for layer in range(2):
            collector.verify(
                layer,
                this.q[:4],
                this.k,
                this.v,
                block_table=this.table[:1],
                seq_lens=this.lens[:1],
                query_start=this.query_start[:2],
                max_queries=4,
                out=torch.empty_like(this.q[:4]),
                max_len=160,
            )
            collector.collect(
                layer,
                this.q[4:],
                this.k,
                lse[4:].T.contiguous(),
                block_table=this.table[1:],
                query_start=this.query_start[1:] - 4,
                first=1,
            )
        collector.end_step(block_table=this.table)
        lists, counts = collector.selected(1, 3)
        assert counts.tolist() == budgets.tolist()
        for b in (1, 2):
            weights = torch.exp(truth[b].logits[-1] - truth[b].lse[-1][:, None]).sum(0)
            blocks, within = lists[b, 0, : counts[b]].div(16, rounding_mode="floor"), lists % 16
            chosen = [
                next(i for i, block in enumerate(this.table[b].tolist()) if block == int(blocks[j]))
                * 16
                + int(within[b, 0, j])
                for j in range(int(counts[b]))
            ]
            best = float(weights.topk(len(chosen)).values.sum())
            assert float(weights[chosen].sum()) >= 0.985 * best


def test_selecting_layer_by_layer_gives_the_same_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    together = run_step(CASE, make_config(), path="triton")
    monkeypatch.setattr(ranking, "_device_bytes", lambda device: 1.0)
    apart = run_step(CASE, make_config(), path="triton")
    assert apart.collector.num_bytes < together.collector.num_bytes
    for layer in range(2):
        for b in range(5):
            assert listed_positions(apart, layer, b) == listed_positions(together, layer, b)


def test_normalisers_follow_requests_through_a_reordered_batch() -> None:
    config = make_config()
    first = run_step(CASE, config, path="fused", request_ids=[11, 12, -1, 13, 14])
    collector = first.collector
    order = [4, 0, 1]
    moved = Case(
        dtype=DTYPE,
        gain=2.0,
        lens=tuple(CASE.lens[b] for b in order),
        queries=tuple(CASE.queries[b] for b in order),
    )
    run_step(moved, config, path="fused", collector=collector, request_ids=[14, 11, 12])
    path: Any = collector._verify
    truth = oracle(first.this)  # of layer 0
    for row, b in enumerate(order):
        wanted = truth[b].lse.mean(0).float()
        torch.testing.assert_close(path.normalisers.hints[0, row], wanted, atol=1e-3, rtol=0)


def test_fused_collection_needs_to_know_the_requests() -> None:
    this = make_paged(CASE, torch.device("cpu"))
    collector = make_collector(CASE, make_config(), path="fused")
    with pytest.raises(UsageError, match="request_ids"):
        collector.begin_step(
            block_table=this.table,
            seq_lens=this.lens,
            query_start=this.query_start,
            budgets=torch.ones(5, dtype=torch.int32),
        )


def test_algorithm_and_rows_change_while_running() -> None:
    step = run_step(CASE, make_config(), path="triton")
    collector = step.collector
    before = [listed_positions(step, 0, b) for b in range(5)]
    collector.set_algorithm("streaming_llm")
    collector.set_rows("all")
    assert (collector.algorithm, collector.rows) == ("streaming_llm", "all")
    run_step(CASE, make_config(), path="triton", collector=collector)
    assert collector.selected(0, 5)[1].tolist() == [0] * 5, "nothing is scored"
    collector.set_algorithm("vegas")
    collector.set_rows("two")
    again = run_step(CASE, make_config(), path="triton", collector=collector)
    assert [listed_positions(again, 0, b) for b in range(5)] == before
    with pytest.raises(ConfigError, match="scores rows 'two' only"):
        make_collector(CASE, make_config(), path="fused_exact").set_rows("all")
    with pytest.raises(ConfigError, match="cannot run here: exact scores are of rows 'two'"):
        make_collector(CASE, make_config(rows="all"), path="fused_exact")
    with pytest.raises(ConfigError, match="was started for vegas, streaming_llm"):
        collector.set_algorithm("dense")
    window = make_collector(CASE, make_config(algorithm="streaming_llm"), path="triton")
    assert not window.collects
    with pytest.raises(ConfigError, match="was started for streaming_llm"):
        window.set_algorithm("vegas")


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"algorithm": "quests"}, "vegas, streaming_llm, spec_extend"),
        ({"metric": "logit"}, "one byte of attention weight"),
    ],
)
def test_what_cannot_be_collected_is_refused(changes: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        make_collector(CASE, make_config(**changes), path="triton")


def test_sinks_and_a_list_per_head_are_refused() -> None:
    with pytest.raises(ConfigError, match="attention sinks"):
        make_collector(
            Case(dtype=DTYPE, lens=(70,), queries=(4,), sinks="small"),
            make_config(scope="kv_head"),
            path="triton",
        )


def test_paths_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = make_collector(CASE, make_config(), path="auto", draft_path="auto")
    assert (collector.path, collector.draft_path) == (paths.VERIFY_PATHS[0], paths.DRAFT_PATHS[0])
    wide = Case(dtype=DTYPE, lens=(70,), queries=(4,), head_dim=128)
    window = make_config(algorithm="streaming_llm")
    assert make_collector(wide, window, path="auto").path == "fa3", "nothing to collect"
    assert make_collector(CASE, window, path="auto").path == "fused"
    monkeypatch.setattr(paths, "why_not_fa3", lambda device: "no FlashAttention-3 on this GPU")
    monkeypatch.setattr(paths.build, "unavailable_reason", lambda: "nvcc was not found")
    monkeypatch.setattr(paths, "_why_not_compiled", lambda *_, **__: "nvcc was not found")
    collector = make_collector(CASE, make_config(), path="auto", draft_path="auto")
    assert (collector.path, collector.draft_path) == ("triton", "triton")
    assert "no FlashAttention-3" in collector.reason
    assert "nvcc was not found" in collector.draft_reason
    with pytest.raises(ConfigError, match="cannot run here: no FlashAttention-3"):
        make_collector(CASE, make_config(), path="fa3")
    with pytest.raises(ConfigError, match="auto, fused, fused_exact, fa3, triton"):
        make_collector(CASE, make_config(), path="cutlass")
    wide = Case(dtype=DTYPE, heads=16, kv_heads=1, lens=(70,), queries=(4,))
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="16 verify rows of 16 heads"):
        make_collector(wide, make_config(num_speculative_tokens=15), path="fused")


def test_a_batch_that_must_not_show_leaves_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(paths, "why_not_fa3", lambda device: None)
    collector = make_collector(CASE, make_config(), path="auto", draft_path="auto")
    assert (collector.path, collector.draft_path) == ("fa3", "fa3")
    assert "VLLM_BATCH_INVARIANT" in collector.reason
    assert "VLLM_BATCH_INVARIANT" in collector.draft_reason
    for asked in ({"path": "fused"}, {"path": "triton"}, {"draft_path": "kernel"}):
        with pytest.raises(ConfigError, match="cannot run here: VLLM_BATCH_INVARIANT"):
            make_collector(CASE, make_config(), **{"path": "fa3", "draft_path": "fa3"} | asked)
    monkeypatch.setattr(paths, "why_not_fa3", lambda device: "no FlashAttention-3 on this GPU")
    with pytest.raises(ConfigError, match="only FlashAttention-3 serves Vegas then: no Flash"):
        make_collector(CASE, make_config(), path="auto")


def test_budgets_beyond_the_buffers() -> None:
    collector = make_collector(CASE, make_config(sparsity_ratio=0.1), path="triton")
    assert collector.max_budget == math.ceil(0.1 * 152)
    collector.check_budget(0.1, 4)
    with pytest.raises(ConfigError, match="hold 16"):
        collector.check_budget(0.2, 4)
    with pytest.raises(ConfigError, match="sparse_attn_max_ratio"):
        collector.check_budget(0.05, 100)


@pytest.mark.parametrize("algorithms", [(), ("spec_extend", "sparse_spec", "snapkv")])
def test_held_memory_is_counted(algorithms: tuple[str, ...]) -> None:
    """Everything reachable from a collector, and nothing twice."""
    collector = make_collector(
        CASE, make_config(), path="fused", draft_path="kernel", algorithms=algorithms
    )
    seen: dict[int, int] = {}

    def walk(thing: Any) -> None:
        if isinstance(thing, torch.Tensor):
            seen[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            for value in thing.values():
                walk(value)
        elif hasattr(thing, "__dict__") and not isinstance(thing, type):
            walk(vars(thing))

    walk(collector)
    flags = 8 + 4 + 6 * 4  # the two controls and the six switches
    assert abs(sum(seen.values()) - flags - collector.num_bytes) <= 4 * GAMMA
