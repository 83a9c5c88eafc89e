"""One scorer's desk: episodes wait in line, a bounded number of calls is in flight, what fails for
the moment is tried again.

Promise: every episode gets a verdict, or its caller one error. While nobody can be asked, calls
wait and none of them is given up: only what fails while others could succeed uses up its retries.
Runs on the controller's event loop. The line is bounded by its callers, admission in the end.
"""

import asyncio
import bisect
import itertools
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.core.errors import RunFailed, ScoreError, TransientScoreError
from millrace.core.protocols import Replaced, Scorer
from millrace.core.records import Episode, Group, Task, Verdict
from millrace.core.spans import ScorerLoad
from millrace.scoring.scheduling.breaker import Breaker
from millrace.scoring.scheduling.usage import ScorerUsage
from millrace.scoring.scorer_kind import CallRules

LONGEST_BACKOFF_S = 30.0
CLOSED = "The scorers are closed; nothing can be scored any more."


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoreTicket:
    """The group that episodes belong to; only those of one ticket share a call."""

    order: int  # in line: what was opened first is served first
    number: int
    task: Task


@dataclass(slots=True, eq=False)
class _Ask:
    """Episodes that one caller wants judged together."""

    episodes: Sequence[Episode]
    answer: asyncio.Future[list[Verdict]]


@dataclass(slots=True, eq=False)
class _ScoreCall:
    ticket: ScoreTicket
    order: int
    asks: list[_Ask] = field(default_factory=list[_Ask])
    num_failed: int = 0  # tries that count
    num_tries: int = 0
    task: asyncio.Task[Any] | None = None  # of the try, or of the pause before the next

    @property
    def episodes(self) -> list[Episode]:
        return [episode for ask in self.asks for episode in ask.episodes]

    def answer(self, verdicts: Sequence[Verdict]) -> None:
        rest = iter(verdicts)
        for ask in self.asks:
            mine = list(itertools.islice(rest, len(ask.episodes)))
            if not ask.answer.done():
                ask.answer.set_result(mine)

    def fail(self, error: Exception) -> None:
        for ask in self.asks:
            if not ask.answer.done():
                ask.answer.set_exception(error)


