"""What the vLLM benchmarks share: real prompts, engines of either arm, passes, evidence."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results_file import Row
from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.protocol import Capacity, PromptBlock, StockMethod
from vegas_runtime.records import Run, write_json_lines
from vegas_runtime.vllm_plugin.child import launch_host
from vegas_runtime.vllm_plugin.engine import VllmEngine
from vegas_runtime.vllm_plugin.engine_options import Checkpoint
from vegas_tune.measure import (
    Estimate,
    Measurement,
    accepted,
    decode_tok_s,
    measure,
    phase_times,
    request_counts,
    survival,
)

# One token more than whole KV blocks: after a prefix hit one token is left to compute, so that
# both arms stay on their full CUDA graphs as requests arrive.
CONTEXT = 7393
NEW_TOKENS = 768
SAMPLED = SamplingConfig(temperature=0.6, top_p=0.95, top_k=20, seed=17)
BASE = SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0, min_tokens=64)
# Every verify row summed costs no more than two of them, whole pages no more than tokens, and more
# drafts are accepted.
VEGAS = BASE.replace(rows="all", granularity="page")
# The setting whose acceptance the prototype reported.
REPORTED = BASE.replace(num_speculative_tokens=6, sparsity_ratio=0.07)
SPARE_PROMPTS = 8
# Beyond a request's output: drafts, and blocks not filled.
KV_SPARE_TOKENS = 128
# Tokens of a pass: for each running request, and in all; a small batch's pass would take a second.
TOKENS_PER_REQUEST = 256
TOKENS_PER_PASS = 49_152
_CHARS_PER_TOKEN = 6
_START_S = time.monotonic()


def say(message: str) -> None:
    """A line with the time since the start."""
    print(f"[{time.monotonic() - _START_S:5.0f} s] {message}", flush=True)


def source_prompts(tokenizer: Any, count: int, length: int = CONTEXT) -> list[tuple[int, ...]]:
    """Distinct windows of Python source, each of exactly `length` tokens.

    Args:
        tokenizer: transformers'.
        count: how many.
        length: tokens of each.
    """
    # Keys keep their order and are distinct: vendored copies of a file hold the same text.
    prompts: dict[tuple[int, ...], None] = {}
    texts: list[str] = []
    for path in _python_files():
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(text) < _CHARS_PER_TOKEN * length:
            continue
        texts.append(text)
        if len(texts) == 64:
            prompts |= dict.fromkeys(_windows(tokenizer, texts, length))
            texts = []
        if len(prompts) >= count:
            return list(prompts)[:count]
    prompts |= dict.fromkeys(_windows(tokenizer, texts, length))
    if len(prompts) < count:
        raise SystemExit(f"only {len(prompts)} of {count} prompts of {length} tokens were found.")
    return list(prompts)[:count]


def _python_files() -> Iterator[Path]:
    seen: set[Path] = set()
    for folder in [Path(entry) for entry in sys.path if entry]:
        for path in sorted(folder.rglob("*.py")) if folder.is_dir() else []:
            if path not in seen and not {"test", "tests"} & set(path.parts):
                seen.add(path)
                yield path


def _windows(tokenizer: Any, texts: Sequence[str], length: int) -> list[tuple[int, ...]]:
    ids = tokenizer(list(texts), verbose=False)["input_ids"] if texts else []
    return [
        tuple(one[start : start + length])
        for one in ids
        for start in range(0, len(one) - length, length)
    ]


def block_of(
    prompts: Sequence[tuple[int, ...]],
    batch_size: int,
    *,
    index: int = 0,
    max_new_tokens: int = NEW_TOKENS,
    sampling: SamplingConfig = SAMPLED,
) -> PromptBlock:
    """A block for a batch size."""
    return PromptBlock(
        index=index,
        prompts=tuple(prompts),
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
    )


def pass_tokens(batch_size: int) -> int:
    """Tokens of a pass that figures rest on."""
    return max(TOKENS_PER_REQUEST * batch_size, TOKENS_PER_PASS)


def capacity_of(
    checkpoint: Checkpoint,
    batch_size: int,
    *,
    num_prompts: int,
    context: int,
    gammas: Sequence[int],
    max_ratio: float,
    also: Sequence[SpeculationConfig] = (),
) -> Capacity:
    """What an engine beside others on one GPU must hold, and not a block more.

    Args:
        checkpoint: gives the bytes of a token.
        batch_size: requests running.
        num_prompts: distinct prompts.
        context: tokens of each.
        gammas: to be configured, beside 0.
        max_ratio: largest to be configured.
        also: algorithms and switches to be configured beside `BASE`'s.
    """
    facts = checkpoint.facts
    heads, dim = int(facts["num_kv_heads"]), int(facts["head_dim"])
    # Keys and values in bfloat16.
    bytes_per_token = int(facts["num_layers"]) * heads * dim * 2 * 2
    own = batch_size * (NEW_TOKENS + KV_SPARE_TOKENS)
    return Capacity(
        batch_size=batch_size,
        max_model_len=context + NEW_TOKENS,
        gammas=(0, *gammas),
        max_ratio=max_ratio,
        config=BASE,
        also=tuple(also),
        # What the size of the KV cache is given for, the share of the GPU is only checked.
        kv_cache_bytes=bytes_per_token * (num_prompts * context + own),
        gpu_memory_utilization=0.05,
    )


@dataclass(frozen=True, kw_only=True)
class Arm:
    """An engine to start.

    Attributes:
        capacity: names its KV cache.
        is_stock: without the plugin.
        drafting: how stock vLLM drafts; None for plain decoding.
    """

    capacity: Capacity
    is_stock: bool = True
    drafting: StockMethod | None = None


@contextmanager
def side_by_side(
    checkpoint: Checkpoint,
    stock: Sequence[Capacity],
    plugin: Capacity,
    *,
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[list[VllmEngine], VllmEngine]]:
    """Stock engines of several sizes and the plugin's, started at the same time on one GPU.

    Capacities must name their KV cache.

    Args:
        checkpoint: the model.
        stock: of each stock engine.
        plugin: of the plugin's.
        environment: variables of theirs that differ from this process's.
    """
    arms = [*(Arm(capacity=one) for one in stock), Arm(capacity=plugin, is_stock=False)]
    with engines_of(checkpoint, arms, environment=environment) as engines:
        say(f"plugin: {dict(engines[-1].status)}")
        yield engines[:-1], engines[-1]


@contextmanager
def engines_of(
    checkpoint: Checkpoint,
    arms: Sequence[Arm],
    *,
    environment: Mapping[str, str] | None = None,
) -> Iterator[list[VllmEngine]]:
    """Engines on one GPU, started together.

    Starts take most of a run, and are mostly the CPU's; each compiles for itself, as what they
    compile differs. An engine without requests leaves the GPU alone, so each can be measured while
    the others are idle.

    Args:
        checkpoint: what to serve.
        arms: in this order.
        environment: variables of theirs that differ from this process's.
    """
    started_s = time.monotonic()

    def start(arm: Arm) -> VllmEngine:
        launch = functools.partial(launch_host, is_alone=False, environment=environment)
        return VllmEngine(
            checkpoint,
            arm.capacity,
            is_stock=arm.is_stock,
            drafting=arm.drafting,
            launch=launch,
        )

    engines: list[VllmEngine] = []
    try:
        with ThreadPoolExecutor(len(arms)) as pool:
            starts = [pool.submit(start, arm) for arm in arms]
        engines += [one.result() for one in starts if one.exception() is None]
        for one in starts:
            one.result()
        say(f"{len(engines)} engines started in {time.monotonic() - started_s:.0f} s")
        yield engines
    finally:
        with ThreadPoolExecutor(len(arms)) as pool:
            ends = [pool.submit(engine.close) for engine in engines]
        for end in ends:
            if (error := end.exception()) is not None:
                say(f"an engine did not end: {error}")


@contextmanager
def engine_of(
    checkpoint: Checkpoint, capacity: Capacity, *, is_stock: bool = False
) -> Iterator[VllmEngine]:
    """A started engine, ended behind it; says what both took."""
    arm = "stock vLLM" if is_stock else "plugin engine"
    started_s = time.monotonic()
    engine = VllmEngine(checkpoint, capacity, is_stock=is_stock)
    try:
        say(f"{arm} started in {time.monotonic() - started_s:.0f} s; {dict(engine.status)}")
        yield engine
    finally:
        engine.close()
        say(f"{arm} ended; it held the GPU for {engine.held_s:.0f} s")


def figures_of(run: Run) -> tuple[Measurement, str]:
    """A pass's figures, and why it was not steady: they are over every full step then."""
    figures = measure(run)
    if isinstance(figures, Measurement):
        return figures, ""
    return _all_full_steps(run), figures.reason


