"""The HTTP server: the listening socket, routes, limits, errors.

Promise: each request gets an answer that its client understands, and a failing request affects no
other. A client that disconnects frees its slots in the engines. A connection that does not deliver
a complete request within `timeout_s` is closed. At most `connections` are open at a time; further
ones are closed at once. ClientGuard bounds the requests per second of one client.

Runs on one event loop.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from millrace.core.errors import ConfigError, MillraceError, failure_text
from millrace.serving.api.bodies import ChatBody, CompletionBody, OpenAIBody
from millrace.serving.api.chat import ChatAnswer
from millrace.serving.api.completions import ApiAnswer, TextAnswer
from millrace.serving.api.errors import ApiError, as_api_error, json_response
from millrace.serving.api.openapi import Health, describe
from millrace.serving.api.reading import Body, read_body
from millrace.serving.api.replies import ReplySender
from millrace.serving.api.responses import ResponsesBody, ResponseWriter
from millrace.serving.api.score import ScoreBody, ScorePool
from millrace.serving.clients import Client, ClientGuard, RequestPlaces
from millrace.serving.metrics import ServerMetrics
from millrace.serving.options import ServerLimits
from millrace.serving.served_model import ServedModel

_log = logging.getLogger(__name__)
_http_log = logging.getLogger(f"{__name__}.http")
_PUBLIC = ("/health",)  # paths that need no key
_LARGE_BYTES = 65536  # a larger body is parsed in a thread
CLIENT = web.RequestKey("client", Client)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
B = TypeVar("B", bound=OpenAIBody)
Checked = TypeVar("Checked", bound=Body)


def _is_logged(record: logging.LogRecord) -> bool:
    """Malformed HTTP is not logged: the error quotes the line, which may hold a client's key."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_http_log.addFilter(_is_logged)


def make_app(
    served: ServedModel,
    *,
    keys: Sequence[str] = (),
    hosts: Sequence[str] = (),
    limits: ServerLimits,
    health: Callable[[], Health],
    score_pool: ScorePool | None = None,
) -> web.Application:
    """`keys`: API keys of clients; none admits everyone. `hosts`: allowed in the Host header if
    there is no key, besides loopback ones. `score_pool`: None disables /score."""
    handlers = PostHandlers(served, limits, num_keys=len(keys))
    openapi = describe(needs_key=bool(keys), scores=score_pool is not None)

    async def get_health(_request: web.Request) -> web.Response:
        state = health()
        return json_response(state.model_dump(), status=503 if state.status == "down" else 200)

    async def models(_request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [_model(served, n) for n in served.names]})

    async def model(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in served.names:
            raise ApiError(f"Model {name!r} does not exist.", status=404)
        return json_response(_model(served, name))

    async def description(_request: web.Request) -> web.Response:
        return json_response(openapi)

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(text=served.metrics.text(), content_type="text/plain")

    app = web.Application(
        middlewares=[
            _metrics_middleware(served.metrics),
            error_middleware,
            _client_middleware(ClientGuard(keys, rate=limits.rate, hosts=hosts)),
        ],
        client_max_size=limits.body_bytes,
    )
    app.router.add_get("/health", get_health)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name:.+}", model)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/openapi.json", description)
    post = app.router.add_post
    post("/v1/chat/completions", partial(handlers.complete, ChatBody, ChatAnswer))
    post("/v1/completions", partial(handlers.complete, CompletionBody, TextAnswer))
    post("/v1/responses", handlers.respond)
    if score_pool is not None:
        post("/score", partial(handlers.score, score_pool))
    return app


@contextlib.asynccontextmanager
async def http_listener(
    app: web.Application, *, host: str, port: int, limits: ServerLimits | None = None
) -> AsyncIterator[str]:
    """Serve `app` inside the context; yields its URL. The system chooses a port for port 0."""
    limits = limits or ServerLimits()
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a disconnected client cancels its request
        access_log=None,
        logger=_http_log,
        auto_decompress=False,  # read_request() refuses compressed bodies
        shutdown_timeout=1.0,
        keepalive_timeout=limits.timeout_s,  # also limits the headers of the first request
        lingering_time=limits.timeout_s,  # for the rest of a refused body
    )
    await runner.setup()
    handlers = runner.server
    assert handlers is not None

    def accept() -> asyncio.Protocol:
        is_full = len(handlers.connections) >= limits.connections
        return _RefusedConnection() if is_full else handlers()

    try:
        try:
            loop = asyncio.get_running_loop()
            server = await loop.create_server(accept, host, port, backlog=1024)
        except OSError as error:
            raise ConfigError(
                f"Cannot listen at host {host}, port {port}: {error}; choose others."
            ) from None
        with contextlib.closing(server):
            shown = f"[{host}]" if ":" in host else host
            yield f"http://{shown}:{server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


