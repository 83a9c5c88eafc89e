"""/v1/completions: text or tokens in, the following text out. /generate: tokens in and out, each
with its logprob and the version that sampled it. Both reply at once or as a stream."""

import contextlib
import itertools
import time
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

import numpy as np

from millrace.core.records import Completion, CompletionChunk, Request
from millrace.serving.api.bodies import CompletionBody, GenerateBody
from millrace.serving.api.streaming import Decode
from millrace.serving.served_model import ServedModel, usage_of


async def answer_completion(served: ServedModel, body: CompletionBody) -> dict[str, Any]:
    head = _head(body)
    requests = await _completion_requests(served, body, id=head["id"])
    completions = await served.complete(requests)
    choices: list[dict[str, Any]] = []
    for index, completion in enumerate(completions):
        logprobs = None
        if body.logprobs is not None:
            logprobs = _logprobs(completion.tokens, completion.logprobs, decode=served.decode)
        choices.append(_choice(index, completion.text, finish=completion.finish, logprobs=logprobs))
    num_sampled = sum(len(completion.tokens) for completion in completions)
    return {**head, "choices": choices, "usage": usage_of(requests, num_sampled)}


async def stream_completion(
    served: ServedModel, body: CompletionBody
) -> AsyncGenerator[dict[str, Any]]:
    head = _head(body)
    requests = await _completion_requests(served, body, id=head["id"])
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
        yield {**head, "choices": [], "usage": usage_of(requests, num_sampled)}


async def _completion_requests(
    served: ServedModel, body: CompletionBody, *, id: str
) -> list[Request]:
    seeded = body.model_copy(update={"seed": body.drawn_seed()})
    requests: list[Request] = []
    for number, prompt in enumerate(body.prompts):
        is_text = isinstance(prompt, str)
        tokens = await served.text_prompt(prompt) if is_text else np.asarray(prompt, np.int32)
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


async def answer_generate(served: ServedModel, body: GenerateBody) -> dict[str, Any]:
    request = _generate_request(served, body)
    completions = await served.complete([request])
    rows = [{**_tokens(each), "finish": each.finish, "text": each.text} for each in completions]
    return {"id": request.id, "seed": request.seed, "completions": rows}


async def stream_generate(
    served: ServedModel, body: GenerateBody
) -> AsyncGenerator[dict[str, Any]]:
    request = _generate_request(served, body)
    async with contextlib.aclosing(served.stream([request])) as chunks:
        async for index, chunk in chunks:
            yield {"id": request.id, "index": index, **_tokens(chunk), "finish": chunk.finish}


def _generate_request(served: ServedModel, body: GenerateBody) -> Request:
    return served.request(
        f"gen-{uuid4().hex}",
        np.asarray(body.prompt, np.int32),
        body,
        max_tokens=body.max_new_tokens,
        model=body.model,
        session=body.session,
    )


def _tokens(sampled: Completion | CompletionChunk) -> dict[str, Any]:
    return {
        "tokens": sampled.tokens.tolist(),
        "logprobs": sampled.logprobs.tolist(),
        "versions": sampled.versions.tolist(),
    }
