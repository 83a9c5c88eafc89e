"""/v1/completions: text or tokens in, the following text out; and what it shares with
/v1/chat/completions."""

import asyncio
import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar
from uuid import uuid4

import numpy as np

from millrace.core.completions import cut, joined
from millrace.core.records import Completion, CompletionChunk, Request, TokenLogprobs, TopTokens
from millrace.serving.api.bodies import CompletionBody, OpenAIBody
from millrace.serving.api.errors import ApiError
from millrace.serving.api.replies import Row, encoded_row
from millrace.serving.api.streaming import TextStream
from millrace.serving.clients import Client
from millrace.serving.fair_queue import Flow
from millrace.serving.served_model import ServedModel, num_tokens

B = TypeVar("B", bound=OpenAIBody)
Json = dict[str, Any]
MAX_LOGPROBS = 2**22  # of one reply, which then has about 150 MB


class ApiAnswer(Generic[B]):
    """The answer to one request: whole, or streamed in chunks with the same head."""

    prefix: ClassVar[str]  # of ids
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    openers: Sequence[str] = ()  # of tool calls

    def __init__(self, served: ServedModel, body: B, client: Client, num_bytes: int) -> None:
        """`num_bytes`: of the request."""
        self.served = served
        self.body = body
        self.client = client
        self.num_bytes = num_bytes
        self.head = reply_head(self.prefix, body)

    def requests(self) -> Iterator[Request]:
        """Yield the prepared requests. Runs in a thread; see ServedModel.prepare()."""
        raise NotImplementedError

    def num_shown(self, request: Request) -> int:
        """The largest number of tokens of a choice."""
        return request.sampling.max_new_tokens

    def choice(self, index: int, completion: Completion) -> Json:
        raise NotImplementedError

    def chunk_choices(
        self, index: int, chunk: CompletionChunk, new: str, stream: TextStream
    ) -> Iterator[Json]:
        """Yield the choices of a chunk, each an event. `new` is the text that became certain."""
        raise NotImplementedError

    async def complete(
        self, requests: Sequence[Request], flow: Flow
    ) -> tuple[list[Completion], int]:
        """Return what the choices show, and the number of sampled tokens."""
        completions = await self.served.complete(requests, flow=flow)
        return completions, sum(len(each.tokens) for each in completions)

    async def whole(self) -> Json:
        requests = await self._prepared()
        with self.served.charged(requests, client=self.client) as flow:
            completions, num_sampled = await self.complete(requests, flow)
        usage = usage_of(num_tokens(requests)[0], num_sampled)
        if self.body.wants_logprobs:
            await self.served.read_token_texts(completions, client=self.client)
        # Not made before they are written: rows of logprobs take much more memory than arrays.
        choices = (self.choice(index, completion) for index, completion in enumerate(completions))
        return {**self.head, "object": self.kind, "choices": choices, "usage": usage}

    async def stream(self) -> AsyncGenerator[Json]:
        requests = await self._prepared()
        head = {**self.head, "object": self.chunk_kind}
        texts = [
            TextStream(self.served.decode, stop=request.sampling.stop, openers=self.openers)
            for request in requests
            for _ in range(request.n)
        ]
        num_sampled = 0
        with self.served.charged(requests, client=self.client) as flow:
            async with contextlib.aclosing(self.served.stream(requests, flow=flow)) as chunks:
                async for index, chunk in chunks:
                    num_sampled += len(chunk.tokens)
                    new = texts[index].add(chunk.tokens.tolist(), finish=chunk.finish)
                    for choice in self.chunk_choices(index, chunk, new, texts[index]):
                        yield {**head, "choices": [choice]}
        if self.body.wants_usage:
            usage = usage_of(num_tokens(requests)[0], num_sampled)
            yield {**head, "choices": [], "usage": usage}

    async def _prepared(self) -> list[Request]:
        """Other requests are prepared between two prompts of this one."""
        making, num_prompts = self.requests(), self.body.num_completions // self.body.num_choices
        requests = [
            await self.served.prepare(
                lambda: next(making),
                client=self.client,
                num_bytes=self.num_bytes,
                num_parts=num_prompts,
            )
            for _ in range(num_prompts)
        ]
        num_shown = sum(each.n * self.num_shown(each) for each in requests)
        num_logprobs = num_shown * (1 + self.body.num_top)
        if self.body.wants_logprobs and num_logprobs > MAX_LOGPROBS:
            raise ApiError(
                f"The reply may have {num_shown} tokens with {1 + self.body.num_top} logprobs"
                f" each, but at most {MAX_LOGPROBS} logprobs are sent; lower the maximum of tokens"
                " or the number of top logprobs, or send several requests.",
                param="logprobs",
            )
        return requests


