"""The HTTP server: who may ask, how much at once, and which function answers.

Promise: every request gets an answer in the form its client understands; one that cannot be served
costs nobody else anything. A client that goes away frees its places in the engines. Runs on one
event loop.
"""

import asyncio
import contextlib
import hmac
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from aiohttp import web

from millrace.core.errors import MillraceError
from millrace.serving.api.bodies import Body, ChatBody, CompletionBody, GenerateBody, read_body
from millrace.serving.api.chat import answer_chat, stream_chat
from millrace.serving.api.completions import answer_completion, stream_completion
from millrace.serving.api.errors import ApiError, as_api_error, json_response
from millrace.serving.api.generate import answer_generate, stream_generate
from millrace.serving.api.openapi import describe
from millrace.serving.api.replies import Health
from millrace.serving.api.score import Readers, ScoreBody
from millrace.serving.api.streaming import send_events
from millrace.serving.listening import RateLimit
from millrace.serving.metrics import ServerMetrics
from millrace.serving.options import ServerLimits
from millrace.serving.served import Served

_log = logging.getLogger(__name__)
_OPEN = ("/health",)  # paths that need no key

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
B = TypeVar("B", ChatBody, CompletionBody, GenerateBody)


def make_app(
    served: Served,
    *,
    key: str | None,
    limits: ServerLimits,
    health: Callable[[], Health],
    readers: Readers | None = None,
) -> web.Application:
    """`key`: what clients must show; None lets in all who can reach the server. `readers` answer
    /score, where there are any."""
    described = describe(needs_key=key is not None, scores=readers is not None)

    async def tell_health(_request: web.Request) -> web.Response:
        found = health()
        return json_response(found.model_dump(), status=503 if found.status == "down" else 200)

    async def models(_request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [_model(served, n) for n in served.names]})

    async def model(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in served.names:
            raise ApiError(f"There is no model {name!r}.", status=404, kind="not_found_error")
        return json_response(_model(served, name))

    async def description(_request: web.Request) -> web.Response:
        return json_response(described)

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(text=served.metrics.text(), content_type="text/plain")

    app = web.Application(
        middlewares=[
            _counting(served.metrics),
            telling_errors,
            _guarding(key, RateLimit(limits.rate)),
        ],
        client_max_size=limits.body_bytes,
    )
    busy = _Busy(served.metrics, limit=limits.requests)
    app.router.add_get("/health", tell_health)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name:.+}", model)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/openapi.json", description)
    post = app.router.add_post
    patience_s = limits.patience_s
    chat = _endpoint(served, busy, ChatBody, answer_chat, stream_chat, patience_s=patience_s)
    post("/v1/chat/completions", chat)
    completion = _endpoint(
        served, busy, CompletionBody, answer_completion, stream_completion, patience_s=patience_s
    )
    post("/v1/completions", completion)
    generate = _endpoint(
        served, busy, GenerateBody, answer_generate, stream_generate, patience_s=patience_s
    )
    post("/generate", generate)
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
                retry_after_s=1,
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
    *,
    patience_s: float,
) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        body = await read_request(request, kind, patience_s=patience_s)
        with busy.one_more():
            if body.stream:
                return await send_events(request, stream(served, body), patience_s=patience_s)
            return json_response(await answer(served, body))

    return handle


def _scoring(readers: Readers, busy: _Busy) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        body = await read_request(request, ScoreBody)
        with busy.one_more():
            return json_response(await readers.answer(body))

    return handle


Checked = TypeVar("Checked", bound=Body)


async def read_request(
    request: web.Request, kind: type[Checked], *, patience_s: float = ServerLimits().patience_s
) -> Checked:
    # Browsers send other types to any server they can reach, without asking it first.
    if request.content_type != "application/json":
        raise ApiError(
            f"The body is {request.content_type}; send it with Content-Type: application/json.",
            status=415,
        )
    try:
        async with asyncio.timeout(patience_s):
            data = await request.read()
    except TimeoutError:
        raise ApiError(f"The body did not arrive within {patience_s:g} s.", status=408) from None
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


def _guarding(key: str | None, rate: RateLimit) -> Any:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in _OPEN:
            return await handler(request)
        is_known = key is not None and shows_key(request, key)
        # Whoever has no key is counted apart, and cannot use up what those who have one may ask.
        wait_s = rate.wait_s("the key" if is_known else f"from {request.remote}")
        if wait_s > 0:
            raise ApiError(
                "Too many requests in a short time; try again later.",
                status=429,
                kind="rate_limit_error",
                retry_after_s=math.ceil(wait_s),
            )
        if key is not None:
            check_key(request, key)
        return await handler(request)

    return guard


def shows_key(request: web.Request, key: str) -> bool:
    scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
    # Compared in constant time, so that nobody finds out a key letter by letter.
    is_right = hmac.compare_digest(shown.strip().encode(errors="replace"), key.encode())
    return is_right and scheme.lower() == "bearer"


def check_key(request: web.Request, key: str) -> None:
    if not shows_key(request, key):
        raise ApiError(
            "The API key is missing or wrong; send it as Authorization: Bearer KEY.",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
        )


def _model(served: Served, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": served.created, "owned_by": "millrace"}
