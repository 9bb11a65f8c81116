"""The command line as a user meets it: real subprocesses, a tiny model, exit codes, streams."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoints import save_checkpoint

from vegas_runtime.errors import EXIT_CODES
from vegas_runtime.profile import load_profile

ANSI = re.compile(r"\x1b\[")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny checkpoint and a workload for it."""
    folder = tmp_path_factory.mktemp("tiny")
    save_checkpoint(folder / "model", "llama")
    words = "the quick brown fox jumps over a lazy dog while rain falls on the old mill"
    rows = []
    for start in range(8):
        text = " ".join(words.split()[start:] + words.split()) * 3
        rows.append(json.dumps({"text": text[start : start + 180]}))
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "vegas_tune.cli", *map(str, arguments)]


def sweep_arguments(tiny: Path, run_dir: Path, *more: str) -> list[str | Path]:
    # Dense enough a ladder to walk on, small enough to take seconds.
    return [
        "sweep", "--model", tiny / "model", "--workload", tiny / "prompts.jsonl",
        "--batch", "2", "--waiting", "0", "--blocks", "2", "--max-new-tokens", "48",
        "--tokens", "60", "--min-tokens", "4", "--max-gamma", "3", "--budget", "60s",
        "--ratios", "0.2,0.3,0.6,0.9", "--dtype", "float32", "--device", "cpu",
        "--backend", "reference", "--run-dir", run_dir, *more,
    ]  # fmt: skip


def run(
    *arguments: str | Path, check: int | None = None, cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    process = subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **env},
    )
    if check is not None:
        assert process.returncode == check, process.stderr + process.stdout
    return process


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A finished sweep: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    process = run(*sweep_arguments(tiny, folder, "--json"))
    assert process.returncode in (EXIT_CODES["ok"], EXIT_CODES["inconclusive"]), process.stderr
    return {"folder": folder, "process": process, "document": json.loads(process.stdout)}


def test_sweep_leaves_a_profile_that_every_command_reads(finished: dict[str, Any]) -> None:
    path = finished["folder"] / "profile.yaml"
    profile = load_profile(path)
    assert profile.profile_id == finished["document"]["profile_id"]
    assert profile.curves.sparsity
    assert profile.curves.gamma
    assert profile.decisions[0].step == "1-sparsity"
    run("report", path, check=0)
    run("report", path, "--format", "html", "--out", finished["folder"] / "r.html", check=0)
    assert "<svg" in (finished["folder"] / "r.html").read_text()
    run("compare", path, path, check=0)
    compared = run("compare", path, path, "--json", check=0)
    assert json.loads(compared.stdout)["is_like_for_like"]
    run("apply", path, "--check", check=0)


def test_sweep_prints_one_json_document_and_progress_elsewhere(finished: dict[str, Any]) -> None:
    process = finished["process"]
    assert json.loads(process.stdout)["status"] in ("validated", "inconclusive")
    for step in ("step 1/4", "step 2/4", "step 4/4"):
        assert step in process.stderr
    assert "tok/s" in process.stderr


def test_progress_without_a_terminal_has_no_control_codes(finished: dict[str, Any]) -> None:
    assert not ANSI.search(finished["process"].stderr)
    assert "\r" not in finished["process"].stderr


def test_no_color_is_honoured(finished: dict[str, Any]) -> None:
    path = finished["folder"] / "profile.yaml"
    process = run("report", path, check=0, NO_COLOR="1", FORCE_COLOR="1", TERM="xterm-256color")
    assert not re.search(r"\x1b\[[0-9;]*3\dm", process.stdout)


def test_the_same_command_again_measures_nothing(finished: dict[str, Any], tiny: Path) -> None:
    before = (finished["folder"] / "profile.yaml").read_bytes()
    records = sorted((finished["folder"] / "records").iterdir())
    times = [record.stat().st_mtime_ns for record in records]
    process = run(*sweep_arguments(tiny, finished["folder"], "--json"))
    assert json.loads(process.stdout)["profile_id"] == finished["document"]["profile_id"]
    assert sorted((finished["folder"] / "records").iterdir()) == records
    assert [record.stat().st_mtime_ns for record in records] == times
    assert (finished["folder"] / "profile.yaml").read_bytes() == before