class ScorerQueue:
    def __init__(
        self,
        scorer: Scorer,
        *,
        rules: CallRules,
        warn: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`draw`: within 0 and 1; the random part of a pause."""
        self.scorer = scorer
        self._rules = rules
        self._warn = warn
        self._sleep = sleep
        self._draw = draw
        self._breaker = Breaker(failures=rules.breaker_failures, open_s=rules.breaker_s, now=now)
        self._usage = ScorerUsage(now=now)
        self._line: list[_ScoreCall] = []  # by order
        self._joinable: dict[ScoreTicket, _ScoreCall] = {}  # in line, and not yet full
        self._calls: set[_ScoreCall] = set()  # in flight, or in the pause before their next try
        self._alarm: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def takes_groups(self) -> bool:
        """It judges all episodes of a group in one call."""
        return self._rules.batch == 0

    async def judge(self, episodes: Sequence[Episode], *, ticket: ScoreTicket) -> list[Verdict]:
        """Raises ScoreError when the scorer cannot do it. Cancelling it withdraws the episodes."""
        if self._is_closed:
            raise RunFailed(CLOSED)
        loop = asyncio.get_running_loop()
        ask = _Ask(episodes, loop.create_future())
        self._usage.wait(len(episodes))
        call = self._joined(ask, ticket)
        loop.call_soon(self._serve)  # not at once: what finishes together goes together
        try:
            return await ask.answer
        except asyncio.CancelledError:
            self._withdraw(ask, call)
            raise

    def skip(self) -> None:
        """An episode did not pass the gate."""
        self._usage.skipped += 1

    def load(self) -> ScorerLoad:
        return self._usage.load(
            concurrency=self._rules.concurrency,
            breaker_opened=self._breaker.num_opened,
            is_held=self._breaker.is_open,
            lost=self.scorer.num_lost if isinstance(self.scorer, Replaced) else 0,
        )

    async def close(self) -> None:
        """All that wait learn that nobody answers any more."""
        self._is_closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        for call in [*self._line, *self._calls]:
            call.fail(RunFailed(CLOSED))
        self._line.clear()
        tasks = [call.task for call in self._calls if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _joined(self, ask: _Ask, ticket: ScoreTicket) -> _ScoreCall:
        """The call that will bring these episodes: one that waits and has room, or a new one."""
        room = self._rules.batch - len(ask.episodes)
        call = self._joinable.get(ticket)
        if call is None or len(call.episodes) > room:
            call = _ScoreCall(ticket, ticket.order)
            self._enqueue(call)
            self._joinable[ticket] = call
        call.asks.append(ask)
        return call

    def _enqueue(self, call: _ScoreCall) -> None:
        bisect.insort_right(self._line, call, key=lambda other: other.order)

    def _serve(self) -> None:
        """Begin calls, as far as places and the breaker go."""
        while self._line and self._usage.in_flight < self._rules.concurrency:
            wait_s = self._breaker.wait_s()
            if wait_s is None:
                return  # whoever went first serves again
            if wait_s > 0:
                self._serve_in(wait_s)
                return
            call = self._line.pop(0)
            if self._joinable.get(call.ticket) is call:
                del self._joinable[call.ticket]
            self._begin(call)

    def _begin(self, call: _ScoreCall) -> None:
        self._usage.begin(len(call.episodes), again=call.num_tries > 0)
        call.num_tries += 1
        is_probe = self._breaker.begin()
        self._calls.add(call)
        call.task = asyncio.create_task(self._try(call, is_probe=is_probe))
        # Not in the task itself: one that is cancelled at once never begins.
        call.task.add_done_callback(lambda task: self._tried(call, task, is_probe=is_probe))

    def _serve_in(self, wait_s: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_later(wait_s, self._serve)

    async def _try(self, call: _ScoreCall, *, is_probe: bool) -> float | None:
        """The pause before the next try; None = there is none."""
        ticket, episodes = call.ticket, tuple(call.episodes)
        group = Group(number=ticket.number, task=ticket.task, episodes=episodes)
        try:
            verdicts = await self.scorer.score(group)
            if len(verdicts) != len(episodes):  # a scorer may be the user's own
                raise ScoreError(
                    f"Scorer {self.scorer.name!r} gave {len(verdicts)} verdicts on {len(episodes)}"
                    f" episodes of group {ticket.number}; it must give one on each."
                )
        except TransientScoreError as error:
            return self._failed(call, error, is_probe=is_probe)
        except Exception as error:  # noqa: BLE001 - whoever asked raises it
            self._breaker.answered()
            self._usage.failures += isinstance(error, ScoreError)
            call.fail(error)
        else:
            self._breaker.answered()
            self._usage.episodes += len(episodes)
            call.answer(verdicts)
        return None

    def _tried(self, call: _ScoreCall, task: asyncio.Task[float | None], *, is_probe: bool) -> None:
        self._usage.end()
        self._calls.discard(call)
        if task.cancelled():
            self._breaker.abandoned(is_probe=is_probe)
        elif (pause_s := task.result()) is not None:
            self._pause(call, pause_s)
        self._serve()

    def _failed(
        self, call: _ScoreCall, error: TransientScoreError, *, is_probe: bool
    ) -> float | None:
        """The pause before the next try; None = that was the last."""
        was_open = self._breaker.is_open
        if error.is_down:
            self._breaker.failed(is_probe=is_probe, retry_after_s=error.retry_after_s)
        else:
            self._breaker.answered()
        if self._breaker.is_open:
            if not was_open and self._breaker.num_opened == 1:
                self._warn(
                    f"scorer {self.scorer.name!r} cannot be asked, and its calls wait until it can"
                    f" (further times are only counted): {error}"
                )
            return 0.0  # the breaker says when
        call.num_failed += 1
        if call.num_failed > self._rules.retries:
            self._usage.failures += 1
            call.fail(_given_up(error, num_tries=call.num_tries))
            return None
        pause_s = min(self._rules.backoff_s * 2 ** (call.num_failed - 1), LONGEST_BACKOFF_S)
        return max(pause_s * (0.5 + 0.5 * self._draw()), error.retry_after_s or 0.0)

    def _pause(self, call: _ScoreCall, pause_s: float) -> None:
        num_waiting = len(call.episodes)
        self._usage.wait(num_waiting)
        self._calls.add(call)
        call.task = asyncio.create_task(self._sleep(pause_s))
        call.task.add_done_callback(lambda _: self._rested(call, num_waiting))

    def _rested(self, call: _ScoreCall, num_waiting: int) -> None:
        """Back into the line, behind all that wait by now: if it is this call that brings the
        scorer down, others get their turn."""
        self._usage.withdraw(num_waiting)
        self._calls.discard(call)
        call.asks = [ask for ask in call.asks if not ask.answer.done()]  # the others were withdrawn
        if call.asks:
            self._usage.wait(len(call.episodes))
            call.order = self._line[-1].order if self._line else call.order
            self._enqueue(call)
            self._serve()

    def _withdraw(self, ask: _Ask, call: _ScoreCall) -> None:
        if call in self._line:
            call.asks.remove(ask)
            self._usage.withdraw(len(ask.episodes))
            if not call.asks:
                self._line.remove(call)
                if self._joinable.get(call.ticket) is call:
                    del self._joinable[call.ticket]
        elif call.task is not None and all(other.answer.cancelled() for other in call.asks):
            call.task.cancel()


def _given_up(error: TransientScoreError, *, num_tries: int) -> ScoreError:
    if num_tries == 1:
        return error
    given_up = ScoreError(f"{str(error).rstrip('.')} (tried {num_tries} times).")
    for note in getattr(error, "__notes__", ()):
        given_up.add_note(note)
    return given_up
