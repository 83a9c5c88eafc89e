"""The HTTP server of the dashboard: the page, JSON about runs, and an event when a run has news.

Promise: without the token, only the dashboard's own scripts and styles are served. No request
changes a run, and only a chat starts a process. An answer is computed once for all viewers, until
the run has news. A browser runs only scripts that are files of this server. Each run is read by one
thread of its own.
"""

import asyncio
import contextlib
import gzip
import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from millrace.core.errors import MillraceError
from millrace.dashboard.chat import ChatRequest, CheckpointServer
from millrace.dashboard.runs import RunReader
from millrace.monitoring.run_dir import RunDir
from millrace.serving.api.errors import ApiError
from millrace.serving.api.replies import ReplySender
from millrace.serving.clients import shows_key
from millrace.serving.server import Handler, error_middleware, http_listener

STATIC = Path(__file__).parent / "static"
POLL_S = 1.0
KEEP_ALIVE_S = 15.0  # proxies close silent connections
MAX_ANSWERS = 512  # cached, of one run
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class WatchedRun:
    """A run, its thread, and the answers about it since its last change."""

    def __init__(self, reader: RunReader) -> None:
        self.reader = reader
        self._thread = ThreadPoolExecutor(1)
        self._answers: OrderedDict[str, asyncio.Task[bytes]] = OrderedDict()

    async def refresh(self) -> bool:
        has_changed = await self._in_thread(self.reader.refresh)
        if has_changed:
            self._answers.clear()
        return has_changed

    async def answer(self, key: str, make: Callable[[], Any]) -> bytes:
        """The compressed body for `key`; requests that come at the same time share the work."""

        def body() -> bytes:
            value = make()
            data = value if isinstance(value, bytes) else msgspec.json.encode(value)
            return gzip.compress(data, compresslevel=3)

        task = self._answers.get(key)
        if task is None:
            task = self._answers[key] = asyncio.create_task(self._in_thread(body))
            if len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
        return await asyncio.shield(task)

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


class Dashboard:
    """Watches runs, and wakes whoever waits for news."""

    def __init__(self, paths: Sequence[Path], *, chat: CheckpointServer | None = None) -> None:
        self.chat = chat or CheckpointServer()
        self.runs = {str(i): WatchedRun(RunReader(p, id=str(i))) for i, p in enumerate(paths)}
        self._heads: list[dict[str, Any]] = []
        self._news = asyncio.Condition()

    def find(self, request: web.Request) -> WatchedRun:
        name = request.match_info["run"]
        if name not in self.runs:
            raise ApiError(f"There is no run {name[:80]!r}.", status=404)
        return self.runs[name]

    async def watch(self) -> None:
        """Poll the files; ends only by cancellation."""
        while True:
            changed = [await run.refresh() for run in self.runs.values()]
            if any(changed):
                async with self._news:
                    self._heads = [run.reader.head() for run in self.runs.values()]
                    self._news.notify_all()
            await asyncio.sleep(POLL_S)

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        """The heads of all runs now, and again whenever one has changed."""
        shown: list[dict[str, Any]] | None = None
        while True:
            heads = self._heads  # there may be newer ones by the time these have been sent
            yield {"runs": heads} if heads is not shown and heads else {}
            shown = heads
            async with self._news:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        while self._heads is shown:
                            await self._news.wait()


# Methods of RunReader that a page may call.
ANSWERS = {"overview", "curves", "timeline", "tile", "span", "ledger", "logs", "log"}
ANSWERS |= {"steps", "episodes", "episode", "batch"}


def _arguments(answer: Callable[..., Any], query: Mapping[str, str]) -> dict[str, str | int]:
    """The keyword arguments of an answer that the query has; all but strings are numbers."""
    found: dict[str, str | int] = {}
    for name, parameter in signature(answer).parameters.items():
        if parameter.kind == Parameter.KEYWORD_ONLY and query.get(name):
            is_text = parameter.annotation is str
            if not is_text and not re.fullmatch("[0-9]{1,15}", query[name]):
                raise ApiError(f"{name} = {query[name][:80]!r} is not a number from 0.", status=400)
            found[name] = query[name] if is_text else int(query[name])
    return found


