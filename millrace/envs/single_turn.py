"""The simplest environment: one prompt, one completion."""

from dataclasses import dataclass

from millrace.core.protocols import Policy
from millrace.core.records import Episode, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleTurn:
    async def play(self, task: Task, policy: Policy, n: int) -> list[Episode]:
        """n episodes of the task; they share the prompt's prefill."""
        replies = await policy.complete(task.prompt, n)
        episodes = [Episode(turns=(turn,), rollouts=(rollout,)) for turn, rollout in replies]
        for index, episode in enumerate(episodes):
            policy.finished(index, episode)
        return episodes
