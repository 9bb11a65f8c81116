"""Compile the draft loop's Triton kernels as a worker launches them, for a GPU that is not there.

TRITON_INTERPRET=0 CUDA_VISIBLE_DEVICES= python tests/compile_drafts.py 90
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
from compile_triton import COMPILED, NoGPU, compile_instead_of_launching
from triton.runtime import driver

from vegas_runtime.vllm_plugin.draft_sampling import DraftSampler
from vegas_runtime.vllm_plugin.draft_steps import DraftSteps

REQUESTS, DRAFTS, VOCABULARY = 8, 6, 49152


def walk(batch: int, *, use_fp64: bool) -> None:
    """One draft step of a batch."""
    cpu = torch.device("cpu")
    ints = torch.zeros(REQUESTS, dtype=torch.int32)
    steps = DraftSteps(max_requests=REQUESTS, max_drafts=DRAFTS, vocab_size=VOCABULARY, device=cpu)
    steps.begin(
        request_ids=torch.arange(batch),
        num_sampled=ints,
        num_computed=ints,
        num_blocks=ints,
        block_size=16,
        max_len=512,
        padded=batch,
    )
    steps.advance(
        batch,
        last_sampled=torch.zeros(REQUESTS, 1, dtype=torch.int64),
        block_table=torch.zeros(batch, 32, dtype=torch.int32),
        block_size=16,
    )
    counts = torch.zeros(REQUESTS, VOCABULARY, dtype=torch.int32)
    sampler = DraftSampler(
        max_requests=REQUESTS,
        logits=torch.zeros(REQUESTS, DRAFTS, VOCABULARY),
        use_fp64=use_fp64,
    )
    tokens = sampler.sample(
        torch.zeros(batch, VOCABULARY, dtype=torch.bfloat16),
        requests=steps.active[:batch],
        positions=steps.positions[:batch],
        step=steps.step,
        penalties=SimpleNamespace(
            prompt_bin_mask=torch.zeros(REQUESTS, VOCABULARY // 32, dtype=torch.int32),
            output_bin_counts=counts,
        ),
    )
    steps.record(tokens, output_counts=counts)
    steps.forget(batch, DRAFTS, output_counts=counts)


if __name__ == "__main__":
    driver.set_active(NoGPU(int(sys.argv[1])))
    compile_instead_of_launching()
    walk(1, use_fp64=False)
    walk(REQUESTS, use_fp64=True)
    sys.stdout.write(" ".join(sorted(COMPILED)))