async def _chat(
    dashboard: Dashboard, replies: ReplySender, request: web.Request
) -> web.StreamResponse:
    run = dashboard.find(request)
    # A form of another site cannot send this type; the cookie is not sent from there either.
    if request.content_type != "application/json":
        raise ApiError("A chat is sent as application/json.", status=415)
    try:
        asked = msgspec.json.decode(await request.read(), type=ChatRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ApiError(f"The request is not a chat: {error}.", status=400) from None
    return await replies.send_events(request, dashboard.chat.reply(run.reader, asked))


def make_dashboard_app(dashboard: Dashboard, *, token: str) -> web.Application:
    replies = ReplySender()
    cookie = f"millrace_dashboard_{secrets.token_hex(4)}"  # cookies are shared by ports of a host

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = (request.query.get("token", ""), request.cookies.get(cookie, ""))
        is_known = [hmac.compare_digest(text.encode(), token.encode()) for text in shown]
        if not (any(is_known) or shows_key(request, token) or request.path.startswith("/static/")):
            message = "The token is missing or wrong; open the URL that the dashboard has printed."
            raise ApiError(message, status=401)
        return await handler(request)

    async def add_headers(_request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(HEADERS)

    async def index(request: web.Request) -> web.StreamResponse:
        response = web.FileResponse(STATIC / "index.html")
        if "token" in request.query:
            response.set_cookie(cookie, token, httponly=True, samesite="Strict")
        return response

    async def events(request: web.Request) -> web.StreamResponse:
        return await replies.send_events(request, dashboard.events())

    async def about_run(request: web.Request) -> web.StreamResponse:
        run, what = dashboard.find(request), request.match_info["what"]
        if what == "trace.json" and run.reader.run_dir.trace.is_file():
            return web.FileResponse(run.reader.run_dir.trace)
        if what not in ANSWERS:
            raise ApiError(f"There is no answer {what[:80]!r}.", status=404)
        method = getattr(run.reader, what)
        answer = partial(method, **_arguments(method, request.query))
        try:
            body = await run.answer(request.path_qs, answer)
        except MillraceError as error:  # a file of the run is missing or damaged
            raise ApiError(str(error), status=404) from None
        headers = {"Content-Type": f"application/{'octet-stream' if what == 'tile' else 'json'}"}
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            return web.Response(body=body, headers={**headers, "Content-Encoding": "gzip"})
        return web.Response(body=gzip.decompress(body), headers=headers)

    app = web.Application(middlewares=[error_middleware, guard])
    app.on_response_prepare.append(add_headers)
    app.router.add_get("/", index)
    app.router.add_get("/events", events)
    app.router.add_get("/runs/{run}/{what}", about_run)
    app.router.add_post("/runs/{run}/chat", partial(_chat, dashboard, replies))
    app.router.add_static("/static", STATIC)
    return app


async def serve_dashboard(
    run_dirs: Sequence[Path], *, host: str, port: int, chat_device: str = "cpu"
) -> None:
    """Serve until it is cancelled. Prints the URL first."""
    token = secrets.token_urlsafe(16)
    dashboard = Dashboard(run_dirs, chat=CheckpointServer(device=chat_device))
    app = make_dashboard_app(dashboard, token=token)
    try:
        async with http_listener(app, host=host, port=port) as url:
            print(f"Dashboard: {url}/?token={token}", flush=True)
            for path in run_dirs:
                if not (RunDir(path).exists or RunDir(path).metrics.is_file()):
                    print(f"{path} holds no run yet; the page shows it once it does.", flush=True)
            await dashboard.watch()
    finally:
        await dashboard.chat.close()
