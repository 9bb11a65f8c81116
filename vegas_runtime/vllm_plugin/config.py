"""The keys of vLLM RFC #47351 -> what vLLM 0.33 accepts, and what the plugin must know.

vLLM sees an ordinary draft model that is the target itself; everything it has no field for rides
in `additional_config` as a `PluginSettings`. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

from vegas_runtime.config import (
    MAX_SPECULATIVE_TOKENS,
    RFC_KEYS,
    RFC_METHOD,
    Rows,
    SpeculationConfig,
)
from vegas_runtime.errors import ConfigError
from vegas_runtime.vllm_plugin.methods import ALGORITHMS, declared_algorithms, declared_rows

SETTINGS_KEY: Final = "vegas"
WORKER_CLASS: Final = "vegas_runtime.vllm_plugin.worker.VegasWorker"

COLLECTIONS: Final = ("auto", "fused", "fused_exact", "fa3", "triton")
DRAFT_ATTENTIONS: Final = ("auto", "kernel", "fa3", "triton")

# The plugin's own keys, beside the RFC's.
GAMMAS_KEY: Final = "sparse_attn_num_speculative_tokens_set"
ALGORITHMS_KEY: Final = "sparse_attn_algorithm_set"
ROWS_KEY: Final = "sparse_attn_rows_set"
MAX_RATIO_KEY: Final = "sparse_attn_max_ratio"
COLLECTION_KEY: Final = "sparse_attn_collection"
DRAFT_ATTENTION_KEY: Final = "sparse_attn_draft_attention"
SCHEDULE_KEY: Final = "num_speculative_tokens_per_batch_size"

# Ratios above it are rarely worth drafting with, and buffers grow with the largest one.
DEFAULT_MAX_RATIO: Final = 0.3
# Rows of one verify block that the fused kernel takes (gamma + 1).
MAX_FUSED_ROWS: Final = 17

# vLLM's schedule maps ranges of batch sizes to gammas. Entries from here on lie beyond every real
# batch: they declare a gamma (and so its CUDA graphs) without ever being looked up.
_BEYOND_EVERY_BATCH: Final = 1_000_000

# Keys of vLLM's own that may stand beside ours, with the only value they may have.
_FIXED_KEYS: Final = {
    "draft_sample_method": (
        "probabilistic",
        "the accept test needs the distribution each draft was sampled from",
    ),
    "rejection_sample_method": (
        "standard",
        "it is the one tested to leave the output distribution as it is",
    ),
}

Schedule = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class PluginSettings:
    """What the plugin is started with; picklable, rides in `VllmConfig.additional_config`.

    Attributes:
        config: the setting in force at start; ratio, floor and gamma may change while it runs.
        gammas: tokens drafted per iteration that may be chosen while it runs; ascending, 0 and
            every value of `schedule` among them. CUDA graphs are captured for each.
        schedule: (first batch size, last batch size, gamma), ends included; empty when one gamma
            holds for every batch size.
        algorithms: methods that may be chosen while it runs, beside the first one.
        rows: row sets likewise; those known before acceptance always may.
        max_ratio: largest sparsity ratio (fraction kept) that may be chosen; sizes the buffers.
        collection: how scores are read off the verify pass: `auto`, `fused`, `fused_exact`,
            `fa3` or `triton`.
        draft_attention: how draft steps attend: `auto`, `kernel`, `fa3` or `triton`.

    Raises:
        ConfigError: a value is outside its range or contradicts another one.
    """

    config: SpeculationConfig
    gammas: tuple[int, ...]
    schedule: Schedule = ()
    algorithms: tuple[str, ...] = ()
    rows: tuple[Rows, ...] = ()
    max_ratio: float = DEFAULT_MAX_RATIO
    collection: str = "auto"
    draft_attention: str = "auto"

    def __post_init__(self) -> None:
        for algorithm in (self.config.algorithm, *self.algorithms):
            _check_choice("sparse_attn_algorithm", algorithm, ALGORITHMS)
        for rows in self.rows:
            _check_choice(ROWS_KEY, rows, get_args(Rows))
        _check_choice(COLLECTION_KEY, self.collection, COLLECTIONS)
        _check_choice(DRAFT_ATTENTION_KEY, self.draft_attention, DRAFT_ATTENTIONS)
        if not 0 < self.max_ratio <= 1:
            raise ConfigError(
                f"`{MAX_RATIO_KEY}` is {self.max_ratio!r}; it is the largest fraction of KV "
                "entries kept while drafting and must be in (0, 1]."
            )
        if self.config.sparsity_ratio > self.max_ratio:
            raise ConfigError(
                f"`sparse_attn_ratio` is {self.config.sparsity_ratio:g}, above "
                f"`{MAX_RATIO_KEY}` {self.max_ratio:g}, which the buffers are sized for.",
                hint=f"Raise `{MAX_RATIO_KEY}` or lower the ratio.",
            )
        needed = {0, self.config.num_speculative_tokens, *(entry[2] for entry in self.schedule)}
        assert list(self.gammas) == sorted({*self.gammas}), "gammas ascend"
        assert needed <= {*self.gammas}, "every gamma that may hold is declared"
        if self.max_num_speculative_tokens == 0:
            raise ConfigError(
                "`num_speculative_tokens` is 0 and no other number is declared, so nothing would "
                "ever be drafted.",
                hint="Leave --speculative-config out, or declare more numbers in "
                f"`{GAMMAS_KEY}`, e.g. [0, 4, 6].",
            )
        if (
            self.collection.startswith("fused")
            and self.max_num_speculative_tokens >= MAX_FUSED_ROWS
        ):
            raise ConfigError(
                f"`{COLLECTION_KEY}` is {self.collection!r}, whose kernel verifies at most "
                f"{MAX_FUSED_ROWS} rows, but {self.max_num_speculative_tokens} drafted tokens "
                f"make {self.max_num_speculative_tokens + 1}.",
                hint=f"Draft at most {MAX_FUSED_ROWS - 1}, or leave `{COLLECTION_KEY}` at 'auto'.",
            )

    @property
    def max_num_speculative_tokens(self) -> int:
        """Largest gamma that may be chosen; sizes lookahead, buffers and graphs."""
        return self.gammas[-1]

    def max_kv_budget(self, max_model_len: int) -> int:
        """Most KV entries a selection may ever hold, tail not counted.

        Args:
            max_model_len: longest request, in tokens.
        """
        asked = math.ceil(self.max_ratio * (max_model_len + self.max_num_speculative_tokens + 1))
        return min(max(asked, self.config.min_tokens), max_model_len + 1)

    def change(self, values: Mapping[str, Any], *, max_model_len: int) -> SpeculationConfig:
        """The setting after a change while the engine runs.

        Args:
            values: fields of `SpeculationConfig`, those that change.
            max_model_len: longest request, in tokens.

        Raises:
            ConfigError: an unknown field, a value outside its range, a gamma, method or row set
                that was not declared at start, or a selection larger than the buffers.
        """
        config = SpeculationConfig.from_dict({**self.config.to_dict(), **values})
        _check_choice("algorithm", config.algorithm, ALGORITHMS)
        self._check_declared(
            "algorithm",
            config.algorithm,
            declared_algorithms(self.config, self.algorithms),
            ALGORITHMS_KEY,
        )
        self._check_declared("rows", config.rows, declared_rows(self.config, self.rows), ROWS_KEY)
        check_gamma(config.num_speculative_tokens, self.gammas)
        if config.sparsity_ratio > self.max_ratio:
            raise ConfigError(
                f"`sparsity_ratio` {config.sparsity_ratio:g} is above {self.max_ratio:g}, which "
                "this engine's buffers were sized for.",
                hint=f"Start it with a larger `{MAX_RATIO_KEY}`.",
            )
        room = self.max_kv_budget(max_model_len)
        if config.min_tokens > room:
            raise ConfigError(
                f"`min_tokens` {config.min_tokens} does not fit this engine's selection buffers "
                f"of {room} entries a request.",
                hint=f"Start it with that floor, or with a larger `{MAX_RATIO_KEY}`.",
            )
        return config

    @staticmethod
    def _check_declared(name: str, value: str, declared: Sequence[str], key: str) -> None:
        if value not in declared:
            raise ConfigError(
                f"`{name}` is {value!r}; this engine has buffers and graphs for "
                f"{', '.join(declared)}.",
                hint=f"Start it with {value!r} in `{key}`.",
            )

    def vllm_schedule(self) -> list[tuple[int, int, int]]:
        """What holds, then what is declared: vLLM's `num_speculative_tokens_per_batch_size`.

        Its part up to a million requests is the schedule in force. The entries beyond are never
        looked up; they make vLLM aware of every gamma that may be chosen.
        """
        last = _BEYOND_EVERY_BATCH
        table = list(self.schedule) or [(1, last, self.config.num_speculative_tokens)]
        return table + [(last + g + 1, last + g + 1, g) for g in self.gammas]


class _Opaque(dict[str, Any]):
    """An empty mapping that carries settings.

    vLLM hashes `additional_config` through JSON into the key of its compile cache. Nothing in the
    settings changes a compiled graph, so they must look the same whatever they hold: a change of
    ratio would otherwise recompile the model (18 to 32 s).
    """

    settings: PluginSettings

    def __init__(self, settings: PluginSettings) -> None:
        super().__init__()
        self.settings = settings

    def __reduce__(self) -> tuple[type[_Opaque], tuple[PluginSettings]]:
        return _Opaque, (self.settings,)


def with_settings(additional: Mapping[str, Any], settings: PluginSettings) -> dict[str, Any]:
    """A copy of `additional_config` that carries the settings and hashes as if it did not."""
    return {**additional, SETTINGS_KEY: _Opaque(settings)}


def settings_of(vllm_config: Any) -> PluginSettings | None:
    """The plugin's settings in a `VllmConfig`; None where Vegas is not in use."""
    additional = vllm_config.additional_config
    carrier = additional.get(SETTINGS_KEY) if isinstance(additional, dict) else None
    return carrier.settings if isinstance(carrier, _Opaque) else None


