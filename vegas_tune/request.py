"""What `sweep` was asked for: its options read, and defaults filled in."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Self, cast

from vegas_runtime.backend import resolve_backend
from vegas_runtime.config import (
    Granularity,
    Metric,
    Rows,
    SamplingConfig,
    Scope,
    SpeculationConfig,
)
from vegas_runtime.errors import UsageError
from vegas_tune.cells import CellKey, make_cells, parse_counts
from vegas_tune.plan import DEFAULT_LOOKS
from vegas_tune.split import check_split
from vegas_tune.workload_spec import WorkloadName, WorkloadSpec

PACKAGED_MODEL: Final = "smollm2-135m"
_UNITS: Final = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What is filled in where the command line says nothing.

    Attributes:
        budget: hard limit on time.
        context: tokens of each prompt.
        batch: requests kept running.
        waiting: spare prompts of each block.
        blocks: blocks of prompts; the last third is kept for validation.
        max_new_tokens: output limit of a request.
        tokens: tokens of one measurement; on vLLM it follows from the batch.
        rounds: interleaved rounds of a search step.
        min_tokens: floor of the KV budget.
        ratios: candidate sparsity ratios.
        looks: validation rounds after which a verdict is tried.
        stop_precision: half-width of the speed-up's interval at which validation stops.
        num_finalists: settings that draft which validation measures side by side.
        preparation_share: of the budget that preparing all blocks may take for validation to have
            text of its own.
        rows: query rows of the verify block that `vegas` sums.
        granularity: what competes under `vegas`.
    """

    budget: str
    context: int
    batch: int
    waiting: int
    blocks: int
    max_new_tokens: int
    tokens: int
    rounds: int
    min_tokens: int
    ratios: tuple[float, ...]
    looks: tuple[int, ...] = DEFAULT_LOOKS
    stop_precision: float = 0.05
    num_finalists: int = 2
    preparation_share: float = 0.5
    rows: Rows = "two"
    granularity: Granularity = "token"


