"""The verifiers "numeric" and "math": compare numbers and mathematical expressions.

Promise: "numeric" compares exactly, as fractions, and in bounded time: more than MAX_DIGITS digits
are not a number. "math" leaves parsing and comparing to math-verify. An expression that takes too
long is interrupted and scores 0. If it cannot be interrupted, the scorer's timeout_s stops it, and
its group fails.
"""

import re
from fractions import Fraction
from typing import Any

from millrace.config.section import NonEmptyStr, NonNegativeFloat, PositiveInt
from millrace.core.plugins import plugin
from millrace.scoring.verifiers.answers import ColumnVerifier, answer_in, require_package

MAX_DIGITS = 300
_BODY = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"""
    (?<![\w.])                                     # not inside a word or another number
    (?P<sign>(?<![\w)\]])[-+\u2212])?              # the minus in 5-3 is not a sign
    \$?
    (?P<body>{_BODY})
    (?:[eE](?P<exponent>[-+]?\d+)
      |\s*(?:[x\u00d7*]|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*\{{?(?P<power>[-+\u2212]?\d+)\}}?
    )?
    (?:\s*/\s*(?P<under>{_BODY}))?
    """,
    re.VERBOSE | re.ASCII,
)


@plugin
class Numeric(ColumnVerifier):
    """1 if the last number equals the column's, within the tolerance; otherwise 0. Reads 1,234.5,
    -3/4, 6.02e23, 6.02 × 10^23 and $5, but not units, percent or mixed fractions."""

    __name__ = "numeric"

    column: NonEmptyStr = "answer"
    after: NonEmptyStr | None = None
    """Marker, as in "####". Only the text after its last occurrence is read. The score is 0 if it
    is missing."""
    tolerance: NonNegativeFloat = 0.0
    """Largest accepted absolute difference."""
    relative_tolerance: NonNegativeFloat = 0.0
    """Largest accepted difference as a share of the reference. The larger tolerance applies."""

    def _score(self, text: str, reference: Any) -> float:
        expected = None if isinstance(reference, bool) else last_number(str(reference))
        if expected is None:
            raise ValueError(f"column {self.column!r} holds {reference!r}, which is not a number")
        answer = answer_in(text, after=self.after)
        number = None if answer is None else last_number(answer)
        if number is None:
            return 0.0
        relative = Fraction(self.relative_tolerance) * abs(expected)
        return float(abs(number - expected) <= max(Fraction(self.tolerance), relative))


def last_number(text: str) -> Fraction | None:
    """Return the last number; None if there is none, or if it is too long or divides by 0."""
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


@plugin
class Math(ColumnVerifier):
    """1 if the answer (\\boxed{}, LaTeX or plain) is equivalent to the column's; otherwise 0."""

    __name__ = "math"

    column: NonEmptyStr = "answer"
    time_limit_s: PositiveInt = 3
    """Time limit for parsing an answer, and again for comparing it, in whole seconds."""

    def __post_init__(self) -> None:
        require_package("math_verify", verifier="math")

    def _score(self, text: str, reference: Any) -> float:
        """Runs in the main thread, because the time limit is an alarm signal."""
        from math_verify import parse, verify

        expression = str(reference)
        if "$" not in expression and "\\boxed" not in expression:
            expression = f"${expression}$"
        expected = parse(expression, parsing_timeout=self.time_limit_s)
        if isinstance(reference, bool) or not expected:
            raise ValueError(
                f"column {self.column!r} holds {reference!r}, which is not an expression"
            )
        answer = parse(text, parsing_timeout=self.time_limit_s)
        return float(verify(expected, answer, timeout_seconds=self.time_limit_s))
