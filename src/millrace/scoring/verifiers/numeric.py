"""The last number of a completion, compared with the right one.

Promise: numbers are compared exactly, as fractions, and nothing a completion writes takes long: a
number of more than MAX_DIGITS digits is none.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from millrace.core.records import Prompt
from millrace.scoring.verifiers.answers import answer_in, check_number, check_text, judge_each

MAX_DIGITS = 300
_BODY = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"""
    (?<![\w.])                                     # not within a word or another number
    (?P<sign>(?<![\w)\]])[-+\u2212])?              # 5-3 is no -3
    \$?
    (?P<body>{_BODY})
    (?:[eE](?P<exponent>[-+]?\d+)
      |\s*(?:[x\u00d7*]|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*\{{?(?P<power>[-+\u2212]?\d+)\}}?
    )?
    (?:\s*/\s*(?P<under>{_BODY}))?
    """,
    re.VERBOSE | re.ASCII,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Numeric:
    """1 if the last number is the column's, within the tolerance; otherwise 0.

    Understands 1,234.5, -3/4, 6.02e23, 6.02 × 10^23 and $5; not units, percent or mixed fractions.
    """

    __name__ = "numeric"

    column: str = "answer"
    after: str | None = None
    """Look only behind the last such text, as in "####"; without it the score is 0."""
    tolerance: float = 0.0
    """How far off it may be."""
    relative_tolerance: float = 0.0
    """How far off it may be as a share of the right number; the larger of the two counts."""

    def __post_init__(self) -> None:
        check_text("column", self.column)
        if self.after is not None:
            check_text("after", self.after)
        for name in ("tolerance", "relative_tolerance"):
            check_number(name, getattr(self, name))
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)!r} must be at least 0")

    @property
    def needed_columns(self) -> tuple[str, ...]:
        return (self.column,)

    def __call__(self, completions: Sequence[Prompt], **columns: Any) -> list[float | None]:
        return judge_each(self._judge, completions, columns[self.column])

    def _judge(self, text: str, reference: Any) -> float:
        right = None if isinstance(reference, bool) else last_number(str(reference))
        if right is None:
            raise ValueError(f"column {self.column!r} holds {reference!r}, which is not a number")
        answer = answer_in(text, after=self.after)
        number = None if answer is None else last_number(answer)
        if number is None:
            return 0.0
        allowed = max(
            Fraction(self.tolerance), Fraction(self.relative_tolerance) * abs(right), Fraction(0)
        )
        return float(abs(number - right) <= allowed)


def last_number(text: str) -> Fraction | None:
    """None if there is none, or the last one is too long to be meant, or divides by 0."""
    found = None
    for found in _NUMBER.finditer(text):  # noqa: B007 - only the last one matters
        pass
    if found is None:
        return None
    exponent = (found["exponent"] or found["power"] or "0").replace("\u2212", "-")
    lengths = (len(found["body"]), len(found["under"] or ""), len(exponent))
    if max(lengths) > MAX_DIGITS or abs(int(exponent)) > MAX_DIGITS:
        return None
    value = _plain(found["body"]) * Fraction(10) ** int(exponent)
    if found["under"]:
        under = _plain(found["under"])
        if under == 0:
            return None
        value /= under
    return -value if found["sign"] in ("-", "\u2212") else value


def _plain(body: str) -> Fraction:
    return Fraction(body.replace(",", ""))
