"""Environments that are offered tools of MCP servers, as `agent.tools`."""

from collections.abc import Sequence
from typing import Any

from millrace.core.records import Message, Prompt, Task
from millrace.environments.agent import Agent
from millrace.environments.function_environment import EnvironmentFunction
from millrace.environments.tools.functions import Tool, tools_of
from millrace.environments.tools.mcp_server import McpServer


async def use_tools(task: Task, agent: Agent) -> None:
    """Chat and call the tools that are offered until a reply calls none. The scorers judge."""
    await agent.run(messages_of(task.prompt), agent.tools)


def messages_of(prompt: Prompt) -> list[Message]:
    """A prompt that is a text as what a user says."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


class WithServers:
    """An environment function; run by the loop of the environments, as are open() and close()."""

    def __init__(self, function: EnvironmentFunction, servers: Sequence[McpServer]) -> None:
        self._function = function
        self._servers = tuple(servers)
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    async def open(self) -> None:
        """Connect to all servers; raises ConfigError, before any worker starts."""
        tools_of(await self._tools())

    async def close(self) -> None:
        for server in self._servers:
            await server.close()

    async def __call__(self, task: Task, agent: Agent) -> Any:
        agent.tools = tuple(await self._tools())
        return await self._function(task, agent)

    async def _tools(self) -> list[Tool]:
        return [tool for server in self._servers for tool in await server.tools()]
