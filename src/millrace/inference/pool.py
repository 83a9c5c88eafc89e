"""Routes requests to engines: the least loaded first.

Turns of one session go to the engine that served it last, which has their KV, unless that one is
clearly more loaded: it has more than twice the sequences of the least loaded engine, and 8. A
request that is pinned goes there in any case.

Promise: what an engine gave up half-way because new weights came is resumed, on whichever engine
has the least to do then; generate() returns whole completions, or those its caller wanted ended.
Where lost engines are replaced, what one of them had told is gone on with elsewhere, and what it
had not is sampled again. While there is no engine, requests wait: those that have begun for as long
as it takes, others no longer than they are allowed to.

Runs on the controller's event loop; torch-free.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from millrace.core.errors import EngineLost, EnginesDown
from millrace.core.protocols import Engine, OnCompletion, OnTokens
from millrace.core.records import Completion, Request
from millrace.core.score_requests import ScoreRequest, TokenLogprobs
from millrace.core.weight_update import WeightUpdate
from millrace.inference.transcript import Audience, Transcript

T = TypeVar("T")

_SPARE_SEQUENCES = 8  # more than this make an engine clearly more loaded than an idle one


@dataclass(kw_only=True, slots=True, eq=False)
class _Seat:
    """An engine of the pool."""

    engine: Engine
    num_sequences: int = 0  # in flight
    serves: bool = True  # False: it waits for its first weights


@dataclass(kw_only=True, slots=True)
class _OpenRequest:
    """A request that has not been answered yet: itself, or what is resumed of it."""

    audience: Audience
    placed: dict[str, _Seat] = field(default_factory=dict[str, _Seat])  # by id at its engine
    has_begun: bool = False  # an engine was given it
    is_aborted: bool = False


@dataclass(kw_only=True, slots=True)
class Continued:
    """What was in flight in engines that were lost."""

    sequences: int = 0  # gone on with elsewhere
    tokens: int = 0  # which they had by then
    anew: int = 0  # sequences of which nothing was known: sampled again


class EnginePool:
    """Several engines as one."""

    def __init__(
        self,
        engines: Sequence[Engine] = (),
        *,
        replaces: bool = False,
        max_wait_s: float | None = None,
        max_sessions: int = 65536,
    ) -> None:
        """`replaces`: a lost engine's place is taken by another, see join(); else its loss is
        raised. `max_wait_s`: for an engine, of a request that has not begun; then EnginesDown is
        raised. `max_sessions`: whose engine is remembered; one that is forgotten is routed by
        load."""
        assert engines or replaces
        self.continued = Continued()
        self._replaces = replaces
        self._max_wait_s = max_wait_s
        self._max_sessions = max_sessions
        self._seats = [_Seat(engine=engine) for engine in engines]
        self._came = asyncio.Event()  # set when an engine begins to serve
        self._answered = asyncio.Event()  # set when a request is
        self._homes: OrderedDict[str, _Seat] = OrderedDict()  # by session; last = latest
        self._open: dict[str, _OpenRequest] = {}  # by the caller's request id
        self._is_paused = False
        self._expired_before = 0

    @property
    def num_engines(self) -> int:
        """That serve."""
        return sum(seat.serves for seat in self._seats)

    async def join(self, engine: Engine, *, prepare: Callable[[Engine], Awaitable[object]]) -> None:
        """Take in one more engine. It hears of everything from now on, and is given requests once
        `prepare` has brought it the newest weights."""
        seat = _Seat(engine=engine, serves=False)
        self._seats.append(seat)
        try:
            if self._is_paused:
                await engine.pause()
            await engine.expire(self._expired_before)
            await prepare(engine)
        except BaseException:
            self._lose(seat)
            raise
        seat.serves = seat in self._seats
        self._came.set()

    async def leave(self, engine: Engine) -> None:
        """Give it no more requests; returns once it has answered those it has, and is out."""
        for seat in [seat for seat in self._seats if seat.engine is engine]:
            seat.serves = False
            while seat.num_sequences and seat in self._seats:
                self._answered.clear()
                await self._answered.wait()
            self._lose(seat)

    def lose(self, engine: Engine) -> None:
        """It is dead, or to be taken for dead; no matter if that is known already."""
        for seat in [seat for seat in self._seats if seat.engine is engine]:
            self._lose(seat)

    async def generate(
        self,
        request: Request,
        on_tokens: OnTokens | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        assert request.id not in self._open, f"{request.id!r} is already under way"
        audience = Audience(on_tokens, on_completion)
        opened = self._open[request.id] = _OpenRequest(audience=audience)
        try:
            completions = await self._place(request, opened)
            while not opened.is_aborted and all(_is_untouched(c) for c in completions):
                completions = await self._place(request, opened)
            if all(completion.finish != "interrupt" for completion in completions):
                return completions
            whole = (
                self._complete(request, opened, member=member, completion=completion)
                for member, completion in enumerate(completions)
            )
            return list(await asyncio.gather(*whole))
        finally:
            del self._open[request.id]

    async def _complete(
        self, request: Request, opened: _OpenRequest, *, member: int, completion: Completion
    ) -> Completion:
        """Resume one completion of a request as often as it is interrupted."""
        while completion.finish == "interrupt":
            if opened.is_aborted:  # its engine gave it up before it heard of the abort
                completion = replace(completion, finish="abort")
                opened.audience.tell_abort(completion, member=member)
                return completion
            rest = replace(
                request,
                id=f"{request.id}:{member}",
                n=1,
                index=request.index + member,
                partial=completion if len(completion.tokens) else None,
            )
            (completion,) = await self._place(rest, opened, first=member)
        if completion.finish == "expire":  # then the others are of no use any more, either
            await self.abort([request.id])
        return completion

    async def _place(
        self, request: Request, opened: _OpenRequest, *, first: int = 0
    ) -> list[Completion]:
        await self._until_served(max_wait_s=None if opened.has_begun else self._max_wait_s)
        opened.has_begun = True
        seat = self._choose(request.session, pinned=request.pinned)
        audience = opened.audience
        transcript = Transcript(request, audience=audience, first=first)
        hear = transcript.hear if audience.wants_tokens or self._replaces else None
        if hear is not None and not audience.wants_tokens:
            request = replace(request, at_leisure=True)
        hear_end = transcript.hear_end if audience.wants_completions else None
        seat.num_sequences += request.n
        opened.placed[request.id] = seat
        try:
            completions = await seat.engine.generate(request, hear, hear_end)
            if audience.wants_tokens and request.at_leisure:
                transcript.catch_up(completions)
            return completions
        except EngineLost:
            if not self._replaces:
                raise
            self._lose(seat)
            return self._noted(transcript.completions())
        finally:
            seat.num_sequences -= request.n
            del opened.placed[request.id]
            self._answered.set()

    def _noted(self, known: list[Completion]) -> list[Completion]:
        for completion in known:
            if completion.finish != "interrupt":
                continue
            self.continued.sequences += len(completion.tokens) > 0
            self.continued.tokens += len(completion.tokens)
            self.continued.anew += len(completion.tokens) == 0
        return known

    async def _until_served(self, *, max_wait_s: float | None) -> None:
        """Until there is an engine; without a wait where there is one, see at_once()."""
        try:
            async with asyncio.timeout(max_wait_s):
                while not self.num_engines:
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            raise EnginesDown(f"No engine was up for {max_wait_s:g} s; try again later.") from None

    def _choose(self, session: str | None, *, pinned: bool) -> _Seat:
        serving = [seat for seat in self._seats if seat.serves]
        idlest = min(serving, key=lambda seat: seat.num_sequences)
        if session is None:
            return idlest
        home = self._homes.pop(session, idlest)
        is_clear = home.num_sequences > 2 * idlest.num_sequences + _SPARE_SEQUENCES
        chosen = home if home in serving and (pinned or not is_clear) else idlest
        self._homes[session] = chosen
        if len(self._homes) > self._max_sessions:
            self._homes.popitem(last=False)
        return chosen

    async def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        while True:
            await self._until_served(max_wait_s=self._max_wait_s)
            seat = self._choose(None, pinned=False)
            for logprobs in await self._ask(seat, seat.engine.score(requests)):
                return logprobs

    async def swap(self, update: WeightUpdate) -> int:
        """Swap all engines, side by side; returns the oldest version now visible."""
        versions = await self._each(lambda engine: engine.swap(update))
        return min(versions, default=update.version)  # without engines, those to come have it

    async def abort(self, ids: Sequence[str]) -> None:
        by_seat: dict[_Seat, list[str]] = {}
        for opened in (self._open[id] for id in ids if id in self._open):
            opened.is_aborted = True
            for placed_id, seat in opened.placed.items():
                by_seat.setdefault(seat, []).append(placed_id)
        await asyncio.gather(
            *(self._ask(seat, seat.engine.abort(ids)) for seat, ids in by_seat.items())
        )

    async def expire(self, before: int) -> None:
        self._expired_before = max(before, self._expired_before)
        await self._each(lambda engine: engine.expire(before))

    async def pause(self) -> None:
        """Returns when the last engine has finished its pass."""
        self._is_paused = True
        await self._each(lambda engine: engine.pause())

    async def resume(self) -> None:
        self._is_paused = False
        await self._each(lambda engine: engine.resume())

    @contextlib.asynccontextmanager
    async def at_once(self) -> AsyncIterator[None]:
        """What tasks made or woken inside ask for, without waiting for anything before, the engines
        begin together, in that order."""
        await self.pause()
        yield
        # One turn of the loop for those tasks, and one for the tasks they make. What they send
        # arrives before what is sent after it.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await self.resume()

    async def _each(self, ask: Callable[[Engine], Awaitable[T]]) -> list[T]:
        """The answers of all engines that are not lost meanwhile."""
        asked = (self._ask(seat, ask(seat.engine)) for seat in self._seats)
        return [answer for answers in await asyncio.gather(*asked) for answer in answers]

    async def _ask(self, seat: _Seat, answer: Awaitable[T]) -> list[T]:
        """Its answer, or none if it is lost."""
        try:
            return [await answer]
        except EngineLost:
            if not self._replaces:
                raise
            self._lose(seat)
            return []

    def _lose(self, seat: _Seat) -> None:
        if seat in self._seats:
            self._seats.remove(seat)


def _is_untouched(completion: Completion) -> bool:
    """True of what is left of a request whose engine was lost before it told anything."""
    return completion.finish == "interrupt" and not len(completion.tokens)
