"""Every selection method at an equal budget on real text: the table of the reference engine.

Contexts of 4K and 7.4K tokens, greedy and sampled (temperature 0.6, three seeds), one gamma, two
budgets. Every method decodes the same prompts with the same random numbers. Work is split into
parts that run side by side and append each finished setting to a file: the same command goes on
where a stopped one was, and writes the results once every part is complete.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.acceptance import RESAMPLES
from benchmarks.results_file import Row, write_rows
from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.machine import device_facts, runtime_facts

GAMMA: Final = 7
RATIOS: Final = (0.07, 0.03)
# Name in the table -> knobs. The first is what the others are compared with.
METHODS: Final[dict[str, dict[str, str]]] = {
    "vegas": {"algorithm": "vegas"},
    "vegas, all rows": {"algorithm": "vegas", "rows": "all"},
    "vegas, last accepted row": {"algorithm": "vegas", "rows": "last_accepted"},
    "vegas, accepted rows": {"algorithm": "vegas", "rows": "accepted_only"},
    "vegas, three rows": {"algorithm": "vegas", "rows": "first_middle_last"},
    "vegas, per KV head": {"algorithm": "vegas", "scope": "kv_head"},
    "vegas, all rows, pages": {"algorithm": "vegas", "rows": "all", "granularity": "page"},
    "streaming_llm": {"algorithm": "streaming_llm"},
    "quest": {"algorithm": "quest"},
    "quest, per KV head": {"algorithm": "quest", "scope": "kv_head"},
    "spec_extend": {"algorithm": "spec_extend"},
    "sparse_spec": {"algorithm": "sparse_spec"},
    "snapkv": {"algorithm": "snapkv"},
    # Reads everything: every draft must be accepted, or the loop is wrong.
    "dense": {"algorithm": "dense"},
}
SAMPLINGS: Final = {
    "greedy": SamplingConfig(),
    "T0.6": SamplingConfig(temperature=0.6, top_k=20, top_p=0.95),
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one process measures.

    Attributes:
        context: tokens of each prompt.
        prompts: different texts.
        tokens: new tokens of each.
        sampling: a key of `SAMPLINGS`.
        seeds: how often each text is decoded, with random numbers of its own.
        share: this part takes every `shares`-th setting from this one on.
        shares: parts that the settings are split into.
    """

    context: int
    prompts: int
    tokens: int
    sampling: str
    seeds: int
    share: int
    shares: int

    @property
    def cell(self) -> str:
        """What the part's settings have in common."""
        return f"context={self.context} {self.sampling}"

    def settings(self) -> Iterable[tuple[str, SpeculationConfig]]:
        """Name and setting, larger budget first; its share of them."""
        everything = [
            (name, ratio)
            for ratio in RATIOS
            for name in METHODS
            if name != "dense" or ratio == RATIOS[0]
        ]
        for name, ratio in everything[self.share :: self.shares]:
            knobs = {"num_speculative_tokens": GAMMA, "sparsity_ratio": ratio, "min_tokens": 1}
            yield name, SpeculationConfig.from_dict(knobs | METHODS[name])


def main() -> None:
    """Measure what is missing, then write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 7424])
    parser.add_argument("--samplings", nargs="+", default=list(SAMPLINGS), choices=SAMPLINGS)
    parser.add_argument("--prompts", type=int, help="texts of a context; 16, and 8 beyond 4K")
    parser.add_argument("--tokens", type=int, help="new tokens of a text; 80, and 112 beyond 4K")
    parser.add_argument("--seeds", type=int, default=3, help="of a sampled text")
    parser.add_argument("--work", type=Path, default=Path("methods-work"), help="folder of parts")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    parts = make_parts(args)
    # CUDA does not survive a fork.
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(measure, part, args.model, args.device, args.work) for part in parts]
        for each in waiting:
            each.result()
    facts, rows = collect(args.work)
    print(write_rows("methods_reference", rows, facts=facts))


def make_parts(args: argparse.Namespace) -> list[Part]:
    """Contexts x samplings, the slow ones (sampled, long) split in two."""
    parts = []
    for sampling in sorted(args.samplings, key=lambda name: name == "greedy"):
        for context in sorted(args.contexts, reverse=True):
            is_long = context > 4096
            shares = 1 if sampling == "greedy" else 2
            parts += [
                Part(
                    context=context,
                    prompts=args.prompts or (8 if is_long else 16),
                    tokens=args.tokens or (112 if is_long else 80),
                    sampling=sampling,
                    seeds=1 if sampling == "greedy" else args.seeds,
                    share=share,
                    shares=shares,
                )
                for share in range(shares)
            ]
    return parts


def measure(part: Part, model: str, device: str, work: Path) -> None:
    """Decode at every setting of a part that its file does not hold yet."""
    from vegas_runtime.engine.reference import ReferenceEngine
    from vegas_tune.workload import build_workload
    from vegas_tune.workload_spec import WorkloadSpec

    path = work / f"{part.context}-{part.sampling}-{part.share}of{part.shares}.jsonl"
    done = {row["name"] + f" {row['ratio']:g}" for row in read_rows(path)}
    todo = [(n, c) for n, c in part.settings() if f"{n} {c.sparsity_ratio:g}" not in done]
    if not todo:
        return
    engine = ReferenceEngine.open(
        model=model, max_num_speculative_tokens=GAMMA, dtype="float32", device=device
    )
    spec = WorkloadSpec(context_len=part.context, batch_size=part.prompts, num_blocks=1)
    prompts = build_workload(spec, engine.tokenizer).blocks[0].prompts * part.seeds
    facts = {"machine": device_facts(device), "versions": runtime_facts(device)}

    def decode(config: SpeculationConfig) -> tuple[Any, dict[int, list[int]]]:
        engine.configure(config)
        sampling = SAMPLINGS[part.sampling]
        generation = engine.generate(prompts, max_new_tokens=part.tokens, sampling=sampling)
        accepted: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
        for step in generation.steps:
            if step.kind == "decode":
                for lane, count in zip(step.request_ids, step.num_accepted_tokens, strict=True):
                    accepted[lane].append(count)
        return generation.outputs, accepted

    plain: Any = None
    if SAMPLINGS[part.sampling].is_greedy:
        plain, _ = decode(SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0))
    for name, config in todo:
        outputs, accepted = decode(config)
        row = {
            "cell": part.cell,
            "name": name,
            "ratio": config.sparsity_ratio,
            "prompts": part.prompts,
            "accepted": list(accepted.values()),
            "differing": None if plain is None else sum(map(_differ, outputs, plain)),
            "facts": facts,
        }
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        mean = np.mean([count for lane in accepted.values() for count in lane])
        print(f"{part.cell} ratio={config.sparsity_ratio:g} {name}: {mean:.2f}", flush=True)


def _differ(one: object, other: object) -> bool:
    return one != other


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Finished settings; a line that was cut off is measured again."""
    rows = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return rows