# Sized for two CPU cores: every candidate ratio lies above the floor, a measurement takes a few
# seconds, and a sweep fits the budget with its prefills. At 2K tokens attention is too small a part
# of a step for drafting to pay on such a machine (0.9 to 1.05x); at 4K it does.
PACKAGED: Final = Defaults(
    budget="12m",
    context=4096,
    batch=8,
    waiting=1,
    blocks=2,
    max_new_tokens=128,
    tokens=400,
    # Two, and the race: at 3 % run-to-run noise 1.5 % of throughput is given up on average, against
    # 2.1 % with four rounds and no race, for 20 s more (24 replays of the recorded grid).
    rounds=2,
    min_tokens=32,
    ratios=(0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.25, 0.5),
)
SERVED: Final = Defaults(
    budget="45m",
    context=8192,
    batch=8,
    waiting=4,
    blocks=3,
    max_new_tokens=512,
    tokens=2048,
    rounds=2,
    min_tokens=256,
    ratios=(0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.25, 0.5),
    # Rounds are cheap on a GPU, and `check` can find a 5 % loss in four cases of five only against
    # 16 recorded pairs or more (benchmarks/results/statistics.json).
    looks=(16, 24),
)
# A GPU decodes a thousand times as fast as two cores, and its starts are what takes time: of the
# budget a good minute, and as much for each of the two starts of stock vLLM beyond it. Contexts of
# one token more than whole KV blocks leave one token to compute after a prefix hit, which keeps
# both arms on their full CUDA graphs as requests arrive; with the output they fit models of 8K.
VLLM: Final = Defaults(
    budget="220s",
    context=7169,
    batch=32,
    waiting=4,
    blocks=3,
    # Long, because each admission holds up the whole batch for some 5 ms of vLLM's loop.
    max_new_tokens=768,
    tokens=0,
    rounds=2,
    min_tokens=256,
    # Buffers and graphs are sized for the largest, and above it drafting saves little.
    ratios=(0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3),
    # Passes of a small model take a second and spread by some per cent; those of a large one leave
    # time for few, and spread less. So rounds go on while there is time, and count from six on.
    looks=(6, 12, 24, 48),
    stop_precision=0.015,
    # The fastest lie within some per cent of each other there: seconds of search cannot order them.
    num_finalists=3,
    # Stock vLLM is measured on the text of validation before anything is known of its prefill.
    preparation_share=1e6,
    # Sums of all rows cost no more than of two there, and 2 to 7 % more tokens come of it
    # (`rows_all_vs_two` in benchmarks/results/vllm_h200.json).
    rows="all",
    # What lies beside a token attended to is wanted soon: 1.15x the throughput of the same rows'
    # single tokens (`all_rows_pages` in benchmarks/results/methods_vllm_h200.json).
    granularity="page",
)
# Tokens of a measurement on vLLM, for each running request: some 60 iterations at the usual
# acceptance, three quarters of a second to five, depending on the batch.
VLLM_TOKENS_PER_REQUEST: Final = 384


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """One `sweep`, defaults filled in; the fields are the command's options.

    `spec` is that of the first of `cells`; with one cell there is nothing more to it.
    """

    model: str
    backend: str
    budget_s: float
    spec: WorkloadSpec
    base: SpeculationConfig
    tokens: int
    rounds: int
    max_gamma: int
    ratios: tuple[float, ...]
    gammas: tuple[int, ...] | None
    looks: tuple[int, ...]
    stop_precision: float
    num_finalists: int
    preparation_share: float
    cells: tuple[CellKey, ...]
    tensor_parallel_size: int
    seed: int
    dtype: str
    device: str
    run_dir: Path | None
    new: bool

    @classmethod
    def from_options(cls, given: Mapping[str, Any]) -> Self:
        """Read the command's options.

        Raises:
            UsageError: an option that cannot be read or does not go with another.
        """
        given = dict(given)
        backend, reason = resolve_backend(given["backend"])
        check_split(given["tensor_parallel_size"], backend, reason)
        batches, contexts = (_counts(given, name) for name in ("batch", "context"))
        small = given["model"].lower() == PACKAGED_MODEL and given["workload"] == "stdlib"
        defaults = PACKAGED if small else SERVED
        if backend == "vllm":
            batch = VLLM.batch if given["batch"] is None else given["batch"]
            defaults = replace(VLLM, tokens=VLLM_TOKENS_PER_REQUEST * batch)
            if given["algorithm"] != "vegas":
                defaults = replace(defaults, rows="two")
            if given["algorithm"] != "vegas" or given["metric"] != "weight":
                # Logits of a page do not add up to its weight.
                defaults = replace(defaults, granularity="token")
        for field in fields(defaults):
            if given.get(field.name) is None:
                given[field.name] = getattr(defaults, field.name)
        ratios = given["ratios"]
        if isinstance(ratios, str):
            ratios = _numbers("--ratios", ratios, float)
        gammas = given["gammas"]
        if isinstance(gammas, str):
            gammas = _numbers("--gammas", gammas, int)
        return cls(
            model=given["model"],
            backend=given["backend"],
            budget_s=parse_duration_s(given["budget"]),
            spec=_workload_spec(given),
            base=SpeculationConfig(
                algorithm=given["algorithm"],
                num_speculative_tokens=0,
                sparsity_ratio=1.0,
                min_tokens=given["min_tokens"],
                rows=cast(Rows, given["rows"]),
                metric=cast(Metric, given["metric"]),
                scope=cast(Scope, given["scope"]),
                granularity=cast(Granularity, given["granularity"]),
            ),
            tokens=given["tokens"],
            rounds=given["rounds"],
            max_gamma=given["max_gamma"],
            ratios=ratios,
            gammas=gammas,
            looks=given["looks"],
            stop_precision=given["stop_precision"],
            num_finalists=given["num_finalists"],
            preparation_share=given["preparation_share"],
            cells=make_cells(batches or (given["batch"],), contexts or (given["context"],)),
            tensor_parallel_size=given["tensor_parallel_size"],
            seed=given["seed"],
            dtype=given["dtype"],
            device=given["device"],
            run_dir=given["run_dir"],
            new=given["new"],
        )


def parse_duration_s(text: str) -> float:
    """Seconds of `90s`, `12m`, `1h` or `1.5h`.

    Raises:
        UsageError: anything else, or not more than nothing.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if match is None or float(match[1]) == 0:
        raise UsageError(
            f"the budget is {text!r}, which is no length of time.",
            hint="Write a number and a unit: 90s, 12m, 1h.",
        )
    return float(match[1]) * _UNITS[match[2]]


def _counts(given: dict[str, Any], name: str) -> tuple[int, ...]:
    """Several counts of an option, which itself becomes the first of them."""
    if not isinstance(given[name], str):
        return ()
    counts = parse_counts(f"--{name}", given[name])
    given[name] = counts[0]
    return counts


def _numbers(option: str, text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise UsageError(
            f"{option} is {text!r}; numbers separated by commas are needed."
        ) from error


def _workload_spec(given: Mapping[str, Any]) -> WorkloadSpec:
    """The workload that `--workload` and `--data` name; a path names a JSONL file."""
    name, path = given["workload"], given["data"]
    if name not in ("stdlib", "aime25", "codeelo", "longbench-v2", "jsonl"):
        if path is not None:
            raise UsageError(
                f"--workload is the file {name!r} and --data is {path}; one of them is enough."
            )
        name, path = "jsonl", Path(name)
    return WorkloadSpec(
        name=cast(WorkloadName, name),
        path=path,
        context_len=given["context"] if name == "stdlib" else None,
        batch_size=given["batch"],
        num_waiting=given["waiting"],
        num_blocks=given["blocks"],
        max_new_tokens=given["max_new_tokens"],
        sampling=SamplingConfig(
            temperature=given["temperature"],
            top_k=given["top_k"],
            top_p=given["top_p"],
            min_p=given["min_p"],
            repetition_penalty=given["repetition_penalty"],
            seed=given["seed"],
        ),
        seed=given["seed"],
    )
