"""Engines that die during streams: the streams continue without repeated tokens."""

import asyncio
from pathlib import Path

import aiohttp
import openai
import pytest
from chat_model import make_chat_model
from server_process import HEADERS, KEY, ServerProcess, server_process
from writing_engine import WritingEngine, cut_out, served, until, written

from millrace.core.errors import EngineLost
from millrace.core.protocols import Engine, OnCompletion, OnTokens
from millrace.core.records import Completion, Request
from millrace.inference.pool import EnginePool

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Count."}]}
TEXT = "one two three four"


class MortalEngine(WritingEngine):
    """Continues where a dead engine stopped; dies after `life` tokens."""

    def __init__(self, text: str, *, life: int | None = None) -> None:
        super().__init__(text)
        self.life = life
        self.prefixes: list[int] = []  # numbers of tokens that it resumed from

    async def generate(
        self,
        request: Request,
        on_tokens: OnTokens | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        done = written(self.texts[0])
        first = 0 if request.partial is None else len(request.partial.tokens)
        self.prefixes.append(first)
        for place in range(first, len(done.tokens)):
            if self.life == place:
                raise EngineLost("It was killed.")
            await self.gate.wait()
            await asyncio.sleep(0)
            if on_tokens is not None:
                on_tokens(cut_out(done, place, 0))
        return [done]


async def pool_of(*engines: MortalEngine, max_wait_s: float = 30.0) -> EnginePool:
    pool = EnginePool(replaces=True, max_wait_s=max_wait_s)
    for engine in engines:
        await pool.join(engine, prepare=ready)
    return pool


async def ready(_engine: Engine) -> None: ...


async def text_of(stream: openai.AsyncStream) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def test_stream_continues_on_another_engine_without_repeated_tokens():
    first, second = MortalEngine(TEXT, life=5), MortalEngine(TEXT)
    async with served(await pool_of(first, second)) as client:
        stream = await client.chat.completions.create(**ASK, stream=True, logprobs=True)
        chunks = [chunk.choices[0] async for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == TEXT
    rows = [row.token for chunk in chunks if chunk.logprobs for row in chunk.logprobs.content or []]
    assert "".join(rows) == f"{TEXT}<|im_end|>"
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
    assert second.prefixes == [5]


async def test_stream_waits_for_the_restart_of_its_only_engine():
    first, second = MortalEngine(TEXT, life=5), MortalEngine(TEXT)
    pool = await pool_of(first, max_wait_s=0.05)
    async with served(pool) as client:
        stream = await client.chat.completions.create(**ASK, stream=True)
        reading = asyncio.create_task(text_of(stream))
        await until(lambda: pool.num_engines == 0)
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(**ASK)
        await pool.join(second, prepare=ready)
        assert await reading == TEXT
    assert second.prefixes == [5]
    assert refused.value.status_code == 503
    assert refused.value.code == "no_engine"
    assert refused.value.response.headers["Retry-After"] == "5"
    assert "No engine was up for 0.05 s" in str(refused.value)


async def test_request_without_an_engine_waits_for_one():
    pool = await pool_of()
    async with served(pool) as client:
        asking = asyncio.create_task(client.chat.completions.create(**ASK))
        await asyncio.sleep(0.05)
        assert not asking.done()
        await pool.join(MortalEngine(TEXT), prepare=ready)
        assert (await asking).choices[0].message.content == TEXT


class Listening:
    """Reads a stream of the given seed to its end."""

    def __init__(self, client: openai.AsyncOpenAI, seed: int) -> None:
        self.tokens: list[str] = []
        self.task = asyncio.create_task(self._read(client, seed))

    async def _read(self, client: openai.AsyncOpenAI, seed: int) -> list[str]:
        async for chunk in await client.chat.completions.create(
            **ASK, seed=seed, top_p=0.95, logprobs=True, stream=True
        ):
            (choice,) = chunk.choices
            self.tokens += [
                row.token for row in (choice.logprobs and choice.logprobs.content) or []
            ]
        assert choice.finish_reason in ("stop", "length")
        return self.tokens


async def until_health(server: ServerProcess, wanted: dict[str, object]) -> None:
    async with aiohttp.ClientSession() as http:
        while (found := await (await http.get(f"{server.url}/health")).json()) != wanted:
            assert found["engines"] == 2
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_streams_survive_killed_engines_even_all_at_once(tmp_path: Path):
    model = make_chat_model(tmp_path / "model", max_context=512)
    options = ["--engines", "2"]
    with server_process(model, *options, logs=tmp_path / "logs") as server:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key=KEY, max_retries=0
        ) as client:
            whole = await asyncio.gather(*(Listening(client, seed).task for seed in range(6)))
            for victims, status in ((["engine-0"], "degraded"), (["engine-0", "engine-1"], "down")):
                engines = [server.engine(name) for name in victims]  # found before they are busy
                streams = [Listening(client, seed) for seed in range(6)]
                await until(lambda: any(stream.tokens for stream in streams))  # noqa: B023
                for engine in engines:
                    engine.kill()
                assert sum(not stream.task.done() for stream in streams) > 2  # few end that soon
                dead = {"status": status, "engines": 2, "serving": 2 - len(victims)}
                await until_health(server, dead)
                late = Listening(client, 0)
                assert [await stream.task for stream in streams] == whole
                assert await late.task == whole[0]
                await until_health(server, {"status": "ok", "engines": 2, "serving": 2})
            async with aiohttp.ClientSession(headers=HEADERS) as http:
                metrics = await (await http.get(f"{server.url}/metrics")).text()
    assert "millrace_engine_restarts_total 3" in metrics
