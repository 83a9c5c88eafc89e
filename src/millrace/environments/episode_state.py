"""The state of one running episode: its agents, the turns and time it used, and its event log.

Promise: an episode that reached a limit is marked with that limit, and nothing more is sampled for
it. Entries of the log are in the order in which they ended, and numbered in the order in which they
began. An environment that gets the same answers in the same order therefore makes the same
requests, even if its calls run concurrently. Runs on the event loop of the environments.
"""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from millrace.cluster.messages import TurnWanted
from millrace.core.errors import TaskError
from millrace.core.records import Completion, Ending, Prompt, Rollout, Sampling, Turn
from millrace.environments.agent import Agent
from millrace.environments.replay.schema import (
    AgentRow,
    CutRow,
    Entry,
    EpisodeOver,
    EpisodeSettings,
    ToolRow,
    TurnRow,
)
from millrace.environments.rollouts.renderer import EncodedPrompt, RoleModel
from millrace.environments.token_record import Exchange, first_routed, places_of
from millrace.environments.tools.calls import ToolCall
from millrace.environments.tools.functions import Tool, ToolResult, run_tool

Sample = Callable[..., Coroutine[Any, Any, Completion]]  # with the signature of GroupPolicy.sample
RunTool = Callable[..., Awaitable[ToolResult]]  # with the signature of run_tool

# About 4,000 tokens. A tool that returns a whole file must not fill the context.
TOOL_RESULT_CHARS = 16384
STORABLE_INTS = range(-(2**63), 2**64)
# Numbers of the tool calls that the running code is part of.
_ENCLOSING_TOOLS: ContextVar[tuple[int, ...]] = ContextVar("_ENCLOSING_TOOLS", default=())


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
        self.agents: dict[str, Agent] = {}  # by role; the environment gets the unnamed one
        self._ended: list[Entry] = []
        self._open: dict[int, CutRow | ToolRow] = {}  # as they are logged if they never end; by id
        self._turn_numbers: dict[Exchange, int] = {}  # in the order in which the turns ended
        self._calls, self._tool_calls = itertools.count(), itertools.count()
        self._tools_with_turns: set[int] = set()
        self._is_closed = False
        self.time_limit = asyncio.timeout(self.limits.episode_timeout_s)  # encloses the environment

    def expire(self) -> None:
        """Make the episode time out now."""
        self.time_limit.reschedule(asyncio.get_running_loop().time())

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

    @property
    def entries(self) -> list[Entry]:
        """The event log; entries that have not ended come last."""
        return [*self._ended, *self._open.values()]

    @contextlib.contextmanager
    def _entry(self, unfinished: CutRow | ToolRow) -> Iterator[Callable[[Entry], None]]:
        """Log what the yielded function receives, or `unfinished` if it is never called."""
        self._open[id(unfinished)] = unfinished
        logged: list[Entry] = []
        try:
            yield logged.append
        except EpisodeOver as over:
            if isinstance(unfinished, CutRow):
                logged.append(msgspec.structs.replace(unfinished, ending=over.ending))
            raise
        finally:
            del self._open[id(unfinished)]
            self._ended += logged or [unfinished]

    def rollouts(self, *, with_places: bool = False) -> tuple[Rollout, ...]:
        places = places_of(self._turn_numbers) if with_places else None
        return tuple(r for agent in self.agents.values() for r in agent.rollouts(places))

    async def turn(
        self,
        encoded: EncodedPrompt,
        *,
        agent: Agent,
        prompt: Prompt,
        sampling: Sampling,
        session: str | None = None,
        pinned: bool = False,
    ) -> Exchange:
        """Sample a reply to `prompt`; raise EpisodeOver at a limit. `session`: None = its own."""
        self.check()
        prompt = _storable(prompt)
        number = next(self._calls)
        if number >= self.limits.max_turns:
            raise self.end("turns")
        tokens, row = encoded.tokens, agent.row
        if len(tokens) >= self.models[row.model].row.max_context:
            raise self._too_long(len(tokens), row)
        self._tools_with_turns.update(_ENCLOSING_TOOLS.get())
        with self._entry(CutRow(number=number, agent=row.name, ending=None)) as finish:
            wanted = TurnWanted(
                prompt=tokens,
                call=number,
                sampling=sampling,
                session=f"{self.root}/{row.name if session is None else session}",
                adapter=row.adapter,
                model=row.model,
                is_trained=row.is_trained,
                pinned=pinned,
                routes_from=first_routed(encoded.start),
            )
            completion = await self._sample_in_time(wanted)
            self._check_kept(completion, sampling, agent=row)
            exchange = agent.record.add(
                encoded.given,
                completion,
                sampling=sampling,
                parent=encoded.parent,
                at=encoded.at,
            )
            self._turn_numbers[exchange] = number
            finish(
                TurnRow(
                    number=number,
                    agent=row.name,
                    prompt=prompt,
                    parent=exchange.parent and self._turn_numbers[exchange.parent],
                    start=exchange.start,
                    given=exchange.given,
                    completion=completion,
                    sampling=sampling,
                )
            )
        text, ending = completion.text, completion.finish
        self.turns.append(Turn(prompt=prompt, completion=text, finish=ending, agent=row.name))
        return exchange

    def _check_kept(self, completion: Completion, sampling: Sampling, *, agent: AgentRow) -> None:
        if agent.is_trained and sampling.truncates and completion.kept is None:
            raise TaskError(
                f"{self.settings.name}: a reply sampled with top_k, top_p or min_p cannot be"
                " trained, because this engine.type does not report the ids that they kept; leave"
                " them out, or take a role with trained=False."
            )

    async def _sample_in_time(self, wanted: TurnWanted) -> Completion:
        limit = asyncio.timeout(self.limits.turn_timeout_s)
        try:
            async with limit:
                return await self.sample(wanted, episode=self.settings.index)
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
        number, timeout_s = next(self._tool_calls), self.limits.tool_timeout_s
        row = ToolRow(number=number, name=call.name, arguments=dict(call.arguments), text=None)
        enclosing = _ENCLOSING_TOOLS.set((*_ENCLOSING_TOOLS.get(), number))
        try:
            with self._entry(row) as finish:
                result = await self.run_tool(
                    tools[call.name],
                    call.arguments,
                    timeout_s=timeout_s,
                    max_chars=TOOL_RESULT_CHARS,
                )
                has_turns = number in self._tools_with_turns
                ended = {"text": result.text, "fault": result.fault, "has_turns": has_turns}
                finish(msgspec.structs.replace(row, **ended))
        finally:
            _ENCLOSING_TOOLS.reset(enclosing)
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


def _storable(value: Any) -> Any:
    """Return a prompt with integers of more than 64 bits as text, because the journal and other
    processes cannot hold them. A model may write any number into a tool call."""
    match value:
        case list():
            return [_storable(row) for row in value]
        case dict():
            return {key: _storable(row) for key, row in value.items()}
        case int() if value not in STORABLE_INTS:
            return str(value)
    return value
