"""The prompts a setting is measured on: real text, seeded, hashed, rebuilt exactly."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from vegas_runtime.config import SamplingConfig, SpeculationConfig
from vegas_runtime.errors import ConfigError, WorkloadError
from vegas_runtime.protocol import PromptBlock
from vegas_tune.datasets import data_files, file_prompts, files_sha256, read_texts
from vegas_tune.prompts import Prompt, PromptEncoder, Tokenizer, sha256_text
from vegas_tune.standard_library import standard_library_facts, standard_library_prompts
from vegas_tune.workload_spec import WorkloadSpec

__all__ = [
    "Workload",
    "WorkloadSpec",
    "active_ratios",
    "build_workload",
    "check_budget_floor",
    "workload_from_description",
]

# Below this many different budgets there is no curve to find a plateau on.
_LEAST_BUDGETS: Final = 3

# Tokenizers without a limit report a number like 1e30.
_NO_LIMIT: Final = 10**9


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Blocks of prompts, and what is needed to make the same ones again.

    Attributes:
        spec: what was asked for, defaults filled in.
        blocks: block i holds `batch_size` + `num_waiting` prompts. No prompt is in two blocks,
            or twice in one, unless `replays` is above 1.
        replays: times that the most used prompt is used. Above 1 a prefix cache that is on will
            hit, and greedy outputs of the copies are the same.
        mix: share of the prompts by kind.
        source: facts about where the text comes from, compared when it is rebuilt.
    """

    spec: WorkloadSpec
    blocks: tuple[PromptBlock, ...]
    replays: int
    mix: dict[str, float]
    source: dict[str, Any]

    @cached_property
    def sha256(self) -> str:
        """Hash over all blocks: token ids, limits and sampling."""
        return hashlib.sha256("".join(block.sha256 for block in self.blocks).encode()).hexdigest()

    @property
    def prompt_lens(self) -> tuple[int, ...]:
        """Tokens of every prompt, ascending."""
        return tuple(sorted(len(prompt) for block in self.blocks for prompt in block.prompts))

    @property
    def median_context_len(self) -> int:
        """Tokens in the KV cache half-way through the median request.

        Counted with every request running to `max_new_tokens`: a reasoning set starts at 200
        tokens and still decodes at 10,000. Requests that end early make it shorter.
        """
        return _percentile(self.prompt_lens, 0.5) + self.spec.max_new_tokens // 2

    def describe(self) -> dict[str, Any]:
        """Plain values for the profile's `workload` section; see `workload_from_description`."""
        lens = self.prompt_lens
        return {
            **self.spec.to_dict(),
            "n_prompts": len(lens),
            "n_distinct_prompts": len({p for block in self.blocks for p in block.prompts}),
            "replays": self.replays,
            "prompts_sha256": self.sha256,
            "prompt_tokens": {
                "min": lens[0],
                "p50": _percentile(lens, 0.5),
                "p95": _percentile(lens, 0.95),
                "max": lens[-1],
            },
            "eos": "natural",
            "mix": dict(self.mix),
            "content_valid": True,
            "source": dict(self.source),
        }


def build_workload(
    spec: WorkloadSpec, tokenizer: Tokenizer, *, max_model_len: int | None = None
) -> Workload:
    """Make the prompts: the same ones for the same arguments, on any machine.

    Args:
        spec: what to make.
        tokenizer: the model's own, of transformers or alike.
        max_model_len: tokens the model takes, prompt and output together; the tokenizer's own
            figure when not given.

    Raises:
        WorkloadError: a file that cannot be read, too few different prompts, or prompts that the
            model has no room for.
    """
    encoder = PromptEncoder(tokenizer)
    room = _room(spec, tokenizer, max_model_len)
    source = {"tokenizer_sha256": encoder.fingerprint, "chat_template": encoder.has_template}
    if spec.path is None:
        distinct = _from_standard_library(spec, encoder)
        source |= standard_library_facts()
        source["library_sha256"] = sha256_text(*(prompt.source_sha256 for prompt in distinct))
    else:
        distinct = _from_file(spec, spec.path, encoder)
        source["file_sha256"] = files_sha256(data_files(spec.name, spec.path))
    _check_room(spec, distinct, room)
    replays = math.ceil(spec.num_prompts / len(distinct))
    prompts = (distinct * replays)[: spec.num_prompts]
    kinds = Counter(prompt.kind for prompt in prompts)
    return Workload(
        spec=spec,
        blocks=_blocks(spec, prompts),
        replays=replays,
        mix={kind: round(kinds[kind] / len(prompts), 4) for kind in sorted(kinds)},
        source=source,
    )


