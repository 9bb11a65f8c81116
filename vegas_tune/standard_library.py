"""Prompts from text found on every machine: the running Python's standard library."""

from __future__ import annotations

import ast
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vegas_runtime.errors import WorkloadError
from vegas_tune.prompts import (
    Prompt,
    PromptEncoder,
    Tokens,
    cut_to_length,
    seeded_number,
    sha256_text,
)

# Raise it with any change below that changes a prompt, so that `check` can tell an older recipe
# from a changed library.
RECIPE: Final = 1

# One question for every three texts to continue.
_PERIOD: Final = 4

# Lines of a class or function worth a question; `class Error(Exception): pass` is not.
_LEAST_LINES: Final = 4

# Tokens of a file that a question must be able to show.
_LEAST_TEXT: Final = 32

# Not part of the library proper, written by a generator, or split off into packages of their own
# by some distributions, so that one Python version would give different prompts.
_SKIPPED_FOLDERS: Final = frozenset(
    (
        *("site-packages", "dist-packages", "lib-dynload", "__phello__", "__pycache__"),
        *("test", "tests", "idle_test", "encodings", "pydoc_data", "turtledemo"),
        *("distutils", "ensurepip", "idlelib", "lib2to3", "tkinter"),
    )
)
_SKIPPED_FILES: Final = frozenset(
    (
        *("html/entities.py", "re/_casefix.py", "stringprep.py", "turtle.py"),
        *("sitecustomize.py", "usercustomize.py"),
    )
)
_SKIPPED_PREFIXES: Final = ("_sysconfigdata", "config-")

_DEFINITION: Final = re.compile(r"^(?:class|def|async def) ", re.MULTILINE)
_AFTER_BLANK_LINE: Final = re.compile(r"(?<=\n\n)(?:class |def |async def |@)")

# What is asked about a file: about one of its classes, one of its functions, or the whole.
_QUESTIONS: Final = (
    ("class", "Explain what the class `{name}` does, what it remembers and how its methods fit."),
    ("function", "Write unit tests for `{name}` with `unittest`: ordinary input, edges, errors."),
    ("file", "List the functions and classes of `{file}`, with one sentence on each."),
    ("function", "Explain step by step what `{name}` does, then name inputs it handles badly."),
    ("class", "Write a short tutorial on the class `{name}` with three working examples."),
    ("function", "Rewrite `{name}` with type annotations and a docstring; keep what it does."),
    ("file", "Review `{file}`: what is hard to follow, and how would you write it instead?"),
)


@dataclass(frozen=True)
class _Document:
    """Text to cut prompts from: one file, or several where none is long enough alone."""

    name: str
    text: str
    is_joined: bool = False

    @property
    def sha256(self) -> str:
        return sha256_text(self.name, self.text)