class TextAnswer(ApiAnswer[CompletionBody]):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, served: ServedModel, body: CompletionBody, client: Client, num_bytes: int
    ) -> None:
        super().__init__(served, body, client, num_bytes)
        self._offsets: Counter[int] = Counter()  # of the next token in the text, by index
        self._echoed: list[str] = []  # prompts

    def requests(self) -> Iterator[Request]:
        body = self.body.model_copy(update={"seed": self.body.drawn_seed()})
        for number, prompt in enumerate(body.prompts):
            tokens = self.served.text_prompt(prompt)
            if body.echo:
                is_text = isinstance(prompt, str)
                self._echoed.append(prompt if is_text else self.served.prompt_text(tokens))
            yield self.served.request(
                f"{self.head['id']}-{number}",
                tokens,
                body,
                client=self.client,
                max_tokens=body.max_tokens if body.max_tokens is None else max(1, body.max_tokens),
                index=number * body.num_choices,
            )

    def num_shown(self, request: Request) -> int:
        return super().num_shown(request) + (len(request.prompt) if self.body.echo else 0)

    async def complete(
        self, requests: Sequence[Request], flow: Flow
    ) -> tuple[list[Completion], int]:
        completions, num_sampled = await super().complete(requests, flow)
        if self.body.max_tokens == 0:  # the engine has checked the prompt and sampled one token
            completions = [replace(cut(each, 0, 0), finish="length") for each in completions]
            num_sampled = 0
        if not self.body.echo:
            return completions, num_sampled
        scored: Sequence[TokenLogprobs | None] = [None] * len(requests)
        if self.body.wants_logprobs:
            scored = await self.served.score_prompts(requests, flow=flow)
        shown: list[Completion] = []
        for index, own in enumerate(completions):
            number = index // self.body.num_choices
            parts = [_prompt_part(requests[number], scored[number], like=own), own]
            text = self._echoed[number] + own.text
            shown.append(replace(joined(parts, truncates=False), finish=own.finish, text=text))
            await asyncio.sleep(0)  # many long prompts take time; other requests go on
        return shown, num_sampled

    def choice(self, index: int, completion: Completion) -> Json:
        return self._choice(index, completion, completion.text)

    def chunk_choices(
        self, index: int, chunk: CompletionChunk, new: str, stream: TextStream
    ) -> Iterator[Json]:
        wants_tokens = self.body.logprobs is not None or self.body.return_token_ids
        if new or wants_tokens or chunk.finish:
            yield self._choice(index, chunk, new)

    def _choice(self, index: int, sampled: Completion | CompletionChunk, text: str) -> Json:
        logprobs = None if self.body.logprobs is None else self._logprobs(index, sampled)
        choice = {"index": index, "text": text, "logprobs": logprobs}
        if self.body.return_token_ids:
            choice["token_ids"] = sampled.tokens.tolist()  # with echo, also of the prompt
            choice["versions"] = sampled.versions.tolist()
        return {**choice, "finish_reason": sampled.finish}

    def _logprobs(self, index: int, sampled: Completion | CompletionChunk) -> Json:
        tokens, logprobs = sampled.tokens.tolist(), sampled.logprobs.tolist()
        texts = [self.served.token_text(token) for token in tokens]
        *offsets, self._offsets[index] = itertools.accumulate(
            map(len, texts), initial=self._offsets[index]
        )
        tops = None
        if self.body.num_top:
            pairs = top_pairs(sampled.top, num_tokens=len(texts))
            tops = (
                None if math.isnan(logprob) else self._by_text([*top, (token, logprob)])
                for token, logprob, top in zip(tokens, logprobs, pairs, strict=True)
            )
        # NaN = the first token of an echoed prompt, which has no logprob; JSON has null for it.
        rows = {"tokens": texts, "token_logprobs": logprobs}
        return {**rows, "text_offset": offsets, "top_logprobs": tops}

    def _by_text(self, pairs: Sequence[tuple[int, float]]) -> Row:
        """The logprob of each text; of several tokens with the same text, the likeliest counts."""
        ascending = sorted(pairs, key=lambda pair: pair[1])
        return encoded_row({self.served.token_text(token): chance for token, chance in ascending})


def _prompt_part(request: Request, scored: TokenLogprobs | None, *, like: Completion) -> Completion:
    """A prompt with its logprobs, if there are any, as the beginning of a completion."""
    size, num_top = len(request.prompt), 0 if like.top is None else like.top.ids.shape[1]
    logprobs = np.full(size, np.nan, np.float32)
    ids, tops = np.zeros((size, num_top), np.int32), np.full((size, num_top), -np.inf, np.float32)
    if scored is not None:
        logprobs[1:], ids[1:], tops[1:] = scored.logprobs, scored.top_ids, scored.top_logprobs
    return Completion(
        tokens=request.prompt,
        logprobs=logprobs,
        versions=np.full(size, -1, np.int32),
        top=None if like.top is None else TopTokens(ids=ids, logprobs=tops),
        finish="interrupt",
        text="",
    )


def top_pairs(top: TopTokens | None, *, num_tokens: int) -> Iterator[list[tuple[int, float]]]:
    """The likeliest tokens at each position and their logprobs, without impossible ones."""
    if top is None:
        yield from ([] for _ in range(num_tokens))
        return
    for ids, logprobs in zip(top.ids, top.logprobs, strict=True):
        pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
        yield [(id, logprob) for id, logprob in pairs if logprob > -math.inf]


def reply_head(prefix: str, body: OpenAIBody) -> Json:
    id = f"{prefix}-{uuid4().hex}"
    return {"id": id, "created": int(time.time()), "model": body.model}


def usage_of(num_prompt: int, num_sampled: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }
