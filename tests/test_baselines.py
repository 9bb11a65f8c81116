"""The baselines against their definitions with loops, alone and in a running decoder."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, Final

import pytest
import slow_baselines
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_baselines import Reads
from tiny_decoding import DraftSpy, SlowDecoder, Turn, decode, slow_model, tiny_model
from tiny_models import ARCHITECTURES, tiny_prompt
from torch import Tensor

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.engine.kv_cache import CacheShape, KVCache
from vegas_runtime.engine.lane_state import PageBounds
from vegas_runtime.engine.model import prefill
from vegas_runtime.policies import KVSelection, SelectionInput, make_policy
from vegas_runtime.policies.snapkv import SnapKVPolicy

# One token; long enough that SnapKV's window leaves something to choose and pages compete.
PROMPTS: Final = [tiny_prompt(n, seed=n) for n in (1, 70, 50)]
NEW_TOKENS: Final = 8
BASE: Final = SpeculationConfig(num_speculative_tokens=4, sparsity_ratio=0.7, min_tokens=2)
# Ratios at which each baseline has something to choose in these texts.
SETTINGS: Final[list[dict[str, Any]]] = [
    {"algorithm": "quest"},
    {"algorithm": "quest", "scope": "kv_head"},
    {"algorithm": "spec_extend", "sparsity_ratio": 0.5},
    {"rows": "all", "granularity": "page", "scope": "kv_head", "sparsity_ratio": 0.5},
    {"algorithm": "sparse_spec", "sparsity_ratio": 0.4},
    {"algorithm": "snapkv"},
]


def setting_id(setting: dict[str, Any]) -> str:
    return "-".join(str(value) for value in setting.values())


# -- in a running decoder -------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS, ids=setting_id)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_drafts_are_those_of_the_definitions(
    architecture: str, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two lanes for three requests: the third starts beside one that is in full swing."""
    config = BASE.replace(**setting)
    spy = DraftSpy(monkeypatch)
    model = tiny_model(architecture)
    decoded = decode(
        model, PROMPTS, config, max_new_tokens=NEW_TOKENS, lanes=2, after_step=spy.after_step
    )
    slow = SlowDecoder(model=slow_model(architecture), config=config)
    for index, prompt in enumerate(PROMPTS):
        text, turns = slow.decode(prompt, NEW_TOKENS)
        assert decoded.outputs[index] == text
        assert spy.turns[index] == turns


