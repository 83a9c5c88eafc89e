"""/v1/chat/completions: messages in, a message out, at once or streamed.

Promise: a reply that a client sends back in a later request becomes the same message again. Empty
fields are dropped, and tool calls are converted to the model's format, so an agent recognises the
turn it recorded.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from millrace.core.records import Completion, CompletionChunk, FinishReason, Message, Request
from millrace.environments.tools.calls import Parsed, ToolCall, ToolFormat
from millrace.serving.api.bodies import ChatBody
from millrace.serving.api.completions import ApiAnswer, Json, top_pairs
from millrace.serving.api.errors import ApiError
from millrace.serving.api.replies import encoded_row
from millrace.serving.api.streaming import TextStream
from millrace.serving.clients import Client
from millrace.serving.served_model import ServedModel

CHUNK_KIND = "chat.completion.chunk"
ROLES = ("system", "user", "assistant", "tool")


class ChatAnswer(ApiAnswer[ChatBody]):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", CHUNK_KIND

    def __init__(self, served: ServedModel, body: ChatBody, client: Client, num_bytes: int) -> None:
        super().__init__(served, body, client, num_bytes)
        self.openers = served.tool_format.openers if body.offered_tools else ()
        self._started: set[int] = set()

    def requests(self) -> Iterator[Request]:
        body, form = self.body, self.served.tool_format
        messages, tools = form.shown(read_messages(body.messages, form=form), body.offered_tools)
        yield self.served.request(
            self.head["id"],
            self.served.chat_prompt(
                messages, tools=tools, template_settings=body.chat_template_kwargs
            ),
            body,
            client=self.client,
            max_tokens=body.token_limit,
            grammar=body.grammar(form),
        )

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
        sent = stream.text.removesuffix(stream.held)
        # Content before a call is stripped: it may end before what was sent.
        if message["content"].startswith(sent) and message["content"] != sent:
            yield chunk_choice(index, {"content": message["content"].removeprefix(sent)})
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
        return logprob_rows(sampled, text=self.served.token_text)


def chat_choice(
    index: int,
    *,
    content: str,
    calls: Sequence[ToolCall],
    finish: FinishReason,
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


def logprob_rows(sampled: Completion | CompletionChunk, *, text: Callable[[int], str]) -> Json:
    """Return the logprobs of all sampled tokens, including the end token. `text` decodes one."""

    def row(token: int, logprob: float) -> Json:
        return {"token": text(token), "logprob": logprob, "bytes": list(text(token).encode())}

    pairs = zip(sampled.tokens.tolist(), sampled.logprobs.tolist(), strict=True)
    tops = top_pairs(sampled.top, num_tokens=len(sampled.tokens))
    content = (
        encoded_row({**row(*pair), "top_logprobs": [row(*each) for each in top]})
        for pair, top in zip(pairs, tops, strict=True)
    )
    return {"content": content, "refusal": None}


def read_messages(messages: Sequence[Mapping[str, Any]], *, form: ToolFormat) -> list[Message]:
    read: list[Message] = []
    calls: dict[str, ToolCall] = {}  # by id; tool results refer to them
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        role, content = _role(message, where=where), _content(message, where=where)
        if made := _calls(message, where=where):
            calls |= {call.id: call for call in made}
            read.append(form.reply(content, Parsed(content=content, calls=made)))
        elif role == "tool" and message.get("tool_call_id") in calls:
            read.append(form.result(calls[message["tool_call_id"]], content))
        else:
            named = {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}
            read.append({"role": role, "content": content, **named})
    return read


def write_call(call: ToolCall) -> dict[str, Any]:
    """Write a call in the API's format, with arguments as JSON text."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _role(message: Mapping[str, Any], *, where: str) -> str:
    role = message.get("role")
    if role == "developer":
        return "system"
    if role not in ROLES:
        raise ApiError(
            f"Field '{where}.role' = {role!r} is not one of {', '.join(ROLES)}.", param=where
        )
    return role


def _content(message: Mapping[str, Any], *, where: str) -> str:
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise ApiError(f"Field '{where}.content' is missing.", param=where)
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and "text" in part):
            raise ApiError(f"Field '{where}.content' is not text.", param=where)
    return "".join(str(part["text"]) for part in parts)


def _calls(message: Mapping[str, Any], *, where: str) -> tuple[ToolCall, ...]:
    calls: list[ToolCall] = []
    try:
        for call in message.get("tool_calls") or ():
            function = call["function"]
            arguments = function.get("arguments") or "{}"
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(arguments, dict):
                raise TypeError(f"arguments = {arguments!r}")
            name = str(function["name"])
            calls.append(ToolCall(id=str(call["id"]), name=name, arguments=arguments))
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
        raise ApiError(
            f"Field '{where}.tool_calls' contains an invalid call ({error!r}); a call needs an id"
            " and a function with a name and arguments, which are a JSON object as text.",
            param=where,
        ) from None
    return tuple(calls)
