"""The sections of a profile: what it is for, what was chosen, and the evidence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.profile_values import (
    Count,
    CountFact,
    Estimate,
    FactSection,
    Flag,
    Json,
    JsonMapping,
    NumberFact,
    Range,
    Ratio,
    Real,
    Section,
    Speculation,
    Text,
    Whole,
    refusal,
)


class PhaseTimes(Section):
    """Milliseconds per iteration, by phase."""

    draft: Estimate
    select: Estimate
    verify: Estimate
    other: Estimate


class Results(Section):
    """The validated setting against plain decoding.

    Attributes:
        decode_tok_s: decode throughput at the setting, tokens per second.
        baseline_tok_s: the same at gamma 0, same engine, interleaved.
        speedup_vs_gamma0: paired ratio of the two; what `check` tests.
        speedup_vs_stock: against an engine without the plugin, at its own defaults.
        accepted_per_iteration: accepted drafts per verification, bonus token excluded.
        acceptance_length: tokens per verification, bonus token included.
        survival: P(the first i drafts were all accepted), i = 1..gamma.
        phase_ms: where an iteration's time goes.
    """

    decode_tok_s: Estimate
    baseline_tok_s: Estimate
    speedup_vs_gamma0: Estimate
    speedup_vs_stock: Estimate | None = None
    accepted_per_iteration: Estimate | None = None
    acceptance_length: Estimate | None = None
    survival: tuple[Estimate, ...] = ()
    phase_ms: PhaseTimes | None = None


class Failure(Section):
    """Why a point has no figures; `kind` is oom, engine, timeout, unsteady, dominated, ..."""

    kind: Text
    message: Text


class Point(Section):
    """One measured setting of a curve. Failed points stay, with their reason."""

    sparsity_ratio: Ratio
    num_speculative_tokens: Count
    accepted_per_iteration: Estimate | None = None
    decode_tok_s: Estimate | None = None
    speedup_vs_gamma0: Estimate | None = None
    n_steps: Count | None = None
    status: Literal["ok", "failed"] = "ok"
    failure: Failure | None = None

    @model_validator(mode="after")
    def _check_status(self) -> Self:
        if (self.status == "failed") != (self.failure is not None):
            raise refusal(f"`status` is {self.status}; `failure` belongs to failed points only.")
        if self.status == "ok" and self.accepted_per_iteration is self.decode_tok_s is None:
            raise refusal("the point has no figure; give one, or `status: failed` with `failure`.")
        return self


class RejectedWindow(Section):
    """One try of a measurement that was rejected and made again.

    Attributes:
        step: of the sweep, as in a decision.
        sparsity_ratio: of the setting.
        num_speculative_tokens: of the setting.
        attempt: 0 for the first try.
        failure: why it does not count.
    """

    step: Text
    sparsity_ratio: Ratio
    num_speculative_tokens: Count
    attempt: Count = 0
    failure: Failure


class Curves(Section):
    """Every point measured, by the step that asked for it.

    Attributes:
        sparsity: points of step 1.
        gamma: points of step 2.
        refine: points of step 3.
        validation: points of the validation.
        dropped: settings not tried, with the reason; None without any.
        rejected: tries that were rejected and made again; None without any.
    """

    sparsity: tuple[Point, ...] = ()
    gamma: tuple[Point, ...] = ()
    refine: tuple[Point, ...] = ()
    validation: tuple[Point, ...] = Field(default=(), alias="validate")
    # None, not empty: profiles from before keep the hash of their content.
    dropped: tuple[Point, ...] | None = None
    rejected: tuple[RejectedWindow, ...] | None = None


class DecisionRecord(Section):
    """One decision of the tuner: what was chosen, by which rule, against what, and why."""

    step: Json
    rule: Text
    chosen: Json = None
    why: Text
    alternatives: tuple[Json, ...] = ()
    resolved: Flag
    outcome: Text = ""
    data: JsonMapping = Field(default_factory=dict)


# --------------------------------------------------------------------------- what it is for


class ModelFacts(FactSection):
    """The model a profile was measured with."""

    id: Text | None = None
    revision: Text | None = None
    config_sha256: Text | None = None
    weights_sha256: Text | None = None
    dtype: Text | None = None
    quant: Text | None = None
    max_model_len: CountFact = None
    num_layers: CountFact = None
    num_query_heads: CountFact = None
    num_kv_heads: CountFact = None
    head_dim: CountFact = None


class DeviceFacts(FactSection):
    """The device: `class` is its market name, `sm` the CUDA capability as text ("9.0")."""

    kind: Literal["cpu", "cuda", "*"] | None = None
    device_class: Text | None = Field(default=None, alias="class")
    sm: Text | None = None
    memory_gib: NumberFact = None
    count: CountFact = None
    tp: CountFact = None
    power_limit_w: NumberFact = None


class RuntimeFacts(FactSection):
    """Versions of what ran, and the paths it took."""

    vegas_runtime: Text | None = None
    torch: Text | None = None
    transformers: Text | None = None
    vllm: Text | None = None
    cuda: Text | None = None
    driver: Text | None = None
    kv_cache_dtype: Text | None = None
    attention_path: Text | None = None
    threads: CountFact = None


class SamplingFacts(FactSection):
    """How tokens were drawn; acceptance depends on it."""

    temperature: NumberFact = None
    top_k: CountFact = None
    top_p: NumberFact = None
    min_p: NumberFact = None
    repetition_penalty: NumberFact = None


class Match(Section):
    """What `apply` compares with the machine at hand. "*" matches all, absent is unknown."""

    model: ModelFacts = Field(default_factory=ModelFacts)
    device: DeviceFacts = Field(default_factory=DeviceFacts)
    runtime: RuntimeFacts = Field(default_factory=RuntimeFacts)
    sampling: SamplingFacts = Field(default_factory=SamplingFacts)

    @classmethod
    def from_facts(
        cls,
        *,
        model: Mapping[str, Any],
        device: Mapping[str, Any],
        runtime: Mapping[str, Any],
        sampling: Mapping[str, Any],
    ) -> Self:
        """Build from an engine's facts; those this schema has no name for are kept as `other`.

        The sampling seed is left out: it selects a sample, not a distribution.
        """
        drawn = {key: value for key, value in sampling.items() if key != "seed"}
        return cls(
            model=ModelFacts.from_facts(model),
            device=DeviceFacts.from_facts(device),
            runtime=RuntimeFacts.from_facts(runtime),
            sampling=SamplingFacts.from_facts(drawn),
        )


class Validity(Section):
    """Where the default was measured: half-open ranges of batch size and context length."""

    batch: Range
    context: Range

    def contains(self, batch: int, context: int) -> bool:
        """Whether the setting was measured for this batch size and context length."""
        in_batch = self.batch[0] <= batch < self.batch[1]
        return in_batch and self.context[0] <= context < self.context[1]


class Bucket(Validity):
    """A part of the (batch, context) plane with a measured setting of its own."""

    config: Speculation
    speedup_vs_gamma0: Estimate | None = None
    speedup_vs_stock: Estimate | None = None


class Selected(Section):
    """What was chosen.

    Attributes:
        default: the setting, `SpeculationConfig.to_dict()`.
        buckets: settings of measured (batch, context) cells; must not overlap.
        outside: what to do where nothing was measured: plain decoding, the nearest bucket, or
            the default.
    """

    default: Speculation
    buckets: tuple[Bucket, ...] = ()
    outside: Literal["fallback_gamma_0", "nearest", "default"] = "fallback_gamma_0"

    @model_validator(mode="after")
    def _check_overlap(self) -> Self:
        for index, one in enumerate(self.buckets):
            for other in self.buckets[:index]:
                apart = (
                    one.batch[1] <= other.batch[0]
                    or other.batch[1] <= one.batch[0]
                    or one.context[1] <= other.context[0]
                    or other.context[1] <= one.context[0]
                )
                if not apart:
                    raise refusal(
                        f"buckets overlap at batch {list(one.batch)}, context "
                        f"{list(one.context)}; ranges are half-open, so end one where the next "
                        "starts."
                    )
        return self


class Serving(Section):
    """The default in the keys of vLLM RFC #47351; null when plain decoding was selected.

    It repeats `selected.default` on purpose: it can be pasted as it is, and must agree.
    """

    speculative_config: JsonMapping | None

    @classmethod
    def of(cls, config: SpeculationConfig) -> Self:
        """The serving block of a setting."""
        drafts = config.num_speculative_tokens > 0
        return cls(speculative_config=config.to_rfc() if drafts else None)


# --------------------------------------------------------------------------- how it was measured


class TokenCounts(Section):
    """How many tokens prompts or outputs have: percentiles, and the ends where known."""

    min: Real | None = None
    p50: Real
    p95: Real
    max: Real | None = None


class Workload(FactSection):
    """The text measured on, with what is needed to make the same prompts again.

    Token counts are in tokens of the model's own tokenizer; `path` is a file's name, not where it
    lies.
    """

    name: Text
    path: Text | None = None
    context_len: Count | None = None
    min_context_len: Count | None = None
    max_context_len: Count | None = None
    batch_size: Count
    num_waiting: Count | None = None
    num_blocks: Count | None = None
    max_new_tokens: Count | None = None
    sampling: JsonMapping = Field(default_factory=dict)
    seed: Whole | None = None
    allow_replay: Flag | None = None
    n_prompts: Count
    n_distinct_prompts: Count | None = None
    replays: Count | None = None
    prompts_sha256: Text
    prompt_tokens: TokenCounts | None = None
    output_tokens: TokenCounts | None = None
    eos: Text | None = None
    mix: JsonMapping = Field(default_factory=dict)
    content_valid: Flag | None = None
    source: JsonMapping = Field(default_factory=dict)


class MeasurementProtocol(FactSection):
    """How it was measured.

    Attributes:
        id: name of the protocol, changed whenever its meaning changes.
        budget_s: time allowed for the whole sweep, seconds.
        replicates: repetitions of a search point.
        pairs: interleaved pairs behind `speedup_vs_gamma0`.
        order: order inside the pairs, e.g. `ABBA`.
        noise_floor_cv: run-to-run coefficient of variation met here; sets the gate's margin.
        num_batch_means: batches behind a throughput interval.
        max_num_speculative_tokens: largest gamma the engine was opened for.
        sparsity_ratio_candidates: the ladder of step 1.
        num_speculative_tokens_candidates: the candidates of step 2.
    """

    id: Text
    budget_s: Real | None = None
    replicates: Count | None = None
    pairs: Count | None = None
    order: Text | None = None
    noise_floor_cv: Real | None = None
    num_batch_means: Count | None = None
    max_num_speculative_tokens: Count | None = None
    sparsity_ratio_candidates: tuple[Ratio, ...] = ()
    num_speculative_tokens_candidates: tuple[Count, ...] = ()


class Tool(Section):
    """What wrote the profile."""

    name: Text = "vegas-tune"
    version: Text
    git: Text | None = None


class LosslessCheck(Section):
    """Whether drafting left the output unchanged, and over how many outputs that was seen."""

    method: Text
    result: Literal["pass", "fail", "not_run"]
    n: Count = 0


class Artifact(Section):
    """A file beside the profile, by name and hash."""

    name: Text
    sha256: Text
