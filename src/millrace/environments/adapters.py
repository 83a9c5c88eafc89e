"""Environments of other libraries: classes for TRL's environment_factory, and Gymnasium.

    mr.train(..., environment=mr.EnvironmentFactory(Wordle), scorers=[reward])
    mr.train(..., environment=mr.GymEnvironment("Blackjack-v1", render=str))

A class for TRL has reset(**row), which may return text to append to the prompt; public methods,
which are the model's tools; and optionally get_reward(). A reward function that takes
`environments` must see the object as the episode left it, so it is called here, with lists of one.
Other reward functions run in scorer processes. Every object plays one episode at a time, in a
thread of its own.
"""

import copy
import functools
import inspect
import re
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
from millrace.scoring.functions.user_function import (
    ENVIRONMENTS,
    RewardFunction,
    check_rewards,
    inspect_reward,
    resolve_function,
)
from millrace.scoring.pool import ScorerSpec

NOT_TOOLS = ("reset", "get_reward")
WeightedReward = tuple[RewardFunction, float]
COLUMN = "environment"  # task column that selects one of several factories


class EnvironmentFactory:
    """An environment of objects whose methods are the model's tools, as in TRL's
    environment_factory; see docs/how-to/other-environments.md."""

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
        name = task.columns.get(COLUMN) if self._several else ""
        if name not in self._objects:
            raise TaskError(
                f"A task has {COLUMN} = {name!r}, which is none of the environments"
                f" {', '.join(self._objects)}; set that column."
            )
        async with self._objects[name].lend() as env:
            prompt = await self._reset(env, task)
            tools = [*self._tools, *await _tools_of(env), *agent.tools]
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


class GymEnvironment:
    """A Gymnasium environment whose observations and actions are text, or can be written as text.

        play = GymEnvironment("Blackjack-v1", render=lambda seen: f"You hold {seen[0]}.")
        mr.train(tasks=[{"prompt": "0 = stick, 1 = hit.", "seed": 7}, ...], environment=play)

    An episode resets it with the task's seed. Then each observation becomes a user message and each
    reply an action.
    """

    def __init__(
        self,
        make: str | Callable[[], Any],
        *,
        render: Callable[[Any], str] | None = None,
        read: Callable[[str], Any] | None = None,
        total: Callable[[Sequence[float]], float] = sum,
        invalid_reward: float = 0.0,
        **settings: Any,
    ) -> None:
        """`make`: an id for gymnasium.make, with its settings, or a function that makes one.
        `render` converts an observation to text. `read` converts a reply to an action; by default
        it takes the last integer for Discrete actions and the whole text for Text actions. If it
        raises ValueError, or the action is not in the action space, the model gets an error message
        and `invalid_reward` for this turn. `total` combines the rewards of all turns."""
        self._objects = ObjectPool(_maker(make, settings), last=lambda env: env.close())
        self._render = render
        self._read = read
        self._total = total
        self._invalid_reward = invalid_reward
        self.__name__ = make if isinstance(make, str) else getattr(make, "__name__", "gym")

    async def __call__(self, task: Task, agent: Agent) -> float:
        rewards: list[float] = []
        async with self._objects.lend() as env:
            try:
                await self._play(env, task, agent, rewards)
            except EpisodeOver as over:
                if over.ending not in SCORED_ENDINGS:
                    raise
        return float(self._total(rewards))

    async def close(self) -> None:
        self._objects.close()

    async def _play(
        self, env: ObjectThread[Any], task: Task, agent: Agent, rewards: list[float]
    ) -> None:
        """Take turns until the environment ends the episode; append the reward of each."""
        seed, options = task.columns.get("seed"), task.columns.get("options")
        observation, _info = await env.run(lambda env: env.reset(seed=seed, options=options))
        *messages, last = messages_of(task.prompt)
        text = self._text(observation)
        if last["role"] == "user":
            messages.append({**last, "content": f"{last['content']}\n\n{text}"})
        else:
            messages += [last, {"role": "user", "content": text}]
        while True:
            reply = await agent.chat(messages)
            step = await env.run(functools.partial(self._step, text=reply.text))
            if isinstance(step, ValueError):
                rewards.append(self._invalid_reward)
                text = f"That is no action: {step}."
            else:
                observation, reward, terminated, truncated, _info = step
                rewards.append(float(reward))
                if terminated or truncated:
                    return
                text = self._text(observation)
            messages += [reply.message, {"role": "user", "content": text}]

    def _step(self, env: Any, *, text: str) -> Any:
        """Return the result of env.step, or an invalid action's error. Runs in env's thread."""
        try:
            action = (self._read or functools.partial(_action, env.action_space))(text)
        except ValueError as error:
            return error
        if not env.action_space.contains(action):
            return ValueError(f"{action!r} is not in {env.action_space}")
        return env.step(action)

    def _text(self, observation: Any) -> str:
        text = observation if self._render is None else self._render(observation)
        if not isinstance(text, str):
            raise TaskError(
                f"Environment {self.__name__!r} has the observation {text!r:.60} of type"
                f" {type(text).__name__}; pass render=, a function that converts it to text."
            )
        return text


def _maker(make: str | Callable[[], Any], settings: dict[str, Any]) -> Callable[[], Any]:
    if not isinstance(make, str):
        return functools.partial(make, **settings)
    try:
        import gymnasium
    except ImportError:
        raise ConfigError(
            f"Environment {make!r} needs gymnasium, which is not installed; install"
            " millrace[gymnasium]."
        ) from None
    try:
        gymnasium.spec(make)
    except gymnasium.error.Error as error:
        raise ConfigError(f"Environment {make!r} is not known to gymnasium: {error}.") from None
    return functools.partial(gymnasium.make, make, **settings)


def _action(space: Any, text: str) -> Any:
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        return text.strip()
    if isinstance(space, spaces.Discrete):
        numbers = re.findall(r"-?\d+", text)
        if not numbers:
            raise ValueError(f"there is no number in {text[:80]!r}")
        return int(numbers[-1])
    raise TaskError(f"Actions are {space}; pass read=, a function that converts a reply to one.")
