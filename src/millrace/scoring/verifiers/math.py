"""Mathematical answers, compared by what they mean: \\frac{1}{2} is 0.5.

Parsing and comparing are math-verify's. An expression that takes too long is interrupted and scores
0; one that cannot even be interrupted is the scorer's timeout_s to stop, and costs its group.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from millrace.core.errors import ConfigError
from millrace.core.records import Prompt
from millrace.scoring.verifiers.answers import check_positive, check_text, judge_each


@dataclass(frozen=True, kw_only=True, slots=True)
class Math:
    """1 if the answer, in \\boxed{}, in LaTeX or plain, equals the column's; otherwise 0."""

    __name__ = "math"

    column: str = "answer"
    time_limit_s: int = 3
    """To parse an answer, and again to compare it."""

    def __post_init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "The verifier 'math' needs math-verify, which is not installed; install"
                " millrace[verifiers]."
            )
        check_text("column", self.column)
        check_positive("time_limit_s", self.time_limit_s, whole=True)

    @property
    def needed_columns(self) -> tuple[str, ...]:
        return (self.column,)

    def __call__(self, completions: Sequence[Prompt], **columns: Any) -> list[float | None]:
        """In the main thread: the time limit is an alarm signal."""
        return judge_each(self._judge, completions, columns[self.column])

    def _judge(self, text: str, reference: Any) -> float:
        from math_verify import parse, verify

        right = str(reference)
        if "$" not in right and "\\boxed" not in right:
            right = f"${right}$"
        expected = parse(right, parsing_timeout=self.time_limit_s)
        if isinstance(reference, bool) or not expected:
            raise ValueError(f"column {self.column!r} holds {reference!r}, which is no expression")
        answer = parse(text, parsing_timeout=self.time_limit_s)
        return float(verify(expected, answer, timeout_seconds=self.time_limit_s))
