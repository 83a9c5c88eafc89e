"""Exact match of texts, after the normalisation that was asked for."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from millrace.core.records import Prompt
from millrace.scoring.verifiers.answers import answer_in, check_switch, check_text, judge_each


@dataclass(frozen=True, kw_only=True, slots=True)
class Exact:
    """1 if the answer is the column's text, or one of its texts if it is a list; otherwise 0."""

    __name__ = "exact"

    column: str = "answer"
    after: str | None = None
    """Compare only what follows the last such text, as in "####"; without it the score is 0."""
    ignore_case: bool = False
    ignore_space: bool = True
    """Any run of white space is one blank, and none at the ends."""
    ignore_punctuation: bool = False

    def __post_init__(self) -> None:
        check_text("column", self.column)
        if self.after is not None:
            check_text("after", self.after)
        for name in ("ignore_case", "ignore_space", "ignore_punctuation"):
            check_switch(name, getattr(self, name))

    @property
    def needed_columns(self) -> tuple[str, ...]:
        return (self.column,)

    def __call__(self, completions: Sequence[Prompt], **columns: Any) -> list[float | None]:
        return judge_each(self._judge, completions, columns[self.column])

    def _judge(self, text: str, reference: Any) -> float:
        right = reference if isinstance(reference, list) else [reference]
        for one in right:
            if isinstance(one, bool) or not isinstance(one, str | int):
                raise ValueError(f"column {self.column!r} holds {one!r}, which is not a text")
        answer = answer_in(text, after=self.after)
        if answer is None:
            return 0.0
        return float(self._normal(answer) in [self._normal(str(one)) for one in right])

    def _normal(self, text: str) -> str:
        text = unicodedata.normalize("NFKC", text)  # also makes one character of é and e + ´
        if self.ignore_case:
            text = text.casefold()
        if self.ignore_punctuation:
            text = "".join(c for c in text if not unicodedata.category(c).startswith("P"))
        return " ".join(text.split()) if self.ignore_space else text
