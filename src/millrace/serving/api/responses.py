"""/v1/responses: a translation to a request of /v1/chat/completions, and of its reply back.

The server stores nothing: a client sends the whole conversation as `input` in each request.

Promise: items of a reply that a client sends back become the same assistant message again, with its
text and all its calls. Events have the order of the OpenAI API, and the last one has the whole
response.
"""

import contextlib
import itertools
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import AfterValidator, Field, PrivateAttr

from millrace.core.errors import MillraceError
from millrace.serving.api import bodies, reading
from millrace.serving.api.errors import ApiError, as_api_error
from millrace.serving.api.replies import Row

Json = dict[str, Any]
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
_LOGPROBS = "message.output_text.logprobs"
_STATEFUL = ("store", "previous_response_id", "conversation", "prompt")
_SAME_IN_CHAT = ("model", "stream", "temperature", "top_p", "top_logprobs", "prompt_cache_key")
_TEXT_PARTS = ("input_text", "output_text", "text")


def _check_tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise ValueError("only tools of type 'function' are supported; the server runs none itself")
    bodies.check_function(_chat_tool(tool))
    return tool


def _check_format(format: Json) -> Json:
    match format:
        case {"type": "text" | "json_object"} | {"type": "json_schema", "schema": dict()}:
            return format
        case _:
            raise ValueError("its type is 'text', 'json_object', or 'json_schema' with a schema")


FlatTool = Annotated[Json, AfterValidator(_check_tool)]


class TextSettings(bodies.Body):
    format: Annotated[Json, AfterValidator(_check_format)] | None = None
    verbosity: Literal["medium"] | None = None


class FlatNamedTool(bodies.Body):
    type: Literal["function"]
    name: bodies.Text


