"""The embedded engine keeps the contract, driven by a task of this process's event loop."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from engine_contract import MAX_CONTEXT, EngineContract, OpenEngine

from millrace.config import EngineConfig
from millrace.core.protocols import Engine, WeightReceiver
from millrace.core.records import Completion, Request
from millrace.core.weight_update import WeightUpdate
from millrace.engines.embedded.build import build_engine
from millrace.engines.embedded.engine import EmbeddedEngine, Finished
from millrace.weights.receiver import make_receiver


class InProcessEngine:
    """core.protocols.Engine over an EmbeddedEngine; one step per turn of the event loop."""

    def __init__(self, engine: EmbeddedEngine, *, receiver: WeightReceiver) -> None:
        self._engine = engine
        self._receiver = receiver
        self._waiting: dict[str, asyncio.Future[list[Completion]]] = {}
        self._arrived = asyncio.Event()
        self._may_run = asyncio.Event()
        self._may_run.set()

    async def generate(self, request: Request) -> list[Completion]:
        self._engine.submit(request)
        self._waiting[request.id] = asyncio.get_running_loop().create_future()
        self._arrived.set()
        return await self._waiting[request.id]

    async def swap(self, update: WeightUpdate) -> int:
        self._engine.swap(self._receiver.stage(update), version=update.version)
        return update.version

    async def abort(self, ids: Sequence[str]) -> None:
        self._hand_out(self._engine.abort(ids))

    async def pause(self) -> None:
        self._may_run.clear()

    async def resume(self) -> None:
        self._may_run.set()

    async def run(self) -> None:
        while True:
            while self._engine.has_work:
                await self._may_run.wait()
                self._hand_out(self._engine.step())
                await asyncio.sleep(0)
            self._arrived.clear()
            await self._arrived.wait()

    def _hand_out(self, finished: list[Finished]) -> None:
        for request in finished:
            self._waiting.pop(request.id).set_result(request.completions)


@asynccontextmanager
async def open_in_process(model_path: Path) -> AsyncIterator[Engine]:
    config = EngineConfig(
        device="cpu", max_sequences=8, block_tokens=4, prefill_tokens=16, max_context=MAX_CONTEXT
    )
    embedded = build_engine(str(model_path), config=config, trust_remote_code=False, version=0)
    receiver = make_receiver("shm")
    engine = InProcessEngine(embedded, receiver=receiver)
    running = asyncio.create_task(engine.run())
    yield engine
    running.cancel()
    with pytest.raises(asyncio.CancelledError):  # anything else was a failed step
        await running
    receiver.close()


class TestEmbeddedEngine(EngineContract):
    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        return open_in_process
