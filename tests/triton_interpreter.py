"""Triton's interpreter with its own language looked up once, not anew at every call of a kernel.

At each call of a compiled function the interpreter searches all names of `triton.language` for
builtins to replace: a quarter of what small kernels take. Which names those are never changes.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@cache
def _names(package: Any) -> tuple[str, ...]:
    """Builtins of a module or class, as they are before the interpreter replaces any."""
    members = inspect.getmembers(package)
    return tuple(name for name, member in members if tl.core.is_builtin(member))


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _names(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


def remember_builtins() -> None:
    """Make it so in this process."""
    interpreter._patch_builtin = _patch_builtin
