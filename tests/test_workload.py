from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from vegas_runtime.config import SamplingConfig
from vegas_runtime.errors import WorkloadError
from vegas_runtime.profile import Workload as ProfileWorkload
from vegas_tune import datasets, standard_library
from vegas_tune.prompts import PromptEncoder, cut_to_length
from vegas_tune.standard_library import standard_library_prompts
from vegas_tune.workload import (
    Workload,
    WorkloadSpec,
    active_ratios,
    build_workload,
    check_budget_floor,
    workload_from_description,
)

LIBRARY = Path(sysconfig.get_path("stdlib"))
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
LADDER = (0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2)


def make_tokenizer(
    *, vocab_size: int = 1500, template: str | None = TEMPLATE
) -> PreTrainedTokenizerFast:
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [(LIBRARY / name).read_text() for name in ("argparse.py", "textwrap.py", "heapq.py")]
    model.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|end|>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def bare_tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(template=None)


@pytest.fixture(scope="session")
def stdlib_workload(tokenizer: PreTrainedTokenizerFast) -> Workload:
    spec = WorkloadSpec(context_len=512, batch_size=6, num_waiting=2, num_blocks=2, seed=3)
    return build_workload(spec, tokenizer)


def all_prompts(workload: Workload) -> list[tuple[int, ...]]:
    return [prompt for block in workload.blocks for prompt in block.prompts]


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def small(name: str, path: Path, **changes: Any) -> WorkloadSpec:
    values: dict[str, Any] = {"batch_size": 1, "num_blocks": 1, "max_new_tokens": 4}
    return WorkloadSpec(**values | {"name": name, "path": path} | changes)


# --- the specification ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"name": "random"}, "'random' is unknown; known are stdlib, jsonl, aime25"),
        ({"name": "jsonl"}, "needs `path`"),
        ({"path": Path("x.jsonl")}, "reads no file of yours"),
        ({"context_len": 64}, "`context_len` is 64; at least 128"),
        ({"context_len": 2048.0}, "`context_len` is 2048.0; a whole number"),
        ({"min_context_len": 9}, "`min_context_len` is 9, which does not go with `stdlib`"),
        ({"name": "jsonl", "path": Path("x"), "context_len": 256}, "does not go with `jsonl`"),
        ({"batch_size": 0}, "`batch_size` is 0; at least 1"),
        ({"batch_size": True}, "`batch_size` is True; a whole number"),
        ({"num_waiting": -1}, "`num_waiting` is -1; at least 0"),
        ({"num_blocks": 0}, "`num_blocks` is 0"),
        ({"max_new_tokens": 0}, "`max_new_tokens` is 0"),
        ({"seed": "a"}, "`seed` is 'a'"),
        (
            {"name": "jsonl", "path": Path("x"), "min_context_len": 9, "max_context_len": 8},
            "`max_context_len` is 8; at least 9",
        ),
    ],
)
def test_spec_refuses_what_cannot_work(values: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(words)):
        WorkloadSpec(**values)


def test_spec_records_the_defaults_in_force() -> None:
    assert WorkloadSpec().context_len == 2048
    longbench = WorkloadSpec(name="longbench-v2", path=Path("d"))
    # The paper's section 5.3: inputs of 96K to 120K tokens.
    assert (longbench.min_context_len, longbench.max_context_len) == (98_304, 122_880)
    assert longbench.allow_replay is True
    assert WorkloadSpec(name="jsonl", path=Path("d")).allow_replay is False
    other = WorkloadSpec(name="longbench-v2", path=Path("d"), min_context_len=5, allow_replay=False)
    assert (other.min_context_len, other.max_context_len) == (5, 122_880)
    assert other.allow_replay is False


def test_spec_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        WorkloadSpec().seed = 1  # type: ignore[misc]


# --- the standard library ------------------------------------------------------------------------


def test_same_arguments_give_the_same_prompts(
    tokenizer: PreTrainedTokenizerFast, stdlib_workload: Workload
) -> None:
    again = build_workload(stdlib_workload.spec, tokenizer)
    assert again.blocks == stdlib_workload.blocks
    assert again.sha256 == stdlib_workload.sha256
    assert again.describe() == stdlib_workload.describe()


def test_another_seed_gives_other_prompts(
    tokenizer: PreTrainedTokenizerFast, stdlib_workload: Workload
) -> None:
    other = build_workload(dataclasses.replace(stdlib_workload.spec, seed=4), tokenizer)
    assert other.sha256 != stdlib_workload.sha256
    # At most a file or two in common of some hundred, and cut elsewhere.
    assert len(set(all_prompts(other)) & set(all_prompts(stdlib_workload))) <= 2


