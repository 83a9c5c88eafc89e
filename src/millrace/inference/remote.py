"""An engine process as the pool sees it.

Promise: cancelling generate() frees its place in the engine. A process that failed at a call in a
way it does not know itself, or did not answer in time, is ended: its calls all fail from then on.

Runs on the controller's event loop; torch-free.

One engine's place in a pool, whoever holds it.

Promise: whoever takes the place of an engine that died is given no request before it has the newest
weights. Runs on the controller's event loop.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from millrace.cluster.messages import (
    AbortRequests,
    Completed,
    Expire,
    Generate,
    GenerateDone,
    Message,
    Part,
    Pause,
    Resume,
    ScoreTokens,
    Swapped,
    SwapWeights,
    TokensSampled,
    TokensScored,
)
from millrace.cluster.worker import Worker
from millrace.core.errors import MillraceError, WorkerError
from millrace.core.protocols import Engine, OnCompletion, OnTokens
from millrace.core.records import Completion, Request
from millrace.core.score_requests import ScoreRequest, TokenLogprobs
from millrace.core.weight_update import WeightUpdate
from millrace.inference.pool import EnginePool


class RemoteEngine:
    def __init__(self, worker: Worker, *, swap_timeout_s: float | None = None) -> None:
        self._worker = worker
        self._swap_timeout_s = swap_timeout_s
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
            reply = await self._worker.call(generate, is_pulsed=True, on_part=heard)
            assert isinstance(reply, GenerateDone)
            return heard.completed(reply.completions)
        except WorkerError:
            self._worker.kill()
            raise
        except MillraceError:  # the engine refused it
            raise
        except BaseException:  # cancelled, or who listens raised
            self._abort_later(request.id)
            raise

    async def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        reply = await self._call(ScoreTokens(requests=list(requests)))
        assert isinstance(reply, TokensScored)
        return reply.logprobs

    async def swap(self, update: WeightUpdate) -> int:
        # Not pulsed: fetching and laying out weights is no progress that it could tell of.
        reply = await self._call(
            SwapWeights(update=update), timeout_s=self._swap_timeout_s, is_pulsed=False
        )
        assert isinstance(reply, Swapped)
        return reply.version

    async def abort(self, ids: Sequence[str]) -> None:
        await self._call(AbortRequests(ids=list(ids)))

    async def expire(self, before: int) -> None:
        await self._call(Expire(before=before))

    async def pause(self) -> None:
        await self._call(Pause())

    async def resume(self) -> None:
        await self._call(Resume())

    async def _call(
        self, message: Message, *, timeout_s: float | None = None, is_pulsed: bool = True
    ) -> Message:
        try:
            return await self._worker.call(
                message, timeout_s=timeout_s, is_deadline=True, is_pulsed=is_pulsed
            )
        except WorkerError:
            self._worker.kill()
            raise

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
            case TokensSampled(pieces=pieces):
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


Start = Callable[[], Awaitable[Worker]]


class EnginePlace:
    def __init__(
        self,
        pool: EnginePool,
        *,
        start: Start,
        bring_newest: Callable[[Engine], Awaitable[None]] | None,
        swap_timeout_s: float,
    ) -> None:
        """`start` starts an engine, with whatever weights; `bring_newest` is None where they never
        change."""
        self._pool = pool
        self._start = start
        self._bring_newest = bring_newest or _is_ready
        self._swap_timeout_s = swap_timeout_s
        self._held: tuple[Worker, RemoteEngine] | None = None

    async def take(self, worker: Worker) -> None:
        """Let this engine have the place; it holds the newest weights."""
        await self._give(worker, prepare=_is_ready)

    async def fill(self) -> Worker:
        """Start another engine."""
        worker = await self._start()
        await self._give(worker, prepare=self._bring_newest)
        return worker

    def clear(self) -> None:
        """Who holds it has died."""
        if self._held is not None:
            self._pool.lose(self._held[1])
            self._held = None

    async def give_up(self) -> None:
        """Once who holds it has finished its sequences, stop it."""
        if self._held is not None:
            worker, engine = self._held
            await self._pool.leave(engine)
            await worker.stop()

    async def _give(self, worker: Worker, *, prepare: Callable[[Engine], Awaitable[None]]) -> None:
        engine = RemoteEngine(worker, swap_timeout_s=self._swap_timeout_s)
        try:
            await self._pool.join(engine, prepare=prepare)
        except BaseException:
            worker.kill()
            raise
        self._held = (worker, engine)


async def _is_ready(engine: Engine) -> None:
    """It needs nothing."""
