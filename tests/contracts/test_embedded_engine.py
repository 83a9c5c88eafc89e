"""The embedded engine keeps the contract, driven by a task of this process's event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from engine_contract import MAX_CONTEXT, EngineContract, OpenEngine
from in_process_engine import InProcessEngine

from millrace.config import EngineConfig
from millrace.core.protocols import Engine
from millrace.inference.embedded.build import build_engine
from millrace.weights.receiver import make_receiver


@asynccontextmanager
async def open_in_process(model_path: Path) -> AsyncIterator[Engine]:
    config = EngineConfig(
        device="cpu", max_sequences=8, block_tokens=4, prefill_tokens=16, max_context=MAX_CONTEXT
    )
    embedded = build_engine(
        str(model_path), config=config, trust_remote_code=False, version=0, notes_routes=True
    )
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