def test_hash_covers_sampling_and_limits(
    tokenizer: PreTrainedTokenizerFast, stdlib_workload: Workload
) -> None:
    for changes in ({"sampling": SamplingConfig(temperature=0.6)}, {"max_new_tokens": 5}):
        other = build_workload(dataclasses.replace(stdlib_workload.spec, **changes), tokenizer)
        assert all_prompts(other) == all_prompts(stdlib_workload)
        assert other.sha256 != stdlib_workload.sha256


@pytest.mark.parametrize("context_len", [160, 777, 2048])
def test_stdlib_prompts_have_exactly_the_length_asked_for(
    tokenizer: PreTrainedTokenizerFast, context_len: int
) -> None:
    spec = WorkloadSpec(context_len=context_len, batch_size=8, num_blocks=2)
    workload = build_workload(spec, tokenizer)
    assert set(workload.prompt_lens) == {context_len}
    assert workload.mix == {"continuation": 0.75, "question": 0.25}


def test_no_prompt_is_used_twice(stdlib_workload: Workload) -> None:
    prompts = all_prompts(stdlib_workload)
    assert [len(block.prompts) for block in stdlib_workload.blocks] == [8, 8]
    assert [block.batch_size for block in stdlib_workload.blocks] == [6, 6]
    assert len(set(prompts)) == len(prompts) == 16


def test_questions_go_through_the_chat_template(
    tokenizer: PreTrainedTokenizerFast, stdlib_workload: Workload
) -> None:
    texts = [tokenizer.decode(prompt) for prompt in all_prompts(stdlib_workload)]
    questions = [text for text in texts if text.startswith("<|start|>user\nHere is the file `")]
    assert len(questions) == 4
    for text in questions:
        assert text.endswith("<|end|>\n<|start|>assistant\n")
        shown, asked = text.split("```python\n")[1].rsplit("\n```\n\n", 1)
        assert len(shown) > 200
        name = re.search(r"(?:class|for|what|Rewrite|on the class) `(\w+)`", asked)
        if name:  # what is asked about must be in the part that is shown
            assert re.search(rf"^(class|def|async def) {name[1]}\b", shown, re.MULTILINE)
        else:
            assert ".py`" in asked
    assert not any("<|start|>" in text for text in texts if text not in questions)


