"""On a real model: greedy text of every policy is that of transformers' `generate`, in float32.

In bfloat16 near-ties fall differently with the shape of a product, so equality of texts means
nothing there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Final

import pytest
import torch
from transformers import PreTrainedModel

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.engine.attention import register
from vegas_runtime.engine.loading import ModelSource, load_model
from vegas_runtime.engine.reference import ReferenceEngine
from vegas_runtime.metrics import accepted_per_iteration
from vegas_runtime.policies import POLICIES
from vegas_runtime.protocol import PromptBlock
from vegas_tune.workload import WorkloadSpec, build_workload

pytestmark = pytest.mark.model

SPEC: Final = WorkloadSpec(context_len=448, batch_size=4, num_blocks=1, max_new_tokens=48)
# The default method drafts whole texts; of the others 24 tokens of each show both fates of a draft
# often.
SHORT: Final = 24
CONFIG: Final = SpeculationConfig(num_speculative_tokens=5, sparsity_ratio=0.07, min_tokens=32)


def let_no_token_end_a_text(model: PreTrainedModel) -> None:
    """So that all tokens of every prompt are compared."""
    model.config.eos_token_id = None
    model.generation_config.eos_token_id = None


@pytest.fixture(scope="module")
def engine(smollm2_source: ModelSource) -> Iterator[ReferenceEngine]:
    loaded = load_model(
        smollm2_source, dtype="float32", device="cpu", attn_implementation=register()
    )
    let_no_token_end_a_text(loaded.model)
    opened = ReferenceEngine(loaded, max_num_speculative_tokens=5)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def block(engine: ReferenceEngine) -> PromptBlock:
    """Four prompts of equal length, made of the standard library."""
    (made,) = build_workload(SPEC, engine.tokenizer).blocks
    assert [len(prompt) for prompt in made.prompts] == [SPEC.context_len] * 4
    return made


@pytest.fixture(scope="module")
def plain_texts(smollm2_source: ModelSource, block: PromptBlock) -> list[list[int]]:
    """New tokens by transformers' own attention, cache and `generate`."""
    model = load_model(
        smollm2_source, dtype="float32", device="cpu", attn_implementation="sdpa"
    ).model
    let_no_token_end_a_text(model)
    ids = torch.tensor(block.prompts)
    output = model.generate(
        ids,
        # Explicit, because <|im_end|> in a prompt is also the padding token.
        attention_mask=torch.ones_like(ids),
        max_new_tokens=SPEC.max_new_tokens,
        do_sample=False,
    )
    texts: list[list[int]] = output[:, ids.shape[1] :].tolist()
    assert [len(text) for text in texts] == [SPEC.max_new_tokens] * 4
    return texts


@pytest.mark.parametrize("algorithm", POLICIES)
def test_greedy_text_is_that_of_generate(
    algorithm: str,
    engine: ReferenceEngine,
    block: PromptBlock,
    plain_texts: list[list[int]],
    record_property: Callable[[str, object], None],
) -> None:
    config = CONFIG.replace(algorithm=algorithm)
    num_tokens = SPEC.max_new_tokens if algorithm == "vegas" else SHORT
    engine.configure(config)
    engine.prepare(block)
    generated = engine.generate(block.prompts, max_new_tokens=num_tokens, sampling=block.sampling)
    assert [[*output] for output in generated.outputs] == [
        text[:num_tokens] for text in plain_texts
    ]
    counts = [
        count
        for step in generated.steps
        if step.kind == "decode"
        for count in step.num_accepted_tokens
    ]
    accepted = accepted_per_iteration(sum(counts), len(counts))
    record_property("accepted_per_iteration", accepted)
    # Shown by `pytest -rP`.
    sys.stdout.write(
        f"{algorithm}: {accepted:.2f} of {config.num_speculative_tokens} drafts accepted in "
        f"{len(counts)} iterations, {generated.elapsed_s:.0f} s\n"
    )
    if algorithm == "dense":
        assert set(counts) == {5}
    else:
        # Both happened, else equal texts would prove nothing.
        assert 0 < accepted < 5
        assert {0, 5} <= set(counts)
