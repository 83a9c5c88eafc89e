"""Converts messages of the API to those of chat templates and agents, and back.

Promise: a reply that a client sends back in a later request becomes the same message again. Empty
fields are dropped, and tool calls are converted to the model's format, so an agent recognises the
turn it recorded.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.core.records import Message
from millrace.environments.tools.calls import Parsed, ToolCall, ToolFormat
from millrace.serving.api.errors import ApiError

ROLES = ("system", "user", "assistant", "tool")


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
    try:
        return tuple(_call(call) for call in message.get("tool_calls") or ())
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ApiError(
            f"Field '{where}.tool_calls' contains an invalid call ({error!r}); a call needs an id"
            " and a function with a name and arguments, which are a JSON object as text.",
            param=where,
        ) from None


def _call(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        raise TypeError(f"arguments = {arguments!r}")
    return ToolCall(id=str(call["id"]), name=str(function["name"]), arguments=arguments)
