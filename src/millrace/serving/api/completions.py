"""/v1/completions: text or tokens in, the following text out, at once or streamed."""

import contextlib
import itertools
import time
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

import numpy as np

from millrace.core.records import Request
from millrace.serving.api.bodies import CompletionBody
from millrace.serving.api.streaming import Decode
from millrace.serving.served_model import ServedModel, usage_of


async def completion_requests(
    served: ServedModel, body: CompletionBody, *, id: str
) -> list[Request]:
    """Build one engine request per prompt."""
    seeded = body.model_copy(update={"seed": body.drawn_seed()})
    requests: list[Request] = []
    for number, prompt in enumerate(body.prompts):
        if isinstance(prompt, str):
            tokens = await served.text_prompt(prompt)
        else:
            tokens = np.asarray(prompt, np.int32)
        requests.append(
            served.request(
                f"{id}-{number}",
                tokens,
                seeded,
                max_tokens=body.max_tokens,
                model=body.model,
                index=number * body.num_choices,
            )
        )
    return requests


async def answer_completion(served: ServedModel, body: CompletionBody) -> dict[str, Any]:
    head = _head(body)
    requests = await completion_requests(served, body, id=head["id"])
    completions = await served.complete(requests)
    choices: list[dict[str, Any]] = []
    for index, completion in enumerate(completions):
        logprobs = None
        if body.logprobs is not None:
            logprobs = _logprobs(completion.tokens, completion.logprobs, decode=served.decode)
        choices.append(_choice(index, completion.text, finish=completion.finish, logprobs=logprobs))
    num_sampled = sum(len(completion.tokens) for completion in completions)
    return {**head, "choices": choices, "usage": usage_of(requests, num_sampled).body()}


async def stream_completion(
    served: ServedModel, body: CompletionBody
) -> AsyncGenerator[dict[str, Any]]:
    head = _head(body)
    requests = await completion_requests(served, body, id=head["id"])
    texts = [served.text_stream(request) for request in requests for _ in range(request.n)]
    offsets = [0] * len(texts)  # of the next token in the decoded text of each completion
    num_sampled = 0
    async with contextlib.aclosing(served.stream(requests)) as chunks:
        async for index, chunk in chunks:
            num_sampled += len(chunk.tokens)
            text = texts[index].add(chunk.tokens.tolist(), finish=chunk.finish)
            logprobs = None
            if body.logprobs is not None:
                logprobs = _logprobs(
                    chunk.tokens, chunk.logprobs, decode=served.decode, offset=offsets[index]
                )
                offsets[index] += sum(map(len, logprobs["tokens"]))
            if text or logprobs or chunk.finish:
                choice = _choice(index, text, finish=chunk.finish, logprobs=logprobs)
                yield {**head, "choices": [choice]}
    if body.wants_usage:
        yield {**head, "choices": [], "usage": usage_of(requests, num_sampled).body()}


def _head(body: CompletionBody) -> dict[str, Any]:
    return {
        "id": f"cmpl-{uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model,
    }


def _choice(
    index: int, text: str, *, finish: str | None, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _logprobs(
    tokens: np.ndarray, logprobs: np.ndarray, *, decode: Decode, offset: int = 0
) -> dict[str, Any]:
    """Return the logprobs of all sampled tokens, including the end token."""
    texts = [decode([token]) for token in tokens.tolist()]
    offsets = itertools.accumulate(map(len, texts[:-1]), initial=offset)
    return {
        "tokens": texts,
        "token_logprobs": logprobs.tolist(),
        "text_offset": list(offsets) if texts else [],
        "top_logprobs": None,
    }
