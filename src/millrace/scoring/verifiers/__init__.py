"""Ready verifiers: reward functions that compare completions with what the task knows.

Each is a frozen dataclass whose fields are the keys of its [[scorers]] table. It is called like a
reward function; its __name__ is what metrics call it. It gives a number per completion, and None
where the task's column is None: there it does not apply.

Promise: whatever a completion holds, it costs its own score. What is wrong with a task is an error
that says so. Torch-free; what needs a package that may be missing says so when it is made.
"""

from collections.abc import Mapping
from typing import Any

from millrace.core.plugins import build_plugin
from millrace.scoring.verifiers.exact import Exact
from millrace.scoring.verifiers.json_schema import JsonSchema
from millrace.scoring.verifiers.math import Math
from millrace.scoring.verifiers.numeric import Numeric
from millrace.scoring.verifiers.python_tests import PythonTests
from millrace.scoring.verifiers.reasoning_gym import ReasoningGym
from millrace.scoring.verifiers.regex import Regex

__all__ = [
    "VERIFIERS",
    "Exact",
    "JsonSchema",
    "Math",
    "Numeric",
    "PythonTests",
    "ReasoningGym",
    "Regex",
    "build_verifier",
]

VERIFIERS: dict[str, type] = {
    "exact": Exact,
    "numeric": Numeric,
    "regex": Regex,
    "json_schema": JsonSchema,
    "math": Math,
    "python_tests": PythonTests,
    "reasoning_gym": ReasoningGym,
}


def build_verifier(table: Mapping[str, Any], *, section: str) -> Any:
    """The verifier that a table like {type = "numeric", tolerance = 0.01} describes."""
    return build_plugin(table, builtins=VERIFIERS, default="", section=section)
