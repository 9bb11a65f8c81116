"""Texts from local files: JSON lines of prompts, and the paper's three benchmark sets."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from vegas_runtime.errors import WorkloadError
from vegas_tune.prompts import Message, Prompt, PromptEncoder, Text, seeded_number, sha256_text

Record: TypeAlias = Mapping[str, Any]

# What a folder (a downloaded data set) may hold; everything else in it is documentation.
SUFFIXES: Final = (".jsonl", ".json", ".parquet")

_JSON_NAMES: Final = {
    dict: "object",
    list: "list",
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


def read_texts(name: str, path: Path) -> list[Text]:
    """Read every prompt of a file, or of a folder's files in order of their names.

    Args:
        name: `jsonl`, `aime25`, `codeelo` or `longbench-v2`.
        path: a file, or a folder with the files of a data set.

    Raises:
        WorkloadError: nothing to read, or a record that is not what `name` promises; the message
            names file and line.
    """
    to_text = _TO_TEXT[name]
    texts = [
        to_text(where, record)
        for file in data_files(name, path)
        for where, record in _records(name, file)
    ]
    if not texts:
        raise WorkloadError(
            f"{path} holds no prompt; a workload needs at least one.",
            hint='Write one JSON object a line, such as {"prompt": "..."}.',
        )
    return texts


def data_files(name: str, path: Path) -> list[Path]:
    """The files that `read_texts` reads, in its order.

    Raises:
        WorkloadError: `path` does not exist, or is a folder without data files.
    """
    if path.is_file():
        return [path]
    if not path.exists():
        raise WorkloadError(
            f"workload file {path} does not exist.",
            hint="Data sets are read from local files and never fetched: check the path.",
        )
    suffixes = (".jsonl",) if name == "jsonl" else SUFFIXES
    # By posix text, so that no locale and no file system decides the order.
    found = sorted(
        (file.relative_to(path).as_posix(), file)
        for file in path.rglob("*")
        if file.suffix in suffixes and file.is_file()
    )
    files = [file for relative, file in found if not f"/{relative}".count("/.")]
    if not files:
        raise WorkloadError(f"folder {path} holds no {', '.join(suffixes)} file to read.")
    return files


def file_prompts(
    encoder: PromptEncoder,
    texts: Sequence[Text],
    *,
    seed: int,
    min_context_len: int | None = None,
    max_context_len: int | None = None,
) -> Iterator[Prompt]:
    """Tokenise texts one by one in seeded order, only as far as they are asked for.

    Args:
        encoder: the model's tokenizer.
        texts: what `read_texts` returned.
        seed: decides the order.
        min_context_len: shorter prompts are left out, in tokens, template included.
        max_context_len: longer prompts are left out.

    Yields:
        Prompts of their own lengths.

    Raises:
        WorkloadError: a prompt that this model's template refuses.
    """
    for i in sorted(range(len(texts)), key=lambda i: seeded_number(seed, str(i))):
        text = texts[i]
        if max_context_len is not None and _is_surely_longer(encoder, text, max_context_len):
            continue
        tokens = encoder.text(text)
        if len(tokens) < (min_context_len or 1):
            continue
        if max_context_len is None or len(tokens) <= max_context_len:
            digest = sha256_text(text.content, *map(str, text.messages))
            yield Prompt(tokens=tokens, kind=text.kind, source_sha256=digest)


def _is_surely_longer(encoder: PromptEncoder, text: Text, count: int) -> bool:
    """Judge by the beginning: LongBench-v2 has texts of millions of words, mostly left out."""
    spare = count + 64  # tokens; the cut changes a few at its end
    return len(text.content) > 16 * count and len(encoder.head(text.content, spare)) == spare


def files_sha256(files: list[Path]) -> str:
    """Hash over the contents of files, in order; names and places do not matter.

    Raises:
        WorkloadError: a file cannot be read.
    """
    digests = [hashlib.sha256(_read(file)).hexdigest() for file in files]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror or error}.") from error


def _records(name: str, path: Path) -> Iterator[tuple[str, Record]]:
    """Each record with the words that say where it stands."""
    if name == "jsonl":
        yield from _json_lines(path, _read(path))
    elif path.suffix == ".parquet":
        yield from _parquet(path)
    else:
        data = _read(path)
        is_list = data.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
        yield from _json_list(path, data) if is_list else _json_lines(path, data)


def _json_lines(path: Path, data: bytes) -> Iterator[tuple[str, Record]]:
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path.name} line {number}"
        record = _parse(where, line)
        if not isinstance(record, dict):
            raise WorkloadError(
                f"{where} holds a JSON {_JSON_NAMES[type(record)]}; each line must be one object.",
                hint='Write {"prompt": "..."} on a line of its own for each prompt.',
            )
        yield where, record


def _json_list(path: Path, data: bytes) -> Iterator[tuple[str, Record]]:
    for number, record in enumerate(_parse(path.name, data), start=1):
        where = f"{path.name} record {number}"
        if not isinstance(record, dict):
            raise WorkloadError(
                f"{where} is a JSON {_JSON_NAMES[type(record)]}; each record must be an object."
            )
        yield where, record


def _parquet(path: Path) -> Iterator[tuple[str, Record]]:
    try:
        # By name: it is no dependency of ours, and its stubs are not there to be checked.
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise WorkloadError(
            f"{path.name} is a parquet file, and reading it needs pyarrow, which is missing here.",
            hint="Run `pip install pyarrow`, or save the data set as JSON lines.",
        ) from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors derive from these two
        raise WorkloadError(f"{path.name} cannot be read as parquet: {error}.") from error
    for number, row in enumerate(rows, start=1):
        yield f"{path.name} row {number}", row


def _parse(where: str, data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        raise WorkloadError(
            f"{where} is not UTF-8: byte {data[error.start]:#04x} at position {error.start}.",
            hint="Save the file as UTF-8.",
        ) from error
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"its line {error.lineno}"
        raise WorkloadError(f"{where} is not valid JSON: {error.msg} at {place}.") from error
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{where} is not valid JSON: {error}.") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return values


def _string(where: str, name: str, value: Any) -> str:
    """A string with something in it that a tokenizer accepts."""
    if not isinstance(value, str):
        kind = _JSON_NAMES.get(type(value), type(value).__name__)
        raise WorkloadError(f"`{name}` in {where} is a {kind}; a string is needed.")
    if not value.strip():
        raise WorkloadError(f"`{name}` in {where} is empty; there would be nothing to decode from.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise WorkloadError(
            f"`{name}` in {where} holds half of a surrogate pair ({value[error.start]!r}), "
            "which no tokenizer accepts."
        ) from error
    return value


def _field(where: str, record: Record, name: str) -> str:
    if name not in record:
        raise WorkloadError(
            f"{where} has no `{name}`; its keys are {', '.join(map(str, record)) or 'none'}.",
            hint="Is this file of the data set that the workload names?",
        )
    return _string(where, name, record[name])


def _jsonl_text(where: str, record: Record) -> Text:
    """One of `prompt`, `text` or `messages`; output lengths and other columns do not matter.

    `prompt` is a user's turn, since `vllm bench serve --dataset-name custom` sends it through the
    chat template too (its default); `text` is for prompts that are to stay as they are.
    """
    present = [key for key in ("prompt", "text", "messages") if key in record]
    if not present:
        raise WorkloadError(
            f"{where} has none of `prompt`, `text`, `messages`; its keys are "
            f"{', '.join(record) or 'none'}.",
            hint='Write {"prompt": "..."}, {"text": "..."} or {"messages": [...]}.',
        )
    if len(present) > 1:
        raise WorkloadError(
            f"{where} has both `{present[0]}` and `{present[1]}`; which one is meant is unclear.",
            hint="Keep one of them.",
        )
    if present == ["messages"]:
        messages = _messages(where, record["messages"])
        return Text(kind="chat", where=where, form="chat", messages=messages)
    if present == ["text"]:
        content = _string(where, "text", record["text"])
        return Text(kind="text", where=where, form="raw", content=content)
    content = _string(where, "prompt", record["prompt"])
    return Text(kind="prompt", where=where, form="user", content=content)


def _messages(where: str, value: Any) -> tuple[Message, ...]:
    """OpenAI's chat format, text only, ending where the model has to speak."""
    if not isinstance(value, list) or not value:
        raise WorkloadError(f"`messages` in {where} must be a list with at least one message.")
    messages = []
    for number, message in enumerate(value, start=1):
        inside = f"{where}, message {number}"
        if not isinstance(message, dict):
            raise WorkloadError(f"{inside} is a {_JSON_NAMES[type(message)]}, not an object.")
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(_text_part(inside, part) for part in content)
        role = _field(inside, message, "role")
        messages.append({"role": role, "content": _string(inside, "content", content)})
    if messages[-1]["role"] == "assistant":
        raise WorkloadError(
            f"the last message in {where} is the assistant's, so nothing is left to answer.",
            hint="Remove the answer; the model writes its own.",
        )
    return tuple(messages)


