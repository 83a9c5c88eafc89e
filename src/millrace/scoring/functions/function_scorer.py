"""The scorer type of reward functions: the user's own functions, and the built-in verifiers.

Promise: whatever the function does, the group gets rewards or one ScoreError.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.cluster.messages import ScoreGroup
from millrace.core.errors import ScoreError, TransientScoreError, WorkerError
from millrace.core.records import Episode, Group, Message, Prompt, ScorerResult, Task
from millrace.scoring.functions.user_function import (
    RewardFunction,
    inspect_reward,
    resolve_function,
)
from millrace.scoring.functions.workers import CALLS_PER_WORKER, ScorerWorkers
from millrace.scoring.scorer_type import CallSettings, ScorerContext


@dataclass(frozen=True, kw_only=True)
class Function:
    """A reward function with the TRL signature."""

    function: str | Callable[..., Any]  # "module:name", or the callable itself

    @property
    def default_name(self) -> str:
        function = resolve_function(self.function)
        return getattr(function, "__name__", type(function).__name__).strip("<>")

    def call_settings(self, *, num_workers: int) -> CallSettings:
        # One call per group: the function may compare its completions. One retry: a process may
        # die for a reason that is not the function's.
        calls_per_worker = CALLS_PER_WORKER if self.inspect(name="").is_async else 1
        concurrency = num_workers * calls_per_worker
        return CallSettings(concurrency=concurrency, batch=0, retries=1, breaker_failures=0)

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        self.inspect(name=name).check_columns(tasks)

    def build(
        self, *, name: str, weight: float, calls: CallSettings, context: ScorerContext
    ) -> "FunctionScorer":
        context.functions[name] = self.function
        is_async = self.inspect(name=name).is_async
        return FunctionScorer(
            name=name, weight=weight, is_async=is_async, calls=calls, workers=context.workers
        )

    def inspect(self, *, name: str) -> RewardFunction:
        return inspect_reward(resolve_function(self.function), name=name)


@dataclass(kw_only=True, slots=True, eq=False)
class FunctionScorer:
    name: str
    weight: float
    is_async: bool
    calls: CallSettings
    workers: ScorerWorkers
    num_lost: int = 0  # processes that died or were killed in its calls

    async def score(self, group: Group) -> list[ScorerResult]:
        prompt, size = group.task.prompt, len(group.episodes)
        message = ScoreGroup(  # the TRL signature: lists with one entry per episode
            function=self.name,
            prompts=[prompt] * size,
            completions=[completion_of(episode, prompt) for episode in group.episodes],
            completion_ids=list(map(_sampled_ids, group.episodes)),
            columns={name: [value] * size for name, value in group.task.columns.items()},
        )
        try:
            scored = await self.workers.call(
                message, exclusive=not self.is_async, timeout_s=self.calls.timeout_s
            )
        except TimeoutError:
            self.num_lost += 1
            raise ScoreError(
                f"Reward {self.name!r} took longer than {self.calls.timeout_s:g} s on group"
                f" {group.number}; make it faster, or raise its timeout_s."
            ) from None
        except WorkerError as error:
            self.num_lost += 1
            failure = TransientScoreError(
                f"Reward {self.name!r} lost its process on group {group.number}: {error}"
            )
            failure.add_note(error.traceback)  # or the last lines of its log
            raise failure from None
        except ScoreError as error:
            error.args = (f"{str(error).rstrip('.')} (group {group.number}).",)
            raise
        return [ScorerResult(score=reward) for reward in scored.rewards]


def completion_of(episode: Episode, prompt: Prompt) -> Prompt:
    """Return the completion text; for a chat, all messages after those of the task's prompt."""
    text = reply_of(episode)
    if isinstance(prompt, str):
        return text
    asked = episode.turns[-1].prompt if episode.turns else prompt
    messages = [*(asked if not isinstance(asked, str) else [])]
    starts_with_prompt = messages[: len(prompt)] == prompt
    reply: list[Message] = [{"role": "assistant", "content": text}]
    return [*messages[len(prompt) :], *reply] if starts_with_prompt else reply


def reply_of(episode: Episode) -> str:
    """The text of the last reply; "" if an episode of an evaluation reached a limit before one."""
    return episode.turns[-1].completion if episode.turns else ""


def _sampled_ids(episode: Episode) -> list[int]:
    """The sampled tokens of the last rollout; an evaluated episode may have none."""
    return [id for rollout in episode.rollouts[-1:] for id in rollout.tokens[rollout.mask].tolist()]
