"""Runs engines on the CPU test bed and prints what they did, as JSON; a process of its own.

The bed replaces parts of vLLM and of Triton's interpreter for the whole process, so tests start
this file instead of importing it.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm_bed as bed
from plain_collector import PlainCollector
from torch import Tensor

from vegas_runtime.vllm_plugin import control
from vegas_runtime.vllm_plugin.draft_sampling import FORBIDDEN, DraftSampler
from vegas_runtime.vllm_plugin.worker_hooks import WORKER_HOOKS

GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.7, "seed": 7}
FILTERED: dict[str, Any] = {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "seed": 7}
PENALISED: dict[str, Any] = {
    "temperature": 0.9,
    "seed": 3,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.1,
}
GAMMA = 3
NEW = 10


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids."""
    drawn = random.Random(seed)
    return [drawn.randrange(bed.VOCABULARY) for _ in range(length)]


# More requests than run at once, and prompts longer than a step's tokens.
MIXED = [prompt(length, seed) for seed, length in enumerate((5, 40, 70, 33, 18, 80))]
# The first reaches the context's end after 6 tokens.
LONG = [prompt(250, 11), prompt(20, 12), prompt(60, 13)]


def main() -> None:
    """Print the scenarios' results."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    bed.save_tiny_llama(folder)
    stock = run_stock(folder)
    report = {"stock": stock, **run_plugin(folder, stock), **run_crowded(folder)}
    report["draws"] = draw()
    report["deviations"] = {hook.target: hook.deviation() for hook in WORKER_HOOKS}
    sys.stdout.write(json.dumps(report))


def run_stock(folder: Path) -> dict[str, Any]:
    """What every other engine must repeat."""
    engine = bed.start(folder)
    mixed = bed.generate(engine, MIXED, max_tokens=NEW, **GREEDY)
    scored = bed.results(engine, MIXED[:2], max_tokens=6, logprobs=2, **GREEDY)
    return {
        "runner": type(worker_of(engine).model_runner).__module__,
        "mixed": mixed,
        "long": bed.generate(engine, LONG, max_tokens=30, **GREEDY),
        "penalised": bed.generate(engine, MIXED, max_tokens=NEW, **PENALISED | GREEDY),
        "stopped": bed.generate(
            engine, MIXED[:2], max_tokens=NEW, stop_token_ids=[mixed[0][6]], **GREEDY
        ),
        "logprobs": logprobs(scored),
    }


def run_plugin(folder: Path, stock: dict[str, Any]) -> dict[str, Any]:
    """One engine, its setting changed while it runs."""
    engine = bed.start_plugin(folder, collector=PlainCollector, speculative_config=rfc(1.0))
    configure = configurer(engine)
    report: dict[str, Any] = {"status": control.call(engine.llm_engine.engine_core, "vegas_status")}
    kinds = {"greedy": GREEDY, "sampled": SAMPLED, "filtered": FILTERED, "penalised": PENALISED}
    for name, sampling in kinds.items():
        with counted(engine) as counts:
            bed.generate(engine, MIXED, max_tokens=NEW, **sampling)
        report[f"everything_{name}"] = counts
    report["sparse_in_force"] = configure(sparsity_ratio=0.3, min_tokens=6)
    with counted(engine) as counts:
        report["sparse"] = bed.generate(engine, MIXED, max_tokens=NEW, **GREEDY)
    report["sparse_counts"] = counts
    report["penalised"] = bed.generate(engine, MIXED, max_tokens=NEW, **PENALISED | GREEDY)
    report["long"] = bed.generate(engine, LONG, max_tokens=30, **GREEDY)
    report["stopped"] = bed.generate(
        engine, MIXED[:2], max_tokens=NEW, stop_token_ids=[stock["mixed"][0][6]], **GREEDY
    )
    scored = bed.results(engine, MIXED[:2], max_tokens=6, logprobs=2, **GREEDY)
    report["logprobs"] = logprobs(scored)
    runner = worker_of(engine).model_runner
    for name, change in (
        ("off", {"num_speculative_tokens": 0}),
        ("fewer", {"num_speculative_tokens": 2}),
        ("streaming", {"num_speculative_tokens": GAMMA, "algorithm": "streaming_llm"}),
    ):
        configure(**change)
        steps = runner.collector.steps
        with counted(engine) as counts:
            report[name] = bed.generate(engine, MIXED, max_tokens=NEW, **GREEDY)
        report[f"{name}_counts"] = counts | {"collected": runner.collector.steps - steps}
    report["counts_left"] = int(runner.sampler.penalties_state.output_bin_counts.min())
    return report


def run_crowded(folder: Path) -> dict[str, Any]:
    """The plugin's own collector, and too few KV blocks for all that run."""
    engine = bed.start_plugin(
        folder,
        collector=OWN_COLLECTOR,
        speculative_config=rfc(0.5),
        num_gpu_blocks_override=12,
        max_model_len=128,
    )
    with counted(engine) as counts:
        tokens = bed.generate(engine, MIXED, max_tokens=NEW, **GREEDY)
    again = bed.generate(engine, MIXED[5:], max_tokens=NEW, **GREEDY)
    return {
        "crowded": tokens,
        "crowded_counts": counts,
        "cached": again,
        "cache_hits": bed.metrics(engine)["prefix_cache_hits"],
    }


