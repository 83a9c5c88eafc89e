"""Routes requests to engine processes: the least loaded first.

Turns of one session go to the engine that served it last, which has their KV, unless that one is
clearly more loaded: it has more than twice the sequences of the least loaded engine, and 8.

Runs on the controller's event loop; torch-free.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Sequence

from millrace.cluster.hub import Worker
from millrace.cluster.messages import Abort, Generate, Generated, Pause, Resume, Swap, Swapped
from millrace.core.errors import WorkerError
from millrace.core.protocols import Engine
from millrace.core.records import Completion, Request
from millrace.core.weight_update import WeightUpdate

_SPARE_SEQUENCES = 8  # more than this make an engine clearly more loaded than an idle one


class RemoteEngine:
    """An Engine in another process. Cancelling generate() frees its place in the engine."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._aborting: set[asyncio.Task[None]] = set()

    async def generate(self, request: Request) -> list[Completion]:
        try:
            reply = await self._worker.call(Generate(request=request))
        except asyncio.CancelledError:
            self._abort_later(request.id)
            raise
        assert isinstance(reply, Generated)
        return reply.completions

    async def swap(self, update: WeightUpdate) -> int:
        reply = await self._worker.call(Swap(update=update))
        assert isinstance(reply, Swapped)
        return reply.version

    async def abort(self, ids: Sequence[str]) -> None:
        await self._worker.call(Abort(ids=list(ids)))

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


class EnginePool:
    """Several engines as one."""

    def __init__(self, engines: Sequence[Engine], *, max_sessions: int = 65536) -> None:
        """`max_sessions`: whose engine is remembered; one that is forgotten is routed by load."""
        assert engines
        self._max_sessions = max_sessions
        self._engines = list(engines)
        self._sequences = [0] * len(engines)  # in flight, per engine
        self._placed: dict[str, int] = {}  # request id -> engine index
        self._homes: OrderedDict[str, int] = OrderedDict()  # session -> engine index; last = latest

    async def generate(self, request: Request) -> list[Completion]:
        index = self._choose(request.session)
        self._sequences[index] += request.n
        self._placed[request.id] = index
        try:
            return await self._engines[index].generate(request)
        finally:
            self._sequences[index] -= request.n
            del self._placed[request.id]

    def _choose(self, session: str | None) -> int:
        index = min(range(len(self._engines)), key=self._sequences.__getitem__)
        if session is None:
            return index
        home = self._homes.pop(session, index)
        if self._sequences[home] <= 2 * self._sequences[index] + _SPARE_SEQUENCES:
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
        for request_id in ids:
            if request_id in self._placed:
                by_engine.setdefault(self._placed[request_id], []).append(request_id)
        await asyncio.gather(*(self._engines[i].abort(ids) for i, ids in by_engine.items()))

    async def pause(self) -> None:
        """Returns when the last engine has finished its pass."""
        await asyncio.gather(*(engine.pause() for engine in self._engines))

    async def resume(self) -> None:
        await asyncio.gather(*(engine.resume() for engine in self._engines))
