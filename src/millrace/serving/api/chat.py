"""/v1/chat/completions: messages in, a message out, at once or streamed."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from millrace.core.records import Completion, CompletionChunk, Finish, Message, Request
from millrace.environments.tools.calls import Parsed, ToolCall
from millrace.serving.api.bodies import ChatBody
from millrace.serving.api.completions import ApiAnswer, Json
from millrace.serving.api.messages import read_messages, write_call
from millrace.serving.api.streaming import Decode, TextStream
from millrace.serving.served_model import ServedModel

CHUNK_KIND = "chat.completion.chunk"


class ChatAnswer(ApiAnswer[ChatBody]):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", CHUNK_KIND

    def __init__(self, served: ServedModel, body: ChatBody) -> None:
        super().__init__(served, body)
        self._started: set[int] = set()

    @property
    def openers(self) -> Sequence[str]:
        return self.served.tool_format.openers if self.body.offered_tools else ()

    async def requests(self) -> list[Request]:
        body, form = self.body, self.served.tool_format
        messages, tools = form.shown(read_messages(body.messages, form=form), body.offered_tools)
        prompt = await self.served.chat_prompt(
            messages, tools=tools, template_settings=body.chat_template_kwargs
        )
        grammar = body.grammar(form)
        limit = body.token_limit
        return [
            self.served.request(self.head["id"], prompt, body, max_tokens=limit, grammar=grammar)
        ]

    def choice(self, index: int, completion: Completion) -> Json:
        message, calls = self._parsed(completion.text)
        return chat_choice(
            index,
            content=message["content"],
            calls=calls,
            finish=completion.finish,
            logprobs=self._logprobs(completion),
        )

    def chunk_choices(
        self, index: int, chunk: CompletionChunk, new: str, stream: TextStream
    ) -> Iterator[Json]:
        if index not in self._started:
            self._started.add(index)
            yield chunk_choice(index, {"role": "assistant", "content": ""})
        if new or self.body.logprobs:
            yield chunk_choice(index, {"content": new}, logprobs=self._logprobs(chunk))
        if chunk.finish is None:
            return
        message, calls = self._parsed(stream.text)
        if stream.held and (rest := message["content"].removeprefix(stream.returned)):
            yield chunk_choice(index, {"content": rest})
        for number, call in enumerate(calls):
            yield chunk_choice(index, {"tool_calls": [{"index": number, **write_call(call)}]})
        yield chunk_choice(index, {}, finish_reason="tool_calls" if calls else chunk.finish)

    def _parsed(self, text: str) -> tuple[Message, Sequence[ToolCall]]:
        form, tools = self.served.tool_format, self.body.offered_tools
        parsed = form.parse(text, tools) if tools else Parsed(content=text)
        parsed = replace(parsed, calls=tuple(self.body.allowed_calls(parsed.calls)))
        return form.reply(text, parsed), parsed.calls

    def _logprobs(self, sampled: Completion | CompletionChunk) -> Json | None:
        if not self.body.logprobs:
            return None
        return logprob_rows(sampled.tokens, sampled.logprobs, decode=self.served.decode)


def chat_choice(
    index: int,
    *,
    content: str,
    calls: Sequence[ToolCall],
    finish: Finish,
    logprobs: Json | None,
) -> Json:
    message: Json = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["content"] = content or None
        message["tool_calls"] = [write_call(call) for call in calls]
    reason = "tool_calls" if calls else finish
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def chunk_choice(
    index: int, delta: Json, *, finish_reason: str | None = None, logprobs: Json | None = None
) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def logprob_rows(tokens: np.ndarray, logprobs: np.ndarray, *, decode: Decode) -> Json:
    """Return the logprobs of all sampled tokens, including the end token."""
    content: list[dict[str, Any]] = []
    for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True):
        text = decode([token])
        row = {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        content.append(row)
    return {"content": content, "refusal": None}
