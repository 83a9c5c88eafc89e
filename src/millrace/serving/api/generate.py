"""/generate: tokens in, tokens out, each with its logprob and the version that sampled it."""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

import numpy as np

from millrace.core.records import Completion, CompletionChunk, Request
from millrace.serving.api.bodies import GenerateBody
from millrace.serving.served_model import ServedModel


def generate_request(served: ServedModel, body: GenerateBody) -> Request:
    return served.request(
        f"gen-{uuid4().hex}",
        np.asarray(body.prompt, np.int32),
        body,
        max_tokens=body.max_new_tokens,
        model=body.model,
        session=body.session,
    )


async def answer_generate(served: ServedModel, body: GenerateBody) -> dict[str, Any]:
    request = generate_request(served, body)
    completions = await served.complete([request])
    rows = [{**_tokens(each), "finish": each.finish, "text": each.text} for each in completions]
    return {"id": request.id, "seed": request.seed, "completions": rows}


async def stream_generate(
    served: ServedModel, body: GenerateBody
) -> AsyncGenerator[dict[str, Any]]:
    request = generate_request(served, body)
    async with contextlib.aclosing(served.stream([request])) as chunks:
        async for index, chunk in chunks:
            yield {"id": request.id, "index": index, **_tokens(chunk), "finish": chunk.finish}


def _tokens(sampled: Completion | CompletionChunk) -> dict[str, Any]:
    return {
        "tokens": sampled.tokens.tolist(),
        "logprobs": sampled.logprobs.tolist(),
        "versions": sampled.versions.tolist(),
    }
