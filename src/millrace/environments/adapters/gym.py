"""Gymnasium environments whose observations and actions are text, or can be written as text.

    play = GymEnvironment("Blackjack-v1", render=lambda seen: f"You hold {seen[0]}.")
    mr.train(tasks=[{"prompt": "0 = stick, 1 = hit.", "seed": 7}, ...], environment=play)

An episode resets the environment with the task's seed. Then each observation becomes a user message
and each reply an action. The Gymnasium environment runs in a thread of its own.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from millrace.core.errors import ConfigError, TaskError
from millrace.core.records import Message, Task
from millrace.environments.agent import Agent
from millrace.environments.function_environment import messages_of
from millrace.environments.replay.schema import SCORED_ENDINGS, EpisodeOver
from millrace.environments.threads import ObjectPool, ObjectThread


class GymEnvironment:
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
        messages = _with_observation(task, self._text(observation))
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
            messages = [*messages, reply, {"role": "user", "content": text}]

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


def _with_observation(task: Task, text: str) -> list[Message]:
    *before, last = messages_of(task.prompt)
    if last["role"] != "user":
        return [*before, last, {"role": "user", "content": text}]
    return [*before, {**last, "content": f"{last['content']}\n\n{text}"}]