def spied_turns(
    config: SpeculationConfig, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> dict[int, list[Turn]]:
    spy = DraftSpy(monkeypatch)
    decode(tiny_model("llama"), PROMPTS, config, after_step=spy.after_step, **options)
    return spy.turns


def test_the_first_draft_phase_is_dense_whatever_the_neighbours_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = BASE.replace(algorithm="sparse_spec", sparsity_ratio=0.1)
    turns = spied_turns(config, monkeypatch, max_new_tokens=[12, 30, 12], lanes=2)
    for own in turns.values():
        assert own[0][1] == 4
        # Else the dense phase never ended.
        assert min(count for _, count in own) < 4
    # The last request took a lane while another drafted sparsely.
    assert len(turns[1]) > len(turns[0])


def test_snapkv_chooses_once_per_request(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    choose = SnapKVPolicy.select

    def count(policy: SnapKVPolicy, handed: SelectionInput) -> KVSelection:
        asked.append(int(handed.prefix_lens[0]))
        return choose(policy, handed)

    monkeypatch.setattr(SnapKVPolicy, "select", count)
    model = tiny_model("llama")
    decode(model, PROMPTS, BASE.replace(algorithm="snapkv"), max_new_tokens=20, lanes=2)
    layers = len(model.shape.full_layers)
    assert asked == [0] * layers + [69] * layers + [49] * layers


@pytest.mark.parametrize("length", [1, 2, 20, 32, 33, 520, 600])
def test_a_prefill_keeps_the_queries_of_its_last_rows(length: int) -> None:
    """Whatever the chunks; the last token's row belongs to the first pass."""
    model, prompt = tiny_model("gemma3"), tiny_prompt(length)
    saved = prefill(model, prompt)
    if length == 1:
        assert saved.queries == {}
        return
    rows = min(length - 1, 31)
    assert {layer: q.shape for layer, q in saved.queries.items()} == dict.fromkeys(
        model.shape.full_layers, (4, rows, 16)
    )
    if length > 512:
        # A query depends on its own prefix only, so a shorter prompt's last row is among them.
        shorter = prefill(model, prompt[:513])
        place = rows - (length - 513) - 1
        if place >= 0:
            for layer, queries in shorter.queries.items():
                torch.testing.assert_close(
                    queries[:, -1], saved.queries[layer][:, place], rtol=1e-4, atol=1e-4
                )


# -- quest ----------------------------------------------------------------------------------------

SHAPE: Final = CacheShape(
    num_kv_heads=(2, 1, 2), head_dims=(4, 4, 4), sliding_windows=(None, 8, None)
)
LANES: Final = 3
PAGE: Final = 4
CAPACITY: Final = 64


class Lanes:
    """A cache written as the decoder writes it, with random keys, and the bounds beside it."""

    def __init__(self) -> None:
        self.cache = KVCache(
            SHAPE,
            num_lanes=LANES,
            capacity=CAPACITY,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self.bounds = PageBounds(self.cache, PAGE)
        self.lens: list[int] = []
        self._random = torch.Generator().manual_seed(0)

    def write(self, lane: int, start: int, stop: int) -> None:
        for keys in self.cache.keys:
            new = keys[lane, :, start:stop]
            new.copy_(torch.randn(new.shape, generator=self._random))

    def admit(self, length: int) -> None:
        lane = len(self.lens)
        self.bounds.forget(lane, [0])
        self.write(lane, 0, length)
        self.lens.append(length)

    def iterate(self, gamma: int, accepted: list[int]) -> None:
        """Draft with a check at each step, verify all rows, keep what stood."""
        for drafted in range(gamma):
            current = [length + drafted for length in self.lens]
            self.bounds.extend(current)
            self.check(current)
            for lane, position in enumerate(current):
                self.write(lane, position, position + 1)
        self.bounds.forget(0, self.lens)
        for lane, length in enumerate(self.lens):
            self.write(lane, length, length + gamma + 1)
            self.lens[lane] = length + 1 + min(accepted[lane], gamma)

    def retire(self, lane: int) -> None:
        last = len(self.lens) - 1
        if lane != last:
            self.cache.move(last, lane, self.lens[last])
            self.bounds.move(last, lane)
            self.lens[lane] = self.lens[last]
        self.lens.pop()

    def check(self, current: list[int]) -> None:
        """Every page that is full of cached tokens has the bounds of the keys in it."""
        for layer in SHAPE.full_layers:
            low, high = self.bounds.of_layer(layer, len(current), max(current) // PAGE)
            for lane, length in enumerate(current):
                for page in range(length // PAGE):
                    keys = self.cache.keys[layer][lane, :, page * PAGE : (page + 1) * PAGE]
                    assert torch.equal(low[lane, :, page], keys.min(dim=1).values)
                    assert torch.equal(high[lane, :, page], keys.max(dim=1).values)


ACTIONS: Final = st.one_of(
    st.tuples(st.just("admit"), st.integers(1, 20)),
    st.tuples(st.just("retire"), st.integers(0, LANES - 1)),
    st.tuples(
        st.just("iterate"),
        st.integers(1, 6),
        st.lists(st.integers(0, 6), min_size=LANES, max_size=LANES),
    ),
)


@settings(max_examples=200, deadline=None)
@given(actions=st.lists(ACTIONS, min_size=1, max_size=12))
def test_page_bounds_are_those_of_the_cached_keys_through_any_roll_back(
    actions: list[tuple[Any, ...]],
) -> None:
    lanes = Lanes()
    lanes.admit(9)
    for name, *values in actions:
        if name == "admit" and len(lanes.lens) < LANES:
            lanes.admit(*values)
        elif name == "retire" and values[0] < len(lanes.lens) > 1:
            lanes.retire(*values)
        elif name == "iterate" and max(lanes.lens) + 7 <= CAPACITY:
            lanes.iterate(*values)


def test_page_bounds_are_right_whenever_a_running_decoder_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lens: list[list[int]] = []
    num_checked = 0
    extend, of_layer = PageBounds.extend, PageBounds.of_layer

    def note(bounds: PageBounds, current: list[int]) -> None:
        lens.append(current)
        extend(bounds, current)

    def check(
        bounds: PageBounds, layer: int, num_lanes: int, num_pages: int
    ) -> tuple[Tensor, Tensor]:
        nonlocal num_checked
        low, high = of_layer(bounds, layer, num_lanes, num_pages)
        assert num_pages == max(lens[-1]) // 16
        for lane, current in enumerate(lens[-1]):
            for page in range(current // 16):
                keys = bounds.cache.keys[layer][lane, :, page * 16 : (page + 1) * 16]
                assert torch.equal(low[lane, :, page], keys.min(dim=1).values)
                assert torch.equal(high[lane, :, page], keys.max(dim=1).values)
                num_checked += 1
        return low, high

    monkeypatch.setattr(PageBounds, "extend", note)
    monkeypatch.setattr(PageBounds, "of_layer", check)
    decoded = decode(
        tiny_model("gpt_oss"),
        PROMPTS,
        BASE.replace(algorithm="quest", sparsity_ratio=0.4),
        max_new_tokens=40,
        lanes=2,
    )
    assert num_checked > 0
    # Roll-backs did happen.
    assert min(decoded.all_accepted) < 4


@pytest.mark.parametrize("scope", ["layer", "kv_head"])
@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.6, 0.9])
def test_quest_reads_the_pages_of_the_definition(scope: str, ratio: float) -> None:
    config = BASE.replace(algorithm="quest", scope=scope, sparsity_ratio=ratio)
    random = torch.Generator().manual_seed(1)
    lens = [5, 15, 16, 17, 150, 160]
    query = 3 * torch.randn(len(lens), 6, 8, generator=random)
    keys = torch.randn(len(lens), 2, 176, 8, generator=random)
    pages = keys.view(len(lens), 2, 11, 16, 8)
    current = torch.tensor(lens)
    selection = make_policy(config).select(
        SelectionInput(
            prefix_lens=current - 3,
            committed_lens=current - 1,
            current_lens=current,
            query=query,
            page_low=pages.amin(dim=3),
            page_high=pages.amax(dim=3),
        )
    )
    assert selection is not None
    for request, length in enumerate(lens):
        reads = slow_baselines.quest(config, query[request], keys[request, :, : length + 1])
        assert entries(selection, request, length + 1) == reads


# -- the others, on random attention --------------------------------------------------------------


def entries(selection: KVSelection, request: int, length: int) -> list[set[int]]:
    """What each list of a request reads of its first `length` positions, tail included."""
    tail = {*range(int(selection.tail_starts[request]), length)}
    lists = selection.positions[request].tolist()
    return [{position for position in own if position >= 0} | tail for own in lists]


def expected(reads: list[Reads], length: int) -> list[set[int]]:
    return [own.entries | {*range(own.tail_start, length)} for own in reads]


@cache
def random_weights(seed: int, heads: int, rows: int, prefix: int) -> Tensor:
    """Causal attention weights [H, S, N] of rows at prefix and up."""
    random = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(heads, rows, prefix + rows, generator=random)
    hidden = torch.arange(prefix + rows) > prefix + torch.arange(rows)[:, None]
    return logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)


PREFIXES: Final = (0, 1, 2, 15, 16, 40, 95, 130)


@pytest.mark.parametrize("accepted", [0, 2, 4])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
def test_sparse_spec_keeps_what_the_definition_keeps(ratio: float, accepted: int) -> None:
    config = BASE.replace(algorithm="sparse_spec", sparsity_ratio=ratio)
    prefix = torch.tensor(PREFIXES)
    blocks = [random_weights(length, 6, 5, length) for length in PREFIXES]
    scores = torch.zeros(len(PREFIXES), 2, max(PREFIXES) + 5)
    for request, block in enumerate(blocks):
        scores[request, :, : block.shape[-1]] = block.view(2, 3, 5, -1).mean(1).sum(1)
    committed = prefix + 1 + accepted
    selection = make_policy(config).select(
        SelectionInput(
            prefix_lens=prefix, committed_lens=committed, current_lens=committed, scores=scores
        )
    )
    assert selection is not None
    for request, (length, block) in enumerate(zip(PREFIXES, blocks, strict=True)):
        reads = slow_baselines.sparse_spec(config, block, 3, length, accepted)
        total = length + 1 + accepted
        assert entries(selection, request, total) == expected(reads, total)


@pytest.mark.parametrize("ratio", [0.2, 0.5, 1.0])
def test_spec_extend_keeps_the_pages_of_the_definition(ratio: float) -> None:
    config = BASE.replace(algorithm="spec_extend", sparsity_ratio=ratio)
    prefix = torch.tensor(PREFIXES)
    rows = [random_weights(length, 6, 1, length)[:, 0] for length in PREFIXES]
    scores = torch.zeros(len(PREFIXES), 1, max(PREFIXES) + 5)
    for request, row in enumerate(rows):
        scores[request, 0, : row.shape[-1]] = row.mean(dim=0)
    committed = prefix + 3
    selection = make_policy(config).select(
        SelectionInput(
            prefix_lens=prefix, committed_lens=committed, current_lens=committed, scores=scores
        )
    )
    assert selection is not None
    for request, (length, row) in enumerate(zip(PREFIXES, rows, strict=True)):
        reads = [slow_baselines.spec_extend(config, row, length)]
        assert entries(selection, request, length + 3) == expected(reads, length + 3)


class ScaledSnapKVPolicy(SnapKVPolicy):
    """As attention scales its logits."""

    scale_logits: ClassVar[bool] = True


@pytest.mark.parametrize(("policy", "scale"), [(SnapKVPolicy, 1.0), (ScaledSnapKVPolicy, 8**-0.5)])
@pytest.mark.parametrize("ratio", [0.2, 0.5, 1.0])
def test_snapkv_keeps_what_the_definition_keeps(
    policy: type[SnapKVPolicy], scale: float, ratio: float
) -> None:
    config = BASE.replace(algorithm="snapkv", sparsity_ratio=ratio)
    random = torch.Generator().manual_seed(2)
    capacity = max(PREFIXES) + 1
    queries = torch.randn(len(PREFIXES), 6, capacity, 8, generator=random)
    keys = torch.randn(len(PREFIXES), 2, capacity, 8, generator=random)
    last_rows = torch.zeros(len(PREFIXES), 6, 32, 8)
    for request, prefix in enumerate(PREFIXES):
        own = queries[request, :, : prefix + 1][:, -32:]
        last_rows[request, :, 32 - own.shape[1] :] = own
    prefix_lens = torch.tensor(PREFIXES)
    selection = policy(config).select(
        SelectionInput(
            prefix_lens=prefix_lens,
            committed_lens=prefix_lens + 1,
            current_lens=prefix_lens + 1,
            prompt_queries=last_rows,
            keys=keys,
        )
    )
    for request, prefix in enumerate(PREFIXES):
        length = prefix + 1
        products = queries[request, :, :length] @ keys[request, :, :length].repeat_interleave(
            3, dim=0
        ).transpose(-1, -2)
        reads = slow_baselines.snapkv(config, products, 3, scale)
        assert entries(selection, request, length) == expected(reads, length)
