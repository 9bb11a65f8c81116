"""How this process holds on to memory that its tensors gave back."""

from __future__ import annotations

import ctypes
from typing import Final

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_MAX: Final = -4
_MOST: Final = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let freed memory be used again rather than given back to the system.

    Left alone, glibc maps every large tensor anew and unmaps it when it is freed, and each of its
    pages costs a fault on first touch. Prefilling 4,096 tokens of SmolLM2-135M on two cores met
    5.1 million faults and 18 s of system time (of 70); with this 0.2 million and 2 s, at the same
    peak. It holds for the whole process, which stays as large as it ever was.

    Returns:
        Whether it took effect: not on other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _MOST))
