"""The simplest environment: one prompt, one completion."""

from dataclasses import dataclass

from millrace.core.protocols import Agent
from millrace.core.records import Episode, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleTurn:
    async def play(self, task: Task, agent: Agent, n: int) -> list[Episode]:
        """n episodes of the task; they share the prompt's prefill."""
        replies = await agent.complete(task.prompt, n)
        return [Episode(turns=(turn,), rollouts=(rollout,)) for turn, rollout in replies]
