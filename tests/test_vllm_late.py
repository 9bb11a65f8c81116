"""Lists that wait for acceptance: the policies' own on the same scores, near the oracle's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.collector_cases import (
    DTYPE,
    LAYERS,
    Step,
    accept,
    budgets_of,
    draft_oracle,
    exact_scores,
    flash_attention_stand_in,
    listed_positions,
    make_collector,
    make_config,
    most_weight,
    ranked_scores,
    run_step,
    takes_pages,
)
from tests.paged_cases import OUT_TOLERANCE, Case, make_paged
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import ConfigError
from vegas_runtime.kernels import paged
from vegas_runtime.policies import make_policy
from vegas_runtime.policies.base import SelectionInput
from vegas_runtime.vllm_plugin import paths
from vegas_runtime.vllm_plugin.late_rows import AcceptedStep

CPU = pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="no CPU"))
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
on_each_device = pytest.mark.parametrize("device", [CPU, CUDA])

# Ragged: a full block of which two drafts stood, a request just prefilled, padding, one whose
# prompt is not complete, one of whose drafts none stood, one of whose drafts all did.
CASE = Case(dtype=DTYPE, lens=(70, 40, 0, 33, 90, 150), queries=(4, 1, 0, 1, 3, 4), gain=2.0)
EMITTED = (3, 1, 0, 0, 1, 4)
DRAFTING = (0, 1, 4, 5)


@pytest.fixture(autouse=True)
def flash_attention_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(paths, "why_not_fa3", lambda device: None)
        monkeypatch.setattr(paths, "flash_attention", lambda: flash_attention_stand_in)


def policy_lists(
    step: Step, layer: int, drafting: Sequence[int] = DRAFTING
) -> tuple[list[list[list[int]]], list[int]]:
    """What the method's own policy selects by the step's codes: lists by request, tail starts."""
    codes = step.collector.codes(layer, step.case.batch)
    assert codes is not None
    drafting = list(drafting)
    lens, queries = (torch.tensor(of)[drafting] for of in (step.case.lens, step.case.queries))
    committed = lens - queries + torch.tensor(EMITTED)[drafting]
    chosen = make_policy(step.config).select(
        SelectionInput(
            prefix_lens=lens - queries,
            committed_lens=committed,
            current_lens=committed,
            scores=ranked_scores(codes.cpu()[drafting], step.config),
        )
    )
    assert chosen is not None
    lists = [[[p for p in row if p >= 0] for row in heads] for heads in chosen.positions.tolist()]
    return lists, chosen.tail_starts.tolist()


def check_lists(step: Step, rows: dict[int, list[int]], *, per_head: bool = False) -> None:
    """Lists are the policy's, and hold almost all the weight that any such list could."""
    lengths: Any = step.collector._lengths
    for layer in range(LAYERS):
        wanted, tails = policy_lists(step, layer, [*rows])
        for place, b in enumerate(rows):
            listed = listed_positions(step, layer, b)
            assert listed == wanted[place]
            assert int(lengths.tail_start[b]) == tails[place]
            scores = exact_scores(step, layer, b, rows=rows[b], per_head=per_head).cpu()
            for head, chosen in enumerate(listed):
                best = most_weight(scores[head, : tails[place]], len(chosen), step.config)
                # Codes rank in steps of an eighth of an octave, all of which one entry may miss.
                is_exact = len(chosen) > 4 and not takes_pages(step.config)
                share = 0.985 if is_exact else 2**-0.125
                assert float(scores[head, chosen].sum()) >= share * best
        for b in {*range(CASE.batch)} - {*rows}:
            assert int(lengths.counts[b]) == int(lengths.candidates[b]) == 0


@on_each_device
@pytest.mark.parametrize("path", paths.VERIFY_PATHS)
@pytest.mark.parametrize(
    "knobs",
    [
        {"rows": "last_accepted"},
        {"rows": "accepted_only"},
        {"rows": "accepted_only", "scope": "kv_head"},
        {"algorithm": "spec_extend", "sparsity_ratio": 0.3, "min_tokens": 40},
        {"rows": "accepted_only", "granularity": "page", "sparsity_ratio": 0.3, "min_tokens": 40},
    ],
)
def test_lists_are_the_policys(device: str, path: str, knobs: dict[str, Any]) -> None:
    step = run_step(CASE, make_config(**knobs), path=path, device=device)
    accept(step, EMITTED)
    only_last = step.config.rows != "accepted_only"
    rows = {b: [*range(EMITTED[b])][-1 if only_last else 0 :] for b in DRAFTING}
    check_lists(step, rows)


@on_each_device
@pytest.mark.parametrize("path", paths.VERIFY_PATHS)
@pytest.mark.parametrize("knobs", [{}, {"sparsity_ratio": 0.02, "min_tokens": 3}])
def test_sparse_spec_lists_each_kv_heads_entries_by_all_rows(
    device: str, path: str, knobs: dict[str, Any]
) -> None:
    config = make_config(algorithm="sparse_spec", **knobs)
    step = run_step(CASE, config, path=path, draft_path="kernel", device=device)
    accept(step, EMITTED)
    drafted = [b for b in DRAFTING if CASE.queries[b] > 1]
    check_lists(step, {b: [*range(CASE.queries[b])] for b in drafted}, per_head=True)
    lengths: Any = step.collector._lengths
    assert int(lengths.tail_start[1]) == 0, "a request that has not drafted yet reads everything"


