"""Chat with a checkpoint: `millrace serve` as a child process, started by the first message.

Promise: one model is loaded at a time. The server listens on this machine only, with a key that
only this process has; it uses the CPU unless told otherwise, and has a low priority, so that
training comes first. It stops after IDLE_S without a request, and ends with the dashboard,
however that ends. Its output is in a temporary folder. Runs on the dashboard's event loop.
"""

import asyncio
import contextlib
import json
import os
import re
import secrets
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import msgspec

from millrace.cluster.parent_death import with_parent_death_signal
from millrace.core.errors import EnginesDown, printable
from millrace.dashboard.runs import RunReader
from millrace.serving.api.errors import ApiError

IDLE_S = 300.0
STOP_S = 10.0
MODEL, ADAPTER = "checkpoint", "adapter"  # names of the served models
ADAPTER_FILE = "adapter_config.json"


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str


class ChatRequest(msgspec.Struct, frozen=True):
    step: int  # of the checkpoint
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    temperature: float = 1.0
    max_tokens: int = 256


class CheckpointServer:
    def __init__(self, *, device: str = "cpu", idle_s: float = IDLE_S) -> None:
        self._device = device
        self._idle_s = idle_s
        self._folder: Path | None = None  # of the checkpoint that is served
        self._process: Process | None = None
        self._url = ""
        self._key = secrets.token_urlsafe(16)
        self._changing = asyncio.Lock()  # held while the process starts or stops
        self._num_active = 0  # replies
        self._idle: asyncio.TimerHandle | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._temp = tempfile.TemporaryDirectory(prefix="millrace-chat-")

    async def reply(self, run: RunReader, asked: ChatRequest) -> AsyncGenerator[dict[str, Any]]:
        """Events: what is happening, then pieces of text, then why the reply has ended."""
        folder = _checkpoint(run, asked.step)
        has_template = _has_template(folder)
        self._num_active += 1
        try:
            if self._folder != folder:
                yield {"status": f"Loading step {asked.step} on {self._device} …"}
            await self._start(folder)
            note = "" if has_template else "No chat template: your text is continued as it is."
            yield {"status": note}
            async with contextlib.aclosing(self._ask(asked, has_template=has_template)) as events:
                async for event in events:
                    yield event
        finally:
            self._num_active -= 1
            self._wait_for_more()

    async def close(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        async with self._changing:
            await self._stop()
        self._temp.cleanup()

    async def _start(self, folder: Path) -> None:
        """Serve this checkpoint, unless it is served already."""
        async with self._changing:
            is_alive = self._process is not None and self._process.returncode is None
            if is_alive and self._folder == folder:
                return
            if is_alive and self._num_active > 1:
                raise EnginesDown("Another chat uses another checkpoint; wait until it has ended.")
            await self._stop()
            with self._errors.open("wb") as errors:
                self._process = await asyncio.create_subprocess_exec(
                    *with_parent_death_signal(["nice", "-n", "10", *self._command(folder)]),
                    stdin=DEVNULL,
                    stdout=PIPE,
                    stderr=errors,
                    env={**os.environ, "MILLRACE_API_KEY": self._key},
                )
            assert self._process.stdout is not None
            try:
                line = await self._process.stdout.readline()
            except asyncio.CancelledError:  # the viewer has left
                await self._stop()
                raise
            found = re.search(r"http://\S+", line.decode())
            if found is None:
                await self._stop()
                lines = self._errors.read_text(errors="replace").strip().splitlines()
                said = printable(next((x for x in lines if x.startswith("error:")), "no reason"))
                raise EnginesDown(f"The checkpoint cannot be served: {said[:500]}")
            self._folder, self._url = folder, found[0]

    def _command(self, folder: Path) -> list[str]:
        base = _base_of(folder)
        more = [] if base is None else [f"--engine.adapters.{ADAPTER}", str(folder)]
        place = ["--placement.engines", self._device, "--log-dir", self._temp.name]
        serve = [sys.executable, "-m", "millrace", "serve", base or str(folder)]
        return [*serve, "--port", "0", "--name", MODEL, *place, *more]

    @property
    def _errors(self) -> Path:
        return Path(self._temp.name) / "serve.log"

    async def _ask(
        self, asked: ChatRequest, *, has_template: bool
    ) -> AsyncGenerator[dict[str, Any]]:
        assert self._folder is not None
        body = {
            "model": MODEL if _base_of(self._folder) is None else ADAPTER,
            "stream": True,
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
        }
        if has_template:
            path, body["messages"] = "/chat/completions", msgspec.to_builtins(asked.messages)
        else:
            path, body["prompt"] = "/completions", asked.messages[-1].content
        headers = {"Authorization": f"Bearer {self._key}"}
        timeout = aiohttp.ClientTimeout(total=None)
        try:
            async with (
                aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
                session.post(self._url + path, json=body) as response,
            ):
                if response.status != 200:
                    answer = await response.json()
                    raise ApiError(str(answer["error"]["message"]), status=400)
                async for piece in _pieces(response):
                    yield piece
        except aiohttp.ClientError as error:
            raise EnginesDown(f"The server of the checkpoint has gone: {error}") from None

    def _wait_for_more(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        if self._num_active == 0:
            self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._stop_if_idle)

    def _stop_if_idle(self) -> None:
        async def stop() -> None:
            async with self._changing:
                if self._num_active == 0:
                    await self._stop()

        self._stopping = asyncio.create_task(stop())

    async def _stop(self) -> None:
        process, self._process, self._folder = self._process, None, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _checkpoint(run: RunReader, step: int) -> Path:
    folder = run.run_dir.checkpoints / f"step_{step}"
    if any((folder / name).is_file() for name in ("config.json", ADAPTER_FILE)):
        return folder.absolute()
    message = f"This machine has no checkpoint of step {step} of {run.run_dir.path}."
    raise ApiError(message, status=404)


def _base_of(folder: Path) -> str | None:
    """The base model of an adapter; None of a whole model."""
    path = folder / ADAPTER_FILE
    return json.loads(path.read_text())["base_model_name_or_path"] if path.is_file() else None


def _has_template(folder: Path) -> bool:
    """Whether the tokenizer can render messages. Of an adapter, the base model decides."""
    folder = Path(_base_of(folder) or folder)
    if not folder.is_dir():
        return True  # on the hub; the server says if it has none
    settings = folder / "tokenizer_config.json"
    in_settings = settings.is_file() and '"chat_template"' in settings.read_text()
    return in_settings or (folder / "chat_template.jinja").is_file()


async def _pieces(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        data = line.strip().removeprefix(b"data: ")
        if not data or data == b"[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise EnginesDown(str(chunk["error"]["message"]))
        for choice in chunk["choices"]:
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            finish = choice.get("finish_reason")
            yield {"text": text, **({"finish": finish} if finish else {})}
