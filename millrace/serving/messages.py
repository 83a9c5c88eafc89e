"""Messages as clients send them -> as chat templates and agents take them, and back.

Promise: a reply that a client sends back in a later request becomes the message it was: fields
that say nothing are left out, arguments of tool calls are objects and not text. So an agent finds
the turn it has recorded.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.core.records import Message
from millrace.serving.errors import ApiError

ROLES = ("system", "user", "assistant", "tool")


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    return [_read(message, where=f"messages.{i}") for i, message in enumerate(messages)]


def write_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call of a message, as the API has it: its arguments are JSON text."""
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _read(message: Mapping[str, Any], *, where: str) -> Message:
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in ROLES:
        raise ApiError(
            f"Field '{where}.role' = {role!r} is none of {', '.join(ROLES)}.", param=where
        )
    calls = message.get("tool_calls") or []
    content = message.get("content")
    if content is None and not (role == "assistant" and calls):
        raise ApiError(f"Field '{where}.content' is missing.", param=where)
    read: Message = {"role": role, "content": _text(content, where=f"{where}.content")}
    if calls:
        read["tool_calls"] = _calls(calls, where=f"{where}.tool_calls")
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            read[key] = message[key]
    return read


def _text(content: Any, *, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and "text" in part):
            raise ApiError(f"Field '{where}' holds something that is not text.", param=where)
    return "".join(str(part["text"]) for part in parts)


def _calls(calls: Any, *, where: str) -> list[dict[str, Any]]:
    try:
        return [_call(call) for call in calls]
    except (TypeError, KeyError, ValueError) as error:
        raise ApiError(
            f"Field '{where}' holds a tool call that cannot be read: {error!r}; it needs a"
            " function with a name, and arguments that are a JSON object as text.",
            param=where,
        ) from None


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise TypeError(f"arguments = {arguments!r}")
    return {
        **({"id": call["id"]} if call.get("id") else {}),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
