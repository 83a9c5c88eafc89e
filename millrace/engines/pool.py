"""Routes requests to engine processes: the least loaded first.

Turns of one session go to the engine that served it last, which has their KV, unless that one is
clearly more loaded: it has more than twice the sequences of the least loaded engine, and 8. A
request that is pinned goes there in any case.

Promise: what an engine gave up half-way because new weights came is resumed, on whichever engine
has the least to do then; generate() returns whole completions, or those its caller wanted ended.

Runs on the controller's event loop; torch-free.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from millrace.cluster.hub import Worker
from millrace.cluster.messages import (
    Abort,
    Completed,
    Expire,
    Generate,
    Generated,
    Part,
    Pause,
    Resume,
    Sampled,
    Swap,
    Swapped,
)
from millrace.core.errors import MillraceError, WorkerError
from millrace.core.protocols import Engine, OnCompletion, OnTokens
from millrace.core.records import Completion, Piece, Request
from millrace.core.weight_update import WeightUpdate

_SPARE_SEQUENCES = 8  # more than this make an engine clearly more loaded than an idle one


class RemoteEngine:
    """An Engine in another process. Cancelling generate() frees its place in the engine."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._aborting: set[asyncio.Task[None]] = set()

    async def generate(
        self,
        request: Request,
        on_tokens: OnTokens | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        generate = Generate(
            request=request, stream=on_tokens is not None, singly=on_completion is not None
        )
        heard = _Heard(on_tokens=on_tokens, on_completion=on_completion)
        try:
            reply = await self._worker.call(generate, on_part=heard)
            assert isinstance(reply, Generated)
            return heard.completed(reply.completions)
        except MillraceError:  # the engine refused it, or is dead
            raise
        except BaseException:  # cancelled, or who listens raised
            self._abort_later(request.id)
            raise

    async def swap(self, update: WeightUpdate) -> int:
        reply = await self._worker.call(Swap(update=update))
        assert isinstance(reply, Swapped)
        return reply.version

    async def abort(self, ids: Sequence[str]) -> None:
        await self._worker.call(Abort(ids=list(ids)))

    async def expire(self, before: int) -> None:
        await self._worker.call(Expire(before=before))

    async def pause(self) -> None:
        await self._worker.call(Pause())

    async def resume(self) -> None:
        await self._worker.call(Resume())

    def _abort_later(self, request_id: str) -> None:
        async def abort() -> None:
            # A dead engine has nothing left to abort; its death is reported by whoever watches it.
            with contextlib.suppress(WorkerError):
                await self.abort([request_id])

        task = asyncio.create_task(abort())
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)


@dataclass(kw_only=True, slots=True)
class _Heard:
    """What an engine says of a request before its reply, passed on."""

    on_tokens: OnTokens | None
    on_completion: OnCompletion | None
    told: dict[int, Completion] = field(default_factory=dict[int, Completion])  # by member

    def __call__(self, part: Part) -> None:
        match part:
            case Sampled(pieces=pieces):
                assert self.on_tokens is not None
                for piece in pieces:
                    self.on_tokens(piece)
            case Completed(completions=completions):
                for member, completion in completions.items():
                    self._tell(member, completion)
            case _:
                raise AssertionError(f"{type(part).__name__} is no part of a Generate call")

    def completed(self, rest: Sequence[Completion | None]) -> list[Completion]:
        """All of them; those of the reply are told, too."""
        for member, completion in enumerate(rest):
            if completion is not None:
                self._tell(member, completion)
        return [self.told[member] for member in range(len(rest))]

    def _tell(self, member: int, completion: Completion) -> None:
        self.told[member] = completion
        if self.on_completion is not None:
            self.on_completion(member, completion)