def is_ours(values: Mapping[str, Any]) -> bool:
    """Whether a `--speculative-config` asks for this plugin.

    Raises:
        ConfigError: keys of `sparse_attn` beside another method, or without a method.
    """
    if values.get("method") == RFC_METHOD:
        return True
    stray = [key for key in values if key.startswith("sparse_attn_")]
    if stray:
        raise ConfigError(
            f"`{stray[0]}` belongs to method {RFC_METHOD!r}, but `method` is "
            f"{values.get('method')!r}.",
            hint=f'Write "method": "{RFC_METHOD}", or leave the key out.',
        )
    return False


def translate(values: Mapping[str, Any], *, model: str) -> tuple[dict[str, Any], PluginSettings]:
    """Turn an RFC `--speculative-config` into vLLM's own, and the plugin's settings.

    Args:
        values: the RFC's keys and the plugin's; keys with underscores.
        model: what the target was loaded from; it is its own draft model.

    Returns:
        Arguments of vLLM's `SpeculativeConfig`, and the settings.

    Raises:
        ConfigError: a missing or unknown key, or a value that cannot work.
    """
    own = dict(values)
    for key, (wanted, reason) in _FIXED_KEYS.items():
        given = own.pop(key, wanted)
        if given != wanted:
            raise ConfigError(
                f"`{key}` is {given!r}; method {RFC_METHOD!r} needs {wanted!r}, because {reason}."
            )
    declared = own.pop(GAMMAS_KEY, None)
    schedule = read_schedule(own.pop(SCHEDULE_KEY, None))
    max_ratio = _read_max_ratio(own.pop(MAX_RATIO_KEY, None))
    algorithms = _read_names(ALGORITHMS_KEY, own.pop(ALGORITHMS_KEY, ()))
    rows = _read_names(ROWS_KEY, own.pop(ROWS_KEY, ()))
    collection = own.pop(COLLECTION_KEY, "auto")
    draft_attention = own.pop(DRAFT_ATTENTION_KEY, "auto")
    _check_keys(own)
    config = SpeculationConfig.from_rfc(own)
    settings = PluginSettings(
        config=config,
        gammas=_read_gammas(declared, config, schedule),
        schedule=schedule,
        algorithms=algorithms,
        rows=rows,
        max_ratio=max(DEFAULT_MAX_RATIO, config.sparsity_ratio) if max_ratio is None else max_ratio,
        collection=collection,
        draft_attention=draft_attention,
    )
    return {
        "method": "draft_model",
        "model": model,
        "num_speculative_tokens": settings.max_num_speculative_tokens,
        SCHEDULE_KEY: settings.vllm_schedule(),
        **{key: wanted for key, (wanted, _) in _FIXED_KEYS.items()},
    }, settings


