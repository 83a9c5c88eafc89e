"""vLLM's HTTP API, as far as an engine needs it.

Promise: every answer that is late, refused or damaged raises EngineLost, which says what the server
answered. Tokens of a stream carry the version that was served when they arrived; the last chunk
has vLLM's own account of the versions.

Requests run on an event loop in a thread of its own. Any thread may call the methods, which wait
for the answer; streams put their chunks into a queue.
"""

import asyncio
import contextlib
import json
import queue
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from millrace.core.errors import EngineLost
from millrace.core.records import Sampling

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
    finish: str | None = None  # vLLM's finish_reason, in the last chunk
    spans: list[tuple[int, int, int]] | None = None  # (start, end, version), in the last chunk
    error: str = ""  # the stream broke


class VllmClient:
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
        self.chunks: queue.SimpleQueue[ServedChunk] = queue.SimpleQueue()
        self._socket = socket
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self._session = self._run(self._open(socket, headers or {}))
        self._streams: set[asyncio.Task[None]] = set()

    def generate(
        self,
        id: str,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        max_tokens: int,
        stop_ids: Sequence[int],
        cache_salt: str,
    ) -> None:
        """Start to sample one completion, whose chunks arrive in the queue."""
        body = self._body(
            id,
            prompt,
            cache_salt=cache_salt,
            stream=True,
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            stop_token_ids=list(stop_ids),
            logprobs=0,
        )
        self._loop.call_soon_threadsafe(self._start_stream, id, body)

    def sample_once(self, prompt: Sequence[int], **sampling: Any) -> dict[str, Any]:
        """The whole answer to a request that does not stream; the first may compile."""
        body = self._body("single", prompt, cache_salt="single", stream=False, **sampling)
        return self.call("/inference/v1/generate", body, timeout_s=LOAD_TIMEOUT_S)

    def prompt_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Logprobs of all tokens but the first, at temperature 1, with the weights served now."""
        answer = self.sample_once(tokens, max_tokens=1, temperature=1.0, prompt_logprobs=0)
        try:
            rows = answer["prompt_logprobs"][1:]
            return [row[str(token)]["logprob"] for row, token in zip(rows, tokens[1:], strict=True)]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineLost(f"{self} scored a prompt without its logprobs ({error!r}).") from None

    def abort(self, ids: Sequence[str]) -> None:
        """End requests; their last chunk says "abort". vLLM ignores ids without this prefix."""
        self.call("/abort_requests", {"request_ids": [f"generate-tokens-{id}" for id in ids]})

    def pause(self, *, forget_kv: bool = False) -> None:
        """Stop between two passes. `forget_kv`: running requests are prefilled again later."""
        self.call("/pause", mode="keep", clear_cache=str(forget_kv).lower())

    def resume(self) -> None:
        self.call("/resume")

    def load_weights(self, folder: str) -> None:
        """Replace the weights by those of a Hugging Face directory; only in a pause."""
        self.rpc("millrace_load", folder, timeout_s=LOAD_TIMEOUT_S)

    def add_adapter(self, folder: str) -> None:
        """Load an adapter, which requests name from here on, in place of that of an earlier run."""
        with contextlib.suppress(ServerRefused):  # there was none
            self.call("/v1/unload_lora_adapter", {"lora_name": ADAPTER}, has_answer=False)
        body = {"lora_name": ADAPTER, "lora_path": folder}
        self.call("/v1/load_lora_adapter", body, timeout_s=LOAD_TIMEOUT_S, has_answer=False)
        self.rpc("millrace_unwrap_head")
        self.model = ADAPTER

    def load_adapter(self, folder: str) -> None:
        """Replace the weights of that adapter, also for requests in progress; only in a pause.

        Not by vLLM's own load_inplace, which is stored with the adapter: requests in progress would
        then load the folder of their own start again, in each pass."""
        self.rpc("millrace_load_adapter", ADAPTER, folder, timeout_s=LOAD_TIMEOUT_S)

    def set_version(self, version: int) -> None:
        """Name the weights; only in a pause, or tokens would get either name."""
        self.call("/update_weight_version", {"new_version": str(version)})
        self.version = version

    def rpc(self, method: str, *arguments: str, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """The answer of vLLM's first worker to a method of the worker extension."""
        body = {"method": method, "args": list(arguments)}
        answer = self.call("/collective_rpc", body, timeout_s=timeout_s)
        return answer["results"][0] if answer else None

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
            if status >= 400:
                raise ServerRefused(f"{self} refused {path}: {_reason(text)}", status=status)
            return json.loads(text) if text and has_answer else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise EngineLost(f"{self} did not answer {path}: {reason}.") from None

    def close(self) -> None:
        async def end() -> None:
            for stream in self._streams:
                stream.cancel()
            await asyncio.gather(*self._streams, return_exceptions=True)
            await self._session.close()

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __str__(self) -> str:
        return "The vLLM server" if self._socket else f"The vLLM server at {self.url}"

    def _body(
        self, id: str, prompt: Sequence[int], *, cache_salt: str, stream: bool, **sampling: Any
    ) -> dict[str, Any]:
        # The server's defaults come from the model's generation_config.json, and stop_token_ids
        # are the only tokens that may end a completion.
        plain = {"repetition_penalty": 1.0, "ignore_eos": True, "detokenize": False}
        return {
            "request_id": id,
            "model": self.model,
            "token_ids": list(prompt),
            "cache_salt": cache_salt,
            "stream": stream,
            "sampling_params": {**plain, **sampling},
        }

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _open(self, socket: str | None, headers: Mapping[str, str]) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(socket, limit=0)
            if socket
            else aiohttp.TCPConnector(limit=0),
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
            url = f"{self.url}/inference/v1/generate"
            async with self._session.post(url, json=body) as answer:
                if answer.status >= 400:
                    raise ValueError(_reason(await answer.text()))
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        self._receive(id, json.loads(line[len(b"data: ") :]))
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error) or type(error).__name__
            self.chunks.put(ServedChunk(id=id, version=self.version, error=reason))

    def _receive(self, id: str, data: Mapping[str, Any]) -> None:
        if "error" in data:
            raise ValueError(_reason(json.dumps(data)))
        for choice in data["choices"]:
            if (spans := choice.get("weight_versions")) is not None:
                spans = [(s["start"], s["end"], int(s["version"])) for s in spans]
            content = (choice.get("logprobs") or {}).get("content") or []
            self.chunks.put(
                ServedChunk(
                    id=id,
                    tokens=choice["token_ids"],
                    logprobs=[row["logprob"] for row in content],
                    version=self.version,
                    finish=choice.get("finish_reason"),
                    spans=spans,
                )
            )


def _reason(text: str) -> str:
    """The message in an error of vLLM or FastAPI."""
    with contextlib.suppress(ValueError, AttributeError):  # not JSON: the text itself
        data = json.loads(text)
        error = data.get("error", data.get("detail", data))
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return text[:_REASON_CHARACTERS]
