"""Tasks by measured difficulty: those that the policy solves about as often as is most instructive.

A task's solve rate is a running mean over its recent groups. It is drawn with a weight that falls
off around the target rate, like a bell; a task not seen yet counts as being at the target. A fixed
share of the numbers ignores all that and goes through the tasks in turn, so that none is starved
and a rate that was measured long ago is measured again.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from millrace.core.records import Task
from millrace.tasks.streams import Epochs

MEMORY = 0.5  # weight of what was known before a new group
WIDTH = 0.2  # of the bell, as its standard deviation


class Curriculum:
    """A TaskStream."""

    def __init__(
        self, tasks: Sequence[Task], *, seed: int, target: float, explore_share: float
    ) -> None:
        self._tasks = tuple(tasks)
        self._seed = seed % 2**64
        self._target = target
        self._explore_share = explore_share
        self._in_turn = Epochs(tasks, seed=seed, shuffle=True)
        self._rates = np.full(len(tasks), np.nan)  # [tasks]; NaN = not seen yet
        self._weights = np.ones(len(tasks))  # [tasks]
        self._drawn: dict[int, int] = {}  # task by number, until that is finished
        # Outcomes since the last draw. They are learned in the order of their numbers, so that it
        # does not matter which of several groups was scored first.
        self._news: list[tuple[int, int, float]] = []  # number, task, solve rate

    def task(self, number: int) -> Task:
        """The same each time it is asked, until the number is finished."""
        if number not in self._drawn:
            self._learn()
            self._drawn[number] = self._draw(number)
        return self._tasks[self._drawn[number]]

    def observe(self, number: int, solve_rate: float) -> None:
        # A group that was begun under another order has no task here.
        if number in self._drawn:
            self._news.append((number, self._drawn[number], solve_rate))

    def finish(self, number: int) -> None:
        self._drawn.pop(number, None)

    def draw_of(self, number: int) -> int | None:
        self.task(number)
        return self._drawn[number]

    def redrawn(self, number: int, draw: int | None) -> Task:
        index = draw if self._is_known(draw) else self._in_turn.index(number)
        return self._tasks[index]

    def remember(self, number: int, draw: int | None) -> None:
        if self._is_known(draw):
            self._drawn[number] = draw

    def solve_rate(self, index: int) -> float | None:
        self._learn()
        rate = float(self._rates[index])
        return None if math.isnan(rate) else rate

    def state(self) -> dict[str, Any]:
        self._learn()
        seen = np.flatnonzero(~np.isnan(self._rates)).tolist()
        return {
            "num_tasks": len(self._tasks),
            "solve_rates": {str(index): float(self._rates[index]) for index in seen},
            "drawn": {str(number): index for number, index in self._drawn.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Rates of other tasks than these would mislead: then it begins anew."""
        if state.get("num_tasks") != len(self._tasks):
            return
        for index, rate in state["solve_rates"].items():
            self._set_rate(int(index), rate)
        self._drawn = {int(number): index for number, index in state["drawn"].items()}

    def _is_known(self, draw: int | None) -> TypeGuard[int]:
        """False if it was drawn from other tasks than these."""
        return draw is not None and draw < len(self._tasks)

    def _draw(self, number: int) -> int:
        turn = math.floor(number * self._explore_share)
        if math.floor((number + 1) * self._explore_share) > turn:
            return self._in_turn.index(turn)
        rng = np.random.default_rng((self._seed, 1, number))
        reach = self._weights.cumsum()
        drawn = int(np.searchsorted(reach, rng.random() * reach[-1], side="right"))
        return min(drawn, len(self._tasks) - 1)  # where the product was rounded up to the end

    def _learn(self) -> None:
        for _, index, now in sorted(self._news):
            before = float(self._rates[index])
            is_new = math.isnan(before)
            self._set_rate(index, now if is_new else MEMORY * before + (1 - MEMORY) * now)
        self._news.clear()

    def _set_rate(self, index: int, rate: float) -> None:
        self._rates[index] = rate
        self._weights[index] = math.exp(-(((rate - self._target) / WIDTH) ** 2) / 2)
