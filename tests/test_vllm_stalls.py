"""A capture that stands still says so; it needs neither vLLM nor a GPU."""

from __future__ import annotations

import itertools
import threading

import pytest

from vegas_runtime.vllm_plugin import stalls


def test_a_capture_that_stands_still_names_the_graph(caplog: pytest.LogCaptureFixture) -> None:
    asked = threading.Semaphore(0)

    def progress() -> str:
        asked.release()
        return "65 of 105 graphs (next: 24 requests of 7 rows)"

    with stalls.reported(progress, patience_s=0.01):
        # First reading, then two that found no change: the second report has begun by then.
        for _ in range(3):
            assert asked.acquire(timeout=10)
    assert "next: 24 requests of 7 rows" in caplog.text
    assert "no progress" in caplog.text


def test_a_capture_that_goes_on_is_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    asked, count = threading.Semaphore(0), itertools.count()

    def progress() -> str:
        asked.release()
        return f"{next(count)} of 105 graphs"

    with stalls.reported(progress, patience_s=0.01):
        for _ in range(3):
            assert asked.acquire(timeout=10)
    assert caplog.text == ""


def test_the_watch_ends_with_the_block() -> None:
    with pytest.raises(RuntimeError, match="out of memory"), stalls.reported(lambda: ""):
        raise RuntimeError("out of memory")
    assert not any(thread.name == "vegas-capture-watch" for thread in threading.enumerate())
