"""Quest's pages on vLLM's cache: bounds after any history, and lists as the policy's."""

# ruff: noqa: N806 - tensor letters: B, H, D

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.collector_cases import (
    DTYPE,
    draft_oracle,
    flash_attention_stand_in,
    listed_positions,
    make_collector,
    make_config,
    run_step,
)
from tests.paged_cases import OUT_TOLERANCE, Case, Paged, make_paged
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import ConfigError
from vegas_runtime.policies.base import SelectionInput
from vegas_runtime.policies.quest import QuestPolicy
from vegas_runtime.policies.topk import PAGE_SIZE
from vegas_runtime.vllm_plugin import paths, triton_quest
from vegas_runtime.vllm_plugin.collection import Collector
from vegas_runtime.vllm_plugin.draft_lists import DraftLists
from vegas_runtime.vllm_plugin.geometry import AttentionShape, Limits, cache_share, with_bounds
from vegas_runtime.vllm_plugin.quest_pages import QuestPages
from vegas_runtime.vllm_plugin.triton_quest import MAX_PAGES
from vegas_runtime.vllm_plugin.triton_select import Units

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
if torch.cuda.is_available():  # kernels are compiled for the GPU then, not interpreted
    DEVICES = DEVICES[1:]
on_each_device = pytest.mark.parametrize("device", DEVICES)
HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 8, 2


def make_pages(
    case: Case,
    config: SpeculationConfig,
    device: str,
    *,
    max_len: int = 0,
    is_in_force: Tensor | None = None,
) -> QuestPages:
    shape = AttentionShape(
        num_layers=LAYERS,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        block_size=case.block_size,
        scale=case.head_dim**-0.5,
    )
    limits = Limits(
        max_batch=case.batch + 1,
        # Budgets count the drafts that may follow.
        max_len=max(*case.lens, max_len, 1) + config.num_speculative_tokens,
        max_rows=config.num_speculative_tokens + 1,
        max_ratio=config.sparsity_ratio,
        min_tokens=config.min_tokens,
    )
    ints = {"dtype": torch.int32, "device": device}
    return QuestPages(
        shape,
        limits,
        torch.device(device),
        is_in_force=torch.zeros(1, **ints) if is_in_force is None else is_in_force,
        ratio=torch.tensor([config.sparsity_ratio], dtype=torch.float64, device=device),
        min_tokens=torch.tensor([config.min_tokens], **ints),
    )


@dataclass
class Request:
    """One request's blocks, and how many of its tokens are committed."""

    blocks: list[int]
    length: int = 0


