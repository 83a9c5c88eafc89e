"""What verifiers have in common: the text of a completion, the answer in it, and its settings.

Fenced blocks of Markdown, in which models like to wrap code and JSON.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from millrace.core.records import Prompt


def judge_each(
    judge: Callable[[str, Any], float], completions: Sequence[Prompt], references: Sequence[Any]
) -> list[float | None]:
    """None where there is nothing to compare with."""
    return [
        None if reference is None else judge(text_of(completion), reference)
        for completion, reference in zip(completions, references, strict=True)
    ]


def text_of(completion: Prompt) -> str:
    """Of a chat, what was said last."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def answer_in(text: str, *, after: str | None) -> str | None:
    """What follows the last `after`; None if it is missing."""
    if after is None:
        return text
    _, found, answer = text.rpartition(after)
    return answer if found else None


def check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} = {value!r} must be a text that is not empty")


def check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r} must be true or false")


def check_positive(name: str, value: Any, *, whole: bool = False) -> None:
    check_number(name, value)
    if value <= 0 or (whole and not isinstance(value, int)):
        raise ValueError(f"{name} = {value!r} must be {'an integer ' if whole else ''}above 0")


def check_number(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise ValueError(f"{name} = {value!r} must be a finite number")


_BLOCK = re.compile(r"^[ \t]*```[ \t]*(?P<tag>[\w+-]*)[^\n]*\n(?P<body>.*?)^[ \t]*```", re.S | re.M)


def last_block(text: str, *, tags: tuple[str, ...]) -> str | None:
    """The last block with one of these tags, or else the last without any; None if there is
    none."""
    blocks = [(found["tag"].lower(), found["body"]) for found in _BLOCK.finditer(text)]
    tagged = [body for tag, body in blocks if tag in tags]
    untagged = [body for tag, body in blocks if not tag]
    return tagged[-1] if tagged else untagged[-1] if untagged else None