class ResponsesBody(bodies.GenerationBody):
    """The body of /v1/responses."""

    input: (
        bodies.Text
        | Annotated[list[Json], Field(min_length=1, max_length=bodies.MAX_MESSAGES, fail_fast=True)]
    )
    instructions: str | None = None
    max_output_tokens: bodies.Count | None = None
    tools: Annotated[list[FlatTool], Field(max_length=bodies.MAX_TOOLS, fail_fast=True)] | None = (
        None
    )
    tool_choice: Literal["auto", "none", "required"] | FlatNamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    # The model writes no items of reasoning, so there is no encrypted content to include.
    include: Annotated[list[Included], Field(max_length=16, fail_fast=True)] | None = None
    top_logprobs: bodies.NumTop | None = None
    reasoning: Annotated[Json, Field(max_length=0)] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    prompt_cache_retention: Any = None
    _chat: bodies.ChatBody = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Translate here, because a large body is read in a thread."""
        for name in _STATEFUL:
            if getattr(self, name):
                raise ApiError(
                    f"Field {name!r}: this server stores no responses; remove it, and send the"
                    " whole conversation as input.",
                    param=name,
                )
        wants_logprobs = _LOGPROBS in (self.include or ())
        if self.top_logprobs and not wants_logprobs:
            raise ApiError(f"top_logprobs need include = [{_LOGPROBS!r}].", param="top_logprobs")
        form = (self.text and self.text.format) or None
        choice = self.tool_choice
        if isinstance(choice, FlatNamedTool):
            choice = {"type": "function", "function": {"name": choice.name}}
        table = {name: getattr(self, name) for name in _SAME_IN_CHAT} | {
            "messages": list(self._messages()),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": form and _chat_format(form),
            "logprobs": wants_logprobs,
            "stream_options": {"include_usage": True} if self.stream else None,
        }
        self._chat = reading.validate_body(bodies.ChatBody, table)

    @property
    def chat(self) -> bodies.ChatBody:
        """The same request to /v1/chat/completions."""
        return self._chat

    def _messages(self) -> Iterator[Json]:
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        last: Json = {}  # yielded once no call can follow
        for index, item in enumerate(self.input):
            message = _message(item, where=f"input.{index}")
            if "tool_calls" in message and last.get("role") == "assistant":
                last.setdefault("tool_calls", []).extend(message["tool_calls"])
                continue
            if last:
                yield last
            last = message
        yield last


def _message(item: Mapping[str, Any], *, where: str) -> Json:
    match item:
        case {"type": "function_call", "call_id": str(id), "name": str(name), "arguments": str(a)}:
            call = {"id": id, "type": "function", "function": {"name": name, "arguments": a}}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        case {"type": "function_call_output", "call_id": str(id), "output": output}:
            return {"role": "tool", "tool_call_id": id, "content": _text(output, where=where)}
        case {"role": str(role), "content": content} if item.get("type", "message") == "message":
            return {"role": role, "content": _text(content, where=where)}
        case _:
            raise ApiError(
                f"Field {where!r} is no message, function_call or function_call_output with all"
                " their fields; other items are not supported.",
                param=where,
            )


def _text(content: Any, *, where: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        match part:
            case {"type": str(kind), "text": str(text)} if kind in _TEXT_PARTS:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case _:
                raise ApiError(f"Field {where!r} has content that is not text.", param=where)
    return "".join(texts)


def _chat_tool(tool: Mapping[str, Any]) -> Json:
    names = ("name", "description", "parameters")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _chat_format(format: Mapping[str, Any]) -> Json:
    if format["type"] != "json_schema":
        return {"type": format["type"]}
    named = {key: format[key] for key in format if key != "type"}
    return {"type": "json_schema", "json_schema": named}


class ResponseWriter:
    """Translates one chat reply, whole or streamed."""

    def __init__(self, body: ResponsesBody) -> None:
        self._body = body
        self._id = f"resp_{uuid4().hex}"
        self._num_events = itertools.count()
        self._output: list[Json] = []  # finished items
        self._open: Json | None = None  # message whose text is being streamed
        self._finish: str | None = None
        self._usage: Json | None = None
        self._created: int = 0

    def whole(self, chat: Json) -> Json:
        """Return the response for a reply of /v1/chat/completions."""
        (choice,) = chat["choices"]
        self._created, self._usage = chat["created"], chat["usage"]
        self._finish, message = choice["finish_reason"], choice["message"]
        calls = message.get("tool_calls", ())
        if message["content"] or not calls:
            item = _message_item(message["content"] or "", _rows(choice), status=self._status)
            self._output.append(item)
        self._output += [_call_item(call) for call in calls]
        return self._response(self._status)

    async def events(self, chunks: AsyncGenerator[Json]) -> AsyncGenerator[Json]:
        """Yield the events for the chunks of /v1/chat/completions. An error before the first chunk
        is raised, a later one is an event."""
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    if not self._created:
                        self._created = chunk["created"]
                        for kind in ("created", "in_progress"):
                            yield self._event(kind, response=self._response("in_progress"))
                    self._usage = chunk.get("usage", self._usage)
                    for choice in chunk["choices"]:
                        for event in self._choice_events(choice):
                            yield event
        except MillraceError as error:
            if not self._created:
                raise
            failure = {"code": "server_error", "message": str(as_api_error(error))}
            response = {**self._response("failed"), "error": failure}
            yield self._event("failed", response=response)
            return
        for event in self._text_events("") if not self._output and self._open is None else ():
            yield event  # a reply without text and calls has an empty message
        for event in self._close_text():
            yield event
        yield self._event(self._status, response=self._response(self._status))

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _response(self, status: str) -> Json:
        body, is_cut = self._body, status == "incomplete"
        choice = body.tool_choice or "auto"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata if isinstance(body.metadata, dict) else {},
            "model": body.model,
            "output": list(self._output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [{"strict": None, "parameters": None, **tool} for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": self._usage and _usage(self._usage),
        }

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": f"response.{kind}", "sequence_number": next(self._num_events), **fields}

    def _choice_events(self, choice: Json) -> Iterator[Json]:
        delta = choice["delta"]
        rows = list(_rows(choice))
        if delta.get("content") or rows:
            yield from self._text_events(delta.get("content") or "", rows)
        for call in delta.get("tool_calls", ()):
            yield from self._close_text()
            yield from self._call_events(call)
        self._finish = choice["finish_reason"] or self._finish

    def _text_events(self, delta: str, rows: Sequence[Row] = ()) -> Iterator[Json]:
        if self._open is None:
            self._open = _message_item("", [], status="in_progress")
            added = {**self._open, "content": []}
            yield self._event("output_item.added", output_index=len(self._output), item=added)
            (part,) = self._open["content"]
            yield self._event("content_part.added", **self._place, part=dict(part))
        (part,) = self._open["content"]
        part["text"] += delta
        part["logprobs"] += rows
        if delta or rows:
            yield self._event("output_text.delta", **self._place, delta=delta, logprobs=list(rows))

    @property
    def _place(self) -> Json:
        assert self._open is not None
        index = len(self._output)
        return {"item_id": self._open["id"], "output_index": index, "content_index": 0}

    def _close_text(self) -> Iterator[Json]:
        if self._open is None:
            return
        (part,) = self._open["content"]
        text, rows = part["text"], part["logprobs"]
        yield self._event("output_text.done", **self._place, text=text, logprobs=rows)
        yield self._event("content_part.done", **self._place, part=part)
        item, self._open = {**self._open, "status": self._status}, None
        yield self._event("output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)

    def _call_events(self, call: Json) -> Iterator[Json]:
        item = _call_item(call)
        place = {"item_id": item["id"], "output_index": len(self._output)}
        started = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("output_item.added", output_index=place["output_index"], item=started)
        arguments, name = item["arguments"], item["name"]
        yield self._event("function_call_arguments.delta", **place, delta=arguments)
        yield self._event("function_call_arguments.done", **place, name=name, arguments=arguments)
        yield self._event("output_item.done", output_index=place["output_index"], item=item)
        self._output.append(item)


def _rows(choice: Json) -> Iterable[Row]:
    return choice["logprobs"]["content"] if choice["logprobs"] else []


def _message_item(text: str, rows: Iterable[Row], *, status: str) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": rows}
    head = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant"}
    return {**head, "status": status, "content": [part]}


def _call_item(call: Json) -> Json:
    head = {"id": f"fc_{uuid4().hex}", "type": "function_call", "status": "completed"}
    return {**head, "call_id": call["id"], **call["function"]}


def _usage(chat: Json) -> Json:
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},  # not counted
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": chat["total_tokens"],
    }
