"""The benchmark of all methods: what is collected from finished settings."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import bench_methods, render_readme
from benchmarks.bench_methods import GAMMA, METHODS, RATIOS, SAMPLINGS
from benchmarks.results_file import Row
from vegas_runtime.policies import POLICIES, make_policy

FACTS = {"machine": {"kind": "cpu", "class": "a machine"}, "versions": {"torch": "0"}}


def row(name: str, accepted: list[list[int]], *, ratio: float = 0.07, **more: Any) -> str:
    values = {"cell": "context=64 greedy", "name": name, "ratio": ratio, "prompts": 2}
    values |= {"accepted": accepted, "differing": 0, "facts": FACTS, **more}
    return json.dumps(values) + "\n"


def parts() -> list[bench_methods.Part]:
    return bench_methods.make_parts(
        argparse.Namespace(
            contexts=[4096, 7424], samplings=list(SAMPLINGS), prompts=None, tokens=None, seeds=3
        )
    )


def test_every_policy_is_measured_at_every_budget_in_every_cell() -> None:
    assert {knobs["algorithm"] for knobs in METHODS.values()} == set(POLICIES)
    settings: dict[str, list[tuple[str, float]]] = {}
    for part in parts():
        for name, config in part.settings():
            make_policy(config)
            assert config.num_speculative_tokens == GAMMA
            settings.setdefault(part.cell, []).append((name, config.sparsity_ratio))
    assert len(settings) == 4
    for own in settings.values():
        assert sorted(own) == sorted(
            (name, ratio)
            for name in METHODS
            for ratio in RATIOS
            if name != "dense" or ratio == RATIOS[0]
        )


def test_sampled_points_have_three_seeds() -> None:
    assert {part.seeds for part in parts() if part.sampling != "greedy"} == {3}
    assert {part.seeds for part in parts() if part.sampling == "greedy"} == {1}


def test_seeds_of_a_text_are_one_cluster() -> None:
    assert bench_methods.by_text([[1], [2, 3], [4], [5]], 2) == [[1.0, 4.0], [2.0, 3.0, 5.0]]


def test_a_difference_is_paired_by_text() -> None:
    """Texts differ by far more than methods do, and it does not show in the difference."""
    random = np.random.default_rng(0)
    level = random.uniform(0, 6, size=16)
    base = [[float(x)] * 10 for x in level]
    other = [[float(x) - 0.3] * 10 for x in level]
    alone = bench_methods.estimate("a", "c", other, "drafts")
    paired = bench_methods.estimate("a", "c", other, "drafts", minus=base)
    assert alone.low is not None
    assert alone.high is not None
    assert alone.high - alone.low > 1
    assert (paired.low, paired.value, paired.high) == (-0.3, -0.3, -0.3)


def test_rows_are_collected_from_every_part(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(row("vegas", [[7, 5], [3, 5]]) + row("quest", [[4], [2]]))
    (tmp_path / "b.jsonl").write_text(
        row("snapkv", [[1], [0]], ratio=0.03, differing=1) + '{"cell": "cut o'
    )
    facts, rows = bench_methods.collect(tmp_path)
    assert facts == FACTS
    found = {(each.claim, each.case): each for each in rows}
    case = f"context=64 greedy gamma={GAMMA} ratio=0.07 method="
    assert found["accepted_per_iteration", case + "vegas"].value == 5.0
    assert found["accepted_after_the_first_iteration", case + "vegas"].value == 5.0
    assert found["accepted_minus_vegas", case + "quest"].value == -2.0
    # Texts that ended with their first iteration say nothing of later ones.
    assert ("accepted_after_the_first_iteration", case + "quest") not in found
    # Without vegas at its budget there is nothing to compare it with.
    assert ("accepted_minus_vegas", case.replace("0.07", "0.03") + "snapkv") not in found
    assert found["first_i_drafts_accepted", f"{case}vegas i=5"].value == pytest.approx(0.75)
    mismatches = [each for each in rows if each.claim == "greedy_mismatches"]
    assert [each.value for each in mismatches] == [1.0]
    assert "iterations=8" in mismatches[0].case


def test_the_results_page_shows_methods_as_a_grid() -> None:
    rows = [
        vars(Row(claim="accepted_per_iteration", case=f"x ratio={r} method={m}", value=v, low=v,
                 high=v, unit="drafts"))
        for m, v, r in (("vegas", 5.0, 0.07), ("quest", 4.0, 0.07), ("vegas", 3.0, 0.03))
    ]  # fmt: skip
    lines = render_readme.grid(rows, "accepted_per_iteration", "Words.").splitlines()
    assert lines[2] == "| method | x ratio=0.03 | x ratio=0.07 |"
    assert lines[4] == "| vegas | 3.00 [3.00, 3.00] | 5.00 [5.00, 5.00] |"
    assert lines[5] == "| quest |  | 4.00 [4.00, 4.00] |"
    assert render_readme.grid(rows, "another", "Words.") == ""
