"""Greedy accuracy on held-out tasks, through the same engines and scorers as training."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from millrace.core.errors import ScoreError, TaskError
from millrace.core.records import Group, Task


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evaluation:
    accuracy: float  # share of tasks solved; a task that failed counts as not solved
    num_tasks: int
    num_failed: int
    groups: tuple[Group, ...]  # one episode each, in task order; failed ones left out


async def evaluate(
    tasks: Sequence[Task],
    *,
    play: Callable[[Task, int], Awaitable[Group]],
    score: Callable[[Group], Awaitable[Group]],
    solved_at: float,
    max_running: int,
) -> Evaluation:
    """Play each task once and count how many reach the score that means solved."""
    room = asyncio.Semaphore(max_running)

    async def one(number: int, task: Task) -> Group | None:
        async with room:
            try:
                return await score(await play(task, number))
            except (TaskError, ScoreError):
                return None  # counted as failed below

    groups = await asyncio.gather(*(one(number, task) for number, task in enumerate(tasks)))
    played = [group for group in groups if group is not None]
    solved = sum(group.scores[0].total >= solved_at for group in played)
    return Evaluation(
        accuracy=solved / len(tasks),
        num_tasks=len(tasks),
        num_failed=len(tasks) - len(played),
        groups=tuple(played),
    )
