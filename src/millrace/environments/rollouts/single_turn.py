"""The simplest environment: one prompt, one completion.

The environment of a run that has none: one prompt, one completion, judged by the scorers.
"""

from dataclasses import dataclass

from millrace.core.protocols import Policy
from millrace.core.records import Episode, Rollout, Task, Turn
from millrace.environments.agent import Agent


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleTurn:
    async def play(self, task: Task, policy: Policy, n: int) -> list[Episode]:
        """n episodes of the task; they share the prompt's prefill."""
        episodes: dict[int, Episode] = {}

        def end(index: int, turn: Turn, rollout: Rollout) -> None:
            episodes[index] = Episode(turns=(turn,), rollouts=(rollout,))
            policy.finished(index, episodes[index])

        await policy.complete(task.prompt, n, on_reply=end)
        return [episodes[index] for index in range(n)]


async def answer(task: Task, agent: Agent) -> None:
    if isinstance(task.prompt, str):
        await agent.complete(task.prompt)
    else:
        await agent.chat(task.prompt)
