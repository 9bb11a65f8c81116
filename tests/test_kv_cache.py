from __future__ import annotations

import pytest
import torch
from tiny_decoding import decode, plain_text, tiny_model, tiny_oracle
from tiny_models import ARCHITECTURES, tiny_prompt
from torch import Tensor

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.engine.decoding import Decoder
from vegas_runtime.engine.kv_cache import CacheShape, DraftCache, KVCache, SavedPrefill
from vegas_runtime.policies import KVSelection

WINDOW = 6
# Two layers a policy selects for, unlike each other, around one that slides.
SHAPE = CacheShape(
    num_kv_heads=(2, 2, 3), head_dims=(4, 4, 8), sliding_windows=(None, WINDOW, None)
)
# As before, with as many heads everywhere: one list per head needs that.
EVEN_SHAPE = CacheShape(
    num_kv_heads=(2, 2, 2), head_dims=(4, 4, 4), sliding_windows=(None, WINDOW, None)
)
CAPACITY = 40


def random_cache(shape: CacheShape = SHAPE, *, num_lanes: int = 3, seed: int = 0) -> KVCache:
    """A cache full of different numbers, so that no two entries can be mistaken."""
    cache = KVCache(
        shape,
        num_lanes=num_lanes,
        capacity=CAPACITY,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    random = torch.Generator().manual_seed(seed)
    for buffer in (*cache.keys, *cache.values):
        buffer.copy_(torch.randn(buffer.shape, generator=random))
    return cache


def new_tokens(
    shape: CacheShape, layer: int, batch: int, rows: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Keys and values [B, Hkv, S, D] as a layer hands them over."""
    random = torch.Generator().manual_seed(1000 * seed + layer)
    size = (batch, shape.num_kv_heads[layer], rows, shape.head_dims[layer])
    return torch.randn(size, generator=random), torch.randn(size, generator=random)


def copies(cache: KVCache) -> list[Tensor]:
    return [buffer.clone() for buffer in (*cache.keys, *cache.values)]


# -- KVCache --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restored_prefill_is_bit_for_bit_the_saved_one(dtype: torch.dtype) -> None:
    cache = KVCache(SHAPE, num_lanes=3, capacity=CAPACITY, dtype=dtype, device=torch.device("cpu"))
    saved = SavedPrefill(
        prompt=tuple(range(12)),
        keys=[new_tokens(SHAPE, layer, 1, 11, 1)[0][0].to(dtype) for layer in range(3)],
        values=[new_tokens(SHAPE, layer, 1, 11, 1)[1][0].to(dtype) for layer in range(3)],
        queries={},
    )
    before = copies(cache)
    cache.restore(1, saved)
    for layer in range(SHAPE.num_layers):
        assert torch.equal(cache.keys[layer][1, :, :11], saved.keys[layer])
        assert torch.equal(cache.values[layer][1, :, :11], saved.values[layer])
    for buffer, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(buffer[[0, 2]], old[[0, 2]])
        assert torch.equal(buffer[1, :, 11:], old[1, :, 11:])


def test_update_writes_each_lane_at_its_own_positions_and_nowhere_else() -> None:
    cache = random_cache(num_lanes=4)
    before = copies(cache)
    positions = torch.tensor([[3, 4, 5], [30, 31, 32]])
    cache.begin(positions, 1)
    for layer in range(SHAPE.num_layers):
        key, value = new_tokens(SHAPE, layer, 2, 3, 7)
        got_key, got_value = cache.update(key, value, layer)
        expected_key, expected_value = before[layer].clone(), before[3 + layer].clone()
        for place, lane in enumerate((1, 2)):
            expected_key[lane, :, positions[place]] = key[place]
            expected_value[lane, :, positions[place]] = value[place]
        assert torch.equal(cache.keys[layer], expected_key)
        assert torch.equal(cache.values[layer], expected_value)
        assert torch.equal(got_key, expected_key[1:3])
        assert torch.equal(got_value, expected_value[1:3])


def test_moving_a_lane_copies_its_first_tokens_only() -> None:
    cache = random_cache()
    before = copies(cache)
    cache.move(2, 0, 9)
    for buffer, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(buffer[0, :, :9], old[2, :, :9])
        assert torch.equal(buffer[0, :, 9:], old[0, :, 9:])
        assert torch.equal(buffer[1:], old[1:])


def test_layers_a_policy_selects_for_are_those_that_see_everything() -> None:
    assert SHAPE.full_layers == (0, 2)
    assert SHAPE.num_layers == 3


# -- DraftCache -----------------------------------------------------------------------------------


def selection(
    positions: list[list[list[list[int]]]] | list[list[list[int]]], tail_starts: list[int]
) -> KVSelection:
    return KVSelection(positions=torch.tensor(positions), tail_starts=torch.tensor(tail_starts))


PER_LAYER = (
    selection(
        [
            [[[0, 2, 5, -1]], [[1, 3, 8, 20]], [[0, -1, -1, -1]]],
            [[[1, 2, 7, -1]], [[0, 9, 10, 24]], [[0, -1, -1, -1]]],
        ],
        [8, 25, 1],
    ),
    [10, 28, 1],
)
PER_HEAD = (
    selection(
        [
            [[[0, 2, 5, -1], [1, 6, 7, -1]], [[1, 3, 8, 20], [4, 5, 6, 7]], [[0, -1, -1, -1]] * 2],
            [[[1, 2, 7, -1], [0, 1, 2, -1]], [[0, 9, 10, 24], [2, 4, 6, 8]], [[0, -1, -1, -1]] * 2],
        ],
        [8, 25, 1],
    ),
    [10, 28, 2],
)
# One list for all layers, as a method gives it that scores nothing; two lanes without sinks.
SHARED = (selection([[[0, 1, 2, 3]], [[-1] * 4], [[-1] * 4]], [20, 0, 0]), [30, 7, 1])


def expected_columns(
    chosen: KVSelection, lens: list[int], place: int, lane: int
) -> list[list[int]]:
    """Source positions per listed head: selected, then tail."""
    positions = chosen.positions[place] if chosen.positions.dim() == 4 else chosen.positions
    tail = [*range(int(chosen.tail_starts[lane]), lens[lane])]
    return [[p for p in head if p >= 0] + tail for head in positions[lane].tolist()]


def check_packed(
    packed: DraftCache,
    source: list[Tensor],
    chosen: KVSelection,
    lens: list[int],
    appended: list[list[tuple[Tensor, Tensor]]],
) -> None:
    """Compare every lane and head with an explicit gather from the source as it was."""
    shape = packed.shape
    for layer in range(shape.num_layers):
        for lane, length in enumerate(lens):
            for head in range(shape.num_kv_heads[layer]):
                if layer in shape.full_layers:
                    heads = expected_columns(chosen, lens, shape.full_layers.index(layer), lane)
                    columns = heads[head if len(heads) > 1 else 0]
                else:
                    start = max(length - WINDOW, 0)
                    columns = [*range(start, length)]
                    assert int(packed.window_starts[WINDOW][lane]) == start
                count = len(columns) + len(appended)
                kind = shape.sliding_windows[layer]
                assert int(packed.counts[kind][lane]) == count
                for buffers, old, which in (
                    (packed.keys, source[layer], 0),
                    (packed.values, source[shape.num_layers + layer], 1),
                ):
                    drafts = [step[layer][which][lane, head] for step in appended]
                    expected = torch.cat((old[lane, head, columns], *drafts))
                    assert torch.equal(buffers[layer][lane, head, :count], expected)


def draft(packed: DraftCache, lens: list[int], step: int) -> list[tuple[Tensor, Tensor]]:
    """One draft step through `begin` and `update`; returns what each layer wrote."""
    packed.begin(torch.tensor(lens)[:, None] + step)
    written = []
    for layer in range(packed.shape.num_layers):
        key, value = new_tokens(packed.shape, layer, len(lens), 1, 50 + step)
        got = packed.update(key, value, layer)
        assert torch.equal(got[0], packed.keys[layer][: len(lens)])
        assert torch.equal(got[1], packed.values[layer][: len(lens)])
        written.append((key, value))
    return written


@pytest.mark.parametrize(
    ("shape", "chosen", "lens"),
    [
        pytest.param(SHAPE, *PER_LAYER, id="per-layer"),
        pytest.param(EVEN_SHAPE, *PER_HEAD, id="per-head"),
        pytest.param(SHAPE, *SHARED, id="shared"),
    ],
)
@pytest.mark.parametrize("write_through", [False, True])
def test_a_draft_step_reads_selected_then_tail_then_drafts(
    shape: CacheShape, chosen: KVSelection, lens: list[int], write_through: bool
) -> None:
    source = random_cache(shape)
    before = copies(source)
    packed = DraftCache(source, width=24, max_drafts=3, write_through=write_through)
    packed.gather(chosen, torch.tensor(lens))
    packed.gather_windows(torch.tensor(lens))
    appended: list[list[tuple[Tensor, Tensor]]] = []
    check_packed(packed, before, chosen, lens, appended)
    for step in range(3):
        appended.append(draft(packed, lens, step))
        check_packed(packed, before, chosen, lens, appended)
    for layer in range(shape.num_layers):
        for lane, length in enumerate(lens):
            if write_through:
                for step, written in enumerate(appended):
                    for now, new in zip(
                        (source.keys[layer], source.values[layer]), written[layer], strict=True
                    ):
                        assert torch.equal(now[lane, :, length + step], new[lane, :, 0])
            for now, old in (
                (source.keys[layer], before[layer]),
                (source.values[layer], before[shape.num_layers + layer]),
            ):
                untouched = [*range(length), *range(length + 3 * write_through, CAPACITY)]
                assert torch.equal(now[lane, :, untouched], old[lane, :, untouched])


def test_a_later_selection_reads_drafts_that_were_written_through() -> None:
    chosen, lens = SHARED
    source = random_cache()
    packed = DraftCache(source, width=24, max_drafts=3, write_through=True)
    packed.gather(chosen, torch.tensor(lens))
    packed.gather_windows(torch.tensor(lens))
    draft(packed, lens, 0)
    grown = [length + 1 for length in lens]
    slid = KVSelection(positions=chosen.positions, tail_starts=torch.tensor([24, 0, 0]))
    packed.gather(slid, torch.tensor(grown))
    packed.gather_windows(torch.tensor(grown))
    check_packed(packed, copies(source), slid, grown, [])


def test_reuse_with_smaller_and_larger_selections_leaves_nothing_behind() -> None:
    source = random_cache()
    packed = DraftCache(source, width=30, max_drafts=3, write_through=False)
    narrow = selection([[[[0]], [[3]], [[0]]], [[[1]], [[2]], [[0]]]], [8, 4, 1])
    wide = selection(
        [[[[*range(20)]]] * 3, [[[*range(1, 21)]]] * 3],
        [25, 30, 21],
    )
    for chosen, lens in (
        PER_LAYER,
        (narrow, [9, 5, 1]),
        (wide, [28, 31, 21]),
        (narrow, [9, 5, 1]),
        SHARED,
    ):
        packed.gather(chosen, torch.tensor(lens))
        packed.gather_windows(torch.tensor(lens))
        appended = [draft(packed, lens, step) for step in range(3)]
        check_packed(packed, copies(source), chosen, lens, appended)


def test_fewer_requests_than_lanes_use_the_first_ones() -> None:
    source = random_cache()
    packed = DraftCache(source, width=24, max_drafts=3, write_through=False)
    chosen, lens = PER_LAYER
    packed.gather(chosen, torch.tensor(lens))
    packed.gather_windows(torch.tensor(lens))
    first = KVSelection(positions=chosen.positions[:, :1], tail_starts=chosen.tail_starts[:1])
    packed.gather(first, torch.tensor(lens[:1]))
    packed.gather_windows(torch.tensor(lens[:1]))
    appended = [draft(packed, lens[:1], step) for step in range(2)]
    check_packed(packed, copies(source), first, lens[:1], appended)


def test_lists_of_unequal_budget_are_a_broken_invariant() -> None:
    source = random_cache()
    packed = DraftCache(source, width=24, max_drafts=3, write_through=False)
    uneven = selection([[[[0, 1]]] * 3, [[[0, -1]]] * 3], [8, 8, 8])
    with pytest.raises(AssertionError, match="differ in budget"):
        packed.gather(uneven, torch.tensor([9, 9, 9]))


# -- roll-back, in a running decoder --------------------------------------------------------------

PROMPTS = [tiny_prompt(length, seed=length) for length in (50, 33, 70)]
NEW_TOKENS = 20
MIXED = SpeculationConfig(num_speculative_tokens=4, sparsity_ratio=0.5, min_tokens=4)
STREAMING = MIXED.replace(algorithm="streaming_llm")


class Snapshots:
    """Each finished request's committed keys and values."""

    def __init__(self) -> None:
        self.by_request: dict[int, list[Tensor]] = {}

    def __call__(self, decoder: Decoder) -> None:
        for lane, request in enumerate(decoder.requests):
            if request.is_finished:
                committed = int(decoder._committed[lane])
                self.by_request[request.index] = [
                    buffer[lane, :, :committed].clone()
                    for buffer in (*decoder.cache.keys, *decoder.cache.values)
                ]


@pytest.mark.parametrize(
    "config",
    [MIXED, STREAMING, MIXED.replace(algorithm="quest"), MIXED.replace(algorithm="sparse_spec")],
    ids=lambda config: str(config.algorithm),
)
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "gemma3"])
def test_rejected_drafts_leave_the_cache_of_plain_decoding(
    architecture: str, config: SpeculationConfig
) -> None:
    plain, speculative = Snapshots(), Snapshots()
    model = tiny_model(architecture)
    plain_config = config.replace(algorithm="dense", num_speculative_tokens=0)
    expected = decode(
        model, PROMPTS, plain_config, max_new_tokens=NEW_TOKENS, lanes=2, after_step=plain
    )
    decoded = decode(
        model, PROMPTS, config, max_new_tokens=NEW_TOKENS, lanes=2, after_step=speculative
    )
    assert decoded.outputs == expected.outputs
    assert min(decoded.all_accepted) < config.num_speculative_tokens
    assert max(decoded.all_accepted) > 0
    for index, prompt in enumerate(PROMPTS):
        count = len(prompt) + NEW_TOKENS - 1
        for own, other in zip(speculative.by_request[index], plain.by_request[index], strict=True):
            assert own.shape[1] >= count
            # Not bit for bit: a product over five rows is summed in another order than over one.
            # Float32 rounding through 4 to 6 layers; entries are of size 1 to 10.
            torch.testing.assert_close(own[:, :count], other[:, :count], rtol=1e-4, atol=1e-4)


