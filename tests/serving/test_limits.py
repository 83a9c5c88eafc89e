"""What one client can cost the others: sizes, numbers, rates and patience, over real sockets."""

import asyncio
import contextlib
import itertools
import socket

import aiohttp
import pytest
from writing_engine import WritingEngine, served, until

from millrace.serving.listening import MAX_CLIENTS, RateLimit
from millrace.serving.options import ServerLimits

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
SOON_S = 0.2
LATE_S = 20.0  # a failed test, not a measure


def port_of(client) -> int:
    return client.base_url.port


async def test_who_asks_too_often_is_told_when_to_come_again():
    async with served(WritingEngine("x"), limits=ServerLimits(rate=3.0)) as client:
        url = f"http://127.0.0.1:{port_of(client)}"
        async with aiohttp.ClientSession() as http:
            found = [await http.get(f"{url}/v1/models") for _ in range(8)]
            refused = [response for response in found if response.status == 429]
            assert [response.status for response in found[:3]] == [200] * 3
            assert refused
            assert refused[0].headers["Retry-After"] == "1"
            assert (await refused[0].json())["error"]["type"] == "rate_limit_error"
            assert (await http.get(f"{url}/health")).status == 200  # who watches is not counted


async def test_strangers_do_not_use_up_what_holders_of_the_key_may_ask():
    async with served(WritingEngine("x"), key="right", limits=ServerLimits(rate=1.0)) as client:
        url = f"http://127.0.0.1:{port_of(client)}/v1/models"
        async with aiohttp.ClientSession() as http:
            wrong = {"Authorization": "Bearer wrong"}
            statuses = [(await http.get(url, headers=wrong)).status for _ in range(4)]
            assert statuses[0] == 401
            assert 429 in statuses  # guessing is slow, too
            right = {"Authorization": "Bearer right"}
            assert (await http.get(url, headers=right)).status == 200


def test_a_bucket_fills_with_time_and_never_beyond_a_seconds_worth():
    now = [0.0]
    limit = RateLimit(2.0, now_s=lambda: now[0])
    assert [limit.wait_s("a") for _ in range(3)] == [0.0, 0.0, 0.5]
    assert limit.wait_s("b") == 0.0
    now[0] += 0.5
    assert [limit.wait_s("a") for _ in range(2)] == [0.0, 0.5]
    now[0] += 1000.0
    assert [limit.wait_s("a") for _ in range(3)] == [0.0, 0.0, 0.5]


def test_a_rate_below_one_a_second_lets_one_pass():
    now = [0.0]
    limit = RateLimit(0.1, now_s=lambda: now[0])
    assert [limit.wait_s("a") for _ in range(2)] == [0.0, 10.0]


def test_a_million_addresses_cost_a_bounded_table():
    limit = RateLimit(1.0, now_s=lambda: 0.0)
    for client in range(3 * MAX_CLIENTS):
        limit.wait_s(str(client))
    assert len(limit._left) == MAX_CLIENTS


async def closed(reader: asyncio.StreamReader) -> None:
    """Returns when the server has closed the connection, politely or not."""
    async with asyncio.timeout(LATE_S):
        with contextlib.suppress(ConnectionResetError):
            while await reader.read(1024):
                pass


@pytest.mark.parametrize("head", [b"", b"GET /hea", HEAD], ids=["silent", "half a line", "headers"])
async def test_a_head_that_trickles_in_is_cut_off(head: bytes):
    async with served(WritingEngine("x"), limits=ServerLimits(patience_s=SOON_S)) as client:
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


async def test_a_body_that_trickles_in_is_refused():
    async with served(WritingEngine("x"), limits=ServerLimits(patience_s=SOON_S)) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(client))
        writer.write(HEAD + b"Content-Length: 1000\r\n\r\n{")
        async with asyncio.timeout(LATE_S):
            assert b" 408 " in await reader.readline()
        writer.close()


async def test_a_client_that_takes_nothing_loses_its_places():
    engine = WritingEngine("a story that is longer than all buffers between us " * 4_000)
    async with served(engine, limits=ServerLimits(patience_s=SOON_S)) as client:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port_of(client)))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
        body = b'{"model": "tiny", "messages": [{"role": "user", "content": "?"}], "stream": true}'
        writer.write(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(LATE_S):
            await reader.readline()  # it has begun; nothing more is read
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
