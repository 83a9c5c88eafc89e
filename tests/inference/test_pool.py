import asyncio
from dataclasses import replace

import numpy as np
import pytest
from engine_rig import assert_same, finish_all, make_engine, weights
from engine_rig import make_request as letters_request
from fakes import Listener, ScriptedEngine, make_chunk, make_completion
from in_process_engine import InProcessEngine

from millrace.cluster.messages import (
    AbortRequests,
    Done,
    Generate,
    Message,
    Swapped,
    SwapWeights,
    TokensSampled,
)
from millrace.cluster.worker import Worker
from millrace.core.errors import EngineLost
from millrace.core.records import Request, Sampling, WeightUpdate
from millrace.inference.pool import EnginePool
from millrace.inference.remote import RemoteEngine


class HeldEngine(ScriptedEngine):
    """Keeps its requests until the test opens the gate, but for those with a ready answer."""

    def __init__(self, ready=None) -> None:
        super().__init__("x")
        self.gate = asyncio.Event()
        self.finish = "stop"
        self.ready = ready or {}  # request id -> completions

    async def generate(self, request, on_tokens=None, on_completion=None):
        if request.id in self.ready:
            return self.ready[request.id]
        completions = await super().generate(request)
        await self.gate.wait()
        ended = [replace(completion, finish=self.finish) for completion in completions]
        for member, completion in enumerate(ended):
            if on_tokens is not None:
                on_tokens(make_chunk(completion, member=member))
            if on_completion is not None:
                on_completion(member, completion)
        return ended


def make_request(name, *, n=1, session=None, pinned=False):
    prompt, sampling = np.zeros(1, np.int32), Sampling()
    return Request(id=name, prompt=prompt, sampling=sampling, n=n, session=session, pinned=pinned)


async def until(done):
    for _ in range(100):
        if done():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never happened")


async def start(pool, *requests):
    tasks = [asyncio.create_task(pool.generate(request)) for request in requests]
    await asyncio.sleep(0)
    return tasks


async def test_requests_go_to_least_loaded_engine():
    engines = [HeldEngine(), HeldEngine()]
    pool = EnginePool(engines)
    await start(pool, make_request("a", n=8), make_request("b"), make_request("c", n=2))
    assert [r.id for r in engines[0].requests] == ["a"]
    assert [r.id for r in engines[1].requests] == ["b", "c"]


async def test_finished_engine_gets_requests_again():
    engines = [HeldEngine(), HeldEngine()]
    pool = EnginePool(engines)
    tasks = await start(pool, make_request("a", n=8), make_request("b", n=4))
    engines[0].gate.set()
    await tasks[0]
    await start(pool, make_request("c"))
    assert [r.id for r in engines[0].requests] == ["a", "c"]


async def test_session_stays_on_its_engine_until_clearly_overloaded():
    engines = [HeldEngine(), HeldEngine()]
    pool = EnginePool(engines)
    await start(pool, make_request("a", n=2), make_request("b", session="s"))
    # The second engine keeps it while it has up to 2 * 2 + 8 sequences, and then gives it away.
    await start(pool, make_request("c", n=11, session="s"), make_request("d", session="s"))
    assert [r.id for r in engines[1].requests] == ["b", "c", "d"]
    await start(pool, make_request("pinned", session="s", pinned=True))
    assert engines[1].requests[-1].id == "pinned"
    await start(pool, make_request("e", session="s"), make_request("f", session="s"))
    assert [r.id for r in engines[0].requests] == ["a", "e", "f"]


async def test_least_recent_session_is_forgotten_first():
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


async def test_abort_reaches_engine_of_the_request():
    engines = [HeldEngine(), HeldEngine()]
    pool = EnginePool(engines)
    await start(pool, make_request("a"), make_request("b"))
    await pool.abort(["b", "never seen"])
    assert engines[0].aborted == []
    assert engines[1].aborted == ["b"]


async def test_swap_returns_version_of_slowest_engine():
    class Lagging(ScriptedEngine):
        async def swap(self, update):
            return update.version - 1

    update = WeightUpdate(
        version=5, tensors=(), num_bytes=0, checksum=0, transport="shm", location=""
    )
    assert await EnginePool([ScriptedEngine("x"), Lagging("x")]).swap(update) == 4