def standard_library_facts() -> dict[str, Any]:
    """What a later rebuild must find again: recipe and Python version."""
    return {
        "recipe": RECIPE,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def standard_library_prompts(
    encoder: PromptEncoder, *, context_len: int, seed: int, root: Path | None = None
) -> Iterator[Prompt]:
    """Make prompts one by one, each from a file of its own, until the library is used up.

    Three in four are `continuation`: a file's text from its beginning or from one of its
    definitions on. The fourth is a `question` about a file, through the chat template where
    there is one. Files too short for `context_len` are kept back and, once the long ones are used
    up, joined (`joined_continuation`, `joined_question`).

    Args:
        encoder: the model's tokenizer.
        context_len: exact tokens of each prompt, template included.
        seed: decides order, cuts and questions.
        root: folder of the library; the running interpreter's when not given.

    Yields:
        Prompts of exactly `context_len` tokens.

    Raises:
        WorkloadError: this Python has no library as source text, or `context_len` has no room
            for a question.
    """
    short: list[_Document] = []
    made = 0
    for document in _files(root or Path(sysconfig.get_path("stdlib")), seed):
        prompt = _prompt(encoder, document, context_len, seed, made)
        if prompt is None:
            short.append(document)
        else:
            made += 1
            yield prompt
    if not made and not short:
        raise WorkloadError(
            "this Python comes without its standard library's source files, which the default "
            "workload is made of.",
            hint="Give prompts of your own: --workload file.jsonl.",
        )
    for document in _joined(encoder, short, context_len):
        prompt = _prompt(encoder, document, context_len, seed, made)
        if prompt is not None:
            made += 1
            yield prompt


def _files(root: Path, seed: int) -> Iterator[_Document]:
    """The library's modules in seeded order, read as they are needed."""
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        for file in files:
            name = Path(folder, file).relative_to(root).as_posix()
            if file.endswith(".py") and name not in _SKIPPED_FILES:
                names.append(name)
    names = [name for name in names if not name.startswith(_SKIPPED_PREFIXES)]
    for name in sorted(names, key=lambda name: (seeded_number(seed, name), name)):
        try:
            text = Path(root, name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # a few modules keep an older encoding on purpose
        # Fewer definitions: a table of constants, which reads like no text anybody decodes.
        if len(_DEFINITION.findall(text)) >= 3:
            yield _Document(name, text)


def _joined(
    encoder: PromptEncoder, short: list[_Document], context_len: int
) -> Iterator[_Document]:
    """Files joined, each under its name, until they are long enough."""
    parts: list[_Document] = []
    total = 0
    for document in short:
        parts.append(document)
        total += len(encoder.raw(document.text))
        # Joining may save a token at each seam, and never costs more than the names do.
        if total >= context_len + 2 * len(parts):
            text = "\n\n".join(f"# file: {part.name}\n{part.text}" for part in parts)
            yield _Document(parts[0].name, text, is_joined=True)
            parts, total = [], 0


def _prompt(
    encoder: PromptEncoder, document: _Document, context_len: int, seed: int, made: int
) -> Prompt | None:
    """The next prompt from this document, or None when it is too short."""
    if len(document.text) < context_len:
        return None  # less than a character a token: not worth a try
    is_question = made % _PERIOD == _PERIOD - 1
    make = _question if is_question else _continuation
    tokens = make(encoder, document, context_len, seed)
    if tokens is None:
        return None
    kind = "question" if is_question else "continuation"
    return Prompt(
        tokens=tokens,
        kind=f"joined_{kind}" if document.is_joined else kind,
        source_sha256=document.sha256,
    )


def _continuation(
    encoder: PromptEncoder, document: _Document, context_len: int, seed: int
) -> Tokens | None:
    """The text from a seeded definition on, or from the beginning where that is too short."""
    # 4 characters a token is usual for code; where it is fewer, the beginning serves.
    latest = len(document.text) - 5 * context_len
    starts = [0]
    if not document.is_joined:
        found = (match.start() for match in _AFTER_BLANK_LINE.finditer(document.text))
        starts += [start for start in found if start <= latest]
    chosen = starts[seeded_number(seed, "start", document.name) % len(starts)]
    for start in dict.fromkeys((chosen, 0)):
        tokens = encoder.head(document.text[start:], context_len)
        if len(tokens) == context_len:
            return tokens
    return None


def _question(
    encoder: PromptEncoder, document: _Document, context_len: int, seed: int
) -> Tokens | None:
    """A question about the beginning of the text, cut so that the whole has the exact length."""
    what = f"Here is the file `{document.name}`"
    if document.is_joined:
        what = f"Here are the file `{document.name}` and others"
    opening = f"{what} of Python's standard library, cut off at the end:"

    def encode(part: str, asked: str) -> Tokens:
        return encoder.user(f"{opening}\n\n```python\n{part}\n```\n\n{asked}")

    around = len(encode("", max((words for _, words in _QUESTIONS), key=len)))
    if around + _LEAST_TEXT > context_len:
        raise WorkloadError(
            f"`context_len` is {context_len}, but a question and this model's chat template take "
            f"{around} tokens by themselves; too little text would be left to ask about.",
            hint=f"Ask for at least {around + _LEAST_TEXT} tokens.",
        )
    # What is asked about must survive the cut; a token has 2 characters or more.
    asked = _ask(document, 2 * (context_len - around), seed)
    return cut_to_length(lambda part: encode(part, asked), document.text, context_len)


def _ask(document: _Document, safe_chars: int, seed: int) -> str:
    """A seeded question about something defined within the first `safe_chars` characters."""
    found: dict[str, list[str]] = {"class": [], "function": [], "file": [document.name]}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in strings are none of our business
            tree = ast.parse(document.text)
    except (SyntaxError, ValueError):
        tree = ast.Module(body=[], type_ignores=[])  # joined files, mostly: ask about the whole
    lines = document.text.count("\n", 0, safe_chars)
    for node in tree.body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        end = node.end_lineno or 0
        if end > lines or end - node.lineno < _LEAST_LINES:
            continue
        found["class" if isinstance(node, ast.ClassDef) else "function"].append(node.name)
    questions = [(about, words) for about, words in _QUESTIONS if found[about]]
    number = seeded_number(seed, "question", document.name)
    about, words = questions[number % len(questions)]
    names = found[about]
    name = names[number // len(questions) % len(names)]
    return words.format(name=name, file=document.name)
