import asyncio

import numpy as np
from fakes import ScriptedEngine

from millrace.core.records import Request, Sampling
from millrace.core.weight_update import WeightUpdate
from millrace.engines.pool import EnginePool


class HeldEngine(ScriptedEngine):
    """Keeps its requests until the test opens the gate."""

    def __init__(self) -> None:
        super().__init__("x")
        self.gate = asyncio.Event()

    async def generate(self, request):
        completions = await super().generate(request)
        await self.gate.wait()
        return completions


def make_request(name, *, n=1, session=None):
    return Request(id=name, prompt=np.zeros(1, np.int32), sampling=Sampling(), n=n, session=session)


async def start(pool, *requests):
    tasks = [asyncio.create_task(pool.generate(request)) for request in requests]
    await asyncio.sleep(0)
    return tasks


async def test_requests_go_to_the_engine_with_the_fewest_sequences():
    engines = [HeldEngine(), HeldEngine()]
    pool = EnginePool(engines)
    await start(pool, make_request("a", n=8), make_request("b"), make_request("c", n=2))
    assert [r.id for r in engines[0].requests] == ["a"]
    assert [r.id for r in engines[1].requests] == ["b", "c"]


async def test_an_engine_that_finished_is_free_again():
    engines = [HeldEngine(), HeldEngine()]
    pool = EnginePool(engines)
    tasks = await start(pool, make_request("a", n=8), make_request("b", n=4))
    engines[0].gate.set()
    await tasks[0]
    await start(pool, make_request("c"))
    assert [r.id for r in engines[0].requests] == ["a", "c"]


async def test_a_session_stays_with_its_engine_until_that_is_clearly_more_loaded():
    engines = [HeldEngine(), HeldEngine()]
    pool = EnginePool(engines)
    await start(pool, make_request("a", n=2), make_request("b", session="s"))
    # The second engine keeps it while it has up to 2 * 2 + 8 sequences, and then gives it away.
    await start(pool, make_request("c", n=11, session="s"), make_request("d", session="s"))
    assert [r.id for r in engines[1].requests] == ["b", "c", "d"]
    await start(pool, make_request("e", session="s"), make_request("f", session="s"))
    assert [r.id for r in engines[0].requests] == ["a", "e", "f"]


async def test_the_session_that_was_idle_longest_is_forgotten_first():
    engines = [HeldEngine(), HeldEngine()]
    engines[1].gate.set()
    pool = EnginePool(engines, max_sessions=2)
    (busy,) = await start(pool, make_request("busy"))
    for session in "abac":
        await pool.generate(make_request("to the second", session=session))
    engines[0].gate.set()
    await busy
    for session in "ab":
        await pool.generate(make_request(session, session=session))
    assert [r.id for r in engines[0].requests] == ["busy", "b"]
    assert engines[1].requests[-1].id == "a"


async def test_abort_reaches_the_engine_that_has_the_request():
    engines = [HeldEngine(), HeldEngine()]
    pool = EnginePool(engines)
    await start(pool, make_request("a"), make_request("b"))
    await pool.abort(["b", "never seen"])
    assert engines[0].aborted == []
    assert engines[1].aborted == ["b"]


async def test_a_swap_is_visible_when_the_slowest_engine_has_it():
    class Lagging(ScriptedEngine):
        async def swap(self, update):
            return update.version - 1

    update = WeightUpdate(
        version=5, tensors=(), num_bytes=0, checksum=0, transport="shm", location=""
    )
    assert await EnginePool([ScriptedEngine("x"), Lagging("x")]).swap(update) == 4


async def test_pause_and_resume_reach_every_engine():
    engines = [ScriptedEngine("x"), ScriptedEngine("y")]
    pool = EnginePool(engines)
    await pool.pause()
    assert [engine.is_paused for engine in engines] == [True, True]
    await pool.resume()
    assert [engine.is_paused for engine in engines] == [False, False]
