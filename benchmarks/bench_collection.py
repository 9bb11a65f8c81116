"""What collection, selection and draft attention take per layer on one GPU, path by path.

    python -m benchmarks.bench_collection [--shapes NAME ...] [--rows two|all] [--no-write]

A verify layer is timed for each collection path beside FlashAttention-3 alone on the same cache;
selection once for all layers, as an engine runs it, and divided by their number. Everything is
captured in CUDA graphs, and graphs under comparison are replayed in turn. Rows go to
results/collection_h200.json.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernel_batch import Batch, Shape, make_batch
from benchmarks.replay_times import graphed, row, times_us
from benchmarks.results_file import Row, write_rows
from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import ConfigError
from vegas_runtime.vllm_plugin import paths
from vegas_runtime.vllm_plugin.collection import Collector
from vegas_runtime.vllm_plugin.geometry import AttentionShape, Limits

GAMMA = 6
RATIO = 0.07
SPLITS = 32  # vLLM's limit in captured graphs
SHAPES = {
    "smollm2-b256": Shape(
        name="smollm2-135m", heads=9, kv_heads=3, head_dim=64, batch=256, context=7400, layers=30
    ),
    "smollm2-b32": Shape(
        name="smollm2-135m", heads=9, kv_heads=3, head_dim=64, batch=32, context=7400, layers=30
    ),
    "qwen3-8b": Shape(
        name="qwen3-8b", heads=32, kv_heads=8, head_dim=128, batch=16, context=16384, layers=36
    ),
    "gpt-oss-20b": Shape(
        name="gpt-oss-20b", heads=64, kv_heads=8, head_dim=64, batch=32, context=16384, layers=12
    ),
}


class Steps:
    """One batch's verify and draft steps on one pair of paths."""

    def __init__(self, batch: Batch, rows: str, path: str, draft_path: str, algorithm: str) -> None:
        shape, device = batch.shape, torch.device("cuda")
        self.batch = batch
        config = SpeculationConfig(
            algorithm=algorithm,
            num_speculative_tokens=GAMMA,
            sparsity_ratio=RATIO,
            **({"rows": rows} if algorithm == "vegas" else {}),  # type: ignore[arg-type]
        )
        self.collector = Collector(
            shape=AttentionShape(
                num_layers=shape.layers,
                num_heads=shape.heads,
                num_kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                dtype=torch.bfloat16,
                block_size=16,
                scale=shape.head_dim**-0.5,
            ),
            limits=Limits(
                max_batch=shape.batch,
                max_len=shape.context + 2 * GAMMA,
                max_rows=GAMMA + 1,
                max_ratio=0.1,
                min_tokens=256,
            ),
            config=config,
            device=device,
            ratio=torch.tensor([RATIO], dtype=torch.float64, device=device),
            min_tokens=torch.tensor([256], dtype=torch.int32, device=device),
            path=path,
            draft_path=draft_path,
        )
        self.collector.bind(batch.k)
        B, S = shape.batch, GAMMA + 1  # noqa: N806
        self.q = torch.randn(B * S, shape.heads, shape.head_dim, device=device).to(torch.bfloat16)
        self.out = torch.empty_like(self.q)
        self.query_start = torch.arange(B + 1, dtype=torch.int32, device=device) * S
        kept = config.kv_budget(shape.context - S)
        self.budgets = torch.full((B,), kept, dtype=torch.int32, device=device)
        self.ids = torch.arange(B, dtype=torch.int32, device=device)
        self.draft_lens = batch.lens - GAMMA + 1

    def begin(self) -> None:
        """What a verify step does once."""
        self.collector.begin_step(
            block_table=self.batch.table,
            seq_lens=self.batch.lens,
            query_start=self.query_start,
            budgets=self.budgets,
            request_ids=self.ids,
        )

    def verify(self, layer: int = 0) -> None:
        """A layer's attention and scores."""
        self.collector.verify(
            layer,
            self.q,
            self.batch.k,
            self.batch.v,
            block_table=self.batch.table,
            seq_lens=self.batch.lens,
            query_start=self.query_start,
            max_queries=GAMMA + 1,
            out=self.out,
            max_len=self.batch.shape.context,
            num_splits=SPLITS,
        )

    def select(self) -> None:
        """Every layer's selection."""
        self.collector.end_step(block_table=self.batch.table)

    def begin_draft(self) -> None:
        """What a draft step does once."""
        self.collector.begin_draft(block_table=self.batch.table, seq_lens=self.draft_lens)

    def draft(self) -> None:
        """Four layers' draft attention, whose lists lie in different places."""
        for layer in range(4):
            self.collector.draft(
                layer,
                self.q[: self.batch.shape.batch],
                self.batch.k,
                self.batch.v,
                block_table=self.batch.table,
                seq_lens=self.draft_lens,
                out=self.out[: self.batch.shape.batch],
            )

    def warm(self) -> None:
        """One step, so that every list and hint is a real one."""
        for _ in range(2):
            self.begin()
            for layer in range(self.batch.shape.layers):
                self.verify(layer)
        self.select()
        self.begin_draft()