def workload_from_description(
    description: Mapping[str, Any],
    tokenizer: Tokenizer,
    path: Path | None = None,
    *,
    max_model_len: int | None = None,
) -> Workload:
    """Make a recorded workload again and prove that it is the same.

    Args:
        description: what `Workload.describe` returned; keys of others are left alone.
        tokenizer: of the model that the profile is for.
        path: where the file lies here; a description holds nothing but its name.
        max_model_len: as for `build_workload`.

    Raises:
        WorkloadError: the description is incomplete, the file is not given, or the prompts are
            others than recorded; the message says what has changed.
    """
    # A profile leaves out what is null, so only values without that default must be there.
    known = fields(WorkloadSpec)
    needed = [item.name for item in known if item.default is not None]
    missing = [key for key in (*needed, "prompts_sha256", "source") if key not in description]
    if missing:
        raise WorkloadError(
            f"the recorded workload has no `{missing[0]}`, so it cannot be made again."
        )
    values: dict[str, Any] = {item.name: description.get(item.name) for item in known}
    if values["path"] is not None and path is None:
        raise WorkloadError(
            f"the recorded workload was read from {values['path']!r}; where that file lies on this "
            "machine is not known.",
            hint="Give its path: --workload PATH.",
        )
    try:
        values["sampling"] = SamplingConfig(**values["sampling"])
    except (TypeError, ConfigError) as error:
        raise WorkloadError(f"the recorded workload's `sampling` is wrong: {error}") from error
    workload = build_workload(
        WorkloadSpec(**(values | {"path": path if values["path"] is not None else None})),
        tokenizer,
        max_model_len=max_model_len,
    )
    if workload.sha256 != description["prompts_sha256"]:
        raise WorkloadError(
            "the prompts made here are not the recorded ones "
            f"({workload.sha256[:12]}, not {str(description['prompts_sha256'])[:12]}), so figures "
            f"could not be compared: {_what_changed(description['source'], workload.source)}.",
            hint="Use what the profile was made with, or tune again here.",
        )
    return workload


def active_ratios(
    workload: Workload,
    min_tokens: int,
    ratios: Sequence[float],
    *,
    num_speculative_tokens: int = 0,
) -> tuple[float, ...]:
    """The ratios that decide the KV budget, those where the floor does not.

    A ratio is inactive when it asks for fewer than `min_tokens` entries at the workload's median
    context L: ceil(ratio * (L + gamma + 1)) < min_tokens. All inactive ratios mean the same budget.

    Args:
        workload: gives L, `median_context_len`.
        min_tokens: the floor of the KV budget.
        ratios: candidates, fractions kept, in (0, 1].
        num_speculative_tokens: gamma.

    Returns:
        The active ones, in the order given.
    """
    asked = _budgets(workload, 1, ratios, num_speculative_tokens)
    return tuple(ratio for ratio, budget in zip(ratios, asked, strict=True) if budget >= min_tokens)


def check_budget_floor(
    workload: Workload,
    min_tokens: int,
    ratios: Sequence[float],
    *,
    num_speculative_tokens: int = 0,
) -> None:
    """Refuse a workload on which the sparsity ratio decides next to nothing.

    Args:
        workload: gives the context length.
        min_tokens: the floor of the KV budget.
        ratios: candidates, fractions kept.
        num_speculative_tokens: gamma.

    Raises:
        WorkloadError: the active ratios (see `active_ratios`) give fewer than 3 different budgets.
    """
    active = active_ratios(
        workload, min_tokens, ratios, num_speculative_tokens=num_speculative_tokens
    )
    budgets = set(_budgets(workload, min_tokens, active, num_speculative_tokens))
    if len(budgets) >= _LEAST_BUDGETS:
        return
    context = workload.median_context_len
    candidates = context + num_speculative_tokens + 1
    hint = f"Give at least {_LEAST_BUDGETS} different candidate ratios."
    if len(set(ratios)) >= _LEAST_BUDGETS:
        needed = sorted(set(ratios))[-_LEAST_BUDGETS]
        hint = (
            f"Use contexts of {math.ceil(min_tokens / needed)} tokens or more, or --min-tokens "
            f"{math.ceil(needed * candidates)} or less."
        )
    raise WorkloadError(
        f"contexts are too short to tune the sparsity ratio: the median is {context} tokens (the "
        f"longest prompt has {workload.prompt_lens[-1]}), and a draft step keeps at least "
        f"{min_tokens} (--min-tokens), so that a ratio decides only from "
        f"{min_tokens / candidates:.3g} on; {len(active)} of {len(ratios)} candidates do, with "
        f"{len(budgets)} different budgets, and {_LEAST_BUDGETS} are needed.",
        hint=hint,
    )


def _budgets(
    workload: Workload, min_tokens: int, ratios: Sequence[float], num_speculative_tokens: int
) -> list[int]:
    """KV entries kept at the median context, by ratio."""
    return [
        SpeculationConfig(
            num_speculative_tokens=num_speculative_tokens,
            sparsity_ratio=ratio,
            min_tokens=min_tokens,
        ).kv_budget(workload.median_context_len)
        for ratio in ratios
    ]


