"""The HTTP connection of an engine to its server, without the API of any server.

A subclass is a dialect: it turns requests into calls and answers into chunks (vllm.py, sglang.py).

Promise: every answer that is late, refused or damaged raises EngineLost, which says what the server
answered. Tokens of a stream carry the version that was served when they arrived; the last chunk
has the server's own account of the versions.

Requests run on an event loop in a thread of its own. Any thread may call the methods, which wait
for the answer; streams put their chunks into a queue.
"""

import asyncio
import contextlib
import json
import os
import queue
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import aiohttp

from millrace.core.errors import EngineLost, cancel_all, shortened
from millrace.core.records import Sampling
from millrace.inference.backend import EngineSpec, VllmBackend
from millrace.inference.servers.process import ServerProcess

CALL_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 600.0  # for new weights
ADAPTER = "millrace-policy"  # name of the policy's LoRA adapter
_LINE_BYTES = 2**22  # of one streamed chunk
_REASON_CHARACTERS = 300


class ServerRefused(EngineLost):
    """The server answered with an error."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedChunk:
    """New tokens of one streamed request."""

    id: str
    version: int  # served when the chunk arrived
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    finish: str | None = None  # "stop", "length" or "abort", in the last chunk
    spans: list[tuple[int, int, int]] | None = None  # (start, end, version), in the last chunk
    error: str = ""  # the stream broke


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What a server that Millrace starts needs to know."""

    spec: EngineSpec
    options: VllmBackend
    folder: Path  # that only this user can enter
    dtype: str
    device: str  # "cpu" or "cuda:N", the first of spec.devices
    max_context: int
    lora_layers: Sequence[str]  # names of the linear layers that an adapter changes
    threads: int


