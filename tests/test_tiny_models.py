from __future__ import annotations

import pytest
import torch
from tiny_models import ARCHITECTURES, SLIDING_WINDOW, make_tiny, tiny_prompt


def greedy(architecture: str, prompt: list[int], *, seed: int = 0) -> list[int]:
    ids = torch.tensor([prompt])
    output = make_tiny(architecture, seed=seed).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_is_varied_and_repeatable(architecture: str) -> None:
    prompt = tiny_prompt(3 * SLIDING_WINDOW)
    tokens = greedy(architecture, prompt)
    assert len(tokens) == 20
    assert len(set(tokens)) > 5
    assert tokens == greedy(architecture, prompt)
    assert tokens != greedy(architecture, prompt, seed=1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_far_context_changes_the_text(architecture: str) -> None:
    prompt = tiny_prompt(6 * SLIDING_WINDOW)
    other = tiny_prompt(2 * SLIDING_WINDOW, seed=1) + prompt[2 * SLIDING_WINDOW :]
    assert greedy(architecture, prompt) != greedy(architecture, other)


@pytest.mark.parametrize("architecture", ["gpt_oss", "gemma3"])
def test_sliding_and_full_layers_are_mixed(architecture: str) -> None:
    config = make_tiny(architecture).config
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert config.sliding_window == SLIDING_WINDOW


def test_building_a_model_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    make_tiny("llama", seed=7)
    assert torch.equal(before, torch.random.get_rng_state())