async def test_lent_engines_pause_alone_and_requests_go_to_the_others():
    pool, lent, other = EnginePool(replaces=True), ScriptedEngine("x"), ScriptedEngine("y")
    await pool.join(lent, prepare=None, is_lent=True)
    await pool.pause(which="lent")  # requests wait for the only engine
    await pool.generate(make_request("first"))
    await pool.join(other, prepare=None)
    assert (lent.is_paused, other.is_paused) == (True, False)
    for i in range(4):
        await pool.generate(make_request(str(i), session="s"))
    assert (len(lent.requests), len(other.requests)) == (1, 4)
    late = ScriptedEngine("z")
    await pool.join(late, prepare=None, is_lent=True)
    assert late.is_paused
    await pool.resume()
    assert (lent.is_paused, late.is_paused) == (False, False)
    await pool.generate(make_request("last"))
    assert len(lent.requests) == 2


class CutEngine(ScriptedEngine):
    """Generates until it is aborted, and returns what it has by then."""

    def __init__(self) -> None:
        super().__init__("a")
        self._cut = asyncio.Event()

    async def generate(self, request, on_tokens=None, on_completion=None):
        self.requests.append(request)
        await self._cut.wait()
        completion = replace(make_completion("a"), finish="abort")
        if on_tokens is not None:
            on_tokens(make_chunk(completion))
        if on_completion is not None:
            on_completion(0, completion)
        return [completion]

    async def abort(self, ids):
        await super().abort(ids)
        self._cut.set()


async def test_engine_that_stays_asleep_hands_its_sequences_over_and_gets_no_new_ones():
    pool, lent, other = EnginePool(replaces=True), CutEngine(), ScriptedEngine("whole")
    await pool.join(lent, prepare=None, is_lent=True)
    listener, received = Listener(), []
    generating = asyncio.create_task(
        pool.generate(
            make_request("r", session="s"), listener, lambda member, done: received.append(done)
        )
    )
    await until(lambda: lent.requests)
    await pool.join(other, prepare=None)
    assert pool.can_spare_lent
    await pool.pause(sleep=True, which="lent", keeps=True)
    (completion,) = await generating
    assert completion.text == "whole"
    assert received == [completion]
    assert [chunk.finish for chunk in listener.chunks] == [None, "stop"]
    (resumed,) = other.requests
    assert resumed.partial.text == "a"
    await pool.generate(make_request("pinned", session="s", pinned=True))
    async with pool.together():  # as an evaluation does
        pass
    assert (len(lent.requests), lent.is_paused) == (1, True)
    await pool.resume()
    assert not lent.is_paused


async def test_pause_and_resume_reach_every_engine():
    engines = [ScriptedEngine("x"), ScriptedEngine("y")]
    pool = EnginePool(engines)
    await pool.pause()
    assert [engine.is_paused for engine in engines] == [True, True]
    await pool.resume()
    assert [engine.is_paused for engine in engines] == [False, False]


class YieldingEngine(ScriptedEngine):
    """Answers with these completions first, one list per request, and then as scripted."""

    def __init__(self, *answers) -> None:
        super().__init__("whole")
        self.answers = list(answers)

    async def generate(self, request, on_tokens=None, on_completion=None):
        completions = await super().generate(request, on_tokens)
        if self.answers:
            completions = self.answers.pop(0)
        for member, completion in enumerate(completions if on_completion else []):
            on_completion(member, completion)
        return completions


def interrupted(text):
    return replace(make_completion(text), finish="interrupt")


async def test_interrupted_completion_is_resumed_until_it_ends():
    cut = interrupted("ab")
    engine = YieldingEngine([make_completion("done"), interrupted("a")], [cut])
    request = replace(make_request("r", n=2), seed=7, index=4)
    received = []
    first, second = await EnginePool([engine]).generate(
        request, on_completion=lambda member, completion: received.append((member, completion))
    )
    assert (first.text, second.text) == ("done", "whole")
    assert received == [(0, first), (1, second)]
    _, *resumed = engine.requests
    assert [(r.n, r.seed, r.index) for r in resumed] == [(1, 7, 5), (1, 7, 5)]
    assert resumed[1].partial is cut


async def test_sequence_without_tokens_is_requested_again():
    nothing = replace(interrupted("a"), tokens=np.empty(0, np.int32))
    engine = YieldingEngine([nothing])
    (completion,) = await EnginePool([engine]).generate(make_request("r"))
    assert completion.text == "whole"
    assert engine.requests[1].partial is None


