"""Scores by a normaliser known beforehand against exact ones, on a real model's attention.

A kernel that sums weights over rows and heads in one pass must know each head's normaliser before
the pass has run. How much of the attention is lost when it takes a stale one? A real decode is
watched: queries and keys of every verify block, and the normalisers of the draft steps before it.
Lists are picked by the operations' own oracle (`kernels.paged`), rounding included.

    captured_vs_exact   attention mass of the collected rows inside the picked list, over that
                        inside the list of exact scores; 1 is no loss
    captured            the same mass as a fraction of all attention of these rows
    overlap             entries that both lists hold
    normaliser_error    |stale - true| of the first and the last row, nats
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from benchmarks.acceptance import RESAMPLES
from benchmarks.results_file import Row, write_rows
from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.engine.attention import ATTENTION_NAME, PASS_KEYWORD, attention_forward
from vegas_runtime.engine.reference import ReferenceEngine
from vegas_runtime.kernels import paged
from vegas_tune.workload import build_workload
from vegas_tune.workload_spec import WorkloadSpec

GAMMA: Final = 7
RATIOS: Final = (0.03, 0.07, 0.15)
# Context length and prompts of it: the length weighs on the time, prompts on the interval.
CONTEXTS: Final = ((2048, 5), (4096, 4), (7400, 3))
DEPTHS: Final = 3
BY_DEPTH: Final = "captured_vs_exact_by_depth"
BY_CONTEXT: Final = "captured_vs_exact_by_context"

# One measured value: claim, case without the context, value.
Value = tuple[str, str, float]


@dataclass
class Watch:
    """Stands in for the attention function and measures each verify block as it passes.

    Attributes:
        config: the setting in force.
        values: measured since the last `take`, by claim and case.
    """

    config: SpeculationConfig
    num_layers: int
    values: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    _drafted: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    _verified: dict[int, tuple[int, Tensor]] = field(default_factory=dict)

    def __call__(self, module: nn.Module, *tensors: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Attention as the engine registers it."""
        this, layer = kwargs[PASS_KEYWORD], int(module.layer_idx)  # type: ignore[arg-type]
        query, key = tensors[0][0].float(), tensors[1][0].float()
        columns = this.windows[None].num_columns
        if this.score is not None or query.shape[1] == 1:
            logits = products(query, key[:, :columns], kwargs["scaling"])
            if this.score is None:
                self._drafted[layer].append(logits[0].logsumexp(-1))
            else:
                self._verify(layer, logits, key.shape[0])
        return attention_forward(module, *tensors, **kwargs)

    def start(self) -> None:
        """Forget the last request."""
        self._drafted.clear()
        self._verified.clear()

    def take(self) -> dict[tuple[str, str], float]:
        """Means of what was measured since the last call."""
        means = {name: float(np.mean(values)) for name, values in self.values.items()}
        self.values.clear()
        return means

    def _verify(self, layer: int, logits: Tensor, num_kv_heads: int) -> None:
        """Measure one layer of a verify block with logits [S, H, N]."""
        num_rows, _, num_tokens = logits.shape
        prefix = num_tokens - num_rows
        hidden = torch.arange(num_tokens) > prefix + torch.arange(num_rows)[:, None]
        lse = logits.masked_fill(hidden[:, None], -torch.inf).logsumexp(-1)
        drafted, before = self._drafted.pop(layer, []), self._verified.get(layer)
        self._verified[layer] = (prefix, lse)
        if len(drafted) != self.config.num_speculative_tokens or before is None:
            return
        # The row whose token the last block's accept test emitted from.
        last_accepted = before[1][prefix - before[0] - 1]
        steps = torch.stack(drafted)
        hints = {
            "last draft": steps[-1].expand_as(lse),
            "first draft": steps[0].expand_as(lse),
            "mean draft": steps.mean(dim=0).expand_as(lse),
            "own draft": torch.cat((steps, steps[-1:])),
            "last verify": last_accepted.expand_as(lse),
            "none": lse.max().expand_as(lse),
        }
        block = Block(
            logits=logits[..., : prefix + 1],
            lse=lse,
            hints=hints,
            budget=self.config.kv_budget(prefix),
            num_kv_heads=num_kv_heads,
        )
        first = self.num_layers // DEPTHS * (layer * DEPTHS // self.num_layers)
        for claim, case, value in block.measure():
            self.values[claim, case].append(value)
            if claim == "captured_vs_exact":
                self.values[BY_DEPTH, f"{case} layers {first}.."].append(value)


