"""A reward function as a Scorer: what of a group it is shown, and what its failures are called.

Promise: whatever the function does, the group gets rewards or one ScoreError sentence.
"""

from millrace.cluster.messages import ScoreGroup
from millrace.core.errors import ScoreError, WorkerError
from millrace.core.records import Episode, Group, Message, Prompt, Verdict
from millrace.scoring.functions import RewardFunction
from millrace.scoring.workers import ScorerWorkers


class FunctionScorer:
    """A reward function that runs in the scorer processes."""

    def __init__(
        self, function: RewardFunction, *, weight: float, timeout_s: float, workers: ScorerWorkers
    ) -> None:
        self.name = function.name
        self.weight = weight
        self.timeout_s = timeout_s
        self._is_async = function.is_async
        self._workers = workers

    async def score(self, group: Group) -> list[Verdict]:
        message = _message(self.name, group)
        alone = not self._is_async
        try:
            scored = await self._workers.call(message, alone=alone, timeout_s=self.timeout_s)
        except TimeoutError:
            raise ScoreError(
                f"Reward {self.name!r} took longer than {self.timeout_s:g} s on group"
                f" {group.number}; make it faster, or raise its timeout_s."
            ) from None
        except WorkerError as error:
            failure = ScoreError(
                f"Reward {self.name!r} lost its process on group {group.number}: {error}"
            )
            failure.add_note(error.traceback)  # or the end of its log
            raise failure from None
        except ScoreError as error:
            failure = ScoreError(f"{str(error).rstrip('.')} (group {group.number}).")
            for note in getattr(error, "__notes__", ()):  # the worker's traceback
                failure.add_note(note)
            raise failure from None
        return [Verdict(score=reward) for reward in scored.rewards]


def _message(function: str, group: Group) -> ScoreGroup:
    """The group as the TRL signature shows it: one entry per episode in every list."""
    prompt = group.task.prompt
    num_episodes = len(group.episodes)
    return ScoreGroup(
        function=function,
        prompts=[prompt] * num_episodes,
        completions=[_completion(episode, prompt) for episode in group.episodes],
        completion_ids=[_sampled_ids(episode) for episode in group.episodes],
        columns={name: [value] * num_episodes for name, value in group.task.columns.items()},
    )


def _completion(episode: Episode, prompt: Prompt) -> Prompt:
    """Of a chat all messages after the task's own, which may be several turns."""
    turn = episode.turns[-1]
    if isinstance(prompt, str):
        return turn.completion
    messages = [*(turn.prompt if not isinstance(turn.prompt, str) else [])]
    begins = messages[: len(prompt)] == prompt
    said: list[Message] = [{"role": "assistant", "content": turn.completion}]
    return [*messages[len(prompt) :], *said] if begins else said


def _sampled_ids(episode: Episode) -> list[int]:
    rollout = episode.rollouts[-1]
    return rollout.tokens[rollout.mask].tolist()
