"""The HTTP server: who may ask, how much at once, and which function answers.

Promise: every request gets an answer in the form its client understands; one that cannot be served
costs nobody else anything. A client that goes away frees its places in the engines. Runs on one
event loop.
"""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from aiohttp import web

from millrace.core.errors import MillraceError
from millrace.serving.bodies import Body, ChatBody, CompletionBody, GenerateBody, read_body
from millrace.serving.chat import answer_chat, stream_chat
from millrace.serving.completions import answer_completion, stream_completion
from millrace.serving.errors import ApiError, as_api_error, json_response
from millrace.serving.generate import answer_generate, stream_generate
from millrace.serving.metrics import ServerMetrics
from millrace.serving.options import Limits
from millrace.serving.score import Readers, ScoreBody
from millrace.serving.served import Served
from millrace.serving.sse import send_events

READ_TIMEOUT_S = 60.0  # for a body to arrive
_log = logging.getLogger(__name__)
_OPEN = ("/health",)  # paths that need no key

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
B = TypeVar("B", ChatBody, CompletionBody, GenerateBody)


def make_app(
    served: Served,
    *,
    key: str | None,
    limits: Limits,
    is_healthy: Callable[[], bool],
    readers: Readers | None = None,
) -> web.Application:
    """`key`: what clients must show; None lets in all who can reach the server. `readers` answer
    /score, where there are any."""

    async def health(_request: web.Request) -> web.Response:
        is_well = is_healthy()
        status = 200 if is_well else 503
        return json_response({"status": "ok" if is_well else "failed"}, status=status)

    async def models(_request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [_model(served, n) for n in served.names]})

    async def model(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in served.names:
            raise ApiError(f"There is no model {name!r}.", status=404, kind="not_found_error")
        return json_response(_model(served, name))

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(text=served.metrics.text(), content_type="text/plain")

    app = web.Application(
        middlewares=[_counting(served.metrics), telling_errors, _guarding(key)],
        client_max_size=limits.body_bytes,
    )
    busy = _Busy(served.metrics, limit=limits.requests)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name:.+}", model)
    app.router.add_get("/metrics", metrics)
    post = app.router.add_post
    chat = _endpoint(served, busy, ChatBody, answer_chat, stream_chat)
    post("/v1/chat/completions", chat)
    completion = _endpoint(served, busy, CompletionBody, answer_completion, stream_completion)
    post("/v1/completions", completion)
    post("/generate", _endpoint(served, busy, GenerateBody, answer_generate, stream_generate))
    if readers is not None:
        post("/score", _scoring(readers, busy))
    return app


class _Busy:
    """Requests that are being answered: no more than `limit`."""

    def __init__(self, metrics: ServerMetrics, *, limit: int) -> None:
        self._metrics = metrics
        self._limit = limit

    @contextlib.contextmanager
    def one_more(self):
        if self._metrics.running >= self._limit:
            raise ApiError(
                f"The server is busy with {self._limit} requests; try again later.",
                status=429,
                kind="rate_limit_error",
            )
        self._metrics.running += 1
        try:
            yield
        except (asyncio.CancelledError, ConnectionResetError):
            self._metrics.disconnects += 1
            raise
        finally:
            self._metrics.running -= 1


def _endpoint(
    served: Served,
    busy: _Busy,
    kind: type[B],
    answer: Callable[[Served, B], Awaitable[dict[str, Any]]],
    stream: Callable[[Served, B], AsyncGenerator[dict[str, Any]]],
) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        body = await read_request(request, kind)
        with busy.one_more():
            if body.stream:
                return await send_events(request, stream(served, body))
            return json_response(await answer(served, body))

    return handle


def _scoring(readers: Readers, busy: _Busy) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        body = await read_request(request, ScoreBody)
        with busy.one_more():
            return json_response(await readers.answer(body))

    return handle


Checked = TypeVar("Checked", bound=Body)


async def read_request(request: web.Request, kind: type[Checked]) -> Checked:
    # Browsers send other types to any server they can reach, without asking it first.
    if request.content_type != "application/json":
        raise ApiError(
            f"The body is {request.content_type}; send it with Content-Type: application/json.",
            status=415,
        )
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            data = await request.read()
    except TimeoutError:
        raise ApiError(
            f"The body did not arrive within {READ_TIMEOUT_S:g} s.", status=408
        ) from None
    return read_body(kind, data)


def _counting(metrics: ServerMetrics) -> Any:
    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        resource = request.match_info.route.resource
        path = "unknown" if resource is None else resource.canonical
        metrics.requests[path, response.status] += 1
        return response

    return count


@web.middleware
async def telling_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except MillraceError as error:
        return as_api_error(error).response()
    except web.HTTPException as error:
        if error.status < 400:
            raise
        kind = "not_found_error" if error.status == 404 else "invalid_request_error"
        message = f"{request.method} {request.path}: {error.reason}."
        response = ApiError(message, status=error.status, kind=kind).response()
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ConnectionError:  # the client is gone
        raise
    except Exception:  # noqa: BLE001 - a bug of ours: told here, and not to clients
        _log.exception("%s %s failed", request.method, request.path)
        return ApiError("The server failed.", status=500, kind="server_error").response()


def _guarding(key: str | None) -> Any:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if key is not None and request.path not in _OPEN:
            check_key(request, key)
        return await handler(request)

    return guard


def check_key(request: web.Request, key: str) -> None:
    scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
    # Compared in constant time, so that nobody finds out a key letter by letter.
    is_right = hmac.compare_digest(shown.strip().encode(errors="replace"), key.encode())
    if scheme.lower() != "bearer" or not is_right:
        raise ApiError(
            "The API key is missing or wrong; send it as Authorization: Bearer KEY.",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
        )


def _model(served: Served, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": served.created, "owned_by": "millrace"}


@contextlib.asynccontextmanager
async def listening(app: web.Application, *, host: str, port: int) -> AsyncIterator[int]:
    """Serve `app` meanwhile; yields the port, which the system chooses if it is 0."""
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that goes away ends what it asked for
        access_log=None,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, backlog=1024)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
