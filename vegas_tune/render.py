"""A profile's setting as text that vLLM, a shell or Python reads. Pure functions."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from vegas_runtime.config import SpeculationConfig
from vegas_runtime.engine.loading import resolve_model
from vegas_runtime.errors import ConfigError, ModelError, UsageError
from vegas_runtime.profile import WILDCARD, Profile, to_yaml


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """What vLLM is told.

    Attributes:
        model: id or path.
        speculative_config: the value of `--speculative-config`; None is plain decoding.
        max_num_seqs: the largest batch that the setting was measured for.
        tensor_parallel_size: devices the model was split over.
        notes: what the user should know, one line each.
    """

    model: str
    speculative_config: dict[str, Any] | None
    max_num_seqs: int
    tensor_parallel_size: int
    notes: tuple[str, ...]

    @property
    def options(self) -> dict[str, Any]:
        """Options of vLLM's engine by their Python names, without those left at its default."""
        values: dict[str, Any] = {"max_num_seqs": self.max_num_seqs}
        if self.tensor_parallel_size > 1:
            values["tensor_parallel_size"] = self.tensor_parallel_size
        if self.speculative_config is not None:
            values["speculative_config"] = self.speculative_config
        return values


def render(
    profile: Profile, output: str = "yaml", *, model: str | None = None, context: int | None = None
) -> str:
    """A profile's setting as text that vLLM, a shell or Python reads.

    Args:
        profile: what to serve with.
        output: `yaml` (vLLM's `--config` file), `args` (a command), `python` (a script) or `env`
            (shell assignments).
        model: alias, id or path to serve; the profile's own unless given.
        context: context length served, in tokens; needed when settings differ by context.

    Raises:
        UsageError: an unknown output, or no model or context to render for.
        ModelError: `model` names nothing.
        ConfigError: the profile holds settings that vLLM cannot switch between.
    """
    if output not in FORMATS:
        raise UsageError(f"format {output!r} is unknown; known are {', '.join(FORMATS)}.")
    plan = serving_plan(profile, model=model, context=context)
    header = [f"vegas-tune profile {profile.profile_id}", *plan.notes]
    comments = "".join(f"# {one_line(line)}\n" for line in header)
    return comments + FORMATS[output](plan, profile)


def serving_plan(
    profile: Profile, *, model: str | None = None, context: int | None = None
) -> ServingPlan:
    """What vLLM is told, before it is written in any format; see `render`."""
    if model is not None:
        source = resolve_model(model)
        served: str | None = str(source.location or source.id)
    else:
        served = profile.match.model.id
    if served is None or served == WILDCARD:
        raise UsageError(
            "the profile does not say which model it is for, so there is nothing to serve.",
            hint="Name one: --model ID.",
        )
    notes = [*serving_notes(profile), *_model_notes(served)]
    tp = profile.match.device.tp
    config, schedule = profile.selected.default, None
    if profile.selected.buckets:
        config, schedule = batch_schedule(profile, context=context)
    speculative: dict[str, Any] | None = None
    if config.num_speculative_tokens == 0:
        notes.append("Plain decoding measured fastest, so nothing is drafted.")
    else:
        speculative = config.to_rfc()
    if speculative is not None and schedule is not None:
        speculative["num_speculative_tokens_per_batch_size"] = schedule
        notes.append(
            "A schedule over batch sizes limits vLLM's V1 runner to piecewise CUDA graphs; compare "
            "with one number of tokens for all."
        )
    return ServingPlan(
        model=served,
        speculative_config=speculative,
        max_num_seqs=profile.validity.batch[1] - 1,
        tensor_parallel_size=tp if isinstance(tp, int) else 1,
        notes=tuple(notes),
    )


def serving_notes(profile: Profile) -> Iterable[str]:
    """What a reader should know before serving with a profile, one line each."""
    default, validity = profile.selected.default, profile.validity
    device = profile.match.device.device_class
    if profile.status == "draft":
        yield "WARNING: a draft; no measurement stands behind this setting."
    elif profile.status == "inconclusive":
        yield "WARNING: inconclusive; the budget ended before this setting was shown to be best."
    if profile.results is not None and default.num_speculative_tokens > 0:
        ratio = profile.results.speedup_vs_gamma0
        where = f" on {device}" if device not in (None, WILDCARD) else ""
        span = "" if ratio.point_only else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
        yield f"Measured {ratio.est:.2f}x{span} the decode throughput of plain decoding{where}."
        if ratio.low is None or ratio.low <= 1:
            yield "WARNING: that is not clearly faster than plain decoding."
    if profile.backend not in (None, "vllm"):
        yield (
            f"WARNING: measured with the {profile.backend} backend; what it gains in vLLM is "
            "not known."
        )
    yield (
        f"Measured for {validity.batch[0]} to {validity.batch[1] - 1} running requests and "
        f"contexts of {validity.context[0]} to {validity.context[1] - 1} tokens."
    )
    shortest, ratio_kept = validity.context[0], default.sparsity_ratio
    if default.num_speculative_tokens > 0 and ratio_kept * shortest < default.min_tokens:
        yield (
            f"Below about {default.min_tokens / ratio_kept:.0f} tokens of context the floor of "
            f"{default.min_tokens} tokens decides how much is kept, not the ratio."
        )


