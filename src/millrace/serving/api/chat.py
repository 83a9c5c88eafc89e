"""/v1/chat/completions: messages in, a message out, at once or streamed."""

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import numpy as np

from millrace.core.records import Finish, Message, Request
from millrace.environments.tools.calls import Parsed, ToolCall
from millrace.serving.api.bodies import ChatBody
from millrace.serving.api.messages import read_messages, write_call
from millrace.serving.api.streaming import Decode, TextStream
from millrace.serving.served_model import ServedModel, usage_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatReply:
    """The envelope of the replies to one request: its id and time are in every chunk."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def choice(
        self,
        index: int,
        *,
        content: str,
        calls: Sequence[ToolCall] = (),
        finish: Finish,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [write_call(call) for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": "tool_calls" if calls else finish,
        }

    def chunk(
        self,
        index: int,
        *,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs}
        choice["finish_reason"] = finish_reason
        return {**self.head("chat.completion.chunk"), "choices": [choice]}

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


async def chat_request(served: ServedModel, body: ChatBody, *, id: str) -> Request:
    form = served.tool_format
    messages, tools = form.shown(read_messages(body.messages, form=form), body.offered_tools)
    prompt = await served.chat_prompt(
        messages, tools=tools, template_settings=body.chat_template_kwargs
    )
    return served.request(
        id,
        prompt,
        body,
        max_tokens=body.token_limit,
        model=body.model,
        session=body.prompt_cache_key if isinstance(body.prompt_cache_key, str) else None,
        grammar=body.grammar(form),
    )


async def answer_chat(served: ServedModel, body: ChatBody) -> dict[str, Any]:
    reply = ChatReply(model=body.model)
    request = await chat_request(served, body, id=reply.id)
    completions = await served.complete([request])
    choices: list[dict[str, Any]] = []
    for index, completion in enumerate(completions):
        message, calls = _parsed(served, body, completion.text)
        logprobs = logprob_rows(completion.tokens, completion.logprobs, decode=served.decode)
        choices.append(
            reply.choice(
                index,
                content=message["content"],
                calls=calls,
                finish=completion.finish,
                logprobs=logprobs if body.logprobs else None,
            )
        )
    num_sampled = sum(len(completion.tokens) for completion in completions)
    usage = usage_of([request], num_sampled)
    return {**reply.head("chat.completion"), "choices": choices, "usage": usage}


async def stream_chat(served: ServedModel, body: ChatBody) -> AsyncGenerator[dict[str, Any]]:
    reply = ChatReply(model=body.model)
    request = await chat_request(served, body, id=reply.id)
    openers = served.tool_format.openers if body.offered_tools else ()
    texts = [served.text_stream(request, openers=openers) for _ in range(request.n)]
    started: set[int] = set()
    num_sampled = 0
    async with contextlib.aclosing(served.stream([request])) as chunks:
        async for index, chunk in chunks:
            num_sampled += len(chunk.tokens)
            if index not in started:
                started.add(index)
                yield reply.chunk(index, delta={"role": "assistant", "content": ""})
            text = texts[index].add(chunk.tokens.tolist(), finish=chunk.finish)
            if text or body.logprobs:
                logprobs = logprob_rows(chunk.tokens, chunk.logprobs, decode=served.decode)
                yield reply.chunk(
                    index, delta={"content": text}, logprobs=logprobs if body.logprobs else None
                )
            if chunk.finish is not None:
                for last in _last_chunks(served, body, reply, index, texts[index], chunk.finish):
                    yield last
    if body.wants_usage:
        usage = usage_of([request], num_sampled)
        yield {**reply.head("chat.completion.chunk"), "choices": [], "usage": usage}


def _last_chunks(
    served: ServedModel,
    body: ChatBody,
    reply: ChatReply,
    index: int,
    text: TextStream,
    finish: Finish,
) -> list[dict[str, Any]]:
    """Return the held-back text as tool calls or content, and the final chunk."""
    message, calls = _parsed(served, body, text.text)
    chunks: list[dict[str, Any]] = []
    if rest := message["content"].removeprefix(text.returned) if text.held else "":
        chunks.append(reply.chunk(index, delta={"content": rest}))
    for number, call in enumerate(calls):
        delta = {"tool_calls": [{"index": number, **write_call(call)}]}
        chunks.append(reply.chunk(index, delta=delta))
    reason = "tool_calls" if calls else finish
    return [*chunks, reply.chunk(index, delta={}, finish_reason=reason)]


def _parsed(served: ServedModel, body: ChatBody, text: str) -> tuple[Message, Sequence[ToolCall]]:
    parsed = Parsed(content=text)
    if body.offered_tools:
        parsed = served.tool_format.parse(text, body.offered_tools)
        parsed = replace(parsed, calls=tuple(body.allowed_calls(parsed.calls)))
    return served.tool_format.reply(text, parsed), parsed.calls


def logprob_rows(tokens: np.ndarray, logprobs: np.ndarray, *, decode: Decode) -> dict[str, Any]:
    """Return the logprobs of all sampled tokens, including the end token."""
    content: list[dict[str, Any]] = []
    for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True):
        text = decode([token])
        row = {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        content.append(row)
    return {"content": content, "refusal": None}