async def test_interrupted_completion_resumes_on_least_loaded_engine():
    idle, busy = HeldEngine(), HeldEngine({"r": [interrupted("a")]})
    pool = EnginePool([idle, busy])
    small, large = make_request("small", n=2), make_request("large", n=8)
    tasks = await start(pool, small, make_request("r"), large)
    await until(lambda: len(idle.requests) + len(busy.requests) == 3)
    by_id = {r.id: engine for engine in (idle, busy) for r in engine.requests}
    assert by_id == {"small": idle, "large": busy, "r:0": idle}
    for task in tasks:
        task.cancel()


async def test_aborted_request_is_not_resumed():
    engine = HeldEngine()
    engine.texts = ("a",)
    pool = EnginePool([engine])
    listener, received = Listener(), []

    def ended(member, completion):
        received.append((member, completion.finish))

    task = asyncio.create_task(pool.generate(make_request("r"), listener, ended))
    await asyncio.sleep(0)
    await pool.abort(["r"])  # the engine interrupts it before the abort arrives
    engine.finish = "interrupt"
    engine.gate.set()
    assert [(c.finish, c.text) for c in await task] == [("abort", "a")]
    listener.assert_received(await task)
    assert received == [(0, "abort")]
    assert len(engine.requests) == 1


async def test_abort_reaches_resumed_completions():
    first, second = HeldEngine({"r": [interrupted("a"), interrupted("b")]}), HeldEngine()
    pool = EnginePool([first, second])
    (task,) = await start(pool, make_request("r", n=2))
    await until(lambda: second.requests)
    await pool.abort(["r"])
    assert (first.aborted, second.aborted) == (["r:0"], ["r:1"])
    for engine in (first, second):
        engine.finish = "abort"
        engine.gate.set()
    assert [completion.finish for completion in await task] == ["abort", "abort"]


async def test_expired_completion_aborts_its_siblings():
    expired = replace(make_completion("a"), finish="expire")
    ready = {"r": [interrupted("a"), interrupted("b")], "r:0": [expired]}
    completions = await EnginePool([HeldEngine(ready)]).generate(make_request("r", n=2))
    assert [(c.finish, c.text) for c in completions] == [("expire", "a"), ("abort", "b")]


class DyingEngine(ScriptedEngine):
    """Streams the first tokens of each completion, then dies when the test sets `dies`."""

    def __init__(self, *streamed: str) -> None:
        super().__init__("never")
        self.streamed = streamed
        self.dies = asyncio.Event()

    async def generate(self, request, on_tokens=None, on_completion=None):
        self.requests.append(request)
        for member, text in enumerate(self.streamed):
            piece = make_chunk(make_completion(text, version=3), member=member)
            on_tokens(replace(piece, finish=None))
        await self.dies.wait()
        raise EngineLost("Worker 'engine-0' was killed.")

    async def swap(self, update):
        await self.dies.wait()
        raise EngineLost("Worker 'engine-0' was killed.")


async def nothing(engine):
    """It needs no weights."""


async def test_sequences_of_lost_engine_resume_from_last_streamed_token():
    dying, healthy = DyingEngine("ab"), ScriptedEngine("rest")
    dying.dies.set()
    pool = EnginePool([dying, healthy], replaces=True)
    listener = Listener()
    request = replace(make_request("r", n=2), seed=7, index=4)
    first, second = await pool.generate(request, listener)
    assert (first.text, second.text) == ("rest", "rest")
    known, anew = healthy.requests
    assert (known.n, known.seed, known.index) == (1, 7, 4)
    assert known.partial.tokens.tolist() == [ord("a"), ord("b")]
    assert known.partial.logprobs.tolist() == [-0.5, -0.5]
    assert known.partial.versions.tolist() == [3, 3]
    assert (anew.index, anew.partial) == (5, None)
    received = [p.tokens.tolist() for p in listener.chunks if p.member == 0]
    assert np.concatenate(received).tolist() == [ord(c) for c in "abrest"]
    assert (pool.num_resumed, pool.num_resumed_tokens, pool.num_restarted) == (1, 2, 1)


