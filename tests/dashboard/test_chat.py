"""Chat with a checkpoint: the server that the dashboard starts for it, and how that ends."""

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import aiohttp
import psutil
import pytest
from project import Command
from synthetic_run import make_run
from test_server import KEY, serving

from millrace.dashboard.chat import ChatMessage, ChatRequest, CheckpointServer
from millrace.dashboard.runs import RunReader


def request(step: int = 40, text: str = "Hello", **more) -> dict:
    return {"step": step, "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


@pytest.fixture
def chat_run(tmp_path) -> Path:
    """A run whose checkpoint of step 40 is a tiny chat model."""
    from chat_model import make_chat_model

    run_dir = make_run(tmp_path / "run")
    make_chat_model(run_dir.checkpoints / "step_40")
    return run_dir.path


def servers_below(process: psutil.Process) -> list[psutil.Process]:
    """The checkpoint servers that a process started; other tests leave children of their own."""
    servers = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
            if "serve" in child.cmdline():
                servers.append(child)
    return servers


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for is another process
            await asyncio.sleep(0.05)


async def events_of(response: aiohttp.ClientResponse) -> list[dict]:
    lines = (await response.text()).split("\n\n")
    return [json.loads(line[6:]) for line in lines if line and line != "data: [DONE]"]


async def test_a_chat_needs_the_token_json_and_a_checkpoint_on_this_machine(tmp_path):
    make_run(tmp_path / "run")
    async with serving(tmp_path / "run") as session:
        cases = [
            (401, {"json": request()}),
            (415, {"data": json.dumps(request()), "headers": KEY}),
            (400, {"json": {"step": "x"}, "headers": KEY}),
            (400, {"json": {"step": 40, "messages": []}, "headers": KEY}),
            (404, {"json": request(step=7), "headers": KEY}),
        ]
        for status, options in cases:
            async with session.post("/runs/0/chat", **options) as response:
                text = await response.text()
                assert response.status == status, text
        assert "no checkpoint of step 7" in text
        async with session.post("/runs/3/chat", json=request(), headers=KEY) as response:
            assert response.status == 404


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_chat_starts_a_server_that_dies_with_the_dashboard(chat_run, tmp_path):
    command = Command("dashboard", chat_run, "--port", "0", folder=tmp_path)
    assert command.process.stdout is not None
    found = re.search(r"(http://\S+)/\?token=(\S+)", command.process.stdout.readline())
    assert found is not None, command.finish()
    headers = {"Authorization": f"Bearer {found[2]}"}
    dashboard = psutil.Process(command.process.pid)
    assert not dashboard.children()
    async with aiohttp.ClientSession(found[1], headers=headers) as session:
        for _ in range(2):
            async with session.post("/runs/0/chat", json=request()) as response:
                assert response.status == 200, await response.text()
                events = await events_of(response)
            assert "".join(event.get("text", "") for event in events), events
            assert events[-1]["finish"] in ("length", "stop")
        assert "error" not in str(events)
    started = dashboard.children(recursive=True)
    servers = servers_below(dashboard)
    assert len(servers) == 1  # for both replies
    assert servers[0].nice() >= min(19, dashboard.nice() + 10)
    dashboard.send_signal(signal.SIGKILL)
    command.finish()
    await until(lambda: not any(child.is_running() for child in started))


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_an_idle_server_stops_and_a_broken_checkpoint_is_one_sentence(chat_run):
    reader = RunReader(chat_run, id="0")
    asked = ChatRequest(step=40, messages=[ChatMessage("user", "a")], max_tokens=2)
    chat = CheckpointServer(idle_s=0.1)
    try:
        events = [event async for event in chat.reply(reader, asked)]
        assert "Loading step 40 on cpu" in events[0]["status"]
        await until(lambda: not servers_below(psutil.Process()))
        (chat_run / "checkpoints/step_40/config.json").write_text("{}")
        with pytest.raises(Exception, match="cannot be served: error: "):
            _ = [event async for event in chat.reply(reader, asked)]
    finally:
        await chat.close()
    assert not servers_below(psutil.Process())
