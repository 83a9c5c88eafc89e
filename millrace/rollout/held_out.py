"""The held-out tasks of a run: who plays them, at which temperature, how many at a time.

Runs on the controller's event loop.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from millrace.config import RunConfig
from millrace.core.protocols import Engine
from millrace.core.records import Group, Task
from millrace.rollout.evaluation import Evaluation, Tally, evaluate
from millrace.rollout.player import Player


class HeldOut:
    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        config: RunConfig,
        player: Player,
        engine: Engine,
        score: Callable[[Group], Coroutine[Any, Any, Group]],
        at_once: Callable[[], AbstractAsyncContextManager[None]] | None,
    ) -> None:
        """`at_once`: within it, requests made together begin together; then all tasks do."""
        self._tasks = tasks
        self._settings = config.evaluate
        self._score = score
        self._at_once = at_once
        # Tasks whose samples the engines decode together.
        num_engines = config.evaluate.engines or config.engine.count + config.engine.remote
        num_sequences = num_engines * config.engine.max_sequences
        self._max_running = max(1, num_sequences // config.evaluate.samples)
        temperature = config.evaluate.temperature
        if temperature is None:
            temperature = 0.0 if config.evaluate.samples == 1 else config.sampling.temperature
        self._player = player.evaluating(engine=engine, temperature=temperature)

    def tally(self, step: int) -> Tally:
        """Of an evaluation that has not begun."""
        return Tally(step=step, num_tasks=len(self._tasks))

    async def evaluate(self, step: int, *, tally: Tally) -> Evaluation | None:
        """The policy as it is now; None if there are no tasks."""
        if not self._tasks:
            return None
        if self._at_once is None:
            return await self._evaluate(step, tally=tally, max_running=self._max_running)
        async with self._at_once():
            evaluating = asyncio.create_task(
                self._evaluate(step, tally=tally, max_running=len(self._tasks))
            )
        return await evaluating

    async def _evaluate(self, step: int, *, tally: Tally, max_running: int) -> Evaluation:
        samples = self._settings.samples
        return await evaluate(
            self._tasks,
            step=step,
            samples=samples,
            tally=tally,
            play=lambda task, number: self._player.play(
                task, number=number, group_size=samples, name=f"evaluation {step}, task"
            ),
            score=self._score,
            solved_at=self._settings.solved_at,
            max_running=max_running,
            score_timeout_s=self._settings.score_timeout_s,
        )
