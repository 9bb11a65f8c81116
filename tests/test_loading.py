from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint, write_gguf
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from vegas_runtime.engine import loading
from vegas_runtime.engine.loading import (
    ALIASES,
    ModelSource,
    fetch,
    load_model,
    load_tokenizer,
    resolve_model,
)
from vegas_runtime.errors import BackendError, ModelError

pytestmark = pytest.mark.usefixtures("empty_cache")


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "my-model"
    save_checkpoint(folder)
    return folder


class TestResolve:
    @pytest.mark.parametrize("name", ["Qwen3-8B", "qwen3-8b", "QWEN3-8B", "qwen/qwen3-8b"])
    def test_short_names_ignore_case(self, name: str) -> None:
        assert resolve_model(name) == ModelSource("hub", "Qwen/Qwen3-8B")

    @pytest.mark.parametrize("alias", sorted(ALIASES))
    def test_every_alias_means_its_target(self, alias: str) -> None:
        assert resolve_model(alias).id == ALIASES[alias]

    def test_packaged_model_is_pinned_by_its_wheel(self) -> None:
        source = resolve_model("SmolLM2-135M")
        assert (source.kind, source.id) == ("packaged", "smollm2-135m")
        assert source.revision.startswith("bcc81830d10ce7d9")
        assert resolve_model("smollm2-135m", source.revision) == source

    def test_hub_id_keeps_its_revision(self) -> None:
        assert resolve_model("owner/name", "v1") == ModelSource("hub", "owner/name", "v1")

    def test_path_is_known_by_its_last_part_only(self, checkpoint: Path) -> None:
        assert resolve_model(str(checkpoint)) == ModelSource("path", "my-model", "", checkpoint)

    def test_folder_named_like_an_alias_needs_a_dot(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "Qwen3-8B").mkdir()
        assert resolve_model("Qwen3-8B").kind == "hub"
        assert resolve_model("./Qwen3-8B").kind == "path"

    @pytest.mark.parametrize(
        ("name", "revision", "wanted"),
        [
            ("qwen3-9b", None, "Did you mean Qwen3-8B?"),
            ("smollm-135m", None, "Did you mean smollm2-135m?"),
            ("zzz", None, "Known: smollm2-135m, "),
            ("a/b/c", None, "neither a known short name"),
            ("/nowhere/model", None, "/nowhere/model does not exist"),
            ("nowhere.gguf", None, "nowhere.gguf does not exist"),
            ("smollm2-135m", "main", "revision 'main'"),
            (".", "main", "revision 'main'"),
        ],
    )
    def test_meaningless_names_are_refused(
        self, name: str, revision: str | None, wanted: str
    ) -> None:
        with pytest.raises(ModelError) as caught:
            resolve_model(name, revision)
        assert wanted in str(caught.value)

    def test_loads_neither_torch_nor_transformers(self) -> None:
        script = (
            "import sys\n"
            "from vegas_runtime.engine.loading import resolve_model\n"
            "resolve_model('Qwen3-8B')\n"
            "heavy = {'torch', 'transformers', 'huggingface_hub', 'numpy', 'gguf'}\n"
            "print(sorted(heavy & set(sys.modules)))\n"
        )
        root = Path(loading.__file__).parents[2]
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root
        )
        assert done.stdout == "[]\n"


