"""The CUDA kernels against float64, on a GPU; both paths of verify_attention, graphs included."""

from __future__ import annotations

from dataclasses import replace

import kernel_grids
import paged_cases
import pytest
import torch
from paged_cases import Case, SelectCase, SparseCase

from vegas_runtime.kernels import build, ops

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    reason = build.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    return torch.device("cuda")


def _paths() -> list[str]:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return ["mma", "sm90"] if hopper else ["mma"]


@pytest.mark.parametrize("path", _paths())
@pytest.mark.parametrize("case", kernel_grids.verify_cases(), ids=str)
def test_verification_attention_matches_float64(
    case: Case, path: str, device: torch.device
) -> None:
    paged_cases.check_verify(replace(case, path=path), device)


@pytest.mark.parametrize("case", kernel_grids.sparse_cases(), ids=str)
def test_sparse_attention_matches_float64(case: SparseCase, device: torch.device) -> None:
    paged_cases.check_sparse(case, device)


@pytest.mark.parametrize("case", kernel_grids.select_cases(), ids=str)
def test_selection_equals_the_reference(case: SelectCase, device: torch.device) -> None:
    paged_cases.check_select(case, device)


@pytest.mark.parametrize("path", _paths())
def test_one_graph_serves_lengths_that_grow_shrink_and_end(path: str, device: torch.device) -> None:
    paged_cases.check_graph_replays(path, device)


@pytest.mark.parametrize("path", _paths())
def test_lengths_that_change_under_a_call_cannot_hang_it(path: str, device: torch.device) -> None:
    paged_cases.check_changing_lengths(path, device)


def test_a_second_library_load_is_harmless() -> None:
    assert build.unavailable_reason() is None
    build.unavailable_reason.cache_clear()
    assert build.unavailable_reason() is None


def test_unsupported_head_dims_say_why(device: torch.device) -> None:
    q = torch.zeros(1, 8, 80, dtype=torch.bfloat16, device=device)
    reason = ops.why_not_cuda(q)
    assert reason is not None
    assert "head dim 80" in reason
