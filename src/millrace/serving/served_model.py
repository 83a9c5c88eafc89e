"""A model behind its engines, as the endpoints use it: prompts in, completions or chunks out.

Promise: closing a stream frees its slots in the engines. A text that is far too long for the
context is refused before all of it is tokenised. Runs on the server's event loop. Requests are
prepared (templates, grammars, tokens) in two threads, because a long prompt would delay all
streams: one thread prepares small requests, the other one large ones. In each, clients take turns
by the bytes of their requests.
"""

import asyncio
import contextlib
import copy
import hashlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import accumulate, chain
from typing import Any, TypeVar

import numpy as np

from millrace.core.errors import cancel_all, run_all
from millrace.core.protocols import Engine, OnTokens
from millrace.core.records import (
    Completion,
    CompletionChunk,
    FinishReason,
    Message,
    Request,
    ScoreRequest,
    TokenLogprobs,
)
from millrace.environments.rollouts.renderer import Renderer
from millrace.environments.tools.calls import ToolFormat
from millrace.serving.api.bodies import OpenAIBody
from millrace.serving.api.errors import ApiError
from millrace.serving.clients import Client, TokenQuotas
from millrace.serving.fair_queue import FairQueue, Flow
from millrace.serving.metrics import ServerMetrics

# A longer text is first encoded in pieces, until they exceed the context twice.
_CHARACTERS_PER_TOKEN = 8
_PIECE_CHARACTERS = 16384
_SMALL_BYTES = 16384  # of a request that does not wait until larger ones are prepared
T = TypeVar("T")


