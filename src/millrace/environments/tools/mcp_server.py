"""Tools of MCP servers, shared by the agents of all episodes.

    server = McpServer(["python", "server.py"])      # or McpServer(url="http://HOST/mcp")

    async def play(task, agent):
        messages = await agent.run([...], tools=await server.tools())

Promise: there is one connection per event loop, made on first use. The model gets the server's tool
descriptions unchanged, and its errors too: a call to a server that died returns an error, and the
next call connects again. A server program ends with close(), or with the process that started it.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from millrace.core.errors import ConfigError
from millrace.core.records import Task
from millrace.core.secrets import Secrets, check_headers
from millrace.environments.agent import Agent
from millrace.environments.function_environment import EnvironmentFunction, name_of
from millrace.environments.threads import call_hook
from millrace.environments.tools.functions import Tool, ToolError, tools_of

CONNECT_TIMEOUT_S = 30.0
T = TypeVar("T")


class ServerLost(Exception):
    """There is no connection, or it was lost."""


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
        """Either `command` starts a program that speaks MCP over stdin and stdout, or `url` speaks
        streamable HTTP. `env` is the program's environment, besides PATH; `headers` are sent with
        requests. Their values may contain "env:NAME". `tools` selects tools by name; None = all.
        `log` is a file for the program's stderr; None = that of this process."""
        if bool(command) == (url is not None):
            raise ConfigError("An MCP server has either a command or a url; set one of the two.")
        try:
            import mcp  # noqa: F401 - one of its own dependencies may also be missing
        except ImportError:
            raise ConfigError(
                "MCP servers need the package mcp, which is not installed; install millrace[mcp]."
            ) from None
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
        self._loop: asyncio.AbstractEventLoop | None = None  # of the next three
        self._opening = asyncio.Lock()
        self._session: _Session | None = None
        self._tools: list[Tool] | None = None

    async def tools(self) -> list[Tool]:
        """Return tools for agent.chat; raises ConfigError if the server cannot be reached."""
        self._use_this_loop()
        if self._tools is None:
            try:
                session = await self._connected()
                self._tools = self._select(await session.list_tools())
            except ServerLost as lost:
                raise ConfigError(
                    f"MCP server {self.name!r} cannot be used ({lost}); check its command or url."
                ) from lost
        return list(self._tools)

    async def close(self) -> None:
        """Close the connection of this loop, and end the server program."""
        if self._loop is asyncio.get_running_loop() and self._session is not None:
            await self._session.close()

    async def _connected(self) -> "_Session":
        self._use_this_loop()
        async with self._opening:
            if self._session is None or self._session.is_over:
                self._session = await _Session.open(self._streams())
        return self._session

    def _use_this_loop(self) -> None:
        """Drop a connection that belonged to another event loop."""
        if self._loop is not asyncio.get_running_loop():
            self._loop, self._session, self._tools = asyncio.get_running_loop(), None, None
            self._opening = asyncio.Lock()

    def _select(self, found: Sequence[Any]) -> list[Tool]:
        names = [tool.name for tool in found]
        for name in self._offered or ():
            if name not in names:
                raise ConfigError(
                    f"MCP server {self.name!r} has no tool {name!r}; it has {', '.join(names)}."
                )
        return [
            Tool(
                name=tool.name,
                description=tool.description or "",
                parameters=tool.input_schema,
                call=partial(self._call, tool.name),
                check=dict,  # the server checks the arguments
            )
            for tool in found
            if self._offered is None or tool.name in self._offered
        ]

    async def _call(self, tool: str, /, **arguments: Any) -> str:
        try:
            session = await self._connected()
            result = await session.call_tool(tool, arguments)
        except ServerLost as lost:
            # Not retried: the tool may already have done its work.
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
                # No timeout: callers limit the time of each tool call.
                httpx2.AsyncClient(headers=self._headers, timeout=None) as http,
                streamable_http_client(self._url, http_client=http) as streams,
            ):
                yield streams
            return
        program, *arguments = self._command
        beside = str(Path(sys.executable).parent)  # makes "python" this interpreter
        path = os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])
        server = StdioServerParameters(
            command=program, args=arguments, env={"PATH": path, **self._env}
        )
        log = contextlib.nullcontext(sys.stderr)
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            log = self._log.open("a", encoding="utf-8")
        with log as errors:
            async with stdio_client(server, errlog=errors) as streams:
                yield streams


class _Session:
    """One connection, held by a task of its own, which must both open and close it."""

    def __init__(self, streams: contextlib.AbstractAsyncContextManager[Any]) -> None:
        from mcp import Client

        loop = asyncio.get_running_loop()
        self._client = Client(streams)
        self._ready: asyncio.Future[None] = loop.create_future()
        self._closing = asyncio.Event()
        self._holding = loop.create_task(self._hold(), name="mcp")  # returns why it is over

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
        return self._closing.is_set() or self._holding.done()

    async def list_tools(self) -> list[Any]:
        page = await self._request(self._client.list_tools())
        tools = list(page.tools)
        while page.next_cursor:
            page = await self._request(self._client.list_tools(cursor=page.next_cursor))
            tools += page.tools
        return tools

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        from mcp import MCPError

        try:
            return await self._request(self._client.call_tool(name, arguments))
        except MCPError as error:
            raise ToolError(str(error)) from error

    async def close(self) -> None:
        self._closing.set()
        await asyncio.wait({self._holding})

    async def _request(self, request: Coroutine[Any, Any, T]) -> T:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        task = asyncio.create_task(request)
        try:
            return await self._unless_over(task)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise
            self._closing.set()
            raise ServerLost("it closed the connection") from error
        finally:
            task.cancel()

    async def _unless_over(self, awaited: asyncio.Future[T]) -> T:
        await asyncio.wait({awaited, self._holding}, return_when=asyncio.FIRST_COMPLETED)
        if awaited.done():
            return awaited.result()
        raise ServerLost(self._holding.result())

    async def _hold(self) -> str:
        try:
            async with self._client:
                self._ready.set_result(None)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - any transport error; callers get it
            cause: BaseException = error
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            return f"{type(cause).__name__}: {cause}"
        return "it was closed"


class WithServers:
    """Wraps an environment function; its agents get the tools of MCP servers as `agent.tools`."""

    def __init__(self, function: EnvironmentFunction, servers: Sequence[McpServer]) -> None:
        self.function = function
        self._servers = tuple(servers)
        self.__name__ = name_of(function)

    async def open(self) -> None:
        """Connect to all servers before any worker starts; raises ConfigError."""
        tools_of(await self._tools())
        await call_hook(self.function, "open")

    async def close(self) -> None:
        try:
            await call_hook(self.function, "close")
        finally:
            for server in self._servers:
                await server.close()

    async def __call__(self, task: Task, agent: Agent) -> Any:
        agent.tools = tuple(await self._tools())
        return await self.function(task, agent)

    async def _tools(self) -> list[Tool]:
        return [tool for server in self._servers for tool in await server.tools()]


def _text_of(result: Any) -> str:
    parts = [
        block.text if block.type == "text" else f"[{block.type}, which is not shown]"
        for block in result.content
    ]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts) or "Done."