def _model_notes(served: str) -> Iterable[str]:
    """A warning for a name that only this project, or only the machine measured on, knows."""
    try:
        kind = resolve_model(served).kind
    except ModelError:
        kind = None
    if kind in (None, "packaged"):
        yield (
            f"WARNING: vLLM cannot fetch a model by the name {served}; serve the folder it lies in "
            "with --model PATH."
        )


def batch_schedule(
    profile: Profile, *, context: int | None = None
) -> tuple[SpeculationConfig, list[list[int]] | None]:
    """The buckets as vLLM's schedule over batch sizes.

    vLLM's ranges include both ends and begin at 1, a gap continues the range before it, the last
    range never ends, and no entry exceeds the configured number of tokens. So every batch size
    gets an entry, what lies between and beyond the buckets too, as `Profile.select` has it.

    Args:
        profile: with at least one bucket.
        context: context length served, in tokens; needed when buckets differ by context.

    Returns:
        The setting, with the largest number of tokens of any batch size, and
        `[[first, last, num_speculative_tokens], ...]`; None when it is the same everywhere.

    Raises:
        UsageError: buckets differ by context and none is given.
        ConfigError: buckets differ in more than the number of tokens, which is all that vLLM can
            change between batches.
    """
    buckets = profile.selected.buckets
    if context is None:
        if len({bucket.context for bucket in buckets}) > 1:
            raise UsageError(
                "the profile's settings differ by context length, and vLLM can only switch by "
                "batch size.",
                hint="Name the context length served, in tokens: --context N.",
            )
        context = buckets[0].context[0]
    # One past the last bucket stands for all larger batches: they are equally far from each.
    end = max(bucket.batch[1] for bucket in buckets)
    chosen = [profile.select(batch, context) for batch in range(1, end + 1)]
    drafting = [config for config in chosen if config.num_speculative_tokens > 0]
    most = max((config.num_speculative_tokens for config in drafting), default=0)
    settings = {config.replace(num_speculative_tokens=most) for config in drafting}
    if len(settings) > 1:
        raise ConfigError(
            "the profile's buckets differ in more than `num_speculative_tokens`, which is all that "
            "vLLM can change from batch to batch.",
            hint="Serve each bucket with a profile of its own.",
        )
    config = settings.pop() if settings else chosen[0]
    schedule: list[list[int]] = []
    for batch, setting in enumerate(chosen, start=1):
        gamma = setting.num_speculative_tokens
        if schedule and schedule[-1][2] == gamma:
            schedule[-1][1] = batch
        else:
            schedule.append([batch, batch, gamma])
    return config, schedule if len(schedule) > 1 else None


def _as_yaml(plan: ServingPlan, profile: Profile) -> str:
    options = {key.replace("_", "-"): value for key, value in plan.options.items()}
    return to_yaml({"model": plan.model, **options})


def _as_args(plan: ServingPlan, profile: Profile) -> str:
    words = ["vllm", "serve", plan.model]
    for key, value in plan.options.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        words += [f"--{key.replace('_', '-')}", text]
    return shlex.join(words) + "\n"


def _as_env(plan: ServingPlan, profile: Profile) -> str:
    drafts = plan.speculative_config is not None
    # Assigned even when empty: a value left over from another profile would be drafted with.
    config = json.dumps(plan.speculative_config) if drafts else ""
    return (
        '# vllm serve "$VEGAS_MODEL" '
        '${VEGAS_SPECULATIVE_CONFIG:+--speculative-config "$VEGAS_SPECULATIVE_CONFIG"}\n'
        f"VEGAS_MODEL={shlex.quote(plan.model)}\n"
        f"VEGAS_SPECULATIVE_CONFIG={shlex.quote(config)}\n"
    )


def _as_python(plan: ServingPlan, profile: Profile) -> str:
    arguments = {"model": plan.model, **plan.options}
    sampling = {
        key: value
        for key, value in profile.match.sampling.to_facts().items()
        if key in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        and value not in (None, WILDCARD)
    }
    lines = [f"        {key}={value!r},\n" for key, value in arguments.items()]
    drawn = "".join(f"{key}={value!r}, " for key, value in sampling.items())
    return (
        "from vllm import LLM, SamplingParams\n\n"
        'if __name__ == "__main__":\n'
        f"    llm = LLM(\n{''.join(lines)}    )\n"
        f"    sampling = SamplingParams({drawn}max_tokens=256)\n"
        '    for output in llm.generate(["Once upon a time"], sampling):\n'
        "        print(output.outputs[0].text)\n"
    )


def one_line(value: Any) -> str:
    """Text from a profile for a message or a comment, which a line break would end."""
    return " ".join(str(value).split())


FORMATS: Final[Mapping[str, Callable[[ServingPlan, Profile], str]]] = {
    "yaml": _as_yaml,
    "args": _as_args,
    "python": _as_python,
    "env": _as_env,
}
