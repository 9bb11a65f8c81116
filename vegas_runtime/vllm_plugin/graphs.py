"""CUDA graphs: verification's per gamma and batch, uneven batches included; drafts' per batch.

vLLM replays a FULL graph of q rows a request only when every request has exactly q rows. The graph
itself takes any batch of up to that many requests with 1 to q rows each, since all lengths live on
the device. So one request at the end of its context, or one that just arrived with a cached
prompt, need not send the whole batch to the piecewise graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)

from vegas_runtime.vllm_plugin.config import settings_of
from vegas_runtime.vllm_plugin.graph_sizes import full_graphs, mixed_graphs

# Rows run for each row of an uneven batch. The others are padding and cost linear layers' time;
# with more of them the piecewise graphs are faster.
MAX_PADDING: Final = 1.5


class VerifyGraphs(ModelCudaGraphManager):
    """The target's graphs: each declared gamma's, and piecewise ones for steps that prefill.

    Attributes:
        longest_query: rows of the request with most of them, in the step to dispatch; None for
            dummy steps, which have equal rows.
        needs_lists: whether drafts follow; plain-decoding graphs (one row) do not collect.
    """

    longest_query: int | None = None
    needs_lists: bool = False

    def _init_candidates(self) -> None:
        sizes = self.compilation_config.cudagraph_capture_sizes
        if not (self.cudagraph_mode and sizes):
            return
        settings = settings_of(self.vllm_config)
        assert settings is not None
        if self.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:
            batches = full_graphs(settings.gammas, self.max_num_reqs, sizes)
            self._capture_descs[CUDAGraphMode.FULL] = _largest_first(
                _full(batch, gamma + 1) for gamma in batches for batch in batches[gamma]
            )
        if self.cudagraph_mode.has_piecewise_cudagraphs():
            self._capture_descs[CUDAGraphMode.PIECEWISE] = _largest_first(
                BatchExecutionDescriptor(
                    cg_mode=CUDAGraphMode.PIECEWISE, num_tokens=size, num_reqs=None
                )
                for size in mixed_graphs(sizes)
            )

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Capture every graph; they share one output buffer.

        vLLM sizes that buffer by the first graph it captures, a piecewise one, which in its own
        lists is never smaller than a FULL one.
        """
        config = self.vllm_config.model_config
        tokens = (desc.num_tokens for descs in self._capture_descs.values() for desc in descs)
        self.hidden_states = torch.empty(
            max(tokens), config.get_hidden_size(), dtype=config.dtype, device=self.device
        )
        super().capture(*args, **kwargs)

    def progress(self) -> str:
        """FULL graphs captured so far, and the next one."""
        return _progress(self)

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int,
        max_query_len: int | None = None,
        num_ubatches: int = 1,
    ) -> BatchExecutionDescriptor:
        """The graph a step replays: FULL, else piecewise, else none; arguments as in vLLM."""
        if self._graphs_captured:
            found = self._find_full(num_reqs, num_tokens, uniform_token_count)
            found = found or _smallest(
                desc
                for desc in self._capture_descs.get(CUDAGraphMode.PIECEWISE, ())
                if desc.num_tokens >= num_tokens
            )
            if found is not None:
                return found
        return BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.NONE, num_tokens=num_tokens, num_reqs=num_reqs
        )

    def _find_full(
        self, num_reqs: int, num_tokens: int, uniform_token_count: int | None
    ) -> BatchExecutionDescriptor | None:
        rows = self.longest_query or uniform_token_count
        if rows is None:
            return None
        # Drafting that begins, or goes on after a step of single rows, needs a graph that collects.
        fewest = max(rows, 2) if self.needs_lists else rows
        found = _smallest(
            desc
            for desc in self._capture_descs.get(CUDAGraphMode.FULL, ())
            if (desc.uniform_token_count or 0) >= fewest and (desc.num_reqs or 0) >= num_reqs
        )
        if found is None or uniform_token_count is not None:
            return found
        # Batches are padded to the next size in any case; rows are what only this graph adds.
        rows_run = num_reqs * (found.uniform_token_count or 0)
        return found if rows_run <= MAX_PADDING * num_tokens else None


class DraftGraphs(CudaGraphManager):
    """One graph per batch size, each of one draft step.

    Args:
        vllm_config: the engine's.
        device: where drafts run.
        run_step: runs one draft step for a padded batch; what is captured.
    """

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, run_step: Callable[[int], None]
    ) -> None:
        mode = CUDAGraphMode.FULL_DECODE_ONLY
        super().__init__(vllm_config, device, mode, decode_query_len=1)
        self._run_step = run_step

    def _init_candidates(self) -> None:
        settings = settings_of(self.vllm_config)
        assert settings is not None
        sizes = self.compilation_config.cudagraph_capture_sizes or []
        batches = full_graphs(settings.gammas, self.max_num_reqs, sizes)[0]
        self._capture_descs[CUDAGraphMode.FULL] = _largest_first(
            _full(batch, 1) for batch in batches
        )

    def capture_steps(self) -> None:
        """Capture every batch size, largest first."""

        def create(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[Any], None]:
            assert desc.num_reqs is not None
            batch = desc.num_reqs
            return lambda _: self._run_step(batch)

        self.capture(create, "Capturing draft steps")

    def progress(self) -> str:
        """Graphs captured so far, and the next one."""
        return _progress(self)

    def find(self, num_reqs: int) -> BatchExecutionDescriptor | None:
        """The graph that serves a batch, None where none was captured for its size."""
        if not self._graphs_captured:
            return None
        descs = self._capture_descs[CUDAGraphMode.FULL]
        return _smallest(desc for desc in descs if (desc.num_reqs or 0) >= num_reqs)


def _progress(graphs: CudaGraphManager) -> str:
    wanted = graphs._capture_descs.get(CUDAGraphMode.FULL, [])
    done = len(graphs.graphs)
    if done >= len(wanted):
        return f"all {len(wanted)} graphs"
    following = wanted[done]
    return (
        f"{done} of {len(wanted)} graphs (next: {following.num_reqs} requests of "
        f"{following.uniform_token_count} rows)"
    )


def _full(batch: int, rows: int) -> BatchExecutionDescriptor:
    return BatchExecutionDescriptor(
        cg_mode=CUDAGraphMode.FULL,
        num_tokens=batch * rows,
        num_reqs=batch,
        uniform_token_count=rows,
    )


def _largest_first(descs: Any) -> list[BatchExecutionDescriptor]:
    return sorted(descs, key=lambda desc: desc.num_tokens, reverse=True)


def _smallest(descs: Any) -> BatchExecutionDescriptor | None:
    found: BatchExecutionDescriptor | None = min(
        descs, key=lambda desc: desc.num_tokens, default=None
    )
    return found