def _text_part(where: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise WorkloadError(
            f"{where} has a content part that is not text; only text prompts are decoded here."
        )
    return _string(where, "text", part.get("text"))


def _aime25_text(where: str, record: Record) -> Text:
    """AIME 2025: `problem` (or `question` in some copies), `answer`."""
    # Copies that hold `question` number the task in `problem`.
    name = "question" if "question" in record else "problem"
    content = (
        f"{_field(where, record, name)}\n\n"
        "Reason step by step, and give the final answer within \\boxed{}."
    )
    return Text(kind="reasoning", where=where, form="user", content=content)


def _codeelo_text(where: str, record: Record) -> Text:
    """CodeElo: `title`, `description`, `input`, `output`, `interaction`, `examples`, `note`."""
    parts = [
        "Solve this competitive programming problem in C++. Think it through first, then give "
        "the whole program in one code block.",
        f"# {_field(where, record, 'title')}",
        _field(where, record, "description"),
    ]
    # An interactive problem has no input and output of its own, and few problems have a note.
    for name in ("input", "output", "interaction"):
        if record.get(name):
            parts.append(f"## {name.capitalize()}\n{_string(where, name, record[name])}")
    for number, example in enumerate(_examples(where, record.get("examples")), start=1):
        given, wanted = example
        parts.append(f"## Example {number}\nInput:\n{given}\nOutput:\n{wanted}")
    if record.get("note"):
        parts.append(f"## Note\n{_string(where, 'note', record['note'])}")
    # The fields were checked one by one; what is new here are the examples.
    content = _string(where, "examples", "\n\n".join(parts))
    return Text(kind="coding", where=where, form="user", content=content)


def _examples(where: str, value: Any) -> list[tuple[str, str]]:
    """CodeElo's `examples`: pairs of input and output."""
    pairs = [] if value is None else value
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(side, str) for side in pair)
        for pair in pairs
    ):
        raise WorkloadError(f"`examples` in {where} must be a list of [input, output] pairs.")
    return [(pair[0].strip(), pair[1].strip()) for pair in pairs]


def _longbench_v2_text(where: str, record: Record) -> Text:
    """LongBench-v2: `context`, `question`, `choice_A` to `choice_D`."""
    choices = "\n".join(f"({x}) {_field(where, record, f'choice_{x}')}" for x in "ABCD")
    content = (
        "Read the text, then answer the question about it.\n\n"
        f"<text>\n{_field(where, record, 'context')}\n</text>\n\n"
        f"Question: {_field(where, record, 'question')}\n\n{choices}\n\n"
        "Explain what in the text decides the matter, then name the one correct choice."
    )
    return Text(kind="long_context", where=where, form="user", content=content)


_TO_TEXT: Final[dict[str, Callable[[str, Record], Text]]] = {
    "jsonl": _jsonl_text,
    "aime25": _aime25_text,
    "codeelo": _codeelo_text,
    "longbench-v2": _longbench_v2_text,
}