def _all_full_steps(run: Run) -> Measurement:
    """Figures over every step of a full batch but the first, whatever moved while it ran."""
    steps = [s for s in run.steps if s.kind == "decode" and s.num_running == run.batch_size][1:]
    counts = request_counts(run)
    return Measurement(
        decode_tok_s=decode_tok_s(steps),
        accepted=accepted([counts]) if counts else None,
        survival=survival([run]),
        phases=phase_times(steps),
        counts=counts,
        num_steps=len(steps),
    )


class Evidence:
    """Every pass of a part, kept as its raw step records.

    Attributes:
        not_steady: the passes that were not, by name.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []
        self.not_steady: list[str] = []

    def take(
        self,
        engine: VllmEngine,
        block: PromptBlock,
        what: str,
        *,
        replicate: int,
        has_arrivals: bool = True,
        tokens: int | None = None,
    ) -> Measurement:
        """One pass at the setting in force, of so many tokens for each running request.

        One that is not steady counts as well, over every step of a full batch: time on a GPU is
        not thrown away. It is said, and told by `not_steady`.
        """
        deadline_s = engine.now_s() + 60
        if has_arrivals:
            run = engine.run(
                block,
                replicate=replicate,
                max_tokens=tokens * block.batch_size if tokens else pass_tokens(block.batch_size),
                deadline_s=deadline_s,
            )
        else:
            run = engine.run_closed(block, replicate=replicate, deadline_s=deadline_s)
        self.keep(what, run)
        figures, unsteady = figures_of(run)
        if unsteady:
            say(f"  NOT STEADY: {what}: {unsteady}")
            self.not_steady.append(what)
        hits = run.num_cached_tokens / max(run.num_prompt_tokens, 1)
        length = f", accepted {figures.accepted.est:.2f}" if figures.accepted else ""
        say(
            f"  {what}: {figures.decode_tok_s.est:.0f} tok/s over {figures.num_steps} steps"
            f"{length}, prefix hits {hits:.1%}"
        )
        return figures

    def keep(self, what: str, run: Run) -> None:
        """Keep a pass that was made elsewhere."""
        self._rows.append({"what": what, "run": run.to_dict()})

    def write(self) -> None:
        """Write everything kept so far."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json_lines(self._path, self._rows)
        say(f"{self._path.name}: {self._path.stat().st_size / 1e6:.1f} MB of records")


def row(claim: str, case: str, estimate: Estimate | float, unit: str, *, digits: int = 4) -> Row:
    """A published figure, to so many significant digits."""

    def cut(value: float) -> float:
        return float(f"{value:.{digits}g}") if math.isfinite(value) else value

    if isinstance(estimate, Estimate):
        low, high = cut(estimate.low), cut(estimate.high)
        return Row(claim=claim, case=case, value=cut(estimate.est), low=low, high=high, unit=unit)
    return Row(claim=claim, case=case, value=cut(estimate), low=None, high=None, unit=unit)


def setting_of(config: SpeculationConfig) -> str:
    """A setting in a few words."""
    gamma = config.num_speculative_tokens
    # vLLM's own methods select nothing: a ratio of 1 is no setting of theirs.
    if not gamma or config.sparsity_ratio == 1.0:
        return f"gamma {gamma}"
    return f"gamma {gamma}, ratio {config.sparsity_ratio:g}"


def mean_of(values: Iterable[float]) -> float:
    """Arithmetic mean."""
    kept = list(values)
    return sum(kept) / len(kept)
