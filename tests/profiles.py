"""Realistic profiles for tests: a complete one, and any change of it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest

from vegas_runtime.errors import ProfileInvalidError
from vegas_runtime.profile import Profile, parse_profile

RATIOS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.25)
GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8)


# Changes that make the profile one of a model split over two GPUs.
GPU = {
    "match": {
        "device": {
            "kind": "cuda",
            "class": "NVIDIA H200",
            "sm": "9.0",
            "memory_gib": 139.8,
            "tp": 2,
            "count": 2,
            "power_limit_w": 700,
        },
        "runtime": {"cuda": "13.0", "driver": "595.91", "vllm": "0.33.0"},
    }
}


def estimate(est: float, *, spread: float = 0.02, n: int = 20) -> dict[str, Any]:
    """An estimate with an interval of +- `spread`."""
    return {"est": est, "low": est * (1 - spread), "high": est * (1 + spread), "n": n}


def point(ratio: float, gamma: int, accepted: float, tok_s: float) -> dict[str, Any]:
    """One measured point of a curve."""
    return {
        "sparsity_ratio": ratio,
        "num_speculative_tokens": gamma,
        "accepted_per_iteration": estimate(accepted),
        "decode_tok_s": estimate(tok_s),
        "n_steps": 240,
        "status": "ok",
    }


def profile_values(**changes: Any) -> dict[str, Any]:
    """A profile's plain values, each section changed by the keyword of its name.

    Mappings are merged, everything else is replaced, and None removes a key.
    """
    return _merged(deepcopy(_COMPLETE), changes)


def make_profile(**changes: Any) -> Profile:
    """A sealed, complete profile: SmolLM2-135M on a two-core CPU, gamma 6 at 7 %.

    `make_profile(selected={"default": {"num_speculative_tokens": 0}})` changes one knob;
    `serving` is derived unless given.
    """
    return Profile.model_validate(profile_values(**changes)).seal()


def refused(text: str) -> str:
    """The message for a text, after checking what holds for each: one line, exit code 5."""
    with pytest.raises(ProfileInvalidError) as caught:
        parse_profile(text, source="p.yaml")
    message = str(caught.value)
    assert "\n" not in message
    assert "p.yaml" in message
    assert "Input should" not in message
    assert "pydantic" not in message
    assert len(message) < 400
    assert caught.value.exit_code == 5
    return message


def _merged(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for key, change in changes.items():
        if change is None:
            values.pop(key, None)
        elif isinstance(change, Mapping) and isinstance(values.get(key), dict):
            values[key] = _merged(values[key], change)
        else:
            values[key] = deepcopy(change)
    return values


_COMPLETE: dict[str, Any] = {
    "schema": "vegas-tune/profile",
    "schema_version": 1,
    "status": "validated",
    "created": "2026-11-29T20:40:00Z",
    "tool": {"name": "vegas-tune", "version": "0.1.0"},
    "backend": "reference",
    "match": {
        "model": {
            "id": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "revision": "7e27bd9f95328f0f3b08261d1252705110c806f8",
            "config_sha256": "c1" * 32,
            "weights_sha256": "e5" * 32,
            "dtype": "bfloat16",
            "quant": "none",
            "max_model_len": 8192,
            "num_layers": 30,
            "num_query_heads": 9,
            "num_kv_heads": 3,
            "head_dim": 64,
        },
        "device": {
            "kind": "cpu",
            "class": "AMD EPYC 9B14",
            "memory_gib": 24.0,
            "count": 1,
            "tp": 1,
        },
        "runtime": {
            "vegas_runtime": "0.1.0",
            "torch": "2.13.0+cpu",
            "transformers": "5.24.0",
            "kv_cache_dtype": "float32",
            "attention_path": "matmul",
            "threads": 2,
        },
        "sampling": {
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        },
    },
    "selected": {
        "default": {
            "algorithm": "vegas",
            "num_speculative_tokens": 6,
            "sparsity_ratio": 0.07,
            "min_tokens": 32,
            "rows": "two",
            "metric": "weight",
            "scope": "layer",
        },
        "buckets": [],
        "outside": "fallback_gamma_0",
    },
    "validity": {"batch": [1, 9], "context": [1024, 4096]},
    "workload": {
        "name": "stdlib",
        "context_len": 2048,
        "batch_size": 8,
        "num_waiting": 0,
        "num_blocks": 3,
        "max_new_tokens": 128,
        "sampling": {
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": 0,
        },
        "seed": 0,
        "allow_replay": False,
        "n_prompts": 24,
        "n_distinct_prompts": 24,
        "replays": 1,
        "prompts_sha256": "ab" * 32,
        "prompt_tokens": {"min": 2048, "p50": 2048, "p95": 2048, "max": 2048},
        "eos": "natural",
        "mix": {"continuation": 0.75, "question": 0.25},
        "content_valid": True,
        "source": {"tokenizer_sha256": "9f" * 32, "chat_template": True, "python": "3.11.15"},
    },
    "protocol": {
        "id": "steady-v1",
        "budget_s": 720,
        "replicates": 3,
        "pairs": 6,
        "order": "ABBA",
        "noise_floor_cv": 0.015,
        "num_batch_means": 20,
        "max_num_speculative_tokens": 15,
        "sparsity_ratio_candidates": list(RATIOS),
        "num_speculative_tokens_candidates": list(GAMMAS),
    },
    "results": {
        "decode_tok_s": estimate(58.5),
        "baseline_tok_s": estimate(46.8),
        "speedup_vs_gamma0": estimate(1.25, n=6),
        "accepted_per_iteration": estimate(4.45, n=8),
        "acceptance_length": estimate(5.45, n=8),
        "survival": [estimate(s, n=8) for s in (0.93, 0.86, 0.77, 0.69, 0.62, 0.58)],
        "phase_ms": {
            "draft": estimate(372.0),
            "select": estimate(48.0),
            "verify": estimate(310.0),
            "other": estimate(9.0),
        },
    },
    "decisions": [
        {
            "step": 1,
            "rule": "iso-boot-2pct",
            "chosen": 0.1,
            "why": "No ratio is within 2 % of the plateau, which was not reached at 0.25.",
            "alternatives": [0.07, 0.15],
            "resolved": False,
            "outcome": "plateau: not_reached",
            "data": {"tolerance": 0.02, "lower_bounds": [0.61, 0.97]},
        },
        {
            "step": 2,
            "rule": "bracket",
            "chosen": 6,
            "why": "6 beats 5 and 7; the tie with 7 goes to the smaller.",
            "alternatives": [5, 7, 0],
            "resolved": True,
            "outcome": "bracketed",
        },
        {
            "step": 3,
            "rule": "paired-ratio",
            "chosen": 0.07,
            "why": "0.07 is 3 % faster than 0.1, interval [1 %, 5 %].",
            "alternatives": [0.05, 0.1],
            "resolved": True,
            "outcome": "refined",
        },
    ],
    "curves": {
        "sparsity": [point(ratio, 15, 2.5 + 4 * ratio**0.4, 40.0 + 10 * ratio) for ratio in RATIOS],
        "gamma": [
            *(point(0.1, gamma, gamma * 0.8, 45 + gamma) for gamma in GAMMAS),
            {
                "sparsity_ratio": 0.1,
                "num_speculative_tokens": 15,
                "status": "failed",
                "failure": {"kind": "oom", "message": "24.1 GiB asked for, 24.0 GiB present."},
            },
        ],
        "refine": [point(ratio, 6, 4.4 + ratio, 58.0 - ratio) for ratio in (0.05, 0.07, 0.1)],
        "validate": [point(0.07, 6, 4.45, 58.5), point(0.07, 0, 0.0, 46.8)],
    },
    "lossless_check": {"method": "greedy float32, token for token", "result": "pass", "n": 8},
    "artifacts": [{"name": "replay.jsonl.z", "sha256": "cd" * 32}],
    "host": {"cpu": "AMD EPYC 9B14", "cores": 2},
}
