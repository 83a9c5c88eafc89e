"""Gymnasium environments whose observations and actions are text, or can be told as text.

    play = GymEnvironment("Blackjack-v1", render=lambda seen: f"You hold {seen[0]}.")
    mr.train(tasks=[{"prompt": "0 = stick, 1 = hit.", "seed": 7}, ...], environment=play)

An episode: reset with the task's seed, then in turns an observation as a message of the user, and
an action from the reply, until the environment ends it. Runs on the loop of the environments; the
Gymnasium environment in a thread of its own.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from millrace.core.errors import ConfigError, TaskError
from millrace.core.records import Message, Task
from millrace.environments.adapters.confined import Confined, Instances
from millrace.environments.agent import Agent
from millrace.environments.limits import EpisodeOver
from millrace.environments.tools.environment import messages_of

CUT = ("turns", "length")  # endings at which what was earned so far counts


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

        `render` makes text of an observation, if that is not one already. `read` makes an action
        of a reply; by default the last integer in it for Discrete actions and the whole text for
        Text ones. If it raises ValueError, or the environment has no such action, the model is told
        so, which costs a turn and earns `invalid_reward`. `total` makes the reward of an episode of
        those of its turns.
        """
        self._instances = Instances(_maker(make, settings), last=lambda env: env.close())
        self._render = render
        self._read = read
        self._total = total
        self._invalid_reward = invalid_reward
        self.__name__ = make if isinstance(make, str) else getattr(make, "__name__", "gym")

    async def __call__(self, task: Task, agent: Agent) -> float:
        rewards: list[float] = []
        async with self._instances.lend() as env:
            try:
                await self._play(env, task, agent, rewards)
            except EpisodeOver as over:
                if over.ending not in CUT:
                    raise
        return float(self._total(rewards))

    async def close(self) -> None:
        self._instances.close()

    async def _play(
        self, env: Confined[Any], task: Task, agent: Agent, rewards: list[float]
    ) -> None:
        """Turns until the environment says it is over; what each earned goes into `rewards`."""
        seed, options = task.columns.get("seed"), task.columns.get("options")
        seen, _info = await env.run(lambda env: env.reset(seed=seed, options=options))
        messages = _with_observation(task, self._text(seen))
        while True:
            reply = await agent.chat(messages)
            told = await env.run(functools.partial(self._step, text=reply.text))
            if isinstance(told, ValueError):
                rewards.append(self._invalid_reward)
                words = f"That is no action: {told}."
            else:
                seen, reward, terminated, truncated, _info = told
                rewards.append(float(reward))
                if terminated or truncated:
                    return
                words = self._text(seen)
            messages = [*messages, reply, {"role": "user", "content": words}]

    def _step(self, env: Any, *, text: str) -> Any:
        """What env.step gives, or what is wrong with the action. Runs in the thread of env."""
        try:
            action = (self._read or functools.partial(_action, env.action_space))(text)
        except ValueError as error:
            return error
        if not env.action_space.contains(action):
            return ValueError(f"{action!r} is not in {env.action_space}")
        return env.step(action)

    def _text(self, seen: Any) -> str:
        text = seen if self._render is None else self._render(seen)
        if not isinstance(text, str):
            raise TaskError(
                f"Environment {self.__name__!r} was to show {text!r:.60} of type"
                f" {type(text).__name__}; pass render=, a function that makes a text of it."
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
    """For spaces that say themselves what a text means."""
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        return text.strip()
    if isinstance(space, spaces.Discrete):
        numbers = re.findall(r"-?\d+", text)
        if not numbers:
            raise ValueError(f"there is no number in {text[:80]!r}")
        return int(numbers[-1])
    raise TaskError(f"Actions are {space}; pass read=, a function that makes one of a reply.")


def _with_observation(task: Task, text: str) -> list[Message]:
    """The task's prompt, and below it what is seen at first."""
    *before, last = messages_of(task.prompt)
    if last["role"] != "user":
        return [*before, last, {"role": "user", "content": text}]
    return [*before, {**last, "content": f"{last['content']}\n\n{text}"}]