class TestLoad:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_computes_what_was_saved(self, tmp_path: Path, architecture: str) -> None:
        original = save_checkpoint(tmp_path / "tiny", architecture)
        loaded = load_model(resolve_model(str(tmp_path / "tiny")), dtype="float32")
        ids = torch.arange(1, 50)[None]
        assert torch.equal(loaded.model(ids).logits, original(ids).logits)
        assert not loaded.model.training
        assert not any(each.requires_grad for each in loaded.model.parameters())

    @pytest.mark.parametrize(
        ("architecture", "layers", "sliding"),
        [("llama", 4, 0), ("qwen3_moe", 4, 0), ("gpt_oss", 4, 2), ("gemma3", 6, 4)],
    )
    def test_facts_are_the_models_own(
        self, tmp_path: Path, architecture: str, layers: int, sliding: int
    ) -> None:
        save_checkpoint(tmp_path / "tiny", architecture)
        facts = load_model(resolve_model(str(tmp_path / "tiny")), dtype="bfloat16").facts
        shape = {key: facts[key] for key in facts if not key.endswith("sha256")}
        assert shape == {
            "id": "tiny",
            "revision": "",
            "dtype": "bfloat16",
            "quant": "none",
            "max_model_len": 2048,
            "num_layers": layers,
            "num_query_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "num_sliding_layers": sliding,
        }
        assert str(tmp_path) not in json.dumps(facts)

    def test_one_window_for_all_layers_counts_them_all(self) -> None:
        config = AutoConfig.for_model("mistral", sliding_window=64, num_hidden_layers=3)
        from vegas_runtime.engine.facts import _num_sliding_layers

        assert _num_sliding_layers(config) == 3

    @pytest.mark.parametrize(("native", "wanted"), [(True, "bfloat16"), (False, "float32")])
    def test_auto_dtype_on_cpu_follows_the_cpu(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, native: bool, wanted: str
    ) -> None:
        found = {"avx512_f": True, "avx512_bf16": native}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
        loaded = load_model(resolve_model(str(checkpoint)))
        assert loaded.facts["dtype"] == wanted
        assert {str(each.dtype) for each in loaded.model.parameters()} == {f"torch.{wanted}"}

    def test_gguf_file_loads_by_its_path(self, tmp_path: Path) -> None:
        original = write_gguf(tmp_path / "tiny.gguf")
        loaded = load_model(
            resolve_model(str(tmp_path / "tiny.gguf")),
            dtype="float32",
        )
        ids = torch.arange(3, 60)[None]
        assert torch.equal(loaded.model(ids).logits, original(ids).logits)
        assert loaded.facts["id"] == "tiny.gguf"
        sha256 = hashlib.sha256((tmp_path / "tiny.gguf").read_bytes()).hexdigest()
        assert loaded.facts["weights_sha256"] == sha256

    def test_attention_is_the_one_asked_for(self, checkpoint: Path) -> None:
        source = resolve_model(str(checkpoint))
        for name in ("eager", "sdpa"):
            loaded = load_model(source, attn_implementation=name)
            assert loaded.model.config._attn_implementation == name

    def test_fetched_source_can_be_fetched_again(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "tiny.gguf")
        first = fetch(resolve_model(str(tmp_path / "tiny.gguf")))
        assert fetch(first) == first
        assert load_tokenizer(first).eos_token == "<|im_end|>"

    @pytest.mark.gpu
    def test_auto_dtype_on_cuda_is_the_checkpoints_own(self, checkpoint: Path) -> None:
        edit_config(checkpoint, dtype="float16")
        loaded = load_model(resolve_model(str(checkpoint)), device="cuda")
        assert loaded.facts["dtype"] == "float16"
        assert loaded.model.device.type == "cuda"


