"""Server-sent events: one JSON object per event, and [DONE] as the last.

An error before the first event is an ordinary error response; one after it is an event, as clients
of the OpenAI API expect it.

The text of one completion, while its tokens come.

Promise: what add() returns, joined, is the completion's text: without the token that ended it,
and without a stop string or anything behind it. A character whose bytes are not all there yet is
held back, as is what may become a stop string or the beginning of a tool call; that is a matter
for the whole text. Runs on the server's loop.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from aiohttp import web

from millrace.core.errors import MillraceError
from millrace.core.records import Finish
from millrace.serving.api.errors import as_api_error
from millrace.serving.options import ServerLimits


async def send_events(
    request: web.Request,
    events: AsyncGenerator[dict[str, Any]],
    *,
    patience_s: float = ServerLimits().patience_s,
) -> web.StreamResponse:
    """Send events until they end, or the client goes or takes nothing any more: then they are
    closed."""
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # proxies that collect events defeat their purpose
        }
    )
    async with contextlib.aclosing(events):
        try:
            async for event in events:
                if not response.prepared:
                    await response.prepare(request)
                await _write(request, response, _event(event), patience_s=patience_s)
            await response.write(b"data: [DONE]\n\n")
        except MillraceError as error:
            if not response.prepared:
                raise
            await response.write(_event(as_api_error(error).body()))
        await response.write_eof()
    return response


async def _write(
    request: web.Request, response: web.StreamResponse, data: bytes, *, patience_s: float
) -> None:
    try:
        async with asyncio.timeout(patience_s):
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"a client took nothing for {patience_s:g} s") from None


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body, ensure_ascii=False, allow_nan=False)}\n\n".encode()


Decode = Callable[[list[int]], str]
_HALF = "\ufffd"  # how a decoder shows bytes that are no character yet


class TextStream:
    def __init__(
        self, decode: Decode, *, stop: Sequence[str] = (), openers: Sequence[str] = ()
    ) -> None:
        """`openers`: from the first of these on, nothing is given out before the end."""
        self._decode = decode
        self._stop = tuple(stop)
        self._openers = tuple(openers)
        self._ids: list[int] = []
        self._context = 0  # ids from here on are decoded again: a token's text depends on the last
        self._read = 0  # ids before this are in the text
        self.text = ""  # so far
        self._num_given = 0

    @property
    def given(self) -> str:
        """What add() has returned."""
        return self.text[: self._num_given]

    @property
    def held(self) -> str:
        """Text that add() has not returned."""
        return self.text[self._num_given :]

    def add(self, tokens: Sequence[int], *, finish: Finish | None = None) -> str:
        """Take new tokens, with the last of them how it all ended; returns what is certain now."""
        self._ids += tokens
        text = self.text + self._decoded_from_read()
        if finish == "stop" and tokens and not any(stop in text for stop in self._stop):
            # No stop string ended it, so its last token did, which is no text.
            text = self.text + self._decoded_from_read(to=len(self._ids) - 1)
        if finish is not None or not text.endswith(_HALF):
            self.text = self._until_stop_string(text)
            self._context, self._read = self._read, len(self._ids)
        end = self._num_certain(is_end=finish is not None)
        given = self.text[self._num_given : end]
        self._num_given = max(end, self._num_given)
        return given

    def _decoded_from_read(self, *, to: int | None = None) -> str:
        known = self._decode(self._ids[self._context : self._read])
        return self._decode(self._ids[self._context : to])[len(known) :]

    def _until_stop_string(self, text: str) -> str:
        ends = [at for stop in self._stop if (at := text.find(stop, self._num_given)) >= 0]
        return text[: min(ends)] if ends else text

    def _num_certain(self, *, is_end: bool) -> int:
        """Characters that will be the text's beginning whatever comes, and are no tool call."""
        opened = [self.text.find(opener, self._num_given) for opener in self._openers]
        found = min((at for at in opened if at >= 0), default=len(self.text))
        if is_end:
            return found
        awaited = (*self._stop, *self._openers)
        longest = min(max(map(len, awaited), default=1) - 1, found - self._num_given)
        for length in range(longest, 0, -1):
            if any(each.startswith(self.text[found - length : found]) for each in awaited):
                return found - length
        return found