class _RefusedConnection(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


class PostHandlers:
    """The handlers of requests with a body, and what they share."""

    def __init__(self, served: ServedModel, limits: ServerLimits, *, num_keys: int) -> None:
        self._served, self._limits = served, limits
        self._places = RequestPlaces(limits.requests, num_keys=num_keys, metrics=served.metrics)
        self._replies = ReplySender(timeout_s=limits.timeout_s)

    async def complete(
        self,
        kind: type[B],
        answer_kind: Callable[[ServedModel, B, Client, int], ApiAnswer[B]],
        request: web.Request,
    ) -> web.StreamResponse:
        body = await read_request(request, kind, timeout_s=self._limits.timeout_s)
        if body.num_completions > self._limits.completions:
            raise ApiError(
                f"The request wants {body.num_completions} completions, but a request may have at"
                f" most {self._limits.completions}; send several requests.",
                param="n",
            )
        with self._places.held(request[CLIENT]):
            answer = answer_kind(self._served, body, request[CLIENT], await _num_bytes(request))
            if body.stream:
                return await self._replies.send_events(request, answer.stream())
            return await self._replies.send(request, await answer.whole())

    async def respond(self, request: web.Request) -> web.StreamResponse:
        body = await read_request(request, ResponsesBody, timeout_s=self._limits.timeout_s)
        writer = ResponseWriter(body)
        with self._places.held(request[CLIENT]):
            chat = ChatAnswer(self._served, body.chat, request[CLIENT], await _num_bytes(request))
            if body.stream:
                return await self._replies.send_events(request, writer.events(chat.stream()))
            return await self._replies.send(request, writer.whole(await chat.whole()))

    async def score(self, pool: ScorePool, request: web.Request) -> web.StreamResponse:
        body = await read_request(request, ScoreBody, timeout_s=self._limits.timeout_s)
        with self._places.held(request[CLIENT]):
            self._served.quotas.of(request[CLIENT]).take(body.num_tokens)
            return await self._replies.send(request, await pool.answer(body))


async def _num_bytes(request: web.Request) -> int:
    return len(await request.read())  # once more, which returns at once


async def read_request(
    request: web.Request, kind: type[Checked], *, timeout_s: float = ServerLimits().timeout_s
) -> Checked:
    data = await read_bytes(request, timeout_s=timeout_s)
    if len(data) <= _LARGE_BYTES:
        return read_body(kind, data)
    return await asyncio.to_thread(read_body, kind, data)


async def read_bytes(
    request: web.Request,
    *,
    timeout_s: float = ServerLimits().timeout_s,
    content_type: str = "application/json",
) -> bytes:
    """The body of a request; raises ApiError if it is another type, compressed or too slow."""
    # Browsers send other content types across origins without a preflight request.
    if request.content_type != content_type:
        raise ApiError(
            f"The body is {request.content_type}; send it with Content-Type: {content_type}.",
            status=415,
        )
    # A few compressed bytes can become very many.
    if (encoding := request.headers.get("Content-Encoding", "identity")) != "identity":
        raise ApiError(f"Content-Encoding {encoding!r:.80}: send the body as it is.", status=415)
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError:
        raise ApiError(f"The body did not arrive within {timeout_s:g} s.", status=408) from None


def _metrics_middleware(metrics: ServerMetrics) -> Any:
    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        resource = request.match_info.route.resource
        path = "unknown" if resource is None else resource.canonical
        metrics.requests[path, response.status] += 1
        return response

    return count


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except MillraceError as error:
        return as_api_error(error).response()
    except web.HTTPException as error:
        if error.status < 400:
            raise
        message = f"{request.method} {request.path}: {error.reason}."
        response = ApiError(message, status=error.status).response()
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ConnectionError:  # the client has disconnected
        raise
    except Exception as error:  # noqa: BLE001 - a bug: logged here, hidden from clients
        _log.error("%s", failure_text(f"{request.method} {request.path} failed", error))
        return ApiError("The server failed.", status=500).response()


def _client_middleware(guard: ClientGuard) -> Any:
    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in _PUBLIC:
            request[CLIENT] = guard.admit(request)
        return await handler(request)

    return admit


def _model(served: ServedModel, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": served.created, "owned_by": "millrace"}
