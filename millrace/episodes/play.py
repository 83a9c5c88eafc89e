"""One episode while it is played: what it has used of its turns, context and time, and what
happened in it so far.

Promise: an episode that has come to a limit is marked with it, and nothing more is sampled for it,
however often its environment asks. Belongs to one event loop, that of the environments.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from millrace.core.errors import TaskError
from millrace.core.records import Completion, Ending, Sampling, Turn


class EpisodeOver(Exception):
    """The episode has come to a limit. An environment may let it pass, or catch it to return a
    reward."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(f"the episode has ended: {ending}")
        self.ending = ending


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    max_turns: int = 32  # of all agents together
    episode_timeout_s: float | None = None
    turn_timeout_s: float | None = None
    tool_timeout_s: float = 30.0
    tool_result_chars: int = 16384


class Sample(Protocol):
    """As Policy.sample, from the loop of the environments."""

    def __call__(
        self,
        prompt: np.ndarray,
        *,
        episode: int,
        call: int,
        sampling: Sampling,
        session: str,
        adapter: str | None,
        is_trained: bool,
    ) -> Awaitable[Completion]: ...


class Play:
    def __init__(
        self, *, name: str, index: int, sample: Sample, max_context: int, limits: Limits
    ) -> None:
        self.name = name  # of its group, for messages
        self.index = index  # within the group
        self.limits = limits
        self.turns: list[Turn] = []
        self.counts: Counter[str] = Counter()
        self.ending: Ending = "done"
        self._sample = sample
        self._max_context = max_context
        self._calls = itertools.count()
        self._is_closed = False

    async def sample(
        self,
        prompt: np.ndarray,
        *,
        sampling: Sampling,
        session: str,
        adapter: str | None,
        is_trained: bool,
    ) -> Completion:
        """One turn; raises EpisodeOver."""
        self.check()
        call = next(self._calls)
        if call >= self.limits.max_turns:
            raise self.end("turns")
        if len(prompt) >= self._max_context:
            raise self._too_long(len(prompt))
        limit = asyncio.timeout(self.limits.turn_timeout_s)
        try:
            async with limit:
                return await self._sample(
                    prompt,
                    episode=self.index,
                    call=call,
                    sampling=sampling,
                    session=f"{self.index}/{session}",
                    adapter=adapter,
                    is_trained=is_trained,
                )
        except TimeoutError:
            if not limit.expired():
                raise
            raise self.end("timeout") from None

    def check(self) -> None:
        """Raise EpisodeOver if nothing more may happen."""
        if self._is_closed:
            raise EpisodeOver(self.ending)

    def close(self) -> None:
        self._is_closed = True

    def end(self, ending: Ending) -> EpisodeOver:
        self.ending = ending
        self.close()
        return EpisodeOver(ending)

    def _too_long(self, num_tokens: int) -> Exception:
        """A first prompt that does not fit is the task's fault, a later one the episode's end."""
        if self.turns:
            return self.end("length")
        return TaskError(
            f"{self.name}: its prompt has {num_tokens} tokens, but the context holds"
            f" {self._max_context}; shorten the prompt or raise engine.max_context."
        )
