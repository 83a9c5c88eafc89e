"""An Engine that runs in the test process instead of a worker process."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from millrace.config import Interrupt
from millrace.core.protocols import Capability, OnCompletion, OnTokens
from millrace.core.records import Completion, Request, ScoreRequest, TokenLogprobs, WeightUpdate
from millrace.inference.backend import (
    EmbeddedBackend,
    EngineBackend,
    EngineCore,
    EngineSpec,
    FinishedCompletions,
)
from millrace.inference.capabilities import check_request
from millrace.inference.interrupt import WeightInterrupt
from millrace.weights.backends import StagingReceiver
from millrace.weights.transport import make_receiver


class InProcessEngine:
    """core.protocols.Engine over an EngineCore; one step per turn of the event loop."""

    def __init__(
        self,
        engine: EngineCore,
        *,
        receiver: StagingReceiver,
        interrupt: Interrupt = "swap",
        capabilities: frozenset[Capability] = EmbeddedBackend.capabilities,
    ) -> None:
        self.capabilities = capabilities
        self._engine = engine
        self._interrupt = WeightInterrupt(interrupt, engine)
        self._receiver = receiver
        self._waiting: dict[str, asyncio.Future[list[Completion]]] = {}
        self._ended: dict[str, dict[int, Completion]] = {}  # by request and member
        self._listeners: dict[str, OnTokens] = {}
        self._completed: dict[str, OnCompletion] = {}
        self._arrived = asyncio.Event()
        self._is_asleep = False
        self._may_run = asyncio.Event()
        self._may_run.set()

    async def generate(
        self,
        request: Request,
        on_tokens: OnTokens | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        check_request(request, self.capabilities)
        self._engine.add_request(request, stream=on_tokens is not None)
        self._ended[request.id] = {}
        if on_completion is not None:
            self._completed[request.id] = on_completion
        if on_tokens is not None:
            self._listeners[request.id] = on_tokens
        self._waiting[request.id] = asyncio.get_running_loop().create_future()
        self._arrived.set()
        try:
            return await self._waiting[request.id]
        except asyncio.CancelledError:
            self._deliver(self._engine.abort([request.id]))
            raise

    async def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        return self._engine.score(requests)

    async def swap(self, update: WeightUpdate) -> int:
        self._deliver(self._interrupt.announce())
        try:
            tensors = self._receiver.stage(update)
            while not self._interrupt.may_land:  # noqa: ASYNC110 - turns of the loop, not a poll
                await asyncio.sleep(0)
            self._deliver(self._interrupt.land())
            self._engine.commit(self._engine.prepare(tensors, version=update.version))
        finally:
            self._interrupt.settle()
            self._arrived.set()
        return update.version

    async def abort(self, ids: Sequence[str]) -> None:
        self._deliver(self._engine.abort(ids))

    async def expire(self, before: int, adapters: object = None) -> None:
        self._deliver(self._engine.expire(before))

    async def pause(self, *, sleep: bool = False) -> None:
        self._may_run.clear()
        self._engine.pause()
        if sleep:
            self._engine.sleep()
            self._is_asleep = True

    async def resume(self) -> None:
        if self._is_asleep:
            self._engine.wake()
            self._is_asleep = False
        self._may_run.set()

    async def run(self) -> None:
        while True:
            while self._engine.has_work:
                await self._may_run.wait()
                self._deliver(self._engine.step())
                await asyncio.sleep(0)
            self._arrived.clear()
            await self._arrived.wait()

    def _deliver(self, finished: list[FinishedCompletions]) -> None:
        for id, pieces in {
            **self._engine.take_chunks(),
            **self._engine.take_chunks(coalesced=True),
        }.items():
            for piece in pieces:
                self._listeners[id](piece)
        for request in finished:
            self._ended[request.id] |= request.completions
            if (on_completion := self._completed.get(request.id)) is not None:
                for member, completion in request.completions.items():
                    on_completion(member, completion)
            if not request.is_last:
                continue
            self._completed.pop(request.id, None)
            self._listeners.pop(request.id, None)
            waiting, ended = self._waiting.pop(request.id), self._ended.pop(request.id)
            if not waiting.cancelled():
                waiting.set_result([ended[member] for member in range(len(ended))])


@asynccontextmanager
async def open_in_process(
    backend: EngineBackend, spec: EngineSpec, *, interrupt: Interrupt = "swap"
) -> AsyncIterator[InProcessEngine]:
    """An engine of this backend that receives updates through shared memory."""
    receiver = make_receiver("shm")
    core = backend.load(spec)
    engine = InProcessEngine(
        core,
        receiver=receiver,
        interrupt=interrupt,
        capabilities=backend.capabilities,
    )
    running = asyncio.create_task(engine.run())
    yield engine
    running.cancel()
    with pytest.raises(asyncio.CancelledError):  # anything else is a failed step
        await running
    receiver.close()
    core.close()
