"""What the run learns: to sort three digits, which a small model can soon do almost always, so that
two runs that learned the same amount end with almost the same accuracy. Torch-free."""

from typing import Any

from millrace.demo.task import make_tasks

NUM_DIGITS = (3,)
HELD_OUT = 256


def train_tasks() -> list[dict[str, Any]]:
    return make_tasks(4096, seed=0, num_digits=NUM_DIGITS)


def held_out_tasks() -> list[dict[str, Any]]:
    return make_tasks(HELD_OUT, seed=0, held_out=True, num_digits=NUM_DIGITS)
