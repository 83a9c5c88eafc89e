"""The verifier "python_tests": runs generated Python against test code, or inputs and outputs.

Promise: the code runs only in the sandbox (scoring/sandbox). A call runs at most `parallel`
sandboxes at a time and takes at most time_limit_s for each of these rounds.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from millrace.config.section import NonEmptyStr, PositiveFloat, PositiveInt
from millrace.core.errors import ConfigError
from millrace.core.plugins import plugin
from millrace.core.records import Prompt
from millrace.scoring.sandbox.calls import SandboxLimits, run_programs, run_tests
from millrace.scoring.sandbox.lockdown import unsupported
from millrace.scoring.verifiers.answers import ColumnVerifier, last_block
from millrace.scoring.verifiers.never_run import why_unusable


@plugin
class PythonTests(ColumnVerifier):
    """The share of tests that the code passes, or 1 if it passes all and otherwise 0. The column
    holds test code, a list of test codes (each is one test), or a list of pairs of standard input
    and expected output: ["3", "9"] or {input = "3", output = "9"}. The code is the completion's
    last ```python block, or the whole completion."""

    __name__ = "python_tests"

    column: NonEmptyStr = "tests"
    score: Literal["all", "share"] = "all"
    time_limit_s: PositiveFloat = 5.0  # time limit for all tests of one completion together
    memory_limit_bytes: PositiveInt = 2**29
    output_limit_bytes: PositiveInt = 2**20
    parallel: PositiveInt = 4  # number of completions that one scorer process runs at a time

    def __post_init__(self) -> None:
        if (reason := unsupported()) is not None:
            raise ConfigError(f"The verifier 'python_tests' cannot run code safely here: {reason}.")

    def __call__(self, completions: Sequence[Prompt], **columns: Any) -> list[float | None]:
        with ThreadPoolExecutor(self.parallel, thread_name_prefix="sandbox") as pool:
            return list(pool.map(self._score_or_none, completions, columns[self.column]))

    def _score(self, text: str, reference: Any) -> float:
        block = last_block(text, tags=("python", "py", "python3"))
        passed = self._run(text if block is None else block, reference)
        return sum(passed) / len(passed) if self.score == "share" else float(all(passed))

    def _run(self, code: str, tests: Any) -> list[bool]:
        limits = SandboxLimits(
            time_s=self.time_limit_s,
            memory_bytes=self.memory_limit_bytes,
            output_bytes=self.output_limit_bytes,
        )
        given = [tests] if isinstance(tests, str) else tests
        if isinstance(given, list) and given and all(isinstance(test, str) for test in given):
            for test in given:
                if (reason := why_unusable(test)) is not None:
                    raise ValueError(
                        f"column {self.column!r} holds test code that cannot be used:"
                        f" {reason}: {test!r}"
                    )
            return run_tests(code, given, limits=limits)
        pairs = self._pairs(given)
        runs = run_programs(code, [stdin for stdin, _ in pairs], limits=limits)
        return [
            run.ok and _lines(run.output) == _lines(expected)
            for run, (_, expected) in zip(runs, pairs, strict=True)
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
    """Split into lines, without trailing blanks and trailing empty lines."""
    return [line.rstrip() for line in output.rstrip().splitlines()]
