"""Classes written for TRL's environment_factory, as environments.

    mr.train(..., environment=mr.EnvironmentFactory(Wordle), scorers=[reward])

What such a class has: reset(**row), which may return a text that goes below the prompt; public
methods, which are the model's tools; and, if it likes, get_reward(). An object plays one episode at
a time and is reset before each.

A reward function that takes `environments` must see the object as the episode left it, so it is
called here, at the end of each episode, with lists of one: prompts, completions, columns and the
object itself. Other reward functions run in the scorer processes, as ever.

Runs on the loop of the environments; sync methods and reward functions run in the thread of their
object.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millrace.core.errors import ConfigError, ScoreError, TaskError
from millrace.core.records import Message, Prompt, Task
from millrace.environments.adapters.confined import Confined, Instances
from millrace.environments.agent import Agent
from millrace.environments.limits import EpisodeOver
from millrace.environments.tools.environment import messages_of
from millrace.environments.tools.functions import Tool, tool_of
from millrace.scoring.functions.signature import ENVIRONMENTS, RewardFunction, check_rewards

CUT = ("turns", "length")  # endings after which an episode is judged all the same
NOT_TOOLS = ("reset", "get_reward")
COLUMN = "environment"  # of a task: which of several factories


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    function: RewardFunction  # that takes `environments`
    weight: float


class EnvironmentFactory:
    """An environment function; see docs/how-to/other-environments.md."""

    def __init__(
        self,
        factory: Callable[[], Any] | Mapping[str, Callable[[], Any]],
        *,
        tools: Sequence[Callable[..., Any]] = (),
    ) -> None:
        """Of several factories, the column "environment" of a task names its own. `tools` are
        offered besides the methods of the objects."""
        several = isinstance(factory, Mapping)
        factories = dict(factory) if several else {"": factory}
        for name, make in factories.items():
            if not callable(make):
                raise ConfigError(f"Environment factory {name!r} is {make!r}; give a class.")
            if inspect.isclass(make) and not callable(getattr(make, "reset", None)):
                raise ConfigError(f"Class {make.__name__!r} has no reset(); every environment has.")
        self._several = several
        self._instances = {name: Instances(make) for name, make in factories.items()}
        self._tools = [tool_of(tool) for tool in tools]
        self._rewards: tuple[Reward, ...] = ()
        names = [getattr(make, "__name__", "factory") for make in factories.values()]
        self.__name__ = ", ".join(names)

    def with_rewards(self, rewards: Sequence[Reward]) -> "EnvironmentFactory":
        """The same, with functions that judge its episodes."""
        other = copy.copy(self)
        other._rewards = tuple(rewards)
        return other

    async def __call__(self, task: Task, agent: Agent) -> float | None:
        async with self._instances[self._name_for(task)].lend() as env:
            prompt = await self._begin(env, task)
            tools = [*self._tools, *await _tools_of(env)]
            said, sampled = await _converse(agent, prompt, tools)
            return await self._judged(env, task, prompt, said=said, sampled=sampled)

    async def close(self) -> None:
        for instances in self._instances.values():
            instances.close()

    def _name_for(self, task: Task) -> str:
        name = task.columns.get(COLUMN) if self._several else ""
        if name not in self._instances:
            raise TaskError(
                f"A task has {COLUMN} = {name!r}, which is none of the environments"
                f" {', '.join(self._instances)}; set that column."
            )
        return str(name)

    async def _begin(self, env: Confined[Any], task: Task) -> list[Message]:
        """Reset, and what the model is told first."""
        columns = {k: v for k, v in task.columns.items() if not (self._several and k == COLUMN)}
        seen = await _call(env, "reset", prompt=task.prompt, **columns)
        prompt = messages_of(task.prompt)
        if seen is None:
            return prompt
        if not isinstance(seen, str):
            raise TaskError(
                f"Environment {self.__name__!r}: reset() returned {seen!r:.60}; a text is needed,"
                " or None."
            )
        *before, last = prompt
        return [*before, {**last, "content": f"{last['content']}{seen}"}]

    async def _judged(
        self,
        env: Confined[Any],
        task: Task,
        prompt: Prompt,
        *,
        said: list[Message],
        sampled: list[int],
    ) -> float | None:
        """The sum of all that apply; None leaves it to the scorers."""
        found: list[float] = []
        if await env.run(lambda thing: callable(getattr(thing, "get_reward", None))):
            found.append(float(await _call(env, "get_reward")))
        columns = {name: [value] for name, value in task.columns.items()}
        for reward in self._rewards:
            ask = functools.partial(
                _ask, reward.function, prompt=prompt, said=said, sampled=sampled, columns=columns
            )
            result = await env.run(ask)
            result = await result if inspect.isawaitable(result) else result
            try:
                (value,) = check_rewards(result, name=reward.function.name, num_completions=1)
            except ScoreError as error:
                raise TaskError(str(error)) from error
            if value is not None:
                found.append(reward.weight * value)
        return sum(found) if found else None


def _ask(
    function: RewardFunction,
    thing: Any,
    *,
    prompt: Prompt,
    said: list[Message],
    sampled: list[int],
    columns: Mapping[str, list[Any]],
) -> Any:
    return function(
        prompts=[prompt],
        completions=[said],
        completion_ids=[sampled],
        columns={**columns, ENVIRONMENTS: [thing]},
    )


async def _converse(
    agent: Agent, prompt: Sequence[Message], tools: Sequence[Tool]
) -> tuple[list[Message], list[int]]:
    """Chat and call tools until a reply calls none; what was said since the prompt, and sampled."""
    said: list[Message] = []
    sampled: list[int] = []
    try:
        while True:
            reply = await agent.chat([*prompt, *said], tools)
            said.append(reply.message)
            sampled += reply.exchange.completion.tokens.tolist()
            if not reply.wants_tools:
                break
            said += await agent.call_tools(reply)
    except EpisodeOver as over:
        if over.ending not in CUT:
            raise
    return said, sampled


async def _tools_of(env: Confined[Any]) -> list[Tool]:
    """Public methods, as TRL lists them."""

    def listed(thing: Any) -> list[Tool]:
        names = [name for name, _ in inspect.getmembers(type(thing), inspect.isfunction)]
        public = [n for n in names if not n.startswith("_") and n not in NOT_TOOLS]
        return [tool_of(getattr(thing, name)) for name in public]

    tools = await env.run(listed)
    return [replace(tool, call=functools.partial(_call, env, tool.name)) for tool in tools]


async def _call(env: Confined[Any], method: str, /, **arguments: Any) -> Any:
    """In the thread of the object; what is async goes on here."""
    result = await env.run(lambda thing: getattr(thing, method)(**arguments))
    return await result if inspect.isawaitable(result) else result
