"""Built-in verifiers: reward functions that compare completions with a column of the task.

A verifier is a frozen dataclass whose fields are the keys of its [[scorers]] table. It is called
like any reward function, and its __name__ is its name in metrics. It returns one number per
completion, or None if the task's column is None.

Promise: whatever a completion contains affects only its own score. A mistake in a task is an error
that says so. Torch-free. A missing optional package is an error when the verifier is created.
"""

from millrace.scoring.verifiers.answers import Exact, JsonSchema, Math, Numeric, Regex
from millrace.scoring.verifiers.python_tests import PythonTests
from millrace.scoring.verifiers.reasoning_gym import ReasoningGym

VERIFIERS: dict[str, type] = {
    "exact": Exact,
    "numeric": Numeric,
    "regex": Regex,
    "json_schema": JsonSchema,
    "math": Math,
    "python_tests": PythonTests,
    "reasoning_gym": ReasoningGym,
}
