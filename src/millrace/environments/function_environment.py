"""A user's coroutine as an environment: it gets a task and an agent, and returns a reward.

    async def guess(task, agent):
        reply = await agent.chat([{"role": "user", "content": task.prompt}])
        return float(reply.text == task.columns["answer"])

Promise: each group runs the coroutine n times concurrently, on the thread of the environments. An
episode that reaches a limit is marked and ends; an episode whose environment raises is left out. A
group needs n good episodes: `redundancy` extra episodes are started, and the slowest are cancelled.
An environment with open() and close() coroutines gets these calls at the start and end of a run.
"""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from millrace.core.errors import ConfigError, TaskError
from millrace.core.protocols import Policy
from millrace.core.records import Episode, Task
from millrace.environments.branching.recipe import Recipe
from millrace.environments.episode_runner import EnvironmentFunction, EpisodeRunner, name_of
from millrace.environments.limits import EpisodeRules
from millrace.environments.loop_thread import LoopThread
from millrace.environments.other_models import OtherModel
from millrace.environments.rollouts.renderer import Renderer
from millrace.environments.tools.calls import format_of


class FunctionEnvironment:
    """Implements core.protocols.Environment; play() runs on the controller's event loop."""

    def __init__(
        self,
        function: EnvironmentFunction,
        *,
        renderer: Renderer,
        rules: EpisodeRules,
        thread: LoopThread,
        recipe: Recipe | None = None,
        others: Mapping[str, OtherModel] | None = None,
    ) -> None:
        """`recipe` replaces n independent episodes per training group, for example by a tree.
        `others` are the models of environment.models."""
        self._recipe = recipe
        self._function = function
        self._renderer = renderer
        self._rules = rules
        self._thread = thread
        self._others = others or {}
        self._format = format_of(rules.tool_format, template=renderer.chat_template)

    async def play(self, task: Task, policy: Policy, n: int) -> list[Episode]:
        runner = EpisodeRunner(
            self._function,
            task=task,
            policy=policy,
            renderer=self._renderer,
            rules=self._rules,
            tool_format=self._format,
            thread=self._thread,
            others=self._others,
        )
        if self._recipe is not None and policy.is_trained:
            return await self._recipe.play(runner, n)
        num_begun = n + (self._rules.redundancy if policy.is_trained else 0)
        running = {asyncio.create_task(runner.play(index)): index for index in range(num_begun)}
        finished: dict[int, Episode] = {}
        try:
            while len(finished) < n:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                failures: list[TaskError] = []
                for index, ended in sorted((running.pop(ended), ended) for ended in done):
                    try:
                        finished[index] = ended.result().episode
                    except TaskError as error:
                        failures.append(error)
                    else:
                        policy.finished(index, finished[index])
                if len(finished) + len(running) < n:
                    raise failures[0]
        finally:
            for straggler in running:
                straggler.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for index in set(range(num_begun)) - set(sorted(finished)[:n]):
                policy.gave_up(index)
        return [finished[index] for index in sorted(finished)][:n]


def check_function(function: Any) -> EnvironmentFunction:
    """Raise ConfigError unless the function can be called as an environment."""
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - a callable object
    )
    if not is_async:
        raise ConfigError(
            f"Environment {name_of(function)!r} is not a coroutine; define it with `async def"
            " play(task, agent)`."
        )
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        raise ConfigError(
            f"Environment {name_of(function)!r} cannot be called with a task and an agent; define"
            " it with `async def play(task, agent)`."
        ) from None
    return function


@contextlib.asynccontextmanager
async def lifetime(function: Any, *, thread: LoopThread) -> AsyncGenerator[None]:
    """Await the environment's open() and, at the end, close(), if it defines them."""
    try:
        await _call(function, "open", thread=thread)
        yield
    finally:
        await _call(function, "close", thread=thread)


async def _call(function: Any, name: str, *, thread: LoopThread) -> None:
    method = getattr(function, name, None)
    if inspect.iscoroutinefunction(method):
        await thread.run(method())