class ServerClient:
    """A connection; the methods that raise NotImplementedError are the dialect."""

    product: ClassVar[str]  # its name in messages
    path: ClassVar[str]  # of requests for tokens
    lora_path: ClassVar[str]  # of adapters
    version_path: ClassVar[str]  # of what the server says about its program
    # Whether requests stay at a paused server, which then reports the versions of their tokens.
    # Otherwise they are ended and sent again, so each has one version.
    keeps_requests: ClassVar[bool]
    supported: ClassVar[str]  # versions, and how to install one
    # What to do about a server that was started wrongly.
    context_flag: ClassVar[str]
    ids_remedy: ClassVar[str]
    logprobs_remedy: ClassVar[str]

    def __init__(
        self,
        url: str,
        *,
        socket: str | None = None,
        headers: Mapping[str, str] | None = None,
        model: str = "policy",
    ) -> None:
        """`socket`: path of the server's Unix socket, if it has one."""
        self.url = url.rstrip("/")
        self.model = model  # its name there
        self.version = 0  # that the server serves
        self.last_answer = ""  # the path and the text of the newest answer, for messages
        self.chunks: queue.SimpleQueue[ServedChunk] = queue.SimpleQueue()
        self._socket = socket
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server", daemon=True)
        self._thread.start()
        self._session = self._run(self._open(socket, headers or {}))
        self._streams: set[asyncio.Task[None]] = set()

    @classmethod
    def launch(cls, launch: Launch) -> tuple[Self, ServerProcess]:
        """Start a server; the caller waits until it answers."""
        raise NotImplementedError

    def product_version(self) -> str | None:
        """Of the server's program; None if it does not say."""
        return self.call(self.version_path, method="GET").get("version")

    def served_model(self) -> dict[str, Any]:
        """Its "architectures", "dtype" and, as far as they are known, "sizes"; raises ConfigError
        if the server cannot do what an engine needs."""
        raise NotImplementedError

    def request_body(
        self, id: str, prompt: list[int], sampling: Sampling, *, cache_salt: str, **limits: Any
    ) -> dict[str, Any]:
        """`limits`: max_tokens, and stop_token_ids."""
        raise NotImplementedError

    def read_chunk(self, id: str, data: Any, *, num_received: int) -> ServedChunk:
        """The new tokens in one line of the stream, after `num_received` earlier ones; ValueError
        if it is an error."""
        raise NotImplementedError

    def likeliest(self, prompt: Sequence[int], *, temperature: float, top: int) -> dict[int, float]:
        """Logprobs of the next token: of the likeliest ids, and of one that was sampled.
        ConfigError if the answer has no weight version."""
        raise NotImplementedError

    def prompt_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Logprobs of all tokens but the first, at temperature 1, with the weights served now.
        KeyError, TypeError or ValueError if the answer lacks some."""
        raise NotImplementedError

    def abort(self, ids: Sequence[str]) -> None:
        """End requests; their last chunk says "abort"."""
        raise NotImplementedError

    def pause(self, *, forget_kv: bool = False) -> None:
        """Stop between two passes. `forget_kv`: running requests are prefilled again later."""

    def resume(self) -> None:
        """Undo pause()."""

    def load_weights(self, folder: str) -> None:
        """Replace the weights by those of a Hugging Face directory; only in a pause."""
        raise NotImplementedError

    def add_adapter(self, folder: str) -> None:
        """Load an adapter, which requests name from here on, in place of that of an earlier run."""
        unload, load = (f"{self.lora_path}/{name}_lora_adapter" for name in ("unload", "load"))
        with contextlib.suppress(ServerRefused):  # there was none
            self.call(unload, {"lora_name": ADAPTER}, has_answer=False)
        body = {"lora_name": ADAPTER, "lora_path": folder}
        self.call(load, body, timeout_s=LOAD_TIMEOUT_S, has_answer=False)
        self.model = ADAPTER

    def load_adapter(self, folder: str) -> None:
        """Replace the weights of that adapter, also for requests in progress; only in a pause."""
        self.add_adapter(folder)

    def lora_remedy(self, rank: int) -> str:
        """How to start a server that accepts adapters of this rank."""
        raise NotImplementedError

    def set_version(self, version: int) -> None:
        """Name the weights; only in a pause, or tokens would get either name."""
        self.call("/update_weight_version", self.version_body(version))
        self.version = version

    def version_body(self, version: int) -> dict[str, Any]:
        return {"new_version": str(version)}

    def generate(self, id: str, *prompt_and_sampling: Any, **settings: Any) -> None:
        """Start to sample one completion, whose chunks arrive in the queue: see request_body()."""
        body = self.request_body(id, *prompt_and_sampling, **settings)
        self._loop.call_soon_threadsafe(self._start_stream, id, body)

    def call(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        method: str = "POST",
        timeout_s: float = CALL_TIMEOUT_S,
        has_answer: bool = True,
        **query: str,
    ) -> Any:
        """The JSON of the answer; None if it is empty, or a sentence for people."""

        async def request() -> tuple[int, str]:
            sent = self._session.request(method, self.url + path, json=body or {}, params=query)
            async with asyncio.timeout(timeout_s), sent as answer:
                return answer.status, await answer.text()

        try:
            status, text = self._run(request())
            self.last_answer = f"{path} with {shortened(text, _REASON_CHARACTERS)!r}"
            if status >= 400:
                raise ServerRefused(f"{self} refused {path}: {_reason(text)}", status=status)
            return json.loads(text) if text and has_answer else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise EngineLost(f"{self} did not answer {path}: {_why(error)}.") from None

    def close(self) -> None:
        async def end() -> None:
            await cancel_all(self._streams)
            await self._session.close()

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __str__(self) -> str:
        server = f"The {self.product} server"
        return server if self._socket else f"{server} at {self.url}"

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _open(self, socket: str | None, headers: Mapping[str, str]) -> aiohttp.ClientSession:
        connector = aiohttp.UnixConnector(socket, limit=0) if socket else None
        return aiohttp.ClientSession(
            connector=connector or aiohttp.TCPConnector(limit=0),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=_LINE_BYTES,
        )

    def _start_stream(self, id: str, body: Mapping[str, Any]) -> None:
        stream = asyncio.ensure_future(self._stream(id, body))
        self._streams.add(stream)
        stream.add_done_callback(self._streams.discard)

    async def _stream(self, id: str, body: Mapping[str, Any]) -> None:
        try:
            num_received, has_ended = 0, False
            async with self._session.post(self.url + self.path, json=body) as answer:
                if answer.status >= 400:
                    raise ValueError(_reason(await answer.text()))
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    data = json.loads(line[len(b"data: ") :])
                    if "error" in data:
                        raise ValueError(_reason(json.dumps(data)))
                    chunk = self.read_chunk(id, data, num_received=num_received)
                    num_received += len(chunk.tokens)
                    has_ended = has_ended or chunk.finish is not None
                    self.chunks.put(chunk)
            if not has_ended:
                raise ValueError("the stream ended before the completion did")
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error) or type(error).__name__
            self.chunks.put(ServedChunk(id=id, version=self.version, error=reason))


def _reason(text: str) -> str:
    """The message in an error of the server or of FastAPI."""
    with contextlib.suppress(ValueError, AttributeError):  # not JSON: the text itself
        data = json.loads(text)
        error = data.get("error", data.get("detail", data))
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return "a web page" if text.startswith("<") else " ".join(text.split())[:_REASON_CHARACTERS]


def _why(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        cause, number = error.os_error, error.os_error.errno or 0
        return os.strerror(number) if number > 0 else cause.strerror or str(cause)
    if isinstance(error, json.JSONDecodeError):
        return "the answer is not JSON"
    return str(error) or type(error).__name__
