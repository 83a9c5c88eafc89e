"""Tools of an MCP server, as the agents of all episodes share them.

    server = McpServer(["python", "server.py"])      # or McpServer(url="http://HOST/mcp")

    async def play(task, agent):
        messages = await agent.run([...], tools=await server.tools())

Promise: one connection for each event loop, made when it is first needed. What a server says about
its tools goes to the model as it is, and so does whatever goes wrong: a call on a server that died
is told so, and the next call connects once more. A server that was started ends with close(), or
with the process that started it.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

from millrace.core.errors import ConfigError
from millrace.core.secrets import Secrets, check_headers
from millrace.environments.tools.functions import Tool, ToolError

CONNECT_TIMEOUT_S = 30.0
T = TypeVar("T")


class ServerLost(Exception):
    """There is no connection, or no longer."""


class McpServer:
    def __init__(
        self,
        command: Sequence[str] = (),
        *,
        url: str | None = None,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        tools: Sequence[str] | None = None,
        log: Path | None = None,
    ) -> None:
        """A program that is started and spoken to by its input and output, or a `url` that speaks
        streamable HTTP. `env`: what the program finds in its environment, in which there is little
        else; `headers` of requests. Values may hold "env:NAME". `tools`: those to offer; by default
        all. `log`: where a program's errors go, by default to this process's."""
        if bool(command) == (url is not None):
            raise ConfigError("An MCP server has either a command or a url; set one of the two.")
        require_mcp()
        self.name = name or url or Path(command[-1]).name
        owner = f"MCP server {self.name!r}"
        check_headers(headers or {}, owner=owner)
        secrets = Secrets({**(env or {}), **(headers or {})}, owner=owner)
        self._env = {key: secrets.filled(value) for key, value in (env or {}).items()}
        self._headers = {key: secrets.filled(value) for key, value in (headers or {}).items()}
        self._command = list(command)
        self._url = url
        self._offered = tools
        self._log = log
        self._loop: asyncio.AbstractEventLoop | None = None  # that what follows belongs to
        self._opening = asyncio.Lock()
        self._session: _Session | None = None
        self._tools: list[Tool] | None = None

    async def tools(self) -> list[Tool]:
        """For agent.chat; raises ConfigError if the server cannot be reached."""
        self._come_to_this_loop()
        if self._tools is not None:
            return list(self._tools)
        try:
            session = await self._connected()
            self._tools = self._chosen(await session.list_tools())
        except ServerLost as lost:
            raise ConfigError(
                f"MCP server {self.name!r} cannot be used ({lost}); check its command or url."
            ) from lost
        return list(self._tools)

    async def close(self) -> None:
        """End the connection of this loop, and the program behind it."""
        if self._loop is asyncio.get_running_loop() and self._session is not None:
            await self._session.close()

    async def _connected(self) -> "_Session":
        """At most one attempt."""
        self._come_to_this_loop()
        async with self._opening:
            if self._session is None or self._session.is_over:
                self._session = await _Session.open(self._streams())
        return self._session

    def _come_to_this_loop(self) -> None:
        """Forget what ended with another loop."""
        if self._loop is not asyncio.get_running_loop():
            self._loop, self._session, self._tools = asyncio.get_running_loop(), None, None
            self._opening = asyncio.Lock()

    def _chosen(self, found: Sequence[Any]) -> list[Tool]:
        names = [tool.name for tool in found]
        for name in self._offered or ():
            if name not in names:
                raise ConfigError(
                    f"MCP server {self.name!r} has no tool {name!r}; there are {', '.join(names)}."
                )
        return [
            self._tool(tool)
            for tool in found
            if self._offered is None or tool.name in self._offered
        ]

    def _tool(self, told: Any) -> Tool:
        async def call(**arguments: Any) -> str:
            return await self._call(told.name, arguments)

        return Tool(
            name=told.name,
            description=told.description or "",
            parameters=told.input_schema,
            call=call,
            check=dict,  # the server checks, and says what is wrong
        )

    async def _call(self, tool: str, arguments: dict[str, Any]) -> str:
        try:
            session = await self._connected()
            result = await session.call_tool(tool, arguments)
        except ServerLost as lost:
            # Not tried again here: what the tool does may have been done.
            raise ToolError(f"the server of {tool} was lost ({lost}).") from lost
        text = _text_of(result)
        if result.is_error:
            raise ToolError(text)
        return text

    @contextlib.asynccontextmanager
    async def _streams(self) -> AsyncGenerator[Any]:
        import httpx2
        from mcp.client.stdio import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        if self._url is not None:
            async with (
                # A call takes as long as the tool; who calls it limits that.
                httpx2.AsyncClient(headers=self._headers, timeout=None) as http,
                streamable_http_client(self._url, http_client=http) as streams,
            ):
                yield streams
            return
        program, *arguments = self._command
        beside = str(Path(sys.executable).parent)  # so that "python" is the one that runs this
        path = os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])
        server = StdioServerParameters(
            command=program, args=arguments, env={"PATH": path, **self._env}
        )
        with self._errors() as errors:
            async with stdio_client(server, errlog=errors) as streams:
                yield streams

    @contextlib.contextmanager
    def _errors(self) -> Iterator[TextIO]:
        if self._log is None:
            yield sys.stderr
            return
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a", encoding="utf-8") as file:
            yield file


class _Session:
    """One connection, held by a task of its own: it must be closed where it was opened."""

    def __init__(self, streams: contextlib.AbstractAsyncContextManager[Any]) -> None:
        from mcp import Client

        loop = asyncio.get_running_loop()
        self._client = Client(streams)
        self._ready: asyncio.Future[None] = loop.create_future()
        self._over: asyncio.Future[str] = loop.create_future()  # and why
        self._closing = asyncio.Event()
        self._holding = loop.create_task(self._hold(), name="mcp")

    @classmethod
    async def open(cls, streams: contextlib.AbstractAsyncContextManager[Any]) -> "_Session":
        session = cls(streams)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await session._unless_over(session._ready)
        except TimeoutError:
            raise ServerLost(f"it did not answer for {CONNECT_TIMEOUT_S:g} s") from None
        finally:
            if not session._ready.done():
                session._closing.set()
                session._holding.cancel()
        return session

    @property
    def is_over(self) -> bool:
        return self._closing.is_set() or self._over.done()

    async def list_tools(self) -> list[Any]:
        tools, cursor = [], None
        while True:
            page = await self._ask(self._client.list_tools(cursor=cursor))
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        from mcp import MCPError

        try:
            return await self._ask(self._client.call_tool(name, arguments))
        except MCPError as error:
            raise ToolError(str(error)) from error

    async def close(self) -> None:
        self._closing.set()
        await asyncio.wait({self._holding})

    async def _ask(self, request: Coroutine[Any, Any, T]) -> T:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        asking = asyncio.create_task(request)
        try:
            return await self._unless_over(asking)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise
            self._closing.set()
            raise ServerLost("it closed the connection") from error
        finally:
            asking.cancel()

    async def _unless_over(self, awaited: asyncio.Future[T]) -> T:
        await asyncio.wait({awaited, self._over}, return_when=asyncio.FIRST_COMPLETED)
        if awaited.done():
            return awaited.result()
        raise ServerLost(self._over.result())

    async def _hold(self) -> None:
        why = "it was closed"
        try:
            async with self._client:
                self._ready.set_result(None)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - whatever its transport met; callers are told
            why = _words(error)
        finally:
            self._over.set_result(why)


def require_mcp() -> None:
    try:
        import mcp  # noqa: F401 - what it needs may be missing, too
    except ImportError:
        raise ConfigError(
            "MCP servers need the package mcp, which is not installed; install millrace[mcp]."
        ) from None


def _text_of(result: Any) -> str:
    """What a model can read of a result."""
    parts = [
        block.text if block.type == "text" else f"[{block.type}, which is not shown]"
        for block in result.content
    ]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts) or "Done."


def _words(error: BaseException) -> str:
    """Of the first of the errors in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
