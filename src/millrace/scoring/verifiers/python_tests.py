"""Generated Python, judged by running it: against test code, or against inputs and outputs.

Promise: the code runs in the sandbox alone (scoring/sandbox). A call starts at most `parallel`
judges at a time and takes at most time_limit_s for each round of them.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from millrace.core.errors import ConfigError
from millrace.core.records import Prompt
from millrace.scoring.sandbox.calls import SandboxLimits, run_programs, run_tests
from millrace.scoring.sandbox.lockdown import unsupported
from millrace.scoring.verifiers.answers import check_positive, check_text, last_block, text_of


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonTests:
    """The share of tests that the code passes, or 1 only for all of them.

    The column holds test code, a list of such (each one test), or a list of pairs of standard input
    and expected output: ["3", "9"] or {input = "3", output = "9"}. The code is the completion's
    last ```python block, or all of it.
    """

    __name__ = "python_tests"

    column: str = "tests"
    score: Literal["all", "share"] = "all"
    time_limit_s: float = 5.0
    """For all tests of one completion together."""
    memory_limit_bytes: int = 2**29
    output_limit_bytes: int = 2**20
    parallel: int = 4
    """Completions that one scorer process runs at a time."""

    def __post_init__(self) -> None:
        if (reason := unsupported()) is not None:
            raise ConfigError(f"The verifier 'python_tests' cannot run code safely here: {reason}.")
        check_text("column", self.column)
        if self.score not in ("all", "share"):
            raise ValueError(f"score = {self.score!r} must be 'all' or 'share'")
        check_positive("time_limit_s", self.time_limit_s)
        for name in ("memory_limit_bytes", "output_limit_bytes", "parallel"):
            check_positive(name, getattr(self, name), whole=True)

    @property
    def needed_columns(self) -> tuple[str, ...]:
        return (self.column,)

    def __call__(self, completions: Sequence[Prompt], **columns: Any) -> list[float | None]:
        with ThreadPoolExecutor(self.parallel, thread_name_prefix="judge") as pool:
            return list(pool.map(self._judge, completions, columns[self.column]))

    def _judge(self, completion: Prompt, tests: Any) -> float | None:
        if tests is None:
            return None
        text = text_of(completion)
        block = last_block(text, tags=("python", "py", "python3"))
        passed = self._run(text if block is None else block, tests)
        return sum(passed) / len(passed) if self.score == "share" else float(all(passed))

    def _run(self, code: str, tests: Any) -> list[bool]:
        """Which tests pass."""
        limits = SandboxLimits(
            time_s=self.time_limit_s,
            memory_bytes=self.memory_limit_bytes,
            output_bytes=self.output_limit_bytes,
        )
        given = [tests] if isinstance(tests, str) else tests
        if isinstance(given, list) and given and all(isinstance(test, str) for test in given):
            return run_tests(code, given, limits=limits)
        pairs = self._pairs(given)
        ran = run_programs(code, [stdin for stdin, _ in pairs], limits=limits)
        return [
            one.ok and _lines(one.output) == _lines(right)
            for one, (_, right) in zip(ran, pairs, strict=True)
        ]

    def _pairs(self, tests: Any) -> list[tuple[str, str]]:
        pairs: list[tuple[str, str]] = []
        for test in tests if isinstance(tests, list) else [tests]:
            match test:
                case [str(stdin), str(stdout)] | {"input": str(stdin), "output": str(stdout)}:
                    pairs.append((stdin, stdout))
                case _:
                    raise ValueError(
                        f"column {self.column!r} holds {test!r}, which is neither test code nor a"
                        " pair of input and output"
                    )
        if not pairs:
            raise ValueError(f"column {self.column!r} holds no test")
        return pairs


def _lines(output: str) -> list[str]:
    """Blanks at the ends of lines, and empty lines at the end, do not count."""
    return [line.rstrip() for line in output.rstrip().splitlines()]
