"""Worker and model runner: vLLM's, with the drafter and the collector put in."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.errors import BackendError, ConfigError
from vegas_runtime.vllm_plugin import collection, stalls
from vegas_runtime.vllm_plugin.attention import VegasAttentionBackend, VegasAttentionImpl
from vegas_runtime.vllm_plugin.config import PluginSettings, settings_of
from vegas_runtime.vllm_plugin.geometry import AttentionShape, Limits, cache_share
from vegas_runtime.vllm_plugin.graphs import VerifyGraphs
from vegas_runtime.vllm_plugin.late_rows import AcceptedStep
from vegas_runtime.vllm_plugin.patches import check_hooks
from vegas_runtime.vllm_plugin.prompt_pass import Prompts, choose_by_prompts
from vegas_runtime.vllm_plugin.speculator import VegasSpeculator
from vegas_runtime.vllm_plugin.step_inputs import StepInputs
from vegas_runtime.vllm_plugin.step_times import StepTimes
from vegas_runtime.vllm_plugin.worker_hooks import WORKER_HOOKS


class VegasModelRunner(GPUModelRunner):
    """vLLM's V2 runner, drafting with the target itself."""

    cudagraph_manager: Any

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        settings = settings_of(vllm_config)
        assert settings is not None, "this runner is chosen by the plugin's configuration only"
        self.settings: PluginSettings = settings
        self.speculator = VegasSpeculator(vllm_config, device)
        self.step_times = StepTimes(is_enabled=device.type == "cuda")
        self.step_inputs: StepInputs
        self.collector: collection.Collector

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the target, which is the drafter too."""
        super().load_model(*args, **kwargs)
        self.speculator.attach(sampler=self.sampler, requests=self.req_states)

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        """Profile memory with the collector's buffers in place.

        They are made here because vLLM settles the KV block size after loading.

        Raises:
            BackendError: a layer runs another attention backend.
        """
        self._make_collector()
        super().profile_run(*args, **kwargs)

    def _make_collector(self) -> None:
        layers = _vegas_layers(self.vllm_config)
        max_rows = max(self.settings.gammas) + 1
        self.step_inputs = StepInputs(
            max_requests=self.max_num_reqs,
            max_rows=max_rows,
            num_layers=len(layers),
            device=self.device,
        )
        self.collector = self._collector(layers, max_rows)
        self.step_inputs.can_collect = self.collector.collects
        self.speculator.use(self.collector, self._after_acceptance, lambda: self._keys)
        for index, layer in enumerate(layers):
            layer.attach(self.collector, self.step_inputs, index)
        self.configure(self.settings.config.to_dict())

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the cache, and take over graphs and metadata that depend on it."""
        super().initialize_kv_cache(*args, **kwargs)
        groups = [group for groups in self.attn_groups for group in groups]
        assert len(groups) == 1, "refused at start: several attention groups"
        groups[0].get_metadata_builder(0).inputs = self.step_inputs
        self.cudagraph_manager = VerifyGraphs(
            self.vllm_config,
            self.device,
            self.cudagraph_manager.cudagraph_mode,
            self.decode_query_len,
        )
        layer = self.compilation_config.static_forward_context[groups[0].layer_names[0]]
        self.collector.bind(_key_view(layer.kv_cache))

    def profile_cudagraph_memory(self) -> int:
        """Estimate what graphs will take, and drop the draft graphs captured for it.

        vLLM drops those it finds among the speculator's attributes; several kinds lie in a dict.
        """
        estimate: int = super().profile_cudagraph_memory()
        self.speculator.graphs = {}
        gc.collect()
        torch.accelerator.empty_cache()
        return estimate

    @torch.inference_mode()
    def capture_model(self, **kwargs: Any) -> int:
        """Capture the graphs, from the same inputs every time, and say so when it stalls."""
        self.step_inputs.reset()
        with stalls.reported(self._capture_progress):
            captured: int = super().capture_model(**kwargs)
        return captured

    def _capture_progress(self) -> str:
        drafts = " and ".join(graphs.progress() for graphs in self.speculator.graphs.values())
        return (
            f"{self.cudagraph_manager.progress()} of verification, "
            f"{drafts or 'none'} of drafts captured"
        )

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Verify; lists are collected when the scheduler wants drafts after this step."""
        is_dummy = kwargs.get("dummy_run", False)
        wants_drafts = (
            not is_dummy
            and not scheduler_output.skip_drafts
            and scheduler_output.num_spec_tokens_to_schedule > 0
            and self.step_inputs.can_collect
        )
        self.step_inputs.is_collecting = wants_drafts
        manager = self.cudagraph_manager
        if isinstance(manager, VerifyGraphs):
            rows = scheduler_output.num_scheduled_tokens.values()
            manager.longest_query = None if is_dummy else max(rows, default=None)
            manager.needs_lists = wants_drafts
        has_work = scheduler_output.total_num_scheduled_tokens > 0
        self.step_times.begin(
            getattr(scheduler_output, "vegas_step", None) if has_work and not is_dummy else None
        )
        output = super().execute_model(scheduler_output, *args, **kwargs)
        self.step_times.mark("verified")
        return output

    def prepare_inputs(
        self, scheduler_output: Any, batch_req_state: Any, batch_desc: Any, num_active_loras: int
    ) -> Any:
        """The step's input batch, with the rows its graph was captured for."""
        batch = super().prepare_inputs(
            scheduler_output, batch_req_state, batch_desc, num_active_loras
        )
        if batch_desc.uniform_token_count is not None:
            # FA3's schedule of an uneven batch must be the one the graph replays.
            batch.max_query_len = batch_desc.uniform_token_count
        self.step_inputs.load(
            batch.idx_mapping_np, batch.num_draft_tokens_per_req, batch.is_prefilling_np
        )
        if self.collector.reads_prompts:
            self.collector.prompt_lists.drop(batch.idx_mapping_np[batch.is_prefilling_np])
        return batch

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Test the drafts and draw the next token."""
        output = super().sample(*args, **kwargs)
        self.step_times.mark("sampled")
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, then draft."""
        output = super().sample_tokens(*args, **kwargs)
        self.step_times.mark("drafted")
        return output

    def _after_acceptance(self, input_batch: Any, num_sampled: Tensor, num_drafts: int) -> None:
        """Make the lists of methods that had to know what was accepted, or the whole prompt."""
        if not self.collector.waits:
            return
        if self.collector.reads_prompts:
            self._choose_by_prompts(input_batch, num_drafts)
        batch, inputs = input_batch.num_reqs, self.step_inputs
        seq_lens, rows = input_batch.seq_lens[:batch], inputs.rows[:batch]
        self.collector.accepted(
            AcceptedStep(
                keys=self._keys,
                block_table=self.block_tables.input_block_tables[0][:batch],
                seq_lens=seq_lens,
                query_start=input_batch.query_start_loc[: batch + 1],
                num_sampled=num_sampled,
                budgets=inputs.budgets(seq_lens, rows),
                request_ids=inputs.request_ids[:batch],
                is_prompt=inputs.is_prompt[:batch],
                rows=rows,
            )
        )

    def _choose_by_prompts(self, input_batch: Any, num_drafts: int) -> None:
        """Choose for requests that draft for the first time."""
        computed = input_batch.num_computed_prefill_tokens_np + input_batch.num_scheduled_tokens
        can_draft = ~input_batch.is_prefilling_np | (computed >= input_batch.prefill_len_np)
        states, lists = input_batch.idx_mapping_np, self.collector.prompt_lists
        rows = lists.missing(states, can_draft)
        if rows:
            choose_by_prompts(
                Prompts(
                    states=states[rows],
                    lens=self.req_states.prompt_len.np[states[rows]],
                    block_table=self.block_tables.input_block_tables[0][
                        async_tensor_h2d(rows, device=self.device, dtype=torch.int64)
                    ],
                ),
                lists,
                token_ids=self.req_states.all_token_ids.gpu,
                run_model=self.speculator.run_model,
                num_drafts=num_drafts,
            )

    @property
    def _keys(self) -> list[Tensor]:
        """[blocks, block size, Hkv, D] view of each layer's K in the cache in use."""
        context = self.compilation_config.static_forward_context
        names = get_layers_from_vllm_config(self.vllm_config, Attention)
        return [_key_view(context[name].kv_cache) for name in names]

    @torch.inference_mode()
    def configure(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Change how drafts are made from the next step on.

        Args:
            values: fields of `SpeculationConfig`, none to read back only. The number of drafts is
                the scheduler's, and only checked here.

        Returns:
            What is in force, read back from the device.

        Raises:
            ConfigError: a value outside its range, or beyond what was declared at start.
        """
        config = self.settings.change(
            {**self.in_force(), **values}, max_model_len=self.max_model_len
        )
        self._check_fixed(config)
        self.collector.check_budget(config.sparsity_ratio, config.min_tokens)
        was_quest = self.collector.list_shape.by_query
        self.collector.set_algorithm(config.algorithm)
        if self.collector.list_shape.by_query and not was_quest:
            self._bound_everything()
        self.collector.set_rows(config.rows)
        self.collector.set_granularity(config.granularity)
        self.step_inputs.ratio.fill_(config.sparsity_ratio)
        self.step_inputs.min_tokens.fill_(config.min_tokens)
        if values:
            self.collector.forget()
        return self.in_force()

    def _bound_everything(self) -> None:
        """Bound the pages that nobody bounded while another method was in force."""
        pages = self.collector.pages
        if pages is not None and pages.is_bound:
            pages.rebuild(self._keys)

    def in_force(self) -> dict[str, Any]:
        """The device's settings."""
        return {
            "sparsity_ratio": self.step_inputs.ratio.item(),
            "min_tokens": self.step_inputs.min_tokens.item(),
            "algorithm": self.collector.algorithm,
            "rows": self.collector.rows,
            "granularity": self.collector.granularity,
            "metric": self.settings.config.metric,
            "scope": self.settings.config.scope,
        }

    def _check_fixed(self, config: SpeculationConfig) -> None:
        for name in ("metric", "scope"):
            held, asked = getattr(self.settings.config, name), getattr(config, name)
            if held != asked:
                raise ConfigError(
                    f"`{name}` is {held!r} in this engine and cannot become {asked!r}: its graphs "
                    "are captured for the first.",
                    hint=f"Start the engine with `{name}` {asked!r}.",
                )

    def _collector(self, layers: list[VegasAttentionImpl], max_rows: int) -> collection.Collector:
        first, settings = layers[0], self.settings
        return collection.Collector(
            shape=AttentionShape(
                num_layers=len(layers),
                num_heads=first.num_heads,
                num_kv_heads=first.num_kv_heads,
                head_dim=first.head_size,
                dtype=self.kv_cache_dtype,
                block_size=self.cache_config.block_size,
                scale=first.scale,
                sinks=first.sinks is not None,
            ),
            limits=Limits(
                max_batch=self.max_num_reqs,
                max_len=self.max_model_len,
                max_rows=max_rows,
                max_ratio=settings.max_ratio,
                min_tokens=settings.config.min_tokens,
                max_requests=self.max_num_reqs,
            ),
            config=settings.config,
            device=self.device,
            algorithms=settings.algorithms,
            rows=settings.rows,
            path=settings.collection,
            draft_path=settings.draft_attention,
            ratio=self.step_inputs.ratio,
            min_tokens=self.step_inputs.min_tokens,
        )


class VegasWorker(Worker):
    """vLLM's worker with the runner above, and the plugin's remote calls."""

    model_runner: VegasModelRunner

    def _make_model_runner(self) -> VegasModelRunner:
        check_hooks(WORKER_HOOKS)
        register_backend(
            AttentionBackendEnum.FLASH_ATTN,
            f"{VegasAttentionBackend.__module__}.{VegasAttentionBackend.__qualname__}",
        )
        return VegasModelRunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        """Memory for the KV cache; Quest's bounds are made with it, and out of the same."""
        available: int = super().determine_available_memory()
        has_bounds = self.model_runner.collector.pages is not None
        return cache_share(available) if has_bounds else available

    def vegas_configure(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """See `VegasModelRunner.configure`."""
        return self.model_runner.configure(values)

    def vegas_status(self) -> dict[str, Any]:
        """Paths taken, and why; what slows which method; layers; bytes of the plugin's buffers."""
        runner = self.model_runner
        collector = runner.collector
        return {
            "collection": collector.path,
            "collection_reason": collector.reason,
            "draft_attention": collector.draft_path,
            "draft_attention_reason": collector.draft_reason,
            "slowed_by": collector.slowed_by,
            "num_layers": runner.step_inputs.num_layers,
            "collector_bytes": collector.num_bytes,
            "draft_bytes": runner.speculator.num_bytes,
            "in_force": runner.in_force(),
        }

    def vegas_step_times(self) -> list[dict[str, float | int]]:
        """Phase times of the steps that are done; see `StepTimes.drain`."""
        return self.model_runner.step_times.drain()


def _key_view(kv_cache: Tensor) -> Tensor:
    """K of a layer's cache [blocks, Hkv, block size, 2 D]: [blocks, block size, Hkv, D]."""
    return kv_cache.transpose(1, 2).tensor_split(2, dim=-1)[0]


def _vegas_layers(vllm_config: VllmConfig) -> list[VegasAttentionImpl]:
    """Every attention layer's implementation, in the model's order."""
    layers = get_layers_from_vllm_config(vllm_config, Attention)
    found = []
    for name, layer in layers.items():
        if not isinstance(layer.impl, VegasAttentionImpl):
            raise BackendError(
                f"layer {name!r} runs {type(layer.impl).__name__}, not the plugin's attention: it "
                "would neither collect nor draft.",
                hint="Leave `--attention-backend` unset, or set it to FLASH_ATTN.",
            )
        found.append(layer.impl)
    return found
