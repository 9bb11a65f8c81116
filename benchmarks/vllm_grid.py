"""Record a full grid on vLLM in one engine start, and race live what searches choose from it.

Every setting is measured once, in random order, then once more, and so on until the time is over.
Each pass is a file of its own as soon as it has ended, so a run that is cut off keeps what it
recorded, and the same command goes on from there.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.grid import Grid
from benchmarks.results_file import Row
from benchmarks.rivals import searches
from benchmarks.vllm_arms import (
    BASE,
    CONTEXT,
    NEW_TOKENS,
    SPARE_PROMPTS,
    Evidence,
    block_of,
    engine_of,
    row,
    say,
    setting_of,
    source_prompts,
)
from vegas_runtime.backend import find_checkpoint
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import BackendError
from vegas_runtime.protocol import Capacity, PromptBlock
from vegas_runtime.records import read_json_lines, write_json_lines
from vegas_runtime.vllm_plugin.engine import VllmEngine
from vegas_tune.measure import Measurement, mean_ratio, measure
from vegas_tune.performer import rounded

GAMMAS = (2, 3, 4, 5, 6, 8)
RATIOS = (0.02, 0.03, 0.05, 0.07, 0.1)
# As the grid in `data` was recorded.
PLAIN = BASE.replace(rows="all")
# Of a pass, for each running request: some 25 iterations. Admitting the batch costs as much again,
# and more passes tell more than longer ones.
TOKENS_PER_REQUEST = 96
WARM_TOKENS_PER_REQUEST = 8
RACE_TOKENS_PER_REQUEST = 160
# Of the time given: kept for choosing from the recording, and for the race.
RACE_S = 45.0
RACE_ROUNDS = 20
_PASS_LIMIT_S = 30.0
# Far from every recorded replicate, so that no sample is drawn twice.
_RACE_REPLICATE = 1000


def record_and_race(
    model: str, path: Path, rows: list[Row], *, batch_size: int, seconds: float
) -> None:
    """Record as much of the grid as the time allows, then race the choices; one engine start.

    Args:
        model: what to serve.
        path: the grid's file; its passes lie beside it, in a folder, as they come.
        rows: gains the race's figures.
        batch_size: requests running.
        seconds: from the engine's start on.
    """
    with _started(model, batch_size) as (engine, block):
        until_s = engine.now_s() + seconds
        _record_and_race(engine, block, path, rows, until_s=until_s)


def race_recorded(
    model: str, path: Path, rows: list[Row], *, batch_size: int, seconds: float
) -> None:
    """Race what searches choose from a grid that was recorded earlier; see `record_and_race`."""
    chosen = choices(Grid.open(path))
    with _started(model, batch_size) as (engine, block):
        until_s = engine.now_s() + seconds
        engine.prepare(block)
        for config in (*chosen.values(), PLAIN):
            warm_up(engine, block, config)
        _race(engine, block, chosen, path, rows, until_s=until_s)


@contextmanager
def _started(model: str, batch_size: int) -> Iterator[tuple[VllmEngine, PromptBlock]]:
    """An engine for every setting of the grid, and the prompts."""
    checkpoint = find_checkpoint(model, report=say)
    capacity = Capacity(
        batch_size=batch_size,
        max_model_len=CONTEXT + NEW_TOKENS,
        gammas=(0, *GAMMAS),
        max_ratio=max(RATIOS),
        config=PLAIN,
    )
    with ThreadPoolExecutor(1) as pool:
        # While the engine starts.
        reading = pool.submit(source_prompts, checkpoint.tokenizer, batch_size + SPARE_PROMPTS)
        with engine_of(checkpoint, capacity) as engine:
            yield engine, block_of(reading.result(), batch_size)


def _record_and_race(
    engine: VllmEngine, block: PromptBlock, path: Path, rows: list[Row], *, until_s: float
) -> None:
    prefilled_s = engine.now_s()
    engine.prepare(block)
    prefill_s = engine.now_s() - prefilled_s
    say(f"{len(block.prompts)} prompts prefilled in {prefill_s:.1f} s")
    recording = Recording(path, grid_header(engine, block, prefill_s))
    try:
        record(engine, block, recording, until_s=until_s - RACE_S)
    finally:
        recording.write()
    grid = Grid.of(recording.header, recording.rows)
    if len(grid.settings) < 1 + len(GAMMAS) * len(RATIOS):
        say(f"only {len(grid.settings)} settings were recorded; the same command goes on")
        return
    _race(engine, block, choices(grid), path, rows, until_s=until_s)


def grid_header(engine: VllmEngine, block: PromptBlock, prefill_s: float) -> dict[str, Any]:
    """First row of the grid's file; see `vegas_runtime.replay`."""
    return {
        "kind": "grid",
        "info": asdict(engine.info),
        "workload": {
            "source": "windows of Python source",
            "max_new_tokens": block.max_new_tokens,
            "sampling": block.sampling.to_dict(),
        },
        "blocks": [
            {
                "sha256": block.sha256,
                "prompt_lens": [len(prompt) for prompt in block.prompts],
                "prefill_s": round(prefill_s, 3),
            }
        ],
        "tokens": TOKENS_PER_REQUEST * block.batch_size,
    }


