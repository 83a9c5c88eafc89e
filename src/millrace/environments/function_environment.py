"""The environments of a run: a user's coroutine, or one completion per prompt.

    async def guess(task, agent):
        reply = await agent.chat([{"role": "user", "content": task.prompt}])
        return float(reply.text == task.columns["answer"])

Promise: each group runs the coroutine n times concurrently, on the host of the environments. An
episode that reaches a limit is marked and ends; an episode whose environment raises is left out. A
group needs n good episodes: `redundancy` extra episodes are started, and the slowest are cancelled.
An environment with open() and close() coroutines gets these calls at the start and end of a run, in
each process that runs it.
"""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncGenerator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from millrace.core.errors import ConfigError, TaskError
from millrace.core.protocols import Policy
from millrace.core.records import Episode, Message, Prompt, Task
from millrace.environments.agent import Agent
from millrace.environments.branching.scheduler import Recipe
from millrace.environments.conversation import History
from millrace.environments.episode_runner import (
    EnvironmentFunction,
    EpisodeHost,
    EpisodeRunner,
    name_of,
)
from millrace.environments.limits import EpisodeLimits
from millrace.environments.rollouts.renderer import Renderer
from millrace.environments.threads import LoopThread
from millrace.environments.tools.calls import ToolFormatName
from millrace.environments.tools.functions import is_async


class SingleTurn:
    """The default environment: one prompt, one completion, scored by the scorers."""

    async def play(self, task: Task, policy: Policy, n: int) -> list[Episode]:
        return await policy.complete(task.prompt, n)


async def answer(task: Task, agent: Agent) -> None:
    """SingleTurn as an environment function, for recipes."""
    if isinstance(task.prompt, str):
        await agent.complete(task.prompt)
    else:
        await agent.chat(task.prompt)


async def use_tools(task: Task, agent: Agent) -> None:
    """Chat and call `agent.tools` until a reply calls none. The scorers score the episode."""
    await agent.run(messages_of(task.prompt), agent.tools)


def messages_of(prompt: Prompt) -> list[Message]:
    """Return the prompt as messages; a text becomes a user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


@dataclass(frozen=True, slots=True, eq=False)
class FunctionEnvironment:
    """Implements core.protocols.Environment; play() runs on the controller's event loop."""

    host: EpisodeHost
    _: KW_ONLY
    renderer: Renderer
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    redundancy: int = 0  # extra episodes per training group; the slowest are cancelled
    ended_reward: float = 0.0  # reward of an episode that reached a limit
    tool_format: ToolFormatName = "auto"
    history: History = "template"
    recipe: Recipe | None = None  # replaces n independent episodes per training group

    async def play(self, task: Task, policy: Policy, n: int) -> list[Episode]:
        runner = EpisodeRunner(environment=self, task=task, policy=policy)
        if self.recipe is not None and policy.is_trained:
            return await self.recipe.play(runner, n)
        num_begun = n + (self.redundancy if policy.is_trained else 0)
        running = {asyncio.create_task(runner.play(index)): index for index in range(num_begun)}
        finished: dict[int, Episode] = {}
        try:
            while len(finished) < n:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                failures: list[TaskError] = []
                for index, ended in sorted((running.pop(ended), ended) for ended in done):
                    try:
                        finished[index], _recording = ended.result()
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
    problem = "" if is_async(function) else "is not a coroutine"
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):
        problem = problem or "cannot be called with a task and an agent"
    if problem:
        raise ConfigError(
            f"Environment {name_of(function)!r} {problem}; define it with `async def play(task,"
            " agent)`."
        )
    return function


@contextlib.asynccontextmanager
async def lifetime(function: Any, *, thread: LoopThread) -> AsyncGenerator[None]:
    """Await the environment's open() and, at the end, close(), if it defines them."""

    async def call(name: str) -> None:
        method = getattr(function, name, None)
        if inspect.iscoroutinefunction(method):
            await thread.run(method())

    try:
        await call("open")
        yield
    finally:
        await call("close")
