"""Methods by name: what `compare --methods` and its table call them, and the setting behind each.

A method is one row of the comparison. What a row needs of an engine is `configure` and `run`.
vLLM's own methods (`protocol.STOCK_METHODS`) select no KV entries and are fixed when an engine
starts; `stock_methods` measures those.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vegas_runtime.config import SWITCHES, SpeculationConfig
from vegas_runtime.errors import UsageError
from vegas_runtime.protocol import STOCK_METHODS

# The systems of the paper's Figure 9.
DEFAULT_METHODS: Final = "vegas,streaming_llm,quest,spec_extend"
# What a sweep tunes there, and vLLM's own that need nothing from the user.
DEFAULT_ON_VLLM: Final = "all_rows_pages,ngram,suffix"
# What every comparison holds anyway.
PLAIN: Final = "plain"
# The engine without the plugin, at its own defaults: another engine, measured before and after.
STOCK: Final = "stock"

# Settings of Vegas by name: the paper's ablations, and whole pages.
_ABLATIONS: Final = {
    "all_rows": {"algorithm": "vegas", "rows": "all"},
    "last_accepted": {"algorithm": "vegas", "rows": "last_accepted"},
    "accepted_only": {"algorithm": "vegas", "rows": "accepted_only"},
    "first_middle_last": {"algorithm": "vegas", "rows": "first_middle_last"},
    "all_rows_pages": {"algorithm": "vegas", "rows": "all", "granularity": "page"},
}


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method to compare.

    Attributes:
        name: as asked for; the row's name.
        base: its algorithm and switches; gamma 0.
    """

    name: str
    base: SpeculationConfig


def slug(name: str) -> str:
    """A method's name, fit for a file name."""
    return re.sub(r"[^a-z0-9_]+", "-", name.lower())


def split_own(text: str) -> tuple[str, tuple[str, ...]]:
    """Tell vLLM's own methods from those that select KV entries.

    Args:
        text: names separated by commas.

    Returns:
        The other names, as `parse_methods` reads them, and vLLM's own, each once.
    """
    names = [part.strip() for part in text.split(",")]
    own = dict.fromkeys(name for name in names if name in STOCK_METHODS)
    return ",".join(name for name in names if name not in own), tuple(own)


def parse_methods(text: str, base: SpeculationConfig) -> tuple[Method, ...]:
    """Read `vegas,quest:scope=kv_head,last_accepted`.

    Args:
        text: names separated by commas; a name is a policy with switches behind colons, or one
            of the paper's ablations.
        base: what every method shares: the floor of the KV budget.

    Raises:
        UsageError: no method, a name that cannot be read, or one method twice.
        ConfigError: a switch's value is unknown.
    """
    methods: list[Method] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name in (PLAIN, STOCK):
            raise UsageError(
                f"--methods names {name!r}, which every comparison measures anyway.",
                hint="Leave it out.",
            )
        config = base.replace(num_speculative_tokens=0, **_knobs(name))
        method = Method(name=name, base=config)
        for other in methods:
            if other.base == config or slug(other.name) == slug(name):
                raise UsageError(
                    f"--methods names {other.name!r} and {name!r}, which are the same method."
                )
        methods.append(method)
    if not methods:
        raise UsageError(
            "--methods names no method that selects KV entries; there is nothing to compare.",
            hint=f"For example: --methods {DEFAULT_METHODS}",
        )
    return tuple(methods)


def _knobs(name: str) -> Mapping[str, Any]:
    algorithm, *switches = name.split(":")
    knobs: dict[str, Any] = dict(_ABLATIONS.get(algorithm, {"algorithm": algorithm}))
    for switch in switches:
        key, separator, value = switch.partition("=")
        if key not in SWITCHES or not separator:
            raise UsageError(
                f"method {name!r}: {switch!r} is no switch; "
                f"{', '.join(f'{known}=...' for known in SWITCHES)} are.",
                hint="For example: quest:scope=kv_head",
            )
        knobs[key] = value
    return knobs
