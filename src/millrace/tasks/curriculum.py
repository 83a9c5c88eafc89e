"""Curriculum: samples tasks whose measured solve rate is near a target.

The solve rate of a task is a running mean over its recent groups. Sampling weights follow a
Gaussian around the target rate; an unseen task counts as being at the target. A fixed share of the
numbers ignores the weights and visits all tasks in turn, so that no task starves and old solve
rates are measured again.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from millrace.core.records import Task
from millrace.tasks.streams import Epochs, TaskStream

MEMORY = 0.5  # weight of the previous mean when a new group arrives
TARGET = 0.5  # solve rate at which the scores of a group vary most, and so teach most
EXPLORE_SHARE = 0.25  # of all groups: these take every task in turn, so that none is forgotten
WIDTH = 0.2  # standard deviation of the Gaussian


class Curriculum(TaskStream):
    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        seed: int,
        target: float = TARGET,
        explore_share: float = EXPLORE_SHARE,
    ) -> None:
        self._tasks = tuple(tasks)
        self._seed = seed % 2**64
        self._target = target
        self._explore_share = explore_share
        self._in_turn = Epochs(tasks, seed=seed, shuffle=True)
        self._rates = np.full(len(tasks), np.nan)  # [tasks]; NaN = not seen yet
        self._weights = np.ones(len(tasks))  # [tasks]
        self._drawn: dict[int, int] = {}  # task by number, until that is finished
        # Scores since the last draw. They are applied in the order of their numbers, so that the
        # order in which groups were scored does not matter.
        self._pending: list[tuple[int, int, float]] = []  # number, task, solve rate

    def task(self, number: int) -> Task:
        """Return the same task for a number until that number is finished."""
        if number not in self._drawn:
            self._learn()
            self._drawn[number] = self._draw(number)
        return self._tasks[self._drawn[number]]

    def observe(self, number: int, solve_rate: float) -> None:
        # A resumed group that was started with another task order was not drawn here.
        if number in self._drawn:
            self._pending.append((number, self._drawn[number], solve_rate))

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
        """Restore the solve rates; those of a different task list are ignored."""
        if state.get("num_tasks") != len(self._tasks):
            return
        for index, rate in state["solve_rates"].items():
            self._set_rate(int(index), rate)
        self._drawn = {int(number): index for number, index in state["drawn"].items()}

    def _is_known(self, draw: int | None) -> TypeGuard[int]:
        """False for a draw from a different task list."""
        return draw is not None and draw < len(self._tasks)

    def _draw(self, number: int) -> int:
        turn = math.floor(number * self._explore_share)
        if math.floor((number + 1) * self._explore_share) > turn:
            return self._in_turn.index(turn)
        rng = np.random.default_rng((self._seed, 1, number))
        reach = self._weights.cumsum()
        drawn = int(np.searchsorted(reach, rng.random() * reach[-1], side="right"))
        return min(drawn, len(self._tasks) - 1)  # the product may round up to the total

    def _learn(self) -> None:
        for _, index, now in sorted(self._pending):
            before = float(self._rates[index])
            is_new = math.isnan(before)
            self._set_rate(index, now if is_new else MEMORY * before + (1 - MEMORY) * now)
        self._pending.clear()

    def _set_rate(self, index: int, rate: float) -> None:
        self._rates[index] = rate
        self._weights[index] = math.exp(-(((rate - self._target) / WIDTH) ** 2) / 2)