class Recording:
    """Passes of a grid: a file each while they come, one file in the end.

    Args:
        path: the file in the end; the folder of the passes is named after it.
        header: of the grid; one that is there already must be of the same prompts.

    Attributes:
        header: of the grid.
        rows: recorded passes, those of an earlier call included.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._path = path
        self._folder = path.with_name(f"{path.name}.parts")
        self._folder.mkdir(parents=True, exist_ok=True)
        before = self._folder / "header.z"
        if before.exists():
            (known,) = read_json_lines(before)
            if [one["sha256"] for one in known["blocks"]] != [
                one["sha256"] for one in header["blocks"]
            ]:
                raise SystemExit(f"{self._folder} holds passes over other prompts; remove it.")
            header = known
        else:
            write_json_lines(before, [header])
        self.header = header
        self.rows: list[dict[str, Any]] = [
            part for file in sorted(self._folder.glob("pass-*.z")) for part in read_json_lines(file)
        ]

    @property
    def done(self) -> set[tuple[SpeculationConfig, int]]:
        """Settings and replicates recorded."""
        return {
            (SpeculationConfig.from_dict(one["run"]["config"]), one["replicate"])
            for one in self.rows
        }

    def add(self, replicate: int, run: Mapping[str, Any]) -> None:
        """Keep a pass for good."""
        part = {"block": 0, "replicate": replicate, "run": run}
        write_json_lines(self._folder / f"pass-{len(self.rows):04d}.z", [part])
        self.rows.append(part)

    def write(self) -> None:
        """All passes as one file, which `ReplayEngine` reads."""
        write_json_lines(self._path, [self.header, *self.rows])
        size = self._path.stat().st_size
        say(f"{self._path.name}: {len(self.rows)} passes, {size / 1e6:.2f} MB")


def record(engine: VllmEngine, block: PromptBlock, recording: Recording, *, until_s: float) -> None:
    """Measure every setting again and again, each time in another random order.

    A pass that fails or is not steady is said and left out; its place in a round stays empty.
    """
    for gamma in (0, *GAMMAS):
        warm_up(engine, block, setting(gamma, RATIOS[-1]))
    done = recording.done
    for replicate in itertools.count():
        order = settings()
        random.Random(f"grid/{replicate}").shuffle(order)
        for config in order:
            if (config, replicate) in done:
                continue
            if engine.now_s() > until_s:
                return
            rate = take(engine, block, recording, config, replicate)
            say(f"  round {replicate}, {setting_of(config)}: {rate}")


def take(
    engine: VllmEngine,
    block: PromptBlock,
    recording: Recording,
    config: SpeculationConfig,
    replicate: int,
) -> str:
    """One pass, kept when it is steady; words on what came of it."""
    try:
        engine.configure(config)
        run = rounded(
            engine.run(
                block,
                replicate=replicate,
                max_tokens=TOKENS_PER_REQUEST * block.batch_size,
                deadline_s=engine.now_s() + _PASS_LIMIT_S,
            )
        )
    except BackendError as error:
        return f"FAILED: {error.message}"
    figures = measure(run)
    if not isinstance(figures, Measurement):
        return f"NOT STEADY: {figures.reason}"
    recording.add(replicate, run.to_dict())
    return (
        f"{figures.decode_tok_s.est:.0f} tok/s over {figures.num_steps} steps, "
        f"{run.elapsed_s:.2f} s in all"
    )


def warm_up(engine: VllmEngine, block: PromptBlock, config: SpeculationConfig) -> None:
    """A few steps at a setting, not kept: what is compiled on first use is compiled then."""
    engine.configure(config)
    engine.run(
        block,
        replicate=_RACE_REPLICATE - 1,
        max_tokens=WARM_TOKENS_PER_REQUEST * block.batch_size,
        deadline_s=engine.now_s() + _PASS_LIMIT_S,
    )


def settings() -> list[SpeculationConfig]:
    """Plain decoding, and every gamma at every ratio."""
    return [PLAIN, *(setting(gamma, ratio) for gamma in GAMMAS for ratio in RATIOS)]


def setting(gamma: int, ratio: float) -> SpeculationConfig:
    """One of them; every gamma 0 is the same setting."""
    if not gamma:
        return PLAIN
    return PLAIN.replace(num_speculative_tokens=gamma, sparsity_ratio=ratio)


# --------------------------------------------------------------------------- the race


def choices(grid: Grid) -> dict[str, SpeculationConfig]:
    """What the sweep chooses from the recording, and what the best rival does, with one seed.

    Rivals come best first, by the recorded rate of what they chose. Equal choices are one entry;
    the grid's own best is the last resort.

    Returns:
        At most two settings by who chose them, the sweep's first.
    """
    started_s = time.monotonic()
    found = [(name, config) for name, config, _ in searches(grid, 0, 0.0)]
    rivals = sorted(found[1:], key=lambda one: grid.regret(one[1]))
    by_setting: dict[SpeculationConfig, list[str]] = {}
    for name, config in [found[0], *rivals, ("the grid's best", grid.best)]:
        by_setting.setdefault(config, []).append(name)
        below = f"{100 * grid.regret(config):.2f} % below the grid's best"
        say(f"  {name}: {setting_of(config)}, {below}")
    say(f"chosen from the recording in {time.monotonic() - started_s:.1f} s")
    return {", ".join(names): config for config, names in list(by_setting.items())[:2]}


def _race(
    engine: VllmEngine,
    block: PromptBlock,
    chosen: Mapping[str, SpeculationConfig],
    path: Path,
    rows: list[Row],
    *,
    until_s: float,
) -> None:
    """Race, and keep the passes beside the grid's file."""
    evidence = Evidence(path.with_name(f"{path.name.partition('.')[0]}_race.jsonl.z"))
    try:
        rows += race(engine, block, chosen, evidence, until_s=until_s)
    finally:
        evidence.write()


