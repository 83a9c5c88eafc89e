"""Which adapters the engines hold while more are wanted than they have places."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from millrace.cluster.messages import LoadAdapter
from millrace.core.errors import CheckpointError, cancel_all
from millrace.serving.tinker.adapter_slots import AdapterSlots

A, B, C, D = map(Path, "ABCD")


class LoadingWorker:
    """An engine that loads one adapter after another while its gate is open; C cannot be read."""

    def __init__(self) -> None:
        self._order = asyncio.Lock()
        self.gate = asyncio.Event()
        self.gate.set()
        self.started: list[str] = []
        self.adapters: dict[str, str] = {}

    async def call(self, message: LoadAdapter, **_: Any) -> None:
        self.started.append(message.folder)
        async with self._order:
            await self.gate.wait()
            if message.folder == "C":
                raise CheckpointError("There is no saved adapter 'C'.")
            self.adapters[message.name] = message.folder


class Requests:
    """Requests to sample; each keeps its adapter until it is ended."""

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots
        self._tasks: list[asyncio.Task[None]] = []
        self.running: list[str] = []  # in the order of their beginning

    async def begin(self, folder: Path) -> asyncio.Event:
        end = asyncio.Event()
        self._tasks.append(asyncio.create_task(self._run(folder, end)))
        await settle()
        return end

    async def end_all(self) -> None:
        await cancel_all(self._tasks)

    async def _run(self, folder: Path, end: asyncio.Event) -> None:
        async with self._slots.holding(folder):
            self.running.append(folder.name)
            await end.wait()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def engine_with(*names: str) -> AsyncIterator[tuple[AdapterSlots, LoadingWorker, Requests]]:
    slots, worker = AdapterSlots(names), LoadingWorker()
    await slots.attach("engine-0", worker)  # pyright: ignore[reportArgumentType]
    requests = Requests(slots)
    yield slots, worker, requests
    await requests.end_all()


async def test_an_adapter_waits_only_for_requests_that_came_before():
    async with engine_with("place") as (_, worker, requests):
        first, second = await requests.begin(A), await requests.begin(A)
        ends = [await requests.begin(folder) for folder in (B, A, D, B)]
        first.set()
        await settle()
        assert requests.running == ["A", "A"]  # B waits for the second one
        second.set()
        for end in ends:
            await settle()
            end.set()
        await settle()
        assert requests.running == ["A", "A", "B", "B", "A", "D"]  # both of B share its turn
        assert worker.started == ["A", "B", "A", "D"]


async def test_requests_of_held_adapters_do_not_wait_for_others():
    async with engine_with("one", "two") as (_, worker, requests):
        await requests.begin(A)
        worker.gate.clear()
        await requests.begin(B)
        assert worker.started == ["A", "B"]
        await requests.begin(A)
        assert requests.running == ["A", "A"]
        worker.gate.set()
        await settle()
        assert requests.running == ["A", "A", "B"]


async def test_the_idle_adapter_that_was_used_least_recently_is_replaced():
    async with engine_with("one", "two") as (_, worker, requests):
        for folder in (A, B, A, D):
            (await requests.begin(folder)).set()
            await settle()
        assert worker.adapters == {"one": "A", "two": "D"}


async def test_engine_that_starts_gets_the_adapters_that_are_loaded_meanwhile():
    async with engine_with("one", "two") as (slots, running, requests):
        await requests.begin(A)
        (await requests.begin(B)).set()
        starting = LoadingWorker()
        starting.gate.clear()
        attaching = asyncio.create_task(slots.attach("engine-1", starting))  # pyright: ignore
        await settle()
        await requests.begin(D)  # replaces B
        starting.gate.set()
        await attaching
        await settle()
        assert requests.running == ["A", "B", "D"]
        assert starting.adapters == running.adapters == {"one": "A", "two": "D"}


async def test_adapter_that_cannot_be_loaded_fails_its_requests_only():
    async with engine_with("place") as (slots, worker, requests):
        for _ in range(2):
            with pytest.raises(CheckpointError, match="no saved adapter"):
                async with slots.holding(C):
                    pass
        await requests.begin(A)
        assert (requests.running, worker.started) == (["A"], ["C", "C", "A"])


async def test_adapter_that_has_changed_is_loaded_again():
    async with engine_with("one", "two") as (slots, worker, requests):
        await requests.begin(A)
        slots.forget(A)
        await requests.begin(A)
        assert worker.adapters == {"one": "A", "two": "A"}
