"""The event log of one episode: the turns of the model and the tool results, in order.

Together with the episode's seed, these events determine what a deterministic environment does.

Promise: entries are in the order in which they ended, and numbered in the order in which they
began. An environment that gets the same answers in the same order therefore makes the same
requests, even if several of its calls run concurrently. Used from the event loop of the
environments.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import msgspec

from millrace.core.records import Prompt
from millrace.environments.limits import EpisodeOver
from millrace.environments.replay.schema import CutRow, ToolRow
from millrace.environments.token_record import Exchange
from millrace.environments.tools.functions import ToolResult


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FinishedTurn:
    number: int  # of turns, in the order in which they began
    agent: str
    prompt: Prompt
    exchange: Exchange


Event = FinishedTurn | CutRow | ToolRow

# Numbers of the tool calls that the running code is part of.
_ENCLOSING_TOOLS: ContextVar[tuple[int, ...]] = ContextVar("_ENCLOSING_TOOLS", default=())


class EventLog:
    def __init__(self) -> None:
        self._ended: list[Event] = []
        self._open: dict[int, CutRow | ToolRow] = {}  # as they are logged if they never end
        self._keys = itertools.count()
        self._tool_numbers = itertools.count()
        self._tools_with_turns: set[int] = set()

    @property
    def events(self) -> list[Event]:
        """All events; those that have not ended come last."""
        return [*self._ended, *self._open.values()]

    def places(self) -> dict[Exchange, int]:
        """Return the number of tokens that the episode sampled before each exchange."""
        turns = [event.exchange for event in self._ended if isinstance(event, FinishedTurn)]
        sizes = [len(exchange.completion.tokens) for exchange in turns]
        return dict(zip(turns, itertools.accumulate(sizes, initial=0), strict=False))

    @contextlib.contextmanager
    def turn(self, number: int, *, agent: str) -> Iterator[Callable[[FinishedTurn], None]]:
        """Enclose a turn; the yielded function logs that it finished."""
        self._tools_with_turns.update(_ENCLOSING_TOOLS.get())
        with self._begun(CutRow(number=number, agent=agent, ending=None)) as log:
            try:
                yield log
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
    def _begun(self, unfinished: CutRow | ToolRow) -> Iterator[Callable[[Event], None]]:
        """Log what the yielded function receives, or `unfinished` if it is never called."""
        key = next(self._keys)
        self._open[key] = unfinished
        logged: list[Event] = []
        try:
            yield logged.append
        finally:
            del self._open[key]
            self._ended += logged or [unfinished]
