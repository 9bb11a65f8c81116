"""The draft loop's bookkeeping, kernel by kernel; whole engines are in `test_vllm_worker`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from script_runs import TESTS, compiled_kernels
from torch import Tensor

pytest.importorskip("triton", reason="the vLLM plugin's kernels are written in Triton")

from vegas_runtime.vllm_plugin.draft_steps import DraftSteps

pytestmark = pytest.mark.vllm

BLOCK_SIZE = 4
VOCABULARY = 10


@dataclass
class Case:
    """Five requests, and a batch of three of them in another order."""

    request_ids: Tensor = field(default_factory=lambda: torch.tensor([3, 0, 4]))
    num_sampled: Tensor = field(default_factory=lambda: torch.tensor([2, 0, 1], dtype=torch.int32))
    num_computed: Tensor = field(
        default_factory=lambda: torch.tensor([5, 0, 0, 6, 11], dtype=torch.int32)
    )
    num_blocks: Tensor = field(
        default_factory=lambda: torch.tensor([2, 0, 0, 4, 4], dtype=torch.int32)
    )
    last_sampled: Tensor = field(default_factory=lambda: torch.tensor([[1], [2], [3], [4], [5]]))
    max_len: int = 13

    def __post_init__(self) -> None:
        self.table = torch.arange(1, 13, dtype=torch.int32).view(3, 4)
        self.steps = DraftSteps(
            max_requests=6, max_drafts=3, vocab_size=VOCABULARY, device=torch.device("cpu")
        )
        self.counts = torch.zeros(5, VOCABULARY, dtype=torch.int32)

    def begin(self, padded: int = 3) -> None:
        self.steps.begin(
            request_ids=self.request_ids,
            num_sampled=self.num_sampled,
            num_computed=self.num_computed,
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            max_len=self.max_len,
            padded=padded,
        )

    def advance(self, batch: int = 3) -> None:
        table = torch.zeros(batch, 4, dtype=torch.int32)
        table[:3] = self.table
        self.steps.advance(
            batch, last_sampled=self.last_sampled, block_table=table, block_size=BLOCK_SIZE
        )

    def record(self, tokens: list[int]) -> None:
        self.steps.record(torch.tensor(tokens), output_counts=self.counts)


def test_first_step_feeds_the_last_sampled_token_behind_the_committed_ones() -> None:
    case = Case()
    case.begin()
    case.advance()
    steps = case.steps
    assert steps.input_ids[:3].tolist() == [4, 0, 5]
    assert steps.positions[:3].tolist() == [6, 0, 11]
    assert steps.seq_lens[:3].tolist() == [7, 0, 12]
    # Position 6 lies in the row's second block (2), 11 in its third (11).
    assert steps.slots[:3].tolist() == [2 * BLOCK_SIZE + 2, -1, 11 * BLOCK_SIZE + 3]


def test_later_steps_feed_the_draft_before() -> None:
    case = Case()
    case.begin()
    case.advance()
    case.record([7, 9, 8])
    case.advance()
    assert case.steps.input_ids[:3].tolist() == [7, 0, 8]
    assert case.steps.positions[:3].tolist() == [7, 0, 12]
    assert case.steps.drafts[:3, 0].tolist() == [7, 9, 8]


def test_a_request_whose_prompt_is_not_complete_drafts_nothing() -> None:
    case = Case()
    case.begin()
    assert case.steps.active[:3].tolist() == [3, -1, 4]


def test_padding_rows_are_idle_whatever_an_earlier_batch_left_there() -> None:
    case = Case()
    case.steps.active.fill_(2)
    case.begin(padded=6)
    case.advance(batch=6)
    assert case.steps.active.tolist() == [3, -1, 4, -1, -1, -1]
    assert case.steps.seq_lens[3:].tolist() == [0, 0, 0]
    assert case.steps.slots[3:].tolist() == [-1, -1, -1]


@pytest.mark.parametrize("reason", ["context", "blocks"])
def test_nothing_is_written_beyond_the_context_or_the_blocks_a_request_owns(reason: str) -> None:
    case = Case(max_len=12) if reason == "context" else Case()
    if reason == "blocks":
        case.num_blocks[4] = 3
    case.begin()
    case.advance()
    assert case.steps.slots[2] == 11 * BLOCK_SIZE + 3
    case.record([1, 1, 1])
    case.advance()
    # The row stays at its last position, so that its distribution is finite, and writes nothing.
    assert case.steps.positions[2] == 11
    assert case.steps.seq_lens[2] == 12
    assert case.steps.slots[2] == -1
    assert case.steps.slots[0] == 2 * BLOCK_SIZE + 3


def test_an_index_that_a_nan_produced_never_reaches_the_embedding() -> None:
    case = Case()
    case.begin()
    case.advance()
    case.record([-3, 0, 1 << 40])
    case.advance()
    assert case.steps.input_ids[:3].tolist() == [0, 0, VOCABULARY - 1]
    assert int(case.counts.sum()) == 0


def test_drafts_count_for_penalties_only_while_drafting() -> None:
    case = Case()
    case.counts[3, 7] = 2
    before = case.counts.clone()
    case.begin()
    for tokens in ([7, 1, 2], [7, 1, 3]):
        case.advance()
        case.record(tokens)
    assert case.counts[3, 7] == 4
    assert case.counts[4, 2] == case.counts[4, 3] == 1
    assert int(case.counts[0].sum()) == 0, "row 1 drafts nothing"
    case.steps.forget(3, 2, output_counts=case.counts)
    assert torch.equal(case.counts, before)


def test_every_iteration_starts_at_the_first_step() -> None:
    case = Case()
    case.begin()
    for _ in range(3):
        case.advance()
        case.record([1, 1, 1])
    assert int(case.steps.step) == 3
    case.begin()
    assert int(case.steps.step) == 0


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_a_gpu_that_is_not_there(capability: int, tmp_path: Path) -> None:
    # The interpreter takes much that the compiler refuses.
    pytest.importorskip("vllm", reason="the sampling kernels call vLLM's own noise")
    plugin = TESTS.parent / "vegas_runtime" / "vllm_plugin"
    defined = {
        line.split("(")[0].removeprefix("def ")
        for name in ("triton_drafts", "triton_sampling")
        for line in (plugin / f"{name}.py").read_text().splitlines()
        if line.startswith("def ") and "_kernel(" in line
    }
    assert compiled_kernels("compile_drafts.py", capability=capability, cache=tmp_path) == defined