def check_gamma(gamma: int, gammas: Sequence[int]) -> None:
    """Refuse a gamma that was not declared at start.

    Raises:
        ConfigError: it is not among `gammas`.
    """
    if gamma not in gammas:
        raise ConfigError(
            f"`num_speculative_tokens` {gamma} was not declared when this engine started; "
            f"declared are {', '.join(map(str, gammas))}.",
            hint=f"CUDA graphs exist only for those. Start it with {gamma} in `{GAMMAS_KEY}`.",
        )


def read_schedule(value: Any) -> Schedule:
    """Check a gamma per range of batch sizes, as vLLM writes it.

    Args:
        value: entries of first batch size, last batch size (included) and gamma; or None.

    Raises:
        ConfigError: ranges that overlap, or do not start at a batch of 1.
    """
    if value is None:
        return ()
    entries = value if isinstance(value, (list, tuple)) else [value]
    rows: list[tuple[int, int, int]] = []
    for entry in entries:
        if not isinstance(entry, (list, tuple)) or len(entry) != 3 or not all(map(is_whole, entry)):
            raise ConfigError(
                f"`{SCHEDULE_KEY}` holds {entry!r}; each entry is [first batch size, last batch "
                "size, tokens drafted]."
            )
        rows.append((entry[0], min(entry[1], _BEYOND_EVERY_BATCH), entry[2]))
    rows.sort()
    previous = 0
    for first, last, _ in rows:
        if first <= previous or last < first or first >= _BEYOND_EVERY_BATCH:
            raise ConfigError(
                f"`{SCHEDULE_KEY}` holds the range {first} to {last} after {previous}; ranges "
                "ascend from 1 without overlap."
            )
        previous = last
    if not rows or rows[0][0] != 1:
        raise ConfigError(f"`{SCHEDULE_KEY}` must say what to draft for a batch of 1.")
    return tuple(rows)


