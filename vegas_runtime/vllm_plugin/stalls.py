"""Says so when capturing CUDA graphs makes no progress.

A kernel that never ends, or a GPU that another process holds, leaves the capturing thread waiting
in the driver: no exception comes, and vLLM's progress bar simply stops. A second thread can still
speak.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

# The slowest graph seen took 2 s, compilation of its kernels included.
PATIENCE_S: Final = 60.0

_log = logging.getLogger("vllm.vegas")


@contextmanager
def reported(progress: Callable[[], str], *, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Log an error for every spell without progress inside the block.

    Args:
        progress: where the work stands, in words; called from another thread.
        patience_s: seconds without a change that count as a stall.
    """
    is_over = threading.Event()

    def watch() -> None:
        before = progress()
        while not is_over.wait(patience_s):
            now = progress()
            if now == before:
                _log.error(
                    "Vegas: capturing CUDA graphs has made no progress for %.0f s (%s). A kernel "
                    "does not end, or another process keeps the GPU busy. End other processes on "
                    "it (nvidia-smi); if it happens again, start with "
                    '"sparse_attn_collection": "fa3" and "sparse_attn_draft_attention": "fa3", '
                    "and report it.",
                    patience_s,
                    now,
                )
            before = now

    thread = threading.Thread(target=watch, name="vegas-capture-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