def collect(work: Path) -> tuple[dict[str, Any], list[Row]]:
    """Rows of every finished setting, and the facts of the machine it was measured on."""
    measured = {
        (row["cell"], row["ratio"], row["name"]): row
        for path in sorted(work.glob("*.jsonl"))
        for row in read_rows(path)
    }
    rows: list[Row] = []
    order = {name: place for place, name in enumerate(METHODS)}
    for (cell, ratio, name), row in sorted(
        measured.items(), key=lambda item: (item[0][0], -item[0][1], order[item[0][2]])
    ):
        case = f"{cell} gamma={GAMMA} ratio={ratio:g} method={name}"
        first = measured.get((cell, ratio, next(iter(METHODS))))
        rows += rows_of_setting(case, row, first if first is not row else None)
    checked = [row for row in measured.values() if row["differing"] is not None]
    iterations = sum(len(lane) for row in checked for lane in row["accepted"])
    rows.append(
        Row(
            claim="greedy_mismatches",
            case=f"bench_methods iterations={iterations}",
            value=float(sum(row["differing"] for row in checked)),
            low=None,
            high=None,
            unit="sequences",
        )
    )
    return next(iter(measured.values()))["facts"], rows


def rows_of_setting(
    case: str, row: Mapping[str, Any], first: Mapping[str, Any] | None
) -> list[Row]:
    """Accepted drafts, how many fewer than the first method's, and acceptance by position."""
    own = by_text(row["accepted"], row["prompts"])
    rows = [estimate("accepted_per_iteration", case, own, f"drafts of {GAMMA}")]
    # Some methods draft a request's first tokens by another rule (sparse_spec: densely).
    later = by_text([lane[1:] for lane in row["accepted"]], row["prompts"])
    if later := [text for text in later if text]:
        claim = "accepted_after_the_first_iteration"
        rows.append(estimate(claim, case, later, f"drafts of {GAMMA}"))
    if first is not None:
        base = by_text(first["accepted"], first["prompts"])
        rows.append(estimate("accepted_minus_vegas", case, own, "drafts", minus=base))
    for position in range(1, GAMMA + 1):
        reached = [[float(count >= position) for count in text] for text in own]
        rows.append(
            estimate("first_i_drafts_accepted", f"{case} i={position}", reached, "probability")
        )
    return rows


def by_text(lanes: Sequence[Sequence[int]], prompts: int) -> list[list[float]]:
    """Iterations by text: lanes `i`, `i + prompts`, ... are seeds of one text."""
    return [
        [float(count) for lane in lanes[place::prompts] for count in lane]
        for place in range(prompts)
    ]


def estimate(
    claim: str,
    case: str,
    texts: Sequence[Sequence[float]],
    unit: str,
    minus: Sequence[Sequence[float]] | None = None,
) -> Row:
    """Mean over iterations with its 95 % interval, bootstrap over texts.

    Iterations of one text are correlated, seeds of one text too. With `minus`, both means are
    taken over the same resampled texts, so that a difference is paired.
    """
    picks = np.random.default_rng(0).integers(0, len(texts), size=(RESAMPLES, len(texts)))
    value, resampled = _means(texts, picks)
    if minus is not None:
        value_of_other, other = _means(minus, picks)
        value, resampled = value - value_of_other, resampled - other
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Row(
        claim=claim,
        case=case,
        value=round(value, 4),
        low=round(float(low), 4),
        high=round(float(high), 4),
        unit=unit,
    )


def _means(texts: Sequence[Sequence[float]], picks: Any) -> tuple[float, Any]:
    sums = np.array([sum(text) for text in texts])
    sizes = np.array([len(text) for text in texts], dtype=float)
    return float(sums.sum() / sizes.sum()), sums[picks].sum(1) / sizes[picks].sum(1)


if __name__ == "__main__":
    main()