class TestHashes:
    def test_config_hash_ignores_who_wrote_it_but_not_what_it_says(self, checkpoint: Path) -> None:
        def config_sha256() -> str:
            value = load_model(resolve_model(str(checkpoint))).facts["config_sha256"]
            assert isinstance(value, str)
            return value

        first = config_sha256()
        edit_config(checkpoint, transformers_version="9.9", _name_or_path="/elsewhere")
        assert config_sha256() == first
        edit_config(checkpoint, rms_norm_eps=1e-5)
        assert config_sha256() != first

    def test_weights_hash_of_one_file_is_its_sha256(self, checkpoint: Path) -> None:
        facts = load_model(resolve_model(str(checkpoint))).facts
        content = (checkpoint / "model.safetensors").read_bytes()
        assert facts["weights_sha256"] == hashlib.sha256(content).hexdigest()

    def test_weights_hash_of_shards_is_that_of_sha256sum(self, tmp_path: Path) -> None:
        model = save_checkpoint(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        model.save_pretrained(tmp_path, max_shard_size="300KB")
        facts = load_model(resolve_model(str(tmp_path))).facts
        command = "sha256sum model-*.safetensors | sha256sum"
        done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, check=True)
        assert facts["weights_sha256"] == done.stdout.decode().split()[0]

    def test_weights_hash_tells_fine_tunes_apart(self, tmp_path: Path) -> None:
        hashes = set()
        for seed in (0, 1):
            save_checkpoint(tmp_path / "tiny", seed=seed)
            hashes.add(load_model(resolve_model(str(tmp_path / "tiny"))).facts["weights_sha256"])
        assert len(hashes) == 2


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "wanted"),
        [
            ({"model_type": "t5", "architectures": None}, "encoder-decoder"),
            ({"model_type": "vit", "architectures": None}, "no causal language model"),
            ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "a BertForMaskedLM"),
            ({"architectures": ["LlamaForSequenceClassification"]}, "not a LlamaForCausalLM"),
            ({"model_type": "jamba", "architectures": None}, "linear_attention layers"),
            ({"model_type": "bloom", "architectures": None}, "attention cannot be replaced"),
            ({"model_type": "homemade"}, "homemade"),
            ({"model_type": None}, "not usable"),
        ],
    )
    def test_what_cannot_be_decoded_here_is_refused(
        self, tmp_path: Path, changes: dict[str, Any], wanted: str
    ) -> None:
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        values = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **changes}
        kept = {key: value for key, value in values.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))
        with pytest.raises(ModelError, match=wanted):
            fetch(resolve_model(str(folder)))

    def test_code_that_comes_with_a_checkpoint_is_not_run(self, checkpoint: Path) -> None:
        ran = checkpoint / "ran"
        (checkpoint / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Config: pass\n")
        edit_config(checkpoint, model_type="homemade", auto_map={"AutoConfig": "own.Config"})
        with pytest.raises(ModelError, match="not usable"):
            load_model(resolve_model(str(checkpoint)))
        assert not ran.exists()

    def test_folder_without_config_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"has no config\.json"):
            fetch(resolve_model(str(tmp_path)))

    def test_broken_config_is_refused(self, checkpoint: Path) -> None:
        (checkpoint / "config.json").write_text("{")
        with pytest.raises(ModelError, match="not usable"):
            fetch(resolve_model(str(checkpoint)))

    def test_other_weight_formats_are_refused(self, checkpoint: Path) -> None:
        (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
        with pytest.raises(ModelError, match="safetensors files only"):
            fetch(resolve_model(str(checkpoint)))

    def test_missing_shard_is_named(self, tmp_path: Path) -> None:
        model = save_checkpoint(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        model.save_pretrained(tmp_path, max_shard_size="300KB")
        shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
        shard.unlink()
        with pytest.raises(ModelError, match=shard.name):
            fetch(resolve_model(str(tmp_path)))

    def test_weights_that_would_be_random_are_refused(self, checkpoint: Path) -> None:
        path = checkpoint / "model.safetensors"
        weights = load_file(path)
        del weights["model.layers.1.self_attn.k_proj.weight"]
        save_file(weights, path, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=r"1 weights.*layers\.1\.self_attn\.k_proj"):
            load_model(resolve_model(str(checkpoint)))

    @pytest.mark.parametrize("damage", ["misshapen", "cut off"])
    def test_damaged_weights_are_refused(self, checkpoint: Path, damage: str) -> None:
        path = checkpoint / "model.safetensors"
        if damage == "misshapen":
            edit_config(checkpoint, intermediate_size=95)
        else:
            path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(ModelError, match="my-model cannot be loaded"):
            load_model(resolve_model(str(checkpoint)))

    def test_missing_tokenizer_is_told(self, checkpoint: Path) -> None:
        (checkpoint / "tokenizer.json").unlink()
        with pytest.raises(ModelError, match="without a tokenizer"):
            load_model(resolve_model(str(checkpoint)))

    def test_broken_tokenizer_is_told(self, checkpoint: Path) -> None:
        (checkpoint / "tokenizer.json").write_text("{")
        with pytest.raises(ModelError, match="tokenizer of my-model does not load"):
            load_model(resolve_model(str(checkpoint)))

    def test_unknown_dtype_attention_and_absent_device_are_told(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = resolve_model(str(checkpoint))
        with pytest.raises(ModelError, match="dtype is 'int8'"):
            load_model(source, dtype="int8")
        with pytest.raises(ModelError, match="attn_implementation"):
            load_model(source, attn_implementation="no-such-attention")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(BackendError, match="no CUDA device"):
            load_model(source, device="cuda")


class TestQuiet:
    def test_nothing_is_printed_or_left_changed(
        self, checkpoint: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        enable_progress_bars()
        transformers_logging.enable_progress_bar()
        transformers_logging.set_verbosity(logging.INFO)
        before = hub_logging.get_verbosity()
        capfd.readouterr()
        try:
            load_model(resolve_model(str(checkpoint)))
            assert capfd.readouterr() == ("", "")
            assert transformers_logging.get_verbosity() == logging.INFO
            assert transformers_logging.is_progress_bar_enabled()
            assert not are_progress_bars_disabled()
            assert hub_logging.get_verbosity() == before
        finally:
            transformers_logging.set_verbosity(logging.WARNING)

    @pytest.mark.parametrize(("own", "hub"), [(True, False), (False, True), (False, False)])
    def test_bars_switched_off_before_stay_off(
        self, checkpoint: Path, own: bool, hub: bool
    ) -> None:
        loading._show_bars(own, hub)
        try:
            load_model(resolve_model(str(checkpoint)))
            assert transformers_logging.is_progress_bar_enabled() is own
            assert are_progress_bars_disabled() is not hub
        finally:
            loading._show_bars(True, True)

    def test_failure_restores_too(self, tmp_path: Path) -> None:
        before = transformers_logging.get_verbosity()
        with pytest.raises(ModelError):
            fetch(resolve_model(str(tmp_path)))
        assert transformers_logging.get_verbosity() == before
        assert transformers_logging.is_progress_bar_enabled()


@pytest.mark.model
def test_smollm2_answers_and_is_what_its_card_says(smollm2_source: ModelSource) -> None:
    loaded = load_model(smollm2_source, dtype="float32")
    wanted = {
        "id": "smollm2-135m",
        "quant": "gguf-q4_1 dequantised",
        "dtype": "float32",
        "max_model_len": 8192,
        "num_layers": 30,
        "num_query_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "num_sliding_layers": 0,
    }
    assert loaded.facts.items() >= wanted.items()
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = loaded.model.generate(**prompt, do_sample=False, max_new_tokens=12)
    answer = loaded.tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
