"""Server-sent events: one JSON object per event, and [DONE] as the last.

An error before the first event is an ordinary error response; one after it is an event, as clients
of the OpenAI API expect it.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from millrace.core.errors import MillraceError
from millrace.serving.errors import as_api_error
from millrace.serving.options import Limits


async def send_events(
    request: web.Request,
    events: AsyncGenerator[dict[str, Any]],
    *,
    patience_s: float = Limits().patience_s,
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