def test_questions_vary(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = all_prompts(build_workload(WorkloadSpec(batch_size=24, num_blocks=2), tokenizer))
    questions = {
        re.sub(r"`[^`]+`", "X", tokenizer.decode(prompt).rsplit("```\n\n", 1)[1])
        for prompt in prompts[3::4]
    }
    assert len(questions) >= 4


def test_continuations_are_real_text_of_library_files(
    tokenizer: PreTrainedTokenizerFast, stdlib_workload: Workload
) -> None:
    library = [
        path.read_text(encoding="utf-8", errors="ignore")
        for path in LIBRARY.rglob("*.py")
        if "site-packages" not in path.parts
    ]
    for index, prompt in enumerate(all_prompts(stdlib_workload)):
        if index % 4 != 3:
            text = tokenizer.decode(prompt[:-1])  # the last token may be part of a character
            assert any(text in file for file in library)


def test_without_a_chat_template_questions_are_plain_text(
    bare_tokenizer: PreTrainedTokenizerFast,
) -> None:
    workload = build_workload(WorkloadSpec(context_len=512, batch_size=4), bare_tokenizer)
    text = bare_tokenizer.decode(workload.blocks[0].prompts[3])
    assert text.startswith("Here is the file `")
    assert set(workload.prompt_lens) == {512}
    assert workload.source["chat_template"] is False


@pytest.mark.parametrize(
    ("dated", "shown"),
    [
        ("Today is {{ strftime_now('%Y-%m-%d') }}. ", "Today is 2026-01-01. "),
        ("{{ strftime_now('%A, %-d %B %Y, %H:%M') }}. ", "Thursday, 1 January 2026, 00:00. "),
        (
            "{% macro head() %}{{ strftime_now('%b %d') }}. {% endmacro %}{{ head() }}",
            "Jan 01. ",
        ),
        (
            "{% if date_string is not defined %}{% if strftime_now is defined %}"
            "{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{% endif %}"
            "{{ date_string }}. ",
            "01 Jan 2026. ",
        ),
    ],
)
def test_todays_date_does_not_get_into_a_prompt(dated: str, shown: str) -> None:
    tokens = PromptEncoder(tokenizer := make_tokenizer(template=dated + TEMPLATE)).user("Hello")
    assert tokenizer.decode(tokens).startswith(f"{shown}<|start|>user")


def test_template_that_leaves_no_room_for_text_is_refused() -> None:
    wordy = make_tokenizer(template="Be helpful and harmless. " * 20 + TEMPLATE)
    with pytest.raises(WorkloadError, match=r"`context_len` is 128, but a question .* take \d+"):
        build_workload(WorkloadSpec(context_len=128), wordy)


def fake_library(root: Path, sizes: dict[str, int]) -> Path:
    for name, functions in sizes.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        body = "def {0}_{1}(value):\n    total = value + {1}\n    return total * 2\n\n\n"
        path.write_text("".join(body.format(path.stem, i) for i in range(functions)))
    return root


def test_tests_generated_tables_and_installed_packages_are_left_out(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    skipped = [
        *("test/test_a.py", "json/tests/b.py", "site-packages/c.py", "encodings/d.py"),
        *("pydoc_data/topics.py", "_sysconfigdata_x.py", "idlelib/e.py", "lib2to3/f.py"),
    ]
    root = fake_library(tmp_path, dict.fromkeys([*skipped, "good.py", "json/fine.py"], 40))
    (root / "table.py").write_text("VALUES = [\n" + "    1,\n" * 2000 + "]\n")
    (root / "old.py").write_bytes(b"# coding: latin-1\n" + b"def a(): '\xe9'\n" * 400)
    encoder = PromptEncoder(tokenizer)
    prompts = list(standard_library_prompts(encoder, context_len=256, seed=0, root=root))
    names = {re.search(r"(\w+?)_\d", tokenizer.decode(prompt.tokens))[1] for prompt in prompts}  # type: ignore[index]
    assert names == {"good", "fine"}


def test_short_files_are_joined_once_the_long_ones_are_used_up(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    sizes = {f"short{i}.py": 12 for i in range(24)} | {"long.py": 200}
    root = fake_library(tmp_path, sizes)
    encoder = PromptEncoder(tokenizer)
    prompts = list(standard_library_prompts(encoder, context_len=1024, seed=0, root=root))
    assert {len(prompt.tokens) for prompt in prompts} == {1024}
    kinds = [prompt.kind for prompt in prompts]
    assert kinds[:4] == ["continuation", *["joined_continuation"] * 2, "joined_question"]
    for prompt in prompts[1:]:
        assert tokenizer.decode(prompt.tokens).count("# file: short") >= 2
    assert len({prompt.source_sha256 for prompt in prompts}) == len(prompts)


def test_too_few_files_is_an_error_with_both_numbers(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = fake_library(tmp_path, {f"m{i}.py": 100 for i in range(7)} | {"short.py": 5})
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(root))
    spec = WorkloadSpec(context_len=512, batch_size=2, num_waiting=1, num_blocks=3)
    with pytest.raises(WorkloadError) as caught:
        build_workload(spec, tokenizer)
    assert "gives 7 different prompts of 512 tokens, and 9 are needed" in caught.value.message
    assert "3 blocks of 3 that share none" in caught.value.message
    assert build_workload(dataclasses.replace(spec, num_blocks=2), tokenizer).replays == 1


def test_library_without_source_files_is_an_error(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    encoder = PromptEncoder(tokenizer)
    with pytest.raises(WorkloadError, match=r"without its standard library's source files"):
        next(standard_library_prompts(encoder, context_len=256, seed=0, root=tmp_path))


def test_order_of_directory_entries_does_not_matter(
    tokenizer: PreTrainedTokenizerFast, stdlib_workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reversed_walk(root: Path) -> Any:
        for folder, folders, files in walk(root):
            folders.reverse()
            yield folder, folders, files[::-1]

    walk = os.walk
    monkeypatch.setattr("vegas_tune.standard_library.os.walk", reversed_walk)
    assert build_workload(stdlib_workload.spec, tokenizer).sha256 == stdlib_workload.sha256


def test_neither_locale_nor_hash_seed_decides_anything(tmp_path: Path) -> None:
    write_lines(tmp_path / "ü.jsonl", *({"text": f"número {i} " * 9} for i in range(20)))
    script = """
import re, sys, zlib
from pathlib import Path
from vegas_tune.workload import WorkloadSpec, build_workload

class Words:
    chat_template = None
    def encode(self, text, **options):
        return [zlib.crc32(word.encode()) for word in re.findall(r"\\w+|\\W", text)]

for spec in (
    WorkloadSpec(context_len=512, num_blocks=1),
    WorkloadSpec(name="jsonl", path=Path(sys.argv[1]), num_blocks=1),
):
    print(build_workload(spec, Words()).sha256)
assert not {"torch", "transformers", "vllm"} & set(sys.modules)
"""
    outputs = set()
    for locale, hash_seed in (("C", "1"), ("C.UTF-8", "2"), ("tr_TR.UTF-8", "3")):
        environment = {**os.environ, "LC_ALL": locale, "PYTHONHASHSEED": hash_seed}
        environment["PYTHONPATH"] = str(Path(datasets.__file__).parents[1])
        environment["PYTHONUTF8"] = "0"
        command = [sys.executable, "-c", script, str(tmp_path)]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    text=st.text(alphabet=st.sampled_from("def (x):\n    return_ é数🙂<|'\""), max_size=400),
    count=st.integers(1, 120),
)
def test_cut_is_exact_or_not_made(text: str, count: int) -> None:
    tokenizer = _shared_tokenizer()

    def encode(part: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(f"<|start|>{part}<|end|>"))

    tokens = cut_to_length(encode, text, count)
    if tokens is not None:
        assert len(tokens) == count
        assert tokenizer.decode(tokens[1:-1]) == text[: len(tokenizer.decode(tokens[1:-1]))]
    if len(encode(text)) == count:
        assert tokens is not None


_CACHE: list[PreTrainedTokenizerFast] = []


def _shared_tokenizer() -> PreTrainedTokenizerFast:
    """Hypothesis takes no session fixture, and training for each example would take long."""
    if not _CACHE:
        _CACHE.append(make_tokenizer(vocab_size=400))
    return _CACHE[0]


# --- JSON lines ----------------------------------------------------------------------------------


def test_prompt_is_templated_text_is_not_and_messages_are_chat(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write_lines(
        tmp_path / "p.jsonl",
        {"prompt": "What is a heap?", "output_tokens": 10, "expected_output_len": 3},
        {"text": "import argparse\n"},
        {
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            ]
        },
    )
    workload = build_workload(small("jsonl", path, batch_size=3), tokenizer)
    texts = {tokenizer.decode(prompt) for prompt in all_prompts(workload)}
    assert texts == {
        "<|start|>user\nWhat is a heap?<|end|>\n<|start|>assistant\n",
        "import argparse\n",
        "<|start|>system\nBe short.<|end|>\n<|start|>user\nHello<|end|>\n<|start|>assistant\n",
    }
    assert workload.mix == {"chat": 0.3333, "prompt": 0.3333, "text": 0.3333}


def test_prompt_is_bare_where_there_is_no_template(
    bare_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "p.jsonl", {"prompt": "What is a heap?"})
    workload = build_workload(small("jsonl", path), bare_tokenizer)
    assert bare_tokenizer.decode(all_prompts(workload)[0]) == "What is a heap?"


def test_key_order_blank_lines_byte_order_mark_and_line_ends_do_not_matter(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    one = tmp_path / "one.jsonl"
    one.write_bytes(b'{"prompt": "A", "output_tokens": 1}\n{"prompt": "B"}\n')
    two = tmp_path / "two.jsonl"
    two.write_bytes(b'\xef\xbb\xbf{"output_tokens": 1, "prompt": "A"}\r\n\r\n{"prompt": "B"}')
    hashes = {
        build_workload(small("jsonl", path, batch_size=2), tokenizer).sha256 for path in (one, two)
    }
    assert len(hashes) == 1


BAD_LINES = {
    b"{not json": "not valid JSON",
    b'{"prompt": "a"': "not valid JSON",
    b'{"prompt": "a"} {"prompt": "b"}': "not valid JSON",
    b'{"prompt": "a", "prompt": "b"}': "key 'prompt' stands twice",
    b'["a"]': "holds a JSON list",
    b'"a"': "holds a JSON string",
    b"null": "holds a JSON null",
    b"[" * 100_000: "not valid JSON",
    b'{"question": "a"}': "has none of `prompt`, `text`, `messages`; its keys are question",
    b"{}": "its keys are none",
    b'{"prompt": "a", "text": "b"}': "has both `prompt` and `text`",
    b'{"prompt": ""}': "is empty",
    b'{"text": " \\n "}': "is empty",
    b'{"prompt": 5}': "`prompt` in p.jsonl line 3 is a number; a string is needed",
    b'{"prompt": null}': "is a null",
    b'{"prompt": "caf\xe9"}': "is not UTF-8: byte 0xe9 at position 15",
    b'{"prompt": "\\ud800"}': "half of a surrogate pair",
    b'{"messages": []}': "must be a list with at least one message",
    b'{"messages": "hello"}': "must be a list",
    b'{"messages": ["hello"]}': "message 1 is a string, not an object",
    b'{"messages": [{"content": "a"}]}': "message 1 has no `role`",
    b'{"messages": [{"role": "user"}]}': "`content` in p.jsonl line 3, message 1 is a null",
    b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}': "is not text",
    b'{"messages": [{"role": "assistant", "content": "a"}]}': "nothing is left to answer",
}


@pytest.mark.parametrize(("line", "words"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_bad_line_is_refused_with_its_number(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, line: bytes, words: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n\n' + line + b'\n{"prompt": "also good"}\n')
    with pytest.raises(WorkloadError) as caught:
        build_workload(small("jsonl", path), tokenizer)
    assert "p.jsonl line 3" in caught.value.message
    assert words in caught.value.message


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_empty_file_is_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(WorkloadError, match=r"p\.jsonl holds no prompt"):
        build_workload(small("jsonl", path), tokenizer)


def test_missing_file_and_empty_folder_are_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with pytest.raises(WorkloadError, match=r"nowhere\.jsonl does not exist"):
        build_workload(small("jsonl", tmp_path / "nowhere.jsonl"), tokenizer)
    with pytest.raises(WorkloadError, match=r"holds no \.jsonl file"):
        build_workload(small("jsonl", tmp_path), tokenizer)


def test_messages_need_a_chat_template(
    bare_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "p.jsonl", {"messages": [{"role": "user", "content": "Hello"}]})
    with pytest.raises(WorkloadError, match=r"p\.jsonl line 1 holds `messages`.* no chat template"):
        build_workload(small("jsonl", path), bare_tokenizer)


def test_template_that_refuses_a_role_names_the_line(tmp_path: Path) -> None:
    strict = make_tokenizer(
        template="{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}" + TEMPLATE
    )
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    path = write_lines(tmp_path / "p.jsonl", {"messages": messages})
    with pytest.raises(WorkloadError, match=r"p\.jsonl line 1: .*template refuses.*no system"):
        build_workload(small("jsonl", path), strict)


def test_prompts_longer_than_the_model_takes_are_refused_and_counted(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write_lines(
        tmp_path / "p.jsonl",
        *({"text": f"number {i} " * (200 if i < 3 else 5)} for i in range(8)),
    )
    spec = small("jsonl", path, batch_size=8, max_new_tokens=28)
    with pytest.raises(WorkloadError) as caught:
        build_workload(spec, tokenizer, max_model_len=128)
    assert "3 of the 8 prompts drawn are longer than the 100 tokens" in caught.value.message
    assert "max_context_len=100" in caught.value.hint
    fits = dataclasses.replace(spec, batch_size=5, max_context_len=100)
    assert build_workload(fits, tokenizer, max_model_len=128).prompt_lens[-1] <= 100
    assert build_workload(spec, tokenizer).prompt_lens[-1] > 100  # no limit is known: all are kept


def test_context_beyond_the_model_is_refused_before_any_work(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 8192
    with pytest.raises(WorkloadError, match=r"prompts of 8192 tokens and 128 .* into the 8192"):
        build_workload(WorkloadSpec(context_len=8192), tokenizer)
    path = write_lines(tmp_path / "d.json", {"unread": True})
    with pytest.raises(WorkloadError, match=r"prompts of 98304 tokens"):
        build_workload(small("longbench-v2", path), tokenizer)


def test_copies_do_not_count_as_different_prompts(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "p.jsonl", *({"prompt": f"{i % 5}"} for i in range(40)))
    spec = small("jsonl", path, batch_size=3, num_blocks=2)
    with pytest.raises(WorkloadError, match=r"40 prompts .* give 5 different prompts, and 6 are"):
        build_workload(spec, tokenizer)
    replayed = build_workload(dataclasses.replace(spec, allow_replay=True), tokenizer)
    assert (replayed.replays, replayed.describe()["n_distinct_prompts"]) == (2, 5)
    assert len(set(replayed.blocks[0].prompts)) == 3


def test_only_as_many_prompts_are_tokenised_as_needed(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "p.jsonl", *({"text": f"line {i}"} for i in range(500)))
    seen: list[str] = []
    raw = PromptEncoder.raw

    def watched(self: PromptEncoder, text: str) -> tuple[int, ...]:
        seen.append(text)
        return raw(self, text)

    monkeypatch.setattr(PromptEncoder, "raw", watched)
    build_workload(small("jsonl", path, batch_size=3), tokenizer)
    assert sum(text.startswith("line") for text in seen) == 3


# --- the paper's sets ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [
        {"problem": "Find all bases.", "answer": "70", "id": "0"},
        {"question": "Find all bases.", "answer": "70"},
        {"problem": 1, "question": "Find all bases.", "answer": "70"},
    ],
)
def test_aime25_reads_both_names_of_its_question(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, record: dict[str, Any]
) -> None:
    workload = build_workload(small("aime25", write_lines(tmp_path / "a.jsonl", record)), tokenizer)
    text = tokenizer.decode(all_prompts(workload)[0])
    assert text.startswith("<|start|>user\nFind all bases.\n\nReason step by step")
    assert "70" not in text  # the answer stays out


def test_small_set_is_replayed_and_says_so(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = tmp_path / "AIME2025"
    folder.mkdir()
    for part in ("I", "II"):
        records = ({"question": f"Problem {part} {i}?", "answer": str(i)} for i in range(15))
        write_lines(folder / f"aime2025-{part}.jsonl", *records)
    (folder / "README.md").write_text("AIME 2025")
    spec = WorkloadSpec(name="aime25", path=folder, batch_size=128, num_waiting=112, num_blocks=4)
    workload = build_workload(spec, tokenizer)
    description = workload.describe()
    # Appendix E.3: 30 questions replayed 32 times are 960 requests.
    assert (description["n_prompts"], description["n_distinct_prompts"]) == (960, 30)
    assert description["replays"] == 32
    assert set(Counter(all_prompts(workload)).values()) == {32}
    with pytest.raises(WorkloadError, match=r"give 30 different prompts, and 960 are needed"):
        build_workload(dataclasses.replace(spec, allow_replay=False), tokenizer)


CODEELO = {
    "problem_id": "2000A",
    "title": "Sum of Pairs",
    "description": "Given two numbers, add them.",
    "input": "Two integers.",
    "output": "One integer.",
    "interaction": "",
    "examples": [["1 2\n", "3\n"], ["4 5", "9"]],
    "note": None,
}


def test_codeelo_prompt_holds_the_whole_problem(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps([CODEELO]))
    text = tokenizer.decode(all_prompts(build_workload(small("codeelo", path), tokenizer))[0])
    for part in (
        "# Sum of Pairs\n\nGiven two numbers, add them.\n\n## Input\nTwo integers.",
        "## Output\nOne integer.",
        "## Example 1\nInput:\n1 2\nOutput:\n3\n\n## Example 2\nInput:\n4 5\nOutput:\n9",
    ):
        assert part in text
    assert "Note" not in text
    assert "Interaction" not in text


def test_codeelo_examples_must_be_pairs(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    for examples in ("1 2", [["1"]], [["1", 2]], [{"input": "1", "output": "2"}]):
        path.write_text(json.dumps([CODEELO, CODEELO | {"examples": examples}]))
        with pytest.raises(WorkloadError, match=r"`examples` in c\.json record 2 must be"):
            build_workload(small("codeelo", path), tokenizer)


def longbench(words: int, **changes: Any) -> dict[str, Any]:
    record = {
        "_id": str(words),
        "domain": "Single-Document QA",
        "difficulty": "hard",
        "length": "short",
        "question": f"How many words, {words}?",
        "answer": "A",
        "context": "word " * words,
    }
    return record | {f"choice_{x}": f"choice {x}" for x in "ABCD"} | changes


def test_longbench_v2_keeps_prompts_of_the_range_only(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps([longbench(words) for words in range(100, 2100, 25)]))
    spec = small("longbench-v2", path, min_context_len=700, max_context_len=1300, batch_size=5)
    workload = build_workload(spec, tokenizer)
    assert 700 <= workload.prompt_lens[0] <= workload.prompt_lens[-1] <= 1300
    assert workload.replays == 1
    text = tokenizer.decode(all_prompts(workload)[0])
    assert "\n(A) choice A\n(B) choice B\n(C) choice C\n(D) choice D\n" in text
    nothing = dataclasses.replace(spec, min_context_len=100_000, max_context_len=120_000)
    with pytest.raises(
        WorkloadError, match=r"80 prompts of .* give 0 different prompts of 100000 to 120000 tokens"
    ):
        build_workload(nothing, tokenizer)


def test_longbench_v2_reads_no_more_of_a_huge_text_than_it_takes_to_leave_it_out(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps([longbench(words) for words in (200, 100_000, 200_000)]))
    longest = 0
    encode = type(tokenizer).encode

    def watched(self: Any, text: str, **options: Any) -> Any:
        nonlocal longest
        longest = max(longest, len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "encode", watched)
    spec = small("longbench-v2", path, min_context_len=100, max_context_len=1000, batch_size=3)
    assert build_workload(spec, tokenizer).replays == 3
    assert longest < 20_000  # of 1,000,000 characters


def test_record_of_another_set_is_refused_with_its_keys(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "d.jsonl", longbench(100), {"prompt": "x", "id": 1})
    with pytest.raises(WorkloadError, match=r"d\.jsonl line 2 has no `choice_A`; its keys are pro"):
        build_workload(small("longbench-v2", path), tokenizer)
    path.write_text('[{"problem": "Find it."}, 7]')
    with pytest.raises(WorkloadError, match=r"d\.jsonl record 2 is a JSON number"):
        build_workload(small("aime25", path), tokenizer)


def test_folder_is_read_in_order_and_without_its_hidden_files(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/z.json", "A.jsonl", ".cache/x.json", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        write_lines(path, {"problem": name})
    texts = datasets.read_texts("aime25", tmp_path)
    assert [text.content.split("\n")[0] for text in texts] == ["A.jsonl", "a/z.json", "b.jsonl"]
    assert [text.where for text in texts][1] == "z.json line 1"


def test_parquet_without_pyarrow_says_what_to_do(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    with pytest.raises(WorkloadError, match=r"needs pyarrow.*pip install pyarrow"):
        build_workload(small("codeelo", tmp_path), tokenizer)


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="needs pyarrow")
def test_parquet_is_read_like_json(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([CODEELO]), tmp_path / "c.parquet")
    (tmp_path / "c.json").write_text(json.dumps([CODEELO]))
    hashes = {
        build_workload(small("codeelo", tmp_path / name), tokenizer).sha256
        for name in ("c.parquet", "c.json")
    }
    assert len(hashes) == 1
    (tmp_path / "c.parquet").write_bytes(b"PAR1 broken")
    with pytest.raises(WorkloadError, match=r"c\.parquet cannot be read as parquet"):
        build_workload(small("codeelo", tmp_path / "c.parquet"), tokenizer)


# --- description and rebuilding ------------------------------------------------------------------


def stored(workload: Workload) -> dict[str, Any]:
    """The description as it comes back from a file."""
    description: dict[str, Any] = json.loads(json.dumps(workload.describe()))
    assert description == workload.describe()
    return description


def test_description_holds_what_a_profile_needs(stdlib_workload: Workload) -> None:
    description = stored(stdlib_workload)
    assert description["name"] == "stdlib"
    assert description["n_prompts"] == 16
    assert description["prompts_sha256"] == stdlib_workload.sha256
    assert description["prompt_tokens"] == {"min": 512, "p50": 512, "p95": 512, "max": 512}
    assert description["mix"] == {"continuation": 0.75, "question": 0.25}
    assert (description["eos"], description["content_valid"]) == ("natural", True)
    assert (description["replays"], description["seed"]) == (1, 3)
    assert description["source"]["python"].endswith(".".join(map(str, sys.version_info[:3])))


def test_prompt_lengths_are_given_by_nearest_rank(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "p.jsonl", *({"text": "a" * i} for i in range(1, 21)))
    workload = build_workload(small("jsonl", path, batch_size=20), tokenizer)
    lens = workload.prompt_lens
    tokens = workload.describe()["prompt_tokens"]
    assert tokens == {"min": lens[0], "p50": lens[9], "p95": lens[18], "max": lens[19]}
    assert lens == tuple(sorted(len(tokenizer.encode("a" * i)) for i in range(1, 21)))


def test_stdlib_workload_is_rebuilt_from_its_description(
    tokenizer: PreTrainedTokenizerFast, stdlib_workload: Workload
) -> None:
    assert workload_from_description(stored(stdlib_workload), tokenizer) == stdlib_workload


def test_workload_is_rebuilt_from_the_section_of_a_profile(
    tokenizer: PreTrainedTokenizerFast, stdlib_workload: Workload
) -> None:
    section = ProfileWorkload.model_validate(stored(stdlib_workload))
    recorded = json.loads(section.model_dump_json(exclude_none=True))
    assert "path" not in recorded
    assert workload_from_description(recorded, tokenizer) == stdlib_workload


def test_file_workload_is_rebuilt_wherever_the_file_lies_now(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "secret.jsonl", *({"prompt": f"{i}?"} for i in range(9)))
    spec = small("jsonl", path, batch_size=4, sampling=SamplingConfig(temperature=0.6, top_k=20))
    workload = build_workload(spec, tokenizer)
    description = stored(workload)
    assert description["path"] == "secret.jsonl"
    assert str(tmp_path) not in json.dumps(description)
    moved = path.rename(tmp_path / "moved.jsonl")
    assert workload_from_description(description, tokenizer, moved).blocks == workload.blocks
    with pytest.raises(WorkloadError, match=r"read from 'secret\.jsonl'; where that file lies"):
        workload_from_description(description, tokenizer)


def test_rebuilding_with_a_changed_file_fails_and_says_so(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "p.jsonl", {"prompt": "A"})
    description = stored(build_workload(small("jsonl", path), tokenizer))
    write_lines(path, {"prompt": "B"})
    with pytest.raises(
        WorkloadError, match=r"not the recorded ones .*: the file's content has cha"
    ):
        workload_from_description(description, tokenizer, path)


def test_rebuilding_with_another_tokenizer_fails_and_says_so(
    bare_tokenizer: PreTrainedTokenizerFast, stdlib_workload: Workload
) -> None:
    for other in (make_tokenizer(vocab_size=900), bare_tokenizer):
        with pytest.raises(WorkloadError, match=r"the tokenizer or its chat template is another"):
            workload_from_description(stored(stdlib_workload), other)


def test_rebuilding_on_another_python_names_both_versions(
    tokenizer: PreTrainedTokenizerFast, stdlib_workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    description = stored(stdlib_workload)
    monkeypatch.setattr("platform.python_version", lambda: "3.99.1")
    # Another version with the same text is as good as the same version.
    assert workload_from_description(description, tokenizer).sha256 == stdlib_workload.sha256
    files = standard_library._files
    monkeypatch.setattr(
        standard_library,
        "_files",
        lambda root, seed: (
            dataclasses.replace(file, text="# new\n" + file.text) for file in files(root, seed)
        ),
    )
    with pytest.raises(
        WorkloadError,
        match=r"another Python's standard library \(CPython 3\.\S+ there, CPython 3.99",
    ):
        workload_from_description(description, tokenizer)


def test_damaged_hash_is_told_from_a_changed_source(
    tokenizer: PreTrainedTokenizerFast, stdlib_workload: Workload
) -> None:
    description = stored(stdlib_workload) | {"prompts_sha256": "0" * 64}
    with pytest.raises(WorkloadError, match=r"not 000000000000.*the recorded facts agree"):
        workload_from_description(description, tokenizer)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": ...}, "has no `seed`"),
        ({"source": ...}, "has no `source`"),
        ({"sampling": {"temprature": 0.5}}, "`sampling` is wrong"),
        ({"sampling": {"temperature": -1}}, "`sampling` is wrong: `temperature` is -1"),
        ({"batch_size": "8"}, "`batch_size` is '8'"),
    ],
)
def test_incomplete_description_is_refused(
    tokenizer: PreTrainedTokenizerFast,
    stdlib_workload: Workload,
    changes: dict[str, Any],
    words: str,
) -> None:
    description = stored(stdlib_workload) | changes
    description = {key: value for key, value in description.items() if value is not ...}
    with pytest.raises(WorkloadError, match=re.escape(words)):
        workload_from_description(description, tokenizer)


# --- the budget floor ----------------------------------------------------------------------------


def test_ratio_is_active_from_the_floor_on(stdlib_workload: Workload) -> None:
    # Median context 512 + 128 / 2 = 576, so a ratio asks for ceil(ratio * 577).
    assert stdlib_workload.median_context_len == 576
    assert active_ratios(stdlib_workload, 32, LADDER) == (0.07, 0.1, 0.15, 0.2)
    assert active_ratios(stdlib_workload, 29, LADDER) == (0.05, 0.07, 0.1, 0.15, 0.2)
    assert active_ratios(stdlib_workload, 30, (0.05, 0.2)) == (0.2,)
    # Drafts are candidates too: ceil(0.05 * (576 + 15 + 1)) is 30.
    assert active_ratios(stdlib_workload, 30, (0.05,), num_speculative_tokens=15) == (0.05,)
    check_budget_floor(stdlib_workload, 32, LADDER)


def test_workload_on_which_the_floor_decides_is_refused(stdlib_workload: Workload) -> None:
    with pytest.raises(WorkloadError) as caught:
        check_budget_floor(stdlib_workload, 256, LADDER)
    message = caught.value.message
    assert "median is 576 tokens (the longest prompt has 512)" in message
    assert "at least 256 (--min-tokens)" in message
    assert "a ratio decides only from 0.444 on; 0 of 9 candidates do" in message
    assert "2560 tokens or more, or --min-tokens 58 or less" in caught.value.hint


def test_hint_of_the_floor_is_right(
    tokenizer: PreTrainedTokenizerFast, stdlib_workload: Workload
) -> None:
    check_budget_floor(stdlib_workload, 58, LADDER)
    with pytest.raises(WorkloadError):
        check_budget_floor(stdlib_workload, 59, LADDER)
    long = WorkloadSpec(context_len=2560, batch_size=1, num_blocks=1, max_new_tokens=1)
    check_budget_floor(build_workload(long, tokenizer), 256, LADDER)


def test_ratios_with_the_same_budget_count_once(stdlib_workload: Workload) -> None:
    with pytest.raises(WorkloadError, match=r"3 of 3 candidates do, with 2 different budgets"):
        check_budget_floor(stdlib_workload, 1, (0.1, 0.1001, 0.2))
    with pytest.raises(WorkloadError, match=r"at least 3 different candidate ratios"):
        check_budget_floor(stdlib_workload, 1, (0.1, 0.2))


def test_long_answers_make_a_short_question_a_long_context(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"problem": "Find it.", "answer": "1"})
    reasoning = build_workload(small("aime25", path, max_new_tokens=32_768), tokenizer)
    check_budget_floor(reasoning, 256, LADDER)
    short = build_workload(small("aime25", path, max_new_tokens=256), tokenizer)
    with pytest.raises(WorkloadError, match="contexts are too short"):
        check_budget_floor(short, 256, LADDER)


# --- the packaged model --------------------------------------------------------------------------


@pytest.mark.model
def test_default_workload_of_the_packaged_model(smollm2_source: Any) -> None:
    from vegas_runtime.engine.loading import load_tokenizer

    tokenizer = load_tokenizer(smollm2_source)
    workload = build_workload(WorkloadSpec(), tokenizer, max_model_len=8192)
    assert set(workload.prompt_lens) == {2048}
    assert workload.mix == {"continuation": 0.75, "question": 0.25}
    question = tokenizer.decode(workload.blocks[0].prompts[3])
    assert question.startswith("<|im_start|>system\n")
    assert question.endswith("<|im_end|>\n<|im_start|>assistant\n")
    check_budget_floor(workload, 32, LADDER)
    assert workload_from_description(stored(workload), tokenizer) == workload
