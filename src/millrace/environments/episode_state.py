"""The state of one running episode: its agents, the turns and time it used, and its event log.

Promise: an episode that reached a limit is marked with that limit, and nothing more is sampled for
it, however often its environment asks. Entries of the log are in the order in which they ended, and
numbered in the order in which they began. An environment that gets the same answers in the same
order therefore makes the same requests, even if several of its calls run concurrently. Runs on the
event loop of the environments.
"""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from millrace.core.errors import TaskError
from millrace.core.records import Completion, Ending, Prompt, Rollout, Sampling, Turn
from millrace.environments.agent import Agent
from millrace.environments.conversation import Beginning
from millrace.environments.limits import EpisodeOver
from millrace.environments.replay.schema import (
    AgentRow,
    CutRow,
    Entry,
    EpisodeSettings,
    ToolRow,
    TurnRow,
)
from millrace.environments.role_models import RoleModel
from millrace.environments.token_record import Exchange, first_routed
from millrace.environments.tools.calls import ToolCall
from millrace.environments.tools.functions import Tool, ToolResult, run_tool

Sample = Callable[..., Coroutine[Any, Any, Completion]]  # with the signature of Policy.sample
RunTool = Callable[..., Awaitable[ToolResult]]  # with the signature of run_tool

# About 4,000 tokens. A tool that returns a whole file must not fill the context.
TOOL_RESULT_CHARS = 16384
# Numbers of the tool calls that the running code is part of.
_ENCLOSING_TOOLS: ContextVar[tuple[int, ...]] = ContextVar("_ENCLOSING_TOOLS", default=())


class EventLog:
    def __init__(self) -> None:
        self._ended: list[Entry] = []
        self._numbers: dict[Exchange, int] = {}  # of turns, in the order in which they ended
        self._open: dict[int, CutRow | ToolRow] = {}  # as they are logged if they never end
        self._keys = itertools.count()
        self._tool_numbers = itertools.count()
        self._tools_with_turns: set[int] = set()

    @property
    def entries(self) -> list[Entry]:
        """All entries; those that have not ended come last."""
        return [*self._ended, *self._open.values()]

    def places(self) -> dict[Exchange, int]:
        """Return the number of tokens that the episode sampled before each exchange."""
        sizes = [len(exchange.completion.tokens) for exchange in self._numbers]
        return dict(zip(self._numbers, itertools.accumulate(sizes, initial=0), strict=False))

    @contextlib.contextmanager
    def turn(self, number: int, *, agent: str) -> Iterator[Callable[[Prompt, Exchange], None]]:
        """Enclose a turn; the yielded function logs that it finished."""

        def finish(prompt: Prompt, exchange: Exchange) -> None:
            self._numbers[exchange] = number
            log(
                TurnRow(
                    number=number,
                    agent=agent,
                    prompt=prompt,
                    parent=None if exchange.parent is None else self._numbers[exchange.parent],
                    start=exchange.start,
                    given=exchange.given,
                    completion=exchange.completion,
                    sampling=exchange.sampling,
                )
            )

        self._tools_with_turns.update(_ENCLOSING_TOOLS.get())
        with self._begun(CutRow(number=number, agent=agent, ending=None)) as log:
            try:
                yield finish
            except EpisodeOver as over:
                log(CutRow(number=number, agent=agent, ending=over.ending))
                raise

    @contextlib.contextmanager
    def tool(
        self, name: str, arguments: Mapping[str, Any]
    ) -> Iterator[Callable[[ToolResult], None]]:
        """Enclose a tool call; the yielded function logs its result."""
        number = next(self._tool_numbers)
        call = ToolRow(number=number, name=name, arguments=dict(arguments), text=None)

        def finish(result: ToolResult) -> None:
            has_turns = number in self._tools_with_turns
            changes = {"text": result.text, "fault": result.fault, "has_turns": has_turns}
            log(msgspec.structs.replace(call, **changes))

        outer = _ENCLOSING_TOOLS.set((*_ENCLOSING_TOOLS.get(), number))
        try:
            with self._begun(call) as log:
                yield finish
        finally:
            _ENCLOSING_TOOLS.reset(outer)

    @contextlib.contextmanager
    def _begun(self, unfinished: CutRow | ToolRow) -> Iterator[Callable[[Entry], None]]:
        """Log what the yielded function receives, or `unfinished` if it is never called."""
        key = next(self._keys)
        self._open[key] = unfinished
        logged: list[Entry] = []
        try:
            yield logged.append
        finally:
            del self._open[key]
            self._ended += logged or [unfinished]


