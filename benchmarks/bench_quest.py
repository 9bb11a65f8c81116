"""What Quest's selection takes per layer of a draft step on one GPU, and its bounds per pass.

    python -m benchmarks.bench_quest [--shapes NAME ...] [--rounds N] [--no-write]

Random keys: the work depends on lengths alone. Everything is captured in CUDA graphs, which are
replayed in turn; four layers of bounds are gone through, so that the cache of the GPU does not
hold the one that is read. Rows go to results/quest_h200.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.bench_collection import GAMMA, RATIO, SHAPES
from benchmarks.kernel_batch import Shape, make_batch
from benchmarks.replay_times import graphed, row, times_us
from benchmarks.results_file import Row, write_rows
from vegas_runtime.vllm_plugin.draft_lists import DraftLists
from vegas_runtime.vllm_plugin.geometry import AttentionShape, Limits
from vegas_runtime.vllm_plugin.quest_pages import QuestPages
from vegas_runtime.vllm_plugin.triton_quest import score_pages
from vegas_runtime.vllm_plugin.triton_select import Units

LAYERS = 4
BLOCK_SIZE = 16


def bench_shape(shape: Shape, rounds: int, max_len: int) -> list[Row]:
    """One model's layer on one batch, in an engine for contexts of up to `max_len` tokens."""
    batch, device = make_batch(shape), torch.device("cuda")
    pages = QuestPages(
        AttentionShape(
            num_layers=LAYERS,
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=torch.bfloat16,
            block_size=BLOCK_SIZE,
            scale=shape.head_dim**-0.5,
        ),
        Limits(
            max_batch=shape.batch,
            max_len=max_len,
            max_rows=GAMMA + 1,
            max_ratio=RATIO,
            min_tokens=256,
        ),
        device,
        is_in_force=torch.ones(1, dtype=torch.int32, device=device),
        ratio=torch.tensor([RATIO], dtype=torch.float64, device=device),
        min_tokens=torch.tensor([256], dtype=torch.int32, device=device),
    )
    pages.bind(batch.k)

    def rebuild() -> None:
        pages.rebuild([batch.k] * LAYERS)

    rebuild()
    B = shape.batch  # noqa: N806
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    lists = DraftLists(
        entries=torch.zeros(1, B, 1, max_len, **ints),
        counts=torch.zeros(B, **ints),
        tail_start=torch.zeros(B, **ints),
        pages=None,
        used=torch.zeros(B, **ints),
    )
    pages.begin_draft(batch.lens, lists)
    q = torch.randn(B, shape.heads, shape.head_dim, device=device).to(torch.bfloat16)

    def score() -> None:
        for layer in range(LAYERS):
            score_pages(
                q,
                bounds=pages.bounds(layer),
                block_table=batch.table,
                block_size=BLOCK_SIZE,
                counts=lists.counts,
                tail_start=lists.tail_start,
                scale=shape.head_dim**-0.5,
                scores=pages._scores[:B],
                parts=pages._parts[:B],
            )

    def select() -> None:
        for layer in range(LAYERS):
            pages.select(
                layer,
                q,
                block_table=batch.table,
                seq_lens=batch.lens,
                units=Units(block=BLOCK_SIZE),
                with_tail=False,
                lists=lists,
            )

    def written(rows: int) -> Callable[[], None]:
        """So many tokens of each request, the last of them anywhere in a page."""
        last = torch.randint(0, shape.context - rows, (B, 1), device=device)
        positions = last + torch.arange(rows, device=device)
        blocks = batch.table.gather(1, positions // BLOCK_SIZE).long()
        slots = (blocks * BLOCK_SIZE + positions % BLOCK_SIZE).flatten()

        def run() -> None:
            for layer in range(LAYERS):
                pages.written(layer, batch.k, slots)

        return run

    calls: dict[str, Callable[[], None]] = {
        "quest_score_us": score,
        "quest_score_and_select_us": select,
        "quest_bounds_draft_us": written(1),
        "quest_bounds_verify_us": written(GAMMA + 1),
        "quest_bounds_prefill_us": written(min(8192 // B, shape.context - 1)),
        "quest_rebuild_us": rebuild,
    }
    samples = times_us([graphed(call) for call in calls.values()], rounds).T / LAYERS
    label = f"{shape.label} engine {max_len}"
    rows = [
        row(name.replace("_us", "_us_per_layer"), label, column, "us")
        for name, column in zip(calls, samples, strict=True)
    ]
    read = B * shape.context / 16 * shape.kv_heads * 2 * shape.head_dim * 2
    rate = read / (samples[0] * 1e6)
    rows.append(row("quest_score_tb_per_s", label, rate, "TB/s"))
    return rows


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows: list[Row] = []
    for name in options.shapes:
        shape = SHAPES[name]
        for max_len in (8192 if shape.context <= 8192 else 32768, 131072):
            rows += bench_shape(shape, options.rounds, max_len)
            torch.cuda.empty_cache()
    if not options.no_write:
        print(write_rows("quest_h200", rows, device="cuda"))


if __name__ == "__main__":
    main()
