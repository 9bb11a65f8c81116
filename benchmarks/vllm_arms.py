"""What the vLLM benchmarks share: real prompts, engines of either arm, passes, evidence."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.results_file import Row
from vegas_runtime.backend import Capacity, PromptBlock
from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.records import Run, write_json_lines
from vegas_runtime.vllm_plugin.child import launch_host
from vegas_runtime.vllm_plugin.engine import Checkpoint, VllmEngine
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


@contextmanager
def side_by_side(
    checkpoint: Checkpoint,
    stock: Sequence[Capacity],
    plugin: Capacity,
    *,
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[list[VllmEngine], VllmEngine]]:
    """Stock engines of several sizes and the plugin's, started at the same time on one GPU.

    Starts take most of a run, and are mostly the CPU's. An engine without requests leaves the GPU
    alone, so each can be measured while the others are idle. Capacities must name their KV cache.

    Args:
        checkpoint: the model.
        stock: of each stock engine.
        plugin: of the plugin's.
        environment: variables of theirs that differ from this process's.
    """
    wanted = [*((capacity, True) for capacity in stock), (plugin, False)]
    started_s = time.monotonic()

    def start(capacity: Capacity, is_stock: bool) -> VllmEngine:
        launch = functools.partial(launch_host, is_alone=False, environment=environment)
        return VllmEngine(checkpoint, capacity, is_stock=is_stock, launch=launch)

    engines: list[VllmEngine] = []
    try:
        # One alone first: it compiles what all of them run, and the others find it compiled.
        engines.append(start(*wanted[0]))
        say(f"first engine after {time.monotonic() - started_s:.0f} s")
        with ThreadPoolExecutor(len(wanted)) as pool:
            starts = [pool.submit(start, *arm) for arm in wanted[1:]]
        engines += [one.result() for one in starts if one.exception() is None]
        for one in starts:
            one.result()
        say(f"{len(engines)} engines started in {time.monotonic() - started_s:.0f} s")
        say(f"plugin: {dict(engines[-1].status)}")
        yield engines[:-1], engines[-1]
    finally:
        with ThreadPoolExecutor(len(wanted)) as pool:
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
    ) -> Measurement:
        """One pass at the setting in force.

        One that is not steady counts as well, over every step of a full batch: time on a GPU is
        not thrown away. It is said, and told by `not_steady`.
        """
        deadline_s = engine.now_s() + 60
        if has_arrivals:
            run = engine.run(
                block,
                replicate=replicate,
                max_tokens=pass_tokens(block.batch_size),
                deadline_s=deadline_s,
            )
        else:
            run = engine.run_closed(block, replicate=replicate, deadline_s=deadline_s)
        self.keep(what, run)
        figures = measure(run)
        if not isinstance(figures, Measurement):
            say(f"  NOT STEADY: {what}: {figures.reason}")
            self.not_steady.append(what)
            figures = _all_full_steps(run)
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


def mean_of(values: Iterable[float]) -> float:
    """Arithmetic mean."""
    kept = list(values)
    return sum(kept) / len(kept)
