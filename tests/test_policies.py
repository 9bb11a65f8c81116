from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from vegas_runtime.config import SWITCHES, Rows, Scope, SpeculationConfig
from vegas_runtime.errors import ConfigError
from vegas_runtime.policies import (
    POLICIES,
    Collection,
    KVSelection,
    KVSelectionPolicy,
    SelectionInput,
    make_policy,
)
from vegas_runtime.policies.streaming_llm import KV_BLOCK_SIZE
from vegas_runtime.policies.topk import PAGE_SIZE

NUM_LAYERS: Final = 3
NUM_KV_HEADS: Final = 2
GROUP: Final = 2
HEAD_DIM: Final = 8
# The switches a policy has; it refuses the others.
OWN_SWITCHES: Final = {"vegas": {*SWITCHES}, "quest": {"scope"}}

# Every policy; those with switches also with each switch set, and all of them together.
VARIANTS: Final = [
    *({"algorithm": name} for name in POLICIES),
    *(
        {"algorithm": "vegas", switch: value}
        for switch, values in SWITCHES.items()
        for value in values[1:]
    ),
    {"algorithm": "vegas", "rows": "last_accepted", "metric": "logit", "scope": "kv_head"},
    {"algorithm": "vegas", "rows": "all", "scope": "kv_head", "granularity": "page"},
    {"algorithm": "quest", "scope": "kv_head"},
]
BUDGETS: Final = [
    {"num_speculative_tokens": 4, "sparsity_ratio": 0.1, "min_tokens": 1},
    {"num_speculative_tokens": 4, "sparsity_ratio": 0.25, "min_tokens": 32},
    {"num_speculative_tokens": 1, "sparsity_ratio": 0.5, "min_tokens": 8},
    {"num_speculative_tokens": 7, "sparsity_ratio": 1.0, "min_tokens": 1},
]
# Committed before the verify pass, per request: empty, one token, below any floor, long, and
# lengths around a block's edge.
PREFIXES: Final = (0, 1, 7, 47, 48, 49, 300)


def variant_id(value: dict[str, Any]) -> str:
    return "-".join(str(part) for part in value.values())


@pytest.fixture(params=VARIANTS, ids=variant_id)
def variant(request: pytest.FixtureRequest) -> dict[str, Any]:
    value: dict[str, Any] = request.param
    return value


@pytest.fixture(params=BUDGETS, ids=variant_id)
def policy(request: pytest.FixtureRequest, variant: dict[str, Any]) -> KVSelectionPolicy:
    return make_policy(SpeculationConfig(**{**request.param, **variant}))


