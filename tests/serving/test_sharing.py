"""Several clients share one real engine, over real sockets: fairness, caches, and no leaks."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from chat_model import chat_tokenizer, make_chat_model
from in_process_engine import InProcessEngine
from writing_engine import WELL, until

from millrace.config import EngineConfig
from millrace.core.records import Request
from millrace.environments.tools.calls import FORMATS
from millrace.inference.backend import EmbeddedBackend, EngineSpec
from millrace.inference.embedded.build import build_engine
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.serving.fair_queue import FairQueue, Flow, QueuedPart
from millrace.serving.metrics import ServerMetrics
from millrace.serving.options import ServerLimits
from millrace.serving.served_model import ServedModel
from millrace.serving.server import http_listener, make_app

KEYS = ("key-a", "key-b")
SLOTS = 8


class CountedEngine:
    """An engine that counts its forward passes."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self):
        self.num_steps += 1
        return self._engine.step()


def count_passes(queue: FairQueue, engine: CountedEngine) -> list[tuple[int, int]]:
    """Of each part of a request: the tokens that it may have, and the forward passes from the
    moment it entered the queue. HTTP is not counted: what it takes depends on the machine."""
    passes: list[tuple[int, int]] = []
    places = queue.places

    @contextlib.asynccontextmanager
    async def counted(flow: Flow, request: Request) -> AsyncIterator[QueuedPart]:
        before = engine.num_steps
        async with places(flow, request) as part:
            yield part
        passes.append((request.sampling.max_new_tokens, engine.num_steps - before))

    queue.places = counted  # type: ignore[method-assign]
    return passes


@dataclass(frozen=True, kw_only=True)
class Server:
    engine: CountedEngine
    passes: list[tuple[int, int]]  # see count_passes
    metrics: ServerMetrics
    url: str
    http: aiohttp.ClientSession

    async def complete(self, *, key: str = KEYS[0], **body: Any) -> dict[str, Any]:
        async with self.post(key=key, **body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    def post(self, *, key: str = KEYS[0], **body: Any):
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": "tiny", "temperature": 0, **body}
        return self.http.post(f"{self.url}/v1/completions", json=body, headers=headers)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_chat_model(tmp_path_factory.mktemp("model"))


@contextlib.asynccontextmanager
async def serving(model: Path) -> AsyncIterator[Server]:
    config = EngineConfig(max_sequences=SLOTS)
    spec = EngineSpec(config=config, device="cpu", model_path=str(model), version=0)
    options = EmbeddedBackend(block_tokens=8, prefill_tokens=32)
    counted = CountedEngine(build_engine(spec, options=options))
    engine = InProcessEngine(counted, receiver=None)  # type: ignore[arg-type]
    metrics = ServerMetrics()
    served = ServedModel(
        engine,
        tokenizer=chat_tokenizer(),
        name="tiny",
        max_context=512,
        max_sequences=SLOTS,
        separates_clients=True,
        tool_format=FORMATS["hermes"],
        metrics=metrics,
    )
    app = make_app(served, keys=KEYS, limits=ServerLimits(), health=lambda: WELL)
    running = asyncio.create_task(engine.run())
    async with (
        http_listener(app, host="127.0.0.1", port=0) as url,
        aiohttp.ClientSession() as http,
    ):
        passes = count_passes(served._queue, counted)  # type: ignore[attr-defined]
        yield Server(engine=counted, passes=passes, metrics=metrics, url=url, http=http)
    served.close()
    running.cancel()


LARGE = {
    "many completions": {"prompt": ["abc"] * 16, "n": 16, "max_tokens": 300},
    "long prompts": {"prompt": [f"{i:02} " * 150 for i in range(64)], "max_tokens": 2},
}


@pytest.mark.parametrize("large", LARGE.values(), ids=LARGE.keys())
@pytest.mark.parametrize("key", KEYS, ids=["same client", "another client"])
async def test_small_request_beside_a_large_one_takes_at_most_three_times_its_passes(
    model: Path, large: dict[str, Any], key: str
):
    async with serving(model) as server:

        async def num_passes() -> int:
            await server.complete(prompt="Hello.", max_tokens=10, key=key)
            return [passes for max_tokens, passes in server.passes if max_tokens == 10][-1]

        alone = await num_passes()
        asking = asyncio.create_task(server.complete(**large))
        await until(lambda: asking.done() or server.engine.stats().generated_tokens > 12)
        beside = [await num_passes() for _ in range(2)]
        assert not asking.done()
        assert max(beside) <= 3 * alone, (alone, beside)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: server.metrics.running == 0)


async def test_key_that_fills_the_server_with_requests_leaves_places_for_others(model: Path):
    async with serving(model) as server:
        asking = [
            asyncio.create_task(server.complete(prompt=f"{i}", max_tokens=400)) for i in range(40)
        ]
        await until(lambda: server.engine.stats().generated_tokens > 100)
        assert server.engine.stats().running < SLOTS
        await server.complete(prompt="Hello.", max_tokens=10, key=KEYS[1])
        assert [passes for max_tokens, passes in server.passes if max_tokens == 10][-1] <= 30
        assert sum(not task.done() for task in asking) > SLOTS  # which filled the server until then
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await until(lambda: server.metrics.running == 0)


async def test_cached_prompts_are_not_shared_between_keys(model: Path):
    async with serving(model) as server:
        ask = {"prompt": "A secret that another client must not find. " * 4, "max_tokens": 1}

        async def num_cached(**more: Any) -> int:
            before = server.engine.stats().cached_tokens
            await server.complete(**ask, **more)
            return server.engine.stats().cached_tokens - before

        assert await num_cached() == 0
        assert await num_cached() > 100
        assert await num_cached(key=KEYS[1]) == 0
        assert await num_cached(key=KEYS[1]) > 100
        # Nor does the name of a conversation lead to that of another key.
        assert await num_cached(key=KEYS[0], prompt_cache_key="talk") > 100


def num_tasks() -> int:
    """Without those of connections that wait for another request."""
    return len([task for task in asyncio.all_tasks() if "RequestHandler" not in repr(task)])


async def test_clients_that_disconnect_leave_nothing_behind(model: Path):
    async with serving(model) as server:
        await server.complete(prompt="a", max_tokens=1)
        free, tasks = server.engine.stats().free_blocks, num_tasks()
        draw = random.Random(0)

        async def client(number: int) -> int:
            """Returns the number of events that it read before it left."""
            leaves_after = draw.choice([0, 1, 5, 20, 1000])
            ask = {"prompt": f"{number} abc", "n": draw.choice([1, 3]), "max_tokens": 60}
            num_read = 0
            async with server.post(**ask, stream=True, key=draw.choice(KEYS)) as response:
                async for line in response.content:
                    num_read += line.startswith(b"data: {")
                    if num_read >= leaves_after:
                        response.close()
                        break
            return num_read

        read = await asyncio.gather(*(client(number) for number in range(20)))
        assert min(read) < 2
        assert max(read) > 20
        await until(lambda: server.metrics.running == 0)
        assert server.metrics.disconnects > 0
        await until(lambda: server.engine.stats().running == server.engine.stats().waiting == 0)
        assert server.engine.stats().free_blocks == free
        await server.complete(prompt="a", n=SLOTS, max_tokens=4)  # all places are free again
        assert num_tasks() <= tasks
