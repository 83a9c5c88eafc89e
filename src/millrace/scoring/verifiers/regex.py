"""Whether a completion has the right form, by a regular expression.

A pattern that backtracks without end is the scorer's timeout_s to stop: it costs the group at hand.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from millrace.core.records import Prompt
from millrace.scoring.verifiers.answers import check_number, check_text, text_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Regex:
    """1 if the pattern matches, otherwise 0; or the sum of what its named groups are worth."""

    __name__ = "regex"

    pattern: str
    """Python's syntax; flags go inline, as in "(?s)"."""
    match: Literal["full", "search"] = "full"
    """Whether the whole completion must match, or any part of it."""
    scores: dict[str, float] = field(default_factory=dict)
    """By named group: what it adds to the score if it took part in the match. 0 for no match."""

    def __post_init__(self) -> None:
        check_text("pattern", self.pattern)
        if self.match not in ("full", "search"):
            raise ValueError(f"match = {self.match!r} must be 'full' or 'search'")
        try:
            names = re.compile(self.pattern).groupindex
        except re.error as error:
            raise ValueError(
                f"pattern = {self.pattern!r} is no regular expression: {error}"
            ) from None
        for name, score in self.scores.items():
            check_number(f"scores.{name}", score)
            if name not in names:
                raise ValueError(f"scores.{name} names no group of the pattern {self.pattern!r}")

    @property
    def needed_columns(self) -> tuple[str, ...]:
        return ()

    def __call__(self, completions: Sequence[Prompt], **columns: Any) -> list[float]:
        pattern = re.compile(self.pattern)
        find = pattern.fullmatch if self.match == "full" else pattern.search
        return [self._worth(find(text_of(completion))) for completion in completions]

    def _worth(self, found: re.Match[str] | None) -> float:
        if found is None:
            return 0.0
        if not self.scores:
            return 1.0
        return float(sum(worth for name, worth in self.scores.items() if found[name] is not None))