def test_check_replays_the_decision_and_remeasures(finished: dict[str, Any], tiny: Path) -> None:
    path = finished["folder"] / "profile.yaml"
    process = run("check", path, "--replay-only", "--json", check=0)
    assert json.loads(process.stdout)["verdict"] == "ok"
    process = run(
        "check", path, "--model", tiny / "model", "--data", tiny / "prompts.jsonl",
        "--dtype", "float32", "--device", "cpu", "--json",
    )  # fmt: skip
    # Greedy float32 on the same machine accepts the same drafts.
    assert process.returncode == 0, process.stderr + process.stdout


def test_apply_runs_a_prompt(finished: dict[str, Any], tiny: Path) -> None:
    path = finished["folder"] / "profile.yaml"
    process = run(
        "apply", path, "--run", "the quick", "--max-new-tokens", "12",
        "--model", tiny / "model", "--dtype", "float32", "--device", "cpu", "--json", check=0,
    )  # fmt: skip
    shown = json.loads(process.stdout)
    assert shown["num_tokens"] == 12
    assert shown["same_output"] is True
    assert shown["decode_tok_s"] > 0


@pytest.mark.parametrize("output", ["yaml", "args", "python", "env"])
def test_apply_renders_every_format(finished: dict[str, Any], output: str) -> None:
    process = run("apply", finished["folder"] / "profile.yaml", "--format", output, check=0)
    assert finished["document"]["profile_id"] in process.stdout


def test_dry_run_measures_nothing_and_says_what_it_would_cost(tmp_path: Path) -> None:
    process = run("sweep", "--model", "smollm2-135m", "--dry-run", check=0, cwd=tmp_path)
    assert "720 s" in process.stdout
    assert not list(tmp_path.iterdir())


