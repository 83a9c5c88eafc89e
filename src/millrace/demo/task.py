"""The demo's task: write the digits of a number in ascending order, as in "sort 83105=" -> "01358".

Promise: whether a number is held out depends on the number alone, so no seed and no list length can
let a held-out task slip into training. Torch-free.
"""

import random
import zlib
from collections.abc import Sequence
from typing import Any

MIN_DIGITS, MAX_DIGITS = 3, 7
NUM_DIGITS = range(MIN_DIGITS, MAX_DIGITS + 1)
HELD_OUT_SHARE = 8  # one number in this many is never trained on


def make_tasks(
    num: int, seed: int, *, held_out: bool = False, num_digits: Sequence[int] = NUM_DIGITS
) -> list[dict[str, Any]]:
    """`num` tasks of one side of the split; each length of `num_digits` is equally likely."""
    rng = random.Random(f"{seed}, held out: {held_out}")
    tasks = []
    while len(tasks) < num:
        number = "".join(rng.choices("0123456789", k=rng.choice(num_digits)))
        if is_held_out(number) == held_out:
            tasks.append({"prompt": f"sort {number}=", "answer": "".join(sorted(number))})
    return tasks


def is_held_out(number: str) -> bool:
    return zlib.crc32(number.encode()) % HELD_OUT_SHARE == 0


def train_tasks() -> list[dict[str, Any]]:
    return make_tasks(8192, seed=0)


def held_out_tasks() -> list[dict[str, Any]]:
    return make_tasks(256, seed=0, held_out=True)


def exact(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """The verifier and only reward: 1 for exactly the right digits, otherwise 0."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]
