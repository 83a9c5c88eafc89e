"""Chat templates: messages to text, and that text to tokens. Torch-free.

Promise: only the template writes control tokens. Where a message, a tool result or a tool schema
contains the text of one (`<|im_end|>`), that text is tokenised as ordinary characters. All other
text is tokenised as the tokenizer alone does it, in one piece.

Control tokens are those that the tokenizer calls special. text() replaces their text in messages by
a placeholder, which the template carries along. encode() puts the text back, and encodes that
stretch, up to the next control tokens of the template, without looking for special tokens.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

from millrace.core.records import Message

# No message can contain it. Digits, because templates may change the case of letters, or escape.
_SECRET = f"{secrets.randbelow(10**24):024d}"
_PLACEHOLDER = re.compile(_SECRET + r"(\d{6})")
_COMPARED = ("role", "type")  # by templates, so that no placeholder may precede them


class ChatTemplate:
    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: any Hugging Face tokenizer."""
        self._tokenizer = tokenizer

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: they never result from encoding plain text."""
        added = self._tokenizer.added_tokens_decoder.items()
        return frozenset([*self._tokenizer.all_special_ids, *(i for i, t in added if t.special)])

    @cached_property
    def _special_texts(self) -> list[str]:
        """The longest first, as tokenizers match them; "" is the last."""
        added = self._tokenizer.added_tokens_decoder.values()
        texts = {*self._tokenizer.all_special_tokens, *(t.content for t in added if t.special)}
        return sorted({*map(str, texts), ""}, key=len, reverse=True)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        texts = self._special_texts[:-1]
        return re.compile("|".join(map(re.escape, texts)) if texts else "(?!)")  # matches nothing

    def has_controls(self, text: str) -> bool:
        return self._special.search(text) is not None

    def strip_controls(self, text: str) -> str:
        while self.has_controls(text):  # what is left may form another one
            text = self._special.sub("", text)
        return text

    def text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),  # schemas
        add_generation_prompt: bool = True,
        **settings: Any,
    ) -> str:
        """Render messages to a text for encode(). Raises whatever the template raises."""
        return self._tokenizer.apply_chat_template(
            self._without_controls([*messages]),
            tools=self._without_controls([*map(dict, tools)]) or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **settings,
        )

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encode a text, which by default contains all its control tokens."""
        if _SECRET not in text:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = []
        ordinary = ""  # text without placeholders, not encoded yet
        start = 0
        for found in [*self._special.finditer(text), None]:
            stretch = text[start : found.start() if found else None]  # between control tokens
            if _SECRET in stretch:
                ids += self._tokenizer.encode(ordinary, add_special_tokens=False)
                ids += self._tokenizer.encode(
                    _PLACEHOLDER.sub(lambda hit: self._special_texts[int(hit[1])], stretch),
                    add_special_tokens=False,
                    split_special_tokens=True,
                )
                ordinary = ""
            else:
                ordinary += stretch
            if found:
                ordinary, start = ordinary + found[0], found.end()
        return ids + self._tokenizer.encode(ordinary, add_special_tokens=False)

    def _without_controls(self, rows: list[Any]) -> list[Any]:
        """The messages or schemas, or copies with placeholders for the texts of control tokens."""
        if not (self.has_controls(_texts(rows)) or self.has_controls(_texts(rows, but=_COMPARED))):
            return rows
        number = self._special_texts.index

        def without_controls(text: str) -> str:
            return self._special.sub(lambda hit: f"{_SECRET}{number(hit[0]):06d}", text)

        changed = _with_texts(rows, without_controls)
        if self.has_controls(_texts(changed, but=_COMPARED)):
            # A template may join several texts, which only then form a control token.
            nothing = f"{_SECRET}{len(self._special_texts) - 1:06d}"
            changed = _with_texts(changed, lambda text: nothing + text, but=_COMPARED)
        return changed


def _texts(value: Any, *, but: Sequence[str] = ()) -> str:
    """All texts in messages end to end, with keys that are no names."""
    found: list[str] = []

    def collect(text: str) -> str:
        found.append(text)
        return text

    _with_texts(value, collect, but=but)
    return "".join(found)


def _with_texts(value: Any, change: Callable[[str], str], *, but: Sequence[str] = ()) -> Any:
    """A copy with changed texts, except those of the keys `but`. Keys that are names stay, because
    templates read them."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            key if str(key).isidentifier() else change(str(key)): (
                each if key in but and isinstance(each, str) else _with_texts(each, change, but=but)
            )
            for key, each in cast("Mapping[Any, Any]", value).items()
        }
    if isinstance(value, list | tuple):
        return [_with_texts(each, change, but=but) for each in cast("Sequence[Any]", value)]
    return value
