"""A layer's shape, and a batch on it: a filled KV cache in scattered blocks, on one GPU."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from vegas_runtime.kernels import ops

BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One layer of a model, and a batch on it."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    context: int
    layers: int
    shortest: int = 0  # unequal lengths: uniform in [shortest, context]

    @property
    def label(self) -> str:
        """Model, batch and context, as cases name them."""
        span = f"U({self.shortest}-{self.context})" if self.shortest else f"{self.context}"
        return f"{self.name} B{self.batch} x {span}"

    def lengths(self) -> list[int]:
        """Tokens cached per request."""
        if not self.shortest:
            return [self.context] * self.batch
        draw = random.Random(0)
        return [draw.randint(self.shortest, self.context) for _ in range(self.batch)]


@dataclass
class Batch:
    """A filled cache in scattered blocks and everything calls need."""

    shape: Shape
    k: Tensor
    v: Tensor
    table: Tensor
    lens: Tensor
    workspace: ops.Workspace

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all requests."""
        shape = self.shape
        return sum(shape.lengths()) * shape.kv_heads * shape.head_dim * 4


def make_batch(shape: Shape) -> Batch:
    """Random keys and values, K and V of a token side by side (vLLM 0.33's layout)."""
    device = torch.device("cuda")
    lengths = shape.lengths()
    needed = [math.ceil(n / BLOCK) for n in lengths]
    blocks = sum(needed)
    size = (blocks, BLOCK, shape.kv_heads, 2 * shape.head_dim)
    cache = torch.empty(size, dtype=torch.bfloat16, device=device)
    for part in cache.split(1 << 14):
        part.normal_()
    order = torch.randperm(blocks, device=device).to(torch.int32)
    table = torch.zeros(shape.batch, max(needed), dtype=torch.int32, device=device)
    at = 0
    for b, count in enumerate(needed):
        table[b, :count] = order[at : at + count]
        at += count
    return Batch(
        shape=shape,
        k=cache[..., : shape.head_dim],
        v=cache[..., shape.head_dim :],
        table=table,
        lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        workspace=ops.make_workspace(
            device,
            batch=shape.batch,
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
        ),
    )