def given_for(
    policy: KVSelectionPolicy,
    prefixes: tuple[int, ...] = PREFIXES,
    *,
    accepted: int = 1,
    drafted: int = 0,
    seed: int = 0,
) -> SelectionInput:
    """What an engine hands to this policy: nothing that it did not declare."""
    needs = policy.needs
    prefix_lens = torch.tensor(prefixes)
    committed = prefix_lens + 1 + min(accepted, policy.config.num_speculative_tokens)
    random = torch.Generator().manual_seed(seed)
    batch, capacity = (NUM_LAYERS, len(prefixes)), max(prefixes) + 16
    heads, groups = NUM_KV_HEADS, NUM_KV_HEADS * GROUP
    handed: dict[str, Tensor] = {}
    if needs.collection is not None:
        scored = heads if needs.collection.scope == "kv_head" else 1
        handed["scores"] = torch.rand(*batch, scored, capacity, generator=random)
    if needs.prompt_rows:
        rows = (*batch, groups, needs.prompt_rows, HEAD_DIM)
        handed["prompt_queries"] = torch.randn(rows, generator=random)
        handed["keys"] = torch.randn(*batch, heads, capacity, HEAD_DIM, generator=random)
    if needs.page_size:
        pages = (*batch, heads, capacity // needs.page_size, HEAD_DIM)
        handed["page_low"] = torch.randn(pages, generator=random)
        handed["page_high"] = handed["page_low"] + torch.rand(pages, generator=random)
    if needs.query:
        handed["query"] = torch.randn(*batch, groups, HEAD_DIM, generator=random)
    return SelectionInput(
        prefix_lens=prefix_lens,
        committed_lens=committed,
        current_lens=committed + drafted,
        **handed,
    )


def handed_tensors(given: SelectionInput) -> dict[str, Tensor]:
    """Everything with a layer dimension that was handed over."""
    fields = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    return {
        name: value
        for name, value in fields.items()
        if value is not None and not name.endswith("_lens")
    }


def lists(selection: KVSelection) -> list[list[int]]:
    """Every request's, layer's and head's positions without padding, in order."""
    rows = selection.positions.reshape(-1, selection.positions.shape[-1]).tolist()
    return [[position for position in row if position >= 0] for row in rows]


def by_request(selection: KVSelection, request: int) -> list[list[int]]:
    """One request's lists, of every layer and head."""
    return lists(
        KVSelection(
            positions=selection.positions.select(-3, request),
            tail_starts=selection.tail_starts[request],
        )
    )


# -- the contract, over every entry of POLICIES ---------------------------------------------------


@pytest.mark.parametrize("drafted", [0, 1, 3])
def test_positions_ascend_below_the_tail_and_padding_comes_last(
    policy: KVSelectionPolicy, drafted: int
) -> None:
    given = given_for(policy, drafted=drafted)
    selection = policy.select(given)
    if selection is None:
        return
    assert selection.positions.dtype == torch.int64
    assert selection.tail_starts.shape == (len(PREFIXES),)
    assert selection.positions.shape[-3] == len(PREFIXES)
    for request, tail_start in enumerate(selection.tail_starts.tolist()):
        for positions in by_request(selection, request):
            assert positions == sorted(set(positions))
            assert all(0 <= position < tail_start for position in positions)
    padding = selection.positions < 0
    assert bool((selection.positions[padding] == -1).all())
    # Once padding begins nothing follows.
    assert bool((padding.int().diff(dim=-1) >= 0).all())


@pytest.mark.parametrize("drafted", [0, 1, 3])
def test_the_newest_tokens_are_always_attended(policy: KVSelectionPolicy, drafted: int) -> None:
    given = given_for(policy, accepted=3, drafted=drafted)
    selection = policy.select(given)
    if selection is None:
        return
    assert bool((selection.tail_starts <= given.current_lens).all())
    if policy.needs.collection is not None or policy.needs.prompt_rows:
        # What no pass has scored lies behind row 0.
        assert bool((selection.tail_starts <= given.prefix_lens + 1).all())


def streaming_attended(config: SpeculationConfig, current_len: int) -> set[int]:
    """First block, and the newest blocks of a text with the query in it: by listing blocks."""
    tokens = range(current_len + 1)
    blocks = [tokens[i : i + KV_BLOCK_SIZE] for i in range(0, len(tokens), KV_BLOCK_SIZE)]
    asked = max(config.sparsity_ratio * len(tokens), config.min_tokens)
    newest = blocks[-math.ceil(asked / KV_BLOCK_SIZE) :]
    return {*blocks[0], *itertools.chain.from_iterable(newest)} - {current_len}


def shared_budget(config: SpeculationConfig, prefix: int) -> int:
    """B = ceil(rho * (L + gamma + 1)), at least the floor, at most all candidates 0..L."""
    asked = math.ceil(config.sparsity_ratio * (prefix + 1 + config.num_speculative_tokens))
    return min(max(asked, config.min_tokens), prefix + 1)


def check_vegas_budget(
    config: SpeculationConfig, given: SelectionInput, selection: KVSelection, request: int
) -> None:
    """B entries beside the tail, which starts behind row 0; or whole pages."""
    if config.granularity == "page":
        check_page_budget(config, given, selection, request)
        return
    prefix = int(given.prefix_lens[request])
    budget = shared_budget(config, prefix)
    assert {len(positions) for positions in by_request(selection, request)} == {budget}
    assert int(selection.tail_starts[request]) == prefix + 1


def check_streaming_budget(
    config: SpeculationConfig, given: SelectionInput, selection: KVSelection, request: int
) -> None:
    """The sink block, and the newest ceil(max(rho * n, floor) / 16) blocks."""
    current = int(given.current_lens[request])
    (sinks,) = by_request(selection, request)
    tail = range(int(selection.tail_starts[request]), current)
    assert {*sinks, *tail} == streaming_attended(config, current)


def check_quest_budget(
    config: SpeculationConfig, given: SelectionInput, selection: KVSelection, request: int
) -> None:
    """floor(B / 16) whole pages, the query's own among them; everything if it fits."""
    current = int(given.current_lens[request])
    budget = shared_budget(config, current)
    num_pages = current // KV_BLOCK_SIZE + 1
    if budget <= current:
        num_pages = min(max(budget // KV_BLOCK_SIZE, 1), num_pages)
    for positions in by_request(selection, request):
        read = {*positions, *range(int(selection.tail_starts[request]), current + 1)}
        pages = {position // KV_BLOCK_SIZE for position in read}
        assert len(pages) == num_pages
        assert current // KV_BLOCK_SIZE in pages
        assert read == {j for j in range(current + 1) if j // KV_BLOCK_SIZE in pages}
        assert len(read) <= max(budget, KV_BLOCK_SIZE)


def check_page_budget(
    config: SpeculationConfig, given: SelectionInput, selection: KVSelection, request: int
) -> None:
    """floor(B / 16) of the full pages; the page that the tail starts in is read whole."""
    prefix = int(given.prefix_lens[request])
    full = (prefix + 1) // KV_BLOCK_SIZE
    count = min(shared_budget(config, prefix) // KV_BLOCK_SIZE, full)
    assert int(selection.tail_starts[request]) == full * KV_BLOCK_SIZE
    for positions in by_request(selection, request):
        pages = {position // KV_BLOCK_SIZE for position in positions}
        assert len(pages) == count
        assert len(positions) == count * KV_BLOCK_SIZE


def check_sparse_spec_budget(
    config: SpeculationConfig, given: SelectionInput, selection: KVSelection, request: int
) -> None:
    """B = max(floor, ceil(rho * L')) in all at the first step, the newest n + 1 among them."""
    committed = int(given.committed_lens[request])
    recent = min(committed - int(given.prefix_lens[request]) + 1, committed)
    budget = max(config.min_tokens, math.ceil(config.sparsity_ratio * committed))
    assert int(selection.tail_starts[request]) == committed - recent
    for positions in by_request(selection, request):
        assert len(positions) + recent == min(max(budget, recent), committed)


def check_snapkv_budget(
    config: SpeculationConfig, given: SelectionInput, selection: KVSelection, request: int
) -> None:
    """B of the prompt's keys, its last 32 among them."""
    prefix = int(given.prefix_lens[request])
    budget = shared_budget(config, prefix)
    tail = prefix + 1 - int(selection.tail_starts[request])
    assert tail == min(budget, 32)
    assert {len(positions) + tail for positions in by_request(selection, request)} == {budget}


BudgetRule = Callable[[SpeculationConfig, SelectionInput, KVSelection, int], None]

BUDGET_RULES: Final[dict[str, BudgetRule]] = {
    "vegas": check_vegas_budget,
    "streaming_llm": check_streaming_budget,
    "quest": check_quest_budget,
    "spec_extend": check_page_budget,
    "sparse_spec": check_sparse_spec_budget,
    "snapkv": check_snapkv_budget,
}


@pytest.mark.parametrize("drafted", [0, 1, 3])
def test_budget_follows_the_documented_rule(policy: KVSelectionPolicy, drafted: int) -> None:
    given = given_for(policy, drafted=drafted)
    selection = policy.select(given)
    if policy.name == "dense":
        assert selection is None
        return
    assert selection is not None
    for request in range(len(PREFIXES)):
        BUDGET_RULES[policy.name](policy.config, given, selection, request)


@pytest.mark.parametrize("current_len", [1, 15, 16, 17, 100, 1599])
def test_short_contexts_and_a_full_ratio_attend_to_everything(
    variant: dict[str, Any], current_len: int
) -> None:
    for knobs in ({"sparsity_ratio": 1.0}, {"sparsity_ratio": 0.01, "min_tokens": 2000}):
        config = SpeculationConfig(**{"num_speculative_tokens": 4, **knobs, **variant})
        policy = make_policy(config)
        selection = policy.select(given_for(policy, (current_len - 1,), accepted=0))
        if selection is None:
            continue
        for positions in by_request(selection, 0):
            tail = range(int(selection.tail_starts[0]), current_len)
            assert [*positions, *tail] == [*range(current_len)]


def test_equal_input_gives_equal_lists(policy: KVSelectionPolicy) -> None:
    first, second = (policy.select(given_for(policy)) for _ in range(2))
    again = make_policy(policy.config).select(given_for(policy))
    assert same(first, second)
    assert same(first, again)


def same(one: KVSelection | None, other: KVSelection | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one.tail_starts, other.tail_starts) and torch.equal(
        one.positions, other.positions
    )


def test_a_request_gets_the_same_lists_alone_and_in_a_batch(policy: KVSelectionPolicy) -> None:
    together = given_for(policy)
    selection = policy.select(together)
    if selection is None:
        return
    for request in range(len(PREFIXES)):
        own = slice(request, request + 1)
        alone = SelectionInput(
            prefix_lens=together.prefix_lens[own],
            committed_lens=together.committed_lens[own],
            current_lens=together.current_lens[own],
            **{name: value[:, own] for name, value in handed_tensors(together).items()},
        )
        single = policy.select(alone)
        assert single is not None
        assert by_request(single, 0) == by_request(selection, request)
        assert single.tail_starts.tolist() == selection.tail_starts[own].tolist()


def test_layers_together_and_one_by_one_give_the_same_lists(policy: KVSelectionPolicy) -> None:
    together = given_for(policy)
    selection = policy.select(together)
    if selection is None or not handed_tensors(together):
        return
    for layer in range(NUM_LAYERS):
        alone = SelectionInput(
            prefix_lens=together.prefix_lens,
            committed_lens=together.committed_lens,
            current_lens=together.current_lens,
            **{name: value[layer] for name, value in handed_tensors(together).items()},
        )
        single = policy.select(alone)
        assert single is not None
        assert torch.equal(single.positions, selection.positions[layer])


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_what_is_undefined_is_not_looked_at(policy: KVSelectionPolicy, garbage: float) -> None:
    given = given_for(policy)
    before = policy.select(given)
    for request, prefix in enumerate(PREFIXES):
        full_pages = int(given.current_lens[request]) // KV_BLOCK_SIZE
        for name, value in handed_tensors(given).items():
            if name in {"scores", "keys"}:
                value[:, request, :, prefix + 1 :] = garbage
            elif name == "prompt_queries":
                value[:, request, :, : max(value.shape[-2] - prefix - 1, 0)] = garbage
            elif name in {"page_low", "page_high"}:
                value[:, request, :, full_pages:] = garbage
    assert same(policy.select(given), before)


def test_input_is_left_as_it_was(policy: KVSelectionPolicy) -> None:
    given, reference = given_for(policy), given_for(policy)
    policy.select(given)
    for name in ("prefix_lens", "committed_lens", "current_lens", *handed_tensors(given)):
        assert torch.equal(getattr(given, name), getattr(reference, name))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("switch", "value"), [(s, v) for s, values in SWITCHES.items() for v in values[1:]]
)
def test_a_switch_is_obeyed_or_refused(name: str, switch: str, value: str) -> None:
    plain = SpeculationConfig(algorithm=name, num_speculative_tokens=4, sparsity_ratio=0.1)
    config = plain.replace(**{switch: value})
    if switch not in OWN_SWITCHES.get(name, ()):
        with pytest.raises(ConfigError, match=f"`{switch}` is '{value}'"):
            make_policy(config)
    elif name == "quest":
        policy = make_policy(config)
        selection = policy.select(given_for(policy))
        assert selection is not None
        assert selection.positions.shape[-2] == NUM_KV_HEADS
    elif switch == "granularity":
        policy = make_policy(config)
        selection = policy.select(given_for(policy))
        assert selection is not None
        assert (selection.tail_starts % PAGE_SIZE == 0).all()
    else:
        collection = make_policy(config).needs.collection
        assert getattr(collection, switch) == value


def test_every_policy_is_listed_by_its_own_name() -> None:
    assert all(policy.name == name for name, policy in POLICIES.items())
    assert {*BUDGET_RULES, "dense"} == set(POLICIES)


@pytest.mark.parametrize(("name", "hint"), [("vega", "Did you mean 'vegas'?"), ("xyz", "")])
def test_an_unknown_policy_is_refused_by_name(name: str, hint: str) -> None:
    config = SpeculationConfig(algorithm=name, num_speculative_tokens=4, sparsity_ratio=0.1)
    with pytest.raises(ConfigError, match=f"`algorithm` is '{name}'; known are dense") as caught:
        make_policy(config)
    assert caught.value.hint == hint


# -- vegas ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["layer", "kv_head"])
def test_vegas_keeps_the_set_of_largest_total_score(scope: Scope) -> None:
    policy = make_policy(
        SpeculationConfig(num_speculative_tokens=2, sparsity_ratio=0.4, min_tokens=1, scope=scope)
    )
    given = given_for(policy, (8, 5), seed=3)
    selection = policy.select(given)
    assert selection is not None
    assert given.scores is not None
    for request, prefix in enumerate((8, 5)):
        rows = given.scores[:, request].reshape(-1, given.scores.shape[-1]).tolist()
        for scores, chosen in zip(rows, by_request(selection, request), strict=True):
            every = itertools.combinations(range(prefix + 1), len(chosen))
            best = max(every, key=lambda kept: sum(scores[j] for j in kept))
            assert chosen == [*best]


def test_vegas_breaks_ties_towards_the_lowest_position() -> None:
    policy = make_policy(
        SpeculationConfig(num_speculative_tokens=3, sparsity_ratio=0.25, min_tokens=1)
    )
    scores = torch.ones(1, 1, 1, 12)
    scores[..., 9] = 2
    lens = torch.tensor([11])
    selection = policy.select(
        SelectionInput(
            prefix_lens=lens, committed_lens=lens + 1, current_lens=lens + 1, scores=scores
        )
    )
    assert selection is not None
    assert selection.positions.flatten().tolist() == [0, 1, 2, 9]


@pytest.mark.parametrize(
    ("rows", "of_eight", "of_one"),
    [
        ("two", [0, 7], [0]),
        ("first_middle_last", [0, 3, 7], [0]),
        ("all", [*range(8)], [0]),
        # Known only after acceptance, so every row is kept until then.
        ("last_accepted", [*range(8)], [0]),
        ("accepted_only", [*range(8)], [0]),
    ],
)
def test_rows_read_off_a_verify_block(rows: Rows, of_eight: list[int], of_one: list[int]) -> None:
    collection = Collection(rows=rows)
    assert collection.row_indices(8) == of_eight
    assert collection.row_indices(1) == of_one


# -- streaming_llm --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("current_len", "min_tokens", "sinks", "tail_start"),
    [
        # 100 tokens with the query: 7 blocks, the last one holding 4; 10 % of them is 1 block.
        (99, 1, 16, 96),
        (99, 32, 16, 80),
        (95, 1, 16, 80),
        (96, 1, 16, 96),
        (31, 17, 0, 0),
        (32, 17, 16, 16),
        (15, 1, 0, 0),
        (16, 1, 16, 16),
    ],
)
def test_streaming_window_is_block_granular_and_counts_the_query(
    current_len: int, min_tokens: int, sinks: int, tail_start: int
) -> None:
    policy = make_policy(
        SpeculationConfig(
            algorithm="streaming_llm",
            num_speculative_tokens=4,
            sparsity_ratio=0.1,
            min_tokens=min_tokens,
        )
    )
    selection = policy.select(given_for(policy, (current_len - 1,), accepted=0))
    assert selection is not None
    assert lists(selection) == [[*range(sinks)]]
    assert selection.tail_starts.tolist() == [tail_start]


def test_streaming_window_slides_while_drafting() -> None:
    policy = make_policy(
        SpeculationConfig(
            algorithm="streaming_llm", num_speculative_tokens=4, sparsity_ratio=0.1, min_tokens=1
        )
    )
    assert policy.needs.per_draft_step
    starts = []
    for drafted in range(4):
        selection = policy.select(given_for(policy, (92,), accepted=1, drafted=drafted))
        assert selection is not None
        starts += selection.tail_starts.tolist()
    assert starts == [80, 80, 96, 96]
