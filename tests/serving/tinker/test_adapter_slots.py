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

    async def begin(self, folder: Path | str, *, tenant: str = "one") -> asyncio.Event:
        end = asyncio.Event()
        self._tasks.append(asyncio.create_task(self._run(Path(folder), end, tenant)))
        await settle()
        return end

    async def end_all(self) -> None:
        await cancel_all(self._tasks)

    async def _run(self, folder: Path, end: asyncio.Event, tenant: str) -> None:
        async with self._slots.holding(folder, tenant=tenant):
            self.running.append(folder.name)
            await end.wait()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def engine_with(
    *names: str, max_users: int = 8
) -> AsyncIterator[tuple[AdapterSlots, LoadingWorker, Requests]]:
    slots, worker = AdapterSlots(names, max_users=max_users), LoadingWorker()
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
                async with slots.holding(C, tenant="one"):
                    pass
        await requests.begin(A)
        assert (requests.running, worker.started) == (["A"], ["C", "C", "A"])


async def test_adapter_that_has_changed_is_loaded_again():
    async with engine_with("one", "two") as (slots, worker, requests):
        await requests.begin(A)
        slots.forget(A)
        await requests.begin(A)
        assert worker.adapters == {"one": "A", "two": "A"}


async def test_a_tenant_does_not_wait_for_all_adapters_of_another():
    async with engine_with("place") as (_, _, requests):
        ends = [await requests.begin(f"A{number}") for number in range(5)]
        ends += [await requests.begin(name, tenant="two") for name in ("B0", "B1")]
        for end in ends:
            end.set()
            await settle()
        # A1 was to replace A0 before the other tenant came.
        assert requests.running == ["A0", "A1", "B0", "A2", "B1", "A3", "A4"]


async def test_tenants_that_use_all_places_have_the_same_number_of_them():
    async with engine_with("1", "2", "3", "4") as (_, worker, requests):
        ends = [await requests.begin(f"A{number}") for number in range(8)]
        for number in range(8):
            await requests.begin(f"B{number}", tenant="two")
        for end in ends[:6]:
            end.set()
            await settle()
        assert sorted(worker.adapters.values()) == ["A6", "A7", "B0", "B1"]


async def test_no_tenant_takes_a_used_place_of_another_that_has_no_more_places():
    async with engine_with("1", "2") as (_, _, requests):
        await requests.begin("B1", tenant="two")
        first = await requests.begin("A1")
        await requests.begin("A2")
        # A2 waits for A1, although B1 was used less recently, and B1 gets further requests.
        await requests.begin("B1", tenant="two")
        assert requests.running == ["B1", "A1", "B1"]
        first.set()
        await settle()
        assert requests.running == ["B1", "A1", "B1", "A2"]


async def test_the_tenant_with_most_idle_adapters_loses_one_first():
    async with engine_with("1", "2", "3") as (_, worker, requests):
        for name, tenant in (("B1", "two"), ("A1", "one"), ("A2", "one"), ("A3", "one")):
            (await requests.begin(name, tenant=tenant)).set()
            await settle()
        assert worker.adapters == {"1": "B1", "2": "A3", "3": "A2"}


async def test_requests_beyond_those_that_run_give_way_to_another_tenant():
    async with engine_with("place", max_users=2) as (_, worker, requests):
        ends = [await requests.begin(A) for _ in range(5)]
        other = await requests.begin(B, tenant="two")
        assert requests.running == ["A", "A"]
        for end in ends:
            end.set()
        await settle()
        assert requests.running == ["A", "A", "B"]
        other.set()
        await settle()
        assert requests.running == ["A", "A", "B", "A", "A", "A"]
        assert worker.started == ["A", "B", "A"]
