"""Attention backend: vLLM's FlashAttention, plus collection while verifying and sparse drafts.

A forward pass is one of four things, told apart by its metadata:

    stock        nobody will draft after it, or it profiles memory: FlashAttention alone
    verification FlashAttention's result, and scores for the lists that the next drafts read
    draft        one row a request over its list and the dense tail (`DraftMetadata`)
    prompt       the last rows of prompts once more, for methods that choose by them
                 (`PromptMetadata`)

Verification covers every request of a batch. Requests with few rows go through the collector's own
attention; in a step that also holds long prompt chunks, those run FlashAttention as always and
only their last row is scored. vLLM sorts a batch by rows, so the short requests come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from vegas_runtime.policies.snapkv import PROMPT_ROWS
from vegas_runtime.vllm_plugin import collection
from vegas_runtime.vllm_plugin.step_inputs import StepInputs


@dataclass(frozen=True, kw_only=True)
class DraftMetadata:
    """What a draft step's attention reads; persistent tensors, so that it can be captured.

    Attributes:
        block_table: [B, blocks] int32.
        seq_lens: [B] int32 tokens cached, the step's own included; 0 for padding.
        request_ids: [B] int32 request state index, -1 for padding.
    """

    block_table: Tensor
    seq_lens: Tensor
    request_ids: Tensor


@dataclass(frozen=True, kw_only=True)
class PromptMetadata:
    """What a pass over the last rows of prompts reads.

    Attributes:
        block_table: [N, blocks] int32.
        seq_lens: [N] int32 tokens of each prompt.
        query_start: [N + 1] int32 first row of each.
        max_len: longest prompt.
    """

    block_table: Tensor
    seq_lens: Tensor
    query_start: Tensor
    max_len: int


@dataclass(frozen=True, kw_only=True)
class Verification:
    """How the requests of one verification split; attached to FlashAttention's metadata.

    Attributes:
        num_short: requests, first in the batch, that the collector's attention runs.
        num_short_tokens: their rows.
        long_query_start: [long + 1] int32 first row of each later request, None without any.
    """

    num_short: int
    num_short_tokens: int
    long_query_start: Tensor | None


class VegasAttentionBackend(FlashAttentionBackend):
    """FlashAttention under its own name: vLLM finds builder and implementation here."""

    @staticmethod
    def get_impl_cls() -> type[VegasAttentionImpl]:
        """The implementation below."""
        return VegasAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[VegasMetadataBuilder]:
        """The builder below."""
        return VegasMetadataBuilder


class VegasMetadataBuilder(FlashAttentionMetadataBuilder):
    """Adds to FlashAttention's metadata how a verification splits.

    Attributes:
        inputs: the runner's step inputs; set once the runner has built its groups.
    """

    inputs: StepInputs | None = None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **kwargs: Any) -> Any:
        """Metadata of a step that is run, or whose graph is replayed."""
        metadata = super().build(common_prefix_len, common_attn_metadata, **kwargs)
        if self.inputs is not None and self.inputs.is_collecting:
            metadata.vegas = self._split(common_attn_metadata, self.inputs.max_rows)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Metadata of a capture: plain decoding (one row a request) never collects."""
        metadata = super().build(0, common_attn_metadata)
        rows, inputs = common_attn_metadata.max_query_len, self.inputs
        if inputs is not None and inputs.can_collect and 1 < rows <= inputs.max_rows:
            metadata.vegas = Verification(
                num_short=common_attn_metadata.num_reqs,
                num_short_tokens=common_attn_metadata.num_actual_tokens,
                long_query_start=None,
            )
        return metadata

    def _split(self, common: Any, max_rows: int) -> Verification:
        starts = common.query_start_loc_cpu[: common.num_reqs + 1]
        is_long = starts.diff() > max_rows
        num_long = int(is_long.sum())
        num_short = common.num_reqs - num_long
        assert not bool(is_long[:num_short].any()), "vLLM no longer sorts a batch by its rows"
        return Verification(
            num_short=num_short,
            num_short_tokens=int(starts[num_short]),
            long_query_start=common.query_start_loc[num_short : common.num_reqs + 1]
            if num_long
            else None,
        )