def products(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Scaled logits [S, H, N] of queries [H, S, D] and keys [Hkv, N, D]."""
    grouped = query.unflatten(0, (key.shape[0], -1))
    return (torch.einsum("kgsd,knd->skgn", grouped, key) * scale).flatten(1, 2)


@dataclass(kw_only=True)
class Block:
    """One layer of one verify block.

    Attributes:
        logits: [S, H, C] of the candidates.
        lse: [S, H] true normalisers.
        hints: [S, H] normalisers by where they come from; only "own draft", each row's from the
            draft step of the same token, differs between rows, and no kernel takes it yet.
        budget: entries kept.
        num_kv_heads: Hkv.
    """

    logits: Tensor
    lse: Tensor
    hints: dict[str, Tensor]
    budget: int
    num_kv_heads: int

    def measure(self) -> Iterable[Value]:
        """Every claim of this block."""
        ends = self.lse[[0, -1]]
        for name, hint in self.hints.items():
            if name != "none":
                yield "normaliser_error", name, float((hint[[0, -1]] - ends).abs().mean())
        every = list(range(self.lse.shape[0]))
        for rows, which in ((every[:1] + every[-1:], "two"), (every, "all")):
            exact = self._weights(rows)
            for scope in ("layer", "kv_head"):
                target = exact if scope == "kv_head" else exact.sum(dim=0, keepdim=True)
                best = target.topk(self.budget, dim=-1).indices
                mass = target.gather(-1, best).sum()
                whole = len(rows) * self.lse.shape[1]
                yield "captured", f"exact scores {which} {scope}", float(mass / whole)
                for name, ranks in self._ranked(rows, which):
                    keys = ranks(scope == "kv_head")
                    # Lowest position first among equals, as every path has it.
                    order = keys.sort(dim=-1, descending=True, stable=True).indices
                    picked = order[:, : self.budget]
                    case = f"{name} {which} {scope}"
                    kept = target.gather(-1, picked).sum()
                    yield "captured_vs_exact", case, float(kept / mass)
                    both = torch.zeros_like(target, dtype=torch.bool).scatter_(-1, best, True)
                    yield "overlap", case, float(both.gather(-1, picked).float().mean())

    def _weights(self, rows: list[int]) -> Tensor:
        """Exact weights [Hkv, C], summed over rows and the heads of a group."""
        weights = torch.exp(self.logits[rows] - self.lse[rows][..., None])
        return weights.unflatten(1, (self.num_kv_heads, -1)).sum(dim=(0, 2))

    def _ranked(
        self, rows: list[int], which: str
    ) -> Iterable[tuple[str, Callable[[bool], Tensor]]]:
        """Modes of collection: name, and a function from "per head" to sorting keys [Hd, C]."""
        for name, hint in self.hints.items():
            # The oracle takes one normaliser per head, so differences go into the logits.
            logits = self.logits - hint[..., None]
            zero = torch.zeros_like(hint[0])
            weights = paged.hint_scores(logits, zero, rows, self.num_kv_heads)
            yield f"{name} bf16", self._keys(weights.to(torch.bfloat16))
            if name == "mean draft":
                yield f"{name} byte", self._keys(paged.encode_scores(weights))
        if which == "two":
            yield "exact codes", self._exact_keys()

    def _keys(self, score: Tensor) -> Callable[[bool], Tensor]:
        return lambda per_head: paged.selection_keys(score[None, None], per_head=per_head)[0, 0]

    def _exact_keys(self) -> Callable[[bool], Tensor]:
        """Codes per row relative to the draft steps' mean normaliser; the true one applied."""
        hint, candidates = self.hints["mean draft"][0], self.logits.shape[-1]
        score = paged.exact_scores(self.logits, hint, self.num_kv_heads)

        def keys(per_head: bool) -> Tensor:
            ranked = paged.selection_keys(
                score[None, None],
                per_head=per_head,
                reference=hint[None, None],
                lse=self.lse[[0, -1]][None, None],
                queries=torch.tensor([2]),
            )
            return ranked[0, 0, :, :candidates]

        return keys


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=40, help="new tokens of each prompt")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    engine = ReferenceEngine.open(
        model=args.model, max_num_speculative_tokens=GAMMA, dtype=args.dtype, device="cpu"
    )
    by_prompt: dict[tuple[str, str], list[float]] = defaultdict(list)
    for context, count in CONTEXTS:
        spec = WorkloadSpec(context_len=context, batch_size=count, num_blocks=1)
        prompts = build_workload(spec, engine.tokenizer).blocks[0].prompts
        for ratio in RATIOS:
            config = SpeculationConfig(
                num_speculative_tokens=GAMMA, sparsity_ratio=ratio, min_tokens=1
            )
            engine.configure(config)
            watch = Watch(config, engine.info.model["num_layers"])
            AttentionInterface.register(ATTENTION_NAME, watch)
            for prompt in prompts:
                watch.start()
                engine.generate([prompt], max_new_tokens=args.tokens, sampling=SamplingConfig())
                for (claim, case), value in watch.take().items():
                    by_prompt[claim, f"{case} {ratio:.0%}"].append(value)
                    if claim == "captured_vs_exact":
                        where = f"{case} {ratio:.0%} context={context}"
                        by_prompt[BY_CONTEXT, where].append(value)
            print(f"context {context}, ratio {ratio:.0%}: {len(prompts)} prompts", flush=True)
    print(write_rows("hint_ablation", [as_row(*item) for item in sorted(by_prompt.items())]))


def as_row(name: tuple[str, str], values: list[float]) -> Row:
    """Mean over prompts, and its 95 % interval by bootstrap over them."""
    claim, case = name
    sample, rng = np.array(values), np.random.default_rng(0)
    means = sample[rng.integers(0, len(sample), (RESAMPLES, len(sample)))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return Row(
        claim=claim,
        case=case,
        value=round(float(sample.mean()), 5),
        low=round(float(low), 5),
        high=round(float(high), 5),
        unit="nats" if claim == "normaliser_error" else "fraction",
    )


if __name__ == "__main__":
    main()