def test_sparse_spec_reads_everything_until_drafts_of_a_request_were_verified() -> None:
    config = make_config(algorithm="sparse_spec")
    collector = make_collector(CASE, config, path="triton")
    lengths: Any = collector._lengths

    def is_dense(
        queries: tuple[int, ...], request_ids: list[int], is_prompt: list[int]
    ) -> list[bool]:
        case = Case(dtype=DTYPE, lens=(70, 60, 50), queries=queries)
        step = run_step(case, config, path="triton", collector=collector)
        accept(step, [1, 1, 1], request_ids=request_ids, is_prompt=is_prompt)
        assert all(
            int(lengths.tail_start[b]) == (0 if lengths.candidates[b] == 0 else n - q - 1)
            for b, (n, q) in enumerate(zip(case.lens, queries, strict=True))
        )
        return [int(lengths.candidates[b]) == 0 for b in range(3)]

    assert is_dense((1, 1, 1), [7, 5, 6], [1, 1, 1]) == [True, True, True]
    # Rows change places; one request drafted, two did not though their prompts are complete.
    assert is_dense((1, 3, 1), [5, 7, 6], [0, 0, 0]) == [True, False, True]
    assert is_dense((1, 1, 1), [5, 7, 6], [0, 0, 0]) == [True, False, True]
    # Another request took the state that drafted; a resumed one computes its text anew.
    assert is_dense((1, 1, 4), [7, 5, 6], [1, 0, 0]) == [True, True, False]
    collector.set_algorithm("sparse_spec")
    assert is_dense((1, 1, 1), [6, 5, 7], [0, 0, 0]) == [False, True, True]


@on_each_device
@pytest.mark.parametrize("draft_path", ["kernel", "triton"])
def test_first_drafts_read_everything_beside_sparse_ones(device: str, draft_path: str) -> None:
    config = make_config(algorithm="sparse_spec")
    step = run_step(CASE, config, path="triton", draft_path=draft_path, device=device)
    accept(step, EMITTED)
    check_drafts(step, [70, 40, 0, 0, 90, 150], {0: 65, 1: 0, 4: 86, 5: 145})


@pytest.mark.parametrize("algorithms", [(), ("sparse_spec",)])
def test_page_lists_have_no_room_for_a_whole_text(algorithms: tuple[str, ...]) -> None:
    knobs = {} if algorithms else {"algorithm": "sparse_spec"}
    with pytest.raises(ConfigError, match="tails as long as the text"):
        make_collector(
            CASE, make_config(**knobs), path="triton", draft_path="fa3", algorithms=algorithms
        )


@on_each_device
@pytest.mark.parametrize("draft_path", paths.DRAFT_PATHS)
def test_drafts_read_whole_pages_and_what_follows_them(device: str, draft_path: str) -> None:
    config = make_config(algorithm="spec_extend", sparsity_ratio=0.3, min_tokens=40)
    step = run_step(CASE, config, path="triton", draft_path=draft_path, device=device)
    accept(step, EMITTED)
    lens = [70, 40, 0, 0, 90, 150]
    tails = {b: (lens[b] - CASE.queries[b] + 1) // 16 * 16 for b in DRAFTING}
    check_drafts(step, lens, tails)
    assert all(len(listed) % 16 == 0 for b in tails for listed in listed_positions(step, 1, b))


def check_drafts(step: Step, lens: list[int], tails: dict[int, int]) -> None:
    """A draft step over a layer's lists and tails is attention over just these."""
    this = step.this
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=this.device)
    out = torch.full((6, *this.q.shape[1:]), math.nan, dtype=this.q.dtype, device=this.device)
    step.collector.begin_draft(block_table=this.table, seq_lens=seq_lens)
    step.collector.draft(
        *(1, this.q[:6], this.k, this.v),
        block_table=this.table,
        seq_lens=seq_lens,
        out=out,
    )
    for b, tail in tails.items():
        chosen = listed_positions(step, 1, b)
        truth = draft_oracle(this, this.q, b, chosen, tail, lens[b])
        assert float((out[b].double() - truth).norm() / truth.norm()) <= OUT_TOLERANCE[DTYPE]


@pytest.mark.parametrize("path", ["fused", "triton"])
def test_one_collector_runs_every_method_it_was_made_for(path: str) -> None:
    start = make_config(sparsity_ratio=0.3, min_tokens=40)
    collector = make_collector(
        CASE, start, path=path, algorithms=["spec_extend", "sparse_spec"], rows=["last_accepted"]
    )
    for knobs in (
        {"rows": "last_accepted"},
        {"algorithm": "spec_extend"},
        {"algorithm": "sparse_spec"},
        {"rows": "all"},
        {"rows": "last_accepted"},
    ):
        config = start.replace(**knobs)
        collector.set_algorithm(config.algorithm)
        collector.set_rows(config.rows)
        assert (collector.algorithm, collector.rows) == (config.algorithm, config.rows)
        step = run_step(CASE, config, path=path, collector=collector)
        accept(step, EMITTED)
        alone = run_step(CASE, config, path=path)
        accept(alone, EMITTED)
        if path == "fused" and config.rows == "all":  # ranks by the normalisers it knows
            continue
        for layer in range(LAYERS):
            for b in DRAFTING:
                assert listed_positions(step, layer, b) == listed_positions(alone, layer, b)