@dataclass(eq=False)
class ServedModel:
    engine: Engine | None  # None refuses all requests to generate
    _: KW_ONLY
    tokenizer: Any
    name: str
    adapters: Sequence[str] = ()
    max_context: int
    max_sequences: int = 64  # that the engines run at a time
    separates_clients: bool = False  # there are several, and none gets all places
    tool_format: ToolFormat
    metrics: ServerMetrics
    quotas: TokenQuotas = field(default_factory=lambda: TokenQuotas(None))

    def __post_init__(self) -> None:
        self.created = int(time.time())
        # Tokenizers are not thread-safe: one for the event loop, one for each preparing thread.
        self._own = threading.local()
        self._small, self._large = (self._preparing_thread() for _ in range(2))
        self._texts: dict[int, str] = {}  # of single tokens; at most the vocabulary
        self._queue = FairQueue(self.max_sequences, separates_clients=self.separates_clients)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that clients can request: the model and its adapters."""
        return (self.name, *self.adapters)

    def _preparing_thread(self) -> tuple[ThreadPoolExecutor, FairQueue]:
        """A thread, and the queue in front of it."""
        renderer, own = Renderer(copy.deepcopy(self.tokenizer)), self._own

        def initialize() -> None:
            own.renderer = renderer

        thread = ThreadPoolExecutor(1, thread_name_prefix="prepare", initializer=initialize)
        return thread, FairQueue(1, separates_clients=False)

    async def prepare(
        self, make: Callable[[], T], *, client: Client, num_bytes: int, num_parts: int = 1
    ) -> T:
        """Run `make` in a thread that prepares requests. It is one of several parts of work on a
        request of so many bytes."""
        thread, queue = self._small if num_bytes <= _SMALL_BYTES else self._large
        async with queue.turn(client.name, num_bytes // num_parts):
            return await asyncio.get_running_loop().run_in_executor(thread, make)

    @property
    def _renderer(self) -> Renderer:
        """The renderer of the thread that calls this."""
        return self._own.renderer

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] = (),
        template_settings: Mapping[str, Any] | None = None,
    ) -> np.ndarray:  # [P] int32
        """Called inside prepare(), like text_prompt()."""
        text = self._renderer.chat_text(messages, tools=tools, **(template_settings or {}))
        self._refuse_long(text)
        return self._renderer.encode(text)

    def text_prompt(self, prompt: str | list[int]) -> np.ndarray:  # [P] int32
        if not isinstance(prompt, str):
            self.check_room(len(prompt))  # first, as a long list takes time to convert
            return np.array(prompt, np.int32)
        self._refuse_long(prompt)
        return self._renderer.render(prompt)

    def prompt_text(self, tokens: np.ndarray) -> str:
        """What decode() returns, inside prepare()."""
        return self._renderer.decode(tokens)

    def _refuse_long(self, text: str) -> None:
        if len(text) <= _CHARACTERS_PER_TOKEN * self.max_context:
            return
        num_tokens = 0
        for start in range(0, len(text), _PIECE_CHARACTERS):
            num_tokens += len(self._renderer.encode(text[start : start + _PIECE_CHARACTERS]))
            if num_tokens > 2 * self.max_context:
                raise ApiError(
                    f"The prompt has {len(text)} characters, far more than the"
                    f" {self.max_context} tokens of the context; shorten the prompt.",
                    code="context_length_exceeded",
                )

    def check_room(self, num_prompt: int) -> int:
        """The number of tokens that the reply may have."""
        if num_prompt >= self.max_context:
            raise ApiError(
                f"The prompt has {num_prompt} tokens, but the context is limited to"
                f" {self.max_context}, including the reply; shorten the prompt.",
                code="context_length_exceeded",
            )
        return self.max_context - num_prompt

    def request(
        self,
        id: str,
        prompt: np.ndarray,
        body: OpenAIBody,
        *,
        client: Client,
        max_tokens: int | None,
        index: int = 0,
        grammar: str | None = None,
    ) -> Request:
        """`index` numbers the first completion among all that the client requested."""
        if self.engine is None:
            message = "This server only scores tokens: it has no engines to generate."
            raise ApiError(message, status=404)
        if body.model not in self.names:
            raise ApiError(
                f"Model {body.model!r} does not exist; this server has {', '.join(self.names)}.",
                status=404,
                param="model",
                code="model_not_found",
            )
        room = self.check_room(len(prompt))
        session = None
        if isinstance(key := body.prompt_cache_key, str) and key:
            # A digest, because it is remembered and the key may be long.
            session = hashlib.sha256(f"{client.cache_salt}{key}".encode()).hexdigest()
        return Request(
            id=id,
            prompt=prompt,
            sampling=body.sampling(max_new_tokens=min(max_tokens or room, room), grammar=grammar),
            n=body.num_choices,
            seed=body.drawn_seed(),
            index=index,
            session=session,
            cache_salt=client.cache_salt,
            adapter=body.model if body.model in self.adapters else None,
        )

    @contextlib.contextmanager
    def charged(
        self, requests: Sequence[Request], *, client: Client, is_reserved: bool = False
    ) -> Iterator[Flow]:
        """What the methods below need to execute the requests, whose tokens are taken from the
        quota of the client. `is_reserved`: take() of the quota was called for them."""
        quota, flow = self.quotas.of(client), Flow(client.name)
        num_prompt, num_reserved = num_tokens(requests)
        if not is_reserved:
            quota.take(num_prompt, num_reserved=num_reserved)
        try:
            yield flow
        finally:
            quota.settle(num_reserved, num_used=flow.num_sampled)
            self.metrics.prompt_tokens += num_prompt
            self.metrics.completion_tokens += flow.num_sampled

    async def complete(self, requests: Sequence[Request], *, flow: Flow) -> list[Completion]:
        start_s = time.monotonic()
        parts = [part for request in requests for part in self._queue.parts(request)]
        by_part = await run_all(self._generate(flow, part) for part in parts)
        self.metrics.request_s.observe(time.monotonic() - start_s)
        completions = list(chain.from_iterable(by_part))
        for completion in completions:
            check_finish(completion.finish)
        return completions

    async def _generate(
        self, flow: Flow, part: Request, on_tokens: OnTokens | None = None
    ) -> list[Completion]:
        assert self.engine is not None, "checked by request()"
        async with self._queue.places(flow, part) as held:
            part = replace(part, priority=held.started.result(), flow=flow.number)
            if on_tokens is None:
                part = replace(part, coalesce=True)

            def receive(chunk: CompletionChunk) -> None:
                held.num_sampled += len(chunk.tokens)  # here, because its client may leave
                if on_tokens is not None:
                    on_tokens(chunk)

            completions = await self.engine.generate(part, receive)
            held.num_sampled = sum(len(completion.tokens) for completion in completions)
            return completions

    async def stream(
        self, requests: Sequence[Request], *, flow: Flow
    ) -> AsyncGenerator[tuple[int, CompletionChunk]]:
        """Yield chunks as they are sampled, with the number of their completion among all
        requests. Closing the generator ends the requests."""
        # The queue needs no bound, because max_new_tokens bounds the chunks.
        queue: asyncio.Queue[tuple[int, CompletionChunk] | None] = asyncio.Queue()

        async def run(first: int, part: Request) -> None:
            await self._generate(
                flow, part, lambda chunk: queue.put_nowait((first + chunk.member, chunk))
            )

        parts = [part for request in requests for part in self._queue.parts(request)]
        firsts = accumulate((part.n for part in parts), initial=0)
        running = asyncio.create_task(run_all(map(run, firsts, parts)))
        running.add_done_callback(lambda _: queue.put_nowait(None))
        has_tokens, start_s = False, time.monotonic()
        try:
            while (item := await queue.get()) is not None:
                if not has_tokens:
                    self.metrics.first_token_s.observe(time.monotonic() - start_s)
                has_tokens |= len(item[1].tokens) > 0
                check_finish(item[1].finish)
                yield item
            await running
        finally:
            self.metrics.request_s.observe(time.monotonic() - start_s)
            await cancel_all([running])

    async def score_prompts(
        self, requests: Sequence[Request], *, flow: Flow
    ) -> list[TokenLogprobs | None]:
        """The logprobs of the prompts' tokens at temperature 1, without the first one, and as many
        likeliest tokens as the requests report; None for a prompt of one token."""

        async def score(request: Request) -> TokenLogprobs | None:
            if request.adapter is not None:
                raise ApiError(
                    f"Prompts of adapter {request.adapter!r} cannot be scored; remove echo or"
                    " logprobs.",
                    param="echo",
                )
            if (size := len(request.prompt)) == 1:
                return None
            wanted = ScoreRequest(
                tokens=request.prompt,
                positions=np.arange(1, size, dtype=np.int32),
                top_k=request.sampling.top_logprobs,
            )
            assert self.engine is not None, "checked by request()"
            async with self._queue.places(flow, replace(request, n=1)):
                (scored,) = await self.engine.score([wanted])
            return scored

        return await run_all(score(request) for request in requests)

    async def read_token_texts(self, completions: Sequence[Completion], *, client: Client) -> None:
        """Decode what token_text() will return, in the thread: there may be very many tokens."""
        ids = [completion.tokens for completion in completions]
        ids += [each.top.ids.ravel() for each in completions if each.top is not None]

        def read() -> dict[int, str]:
            found = np.unique(np.concatenate(ids)).tolist()
            new = [id for id in found if id not in self._texts]
            return {id: self._renderer.decode(np.array([id])) for id in new}

        num_bytes = sum(each.nbytes for each in ids)
        self._texts |= await self.prepare(read, client=client, num_bytes=num_bytes)

    def token_text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self.decode([token])
        return self._texts[token]

    def decode(self, ids: list[int]) -> str:
        """Decode as engines do, with special tokens."""
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def close(self) -> None:
        for thread, _ in (self._small, self._large):
            thread.shutdown(wait=False, cancel_futures=True)


def num_tokens(requests: Sequence[Request]) -> tuple[int, int]:
    """The tokens of the prompts, and those that may be sampled."""
    num_prompt = sum(len(request.prompt) for request in requests)
    return num_prompt, sum(each.n * each.sampling.max_new_tokens for each in requests)


def check_finish(finish: FinishReason | None) -> None:
    """Raise ApiError if the engine ended a completion before it was complete."""
    if finish not in (None, "stop", "length"):
        raise ApiError(f"The engine ended the completion early ({finish}).", status=503)
