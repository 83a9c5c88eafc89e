"""The state of one running episode: turns, context and time used, and its event log.

Promise: an episode that reached a limit is marked with that limit, and nothing more is sampled for
it, however often its environment asks. Runs on the event loop of the environments.
"""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from millrace.core.errors import TaskError
from millrace.core.records import Completion, Ending, Prompt, Sampling, Turn
from millrace.environments.conversation import Beginning
from millrace.environments.limits import EpisodeLimits, EpisodeOver
from millrace.environments.tape import Tape
from millrace.environments.token_record import Exchange, TokenRecord, first_routed
from millrace.environments.tools.calls import ToolCall
from millrace.environments.tools.functions import Tool, ToolResult, run_tool


class Sample(Protocol):
    """Policy.sample, called from the loop of the environments."""

    def __call__(
        self,
        prompt: np.ndarray,
        *,
        episode: int,
        call: int,
        sampling: Sampling,
        session: str,
        adapter: str | None,
        model: str | None,
        is_trained: bool,
        pinned: bool,
        routes_from: int,
    ) -> Awaitable[Completion]: ...


class RunTool(Protocol):
    """The signature of tools.functions.run_tool."""

    def __call__(
        self, tool: Tool, arguments: Mapping[str, Any], *, timeout_s: float, max_chars: int
    ) -> Awaitable[ToolResult]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Speaker:
    """The agent that takes a turn, and the model behind it."""

    agent: str
    adapter: str | None
    model: str | None  # a name in environment.models; None = the policy
    max_context: int | None  # of that model; None = the policy's
    is_trained: bool
    record: TokenRecord


class EpisodeState:
    def __init__(
        self,
        *,
        name: str,
        index: int,
        sample: Sample,
        max_context: int,
        limits: EpisodeLimits,
        seed: int = 0,
        family: int | None = None,
        random_index: int | None = None,
        run_tool: RunTool = run_tool,
    ) -> None:
        """`family` is the number of the root episode of a branch, whose KV it reuses;
        `random_index` is the number of the episode whose random draws it repeats."""
        self.name = name  # of the group, for error messages
        self.index = index  # within the group
        self.limits = limits
        self.max_context = max_context
        self.seed = seed  # of the group
        self.random_index = index if random_index is None else random_index
        self.turns: list[Turn] = []
        self.counts: Counter[str] = Counter()
        self.ending: Ending = "done"
        self.tape = Tape()
        self._family = index if family is None else family
        self._sample = sample
        self._run_tool = run_tool
        self._calls = itertools.count()
        self._is_closed = False
        self._limit: asyncio.Timeout | None = None  # time limit of the running episode

    @contextlib.asynccontextmanager
    async def timed(self) -> AsyncIterator[asyncio.Timeout]:
        """Cancel the enclosed block when the episode's time is up."""
        async with asyncio.timeout(self.limits.episode_timeout_s) as self._limit:
            yield self._limit

    def expire(self) -> None:
        """Make the episode time out now."""
        assert self._limit is not None
        self._limit.reschedule(asyncio.get_running_loop().time())

    @cached_property
    def rng(self) -> np.random.Generator:
        """Random generator of the environment; a replay repeats its draws."""
        return np.random.default_rng((self.seed, self.random_index))

    async def turn(
        self,
        beginning: Beginning,
        *,
        speaker: Speaker,
        prompt: Prompt,
        sampling: Sampling,
        session: str,
        pinned: bool = False,
    ) -> Exchange:
        """Sample a reply to `prompt` with the tokens `beginning`; raise EpisodeOver at a limit."""
        self.check()
        call = next(self._calls)
        if call >= self.limits.max_turns:
            raise self.end("turns")
        tokens = beginning.tokens
        if len(tokens) >= (speaker.max_context or self.max_context):
            raise self._too_long(len(tokens), speaker)
        with self.tape.turn(call, agent=speaker.agent) as record:
            completion = await self._sampled(
                tokens,
                call=call,
                speaker=speaker,
                sampling=sampling,
                session=session,
                pinned=pinned,
                routes_from=first_routed(beginning.start),
            )
            exchange = speaker.record.add(
                beginning.given,
                completion,
                sampling=sampling,
                parent=beginning.parent,
                at=beginning.at,
            )
            record(exchange, prompt=prompt)
        turn = Turn(
            prompt=prompt, completion=completion.text, finish=completion.finish, agent=speaker.agent
        )
        self.turns.append(turn)
        return exchange

    async def _sampled(
        self, tokens: np.ndarray, *, call: int, speaker: Speaker, session: str, **settings: Any
    ) -> Completion:
        limit = asyncio.timeout(self.limits.turn_timeout_s)
        try:
            async with limit:
                return await self._sample(
                    tokens,
                    episode=self.index,
                    call=call,
                    session=f"{self._family}/{session}",
                    adapter=speaker.adapter,
                    model=speaker.model,
                    is_trained=speaker.is_trained,
                    **settings,
                )
        except TimeoutError:
            if not limit.expired():
                raise
            raise self.end("timeout") from None

    async def call_tool(self, call: ToolCall, tools: Mapping[str, Tool]) -> str:
        """Run a tool call, and return the result text for the model."""
        self.check()
        self.counts["tool_calls"] += 1
        if call.name not in tools:
            self.counts["tool_errors"] += 1
            return f"Error: there is no tool {call.name!r}; available tools: {', '.join(tools)}."
        with self.tape.tool(call.name, call.arguments) as record:
            result = await self._run_tool(
                tools[call.name],
                call.arguments,
                timeout_s=self.limits.tool_timeout_s,
                max_chars=self.limits.tool_result_chars,
            )
            record(result)
        if result.fault is not None:
            self.counts[result.fault] += 1
        return result.text

    def check(self) -> None:
        """Raise EpisodeOver if the episode has ended."""
        if self._is_closed:
            raise EpisodeOver(self.ending)

    def close(self) -> None:
        self._is_closed = True

    def end(self, ending: Ending) -> EpisodeOver:
        self.ending = ending
        self.close()
        return EpisodeOver(ending)

    def _too_long(self, num_tokens: int, speaker: Speaker) -> Exception:
        """Return TaskError for a first prompt that does not fit; a later one ends the episode."""
        if self.turns:
            return self.end("length")
        section = "engine" if speaker.model is None else f"environment.models.{speaker.model}"
        return TaskError(
            f"{self.name}: the prompt has {num_tokens} tokens, but the context holds"
            f" {speaker.max_context or self.max_context}; shorten the prompt or raise"
            f" {section}.max_context."
        )
