"""The task of grpo_on_gpu.py: add two numbers below 100, as a chat question.

Both Millrace and TRL accept these tasks and this reward function.
"""

import random
import re
from typing import Any, Literal

Lengths = Literal["short", "long"]
QUESTIONS: dict[Lengths, str] = {
    "short": "What is {a} + {b}? Answer with just the number.",
    "long": "What is {a} + {b}? Think step by step, explain each step, then give the answer.",
}
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def make_tasks(num: int, *, seed: int, lengths: Lengths = "short") -> list[dict[str, Any]]:
    """Random sums as chat messages, with the correct number as text."""
    rng = random.Random(seed)
    tasks = []
    for _ in range(num):
        a, b = rng.randrange(100), rng.randrange(100)
        question = QUESTIONS[lengths].format(a=a, b=b)
        tasks.append({"prompt": [{"role": "user", "content": question}], "answer": str(a + b)})
    return tasks


def long_sums() -> list[dict[str, Any]]:
    """Tasks of examples/designs/smollm2.toml."""
    return make_tasks(8192, seed=0, lengths="long")


def heldout_sums() -> list[dict[str, Any]]:
    return make_tasks(256, seed=1, lengths="long")


def exact_sum(
    completions: list[list[dict[str, str]]] | list[str], answer: list[str], **columns: Any
) -> list[float]:
    """1 if the last number of the completion is the sum, otherwise 0."""
    return [
        float(_last_number(text if isinstance(text, str) else text[-1]["content"]) == right)
        for text, right in zip(completions, answer, strict=True)
    ]


def _last_number(text: str) -> str | None:
    """ "37 + 45 = 82." -> "82"; commas as in 1,024 are allowed."""
    numbers = NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3})", "", text))
    return numbers[-1] if numbers else None