def schedule_at(schedule: Schedule, batch: int) -> int:
    """Tokens drafted per iteration at a batch size; between and after ranges the last one holds.

    Args:
        schedule: as `read_schedule` returns it, not empty.
        batch: requests running; below 1 counts as 1.
    """
    return [gamma for first, _, gamma in schedule if first <= max(batch, 1)][-1]


def _check_choice(key: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(
            f"`{key}` is {value!r}; the vLLM plugin supports {', '.join(choices)}.",
            hint="More algorithms run in the reference engine (--backend reference)."
            if choices is ALGORITHMS
            else "",
        )


def _check_keys(values: Mapping[str, Any]) -> None:
    known = {"method", *RFC_KEYS.values()}
    unknown = [key for key in values if key not in known]
    if unknown:
        mine = (
            *(GAMMAS_KEY, ALGORITHMS_KEY, ROWS_KEY, MAX_RATIO_KEY, COLLECTION_KEY),
            *(DRAFT_ATTENTION_KEY, SCHEDULE_KEY),
        )
        raise ConfigError(
            f"`{unknown[0]}` means nothing to method {RFC_METHOD!r}, whose draft model is the "
            f"target itself; known are {', '.join([*RFC_KEYS.values(), *mine])}."
        )
    for key in ("num_speculative_tokens", "sparse_attn_ratio"):
        if key not in values:
            raise ConfigError(f"`{key}` is missing from the speculative config.")


def is_whole(value: object) -> bool:
    """Whether a value from outside is a whole number and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def _read_names(key: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"`{key}` is {value!r}; a list of names is needed.")
    return tuple(value)


def _read_max_ratio(value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise ConfigError(f"`{MAX_RATIO_KEY}` is {value!r}; a fraction in (0, 1] is needed.")
    return value


def _read_gammas(declared: Any, config: SpeculationConfig, schedule: Schedule) -> tuple[int, ...]:
    gammas = {0, config.num_speculative_tokens, *(entry[2] for entry in schedule)}
    if declared is not None:
        if not isinstance(declared, (list, tuple)) or not all(map(is_whole, declared)):
            raise ConfigError(
                f"`{GAMMAS_KEY}` is {declared!r}; a list of whole numbers is needed, e.g. "
                "[0, 4, 6]."
            )
        gammas |= {*declared}
    wrong = [gamma for gamma in sorted(gammas) if not 0 <= gamma <= MAX_SPECULATIVE_TOKENS]
    if wrong:
        raise ConfigError(
            f"{wrong[0]} tokens drafted per iteration were declared; 0 to "
            f"{MAX_SPECULATIVE_TOKENS} are supported."
        )
    return tuple(sorted(gammas))
