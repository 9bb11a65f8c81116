"""Every knob: its name, range, unit and default. The only reader of environment variables."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args

from vegas_runtime.errors import ConfigError

Rows = Literal["two", "all", "last_accepted", "accepted_only", "first_middle_last"]
Metric = Literal["weight", "logit"]
Scope = Literal["layer", "kv_head"]
Granularity = Literal["token", "page"]

# Vegas's own, and their values, the default first.
SWITCHES: Final[Mapping[str, tuple[str, ...]]] = {
    "rows": get_args(Rows),
    "metric": get_args(Metric),
    "scope": get_args(Scope),
    "granularity": get_args(Granularity),
}

MAX_SPECULATIVE_TOKENS: Final = 64
RFC_METHOD: Final = "sparse_attn"

# Our field -> key of vLLM RFC #47351 (the last four are this project's own switches).
RFC_KEYS: Final = {
    "algorithm": "sparse_attn_algorithm",
    "num_speculative_tokens": "num_speculative_tokens",
    "sparsity_ratio": "sparse_attn_ratio",
    "min_tokens": "sparse_attn_min_tokens",
    "rows": "sparse_attn_rows",
    "metric": "sparse_attn_metric",
    "scope": "sparse_attn_scope",
    "granularity": "sparse_attn_granularity",
}


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """How to draft.

    Attributes:
        algorithm: name of the KV selection policy, a key of `policies.POLICIES`; of an engine's
            own method where that drafts (`protocol.StockMethod`).
        num_speculative_tokens: tokens drafted per iteration (gamma); 0 is plain decoding.
        sparsity_ratio: fraction of KV entries kept while drafting, in (0, 1].
        min_tokens: floor of the KV budget, in tokens.
        rows: query rows of the verify block whose attention is summed.
        metric: what is summed, softmax weights or raw logits.
        scope: one list per layer, or one per layer and KV head.
        granularity: single tokens compete for the budget, or whole pages of 16 tokens.

    Raises:
        ConfigError: a value is outside its range.
    """

    algorithm: str = "vegas"
    num_speculative_tokens: int
    sparsity_ratio: float
    min_tokens: int = 256
    rows: Rows = "two"
    metric: Metric = "weight"
    scope: Scope = "layer"
    granularity: Granularity = "token"

    def __post_init__(self) -> None:
        gamma, ratio = self.num_speculative_tokens, self.sparsity_ratio
        if isinstance(gamma, bool) or not isinstance(gamma, int):
            raise ConfigError(f"`num_speculative_tokens` is {gamma!r}; a whole number is needed.")
        if not 0 <= gamma <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"`num_speculative_tokens` is {gamma}; 0 (plain decoding) to "
                f"{MAX_SPECULATIVE_TOKENS} is supported."
            )
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)):
            raise ConfigError(f"`sparsity_ratio` is {ratio!r}; a fraction in (0, 1] is needed.")
        if not (math.isfinite(ratio) and 0 < ratio <= 1):
            hint = f"To keep {ratio:g} % of the KV cache, write {ratio / 100:g}."
            raise ConfigError(
                f"`sparsity_ratio` is {ratio:g}; it is the fraction of KV entries kept while "
                "drafting and must be in (0, 1].",
                hint=hint if math.isfinite(ratio) and 1 < ratio <= 100 else "",
            )
        if isinstance(self.min_tokens, bool) or not isinstance(self.min_tokens, int):
            raise ConfigError(f"`min_tokens` is {self.min_tokens!r}; a whole number is needed.")
        if self.min_tokens < 1:
            raise ConfigError(f"`min_tokens` is {self.min_tokens}; at least 1 is needed.")
        for name, allowed in SWITCHES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"`{name}` is {getattr(self, name)!r}; one of {', '.join(allowed)} is needed."
                )

    def replace(self, **changes: Any) -> Self:
        """A copy with some knobs changed, validated again."""
        return replace(self, **changes)

    def kv_budget(self, prefix_len: int) -> int:
        """KV entries kept for a request, tail not counted (DESIGN decision 2).

        Args:
            prefix_len: keys committed before the verify pass, L; candidates are 0..L.
        """
        asked = math.ceil(self.sparsity_ratio * (prefix_len + self.num_speculative_tokens + 1))
        return min(max(asked, self.min_tokens), prefix_len + 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from field names; unknown names are refused.

        Raises:
            ConfigError: an unknown or missing key, or a value outside its range.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(
                f"unknown speculation key {unknown[0]!r}; known are {', '.join(sorted(known))}."
            )
        missing = sorted({"num_speculative_tokens", "sparsity_ratio"} - set(values))
        if missing:
            raise ConfigError(f"speculation key {missing[0]!r} is missing.")
        return cls(**dict(values))

    def to_rfc(self) -> dict[str, Any]:
        """The value of vLLM's `--speculative-config`, in the keys of RFC #47351.

        Switches are written only where they differ from the default, so that the usual profile
        holds nothing but the RFC's own keys.
        """
        values: dict[str, Any] = {"method": RFC_METHOD}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in SWITCHES or value != field.default:
                values[RFC_KEYS[field.name]] = value
        return values

    @classmethod
    def from_rfc(cls, values: Mapping[str, Any]) -> Self:
        """Read the RFC's keys back; the inverse of `to_rfc`.

        Raises:
            ConfigError: another method, an unknown key, or a value outside its range.
        """
        if values.get("method") != RFC_METHOD:
            raise ConfigError(
                f"`method` is {values.get('method')!r}; this runtime reads {RFC_METHOD!r}."
            )
        names = {key: name for name, key in RFC_KEYS.items()}
        own: dict[str, Any] = {}
        for key, value in values.items():
            if key == "method":
                continue
            if key not in names:
                raise ConfigError(
                    f"unknown speculative-config key {key!r}; known are {', '.join(names)}."
                )
            own[names[key]] = value
        return cls.from_dict(own)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is drawn, in the terms of transformers' `generate`.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set with this mass; 1 keeps all.
        min_p: drop tokens below this fraction of the likeliest one's probability.
        repetition_penalty: above 1 makes tokens already in the text less likely.
        seed: with the request's index, seeds that request's random numbers.

    Raises:
        ConfigError: a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        bounds = (
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (all) or more"),
            ("top_p", 0 < self.top_p <= 1, "a fraction in (0, 1]"),
            ("min_p", 0 <= self.min_p < 1, "a fraction in [0, 1)"),
            ("repetition_penalty", self.repetition_penalty > 0, "more than 0"),
        )
        for name, valid, wanted in bounds:
            if not (valid and math.isfinite(getattr(self, name))):
                raise ConfigError(f"`{name}` is {getattr(self, name)!r}; {wanted} is needed.")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name."""
        return asdict(self)


def cache_dir() -> Path:
    """Folder for fetched and converted models: `VEGAS_TUNE_CACHE`, else the XDG cache folder."""
    own = os.environ.get("VEGAS_TUNE_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "vegas-tune"


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for a child, with some variables changed."""
    return {**os.environ, **changes}


def allowed_vllm_plugins() -> frozenset[str] | None:
    """Names that `VLLM_PLUGINS` lets vLLM load; None where it is not set, which allows all."""
    names = os.environ.get("VLLM_PLUGINS")
    return None if names is None else frozenset(names.split(","))


def visible_gpus() -> tuple[str, ...] | None:
    """GPUs that `CUDA_VISIBLE_DEVICES` lets this process use, by number or UUID; None when unset.

    Empty when it is set to nothing, which hides all of them.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return None
    return tuple(name.strip() for name in names.split(",") if name.strip())


def is_offline() -> bool:
    """Whether the environment forbids fetching (`HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE`)."""
    truthy = {"1", "true", "yes", "on"}
    return any(
        os.environ.get(name, "").lower() in truthy
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