class VegasAttentionImpl(FlashAttentionImpl):
    """FlashAttention of one layer, with the collector the runner gives it.

    Attributes:
        collector: None until the model is loaded, and for layers that are not sparse.
        inputs: the runner's step inputs.
        layer_index: place among the layers that collect.
    """

    collector: collection.Collector | None = None
    inputs: StepInputs | None = None
    layer_index: int = -1
    # [H] float32: the model holds them in its own type, which the collector's kernels do not read.
    _sinks: Tensor | None = None

    def attach(self, collector: collection.Collector, inputs: StepInputs, index: int) -> None:
        """Let this layer collect and draft; its weights must be loaded."""
        self.collector, self.inputs, self.layer_index = collector, inputs, index
        self._sinks = None if self.sinks is None else self.sinks.float()

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of one pass; see the module's text for the four kinds.

        Args:
            layer: the attention layer.
            query: [T, H, D], padding included.
            key: [T, Hkv, D], already written to the cache.
            value: likewise.
            kv_cache: [blocks, Hkv, block size, 2 D].
            attn_metadata: `DraftMetadata`, `PromptMetadata`, FlashAttention's, or None while
                profiling.
            output: [T, H, D], written.
            output_scale: not supported, as in FlashAttention.
            output_block_scale: likewise.
        """
        if isinstance(attn_metadata, DraftMetadata):
            return self._draft(query, kv_cache, attn_metadata, output)
        if isinstance(attn_metadata, PromptMetadata):
            return self._read_prompts(query, kv_cache, attn_metadata, output)
        verification = getattr(attn_metadata, "vegas", None)
        if self.collector is None or verification is None:
            stock: Tensor = super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
            return stock
        return self._verify(query, kv_cache, attn_metadata, verification, output)

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write a pass's keys and values, and let Quest's bounds follow.

        Args:
            layer: the attention layer.
            key: [T, Hkv, D], padding included.
            value: likewise.
            kv_cache: [blocks, Hkv, block size, 2 D].
            slot_mapping: int64, one a token, negative for none.
        """
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        collector = self.collector
        if collector is None or collector.pages is None:
            return
        # Draft graphs are captured per method, verification's are not.
        if collector.list_shape.by_query or not _is_draft(layer):
            collector.pages.written(self.layer_index, self._views(kv_cache)[0], slot_mapping)

    def _views(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = kv_cache.transpose(1, 2).tensor_split(2, dim=-1)
        return (
            canonicalize_singleton_dim_strides(keys),
            canonicalize_singleton_dim_strides(values),
        )

    def _draft(
        self, query: Tensor, kv_cache: Tensor, metadata: DraftMetadata, output: Tensor
    ) -> Tensor:
        assert self.collector is not None
        keys, values = self._views(kv_cache)
        if self.layer_index == 0:
            self.collector.begin_draft(
                block_table=metadata.block_table,
                seq_lens=metadata.seq_lens,
                request_ids=metadata.request_ids,
            )
        self.collector.draft(
            self.layer_index,
            query,
            keys,
            values,
            block_table=metadata.block_table,
            seq_lens=metadata.seq_lens,
            out=output,
            sinks=self._sinks,
        )
        return output

    def _read_prompts(
        self, query: Tensor, kv_cache: Tensor, metadata: PromptMetadata, output: Tensor
    ) -> Tensor:
        """Full attention of the rows, and the lists they choose."""
        assert self.collector is not None
        keys, values = self._views(kv_cache)
        lists = self.collector.prompt_lists

        def attend(out: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
            _, lse = flash_attn.flash_attn_varlen_func(
                q=query,
                k=keys,
                v=values,
                out=out,
                cu_seqlens_q=metadata.query_start,
                max_seqlen_q=PROMPT_ROWS,
                seqused_k=metadata.seq_lens,
                max_seqlen_k=metadata.max_len,
                softmax_scale=scale,
                causal=True,
                block_table=metadata.block_table,
                return_softmax_lse=True,
                fa_version=self.vllm_flash_attn_version,
                s_aux=sinks,
            )
            by_row: Tensor = lse.T
            return by_row

        attend(output, self.scale, self.sinks)
        lists.choose(
            self.layer_index,
            query,
            keys,
            attend(torch.empty_like(output), lists.vote_scale, None),
            block_table=metadata.block_table,
            lens=metadata.seq_lens,
        )
        return output

    def _verify(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: FlashAttentionMetadata,
        split: Verification,
        output: Tensor,
    ) -> Tensor:
        collector, inputs = self.collector, self.inputs
        assert collector is not None
        assert inputs is not None
        keys, values = self._views(kv_cache)
        table, lengths = metadata.block_table, metadata.seq_lens
        if self.layer_index == 0:
            batch = lengths.shape[0]
            rows = inputs.rows[:batch]
            collector.begin_step(
                block_table=table,
                seq_lens=lengths,
                query_start=metadata.query_start_loc,
                budgets=inputs.budgets(lengths, rows),
                rows=rows,
                request_ids=inputs.request_ids[:batch],
            )
        is_whole = split.long_query_start is None
        if split.num_short:
            collector.verify(
                self.layer_index,
                query[: split.num_short_tokens],
                keys,
                values,
                block_table=table[: split.num_short],
                seq_lens=lengths[: split.num_short],
                query_start=metadata.query_start_loc[: split.num_short + 1],
                max_queries=min(metadata.max_query_len, inputs.max_rows),
                max_len=metadata.max_seq_len,
                out=output[: split.num_short_tokens],
                # Made for exactly the whole batch; FA3 makes its own where it is cut.
                scheduler_metadata=metadata.scheduler_metadata if is_whole else None,
                num_splits=metadata.max_num_splits if is_whole else self._free_splits,
                sinks=self._sinks,
            )
        if not is_whole:
            self._run_long(query, keys, values, metadata, split, output)
        if self.layer_index == inputs.num_layers - 1:
            collector.end_step(block_table=table)
        return output

    @property
    def _free_splits(self) -> int:
        """Splits where vLLM planned none: 1 where the batch must not show, else FA3's choice."""
        return 1 if self.batch_invariant_enabled else 0

    def _run_long(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        metadata: FlashAttentionMetadata,
        split: Verification,
        output: Tensor,
    ) -> None:
        """Prompt chunks: FlashAttention for all rows, then scores of each one's last row."""
        assert self.collector is not None
        assert split.long_query_start is not None
        first, token = split.num_short, split.num_short_tokens
        table = metadata.block_table[first:]
        query = query[token : metadata.num_actual_tokens]
        query_start = split.long_query_start - token
        _, lse = flash_attn.flash_attn_varlen_func(
            q=query,
            k=keys,
            v=values,
            out=output[token : metadata.num_actual_tokens],
            cu_seqlens_q=query_start,
            max_seqlen_q=metadata.max_query_len,
            seqused_k=metadata.seq_lens[first:],
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=self.scale,
            causal=True,
            block_table=table,
            return_softmax_lse=True,
            num_splits=self._free_splits,
            fa_version=self.vllm_flash_attn_version,
            s_aux=self.sinks,
        )
        self.collector.collect(
            self.layer_index,
            query,
            keys,
            lse,
            block_table=table,
            query_start=query_start,
            first=first,
        )


def _is_draft(layer: Any) -> bool:
    """Whether the pass that runs is a draft step."""
    metadata = get_forward_context().attn_metadata
    return isinstance(metadata, dict) and isinstance(metadata.get(layer.layer_name), DraftMetadata)
