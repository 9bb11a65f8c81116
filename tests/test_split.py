"""What `--tensor-parallel-size` may be, told from the environment alone."""

from __future__ import annotations

import pytest

from vegas_runtime.errors import UsageError
from vegas_tune import split
from vegas_tune.split import check_gpus, check_split


@pytest.mark.parametrize("size", [0, -2])
def test_less_than_one_gpu_is_refused_for_every_engine(size: int) -> None:
    for backend in ("vllm", "reference"):
        with pytest.raises(UsageError, match=f"size is {size}; at least 1"):
            check_split(size, backend, "because")


@pytest.mark.parametrize("backend", ["reference", "replay"])
def test_only_vllm_splits_a_model(backend: str) -> None:
    with pytest.raises(
        UsageError, match=r"size is 2, and only vLLM .* it was asked for\."
    ) as caught:
        check_split(2, backend, "it was asked for")
    assert "--backend vllm" in caught.value.hint
    check_split(1, backend, "it was asked for")
    check_split(2, "vllm", "it was asked for")


def test_a_split_over_more_gpus_than_may_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5f,1")
    check_gpus(3)
    with pytest.raises(
        UsageError, match=r"split over 4 GPUs, which takes 4, .* may use 3"
    ) as caught:
        check_gpus(4)
    assert "CUDA_VISIBLE_DEVICES" in caught.value.hint
    check_gpus(1, num_engines=3)
    with pytest.raises(UsageError, match="2 workers are each split over 2 GPUs, which takes 4"):
        check_gpus(2, num_engines=2)


def test_one_gpu_is_not_looked_for_and_an_unknown_number_refuses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_gpus(1, num_engines=8)
    with pytest.raises(UsageError, match="may use 0"):
        check_gpus(2)
    monkeypatch.setattr(split, "num_gpus", lambda: None)
    check_gpus(64)