async def test_sequence_of_lost_engine_keeps_routes_of_its_partial():
    dying, healthy = DyingEngine("ab"), ScriptedEngine("rest")
    dying.dies.set()
    pool = EnginePool([dying, healthy], replaces=True)
    routes = np.ones((3, 2, 2), np.uint8)
    partial = replace(make_completion("x"), routes=routes)
    await pool.generate(replace(make_request("r"), partial=partial, routes_from=0))
    (known,) = healthy.requests
    assert known.partial.tokens.tolist() == [ord(c) for c in "xab"]
    assert known.partial.routes is routes  # the lost engine never sent its own routes
    assert known.routes_from == 0


async def test_completion_that_ended_before_engine_loss_is_delivered_once():
    class Doomed(DyingEngine):
        async def generate(self, request, on_tokens=None, on_completion=None):
            on_completion(0, make_completion("done"))
            return await super().generate(request, on_tokens, on_completion)

    doomed, survivor = Doomed(), ScriptedEngine("rest")
    pool = EnginePool([doomed], replaces=True)
    received = []
    running = asyncio.create_task(
        pool.generate(
            make_request("r", n=2),
            on_completion=lambda member, completion: received.append((member, completion.text)),
        )
    )
    await asyncio.sleep(0)
    doomed.dies.set()
    await pool.join(survivor, prepare=nothing)
    done, other = await running
    assert (done.text, other.text) == ("done", "rest")
    assert received == [(0, "done"), (1, "rest")]
    assert [(request.n, request.index) for request in survivor.requests] == [(1, 1)]


async def test_request_without_streamed_tokens_restarts_on_next_engine():
    dying, other = DyingEngine(), ScriptedEngine("done")
    dying.dies.set()
    pool = EnginePool([dying], replaces=True)
    (generating,) = await start(pool, make_request("r", n=3))
    await until(lambda: pool.num_engines == 0)
    await pool.join(other, prepare=nothing)
    assert [completion.text for completion in await generating] == ["done"] * 3
    assert [request.n for request in other.requests] == [3]
    assert other.requests[0].coalesce


async def test_joining_engine_serves_once_prepared_with_state_of_pool():
    first, late = HeldEngine(), HeldEngine()
    pool = EnginePool([first], replaces=True)
    await pool.expire(4)
    await pool.pause()
    has_weights = asyncio.Event()

    async def prepare(engine):
        assert (engine.is_paused, engine.expired_before) == (True, [4])
        await has_weights.wait()

    joining = asyncio.create_task(pool.join(late, prepare=prepare))
    await start(pool, make_request("a"), make_request("b"))
    assert [request.id for request in first.requests] == ["a", "b"]
    await pool.resume()
    assert not late.is_paused
    has_weights.set()
    await joining
    await start(pool, make_request("c"))
    assert [request.id for request in late.requests] == ["c"]


async def test_swap_continues_without_lost_engine():
    dying = DyingEngine()
    dying.dies.set()
    pool = EnginePool([dying, ScriptedEngine("x")], replaces=True)
    update = WeightUpdate(
        version=5, tensors=(), num_bytes=0, checksum=0, transport="shm", location=""
    )
    assert await pool.swap(update) == 5
    assert pool.num_engines == 1


async def test_leaving_engine_finishes_its_requests_and_gets_no_more():
    leaving, staying = HeldEngine(), HeldEngine()
    pool = EnginePool([leaving, staying], replaces=True)
    (generating,) = await start(pool, make_request("a"))
    going = asyncio.create_task(pool.leave(leaving))
    await start(pool, make_request("b"), make_request("c", session="s"))
    assert [request.id for request in staying.requests] == ["b", "c"]
    assert not going.done()
    leaving.gate.set()
    await asyncio.gather(generating, going)
    assert pool.num_engines == 1


async def test_engine_loss_is_raised_without_replacement():
    dying = DyingEngine()
    dying.dies.set()
    with pytest.raises(EngineLost, match="was killed"):
        await EnginePool([dying]).generate(make_request("r"))


class TellingWorker:
    """A Worker that tells two pieces of a request and never answers it."""

    def __init__(self) -> None:
        self.calls = []

    async def call(self, message, *, on_part=None, **settings):
        self.calls.append(message)
        if isinstance(message, Generate):
            assert message.stream
            on_part(TokensSampled(pieces=[make_chunk(make_completion("a")) for _ in range(2)]))
            await asyncio.Event().wait()
        return Done()


