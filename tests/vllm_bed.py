"""Runs vLLM's V2 model runner on a CPU: Triton's interpreter, plain attention in place of FA3.

vLLM's own scheduler, runner, samplers and Triton kernels run unchanged; only what needs a GPU is
replaced: the platform, the worker's device set-up, and the two attention operations that are
compiled CUDA (`flash_attn_varlen_func`, `reshape_and_cache_flash`). CUDA graphs do not exist here.
Import this module before anything of vLLM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(
    TRITON_INTERPRET="1",
    CUDA_VISIBLE_DEVICES="",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton_interpreter import remember_builtins
from vllm import platforms
from vllm.platforms.cpu import CpuPlatform

BLOCK_SIZE = 16
VOCABULARY = 128
KV_BYTES = 16 << 20


class _Interpreter(interpreter.InterpreterBuilder):
    """Triton's keeps `scalar & scalar` masks as integers, which its own loads refuse."""

    def create_masked_load(self, ptrs: Any, mask: Any, *rest: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return super().create_masked_load(ptrs, mask, *rest)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return super().create_masked_store(ptrs, value, mask, *rest)


interpreter.interpreter_builder.__class__ = _Interpreter
remember_builtins()


@triton.jit
def _log1p(x):  # type: ignore[no-untyped-def]
    """CUDA's own is a library call that the interpreter does not have."""
    return tl.log(1.0 + x)


class BedPlatform(CpuPlatform):
    """A CPU that lets FlashAttention's Python run."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Choose the worker below unless a plugin chose its own, and run without graphs."""
        from vllm.config import CompilationMode, CUDAGraphMode

        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "vllm_bed.BedWorker"
        vllm_config.compilation_config.custom_ops = ["none"]
        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE

    @classmethod
    def get_attn_backend_cls(cls, *_: Any, **__: Any) -> str:
        """FlashAttention, or whatever a plugin put in its place."""
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        return AttentionBackendEnum.FLASH_ATTN.get_path()


platforms._current_platform = BedPlatform()

import vllm.v1.worker.cpu.shm  # noqa: E402, F401  (torch.cuda streams and events, UVA buffers)
from vllm.v1.attention.backends import fa_utils  # noqa: E402

fa_utils.get_flash_attn_version = lambda *_, **__: 3

from vllm.v1.attention.backends import flash_attn  # noqa: E402
from vllm.v1.sample.ops import topk_topp_sampler  # noqa: E402
from vllm.v1.worker import gpu_worker  # noqa: E402
from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils  # noqa: E402


def attend(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    return_softmax_lse: bool = False,
    **_: Any,
) -> Any:
    """`flash_attn_varlen_func` over a paged cache, request by request, in float32."""
    starts = cu_seqlens_q.tolist()
    lse = torch.full((q.shape[1], q.shape[0]), float("inf"))
    for request, length in enumerate(seqused_k.tolist()):
        rows = slice(starts[request], starts[request + 1])
        if rows.start == rows.stop:
            continue
        keys, values = (_gather(cache, block_table[request], length) for cache in (k, v))
        group = q.shape[1] // k.shape[2]
        logits = torch.einsum(
            "qhd,khd->hqk", q[rows].float(), keys.repeat_interleave(group, 1).float()
        )
        logits *= softmax_scale
        count = rows.stop - rows.start
        last = torch.arange(length - count, length)
        logits.masked_fill_(torch.arange(length)[None, None] > last[None, :, None], float("-inf"))
        lse[:, rows] = logits.logsumexp(-1)
        mixed = torch.einsum(
            "hqk,khd->qhd", logits.softmax(-1), values.repeat_interleave(group, 1).float()
        )
        out[rows] = mixed.to(out.dtype)
    return (out, lse) if return_softmax_lse else out


def _gather(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    count = -(-length // cache.shape[1])
    return cache[blocks[:count].long()].flatten(0, 1)[:length]


def store(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *_: Any,
) -> None:
    """`reshape_and_cache_flash`: rows with a negative slot are not written."""
    count = slot_mapping.shape[0]
    used = slot_mapping >= 0
    slots = slot_mapping[used]
    blocks, offsets = slots // key_cache.shape[1], slots % key_cache.shape[1]
    assert not (blocks == 0).any(), "a write to the null block"
    key_cache[blocks, offsets] = key[:count][used]
    value_cache[blocks, offsets] = value[:count][used]


flash_attn.flash_attn_varlen_func = attend
flash_attn.reshape_and_cache_flash = store
flash_attn.get_scheduler_metadata = lambda **_: None
# The interpreter cannot run this kernel; vLLM's PyTorch version stands for it.
topk_topp_sampler.apply_top_k_top_p_triton = lambda logits, k, p, **_: (
    topk_topp_sampler.apply_top_k_top_p_pytorch(logits, k, p)
)
rejection_sampler_utils.tldevice = SimpleNamespace(log1p=_log1p)


class BedDevice:
    """The device half of a worker, on the CPU; mixed in before a real worker class."""

    def init_device(self) -> None:
        """One process, gloo, no memory snapshot."""
        self.device = torch.device("cpu")
        gpu_worker.init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        self.model_runner = self._make_model_runner()

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """A fixed cache, after the dummy run that memory profiling makes."""
        self.model_runner.profile_run()
        return KV_BYTES

    def compile_or_warm_up_model(self) -> Any:
        """Nothing is compiled here."""
        from vllm.v1.worker.worker_base import CompilationTimes

        return CompilationTimes(language_model=0.0, encoder=0.0)


class BedWorker(BedDevice, gpu_worker.Worker):
    """Stock vLLM."""


def save_tiny_llama(folder: Path, initializer_range: float = 0.15) -> None:
    """A Llama whose random weights are large enough that attention decides the next token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)


def start(folder: Path, **options: Any) -> Any:
    """An in-process engine without a tokenizer."""
    from vllm import LLM

    settings: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 256,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "enforce_eager": True,
        "disable_log_stats": False,
    }
    return LLM(**settings | options)


def start_plugin(folder: Path, *, collector: Any = None, **options: Any) -> Any:
    """An engine that drafts.

    Args:
        folder: the model.
        collector: class to use in place of the plugin's own.
        options: of vLLM's `LLM`.
    """
    from vegas_runtime import vllm_plugin
    from vegas_runtime.vllm_plugin import patches, refusals, worker

    class PluginBedWorker(BedDevice, worker.VegasWorker):
        pass

    vllm_plugin.register()
    sys.modules[__name__].PluginBedWorker = PluginBedWorker  # type: ignore[attr-defined]
    patches.WORKER_CLASS = f"{__name__}.PluginBedWorker"  # type: ignore[misc]
    refusals._check_platform = lambda: None
    if collector is not None:
        worker.collection.Collector = collector  # type: ignore[misc]
    return start(folder, **options)


def generate(engine: Any, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[int]]:
    """Token ids each prompt is continued with."""
    outputs = [result.outputs[0] for result in results(engine, prompts, **sampling)]
    return [list(output.token_ids) for output in outputs]


def results(engine: Any, prompts: Sequence[Sequence[int]], **sampling: Any) -> Any:
    """vLLM's own outputs, one a prompt."""
    from vllm import SamplingParams

    params = SamplingParams(detokenize=False, ignore_eos=True, **sampling)
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return engine.generate(inputs, params, use_tqdm=False)


def metrics(engine: Any) -> dict[str, float]:
    """vLLM's counters by name, without prefix."""
    return {
        metric.name.removeprefix("vllm:"): metric.value
        for metric in engine.get_metrics()
        if hasattr(metric, "value")
    }
