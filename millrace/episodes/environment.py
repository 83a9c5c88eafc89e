"""A user's coroutine as an environment: it is given a task and an agent, and returns a reward.

    async def guess(task, agent):
        reply = await agent.chat([{"role": "user", "content": task.prompt}])
        return float(reply.text == task.columns["answer"])

Promise: it runs n times side by side for each group, on a thread of its own. An episode that comes
to a limit is marked and ends, whatever its environment does; one whose environment raises is left
out. A group needs n episodes that are not: `redundancy` more are begun, and those that come last
are given up.
"""

import asyncio
import inspect
from dataclasses import dataclass, field
from typing import Any

from millrace.config import EnvironmentConfig
from millrace.core.errors import ConfigError, TaskError
from millrace.core.protocols import Policy
from millrace.core.records import Episode, Task
from millrace.episodes.cast import Cast
from millrace.episodes.conversation import History
from millrace.episodes.limits import Limits
from millrace.episodes.loop_thread import LoopThread, on_loop
from millrace.episodes.performing import EnvironmentFunction, name_of, perform
from millrace.episodes.play import Play
from millrace.episodes.tool_calls import ToolFormatName, format_of
from millrace.rollout.renderer import Renderer


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How episodes are played and when they end."""

    limits: Limits = field(default_factory=Limits)
    redundancy: int = 0  # further episodes of a group in training, of which the last are given up
    ended_reward: float = 0.0  # of an episode that came to a limit
    tool_format: ToolFormatName = "auto"
    history: History = "template"
    records: bool = False  # what happened is kept, so that it can be replayed


def rules_of(settings: EnvironmentConfig, *, redundancy: int, records: bool = False) -> Rules:
    return Rules(
        limits=Limits(
            max_turns=settings.max_turns,
            episode_timeout_s=settings.episode_timeout_s,
            turn_timeout_s=settings.turn_timeout_s,
            tool_timeout_s=settings.tool_timeout_s,
            tool_result_chars=settings.tool_result_chars,
        ),
        redundancy=redundancy,
        ended_reward=settings.ended_reward,
        tool_format=settings.tool_format,
        history=settings.history,
        records=records,
    )


class FunctionEnvironment:
    """core.protocols.Environment. play() is called from the controller's event loop."""

    def __init__(
        self,
        function: EnvironmentFunction,
        *,
        renderer: Renderer,
        rules: Rules,
        thread: LoopThread,
    ) -> None:
        self._function = function
        self._renderer = renderer
        self._rules = rules
        self._thread = thread
        self._format = format_of(rules.tool_format, template=renderer.chat_template)

    async def play(self, task: Task, policy: Policy, n: int) -> list[Episode]:
        num_begun = n + (self._rules.redundancy if policy.is_trained else 0)
        running = {
            asyncio.create_task(self._episode(task, policy, index)): index
            for index in range(num_begun)
        }
        finished: dict[int, Episode] = {}
        try:
            while len(finished) < n:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                failures: list[TaskError] = []
                for index, ended in sorted((running.pop(ended), ended) for ended in done):
                    try:
                        finished[index] = ended.result()
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
        return [finished[index] for index in sorted(finished)][:n]

    async def _episode(self, task: Task, policy: Policy, index: int) -> Episode:
        """From the controller's loop to that of the environments, and for each sample back."""
        home = asyncio.get_running_loop()
        play = Play(
            name=policy.name,
            index=index,
            sample=lambda prompt, **settings: on_loop(home, policy.sample(prompt, **settings)),
            max_context=policy.max_context,
            limits=self._rules.limits,
            seed=policy.seed,
        )
        cast = Cast(
            play,
            renderer=self._renderer,
            history=self._rules.history,
            tool_format=self._format,
            sampling=policy.sampling,
        )
        episode = await self._thread.run(
            perform(
                self._function,
                task,
                play=play,
                cast=cast,
                ended_reward=self._rules.ended_reward,
                records=self._rules.records,
            )
        )
        if not episode.rollouts and policy.is_trained:
            raise TaskError(
                f"{policy.name}: episode {index} of environment {name_of(self._function)!r} ended"
                f" ({play.ending}) before the model had said anything to be trained on; call"
                " agent.chat or agent.complete."
            )
        return episode


def check_function(function: Any) -> EnvironmentFunction:
    """Raise ConfigError unless it can be called as an environment."""
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - of an object that can be called
    )
    if not is_async:
        raise ConfigError(
            f"Environment {name_of(function)!r} is no coroutine; define it with `async def"
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
