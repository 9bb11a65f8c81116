"""Drafts with the target itself, over the KV entries that verification selected.

vLLM calls `propose` after each verification. The loop shares the target's weights, KV cache and
block tables: a draft's KV lands in the lookahead slots behind the committed tokens, and the next
verification overwrites it. Lists belong to batch rows of the verification just run, so nothing is
kept per request between steps, and preemption or reordering need no care.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vegas_runtime.vllm_plugin.attention import DraftMetadata, PromptMetadata
from vegas_runtime.vllm_plugin.collection import Collector
from vegas_runtime.vllm_plugin.draft_sampling import FORBIDDEN, DraftSampler
from vegas_runtime.vllm_plugin.draft_steps import DraftSteps
from vegas_runtime.vllm_plugin.graphs import DraftGraphs
from vegas_runtime.vllm_plugin.methods import DraftKind

AfterAcceptance = Callable[[Any, Tensor, int], None]
LayerKeys = Callable[[], list[Tensor]]


class VegasSpeculator(DraftModelSpeculator):
    """vLLM's draft-model speculator whose draft model is the target.

    Args:
        vllm_config: the engine's.
        device: where drafts run.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        assert self.draft_logits is not None
        self.steps = DraftSteps(
            max_requests=self.max_num_reqs,
            max_drafts=self.num_speculative_steps,
            vocab_size=self.vocab_size,
            device=device,
        )
        self.draft_sampler = DraftSampler(
            max_requests=self.max_num_reqs,
            logits=self.draft_logits,
            use_fp64=self.use_fp64_gumbel,
        )
        self.graphs: dict[DraftKind, DraftGraphs] = {}
        self.attn_groups: list[Any] = []
        self._sampler: Any = None
        self._requests: Any = None
        self._layers: tuple[str, ...] = ()
        self._collector: Collector
        self._after_acceptance: AfterAcceptance
        self._keys: LayerKeys

    @property
    def num_bytes(self) -> int:
        """Device memory of the drafts' distributions, by far the largest buffers here."""
        return self.draft_sampler.num_bytes

    def draft_logits_spec(self, vllm_config: VllmConfig) -> tuple[torch.dtype, float]:
        """Float32: q is compared with p in the precision both are sampled in."""
        return torch.float32, FORBIDDEN

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> Any:
        """The target: no second copy of weights, no KV of its own."""
        self._layers = tuple(sorted(target_attn_layer_names))
        return target_model

    def attach(self, *, sampler: Any, requests: Any) -> None:
        """Use the target's sampler and request states, which exist once the model is loaded."""
        self._sampler, self._requests = sampler, requests

    def use(self, collector: Collector, after_acceptance: AfterAcceptance, keys: LayerKeys) -> None:
        """Draft from that collector's lists.

        Args:
            collector: has the lists.
            after_acceptance: makes those that had to wait for the accept test; called with the
                batch, its [B] int32 tokens emitted and the number of draft steps that follow.
            keys: gives each layer's K in the cache in use.
        """
        self._collector, self._after_acceptance = collector, after_acceptance
        self._keys = keys

    def set_attn(
        self,
        model_state: Any,
        kv_cache_config: Any,
        block_tables: Any,
        target_input_buffers: Any,
        target_attn_groups: Any,
    ) -> None:
        """Take the target's block tables; drafts build no metadata through attention groups."""
        self.model_state = model_state
        self.kv_cache_config = kv_cache_config
        self.block_tables = block_tables

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Prepare draft graphs wherever verification has FULL graphs, for each shape of lists."""
        self.graphs = {}
        if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:
            self.graphs = {
                shape: DraftGraphs(self.vllm_config, self.device, self._run_step)
                for shape in self._collector.list_shapes
            }

    def capture(self) -> None:
        """Capture the draft step for every batch size."""
        if not self.graphs:
            return
        # Idle rows and the first column: what is captured must not write past its buffers.
        self.draft_sampler.load(self._sampler)
        self.steps.step.zero_()
        self.steps.active.fill_(-1)
        in_use = self._collector.list_shape
        for shape, graphs in self.graphs.items():
            self._collector.use_lists(shape)
            graphs.capture_steps()
        self._collector.use_lists(in_use)
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile the kernels that run outside the graphs, on a batch of one idle row."""
        self._collector.warm_up(self._keys())
        idle = self.idx_mapping[:1].fill_(-1)
        self._begin(idle, torch.zeros_like(idle, dtype=torch.int32), padded=1)
        self.steps.forget(1, 1, output_counts=self._counts)

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> Tensor:
        """Draft for every request of the batch.

        Returns:
            [B, largest number of drafts] int64; columns beyond `num_speculative_tokens`, and rows
            of requests whose prompt is not complete, hold any value.
        """
        batch = input_batch.num_reqs
        drafts = self.steps.drafts[:batch]
        if dummy_run:
            if is_profile:
                self._profile_sampling(last_hidden_states, batch)
            return drafts
        num_drafts = self.num_speculative_steps
        if num_speculative_tokens is not None:
            num_drafts = min(num_speculative_tokens, num_drafts)
        if num_drafts == 0:
            return drafts
        graphs = self.graphs.get(self._collector.list_shape)
        graph = None if graphs is None else graphs.find(batch)
        padded = batch if graph is None or graph.num_reqs is None else graph.num_reqs
        self._after_acceptance(input_batch, num_sampled, num_drafts)
        if self._collector.pages is not None:
            self._collector.pages.expect(num_drafts)
        self.draft_sampler.load(self._sampler)
        self._begin(input_batch.idx_mapping, num_sampled, padded=padded)
        for _ in range(num_drafts):
            if graph is None:
                self._run_step(batch)
            else:
                assert graphs is not None
                graphs.run_fullgraph(graph)
        self.steps.forget(batch, num_drafts, output_counts=self._counts)
        return drafts

    def _begin(self, request_ids: Tensor, num_sampled: Tensor, *, padded: int) -> None:
        self.steps.begin(
            request_ids=request_ids,
            num_sampled=num_sampled,
            num_computed=self._requests.num_computed_tokens.gpu,
            num_blocks=self.block_tables.num_blocks.gpu[0],
            block_size=self.block_tables.block_sizes[0],
            max_len=self.max_model_len,
            padded=padded,
        )

    @property
    def _counts(self) -> Tensor:
        counts: Tensor = self._sampler.penalties_state.output_bin_counts
        return counts

    def _run_step(self, batch: int) -> None:
        """One draft step; everything it reads and writes is persistent."""
        steps = self.steps
        table = self.block_tables.input_block_tables[0][:batch]
        steps.advance(
            batch,
            last_sampled=self._requests.last_sampled_tokens,
            block_table=table,
            block_size=self.block_tables.block_sizes[0],
        )
        metadata = DraftMetadata(
            block_table=table, seq_lens=steps.seq_lens[:batch], request_ids=steps.active[:batch]
        )
        hidden = self.run_model(
            steps.input_ids[:batch], steps.positions[:batch], metadata, steps.slots[:batch]
        )
        tokens = self.draft_sampler.sample(
            self.model.compute_logits(hidden),
            requests=steps.active[:batch],
            positions=steps.positions[:batch],
            step=steps.step,
            penalties=self._sampler.penalties_state,
        )
        steps.record(tokens, output_counts=self._counts)

    def run_model(
        self,
        input_ids: Tensor,
        positions: Tensor,
        metadata: DraftMetadata | PromptMetadata,
        slots: Tensor,
    ) -> Tensor:
        """Run rows through the target, every layer with the same metadata.

        Args:
            input_ids: [T] int32.
            positions: [T] int64.
            metadata: what attention reads.
            slots: [T] int64 KV slots written, -1 for none.

        Returns:
            [T, hidden size].
        """
        with set_forward_context(
            dict.fromkeys(self._layers, metadata),
            self.vllm_config,
            num_tokens=input_ids.shape[0],
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=dict.fromkeys(self._layers, slots),
        ):
            hidden: Tensor = self.model(
                input_ids=input_ids,
                positions=positions,
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        return hidden

    def _profile_sampling(self, hidden: Tensor, batch: int) -> None:
        """Run a draft step's sampling at full size, so that memory profiling sees its peak."""
        rows = self.steps.active[:batch]
        self.draft_sampler.sample(
            self.model.compute_logits(hidden[:batch]),
            requests=rows,
            positions=self.steps.positions[:batch],
            step=self.steps.step,
            penalties=self._sampler.penalties_state,
        )