@dataclass
class Engine:
    """What an engine does to a paged cache, token by token, and Quest's bounds beside it."""

    device: str
    block_size: int
    rng: torch.Generator
    num_blocks: int = 24
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        case = Case(
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            block_size=self.block_size,
            dtype=DTYPE,
            lens=(1,),
            queries=(1,),
        )
        self.is_in_force = torch.ones(1, dtype=torch.int32, device=self.device)
        self.pages = make_pages(
            case, make_config(), self.device, max_len=1000, is_in_force=self.is_in_force
        )
        self.keys = [self._random(self.num_blocks, self.block_size) for _ in range(LAYERS)]
        self.pages.bind(self.keys[0])
        self.free = list(range(1, self.num_blocks))

    def _random(self, *size: int) -> Tensor:
        drawn = torch.randn(*size, KV_HEADS, DIM, generator=self.rng)
        return drawn.to(DTYPE).to(self.device)

    def write(self, spans: list[tuple[Request, int, int]]) -> None:
        """One forward pass: every layer writes new keys, then Quest is told; padding at the end."""
        slots = []
        for request, start, stop in spans:
            while len(request.blocks) * self.block_size < stop:
                request.blocks.append(self.free.pop())
            for position in range(start, stop):
                block = request.blocks[position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
        chosen = torch.tensor([*slots, -1, -1], device=self.device)
        for layer, keys in enumerate(self.keys):
            where = chosen[:-2] // self.block_size, chosen[:-2] % self.block_size
            keys[where] = self._random(len(slots))
            self.pages.written(layer, keys, chosen)

    def room(self, tokens: int) -> bool:
        """Whether every request could grow by so many tokens, and one more be admitted."""
        growing = (len(self.requests) + 1) * (tokens // self.block_size + 2)
        return len(self.free) >= growing

    def admit(self, length: int, chunk: int, cached_from: int | None) -> None:
        """Prefill a prompt in chunks, on top of another request's full blocks if asked to."""
        request = Request([])
        if cached_from is not None and self.requests:
            other = self.requests[cached_from % len(self.requests)]
            shared = min(other.length, length - 1) // self.block_size
            request = Request(other.blocks[:shared], shared * self.block_size)
        self.requests.append(request)
        while request.length < length:
            stop = min(request.length + chunk, length)
            self.write([(request, request.length, stop)])
            request.length = stop
            self.check()

    def iterate(self, gamma: int, accepted: list[int]) -> None:
        """Draft, verify over the drafts, keep some of them: the rest is rolled back."""
        starts = [request.length for request in self.requests]
        for step in range(gamma):
            here = zip(self.requests, starts, strict=True)
            self.write([(request, start + step, start + step + 1) for request, start in here])
            self.check([start + step for start in starts])
        here = zip(self.requests, starts, strict=True)
        self.write([(request, start, start + gamma + 1) for request, start in here])
        for index, request in enumerate(self.requests):
            request.length += 1 + min(accepted[index % len(accepted)], gamma)
        self.check()

    def drop(self, index: int) -> None:
        """Preempt or end a request; blocks that others read stay."""
        gone = self.requests.pop(index % len(self.requests))
        shared = {block for request in self.requests for block in request.blocks}
        self.free += [block for block in gone.blocks if block not in shared]

    def check(self, lengths: list[int] | None = None) -> None:
        """Every page before the next query's is bounded by the keys that stand in it."""
        for index, request in enumerate(self.requests):
            length = request.length if lengths is None else lengths[index]
            for page in range(length // PAGE_SIZE):
                block = request.blocks[page * PAGE_SIZE // self.block_size]
                first = page * PAGE_SIZE % self.block_size
                place = (block * self.block_size + first) // PAGE_SIZE
                for layer, keys in enumerate(self.keys):
                    own = keys[block, first : first + PAGE_SIZE]
                    bounds = self.pages.bounds(layer)[place]
                    assert torch.equal(bounds[:, 0], own.amin(0)), (index, page)
                    assert torch.equal(bounds[:, 1], own.amax(0)), (index, page)


STEPS = st.one_of(
    st.tuples(
        st.just("admit"),
        st.integers(1, 70),
        st.sampled_from([7, 16, 40]),
        st.none() | st.integers(0, 3),
    ),
    st.tuples(
        st.just("iterate"), st.integers(0, 9), st.lists(st.integers(0, 9), min_size=1, max_size=3)
    ),
    st.tuples(st.just("drop"), st.integers(0, 3)),
)


@on_each_device
@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(STEPS, min_size=2, max_size=7),
    block_size=st.sampled_from([16, 32]),
    seed=st.integers(0, 1 << 16),
)
def test_bounds_are_those_of_the_cache_after_rollbacks_and_reuse(
    device: str, steps: list[tuple], block_size: int, seed: int
) -> None:
    engine = Engine(device, block_size, torch.Generator().manual_seed(seed))
    for name, *arguments in [("admit", 30, 16, None), *steps]:
        if name == "drop" and not engine.requests:
            continue
        if name != "drop" and not engine.room(80 if name == "admit" else 10):
            engine.drop(0)
            continue
        getattr(engine, name)(*arguments)


@on_each_device
def test_a_page_that_drafts_filled_is_bounded_anew_when_verification_replaces_them(
    device: str,
) -> None:
    engine = Engine(device, 16, torch.Generator().manual_seed(0))
    engine.admit(14, 16, None)
    request = engine.requests[0]
    engine.write([(request, 14, 15)])
    engine.write([(request, 15, 16)])
    place = request.blocks[0]
    drafted = engine.pages.bounds(1)[place].clone()
    assert torch.equal(drafted[:, 1], engine.keys[1][place].amax(0))
    engine.write([(request, 14, 17)])
    verified = engine.pages.bounds(1)[place]
    assert torch.equal(verified[:, 1], engine.keys[1][place].amax(0))
    assert not torch.equal(verified, drafted)


@on_each_device
def test_bounds_are_left_alone_while_another_method_drafts_and_rebuilt_on_return(
    device: str,
) -> None:
    engine = Engine(device, 32, torch.Generator().manual_seed(1))
    engine.is_in_force.zero_()
    request = Request([])
    engine.write([(request, 0, 70)])
    assert bool((engine.pages.bounds(0) == 0).all())
    engine.is_in_force.fill_(1)
    engine.pages.rebuild(engine.keys)
    request.length = 70
    engine.requests.append(request)
    engine.check()


def bound_plainly(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Minima and maxima [Hkv, P, D] of a request's full pages; keys are [L, Hkv, D]."""
    full = keys[: len(keys) // PAGE_SIZE * PAGE_SIZE]
    paged = full.view(-1, PAGE_SIZE, *keys.shape[1:])
    return paged.amin(1).transpose(0, 1), paged.amax(1).transpose(0, 1)


@dataclass
class Picked:
    """What a draft step lists, and what the policy makes of the same keys and queries."""

    this: Paged
    lists: DraftLists
    units: Units
    config: SpeculationConfig
    with_tail: bool

    def check(self) -> None:
        """Lists, counts, tails and used lengths are the policy's; padding reads nothing."""
        case, lists = self.this.case, self.lists
        heads = lists.entries.shape[2]
        used = lists.used.view(case.batch, heads)
        for b, length in enumerate(case.lens):
            if length == 0:
                assert [int(t[b]) for t in (lists.counts, lists.tail_start)] == [0, 0]
                assert not bool(used[b].any())
                assert bool((lists.entries[:, b] == -7).all())
                continue
            positions, tail, votes = self._policy(b, length)
            count = int(lists.counts[b])
            assert int(lists.tail_start[b]) == tail
            assert bool((used[b] == count + length - tail).all())
            for head in range(heads):
                wanted = [p for p in positions[min(head, len(positions) - 1)].tolist() if p >= 0]
                end = count + (length - tail if self.with_tail else 0)
                got = [self._position(b, int(e), head) for e in lists.entries[0, b, head, :end]]
                assert got[count:] == ([*range(tail, length)] if self.with_tail else [])
                assert len(wanted) == count
                assert got[:count] == sorted(set(got[:count])), "ascending, none twice"
                self._compare(got[:count], wanted, votes[head])
                assert bool((lists.entries[0, b, head, max(end, count) :] == -7).all())

    def _compare(self, got: list[int], wanted: list[int], votes: Tensor) -> None:
        """The same pages, but for votes that nearly tie.

        Bounds are sums of up to 128 products, in another order: their last bits move a vote by
        less than 1e-4 of itself.
        """
        if got == wanted:
            return
        pages = [sorted({p // PAGE_SIZE for p in one}) for one in (got, wanted)]
        assert [p for p in got if p % PAGE_SIZE == 0] == [p * PAGE_SIZE for p in pages[0]]
        worst = [float(votes[one].min()) for one in pages]
        assert worst[0] == pytest.approx(worst[1], rel=1e-4)

    def _policy(self, b: int, length: int) -> tuple[Tensor, int, Tensor]:
        this, current = self.this, torch.tensor([length - 1])
        low, high = bound_plainly(this.dense_k[b].cpu())
        missing = max(1 - low.shape[1], 0)
        low, high = (torch.nn.functional.pad(t, (0, 0, 0, missing)) for t in (low, high))
        policy = QuestPolicy(self.config)
        asked = SelectionInput(
            prefix_lens=current,
            committed_lens=current,
            current_lens=current,
            page_low=low[None],
            page_high=high[None],
            query=this.q[b : b + 1].cpu(),
        )
        chosen = policy.select(asked)
        others = current // PAGE_SIZE
        votes = (
            policy._votes(asked, others)[0]
            if int(others)
            else torch.zeros(self.this.case.kv_heads, 0)
        )
        return chosen.positions[0], int(chosen.tail_starts[0]), votes

    def _position(self, b: int, entry: int, head: int) -> int:
        """Position of a listed entry, found in the request's own blocks."""
        size, units = self.this.case.block_size, self.units
        blocks = (self.this.table[b].long().cpu() * units.block).tolist()
        for column in range(math.ceil(self.this.case.lens[b] / size)):
            offset, rest = divmod(entry - head * units.head - blocks[column], units.token)
            if rest == 0 and 0 <= offset < size:
                return column * size + offset
        raise AssertionError(f"entry {entry} is not the request's")


def pick(
    case: Case,
    config: SpeculationConfig,
    *,
    with_tail: bool = False,
    units: Units | None = None,
    device: str = "cpu",
    equal_keys: bool = False,
) -> Picked:
    """Write a batch's keys, and select for one row a request in the second layer."""
    this = make_paged(case, torch.device(device))
    if equal_keys:
        this.k.fill_(0.25)
        this.dense_k = [torch.full_like(keys, 0.25) for keys in this.dense_k]
    pages = make_pages(case, config, device)
    pages.bind(this.k)
    this.k.nan_to_num_(nan=9.0)  # the interpreter warns of a minimum of nothing but NaN
    pages.rebuild([this.k] * LAYERS)
    heads = case.kv_heads if config.scope == "kv_head" else 1
    B = case.batch
    ints = {"dtype": torch.int32, "device": device}
    lists = DraftLists(
        entries=torch.full((1, B, heads, max(*case.lens, 16) + 32), -7, **ints),
        counts=torch.full((B,), -7, **ints),
        tail_start=torch.full((B,), -7, **ints),
        pages=None,
        used=torch.full((B * heads,), -7, **ints),
    )
    units = Units(block=case.block_size) if units is None else units
    pages.begin_draft(this.lens, lists)
    pages.select(
        1,
        this.q,
        block_table=this.table,
        seq_lens=this.lens,
        units=units,
        with_tail=with_tail,
        lists=lists,
    )
    return Picked(this=this, lists=lists, units=units, config=config, with_tail=with_tail)


@settings(max_examples=30, deadline=None)
@given(
    lens=st.lists(st.integers(0, 200), min_size=1, max_size=4),
    ratio=st.sampled_from([0.05, 0.3, 0.7, 1.0]),
    floor=st.sampled_from([1, 16, 40, 500]),
    gamma=st.sampled_from([1, 3, 15]),
    scope=st.sampled_from(["layer", "kv_head"]),
    block_size=st.sampled_from([16, 48]),
    with_tail=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_lists_are_the_policys(
    lens: list[int],
    ratio: float,
    floor: int,
    gamma: int,
    scope: str,
    block_size: int,
    with_tail: bool,
    seed: int,
) -> None:
    config = make_config(
        algorithm="quest",
        sparsity_ratio=ratio,
        min_tokens=floor,
        num_speculative_tokens=gamma,
        scope=scope,
    )
    case = Case(
        heads=6, kv_heads=2, head_dim=24, dtype=DTYPE, lens=tuple(lens), queries=(1,) * len(lens),
        block_size=block_size, gain=2.0, seed=seed,
    )  # fmt: skip
    # Any addressing will do: FlashAttention's is by blocks that lie apart.
    head = 1 if scope == "kv_head" else 0
    units = Units(block=block_size * 4 + 12, token=2, head=head) if with_tail else None
    pick(case, config, with_tail=with_tail, units=units).check()


@on_each_device
@pytest.mark.parametrize(
    ("layout", "scope", "model"),
    [
        ("interleaved", "layer", (9, 3, 64)),
        ("hnd", "kv_head", (9, 3, 64)),
        ("split", "kv_head", (8, 1, 128)),
        ("hnd", "layer", (8, 1, 128)),
    ],
)
def test_lists_of_whole_contexts(
    device: str, layout: str, scope: str, model: tuple[int, int, int]
) -> None:
    heads, kv_heads, dim = model
    case = Case(
        heads=heads, kv_heads=kv_heads, head_dim=dim, dtype=DTYPE, layout=layout,
        lens=(1100, 1024, 0, 1025, 40, 1), queries=(1,) * 6, gain=2.0,
    )  # fmt: skip
    config = make_config(algorithm="quest", sparsity_ratio=0.1, min_tokens=48, scope=scope)
    pick(case, config, device=device).check()


@on_each_device
def test_a_program_goes_on_to_pages_behind_the_others(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_quest, "_PROGRAMS", 1)
    monkeypatch.setattr(triton_quest, "_FEWEST_PROGRAMS", 2)
    case = Case(
        heads=2, kv_heads=1, head_dim=16, dtype=DTYPE, lens=(5100, 40), queries=(1, 1), gain=2.0
    )
    config = make_config(algorithm="quest", sparsity_ratio=0.1, min_tokens=48)
    pick(case, config, device=device).check()


@on_each_device
def test_of_equal_pages_the_first_are_read(device: str) -> None:
    case = Case(dtype=DTYPE, lens=(200, 161), queries=(1, 1))
    config = make_config(algorithm="quest", sparsity_ratio=0.3, min_tokens=1)
    picked = pick(case, config, device=device, equal_keys=True)
    picked.check()
    # Budgets of 61 and 50 tokens: three pages and two, beside the query's own.
    assert [picked._position(0, int(e), 0) for e in picked.lists.entries[0, 0, 0, :32]] == [
        *range(32)
    ]
    assert picked.lists.counts.tolist() == [32, 32]


def test_a_text_that_fits_the_budget_is_read_whole() -> None:
    case = Case(dtype=DTYPE, lens=(64, 63, 17, 16, 1), queries=(1,) * 5)
    config = make_config(algorithm="quest", sparsity_ratio=0.01, min_tokens=64)
    picked = pick(case, config, with_tail=True)
    picked.check()
    assert picked.lists.used.tolist() == list(case.lens)


def test_contexts_and_blocks_that_cannot_be_served_are_refused() -> None:
    config = make_config(algorithm="quest")
    with pytest.raises(ConfigError, match="ranks at most 32768 pages"):
        make_pages(Case(), config, "cpu", max_len=MAX_PAGES * PAGE_SIZE + 1)
    with pytest.raises(ConfigError, match="hold 24 tokens"):
        make_pages(Case(block_size=24), config, "cpu")


def test_cache_and_bounds_fit_into_the_memory_for_both() -> None:
    for available in (17, 1 << 30, (1 << 37) + 5):
        share = cache_share(available)
        assert available - 2 <= share + share // 16 <= available
        # The least memory that holds a cache of that size.
        assert with_bounds(share) <= available
        assert cache_share(with_bounds(available)) == available


def test_bounds_take_a_sixteenth_of_the_cache() -> None:
    engine = Engine("cpu", 32, torch.Generator().manual_seed(0))
    cache = 2 * sum(keys.nbytes for keys in engine.keys)
    assert sum(engine.pages.bounds(layer).nbytes for layer in range(LAYERS)) == cache // 16
    assert engine.pages.num_bytes > cache // 16


@pytest.fixture
def flash_attention_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(paths, "why_not_fa3", lambda device: None)
        monkeypatch.setattr(paths, "flash_attention", lambda: flash_attention_stand_in)


def check_drafts(collector: Collector, this: Paged, config: SpeculationConfig) -> None:
    """One draft step of two layers, whose queries differ, against the policy's pages."""
    pages = collector.pages
    assert pages is not None
    pages.rebuild([this.k] * LAYERS)
    case = this.case
    for layer, q in enumerate((this.q, this.q.flip(0).contiguous())):
        out = torch.full_like(q, math.nan)
        collector.begin_draft(block_table=this.table, seq_lens=this.lens)
        collector.draft(
            layer, q, this.k, this.v, block_table=this.table, seq_lens=this.lens, out=out
        )
        for b, length in enumerate(case.lens):
            if length == 0:
                continue
            low, high = bound_plainly(this.dense_k[b])
            current = torch.tensor([length - 1])
            chosen = QuestPolicy(config).select(
                SelectionInput(
                    prefix_lens=current,
                    committed_lens=current,
                    current_lens=current,
                    page_low=low[None].cpu(),
                    page_high=high[None].cpu(),
                    query=q[b : b + 1].cpu(),
                )
            )
            assert chosen is not None
            listed = [[p for p in row if p >= 0] for row in chosen.positions[0].tolist()]
            truth = draft_oracle(this, q, b, listed, int(chosen.tail_starts[0]), length)
            error = float((out[b].double() - truth).norm() / truth.norm())
            assert error <= OUT_TOLERANCE[case.dtype], f"layer {layer}, request {b}: {error:.1e}"


@on_each_device
@pytest.mark.usefixtures("flash_attention_on_cpu")
@pytest.mark.parametrize("draft_path", paths.DRAFT_PATHS)
@pytest.mark.parametrize(
    ("layout", "scope", "block_size"),
    [("interleaved", "layer", 16), ("interleaved", "kv_head", 32), ("hnd", "kv_head", 16)],
)
def test_drafts_read_the_policys_pages_and_the_tail(
    device: str, draft_path: str, layout: str, scope: str, block_size: int
) -> None:
    case = Case(
        dtype=DTYPE, lens=(170, 64, 0, 33, 1), queries=(1,) * 5, gain=2.0, layout=layout,
        block_size=block_size,
    )  # fmt: skip
    config = make_config(algorithm="quest", sparsity_ratio=0.4, min_tokens=16, scope=scope)
    this = make_paged(case, torch.device(device))
    this.k.nan_to_num_(nan=9.0)
    collector = make_collector(case, config, path="triton", draft_path=draft_path, device=device)
    collector.bind(this.k)
    assert not collector.collects
    check_drafts(collector, this, config)


@on_each_device
@pytest.mark.usefixtures("flash_attention_on_cpu")
@pytest.mark.parametrize("draft_path", paths.DRAFT_PATHS)
def test_one_collector_changes_between_vegas_and_quest(device: str, draft_path: str) -> None:
    case = Case(dtype=DTYPE, lens=(170, 40, 0, 33), queries=(4, 1, 0, 2), gain=2.0)
    config = make_config(sparsity_ratio=0.4, min_tokens=16)
    collector = make_collector(
        case, config, path="triton", draft_path=draft_path, device=device, algorithms=("quest",)
    )
    assert [kind.by_query for kind in collector.list_shapes] == [False, True]
    expected: list[list[list[int]]] = []
    for algorithm in ("vegas", "quest", "vegas"):
        collector.set_algorithm(algorithm)
        assert collector.algorithm == algorithm
        step = run_step(
            case, config, path="triton", draft_path=draft_path, device=device, collector=collector
        )
        if algorithm == "quest":
            assert collector.list_shape.by_query
            step.this.k.nan_to_num_(nan=9.0)
            this = replace(step.this, q=step.this.q[: case.batch])
            check_drafts(collector, this, config.replace(algorithm="quest"))
        else:
            lists = [row for b in (0, 1, 3) for row in listed_positions(step, 1, b)]
            expected = expected or lists
            assert lists == expected


def test_what_slows_quest_is_said() -> None:
    case = Case(dtype=DTYPE, lens=(20,), queries=(1,))
    collector = make_collector(case, make_config(algorithm="quest"), path="triton")
    assert "its own query" in collector.slowed_by["quest"]


def test_budgets_follow_the_number_of_drafts() -> None:
    case = Case(dtype=DTYPE, lens=(96,), queries=(1,))
    # Half of 95 tokens, the drafts and one more: 65 entries with 33 drafts, 50 with 3.
    config = make_config(algorithm="quest", sparsity_ratio=0.5, min_tokens=1)
    collector = make_collector(case, config.replace(num_speculative_tokens=33), path="triton")
    this = make_paged(case, torch.device("cpu"))
    collector.bind(this.k)
    assert collector.pages is not None
    for num_drafts in (33, 3):
        collector.pages.expect(num_drafts)
        collector.begin_draft(block_table=this.table, seq_lens=this.lens)
        kept = config.replace(num_speculative_tokens=num_drafts).kv_budget(95)
        assert int(collector.selected(0, 1)[1][0]) == (kept // PAGE_SIZE - 1) * PAGE_SIZE
