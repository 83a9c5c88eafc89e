"""An MCP server to test with: `python mcp_tools.py` speaks stdio, with a port streamable HTTP."""

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("tools", log_level="ERROR")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def process() -> str:
    """Which process this is, and what its environment says."""
    return f"{os.getpid()} {os.environ.get('SECRET_WORD')}"


@server.tool()
async def wait(seconds: float) -> str:
    """Take some time."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
