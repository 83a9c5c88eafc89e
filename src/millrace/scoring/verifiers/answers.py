"""What verifiers share: comparing with a column, and finding the answer in a completion."""

import re
from collections.abc import Sequence
from typing import Any

from millrace.core.records import Prompt

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(?P<tag>[\w+-]*)[^\n]*\n(?P<body>.*?)^[ \t]*```", re.S | re.M)


class ColumnVerifier:
    """A verifier that compares each completion with a column of its task."""

    __slots__ = ()

    column: str

    @property
    def needed_columns(self) -> tuple[str, ...]:
        return (self.column,)

    def __call__(self, completions: Sequence[Prompt], **columns: Any) -> list[float | None]:
        return list(map(self._score_or_none, completions, columns[self.column]))

    def _score_or_none(self, completion: Prompt, reference: Any) -> float | None:
        return None if reference is None else self._score(text_of(completion), reference)

    def _score(self, text: str, reference: Any) -> float:
        raise NotImplementedError


def text_of(completion: Prompt) -> str:
    """The text of a completion; for a chat, that of its last message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def answer_in(text: str, *, after: str | None) -> str | None:
    """Return the text after the last `after`, or None if that does not occur."""
    if after is None:
        return text
    _, found, answer = text.rpartition(after)
    return answer if found else None


def last_block(text: str, *, tags: tuple[str, ...]) -> str | None:
    """Return the last fenced block with one of these tags, or else the last one without a tag."""
    blocks = [(found["tag"].lower(), found["body"]) for found in _BLOCK.finditer(text)]
    tagged = [body for tag, body in blocks if tag in tags]
    untagged = [body for tag, body in blocks if not tag]
    return tagged[-1] if tagged else untagged[-1] if untagged else None
