"""What verifiers share, and the verifiers of answers: exact, regex, numeric, math and json_schema.

Promise: "numeric" compares exactly, as fractions, and in bounded time: more than MAX_DIGITS digits
are not a number. "math" leaves parsing and comparing to math-verify. An expression that takes too
long is interrupted and scores 0. If it cannot be interrupted, the scorer's timeout_s stops it, and
its group fails.
"""

import importlib.util
import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from millrace.config.section import NonEmptyStr, NonNegativeFloat, PositiveInt
from millrace.core.errors import ConfigError
from millrace.core.plugins import check_exactly_one, plugin
from millrace.core.records import Prompt

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(?P<tag>[\w+-]*)[^\n]*\n(?P<body>.*?)^[ \t]*```", re.S | re.M)
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
    """Marker, as in "####": only the text after its last occurrence counts. Without it: 0."""
    ignore_case: bool = False
    ignore_space: bool = True  # collapse white space to single blanks, and strip it at both ends
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

    pattern: NonEmptyStr  # Python syntax; flags go inline, as in "(?s)"
    match: Literal["full", "search"] = "full"  # the whole completion, or any part of it
    scores: dict[str, float] = field(default_factory=dict)  # by named group that matched

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


@plugin
class Numeric(ColumnVerifier):
    """1 if the last number equals the column's, within the tolerance; otherwise 0. Reads 1,234.5,
    -3/4, 6.02e23, 6.02 × 10^23 and $5, but not units, percent or mixed fractions."""

    __name__ = "numeric"

    column: NonEmptyStr = "answer"
    after: NonEmptyStr | None = None
    """Marker, as in "####": only the text after its last occurrence counts. Without it: 0."""
    tolerance: NonNegativeFloat = 0.0  # largest accepted absolute difference
    relative_tolerance: NonNegativeFloat = 0.0  # share of the reference; the larger one applies

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
    time_limit_s: PositiveInt = 3  # for parsing an answer, and again for comparing it

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


@plugin
class JsonSchema:
    """1 if the completion parses and validates against the schema, otherwise 0. The schema is read
    once, when the verifier is created. References to other documents are not followed, so nothing
    is fetched."""

    __name__ = "json_schema"

    schema: dict[str, Any] | None = None  # set either this or `path`
    path: NonEmptyStr | None = None  # JSON file with the schema
    extract: bool = True  # check the last ```json block, if any, instead of the whole completion

    def __post_init__(self) -> None:
        require_package("jsonschema", verifier="json_schema")
        check_exactly_one("json_schema needs one schema", schema=self.schema, path=self.path)
        if self.path is not None:
            object.__setattr__(self, "schema", _read(Path(self.path)))
            object.__setattr__(self, "path", None)  # workers get the schema, not the path
        from jsonschema import SchemaError

        try:
            _validator(self.schema)
        except SchemaError as error:
            raise ValueError(f"the schema is not valid: {error.message}") from None

    def __call__(self, completions: Sequence[Prompt], **columns: Any) -> list[float]:
        validator = _validator(self.schema)
        return [self._score(text_of(completion), validator) for completion in completions]

    def _score(self, text: str, validator: Any) -> float:
        block = last_block(text, tags=("json",)) if self.extract else None
        try:
            value = json.loads(text if block is None else block, parse_constant=_refuse)
            return float(validator.is_valid(value))
        except (ValueError, OverflowError, RecursionError):
            return 0.0  # not JSON, a number beyond floats, or nested too deeply


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"path = {str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"path = {str(path)!r} is not JSON: {error}") from None


def _validator(schema: Any) -> Any:
    from jsonschema.validators import validator_for
    from referencing import Registry

    kind = validator_for(schema)
    kind.check_schema(schema)
    return kind(schema, registry=Registry())


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
