"""Limits on single clients: sizes, numbers, rates and timeouts, over real sockets."""

import asyncio
import contextlib
import itertools
import socket

import aiohttp
import openai
import pytest
from writing_engine import WritingEngine, served, until

from millrace.serving.clients import MAX_CLIENTS, RateLimit
from millrace.serving.options import ServerLimits

HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)
SOON_S = 0.2
LATE_S = 20.0  # only a failing test takes this long


def port_of(client) -> int:
    return client.base_url.port


async def test_too_many_requests_get_retry_after():
    async with served(WritingEngine("x"), limits=ServerLimits(rate=3.0)) as client:
        url = f"http://127.0.0.1:{port_of(client)}"
        async with aiohttp.ClientSession() as http:
            found = [await http.get(f"{url}/v1/models") for _ in range(8)]
            refused = [response for response in found if response.status == 429]
            assert [response.status for response in found[:3]] == [200] * 3
            assert refused
            assert refused[0].headers["Retry-After"] == "1"
            assert (await refused[0].json())["error"]["type"] == "rate_limit_error"
            assert (await http.get(f"{url}/health")).status == 200  # health checks are not counted


async def test_clients_without_the_key_do_not_use_up_its_rate():
    async with served(WritingEngine("x"), key="right", limits=ServerLimits(rate=1.0)) as client:
        url = f"http://127.0.0.1:{port_of(client)}/v1/models"
        async with aiohttp.ClientSession() as http:
            wrong = {"Authorization": "Bearer wrong"}
            statuses = [(await http.get(url, headers=wrong)).status for _ in range(4)]
            assert statuses[0] == 401
            assert 429 in statuses  # guessing keys is limited, too
            right = {"Authorization": "Bearer right"}
            assert (await http.get(url, headers=right)).status == 200


def test_rate_limit_refills_up_to_one_second():
    now = [0.0]
    limit = RateLimit(2.0, now_s=lambda: now[0])
    assert [limit.wait_s("a") for _ in range(3)] == [0.0, 0.0, 0.5]
    assert limit.wait_s("b") == 0.0
    now[0] += 0.5
    assert [limit.wait_s("a") for _ in range(2)] == [0.0, 0.5]
    now[0] += 1000.0
    assert [limit.wait_s("a") for _ in range(3)] == [0.0, 0.0, 0.5]


def test_rate_below_one_per_second_lets_one_request_pass():
    now = [0.0]
    limit = RateLimit(0.1, now_s=lambda: now[0])
    assert [limit.wait_s("a") for _ in range(2)] == [0.0, 10.0]


def test_rate_limit_table_is_bounded():
    limit = RateLimit(1.0, now_s=lambda: 0.0)
    for client in range(3 * MAX_CLIENTS):
        limit.wait_s(str(client))
    assert len(limit._left) == MAX_CLIENTS


async def closed(reader: asyncio.StreamReader) -> None:
    """Returns when the server has closed the connection in any way."""
    async with asyncio.timeout(LATE_S):
        with contextlib.suppress(ConnectionResetError):
            while await reader.read(1024):
                pass


@pytest.mark.parametrize("head", [b"", b"GET /hea", HEAD], ids=["silent", "half a line", "headers"])
async def test_slow_headers_are_cut_off(head: bytes):
    async with served(WritingEngine("x"), limits=ServerLimits(timeout_s=SOON_S)) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(client))

        async def trickle() -> None:
            for number in itertools.count():
                writer.write(f"X-{number}: y\r\n".encode() if head == HEAD else head[:1])
                await asyncio.sleep(SOON_S / 4)

        writer.write(head)
        trickling = asyncio.create_task(trickle())
        await closed(reader)
        trickling.cancel()
        writer.close()


async def test_slow_body_is_refused():
    async with served(WritingEngine("x"), limits=ServerLimits(timeout_s=SOON_S)) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(client))
        writer.write(HEAD + b"Content-Length: 1000\r\n\r\n{")
        async with asyncio.timeout(LATE_S):
            assert b" 408 " in await reader.readline()
        writer.close()


async def test_client_that_does_not_read_loses_its_slots():
    engine = WritingEngine("a story that is longer than all buffers between us " * 4_000)
    async with served(engine, limits=ServerLimits(timeout_s=SOON_S)) as client:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port_of(client)))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
        body = b'{"model": "tiny", "messages": [{"role": "user", "content": "?"}], "stream": true}'
        writer.write(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(LATE_S):
            await reader.readline()  # the stream has started; nothing more is read
            await until(lambda: engine.cancelled)
        writer.close()


async def test_more_connections_than_the_limit_are_closed_at_once():
    async with served(WritingEngine("x"), limits=ServerLimits(connections=3)) as client:
        opened = [await asyncio.open_connection("127.0.0.1", port_of(client)) for _ in range(4)]
        await closed(opened[3][0])
        for reader, writer in opened:
            writer.close()
            await closed(reader)
        await client.models.list()


async def test_key_with_many_requests_leaves_its_part_of_them_to_another_key():
    engine, limits = WritingEngine("x"), ServerLimits(requests=8)
    engine.gate.clear()
    async with served(engine, key="one", other_key="two", limits=limits) as client:

        def ask(key: str, *, times: int) -> list[asyncio.Task[openai.types.Completion]]:
            completions = client.with_options(api_key=key).completions
            asked = [completions.create(model="tiny", prompt="a") for _ in range(times)]
            return [asyncio.create_task(each) for each in asked]

        async def refused(asked: list[asyncio.Task[openai.types.Completion]]) -> int:
            await until(lambda: len(engine.requests) + sum(t.done() for t in every) == len(every))
            errors = [task.exception() for task in asked if task.done()]
            assert all(isinstance(error, openai.RateLimitError) for error in errors)
            return len(errors)

        every = large = ask("one", times=12)
        assert await refused(large) == 12 - 6  # half of all places, and half of the other half
        every = [*large, *(small := ask("two", times=3))]
        assert await refused(small) == 3 - 2
        engine.gate.set()
        done = await asyncio.gather(*every, return_exceptions=True)
        assert sum(isinstance(each, openai.types.Completion) for each in done) == 8
        await asyncio.gather(*ask("one", times=6))  # all places are free again


async def test_malformed_requests_write_nothing_to_the_log(caplog):
    """The error of aiohttp quotes the line. That may be the header with the key of a client."""
    async with served(WritingEngine("x"), key="a-secret") as client:
        for line in (b"Authorization: Bearer a-secret\x7f", b"A\x1b[2J: b", b"Content-Length: x"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(client))
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + line + b"\r\n\r\n")
            assert b" 400 " in await reader.readline()
            writer.close()
    assert caplog.text == ""
