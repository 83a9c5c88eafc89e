"""A reward function as a Scorer: what of a group it is shown, and what its failures are called.

Promise: whatever the function does, the group gets rewards or one ScoreError sentence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.cluster.messages import ScoreGroup
from millrace.core.errors import ScoreError, TransientScoreError, WorkerError
from millrace.core.records import Episode, Group, Message, Prompt, Task, Verdict
from millrace.scoring.functions.handover import resolve_function
from millrace.scoring.functions.signature import inspect_reward
from millrace.scoring.functions.workers import CALLS_PER_WORKER, ScorerWorkers
from millrace.scoring.scorer_kind import CallRules, ScorerTools


@dataclass(frozen=True, kw_only=True)
class Function:
    """The kind of scorer that is a reward function, the user's or a ready verifier."""

    function: str | Callable[..., Any]  # "module:name", or the thing itself

    @property
    def default_name(self) -> str:
        function = resolve_function(self.function)
        return getattr(function, "__name__", type(function).__name__).strip("<>")

    def rules(self, *, num_workers: int) -> CallRules:
        """It may compare a group, so it sees all of it. What it raises, it would raise again; but a
        process may be lost for a reason that is not the function's."""
        is_async = inspect_reward(resolve_function(self.function), name="").is_async
        per_worker = CALLS_PER_WORKER if is_async else 1
        concurrency = num_workers * per_worker
        return CallRules(concurrency=concurrency, batch=0, retries=1, breaker_failures=0)

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        inspect_reward(resolve_function(self.function), name=name).check_columns(tasks)

    def make(
        self, *, name: str, weight: float, rules: CallRules, tools: ScorerTools
    ) -> "FunctionScorer":
        tools.functions[name] = self.function
        return FunctionScorer(
            name,
            weight=weight,
            is_async=inspect_reward(resolve_function(self.function), name=name).is_async,
            rules=rules,
            workers=tools.workers,
        )


class FunctionScorer:
    """A reward function that runs in the scorer processes."""

    def __init__(
        self, name: str, *, weight: float, is_async: bool, rules: CallRules, workers: ScorerWorkers
    ) -> None:
        self.name = name
        self.weight = weight
        self._is_async = is_async
        self._rules = rules
        self._workers = workers

    async def score(self, group: Group) -> list[Verdict]:
        message = _message(self.name, group)
        try:
            scored = await self._workers.call(
                message,
                exclusive=not self._is_async,
                timeout_s=self._rules.timeout_s,
                priority=self._rules.priority,
            )
        except TimeoutError:
            raise ScoreError(
                f"Reward {self.name!r} took longer than {self._rules.timeout_s:g} s on group"
                f" {group.number}; make it faster, or raise its timeout_s."
            ) from None
        except WorkerError as error:
            failure = TransientScoreError(
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
        completions=[completion_of(episode, prompt) for episode in group.episodes],
        completion_ids=[_sampled_ids(episode) for episode in group.episodes],
        columns={name: [value] * num_episodes for name, value in group.task.columns.items()},
    )


def completion_of(episode: Episode, prompt: Prompt) -> Prompt:
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