async def test_callback_error_is_raised_and_frees_the_request():
    worker = TellingWorker()

    def refuse(piece):
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        await RemoteEngine(worker).generate(make_request("r"), refuse)  # pyright: ignore
    await until(lambda: len(worker.calls) == 2)
    assert worker.calls[1] == AbortRequests(ids=["r"])


async def test_weight_update_is_not_late_while_its_engine_is_paused():
    async def send(id: bytes, message: Message) -> None:
        if isinstance(message, SwapWeights):
            swaps.append(id)  # which the engine answers when it is awake
        else:
            worker.on_reply(id, Done())

    swaps: list[bytes] = []
    worker = Worker("engine-0", send=send, stop_timeout_s=1.0)
    engine = RemoteEngine(worker, swap_timeout_s=0.01)
    update = WeightUpdate(
        version=5, tensors=(), num_bytes=0, checksum=0, transport="shm", location=""
    )
    await engine.pause(sleep=True)
    swapping = asyncio.create_task(engine.swap(update))
    await asyncio.wait({swapping}, timeout=0.05)
    worker.on_reply(swaps[0], Swapped(version=5, stage_ms=0.0, gap_ms=0.0))
    assert await swapping == 5
    swapping = asyncio.create_task(engine.swap(update))
    await asyncio.wait({swapping}, timeout=0.05)
    await engine.resume()
    with pytest.raises(EngineLost, match=r"'engine-0' did not answer SwapWeights within 0\.01 s"):
        await swapping


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.8}])
async def test_completion_resumed_on_another_engine_is_unchanged(sampling):
    class SameWeights:
        def stage(self, update):
            return weights(seed=0)

        def close(self):
            """Nothing to let go."""

    request = letters_request(n=3, seed=3, max_new_tokens=40, **sampling)
    expected = finish_all(make_engine(eos_ids=()), [request])[request.id]
    embedded = [make_engine(eos_ids=()) for _ in range(2)]
    engines = [InProcessEngine(e, receiver=SameWeights(), interrupt="abort") for e in embedded]
    running = [asyncio.create_task(engine.run()) for engine in engines]
    pool = EnginePool(engines)
    listener = Listener()
    generating = asyncio.create_task(pool.generate(request, listener))
    for version in (1, 2, 3):
        update = WeightUpdate(
            version=version, tensors=(), num_bytes=0, checksum=0, transport="", location=""
        )
        for _ in range(6):
            await asyncio.sleep(0)
        await pool.swap(update)
    for completion, same in zip(await generating, expected, strict=True):
        assert_same(completion, same)
        assert set(completion.versions) == {0, 1, 2, 3}
    listener.assert_received(generating.result())
    assert all(engine.stats().generated_tokens > 0 for engine in embedded)
    for task in running:
        task.cancel()


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.8}])
async def test_completion_of_lost_engine_equals_uninterrupted_one(
    sampling,
):
    request = letters_request(n=3, seed=3, max_new_tokens=40, **sampling)
    expected = finish_all(make_engine(eos_ids=()), [request])[request.id]

    class Doomed(ScriptedEngine):
        async def generate(self, request, on_tokens=None, on_completion=None):
            engine = make_engine(eos_ids=())
            engine.add_request(request, stream=True)
            for _ in range(15):
                engine.step()
            for pieces in engine.take_chunks(coalesced=True).values():
                for piece in pieces:
                    on_tokens(piece)
            raise EngineLost("Worker 'engine-0' was killed.")

    survivor = InProcessEngine(make_engine(eos_ids=()), receiver=None)  # pyright: ignore
    running = asyncio.create_task(survivor.run())
    pool = EnginePool([Doomed("x"), survivor], replaces=True)
    for completion, same in zip(await pool.generate(request), expected, strict=True):
        assert_same(completion, same)
    assert pool.num_resumed == 3
    assert 3 < pool.num_resumed_tokens < 3 * 40
    running.cancel()


async def test_score_request_of_lost_engine_moves_to_another():
    class Reading(ScriptedEngine):
        async def score(self, requests):
            return [f"read {request}" for request in requests]

    class Doomed(ScriptedEngine):
        async def score(self, requests):
            raise EngineLost("Worker 'engine-0' was killed.")

    pool = EnginePool([Doomed("x"), Reading("x")], replaces=True)
    assert await pool.score(["a", "b"]) == ["read a", "read b"]
    assert pool.num_engines == 1
