"""Streaming: server-sent events, and the text of a completion while its tokens arrive.

An event holds one JSON object; the last one is [DONE], but not in /v1/responses. An error before
the first event is an ordinary error response. A later error is an event, as in the OpenAI API.

Promise of TextStream: the results of add(), joined, are the completion's text without the end token
and without a stop string or anything after it. Incomplete characters are held back, and so is text
that may become a stop string or a tool call. Runs on the server's event loop.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from aiohttp import web

from millrace.core.errors import MillraceError
from millrace.core.records import FinishReason
from millrace.serving.api.errors import as_api_error
from millrace.serving.options import ServerLimits


async def send_events(
    request: web.Request,
    events: AsyncGenerator[dict[str, Any]],
    *,
    timeout_s: float = ServerLimits().timeout_s,
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
                await _write(request, response, _event(event), timeout_s=timeout_s)
            if not has_types:
                await response.write(b"data: [DONE]\n\n")
        except MillraceError as error:
            if not response.prepared:
                raise
            await response.write(_event(as_api_error(error).body()))
        await response.write_eof()
    return response


async def _write(
    request: web.Request, response: web.StreamResponse, data: bytes, *, timeout_s: float
) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"a client read nothing for {timeout_s:g} s") from None


def _event(body: dict[str, Any]) -> bytes:
    kind = f"event: {body['type']}\n" if "type" in body else ""
    return f"{kind}data: {json.dumps(body, ensure_ascii=False, allow_nan=False)}\n\n".encode()


Decode = Callable[[list[int]], str]
_INCOMPLETE = "\ufffd"  # how a decoder shows the bytes of an incomplete character


class TextStream:
    def __init__(
        self, decode: Decode, *, stop: Sequence[str] = (), openers: Sequence[str] = ()
    ) -> None:
        """`openers` start a tool call; the text after the first one is held back to the end."""
        self._decode = decode
        self._stop = tuple(stop)
        self._openers = tuple(openers)
        self._ids: list[int] = []
        # Ids from here are decoded again: a token's text depends on the one before.
        self._context = 0
        self._read = 0  # ids before this are part of `text`
        self.text = ""  # so far
        self._num_returned = 0

    @property
    def held(self) -> str:
        """The text that add() has not returned."""
        return self.text[self._num_returned :]

    def add(self, tokens: Sequence[int], *, finish: FinishReason | None = None) -> str:
        """Add tokens, with `finish` for the last ones. Returns the text that is now certain."""
        self._ids += tokens
        text = self.text + self._decoded_from_read()
        if finish == "stop" and tokens and not any(stop in text for stop in self._stop):
            # The end token ended it, not a stop string; that token is not part of the text.
            text = self.text + self._decoded_from_read(to=len(self._ids) - 1)
        if finish is not None or not text.endswith(_INCOMPLETE):
            ends = [at for stop in self._stop if (at := text.find(stop, self._num_returned)) >= 0]
            self.text = text[: min(ends)] if ends else text
            self._context, self._read = self._read, len(self._ids)
        end = self._num_certain(is_end=finish is not None)
        returned = self.text[self._num_returned : end]
        self._num_returned = max(end, self._num_returned)
        return returned

    def _decoded_from_read(self, *, to: int | None = None) -> str:
        known = self._decode(self._ids[self._context : self._read])
        return self._decode(self._ids[self._context : to])[len(known) :]

    def _num_certain(self, *, is_end: bool) -> int:
        """Return the number of leading characters that no later token can change."""
        opened = [self.text.find(opener, self._num_returned) for opener in self._openers]
        found = min((at for at in opened if at >= 0), default=len(self.text))
        if is_end:
            return found
        awaited = (*self._stop, *self._openers)
        longest = min(max(map(len, awaited), default=1) - 1, found - self._num_returned)
        for length in range(longest, 0, -1):
            if any(each.startswith(self.text[found - length : found]) for each in awaited):
                return found - length
        return found
