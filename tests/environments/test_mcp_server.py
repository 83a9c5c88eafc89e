"""Real MCP servers, in processes of their own."""

import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from chat_engine import ChatEngine, player_of

from millrace.core.errors import ConfigError
from millrace.core.records import Task
from millrace.environments.agent import Agent
from millrace.environments.function_environment import lifetime, use_tools
from millrace.environments.rollouts.partial_rollouts import Attempt
from millrace.environments.threads import LoopThread
from millrace.environments.tools.functions import ToolResult, run_tool
from millrace.environments.tools.mcp_server import McpServer, WithServers

pytest.importorskip("mcp")

COMMAND = [sys.executable, str(Path(__file__).with_name("mcp_tools.py"))]


@pytest.fixture
async def server(tmp_path, monkeypatch):
    monkeypatch.setenv("MCP_TEST_WORD", "sesame")
    env = {"SECRET_WORD": "env:MCP_TEST_WORD"}
    server = McpServer(COMMAND, env=env, log=tmp_path / "mcp.log")
    yield server
    await server.close()


async def call(server: McpServer, name: str, *, timeout_s=20.0, **arguments) -> ToolResult:
    tools = {tool.name: tool for tool in await server.tools()}
    return await run_tool(tools[name], arguments, timeout_s=timeout_s, max_chars=1000)


async def pid_of(server: McpServer) -> int:
    return int((await call(server, "process")).text.split()[0])


async def test_server_tools_have_schemas_and_errors_become_text(server):
    tools = await server.tools()
    assert [tool.name for tool in tools] == ["add", "process", "wait", "die"]
    schema = tools[0].schema["function"]
    assert schema["description"] == "Add two numbers."
    assert schema["parameters"]["properties"]["a"]["type"] == "integer"
    assert schema["parameters"]["required"] == ["a", "b"]
    assert await call(server, "add", a=2, b=3) == ToolResult(text="5")
    assert (await call(server, "process")).text.endswith(" sesame")
    wrong = await call(server, "add", a="two", b=3)
    assert wrong.fault == "tool_errors"
    assert wrong.text.startswith("Error: ")
    assert "valid integer" in wrong.text


async def test_calls_share_a_connection_and_only_the_hanging_one_times_out(server):
    slow, fast = await asyncio.gather(
        call(server, "wait", seconds=60, timeout_s=0.3), call(server, "add", a=1, b=1)
    )
    assert slow.fault == "tool_timeouts"
    assert fast.text == "2"
    assert await pid_of(server) == await pid_of(server)


async def test_dead_server_is_reported_to_the_model_and_reconnected(server):
    first = await pid_of(server)
    pending = asyncio.create_task(call(server, "wait", seconds=60))
    await asyncio.sleep(0.1)
    lost = await call(server, "die")
    assert lost.fault == "tool_errors"
    assert lost.text.startswith("Error: the server of die was lost (")
    assert (await pending).text.startswith("Error: the server of wait was lost (")
    assert await pid_of(server) != first


async def test_missing_selected_tool_raises_config_error_with_known_tools():
    wrong = McpServer(COMMAND, name="sums", tools=["sub"])
    with pytest.raises(ConfigError, match="'sums' has no tool 'sub'; it has add, process, wait"):
        await wrong.tools()
    await wrong.close()


@pytest.mark.parametrize(
    "there",
    [{"command": ["no-such-program"]}, {"command": ["false"]}, {"url": "http://127.0.0.1:9"}],
)
async def test_unreachable_server_raises_config_error(there):
    with pytest.raises(ConfigError, match=r"MCP server '.*' cannot be used \(.*\); check its"):
        await McpServer(**there).tools()


def test_invalid_server_settings_raise_config_error():
    with pytest.raises(ConfigError, match="either a command or a url"):
        McpServer()
    with pytest.raises(ConfigError, match="'x' needs the environment variable 'NOT_SET'"):
        McpServer(["x"], env={"KEY": "env:NOT_SET"})
    with pytest.raises(ConfigError, match="'Authorization' header in the settings"):
        McpServer(url="http://x", headers={"Authorization": "secret"})


async def test_streamable_http_survives_a_restart_of_the_server():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = McpServer(url=f"http://127.0.0.1:{port}/mcp")
    process = await _listening(port)
    assert (await call(server, "add", a=2, b=2)).text == "4"
    lost = await call(server, "die")
    assert lost.text.startswith("Error: the server of die was lost (")
    process.wait()
    assert "was lost" in (await call(server, "add", a=2, b=2)).text
    process = await _listening(port)
    assert (await call(server, "add", a=2, b=3)).text == "5"
    await server.close()
    process.kill()
    process.wait()


async def _listening(port: int) -> subprocess.Popen:
    process = subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        await asyncio.sleep(0.05)
    raise AssertionError("the server does not listen")


def caller(prompt: str) -> str:
    if "<tool_response>" not in prompt:
        return '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    return prompt.rpartition("<tool_response>\n")[2].partition("\n</tool_response>")[0]


async def test_all_episodes_share_one_server_that_ends_with_the_run(tmp_path):
    environment = WithServers(
        use_tools, [McpServer(COMMAND, tools=["add"], log=tmp_path / "mcp.log")]
    )
    engine = ChatEngine(caller)
    before = set(psutil.Process().children())
    with LoopThread("environments") as thread:
        async with lifetime(environment, thread=thread):
            player = player_of(environment, engine, thread=thread)
            group = await player.play_for_training(
                Task(prompt="2+3?"), attempt=Attempt(0), group_size=3
            )
            (process,) = set(psutil.Process().children()) - before
        assert not process.is_running()
    assert [episode.turns[-1].completion for episode in group.episodes] == ["5"] * 3
    assert '"name": "add"' in engine.prompts[0]
    assert '"name": "die"' not in engine.prompts[0]  # only selected tools are offered


class Counted:
    """An environment that counts what it was asked to do."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def open(self) -> None:
        self.calls.append("open")

    async def close(self) -> None:
        self.calls.append("close")

    async def __call__(self, task: Task, agent: Agent) -> float:
        self.calls.append("play")
        await agent.complete("?")
        return float(len(agent.tools))


async def test_environment_with_servers_is_opened_and_closed(tmp_path):
    environment = Counted()
    servers = [McpServer(COMMAND, tools=["add"], log=tmp_path / "mcp.log")]
    wrapped = WithServers(environment, servers)
    with LoopThread("environments") as thread:
        async with lifetime(wrapped, thread=thread):
            player = player_of(wrapped, ChatEngine(caller), thread=thread)
            group = await player.play_for_training(
                Task(prompt="2+3?"), attempt=Attempt(0), group_size=1
            )
    assert [episode.reward for episode in group.episodes] == [1.0]
    assert environment.calls == ["open", "play", "close"]