def test_layers_select_one_by_one_where_codes_of_all_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vegas_runtime.vllm_plugin import ranking

    config = make_config(rows="last_accepted")
    together = run_step(CASE, config, path="triton")
    accept(together, EMITTED)
    monkeypatch.setattr(ranking, "_device_bytes", lambda device: 1.0)
    apart = run_step(CASE, config, path="triton")
    accept(apart, EMITTED)
    for layer in range(LAYERS):
        for b in DRAFTING:
            assert listed_positions(apart, layer, b) == listed_positions(together, layer, b)


def test_rows_of_a_prompt_whose_attention_ran_elsewhere_are_kept() -> None:
    """A mixed batch: one verify block, and a prompt of which only the last row is looked at."""
    case = Case(dtype=DTYPE, lens=(70, 150), queries=(4, 20), gain=2.0)
    config = make_config(rows="last_accepted")
    this = make_paged(case, torch.device("cpu"))
    collector = make_collector(case, config, path="triton")
    collector.bind(this.k)
    rows = torch.tensor([4, 1], dtype=torch.int32)
    budgets = torch.tensor(budgets_of(case, config, (4, 1)), dtype=torch.int32)
    step = {"block_table": this.table, "seq_lens": this.lens, "query_start": this.query_start}
    collector.begin_step(**step, budgets=budgets, rows=rows, request_ids=torch.arange(2))
    whole = Step(this=this, config=config, collector=collector, out=this.q, queries=[this.q] * 2)
    lse = torch.cat([done.lse for done in oracle_of(whole)]).float()
    for layer in range(LAYERS):
        collector.verify(
            *(layer, this.q[:4], this.k, this.v),
            block_table=this.table[:1],
            seq_lens=this.lens[:1],
            query_start=this.query_start[:2],
            max_queries=4,
            out=torch.empty_like(this.q[:4]),
            max_len=160,
        )
        collector.collect(
            *(layer, this.q[4:], this.k, lse[4:].T.contiguous()),
            block_table=this.table[1:],
            query_start=this.query_start[1:] - 4,
            first=1,
        )
    collector.end_step(block_table=this.table)
    emitted = torch.tensor([2, 1], dtype=torch.int32)
    collector.accepted(
        AcceptedStep(
            **step,
            keys=[this.k] * LAYERS,
            num_sampled=emitted,
            budgets=budgets,
            request_ids=torch.arange(2, dtype=torch.int32),
            is_prompt=torch.zeros_like(rows),
            rows=rows,
        )
    )
    for b, row in ((0, 1), (1, 19)):
        scores = exact_scores(whole, 0, b, rows=[row])
        if b == 1:  # candidates reach up to the only row that is looked at
            weights = torch.exp(
                oracle_of(whole)[1].logits[19] - oracle_of(whole)[1].lse[19][:, None]
            )
            scores = weights.sum(0, keepdim=True)
        (chosen,) = listed_positions(whole, 0, b)
        assert len(chosen) == int(budgets[b])
        best = float(scores[0].topk(len(chosen)).values.sum())
        assert float(scores[0, chosen].sum()) >= 0.985 * best


def oracle_of(step: Step) -> list[paged.RequestAttention]:
    from tests.paged_cases import oracle

    return oracle(step.this)


def test_rows_that_no_room_was_kept_for_are_refused() -> None:
    collector = make_collector(CASE, make_config(), path="triton")
    with pytest.raises(ConfigError, match="sparse_attn_rows_set"):
        collector.set_rows("last_accepted")
    with pytest.raises(ConfigError, match="sparse_attn_algorithm_set"):
        collector.set_algorithm("spec_extend")
    assert (collector.algorithm, collector.rows) == ("vegas", "two")


def test_what_slows_a_method_is_said() -> None:
    def told(config: SpeculationConfig, **declared: Any) -> set[str]:
        return {*make_collector(CASE, config, path="triton", **declared).slowed_by}

    assert told(make_config()) == set()
    assert told(make_config(), rows=["last_accepted"], algorithms=["spec_extend"]) == {
        "spec_extend",
        "vegas, rows last_accepted",
    }


def test_idle_requests_compile_everything_and_select_nothing() -> None:
    collector = make_collector(
        CASE, make_config(), path="triton", algorithms=["spec_extend", "sparse_spec", "snapkv"]
    )
    this = make_paged(CASE, torch.device("cpu"))
    collector.bind(this.k)
    collector.warm_up([this.k] * LAYERS)
    assert collector.selected(0, 1)[1].tolist() == [0]
