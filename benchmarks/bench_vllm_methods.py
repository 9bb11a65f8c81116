"""Every method in vLLM 0.33 on one GPU, each at its best: `bench_vllm_methods PART`.

Both that measure take five to seven minutes, and write to one file.

    sparse   stock vLLM and the plugin's engine side by side: the fastest gamma of every method
             that selects KV entries, then its fastest ratio; then all of them at these, and plain
             decoding, in interleaved rounds
    own      vLLM's own methods: stock vLLM, and an engine for each number of drafted tokens
    again    no GPU: the figures of `sparse` once more, from the passes it kept

What a method costs is told by rounds too: as many tokens drafted from a window of as many entries,
for which nothing is selected or scored, stand beside it. A method that does not run is a row with
the reason.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from benchmarks.results_file import RESULTS, Row
from benchmarks.vllm_arms import (
    BASE,
    CONTEXT,
    SPARE_PROMPTS,
    Arm,
    Evidence,
    block_of,
    capacity_of,
    engines_of,
    mean_of,
    row,
    say,
    setting_of,
    side_by_side,
    source_prompts,
)
from benchmarks.vllm_method_rows import (
    NAME,
    RACE,
    Passes,
    not_steady_row,
    own_rows,
    publish,
    recorded,
    sparse_rows,
    window_name,
    window_of,
)
from vegas_runtime.backend import find_checkpoint, refusal_by_vllm
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import BackendError, ConfigError
from vegas_runtime.gpu_memory import MemoryGuard
from vegas_runtime.protocol import STOCK_METHODS, Capacity, PromptBlock, StockMethod
from vegas_runtime.records import read_json_lines
from vegas_runtime.vllm_plugin.engine import VllmEngine
from vegas_runtime.vllm_plugin.engine_options import Checkpoint
from vegas_tune.methods import PLAIN, Method, parse_methods
from vegas_tune.stock_methods import own_method

BATCH = 256
GAMMAS = (4, 6, 8)
# An engine each.
OWN_GAMMAS = (3, 4, 6)
# The first is the one that gammas are compared at; the last goes where time runs short.
RATIOS = (0.05, 0.08, 0.03)
METHODS = (
    "vegas,all_rows,all_rows_pages,last_accepted,accepted_only,streaming_llm,spec_extend,"
    "sparse_spec,snapkv,quest"
)
# As many as there is time for.
MOST_ROUNDS = 6
STOCK_PASSES = 3
# Tokens of a pass for each running request: searching, and what is published.
SEARCH_TOKENS = 80
RACE_TOKENS = 192
# Of the time left when every prompt is prefilled, what tuning may take.
TUNING_SHARE = 0.55
# What the memory of engines that ended may take to come back.
_FREE_S = 15.0
# For ending the engines and writing what was measured.
CLOSING_S = 12.0
# Of the benchmark's own model.
NO_MODEL = {
    "draft_model": "no smaller model of its vocabulary is known",
    "eagle3": "no head for this model is known",
    "mtp": "the model has no layers that predict further tokens",
}


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("sparse", "own", "again"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--methods", default=METHODS, help="of part sparse")
    parser.add_argument(
        "--limit", type=float, default=270.0, help="seconds, engine starts included"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--data", type=Path, default=RESULTS.parent / "data")
    args = parser.parse_args()
    if args.part == "again":
        again(args.data / f"{NAME}_sparse.jsonl.z", args.batch, args.out)
        return
    until_s = time.monotonic() + args.limit
    # Filled as figures come, so that a run that is cut off publishes those it reached.
    rows: list[Row] = []
    try:
        checkpoint = find_checkpoint(args.model, report=say)
        evidence = Evidence(args.data / f"{NAME}_{args.part}.jsonl.z")
        bench = Bench(checkpoint, args.batch, evidence, rows, until_s=until_s)
        if args.part == "sparse":
            bench.sparse(parse_methods(args.methods, BASE))
        else:
            bench.own()
    finally:
        for one in rows:
            print(one)
        if rows:
            print(publish(rows, args.part, folder=args.out))


def again(records: Path, batch: int, out: Path) -> None:
    """Figures of part `sparse` from its passes; the machine is that of the figures in place."""
    found = recorded(read_json_lines(records))
    known = json.loads((out / f"{NAME}.json").read_text())
    case = f"b{batch}"
    rows = [
        *sparse_rows(case, found.arms, found.base),
        not_steady_row(case, "sparse", found.not_steady),
    ]
    for one in rows:
        print(one)
    print(publish(rows, "sparse", folder=out, facts=known))


class Bench:
    """One part.

    Args:
        checkpoint: what to serve.
        batch: requests running.
        evidence: keeps every pass.
        rows: gains figures.
        until_s: on `time.monotonic`, when measuring has to end.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        batch: int,
        evidence: Evidence,
        rows: list[Row],
        *,
        until_s: float,
    ) -> None:
        self._checkpoint = checkpoint
        self._batch = batch
        self._evidence = evidence
        self._rows = rows
        self._until_s = until_s - CLOSING_S
        self._case = f"b{batch}"

    # ------------------------------------------------------------------ methods that select

    def sparse(self, methods: Sequence[Method]) -> None:
        """Tune every method the plugin serves, then measure all of them side by side."""
        refused = {one.name: why for one in methods if (why := refusal_by_vllm(one.base))}
        served = [one for one in methods if one.name not in refused]
        self._say_refused(refused)
        capacity = self._capacity([one.base for one in served])
        with (
            self._prompts() as read,
            side_by_side(self._checkpoint, [capacity], capacity) as ([stock], engine),
            self._kept("sparse"),
        ):
            block = block_of(read(), self._batch)
            arms: dict[str, Passes] = {}
            base = self._stock(stock, block, range(STOCK_PASSES - 1))
            engine.prepare(block)
            try:
                self._race(engine, block, self._tuned(engine, block, served), arms)
                # The last one after the race: what the machine did in between shows.
                base += self._stock(stock, block, [STOCK_PASSES - 1])
            finally:
                self._rows += sparse_rows(self._case, arms, base)

    def _tuned(
        self, engine: VllmEngine, block: PromptBlock, methods: Sequence[Method]
    ) -> dict[str, SpeculationConfig]:
        """Each method's best setting; what the engine refuses is left out, and said."""
        refused = {}
        for method in methods:
            largest = method.base.replace(
                num_speculative_tokens=GAMMAS[-1], sparsity_ratio=max(RATIOS)
            )
            try:
                engine.configure(largest)
            except (BackendError, ConfigError) as error:
                refused[method.name] = error.message
        left = [one for one in methods if one.name not in refused]
        each_s = (self._until_s - time.monotonic()) * TUNING_SHARE / max(len(left), 1)
        say(f"{each_s:.1f} s to tune each of {len(left)} methods")
        settings = {}
        for method in left:
            chosen = self._fastest(engine, block, method, time.monotonic() + each_s)
            if chosen is None:
                refused[method.name] = "no setting that drafts could be measured"
            else:
                settings[method.name] = chosen
        self._say_refused(refused)
        return settings

    def _fastest(
        self, engine: VllmEngine, block: PromptBlock, method: Method, until_s: float
    ) -> SpeculationConfig | None:
        """The fastest gamma at one ratio, then the fastest ratio at that gamma, a pass of each.

        A search by rounds would spend half its passes on plain decoding.
        """
        rates: dict[SpeculationConfig, float] = {}

        def fastest() -> SpeculationConfig | None:
            return max(rates, key=rates.__getitem__, default=None)

        first, *others = RATIOS
        for gamma in GAMMAS:
            self._try(engine, block, method, rates, until_s, gamma=gamma, ratio=first)
        if (so_far := fastest()) is not None:
            for ratio in others:
                gamma = so_far.num_speculative_tokens
                self._try(engine, block, method, rates, until_s, gamma=gamma, ratio=ratio)
        return fastest()

    def _try(
        self,
        engine: VllmEngine,
        block: PromptBlock,
        method: Method,
        rates: dict[SpeculationConfig, float],
        until_s: float,
        *,
        gamma: int,
        ratio: float,
    ) -> None:
        """One pass of a candidate; its rate is added."""
        config = method.base.replace(num_speculative_tokens=gamma, sparsity_ratio=ratio)
        what = f"tune {method.name} {setting_of(config)}"
        if time.monotonic() > until_s:
            say(f"  no time: {what}")
            return
        engine.configure(config)
        try:
            figures = self._evidence.take(engine, block, what, replicate=100, tokens=SEARCH_TOKENS)
        except BackendError as error:
            say(f"  failed: {what}: {error.message}")
        else:
            rates[config] = figures.decode_tok_s.est

    def _race(
        self,
        engine: VllmEngine,
        block: PromptBlock,
        settings: Mapping[str, SpeculationConfig],
        arms: dict[str, Passes],
    ) -> None:
        """Rounds of every method, plain decoding, and windows as wide as each method's choice.

        Args:
            engine: the plugin's.
            block: prefilled.
            settings: each method's best.
            arms: gains passes, so that a race that is cut off keeps its rounds.
        """
        arms |= {name: Passes(config) for name, config in settings.items()}
        arms[PLAIN] = Passes(BASE)
        known = [one.config for one in arms.values()]
        for config in settings.values():
            window = window_of(config)
            if window not in known:
                known.append(window)
                arms[window_name(window)] = Passes(window)
        round_s = 0.0
        for number in range(MOST_ROUNDS):
            # Two rounds are the least that give an interval.
            if number >= 2 and time.monotonic() + round_s > self._until_s:
                say(f"time for {number} rounds only")
                break
            started_s = time.monotonic()
            # Forth and back: linear drift hits every arm alike over two rounds.
            for name in list(arms) if number % 2 == 0 else list(arms)[::-1]:
                try:
                    self._take(engine, block, f"{RACE}{name}", arms[name], 500 + number)
                except BackendError as error:
                    del arms[name]
                    if name in settings:
                        self._say_refused({name: error.message})
            round_s = time.monotonic() - started_s

    def _take(
        self, engine: VllmEngine, block: PromptBlock, what: str, passes: Passes, replicate: int
    ) -> None:
        engine.configure(passes.config)
        figures = self._evidence.take(
            engine,
            block,
            f"{what} {setting_of(passes.config)}",
            replicate=replicate,
            tokens=RACE_TOKENS,
        )
        passes.add(figures)

    # ------------------------------------------------------------------ vLLM's own methods

    def own(self) -> None:
        """N-gram drafting at every gamma, and a reason for whatever else does not run."""
        runnable = []
        refused = {}
        for name in STOCK_METHODS:
            reason = NO_MODEL.get(name) or own_method(name).reason
            if reason:
                refused[name] = reason
            else:
                runnable.append(name)
        self._say_refused(refused)
        capacity = self._capacity([])
        wanted = [
            StockMethod(name=name, num_speculative_tokens=gamma)
            for name in runnable
            for gamma in OWN_GAMMAS
        ]
        found: dict[str, dict[int, tuple[float, Passes]]] = {}
        base: list[float] = []
        try:
            with self._prompts() as read, self._kept("own"):
                for engines in self._pairs(capacity, wanted):
                    block = block_of(read(), self._batch)
                    for drafting, engine in engines:
                        if drafting is None:
                            base += self._stock(engine, block, range(STOCK_PASSES))
                        else:
                            by_gamma = found.setdefault(drafting.name, {})
                            by_gamma[drafting.num_speculative_tokens] = self._own_at(
                                engine, block, drafting
                            )
        finally:
            for name, by_gamma in found.items():
                self._rows += own_rows(self._case, name, by_gamma, base)

    def _pairs(
        self, capacity: Capacity, wanted: Sequence[StockMethod]
    ) -> Iterator[list[tuple[StockMethod | None, VllmEngine]]]:
        """Stock vLLM and its methods, two engines at a time: more do not fit beside each other."""
        everything: list[StockMethod | None] = [None, *wanted]
        guard = MemoryGuard()
        for first in range(0, len(everything), 2):
            pair = everything[first : first + 2]
            if first and time.monotonic() > self._until_s - 90.0:
                left = [one.num_speculative_tokens for one in everything[first:] if one]
                say(f"no time to start engines at gamma {left}")
                return
            # Of engines that start side by side none knows what was in use before all of them.
            guard.wait(_FREE_S).refuse_held("vLLM")
            arms = [Arm(capacity=capacity, drafting=drafting) for drafting in pair]
            with engines_of(self._checkpoint, arms) as engines:
                yield list(zip(pair, engines, strict=True))

    def _own_at(
        self, engine: VllmEngine, block: PromptBlock, drafting: StockMethod
    ) -> tuple[float, Passes]:
        """Throughput that gamma is chosen by, and the passes that are published if it is."""
        engine.prepare(block)
        name = drafting.name
        search, published = Passes(drafting.config), Passes(drafting.config)
        for number in range(2):
            self._take(engine, block, f"search {name}", search, 300 + number)
        for number in range(STOCK_PASSES):
            self._take(engine, block, f"own {name}", published, 500 + number)
        return mean_of(search.rates), published

    # ------------------------------------------------------------------ pieces

    def _capacity(self, also: Sequence[SpeculationConfig]) -> Capacity:
        return capacity_of(
            self._checkpoint,
            self._batch,
            num_prompts=self._batch + SPARE_PROMPTS,
            context=CONTEXT,
            gammas=GAMMAS,
            max_ratio=max(RATIOS),
            also=also,
        )

    @contextmanager
    def _prompts(self) -> Iterator[Callable[[], list[tuple[int, ...]]]]:
        """Reads prompts while engines start."""
        with ThreadPoolExecutor(1) as pool:
            count = self._batch + SPARE_PROMPTS
            reading = pool.submit(source_prompts, self._checkpoint.tokenizer, count, CONTEXT)
            yield reading.result

    @contextmanager
    def _kept(self, part: str) -> Iterator[None]:
        """Writes the passes in any case, before engines take their time to end."""
        try:
            yield
        finally:
            self._evidence.write()
            self._rows.append(not_steady_row(self._case, part, self._evidence.not_steady))

    def _stock(self, engine: VllmEngine, block: PromptBlock, numbers: Sequence[int]) -> list[float]:
        engine.prepare(block)
        return [
            self._evidence.take(
                engine, block, f"stock {self._case}", replicate=number, tokens=RACE_TOKENS
            ).decode_tok_s.est
            for number in numbers
        ]

    def _say_refused(self, refused: Mapping[str, str]) -> None:
        for name, why in refused.items():
            say(f"  NOT SERVED: {name}: {why}")
            case = f"{self._case} method={name}: {' '.join(why.split())}"
            self._rows.append(row("not_served", case, 0.0, "figures"))


if __name__ == "__main__":
    main()