def test_interrupt_keeps_what_is_measured_and_resumes(tiny: Path, tmp_path: Path) -> None:
    arguments = sweep_arguments(tiny, tmp_path / "run", "--json")
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )
    records = tmp_path / "run" / "records"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (records.is_dir() and len(list(records.iterdir()))):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == EXIT_CODES["interrupted"], stderr
    assert json.loads(stdout)["error"]["code"] == "interrupted"
    assert "vegas_tune" in stderr or "vegas-tune" in stderr or "cli.py" in stderr
    kept = {record: record.read_bytes() for record in records.iterdir()}
    assert kept
    again = run(*arguments)
    assert again.returncode in (0, 6), again.stderr
    assert all(record.read_bytes() == content for record, content in kept.items())


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["sweep", "--model", "Qwen3-9000B"], 2, "Qwen3"),
        (["sweep", "--model", "./nowhere"], 2, "nowhere"),
        (["sweep", "--model", "smollm2-135m", "--budget", "soon"], 2, "budget"),
        (["sweep", "--model", "smollm2-135m", "--ratios", "7", "--dry-run"], 2, "0.07"),
        (["sweep", "--model", "smollm2-135m", "--workload", "nowhere.jsonl"], 2, "nowhere.jsonl"),
        (["sweep", "--model", "smollm2-135m", "--backend", "tpu"], 2, "tpu"),
        (["sweep", "--model", "smollm2-135m", "--tensor-parallel-size", "0"], 2, "at least 1"),
        (["sweep", "--model", "smollm2-135m", "--backend", "reference",
          "--tensor-parallel-size", "2"], 2, "only vLLM"),
        (["compare", "--model", "smollm2-135m", "--backend", "reference",
          "--tensor-parallel-size", "2"], 2, "only vLLM"),
        (["sweep", "--model", "smollm2-135m", "--context", "160", "--min-tokens", "256",
          "--dry-run"], 2, "--min-tokens"),
        (["apply", "nowhere.yaml"], 5, "nowhere.yaml"),
        (["check", "nowhere.yaml"], 5, "nowhere.yaml"),
        (["report", "nowhere.yaml"], 5, "nowhere.yaml"),
        (["sweeep"], 2, "sweep"),
    ],
)  # fmt: skip
def test_mistakes_get_one_line_and_their_exit_code(
    arguments: list[str], code: int, words: str, tmp_path: Path
) -> None:
    process = run(*arguments, cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert process.returncode == code, process.stderr
    assert words in process.stderr
    assert "Traceback" not in process.stderr
    if arguments[0] == "sweeep":
        return
    assert len([line for line in process.stderr.splitlines() if line.startswith("error:")]) == 1
    failed = run(*arguments, "--json", cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert failed.returncode == code
    error = json.loads(failed.stdout)["error"]
    assert set(error) == {"code", "message", "hint"}


def test_a_bad_workload_line_is_named(tiny: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"text": \n')
    arguments = sweep_arguments(tiny, tmp_path / "run")
    arguments[arguments.index(tiny / "prompts.jsonl")] = bad
    process = run(*arguments)
    assert process.returncode == 2, process.stderr
    assert "2" in process.stderr
    assert "bad.jsonl" in process.stderr


def test_a_run_folder_that_cannot_be_written_is_said(tiny: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where a folder is needed")
    process = run(*sweep_arguments(tiny, blocked / "run"))
    assert process.returncode == 1, process.stderr
    assert str(blocked) in process.stderr
    assert "Traceback" not in process.stderr


def test_a_profile_for_another_machine_is_refused(finished: dict[str, Any], tmp_path: Path) -> None:
    from profiles import make_profile
    from vegas_runtime.profile import write_profile

    other = make_profile(match={"device": {"kind": "cuda", "class": "NVIDIA H200", "sm": "9.0"}})
    write_profile(other, tmp_path / "other.yaml")
    process = run("apply", tmp_path / "other.yaml")
    assert process.returncode == EXIT_CODES["mismatch"], process.stderr
    assert "device" in process.stderr


def test_exit_is_raised_never_returned() -> None:
    # `return typer.Exit(3)` exits 0; only raising works.
    for source in (Path(__file__).parent.parent / "vegas_tune").glob("*.py"):
        assert not re.search(r"return\s+typer\.Exit", source.read_text()), source


def test_help_documents_every_exit_code() -> None:
    text = run("--help", check=0).stdout
    for code in sorted(set(EXIT_CODES.values())):
        assert re.search(rf"\b{code} ", text), code


# ------------------------------------------------------------------ several workers


def test_two_workers_leave_a_profile_like_one_does(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = sweep_arguments(tiny, folder, "--workers", "2", "--budget", "40s", "--json")
    process = run(*arguments)
    assert process.returncode in (EXIT_CODES["ok"], EXIT_CODES["inconclusive"]), process.stderr
    document = json.loads(process.stdout)
    assert document["backend"] == "reference on 2 workers"
    profile = load_profile(folder / "profile.yaml")
    assert profile.protocol is not None
    assert profile.protocol.other["places"] == 2
    # Each point once per place, retries aside, and nobody left behind.
    records = [path.name for path in (folder / "records").glob("*.a0.z")]
    second = [name for name in records if ".p1." in name]
    assert len(second) == len(records) / 2 > 0
    assert not _alive(folder.name)
    run("check", folder / "profile.yaml", "--replay-only", check=0)

    told = {log: log.read_bytes() for log in folder.glob("worker-*.log")}
    again = run(*arguments)
    # All that is asked for is there: nobody is started, or waited for.
    assert {log: log.read_bytes() for log in folder.glob("worker-*.log")} == told
    assert len(told) == 2
    assert again.returncode == process.returncode, again.stderr
    assert json.loads(again.stdout)["num_measurements"] == document["num_measurements"]


def _alive(run_name: str) -> list[str]:
    """Command lines of workers of a run that still live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "worker" in words and run_name in words:
            found.append(" ".join(words))
    return found


def test_sqlite_with_two_workers_is_a_usage_error_with_the_reason(
    tiny: Path, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'x.db'}"
    arguments = sweep_arguments(tiny, tmp_path / "run", "--workers", "2", "--storage", url)
    process = run(*arguments, check=EXIT_CODES["usage"])
    assert "cannot lock a row" in process.stderr


def test_a_worker_without_a_run_says_how_to_start_one(tmp_path: Path) -> None:
    process = run("worker", "--storage", "redis://nowhere", check=EXIT_CODES["usage"])
    assert "no storage known here" in process.stderr
