"""What verifiers share, and the verifiers "exact" and "regex", which compare and match text."""

import importlib.util
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import field
from typing import Any, Literal

from millrace.config.section import NonEmptyStr
from millrace.core.errors import ConfigError
from millrace.core.plugins import plugin
from millrace.core.records import Prompt

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(?P<tag>[\w+-]*)[^\n]*\n(?P<body>.*?)^[ \t]*```", re.S | re.M)


def require_package(module: str, *, verifier: str) -> None:
    if importlib.util.find_spec(module) is None:
        package = module.replace("_", "-")
        raise ConfigError(
            f"The verifier {verifier!r} needs {package}, which is not installed; install"
            " millrace[verifiers]."
        )


class ColumnVerifier:
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


@plugin
class Exact(ColumnVerifier):
    """1 if the answer equals the column's text, or one of its list of texts; otherwise 0."""

    __name__ = "exact"

    column: NonEmptyStr = "answer"
    after: NonEmptyStr | None = None
    """Marker, as in "####". Only the text after its last occurrence is compared. The score is 0 if
    it is missing."""
    ignore_case: bool = False
    ignore_space: bool = True
    """Collapse white space to single blanks, and strip it at both ends."""
    ignore_punctuation: bool = False

    def _score(self, text: str, reference: Any) -> float:
        accepted = reference if isinstance(reference, list) else [reference]
        for one in accepted:
            if isinstance(one, bool) or not isinstance(one, str | int):
                raise ValueError(f"column {self.column!r} holds {one!r}, which is not a text")
        answer = answer_in(text, after=self.after)
        if answer is None:
            return 0.0
        return float(self._normalized(answer) in [self._normalized(str(one)) for one in accepted])

    def _normalized(self, text: str) -> str:
        text = unicodedata.normalize("NFKC", text)  # also composes e + ´ to é
        if self.ignore_case:
            text = text.casefold()
        if self.ignore_punctuation:
            text = "".join(c for c in text if not unicodedata.category(c).startswith("P"))
        return " ".join(text.split()) if self.ignore_space else text


@plugin
class Regex:
    """1 if the pattern matches, otherwise 0; or the sum of the scores of its named groups. A
    pattern that backtracks without end is stopped by the scorer's timeout_s and fails its group."""

    __name__ = "regex"

    pattern: NonEmptyStr
    """Python syntax. Flags go inline, as in "(?s)"."""
    match: Literal["full", "search"] = "full"
    """Match the whole completion ("full") or any part of it ("search")."""
    scores: dict[str, float] = field(default_factory=dict)
    """Score by named group, added if the group took part in the match. No match scores 0."""

    def __post_init__(self) -> None:
        try:
            groups = re.compile(self.pattern).groupindex
        except re.error as error:
            raise ValueError(
                f"pattern = {self.pattern!r} is not a regular expression: {error}"
            ) from None
        for name in self.scores:
            if name not in groups:
                raise ValueError(f"scores.{name} is not a group of the pattern {self.pattern!r}")

    def __call__(self, completions: Sequence[Prompt], **columns: Any) -> list[float]:
        pattern = re.compile(self.pattern)
        find = pattern.fullmatch if self.match == "full" else pattern.search
        return [self._score(find(text_of(completion))) for completion in completions]

    def _score(self, found: re.Match[str] | None) -> float:
        if found is None:
            return 0.0
        if not self.scores:
            return 1.0
        return float(sum(score for name, score in self.scores.items() if found[name] is not None))