def _room(spec: WorkloadSpec, tokenizer: Tokenizer, max_model_len: int | None) -> int | None:
    """Prompt tokens that leave space for the output, or None when no limit is known."""
    limit = max_model_len or getattr(tokenizer, "model_max_length", None)
    if limit is None or limit > _NO_LIMIT:
        return None
    room = int(limit) - spec.max_new_tokens
    asked = spec.context_len or spec.min_context_len or 1
    if asked > room:
        raise WorkloadError(
            f"prompts of {asked} tokens and {spec.max_new_tokens} tokens of output do not fit "
            f"into the {limit} that the model takes.",
            hint="Use shorter contexts or a lower max_new_tokens.",
        )
    return room


def _from_standard_library(spec: WorkloadSpec, encoder: PromptEncoder) -> list[Prompt]:
    assert spec.context_len is not None, "set by default"
    candidates = standard_library_prompts(encoder, context_len=spec.context_len, seed=spec.seed)
    return _distinct(spec, candidates, "the standard library gives")


def _from_file(spec: WorkloadSpec, path: Path, encoder: PromptEncoder) -> list[Prompt]:
    texts = read_texts(spec.name, path)
    candidates = file_prompts(
        encoder,
        texts,
        seed=spec.seed,
        min_context_len=spec.min_context_len,
        max_context_len=spec.max_context_len,
    )
    return _distinct(spec, candidates, f"the {len(texts)} prompts of {path} give")


def _distinct(spec: WorkloadSpec, candidates: Iterator[Prompt], where: str) -> list[Prompt]:
    """The first prompts that differ in their tokens: all that are needed, or few to replay."""
    taken: dict[tuple[int, ...], Prompt] = {}
    for prompt in candidates:
        taken.setdefault(prompt.tokens, prompt)
        if len(taken) == spec.num_prompts:
            break
    if not taken or (len(taken) < spec.num_prompts and not spec.allow_replay):
        raise _too_few(spec, len(taken), where)
    return list(taken.values())


def _check_room(spec: WorkloadSpec, prompts: list[Prompt], room: int | None) -> None:
    too_long = sum(len(prompt.tokens) > room for prompt in prompts) if room is not None else 0
    if too_long:
        raise WorkloadError(
            f"{too_long} of the {len(prompts)} prompts drawn are longer than the {room} tokens "
            f"that the model's context leaves beside {spec.max_new_tokens} tokens of output.",
            hint=f"Leave such prompts out with max_context_len={room}, or lower max_new_tokens.",
        )


def _too_few(spec: WorkloadSpec, found: int, where: str) -> WorkloadError:
    lens = ""
    if spec.context_len is not None:
        lens = f" of {spec.context_len} tokens"
    elif spec.min_context_len is not None or spec.max_context_len is not None:
        lens = (
            f" of {spec.min_context_len or 1} to {spec.max_context_len or 'any number of'} tokens"
        )
    again = ", or allow_replay=True (copies hit a prefix cache)" if found else ""
    return WorkloadError(
        f"{where} {found} different prompts{lens}, and {spec.num_prompts} are needed: "
        f"{spec.num_blocks} blocks of {spec.batch_size + spec.num_waiting} that share none.",
        hint=f"Ask for fewer blocks, a smaller batch or other context lengths{again}.",
    )


def _blocks(spec: WorkloadSpec, prompts: list[Prompt]) -> tuple[PromptBlock, ...]:
    size = spec.batch_size + spec.num_waiting
    return tuple(
        PromptBlock(
            index=index,
            prompts=tuple(p.tokens for p in prompts[index * size : (index + 1) * size]),
            batch_size=spec.batch_size,
            max_new_tokens=spec.max_new_tokens,
            sampling=spec.sampling,
        )
        for index in range(spec.num_blocks)
    )


# In the order of telling: another tokenizer or recipe changes everything after it.
_CHANGES: Final = {
    "recipe": "this release makes prompts by another recipe",
    "tokenizer_sha256": "the tokenizer or its chat template is another one",
    "chat_template": "the tokenizer's chat template came or went",
    "python": "another Python's standard library",
    "library_sha256": "files of the standard library are not the same",
    "file_sha256": "the file's content has changed",
}


def _what_changed(recorded: Any, here: Mapping[str, Any]) -> str:
    """Which facts about the source differ, in words."""
    old = recorded if isinstance(recorded, Mapping) else {}
    changes = []
    for key, words in _CHANGES.items():
        before, now = old.get(key), here.get(key)
        if before != now:
            shown = "" if key.endswith("sha256") else f" ({before} there, {now} here)"
            changes.append(words + shown)
    return "; ".join(changes) or "the recorded facts agree, so the recorded hash may be damaged"


def _percentile(ascending: Sequence[int], share: float) -> int:
    """Nearest rank: a value that occurs, not one between two."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]