@dataclass(kw_only=True, slots=True)
class _Open:
    """A request that has not been answered yet: itself, or what is resumed of it."""

    placed: dict[str, int] = field(default_factory=dict[str, int])  # id at its engine -> which
    is_aborted: bool = False
    on_tokens: OnTokens | None = None  # the caller's
    on_completion: OnCompletion | None = None  # likewise

    def listener(self, *, first: int = 0) -> OnTokens | None:
        """Passes on what an engine tells of the completions from number `first` on."""
        if (tell := self.on_tokens) is None:
            return None

        def pass_on(piece: Piece) -> None:
            finish = None if piece.finish == "interrupt" else piece.finish  # it will be resumed
            if len(piece.tokens) or finish is not None:
                tell(replace(piece, member=first + piece.member, finish=finish))

        return pass_on

    def completion_listener(self, *, first: int = 0) -> OnCompletion | None:
        """Likewise, of those that are not to be resumed."""
        if (tell := self.on_completion) is None:
            return None

        def pass_on(member: int, completion: Completion) -> None:
            if completion.finish != "interrupt":
                tell(first + member, completion)

        return pass_on

    def tell_abort(self, *, member: int, completion: Completion) -> None:
        if self.on_completion is not None:
            self.on_completion(member, completion)
        if self.on_tokens is not None:
            self.on_tokens(
                Piece(
                    member=member,
                    tokens=np.empty(0, dtype=np.int32),
                    logprobs=np.empty(0, dtype=np.float32),
                    versions=np.empty(0, dtype=np.int32),
                    finish="abort",
                )
            )


class EnginePool:
    """Several engines as one."""

    def __init__(self, engines: Sequence[Engine], *, max_sessions: int = 65536) -> None:
        """`max_sessions`: whose engine is remembered; one that is forgotten is routed by load."""
        assert engines
        self._max_sessions = max_sessions
        self._engines = list(engines)
        self._sequences = [0] * len(engines)  # in flight, per engine
        self._homes: OrderedDict[str, int] = OrderedDict()  # session -> engine index; last = latest
        self._open: dict[str, _Open] = {}  # by the caller's request id

    async def generate(
        self,
        request: Request,
        on_tokens: OnTokens | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        assert request.id not in self._open, f"{request.id!r} is already under way"
        opened = _Open(on_tokens=on_tokens, on_completion=on_completion)
        self._open[request.id] = opened
        try:
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
        self, request: Request, opened: _Open, *, member: int, completion: Completion
    ) -> Completion:
        """Resume one completion of a request as often as engines interrupt it."""
        while completion.finish == "interrupt":
            if opened.is_aborted:  # its engine gave it up before it heard of the abort
                completion = replace(completion, finish="abort")
                opened.tell_abort(member=member, completion=completion)
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

    async def _place(self, request: Request, opened: _Open, *, first: int = 0) -> list[Completion]:
        index = self._choose(request.session, pinned=request.pinned)
        self._sequences[index] += request.n
        opened.placed[request.id] = index
        try:
            return await self._engines[index].generate(
                request, opened.listener(first=first), opened.completion_listener(first=first)
            )
        finally:
            self._sequences[index] -= request.n
            del opened.placed[request.id]

    def _choose(self, session: str | None, *, pinned: bool) -> int:
        index = min(range(len(self._engines)), key=self._sequences.__getitem__)
        if session is None:
            return index
        home = self._homes.pop(session, index)
        if pinned or self._sequences[home] <= 2 * self._sequences[index] + _SPARE_SEQUENCES:
            index = home
        self._homes[session] = index
        if len(self._homes) > self._max_sessions:
            self._homes.popitem(last=False)
        return index

    async def swap(self, update: WeightUpdate) -> int:
        """Swap all engines, side by side; returns the oldest version now visible."""
        return min(await asyncio.gather(*(engine.swap(update) for engine in self._engines)))

    async def abort(self, ids: Sequence[str]) -> None:
        by_engine: dict[int, list[str]] = {}
        for opened in (self._open[id] for id in ids if id in self._open):
            opened.is_aborted = True
            for placed_id, index in opened.placed.items():
                by_engine.setdefault(index, []).append(placed_id)
        await asyncio.gather(*(self._engines[i].abort(ids) for i, ids in by_engine.items()))

    async def expire(self, before: int) -> None:
        await asyncio.gather(*(engine.expire(before) for engine in self._engines))

    async def pause(self) -> None:
        """Returns when the last engine has finished its pass."""
        await asyncio.gather(*(engine.pause() for engine in self._engines))

    async def resume(self) -> None:
        await asyncio.gather(*(engine.resume() for engine in self._engines))

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