def race(
    engine: VllmEngine,
    block: PromptBlock,
    chosen: Mapping[str, SpeculationConfig],
    evidence: Evidence,
    *,
    until_s: float,
) -> list[Row]:
    """Measure the choices and plain decoding side by side, each other round backwards.

    Returns:
        Paired ratios; none when there was no time for two rounds.
    """
    arms = {**chosen, "plain": PLAIN} if PLAIN not in chosen.values() else dict(chosen)
    logs: list[dict[str, float]] = []
    longest_s = 0.0
    for number in range(RACE_ROUNDS):
        started_s = engine.now_s()
        if started_s + longest_s > until_s:
            break
        found: dict[str, float] = {}
        for name in list(arms) if number % 2 == 0 else list(arms)[::-1]:
            engine.configure(arms[name])
            figures = evidence.take(
                engine,
                block,
                f"race {setting_of(arms[name])}",
                replicate=_RACE_REPLICATE + number,
                tokens=RACE_TOKENS_PER_REQUEST,
            )
            found[name] = math.log(figures.decode_tok_s.est)
        logs.append(found)
        longest_s = max(longest_s, engine.now_s() - started_s)
    if len(logs) < 2:
        say("there was no time for a race")
        return []
    ours, *others = chosen
    case = f"{block.batch_size} x {CONTEXT}, {len(logs)} pairs, chosen by replay with seed 0"
    rows = [_ratio("live_ratio", ours, other, arms, logs, case) for other in others]
    if PLAIN in arms.values():
        plain = next(name for name, config in arms.items() if config == PLAIN)
        rows += [
            _ratio("live_speedup_vs_gamma0", name, plain, arms, logs, case)
            for name in chosen
            if name != plain
        ]
    if evidence.not_steady:
        which = ", ".join(dict.fromkeys(evidence.not_steady))
        rows.append(row("passes_not_steady", which, float(len(evidence.not_steady)), "passes"))
    return rows


def _ratio(
    claim: str,
    one: str,
    other: str,
    arms: Mapping[str, SpeculationConfig],
    logs: Sequence[Mapping[str, float]],
    case: str,
) -> Row:
    ratio = mean_ratio([found[one] - found[other] for found in logs])
    names = f"{one} ({setting_of(arms[one])}) over {other} ({setting_of(arms[other])})"
    return row(claim, f"{names}; {case}", ratio, "x")
