"""Classes written for TRL's environment_factory, as environments.

    mr.train(..., environment=mr.EnvironmentFactory(Wordle), scorers=[reward])

Such a class has reset(**row), which may return text to append to the prompt; public methods, which
are the model's tools; and optionally get_reward(). An object plays one episode at a time, in a
thread of its own. A reward function that takes `environments` must see the object as the episode
left it, so it is called here, with lists of one. Other reward functions run in scorer processes.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from millrace.core.errors import ConfigError, ScoreError, TaskError
from millrace.core.records import Message, Task
from millrace.environments.agent import Agent
from millrace.environments.function_environment import EnvironmentFunction, messages_of
from millrace.environments.replay.schema import SCORED_ENDINGS, EpisodeOver
from millrace.environments.threads import ObjectPool, ObjectThread
from millrace.environments.tools.functions import Tool, tool_of
from millrace.scoring.functions.function_scorer import Function
from millrace.scoring.functions.shipping import resolve_function
from millrace.scoring.functions.signature import (
    ENVIRONMENTS,
    RewardFunction,
    check_rewards,
    inspect_reward,
)
from millrace.scoring.registry import ScorerSpec

NOT_TOOLS = ("reset", "get_reward")
WeightedReward = tuple[RewardFunction, float]
COLUMN = "environment"  # task column that selects one of several factories


class EnvironmentFactory:
    """An environment function; see docs/how-to/other-environments.md."""

    def __init__(
        self,
        factory: Callable[[], Any] | Mapping[str, Callable[[], Any]],
        *,
        tools: Sequence[Callable[..., Any]] = (),
    ) -> None:
        """With several factories, a task's column "environment" selects one. `tools` are offered
        besides the methods of the objects."""
        self._several = isinstance(factory, Mapping)
        factories = dict(factory) if isinstance(factory, Mapping) else {"": factory}
        for name, make in factories.items():
            if not callable(make):
                raise ConfigError(f"Environment factory {name!r} is {make!r}; pass a class.")
            if inspect.isclass(make) and not callable(getattr(make, "reset", None)):
                raise ConfigError(f"Class {make.__name__!r} has no reset(); define it.")
        self._objects = {name: ObjectPool(make) for name, make in factories.items()}
        self._tools = [tool_of(tool) for tool in tools]
        self.rewards: Sequence[WeightedReward] = ()
        names = [getattr(make, "__name__", "factory") for make in factories.values()]
        self.__name__ = ", ".join(names)

    async def __call__(self, task: Task, agent: Agent) -> float | None:
        async with self._objects[self._name_for(task)].lend() as env:
            prompt = await self._reset(env, task)
            tools = [*self._tools, *await _tools_of(env)]
            replies, sampled = await _converse(agent, prompt, tools)
            return await self._reward(
                env,
                prompts=[prompt],
                completions=[replies],
                completion_ids=[sampled],
                columns={name: [value] for name, value in task.columns.items()},
            )

    async def close(self) -> None:
        for objects in self._objects.values():
            objects.close()

    def _name_for(self, task: Task) -> str:
        name = task.columns.get(COLUMN) if self._several else ""
        if name not in self._objects:
            raise TaskError(
                f"A task has {COLUMN} = {name!r}, which is none of the environments"
                f" {', '.join(self._objects)}; set that column."
            )
        return str(name)

    async def _reset(self, env: ObjectThread[Any], task: Task) -> list[Message]:
        """Reset the object, and return the prompt with the text that reset() returned."""
        columns = {k: v for k, v in task.columns.items() if not (self._several and k == COLUMN)}
        observation = await _call(env, "reset", prompt=task.prompt, **columns)
        prompt = messages_of(task.prompt)
        if observation is None:
            return prompt
        if not isinstance(observation, str):
            raise TaskError(
                f"Environment {self.__name__!r}: reset() returned {observation!r:.60}; return a"
                " text or None."
            )
        *before, last = prompt
        return [*before, {**last, "content": f"{last['content']}{observation}"}]

    async def _reward(
        self, env: ObjectThread[Any], *, columns: Mapping[str, list[Any]], **episode: Any
    ) -> float | None:
        """Return the sum of all rewards; None leaves the reward to the scorers."""
        rewards: list[float] = []
        if await env.run(lambda thing: callable(getattr(thing, "get_reward", None))):
            rewards.append(float(await _call(env, "get_reward")))
        for function, weight in self.rewards:

            def call(thing: Any, function: RewardFunction = function) -> Any:
                return function(columns={**columns, ENVIRONMENTS: [thing]}, **episode)

            result = await env.run(call)
            result = await result if inspect.isawaitable(result) else result
            try:
                (value,) = check_rewards(result, name=function.name, num_completions=1)
            except ScoreError as error:
                raise TaskError(str(error)) from error
            if value is not None:
                rewards.append(weight * value)
        return sum(rewards) if rewards else None


def split_rewards(
    specs: Sequence[ScorerSpec], environment: EnvironmentFunction | None, *, tasks: Sequence[Task]
) -> tuple[tuple[ScorerSpec, ...], EnvironmentFunction | None]:
    """Move the reward functions that take `environments` from the scorers to the environment."""
    if not isinstance(environment, EnvironmentFactory):
        return tuple(specs), environment
    rewards: list[WeightedReward] = []
    others: list[ScorerSpec] = []
    for spec in specs:
        function = None
        if isinstance(spec.type, Function):
            function = inspect_reward(resolve_function(spec.type.function), name=spec.name)
        if function is None or not function.wants_environments:
            others.append(spec)
            continue
        if spec.gate is not None:
            raise ConfigError(
                f"Scorer {spec.name!r} takes {ENVIRONMENTS!r}, so it scores at the end of each"
                " episode, before all other scorers; remove its `when`."
            )
        function.check_columns(tasks, has_environments=True)
        rewards.append((function, spec.weight))
    rewarding = copy.copy(environment)
    rewarding.rewards = rewards
    return tuple(others), rewarding


async def _converse(
    agent: Agent, prompt: Sequence[Message], tools: Sequence[Tool]
) -> tuple[list[Message], list[int]]:
    """Chat and call tools until a reply calls none; return new messages and sampled tokens."""
    messages: list[Message] = []
    sampled: list[int] = []
    try:
        while True:
            reply = await agent.chat([*prompt, *messages], tools)
            messages.append(reply.message)
            sampled += reply.exchange.completion.tokens.tolist()
            if not reply.wants_tools:
                break
            messages += await agent.call_tools(reply)
    except EpisodeOver as over:
        if over.ending not in SCORED_ENDINGS:
            raise
    return messages, sampled


async def _tools_of(env: ObjectThread[Any]) -> list[Tool]:
    """Return the object's public methods as tools, as TRL does."""

    def list_tools(thing: Any) -> list[Tool]:
        names = [name for name, _ in inspect.getmembers(type(thing), inspect.isfunction)]
        public = [n for n in names if not n.startswith("_") and n not in NOT_TOOLS]
        return [tool_of(getattr(thing, name)) for name in public]

    tools = await env.run(list_tools)
    return [replace(tool, call=functools.partial(_call, env, tool.name)) for tool in tools]


async def _call(env: ObjectThread[Any], method: str, /, **arguments: Any) -> Any:
    """Call a method in the object's thread; a coroutine it returns is awaited on this loop."""
    result = await env.run(lambda thing: getattr(thing, method)(**arguments))
    return await result if inspect.isawaitable(result) else result