def poison(decoder: Decoder) -> None:
    """Overwrite every entry that no request has committed, in lanes and packed copies.

    With numbers that are finite, as the cache promises, and large enough to show if read.
    """
    for lane in range(decoder.cache.keys[0].shape[0]):
        in_use = lane < len(decoder.requests)
        committed = int(decoder._committed[lane]) if in_use else 0
        for buffer in (*decoder.cache.keys, *decoder.cache.values):
            buffer[lane, :, committed:] = 1e30
    packed = decoder.selector.packed
    if packed is not None:
        with torch.inference_mode():
            for buffer in (*packed.keys, *packed.values):
                buffer.fill_(-1e30)


@pytest.mark.parametrize(
    "config",
    [
        MIXED,
        STREAMING,
        MIXED.replace(algorithm="dense"),
        MIXED.replace(rows="accepted_only", metric="logit", scope="kv_head"),
        MIXED.replace(algorithm="quest", sparsity_ratio=0.7),
        MIXED.replace(algorithm="spec_extend"),
        MIXED.replace(algorithm="sparse_spec"),
        MIXED.replace(algorithm="snapkv", sparsity_ratio=0.7),
    ],
    ids=lambda config: f"{config.algorithm}-{config.metric}",
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_lies_beyond_the_committed_length_is_never_read(
    architecture: str, config: SpeculationConfig
) -> None:
    model = tiny_model(architecture)
    clean, poisoned = Snapshots(), Snapshots()

    def poison_and_keep(decoder: Decoder) -> None:
        poison(decoder)
        poisoned(decoder)

    kept = decode(model, PROMPTS, config, max_new_tokens=12, lanes=2, after_step=clean)
    spoilt = decode(model, PROMPTS, config, max_new_tokens=12, lanes=2, after_step=poison_and_keep)
    assert spoilt.outputs == kept.outputs
    assert spoilt.all_accepted == kept.all_accepted
    for index in range(len(PROMPTS)):
        for own, other in zip(poisoned.by_request[index], clean.by_request[index], strict=True):
            assert torch.equal(own, other)


def test_finished_requests_leave_and_the_others_keep_their_text() -> None:
    model, oracle = tiny_model("llama"), tiny_oracle("llama")
    prompts = [tiny_prompt(20 + 3 * i, seed=i) for i in range(7)]
    limits = [3, 14, 1, 9, 14, 2, 6]
    owners: list[tuple[int, ...]] = []

    def watch(decoder: Decoder) -> None:
        owners.append(tuple(request.index for request in decoder.requests))
        for lane, request in enumerate(decoder.requests):
            text = [*request.saved.prompt, *request.output]
            # The lane's own text, up to what the output limit cut off.
            known = min(len(text), int(decoder._committed[lane]) + 1)
            assert decoder._tokens[lane, :known].tolist() == text[:known]

    decoded = decode(model, prompts, MIXED, max_new_tokens=limits, lanes=3, after_step=watch)
    assert decoded.outputs == [
        plain_text(oracle, prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)
    ]
    # A request changed its lane on the way, else nothing was moved.
    lanes_of = {
        index: {order.index(index) for order in owners if index in order} for index in range(7)
    }
    assert any(len(lanes) > 1 for lanes in lanes_of.values())
