"""Shared by the acceptance scripts: one prefilled set of real prompts, many settings.

Acceptance does not depend on how busy the machine is, so float32 and any load will do. Every
setting's greedy output is compared with plain decoding's, token for token.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np

from benchmarks.results_file import Row
from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.engine.paged import AttentionChoice
from vegas_runtime.engine.reference import Generation, ReferenceEngine
from vegas_runtime.metrics import accepted_per_iteration, survival
from vegas_tune.workload import build_workload
from vegas_tune.workload_spec import WorkloadSpec

RESAMPLES = 4000


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Arguments that every acceptance script takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each prompt")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=80, help="new tokens of each prompt")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


@dataclass
class Bench:
    """An engine, its prompts, and plain decoding's outputs to compare with."""

    engine: ReferenceEngine
    prompts: tuple[tuple[int, ...], ...]
    context: int
    tokens: int
    plain: tuple[tuple[int, ...], ...]
    iterations: int = 0
    mismatches: int = 0

    @classmethod
    def open(cls, args: argparse.Namespace, attention: AttentionChoice = "auto") -> Bench:
        """Load the model, prefill the prompts, decode them plainly once."""
        engine = ReferenceEngine.open(
            model=args.model,
            max_num_speculative_tokens=15,
            dtype=args.dtype,
            device=args.device,
            attention=attention,
        )
        spec = WorkloadSpec(context_len=args.context, batch_size=args.prompts, num_blocks=1)
        prompts = build_workload(spec, engine.tokenizer).blocks[0].prompts
        bench = cls(engine, prompts, args.context, args.tokens, ())
        plain = bench._generate(SpeculationConfig(num_speculative_tokens=0, sparsity_ratio=1.0))
        bench.plain = plain.outputs
        return bench

    def _generate(self, config: SpeculationConfig) -> Generation:
        self.engine.configure(config)
        return self.engine.generate(
            self.prompts, max_new_tokens=self.tokens, sampling=SamplingConfig()
        )

    def measure(self, **knobs: object) -> list[Row]:
        """Decode every prompt at one setting.

        Returns:
            Mean accepted drafts per iteration with its interval (bootstrap over prompts), and
            the probability that the first i drafts were all accepted.
        """
        config = SpeculationConfig.from_dict({"min_tokens": 1, **knobs})
        generation = self._generate(config)
        gamma = config.num_speculative_tokens
        by_prompt: dict[int, list[int]] = {}
        for step in generation.steps:
            if step.kind == "decode":
                pairs = zip(step.request_ids, step.num_accepted_tokens, strict=True)
                for request, accepted in pairs:
                    by_prompt.setdefault(request, []).append(accepted)
        counts = [count for own in by_prompt.values() for count in own]
        self.iterations += len(counts)
        pairs = zip(generation.outputs, self.plain, strict=True)
        self.mismatches += sum(ours != plain for ours, plain in pairs)
        low, high = bootstrap(list(by_prompt.values()))
        case = self.case(config)
        mean = accepted_per_iteration(sum(counts), len(counts))
        print(f"{case}: {mean:.2f} [{low:.2f}, {high:.2f}]", flush=True)
        rows = [
            Row(
                claim="accepted_per_iteration",
                case=case,
                value=round(mean, 3),
                low=round(low, 3),
                high=round(high, 3),
                unit=f"drafts of {gamma}",
            )
        ]
        alive = survival(counts, gamma)
        for i, value in enumerate(alive, start=1):
            error = 1.96 * math.sqrt(value * (1 - value) / len(counts))
            rows.append(
                Row(
                    claim="first_i_drafts_accepted",
                    case=f"{case} i={i}",
                    value=round(value, 4),
                    low=round(max(value - error, 0), 4),
                    high=round(min(value + error, 1), 4),
                    unit="probability",
                )
            )
        return rows

    def case(self, config: SpeculationConfig) -> str:
        """How a setting is named in the results."""
        rows = f" rows={config.rows}" if config.algorithm == "vegas" else ""
        return (
            f"policy={config.algorithm}{rows} gamma={config.num_speculative_tokens} "
            f"ratio={config.sparsity_ratio:g} context={self.context}"
        )

    def lossless_row(self, script: str) -> Row:
        """Greedy sequences that differ from plain decoding, over everything measured so far."""
        return Row(
            claim="greedy_mismatches",
            case=f"{script} context={self.context} iterations={self.iterations}",
            value=float(self.mismatches),
            low=None,
            high=None,
            unit="sequences",
        )


def bootstrap(by_prompt: list[list[int]]) -> tuple[float, float]:
    """95 % interval of the mean, resampling prompts: iterations of one prompt are correlated."""
    rng = np.random.default_rng(0)
    sums = np.array([sum(own) for own in by_prompt], dtype=float)
    sizes = np.array([len(own) for own in by_prompt], dtype=float)
    picks = rng.integers(0, len(by_prompt), size=(RESAMPLES, len(by_prompt)))
    means = sums[picks].sum(1) / sizes[picks].sum(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
