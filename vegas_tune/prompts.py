"""How text becomes token ids: special tokens, chat template, exact lengths."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias

from vegas_runtime.errors import WorkloadError

Tokens: TypeAlias = tuple[int, ...]
Message: TypeAlias = dict[str, str]

# Some templates (gpt-oss, Llama 3.2) write today's date into the prompt. A workload that changes
# at midnight cannot be rebuilt, so they are all shown Thursday, 1 January 2026. Written out, since
# `strftime` speaks the locale's language.
_DATE: Final = {
    **{"%Y": "2026", "%y": "26", "%m": "01", "%-m": "1", "%B": "January", "%b": "Jan"},
    **{"%d": "01", "%-d": "1", "%j": "001", "%A": "Thursday", "%a": "Thu"},
    **{"%H": "00", "%I": "12", "%M": "00", "%S": "00", "%p": "AM"},
}
_DATE_STRING: Final = "01 Jan 2026"  # what Llama's templates take in place of a date
# transformers hands nothing but plain data to a template, so the function it offers is covered by
# a macro of the same name.
_DATE_MACRO: Final = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f".replace('{directive}', '{value}')" for directive, value in _DATE.items())
    + " }}{% endmacro %}"
)

_PROBE: Final = "def probe(x: int = 1_024) -> str:\n    return f'{x:>8}'  # naïve Ωμέγα 数 🙂\n"


class Tokenizer(Protocol):
    """What is needed of a tokenizer; every text tokenizer of transformers has it."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True, **options: Any) -> list[int]:
        """Token ids of a text."""

    def get_chat_template(self) -> str:
        """The template in use, where there are several."""

    def apply_chat_template(
        self, conversation: list[Message], *, tokenize: bool = True, **options: Any
    ) -> Any:
        """The text of a conversation as the model expects it."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """One prompt before tokenising.

    Attributes:
        kind: what sort of prompt, a key of the workload's mix.
        where: file and line, for messages.
        form: `raw` is tokenised as it stands; `user` is one turn of a user and goes through the
            chat template where the tokenizer has one; `chat` needs the template.
        content: the text of a `raw` or `user` prompt.
        messages: the turns of a `chat` prompt.
    """

    kind: str
    where: str
    form: Literal["raw", "user", "chat"]
    content: str = ""
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, ready to run.

    Attributes:
        tokens: token ids.
        kind: what sort of prompt, a key of the workload's mix.
        source_sha256: hash over the text it was cut from.
    """

    tokens: Tokens
    kind: str
    source_sha256: str


def sha256_text(*parts: str) -> str:
    """Hash over texts, lengths included so that no two lists share one."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def seeded_number(seed: int, *parts: str) -> int:
    """A number in [0, 2**64) that depends on nothing but its arguments.

    `random` promises the same shuffle only within one Python version; a hash always does, and
    one more or one less file leaves the order of all others as it was.
    """
    return int(sha256_text(str(seed), *parts)[:16], 16)


class PromptEncoder:
    """Turns text into token ids with one tokenizer.

    Args:
        tokenizer: the model's own.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer brings a chat template."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def raw(self, text: str) -> Tokens:
        """Token ids of a text as a completion server would send it, special tokens included."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=True, verbose=False))

    def chat(self, messages: list[Message]) -> Tokens:
        """Token ids of a conversation, ending where the model's answer begins.

        Raises:
            WorkloadError: the template refuses these messages.
        """
        try:
            template = self._tokenizer.get_chat_template()
            if "strftime_now" in template:
                template = _DATE_MACRO + template
            text = self._tokenizer.apply_chat_template(
                messages,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
                date_string=_DATE_STRING,
            )
        except Exception as error:  # a template is a program of the model's author: anything goes
            raise WorkloadError(
                f"the model's chat template refuses the messages: {error}",
                hint="Check their roles and order, or give the prompts as plain text.",
            ) from error
        # The template wrote the special tokens already.
        return tuple(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def user(self, text: str) -> Tokens:
        """A user's turn through the template, or the bare text where there is no template."""
        if not self.has_template:
            return self.raw(text)
        return self.chat([{"role": "user", "content": text}])

    def text(self, text: Text) -> Tokens:
        """Token ids of a prompt from a file.

        Raises:
            WorkloadError: it needs a template that is not there or refuses it.
        """
        if text.form == "raw":
            return self.raw(text.content)
        if text.form == "chat" and not self.has_template:
            raise WorkloadError(
                f"{text.where} holds `messages`, but the model's tokenizer has no chat template.",
                hint="Use a chat model, or give the prompts as `text`.",
            )
        try:
            if text.form == "user":
                return self.user(text.content)
            return self.chat([dict(message) for message in text.messages])
        except WorkloadError as error:
            raise WorkloadError(f"{text.where}: {error.message}", hint=error.hint) from error

    def head(self, text: str, count: int) -> Tokens:
        """The first `count` tokens of a text, fewer if it is shorter; quick on long texts."""
        window = 8 * count + 64  # characters; real text has 2 to 5 a token
        if window < len(text):
            tokens = self.raw(text[:window])
            # The cut may have changed the last tokens, so some must be left over.
            if len(tokens) >= count + 16:
                return tokens[:count]
        return self.raw(text)[:count]

    @property
    def fingerprint(self) -> str:
        """Hash that changes with the vocabulary, the merges and the template."""
        chat = self.user(_PROBE) if self.has_template else ()
        return hashlib.sha256(json.dumps([self.raw(_PROBE), chat]).encode()).hexdigest()


def cut_to_length(encode: Callable[[str], Tokens], text: str, count: int) -> Tokens | None:
    """Find a beginning of a text with which the whole prompt has exactly `count` tokens.

    A character more is mostly a token more or none, seldom two or one less; so the cut walks
    towards the goal and, where it would go round in circles, tries the neighbours.

    Args:
        encode: from a beginning of the text to the token ids of the whole prompt around it.
        text: what may be cut at its end.
        count: tokens wanted, those around the text included.

    Returns:
        `count` token ids, or None when the text is too short or no cut fits.
    """
    around = len(encode(""))
    cut = min(len(text), 4 * (count - around))
    tried: set[int] = set()
    for _ in range(64):
        tokens = encode(text[:cut])
        missing = count - len(tokens)
        if missing == 0:
            return tokens
        if missing > 0 and cut == len(text):
            return None
        tried.add(cut)
        per_token = max(1, cut // max(1, len(tokens) - around))
        cut += missing * per_token if abs(missing) > 8 else missing
        cut = min(max(cut, 0), len(text))
        while cut in tried and cut > 0:
            cut -= 1
    return None
