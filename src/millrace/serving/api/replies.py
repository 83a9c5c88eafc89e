"""Replies of the servers: JSON, and server-sent events.

An event holds one JSON object; the last one is [DONE], but not in /v1/responses. An error before
the first event is an ordinary error response. A later error is an event, as in the OpenAI API.

Promise: a reply stops the event loop for a few milliseconds at a time, however large it is. It is
made and written in pieces, and large replies take turns. An iterator in a reply becomes a list
whose items are made only when they are written, and an array becomes base64 of its bytes. NaN and
infinity, which JSON does not have, become null. Runs on the server's event loop: in a thread, a
piece would hold Python's lock for as long.
"""

import asyncio
import contextlib
from binascii import b2a_base64
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from millrace.core.errors import MillraceError
from millrace.serving.api.errors import as_api_error
from millrace.serving.options import ServerLimits

PIECE_BYTES = 16384  # takes about a millisecond
_BASE64_BYTES = 12288  # a multiple of 3, so that no part ends with padding
_MAX_DEPTH = 16  # deeper parts come from the client's own request, and are encoded at once
_encode = msgspec.json.Encoder().encode
Row = msgspec.Raw  # JSON, which encoded() takes as it is


class ReplySender:
    def __init__(self, *, timeout_s: float = ServerLimits().timeout_s) -> None:
        """`timeout_s`: for a client to read a piece."""
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()  # fair: the reply that has waited longest is next

    async def send(self, request: web.Request, reply: dict[str, Any]) -> web.StreamResponse:
        pieces = encoded(reply)
        first = next(pieces)
        if len(first) < PIECE_BYTES:
            return web.Response(body=first, content_type="application/json", charset="utf-8")
        response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
        await response.prepare(request)
        await self._write(request, response, first)
        for piece in pieces:
            await self._write(request, response, piece)
        await response.write_eof()
        return response

    async def send_events(
        self, request: web.Request, events: AsyncGenerator[dict[str, Any]]
    ) -> web.StreamResponse:
        """Send events until they end. They are closed if the client disconnects or stops reading.
        Events of /v1/responses have a type, and none of them is [DONE]."""
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # proxies must not buffer events
            }
        )
        async with contextlib.aclosing(events):
            has_types = False
            try:
                async for event in events:
                    has_types = "type" in event
                    if not response.prepared:
                        await response.prepare(request)
                    for piece in _event(event):
                        await self._write(request, response, piece)
                if not has_types:
                    await response.write(b"data: [DONE]\n\n")
            except MillraceError as error:
                if not response.prepared:
                    raise
                await response.write(b"".join(_event(as_api_error(error).body())))
            await response.write_eof()
        return response

    async def _write(
        self, request: web.Request, response: web.StreamResponse, piece: bytes
    ) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await response.write(piece)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            text = f"a client read nothing for {self._timeout_s:g} s"
            raise ConnectionResetError(text) from None
        if len(piece) >= PIECE_BYTES:  # the next one is made when other requests had their turn
            async with self._turn:
                await asyncio.sleep(0)


def encoded(value: Any, *, before: bytes = b"", after: bytes = b"") -> Iterator[bytes]:
    """The JSON of a value, in pieces of at least PIECE_BYTES and a shorter last one."""
    piece = bytearray(before)
    for part in _parts(value):
        piece += part
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece + after)


def encoded_row(row: dict[str, Any]) -> Row:
    """One of very many small parts of a reply."""
    return msgspec.Raw(_encode(row))


def _event(body: dict[str, Any]) -> Iterator[bytes]:
    kind = f"event: {body['type']}\n" if "type" in body else ""
    return encoded(body, before=f"{kind}data: ".encode(), after=b"\n\n")


def _parts(value: Any, depth: int = 0) -> Iterator[bytes]:
    if depth < _MAX_DEPTH and isinstance(value, dict):
        yield b"{"
        for number, (key, each) in enumerate(value.items()):
            yield (b"," if number else b"") + _encode(key) + b":"
            yield from _parts(each, depth + 1)
        yield b"}"
    elif depth < _MAX_DEPTH and isinstance(value, list | Iterator):
        yield b"["
        for number, each in enumerate(value):
            if number:
                yield b","
            yield from _parts(each, depth + 1)
        yield b"]"
    elif isinstance(value, np.ndarray):
        data = value.ravel().view(np.uint8).data
        yield b'"'
        for start in range(0, len(data), _BASE64_BYTES):
            yield b2a_base64(data[start : start + _BASE64_BYTES], newline=False)
        yield b'"'
    else:
        yield _encode(value)
