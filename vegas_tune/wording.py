"""Values as words: significant digits, units, one clean line. Seconds become ms only here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.profile import WILDCARD, Estimate

UNKNOWN: Final = "not recorded"

_HASH: Final = re.compile(r"(?:sha256:)?[0-9a-f]{32,}")
_HASH_CHARS: Final = 12

# From here on a figure is written with an exponent.
_LARGEST: Final = 1e15

# Ending of a key -> (factor, unit) of its value as shown.
_UNITS: Final = {
    "_gib": (1.0, "GiB"),
    "_mhz": (1.0, "MHz"),
    "_ms": (1.0, "ms"),
    "_tok_s": (1.0, "tok/s"),
    "_bytes": (1.0, "bytes"),
    "_cv": (100.0, "%"),
    "_w": (1.0, "W"),
}
_LABELS: Final = {
    "num_speculative_tokens": "gamma",
    "sparsity_ratio": "KV kept",
    "relative_accepted": "accepted, against the largest ratio",
    "relative_tok_s": "throughput, against the fastest",
    "predicted_tok_s": "predicted tok/s",
    "speedup_vs_gamma0": "speed-up over plain decoding",
    "id": "name",
    "class": "device",
    "sm": "CUDA capability",
    "tp": "tensor parallel size",
    "n_prompts": "prompts",
    "n_distinct_prompts": "distinct prompts",
    "eos": "end of output",
    "context_len": "context, tokens",
    "min_context_len": "shortest context, tokens",
    "max_context_len": "longest context, tokens",
    "max_new_tokens": "output limit, tokens",
    "num_waiting": "spare prompts per block",
    "num_blocks": "prompt blocks",
    "allow_replay": "prompts used again",
    "content_valid": "real text",
    "budget_s": "time budget",
    "noise_floor_cv": "run-to-run spread (CV)",
    "num_batch_means": "batches per interval",
}


def line(value: object) -> str:
    """Any value as one printable line; what is not printable becomes U+FFFD.

    A profile is written by others: a line break would end a table row, a control character would
    reach the terminal.
    """
    text = " ".join(str(value).split())
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def number(value: float, digits: int = 3) -> str:
    """A plain number with that many significant digits, from 1,000 on to the unit."""
    if not 1000 <= abs(value) < _LARGEST:
        return f"{value:.{digits}g}"
    return f"{value:,.0f}"


def estimate(value: Estimate | None, unit: str = "", *, decimals: int | None = None) -> str:
    """An estimate and its interval, as precise as the interval: `58.5 tok/s [57.3, 59.7]`."""
    if value is None:
        return ""
    places = _decimals(value) if decimals is None else decimals
    text = f"{_fixed(value.est, places)} {unit}".rstrip()
    if value.low is None or value.high is None:
        return text
    return f"{text} [{_fixed(value.low, places)}, {_fixed(value.high, places)}]"


def times(value: Estimate | None, *, interval: bool = True) -> str:
    """A ratio: `1.25x [1.22, 1.28]`; a third decimal where the interval is that narrow."""
    if value is None:
        return ""
    is_narrow = value.low is not None and value.high is not None and value.high - value.low < 0.04
    places = 3 if is_narrow else 2
    text = f"{value.est:.{places}f}x"
    if not interval or value.low is None or value.high is None:
        return text
    return f"{text} [{value.low:.{places}f}, {value.high:.{places}f}]"


def percent(fraction: float) -> str:
    """A fraction in per cent, at most three significant digits: `7 %`, `0.5 %`."""
    return f"{fraction * 100:.3g} %"


def duration(seconds: float) -> str:
    """A time span in the unit that suits it: `45 ms`, `3.2 s`, `12 min`, `1 h 5 min`."""
    if seconds < 1:
        return f"{number(seconds * 1000)} ms"
    if seconds < 120:
        return f"{number(seconds)} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if rest else f"{hours} h"


def size(num_bytes: float) -> str:
    """A count of bytes: `98.4 MB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{number(num_bytes / factor)} {unit}"
    return f"{num_bytes:.0f} bytes"


def setting(config: SpeculationConfig) -> str:
    """A setting in a few words: `gamma 6, 7 % of KV`."""
    return point(config.num_speculative_tokens, config.sparsity_ratio)


def point(num_speculative_tokens: int, sparsity_ratio: float) -> str:
    """The two tuned knobs in a few words."""
    if num_speculative_tokens == 0:
        return "plain decoding"
    return f"gamma {num_speculative_tokens}, {percent(sparsity_ratio)} of KV"


def sentence(words: str) -> str:
    """Words with a capital in front."""
    return words[:1].upper() + words[1:]


def count(number_of: int, noun: str) -> str:
    """`1 point`, `2 points`."""
    return f"{number_of:,} {noun}{'' if number_of == 1 else 's'}"


def label(key: str) -> str:
    """A key of the profile as a reader's label."""
    if key in _LABELS:
        return _LABELS[key]
    for ending in (*_UNITS, "_s"):
        if key.endswith(ending):
            key = key.removesuffix(ending)
            break
    for name in ("num_speculative_tokens", "sparsity_ratio"):
        key = key.replace(name, _LABELS[name])
    return line(key.removeprefix("num_").replace("_", " "))


def fact(key: str, value: Any) -> str:
    """A value of the profile as a reader's text, its unit taken from the key."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Estimate):
        return times(value) if "_vs_" in key or "relative" in key else estimate(value)
    if isinstance(value, Mapping):
        return _mapping(key, value)
    if isinstance(value, (list, tuple)):
        return ", ".join(fact(key, item) for item in value)
    if isinstance(value, (int, float)):
        return _quantity(key, value)
    text = line(value)
    if text == WILDCARD:
        return "any"
    return f"{text[: _HASH_CHARS + 7 * text.startswith('sha256:')]}..." if _is_hash(text) else text


def facts(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Label and text of every known value; those that nobody recorded are left out."""
    return tuple(
        (label(key), fact(key, value))
        for key, value in values.items()
        if value is not None and value != {} and value != () and value != []
    )


def _quantity(key: str, value: float) -> str:
    if "sparsity_ratio" in key or key == "ratio":
        return percent(value)
    if key == "seed":
        return str(value)
    for ending, (factor, unit) in _UNITS.items():
        if key.endswith(ending):
            return f"{number(value * factor)} {unit}"
    if key.endswith("_s"):
        return duration(value)
    return number(value)


def _mapping(key: str, value: Mapping[str, Any]) -> str:
    """An interval, or `label value` pairs."""
    known = {"est", "low", "high", "n", "point_only"}
    if "est" in value and set(value) <= known:
        # What only looks like an estimate is shown as it is.
        with suppress(ValueError):
            return fact(key, Estimate.model_validate(dict(value)))
    return ", ".join(f"{label(str(name))} {fact(str(name), item)}" for name, item in value.items())


def _decimals(value: Estimate) -> int:
    """As precise as the interval is: one digit of its half-width, two where that starts low.

    (The Particle Data Group's rule: 3.87 +- 0.08, but 4.10 +- 0.21.) Without an interval, three
    digits of the estimate.
    """
    half = 0.0 if value.low is None or value.high is None else (value.high - value.low) / 2
    if half > 0:
        power = math.floor(math.log10(half))
        return min(1 - power if half < 3.55 * 10.0**power else -power, 4)
    return 2 - math.floor(math.log10(abs(value.est))) if value.est else 0


def _fixed(value: float, places: int) -> str:
    """Fixed point with thousands separators; never a negative zero."""
    if abs(value) >= _LARGEST:
        return f"{value:.3g}"
    text = f"{value:,.{max(places, 0)}f}"
    return text.removeprefix("-") if not text.strip("-0.,") else text


def _is_hash(text: str) -> bool:
    return _HASH.fullmatch(text) is not None
