"""Finds the answer in a completion: its text, the part after a marker, or its last fenced block."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from millrace.core.records import Prompt

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(?P<tag>[\w+-]*)[^\n]*\n(?P<body>.*?)^[ \t]*```", re.S | re.M)


def score_each(
    score: Callable[[str, Any], float], completions: Sequence[Prompt], references: Sequence[Any]
) -> list[float | None]:
    """Score each completion against its reference; None where there is no reference."""
    return [
        None if reference is None else score(text_of(completion), reference)
        for completion, reference in zip(completions, references, strict=True)
    ]


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
    """Return the last fenced Markdown block with one of these tags, or else the last one without a
    tag, or None."""
    blocks = [(found["tag"].lower(), found["body"]) for found in _BLOCK.finditer(text)]
    tagged = [body for tag, body in blocks if tag in tags]
    untagged = [body for tag, body in blocks if not tag]
    return tagged[-1] if tagged else untagged[-1] if untagged else None