@dataclass(eq=False)
class EpisodeState:
    settings: EpisodeSettings
    _: KW_ONLY
    models: Mapping[str | None, RoleModel]  # by name; None = the policy
    sample: Sample
    root: int  # episode whose KV it reuses: itself, or the root of its tree
    run_tool: RunTool = run_tool

    def __post_init__(self) -> None:
        self.limits = self.settings.limits
        self.turns: list[Turn] = []
        self.counts: Counter[str] = Counter()
        self.ending: Ending = "done"
        self.log = EventLog()
        self.agents: dict[str, Agent] = {}  # by role; the environment gets the unnamed one
        self._calls = itertools.count()
        self._is_closed = False
        self._time_limit: asyncio.Timeout | None = None

    @contextlib.asynccontextmanager
    async def timed(self) -> AsyncIterator[asyncio.Timeout]:
        """Cancel the enclosed block when the episode's time is up."""
        async with asyncio.timeout(self.limits.episode_timeout_s) as self._time_limit:
            yield self._time_limit

    def expire(self) -> None:
        """Make the episode time out now."""
        assert self._time_limit is not None
        self._time_limit.reschedule(asyncio.get_running_loop().time())

    @cached_property
    def rng(self) -> np.random.Generator:
        """Random generator of the environment; a replay repeats its draws."""
        return np.random.default_rng((self.settings.seed, self.settings.random_index))

    def agent(self, row: AgentRow | None = None) -> Agent:
        """Return the agent with this name, created on first use. None = the unnamed one."""
        row = row or AgentRow()
        found = self.agents.get(row.name)
        if found is None:
            found = self.agents[row.name] = Agent(self, row)
        known = found.row
        if known != row:
            raise TaskError(
                f"The role {row.name!r} exists with adapter = {known.adapter!r}, model ="
                f" {known.model!r} and trained = {known.is_trained}; pass the same arguments every"
                " time."
            )
        return found

    def rollouts(self, *, with_places: bool = False) -> tuple[Rollout, ...]:
        places = self.log.places() if with_places else None
        return tuple(r for agent in self.agents.values() for r in agent.rollouts(places))

    async def turn(
        self,
        beginning: Beginning,
        *,
        agent: Agent,
        prompt: Prompt,
        sampling: Sampling,
        session: str | None = None,
        pinned: bool = False,
    ) -> Exchange:
        """Sample a reply to `prompt` with the tokens `beginning`; raise EpisodeOver at a limit.
        `session`: by default that of the agent."""
        self.check()
        number = next(self._calls)
        if number >= self.limits.max_turns:
            raise self.end("turns")
        tokens, row = beginning.tokens, agent.row
        if len(tokens) >= self.models[row.model].row.max_context:
            raise self._too_long(len(tokens), row)
        with self.log.turn(number, agent=row.name) as finish:
            completion = await self._sample_in_time(
                tokens,
                episode=self.settings.index,
                call=number,
                sampling=sampling,
                session=f"{self.root}/{row.name if session is None else session}",
                adapter=row.adapter,
                model=row.model,
                is_trained=row.is_trained,
                pinned=pinned,
                routes_from=first_routed(beginning.start),
            )
            exchange = agent.record.add(
                beginning.given,
                completion,
                sampling=sampling,
                parent=beginning.parent,
                at=beginning.at,
            )
            finish(prompt, exchange)
        text, ending = completion.text, completion.finish
        self.turns.append(Turn(prompt=prompt, completion=text, finish=ending, agent=row.name))
        return exchange

    async def _sample_in_time(self, tokens: np.ndarray, **settings: Any) -> Completion:
        limit = asyncio.timeout(self.limits.turn_timeout_s)
        try:
            async with limit:
                return await self.sample(tokens, **settings)
        except TimeoutError:
            if not limit.expired():
                raise
            raise self.end("timeout") from None

    async def call_tool(self, call: ToolCall, tools: Mapping[str, Tool]) -> str:
        self.check()
        self.counts["tool_calls"] += 1
        if call.name not in tools:
            self.counts["tool_errors"] += 1
            return f"Error: there is no tool {call.name!r}; available tools: {', '.join(tools)}."
        with self.log.tool(call.name, call.arguments) as finish:
            result = await self.run_tool(
                tools[call.name],
                call.arguments,
                timeout_s=self.limits.tool_timeout_s,
                max_chars=TOOL_RESULT_CHARS,
            )
            finish(result)
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

    def _too_long(self, num_tokens: int, agent: AgentRow) -> Exception:
        """Return TaskError for a first prompt that does not fit; a later one ends the episode."""
        if self.turns:
            return self.end("length")
        section = "engine" if agent.model is None else f"environment.models.{agent.model}"
        return TaskError(
            f"{self.settings.name}: the prompt has {num_tokens} tokens, but the context holds"
            f" {self.models[agent.model].row.max_context}; shorten the prompt or raise"
            f" {section}.max_context."
        )