def flash_alone(steps: Steps) -> Callable[[], object]:
    """FlashAttention-3 as stock vLLM calls it."""
    attend, batch, out = paths.flash_attention(), steps.batch, torch.empty_like(steps.q)
    return lambda: attend(
        q=steps.q,
        k=batch.k,
        v=batch.v,
        out=out,
        cu_seqlens_q=steps.query_start,
        max_seqlen_q=GAMMA + 1,
        seqused_k=batch.lens,
        max_seqlen_k=batch.shape.context,
        softmax_scale=batch.shape.head_dim**-0.5,
        causal=True,
        block_table=batch.table,
        num_splits=SPLITS,
        fa_version=3,
    )


def bench_shape(shape: Shape, rows: str, rounds: int) -> list[Row]:
    """Every path on one shape."""
    batch = make_batch(shape)
    pairs = {"fused": "kernel", "fused_exact": "kernel", "fa3": "fa3", "triton": "triton"}
    found: dict[str, Steps] = {}
    for path, draft_path in pairs.items():
        try:
            found[path] = Steps(batch, rows, path, draft_path, "vegas")
        except ConfigError as error:
            print(f"{shape.label}: {error}")
            continue
        found[path].warm()
    window = Steps(batch, rows, "triton", "fa3", "streaming_llm")
    window.begin_draft()
    any_steps = next(iter(found.values()))
    calls: dict[str, Callable[[], object]] = {"verify_us fa3 alone": flash_alone(any_steps)}
    calls |= {f"verify_us {path}": steps.verify for path, steps in found.items()}
    calls |= {f"draft_us {steps.collector.draft_path}": steps.draft for steps in found.values()}
    calls["draft_us window fa3"] = window.draft
    calls["select_us"] = any_steps.select
    calls |= {f"begin_us {path}": steps.begin for path, steps in found.items()}
    calls["begin_draft_us"] = any_steps.begin_draft
    calls["begin_draft_us window"] = window.begin_draft
    samples = times_us([graphed(call) for call in calls.values()], rounds).T
    return [
        _row(name, f"{shape.label} rows {rows}", column, shape.layers)
        for name, column in zip(calls, samples, strict=True)
    ]


def _row(name: str, case: str, samples: Tensor, layers: int) -> Row:
    """A figure per layer; what is done once per step is shared out over the layers."""
    claim, _, path = name.partition(" ")
    shares = {"verify_us": 1, "draft_us": 4}.get(claim, layers)
    return row(
        claim.replace("_us", "_us_per_layer"), f"{case} {path}".strip(), samples / shares, "us"
    )


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", choices=("two", "all"), default="two")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--batch", type=int, help="another batch size, for a quick look")
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows: list[Row] = []
    for name in options.shapes:
        shape = SHAPES[name]
        if options.batch is not None:
            shape = dataclasses.replace(shape, batch=options.batch)
        rows += bench_shape(shape, options.rows, options.rounds)
        torch.cuda.empty_cache()
    if not options.no_write:
        print(write_rows("collection_h200", rows, device="cuda"))


if __name__ == "__main__":
    main()
