"""What happened between an environment and the world, in order: the model's turns and the results
of tools. With the episode's seed that is all that its course depends on.

Promise: entries stand in the order in which they ended, numbered by the order in which they began.
So a coroutine that is given the same answers in the same order asks the same again, also where
several of its calls are under way at once. Belongs to one event loop, that of the environments.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

from millrace.core.records import Ending, Prompt
from millrace.environments.limits import EpisodeOver
from millrace.environments.token_record import Exchange
from millrace.environments.tools.functions import ToolResult


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TakenTurn:
    number: int  # of the turns, by their beginning
    agent: str
    prompt: Prompt
    exchange: Exchange


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CutTurn:
    """Begun, and never answered: its environment did not wait for it, or the time was up."""

    number: int
    agent: str
    ending: Ending | None  # to which it brought the episode


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ToolRun:
    number: int  # of the calls of tools, by their beginning
    name: str
    arguments: Mapping[str, Any]
    result: ToolResult | None  # None = it was not waited for
    has_turns: bool = False  # an agent spoke within: it comes to the same result only with these


Entry = TakenTurn | CutTurn | ToolRun

# The calls of tools that the running code is part of.
_WITHIN: ContextVar[tuple[int, ...]] = ContextVar("_WITHIN", default=())


class NoteTurn(Protocol):
    def __call__(self, exchange: Exchange, *, prompt: Prompt) -> None: ...


class Tape:
    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._open: dict[int, CutTurn | ToolRun] = {}  # what has begun, as if it never ended
        self._begun = itertools.count()
        self._tool_calls = itertools.count()
        self._spoken_within: set[int] = set()  # numbers of calls of tools

    @property
    def entries(self) -> list[Entry]:
        """Those that are still under way come last."""
        return [*self._entries, *self._open.values()]

    def places(self) -> dict[Exchange, int]:
        """How many tokens were sampled in the episode before each exchange."""
        turns = [entry.exchange for entry in self._entries if isinstance(entry, TakenTurn)]
        sizes = [len(exchange.completion.tokens) for exchange in turns]
        return dict(zip(turns, itertools.accumulate(sizes, initial=0), strict=False))

    @contextlib.contextmanager
    def turn(self, number: int, *, agent: str) -> Iterator[NoteTurn]:
        """To be told of the exchange within."""
        self._spoken_within.update(_WITHIN.get())
        with self._entered(CutTurn(number=number, agent=agent, ending=None)) as enter:

            def note(exchange: Exchange, *, prompt: Prompt) -> None:
                enter(TakenTurn(number=number, agent=agent, prompt=prompt, exchange=exchange))

            try:
                yield note
            except EpisodeOver as over:
                enter(CutTurn(number=number, agent=agent, ending=over.ending))
                raise

    @contextlib.contextmanager
    def tool(
        self, name: str, arguments: Mapping[str, Any]
    ) -> Iterator[Callable[[ToolResult], None]]:
        """To be told of its result within."""
        call = ToolRun(number=next(self._tool_calls), name=name, arguments=arguments, result=None)

        def note(result: ToolResult) -> None:
            has_turns = call.number in self._spoken_within
            enter(replace(call, result=result, has_turns=has_turns))

        within = _WITHIN.set((*_WITHIN.get(), call.number))
        try:
            with self._entered(call) as enter:
                yield note
        finally:
            _WITHIN.reset(within)

    @contextlib.contextmanager
    def _entered(self, cut: CutTurn | ToolRun) -> Iterator[Callable[[Entry], None]]:
        key = next(self._begun)
        self._open[key] = cut
        entries: list[Entry] = []
        try:
            yield entries.append
        finally:
            del self._open[key]
            self._entries += entries or [cut]
