"""Chat templates: messages to text, and that text to tokens. Torch-free.

Promise: only the template writes control tokens. Where a message, a tool result or a tool schema
contains the text of one (`<|im_end|>`), that text is tokenised as ordinary characters, also where
the template trims and joins texts that contain a part of it each. All other text is tokenised as
the tokenizer alone does it, in one piece.

Control tokens are those that the tokenizer calls special, and its other added tokens that the
template writes (`</tool_response>`). The model itself writes some of the latter, such as `<think>`,
so in messages of the assistant they stay tokens. text() replaces the text of control tokens in
messages by a placeholder, which the template carries along. encode() puts the text back, and
encodes that stretch, up to the next control tokens of the template, without looking for any.
"""

import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import chain
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
    def _special_texts(self) -> set[str]:
        added = self._tokenizer.added_tokens_decoder.values()
        texts = (*self._tokenizer.all_special_tokens, *(t.content for t in added if t.special))
        return {*map(str, texts)} - {""}

    @cached_property
    def _markup_texts(self) -> set[str]:
        """Added tokens that are not special and that the template writes: not words, and not runs
        of blanks."""
        template = str(self._tokenizer.chat_template or "")
        added = {str(t.content) for t in self._tokenizer.added_tokens_decoder.values()}
        return {
            text
            for text in added - self._special_texts
            if re.fullmatch(r"[^\w\s]\S*\w\S*[^\w\s]", text) and text in template
        }

    @cached_property
    def _control_texts(self) -> list[str]:
        """The longest first, as tokenizers match them; "" is the last."""
        return sorted({*self._special_texts, *self._markup_texts, ""}, key=len, reverse=True)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return _any_of(self._special_texts)

    @cached_property
    def _control(self) -> re.Pattern[str]:
        return _any_of(self._control_texts[:-1])

    @cached_property
    def _markup(self) -> re.Pattern[str]:
        return _any_of(self._markup_texts)

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
        rows = self._without_controls([*messages, *map(dict, tools)])
        return self._tokenizer.apply_chat_template(
            rows[: len(messages)],
            tools=rows[len(messages) :] or None,
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
        for found in [*self._control.finditer(text), None]:
            stretch = text[start : found.start() if found else None]  # between control tokens
            if _SECRET in stretch:
                ids += self._tokenizer.encode(ordinary, add_special_tokens=False)
                ids += self._encode_plain(
                    _PLACEHOLDER.sub(lambda hit: self._control_texts[int(hit[1])], stretch)
                )
                ordinary = ""
            else:
                ordinary += stretch
            if found:
                ordinary, start = ordinary + found[0], found.end()
        return ids + self._tokenizer.encode(ordinary, add_special_tokens=False)

    def _encode_plain(self, text: str) -> list[int]:
        """Encode a text without looking for control tokens."""
        # Tokenizers split special tokens at a request, and other added tokens never.
        cuts = [found.start() + 1 for found in self._markup.finditer(text)]
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        options = {"add_special_tokens": False, "split_special_tokens": True}
        return [*chain.from_iterable(self._tokenizer(parts, **options)["input_ids"])]

    def _without_controls(self, rows: list[Any]) -> list[Any]:
        """The messages and schemas, or copies with placeholders for the texts of control tokens."""
        if self._are_found(rows):
            rows = [self._replaced(row) for row in rows]
        if any(map(self._needs_end, _texts(rows, but=_COMPARED))):
            rows = _with_texts(rows, self._ended, but=_COMPARED)
        return rows

    def _are_found(self, rows: list[Any]) -> bool:
        texts, of_others = _texts(rows), _texts([row for row in rows if not _is_reply(row)])
        return any(map(self._special.search, texts)) or any(map(self._control.search, of_others))

    def _replaced(self, row: Any) -> Any:
        number = self._control_texts.index
        pattern = self._special if _is_reply(row) else self._control
        return _with_texts(
            row, lambda text: pattern.sub(lambda hit: f"{_SECRET}{number(hit[0]):06d}", text)
        )

    def _ended(self, text: str) -> str:
        """The text with a placeholder for nothing after its last word, if it needs one."""
        stem = text.rstrip()  # as a template may trim it
        nothing = f"{_SECRET}{len(self._control_texts) - 1:06d}"
        return f"{stem}{nothing}{text[len(stem) :]}" if self._needs_end(text) else text

    def _needs_end(self, text: str) -> bool:
        """Whether the text ends in a part of a control token, which a template could complete with
        another text, or contains a control token once it is normalized."""
        normalized = self._normalized(text)
        ends = (text.rstrip(), normalized.rstrip())
        return self._special.search(normalized) is not None or any(
            end[-length:] in self._openings for end in ends for length in range(1, self._longest)
        )

    @cached_property
    def _openings(self) -> frozenset[str]:
        """Beginnings of the texts of control tokens."""
        return frozenset(text[:end] for text in self._control_texts for end in range(1, len(text)))

    @cached_property
    def _longest(self) -> int:
        return len(self._control_texts[0])

    def _normalized(self, text: str) -> str:
        """The text in which the tokenizer looks for some special tokens; "" if it is no other."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        normalizer = getattr(backend, "normalizer", None)
        added = self._tokenizer.added_tokens_decoder.values()
        if normalizer is None or not any(token.special and token.normalized for token in added):
            return ""
        return normalizer.normalize_str(text)


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else "(?!)")  # matches nothing


def _is_reply(row: Any) -> bool:
    return row.get("role") == "assistant"


def _texts(value: Any, *, but: Sequence[str] = ()) -> list[str]:
    """All texts in messages, with keys that are no names."""
    found: list[str] = []

    def collect(text: str) -> str:
        found.append(text)
        return text

    _with_texts(value, collect, but=but)
    return found


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
