from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import ARCHITECTURES, SLIDING_WINDOW, make_tiny, tiny_prompt

from vegas_runtime.engine.attention import register
from vegas_runtime.engine.model import DecoderModel, describe_model, prefill
from vegas_runtime.errors import ModelError


def describe(architecture: str, **overrides: Any) -> DecoderModel:
    return describe_model(make_tiny(architecture, attn_implementation=register(), **overrides))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cache_sizes_are_read_off_the_configuration(architecture: str) -> None:
    model = describe(architecture)
    shape = model.shape
    layers = 6 if architecture == "gemma3" else 4
    assert shape.num_kv_heads == (2,) * layers
    assert shape.head_dims == (16,) * layers
    windows = {
        "gpt_oss": (SLIDING_WINDOW, None) * 2,
        "gemma3": (SLIDING_WINDOW, SLIDING_WINDOW, None) * 2,
    }
    assert shape.sliding_windows == windows.get(architecture, (None,) * layers)
    assert model.max_positions == 2048
    assert model.eos_token_ids == frozenset()


def test_sizes_that_are_not_given_follow_from_the_others() -> None:
    shape = describe("llama", head_dim=None, num_key_value_heads=None).shape
    assert shape.num_kv_heads == (4,) * 4
    assert shape.head_dims == (16,) * 4


@pytest.mark.parametrize(("ends", "expected"), [(7, {7}), ([7, 9], {7, 9}), (None, set())])
def test_end_tokens_may_be_one_several_or_none(ends: Any, expected: set[int]) -> None:
    assert describe("llama", eos_token_id=ends, pad_token_id=0).eos_token_ids == expected


def test_generation_settings_override_the_end_token() -> None:
    tiny = make_tiny("llama", attn_implementation=register(), eos_token_id=7, pad_token_id=0)
    tiny.generation_config.eos_token_id = [3, 4]
    assert describe_model(tiny).eos_token_ids == {3, 4}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("chunked_attention", "layers of kind 'chunked_attention'"),
        ("sliding_attention", "every layer .* sliding window"),
    ],
)
def test_layers_it_cannot_draft_through_are_refused(kind: str, message: str) -> None:
    tiny = make_tiny("gemma3", attn_implementation=register())
    tiny.config.layer_types = [kind] * tiny.config.num_hidden_layers
    with pytest.raises(ModelError, match=message):
        describe_model(tiny)


@pytest.mark.parametrize(("length", "chunks"), [(1, []), (2, [1]), (513, [512]), (700, [512, 699])])
def test_prefill_caches_all_but_the_last_token(length: int, chunks: list[int]) -> None:
    model = describe("llama")
    prompt, done = tiny_prompt(length), list[int]()
    saved = prefill(model, prompt, done.append)
    assert done == chunks
    assert saved.prompt == tuple(prompt)
    assert {key.shape for key in saved.keys} == {(2, length - 1, 16)}
    assert {value.shape for value in saved.values} == {(2, length - 1, 16)}


def test_chunks_make_the_keys_of_one_pass() -> None:
    model = describe("gemma3")
    prompt = tiny_prompt(700)
    saved = prefill(model, prompt)
    oracle = make_tiny("gemma3")
    ids = torch.tensor([prompt[:-1]])
    expected = oracle(ids, attention_mask=torch.ones_like(ids), use_cache=True).past_key_values
    for layer in model.shape.full_layers:
        # Differently ordered float32 sums, carried through the layers; entries are of size 1-10.
        torch.testing.assert_close(
            saved.keys[layer], expected.layers[layer].keys[0], rtol=1e-4, atol=1e-4
        )
