"""The event log of one episode: the turns of the model and the tool results, in order.

Together with the episode's seed, these entries determine what a deterministic environment does.

Promise: entries are in the order in which they ended, and numbered in the order in which they
began. An environment that gets the same answers in the same order therefore makes the same
requests, even if several of its calls run concurrently. Used from the event loop of the
environments.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import msgspec

from millrace.core.records import Prompt
from millrace.environments.limits import EpisodeOver
from millrace.environments.replay.schema import CutRow, Entry, ToolRow, TurnRow
from millrace.environments.token_record import Exchange
from millrace.environments.tools.functions import ToolResult

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