def draw() -> list[dict[str, Any]]:
    """The draft sampler alone: what it keeps of each case, and how often it draws what it keeps.

    All rows of a batch belong to one request and differ in position, hence in noise.
    """
    cases: list[dict[str, float]] = [
        {"temperature": 0.5, "top_k": 12},
        {"temperature": 1.0},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
        {"temperature": 0.9, "repetition_penalty": 1.4, "presence_penalty": 0.5},
        {"temperature": 0.0},
    ]
    vocab_size, request = 1500, 2
    found = []
    for index, case in enumerate(cases):
        # The interpreter takes 30 ms a row; one case is enough to count what is drawn.
        rows = 120 if index == 0 else 8
        torch.manual_seed(index)
        logits = 2.0 * torch.randn(vocab_size)
        bits = torch.zeros(4, vocab_size // 32 + 1, dtype=torch.int32)
        bits[request, : 2 + index] = 0b1011
        counts = torch.zeros(4, vocab_size, dtype=torch.int32)
        counts[request, 100:140] = 2
        q = torch.zeros(4, 2, vocab_size)
        sampler = DraftSampler(max_requests=rows, logits=q, use_fp64=False)
        for name, value in case.items():
            sampler._states[name][request] = value
        sampler._states["seeds"][request] = 77 + index
        tokens = sampler.sample(
            logits.expand(rows, vocab_size).contiguous(),
            requests=torch.full((rows,), request, dtype=torch.int32),
            positions=torch.arange(rows),
            step=torch.tensor(1),
            penalties=SimpleNamespace(prompt_bin_mask=bits, output_bin_counts=counts),
        )
        found.append(judge(case, logits, bits[request], counts[request], q[request, 1], tokens))
        found[-1]["others_untouched"] = bool((q[[0, 1, 3]] == 0).all() and (q[2, 0] == 0).all())
    return found


def judge(
    case: dict[str, float], logits: Tensor, bits: Tensor, counts: Tensor, q: Tensor, tokens: Tensor
) -> dict[str, Any]:
    """Compare with the same steps in plain PyTorch, which filter to the token."""
    token = torch.arange(len(logits))
    is_seen = ((bits[token // 32] >> (token % 32)) & 1).bool() | (counts > 0)
    factor = case.get("repetition_penalty", 1.0)
    wanted = torch.where(is_seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    wanted = wanted - case.get("presence_penalty", 0.0) * (counts > 0)
    temperature = case["temperature"] or 1.0
    order = wanted.argsort(descending=True)
    top = order[: int(case.get("top_k", len(logits)))]
    mass = (wanted[top] / temperature).softmax(0)
    kept = top[mass.cumsum(0) - mass < case.get("top_p", 1.0)]
    is_kept = q > FORBIDDEN
    weights = (q / temperature).softmax(0)
    # Pearson's statistic over the eight likeliest tokens and the rest together.
    likely = weights.argsort(descending=True)[:8]
    expected = torch.cat([weights[likely], 1 - weights[likely].sum(0, keepdim=True)]) * len(tokens)
    seen = torch.stack([(tokens == index).sum() for index in likely])
    seen = torch.cat([seen, len(tokens) - seen.sum(0, keepdim=True)])
    usable = expected > 1e-3
    exact = torch.zeros_like(weights)
    exact[kept] = (wanted[kept] / temperature).softmax(0)
    return {
        "missing": int((~is_kept[kept]).sum()),
        "distance": float((weights - exact).abs().sum() / 2),
        "error": float((q - wanted)[is_kept].abs().max()),
        "forbidden_drawn": int((~is_kept[tokens]).sum()),
        "chi_square": float(((seen - expected) ** 2 / expected)[usable].sum()),
        "argmax": bool((tokens == wanted.argmax()).all()),
    }


def rfc(ratio: float) -> dict[str, Any]:
    """A speculative config with room for every ratio."""
    return {
        "method": "sparse_attn",
        "num_speculative_tokens": GAMMA,
        "sparse_attn_ratio": ratio,
        "sparse_attn_min_tokens": 6,
        "sparse_attn_max_ratio": 1.0,
        "sparse_attn_num_speculative_tokens_set": [0, 2, GAMMA],
    }


def worker_of(engine: Any) -> Any:
    """The in-process worker."""
    return engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def configurer(engine: Any) -> Callable[..., dict[str, Any]]:
    """Change the setting through vLLM's engine core."""
    core = engine.llm_engine.engine_core
    return lambda **values: dict(control.call(core, "vegas_configure", values))


@contextmanager
def counted(engine: Any) -> Iterator[dict[str, float]]:
    """Draft counters and preemptions of what runs inside."""
    names = {
        "drafts": "spec_decode_num_draft_tokens",
        "accepted": "spec_decode_num_accepted_tokens",
        "preemptions": "num_preemptions",
    }
    before = bed.metrics(engine)
    counts: dict[str, float] = {}
    yield counts
    after = bed.metrics(engine)
    for short, name in names.items():
        counts[short] = after[name] - before[name]


def logprobs(outputs: Any) -> list[list[dict[int, float]]]:
    """Log-probabilities by position and token."""
    return [
        [{token: entry.logprob for token, entry in step.items()} for step in o.outputs[0].logprobs]
        for o in outputs
    ]


def own_collector() -> Any:
    """The plugin's, before a scenario puts another in its place."""
    from vegas_runtime.vllm_plugin import collection

    return collection.Collector


OWN_COLLECTOR = own_collector()

if __name__ == "__main__":
    main()
