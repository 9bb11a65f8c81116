"""`vegas-tune compare --model` as a user meets it: methods on a tiny model."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from test_cli import command, run, tiny

from vegas_runtime.errors import EXIT_CODES

__all__ = ["tiny"]

METHODS = ["vegas", "last_accepted", "quest:scope=kv_head"]


def arguments(tiny: Path, run_dir: Path, *more: str) -> list[str | Path]:
    return [
        "compare", "--model", tiny / "model", "--workload", tiny / "prompts.jsonl",
        "--methods", ",".join(METHODS),
        "--batch", "2", "--waiting", "0", "--blocks", "2", "--max-new-tokens", "32",
        "--tokens", "40", "--min-tokens", "4", "--max-gamma", "3", "--budget", "10m",
        "--ratios", "0.1,0.3,0.6", "--dtype", "float32", "--device", "cpu",
        "--backend", "reference", "--run-dir", run_dir, *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def compared(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A finished comparison of methods: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("runs") / "compared"
    process = run(*arguments(tiny, folder, "--json"))
    assert process.returncode in (EXIT_CODES["ok"], EXIT_CODES["inconclusive"]), process.stderr
    return {"folder": folder, "process": process, "document": json.loads(process.stdout)}


def test_methods_are_tuned_and_measured_side_by_side(compared: dict[str, Any]) -> None:
    document = compared["document"]
    assert {row["name"] for row in document["rows"]} == {*METHODS, "plain"}
    assert document["num_rounds"] >= 2
    for row in document["rows"]:
        assert row["decode_tok_s"]["low"] <= row["decode_tok_s"]["est"]
        if row["name"] == "plain":
            continue
        assert row["config"]["num_speculative_tokens"] in (1, 2, 3)
        assert row["config"]["sparsity_ratio"] in (0.1, 0.3, 0.6)
        assert row["selection_overhead"]["n"] >= 2
        assert row["vs_plain"]["n"] == document["num_rounds"]
        assert row["best_other"] in {*METHODS} - {row["name"]}
        assert len(row["position_acceptance"]) <= row["config"]["num_speculative_tokens"]
        assert 1 <= row["tokens_per_iteration"]["est"] <= 4
    # Per KV head is a switch of its own, not another name for the same.
    configs = {row["name"]: row["config"] for row in document["rows"]}
    assert configs["quest:scope=kv_head"]["scope"] == "kv_head"
    assert configs["last_accepted"]["rows"] == "last_accepted"


def test_everything_is_written(compared: dict[str, Any]) -> None:
    folder = compared["folder"]
    written = json.loads((folder / "comparison.json").read_text())
    assert written["rows"] == compared["document"]["rows"]
    assert all(name in (folder / "table.md").read_text() for name in METHODS)
    assert "<svg" in (folder / "report.html").read_text()
    for each in written["figures"]:
        for kind in ("png", "svg"):
            assert (folder / "figures" / f"{each['key']}.{kind}").stat().st_size > 1000
    assert {Path(path).name for path in compared["document"]["files"]} >= {
        "comparison.json", "table.md", "report.html", "figure-9.png",
    }  # fmt: skip


def test_the_same_command_again_measures_nothing(compared: dict[str, Any], tiny: Path) -> None:
    folder = compared["folder"]
    records = sorted(folder.rglob("*.z"))
    before = {path: path.stat().st_mtime_ns for path in records}
    comparison = (folder / "comparison.json").read_bytes()
    process = run(*arguments(tiny, folder))
    assert sorted(folder.rglob("*.z")) == records
    assert {path: path.stat().st_mtime_ns for path in records} == before
    assert (folder / "comparison.json").read_bytes() == comparison
    assert process.stdout.startswith("3 methods")
    assert "| vegas |" in process.stdout


@pytest.fixture(scope="module")
def resumed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A comparison at one gamma, killed and gone on with: its records and what it printed."""
    folder = tmp_path_factory.mktemp("runs") / "killed"
    given = arguments(tiny, folder, "--gamma", "2", "--json")
    given[given.index(",".join(METHODS))] = "vegas,streaming_llm"
    process = subprocess.Popen(
        command(*given), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while len(list(folder.rglob("*.z"))) < 8 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.z")}
    document = json.loads(run(*given, check=0).stdout)
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*.z")}
    return {"before": before, "after": after, "document": document}


def test_a_killed_comparison_goes_on_where_it_was(resumed: dict[str, Any]) -> None:
    before, after = resumed["before"], resumed["after"]
    assert len(before) >= 8
    assert {path: after.get(path) for path in before} == before
    assert len(after) > len(before)


def test_one_gamma_for_all(resumed: dict[str, Any]) -> None:
    drafting = [row for row in resumed["document"]["rows"] if row["name"] != "plain"]
    assert {row["config"]["num_speculative_tokens"] for row in drafting} == {2}
    # At one gamma already, nothing is measured for it apart.
    assert all(row["tokens_at_one_gamma"] == row["tokens_per_iteration"] for row in drafting)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "nothing was named"),
        (["a.yaml"], "one profile was named"),
        (["a.yaml", "b.yaml", "--methods", "vegas"], "--methods belongs to a comparison of"),
        (["a.yaml", "b.yaml", "--model", "m"], "a.yaml is a profile to compare"),
        (["--model", "m", "--gamma", "many"], "--gamma is 'many'"),
        (["--model", "m", "--gamma", "0"], "--gamma is '0'"),
        (["--model", "m", "--gamma", "3", "--gammas", "1,2"], "one of them is enough"),
        (["--model", "m", "--methods", "vegas,vegas"], "which are the same method"),
    ],
)
def test_what_cannot_be_compared_is_said(given: list[str], words: str) -> None:
    process = run("compare", *given, check=EXIT_CODES["usage"])
    assert words in process.stderr
    assert process.stdout == ""


def test_an_unknown_method_is_said_before_anything_is_measured(tiny: Path, tmp_path: Path) -> None:
    given = arguments(tiny, tmp_path / "run")
    given[given.index(",".join(METHODS))] = "vegas,quests"
    process = run(*given, check=EXIT_CODES["usage"])
    assert "Did you mean 'quest'?" in process.stderr
    assert not (tmp_path / "run").exists()
