"""Python functions as tools: their schemas for the model, and how its calls are run. Type hints and
the docstring of a function define its schema and the check of the arguments.

Promise: the model always gets text, either the result or an error. A sync tool runs in a thread of
its own, so a tool that hangs delays only its own call. An async tool runs on the loop of the
environments.
"""

import asyncio
import contextvars
import inspect
import json
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from millrace.core.errors import TaskError
from millrace.environments.threads import complete_future, is_cancelled
from millrace.scoring.functions.user_function import is_async

Fault = Literal["tool_errors", "tool_timeouts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema of its arguments
    call: Callable[..., Any] = field(repr=False)  # takes checked arguments by name
    check: Callable[[Mapping[str, Any]], dict[str, Any]] = field(repr=False)
    """Returns the arguments for `call`; raises ValidationError."""

    @property
    def schema(self) -> dict[str, Any]:
        """The schema in the format of chat templates and the OpenAI API."""
        function = {"name": self.name, "description": self.description}
        return {"type": "function", "function": {**function, "parameters": self.parameters}}


class ToolError(Exception):
    """A tool's failure; the model sees its text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    text: str
    fault: Fault | None = None


def tools_of(given: Sequence[Tool | Callable[..., Any]]) -> dict[str, Tool]:
    """Return tools by name, and convert functions to tools."""
    tools: dict[str, Tool] = {}
    for each in given:
        tool = each if isinstance(each, Tool) else tool_of(each)
        if tools.setdefault(tool.name, tool) is not tool:
            raise TaskError(f"Two tools are named {tool.name!r}; give each a name of its own.")
    return tools


def tool_of(function: Callable[..., Any]) -> Tool:
    """Convert a function to a tool; raises TaskError if its signature has no full type hints."""
    if not callable(function):
        raise TaskError(f"{function!r} is not a tool; pass a function.")
    name = getattr(function, "__name__", type(function).__name__)
    model = _arguments_model(function, name=name)
    summary, described = _parse_docstring(inspect.getdoc(function) or "")
    parameters = _untitled(model.model_json_schema())
    for argument, schema in parameters.get("properties", {}).items():
        if argument in described:
            schema.setdefault("description", described[argument])

    def check(arguments: Mapping[str, Any]) -> dict[str, Any]:
        checked = model.model_validate(dict(arguments))
        return {key: getattr(checked, key) for key in checked.model_fields_set}

    return Tool(name=name, description=summary, parameters=parameters, call=function, check=check)


async def run_tool(
    tool: Tool, arguments: Mapping[str, Any], *, timeout_s: float, max_chars: int
) -> ToolResult:
    """Run a call, and return the text for the model."""
    try:
        checked = tool.check(arguments)
    except ValidationError as error:
        return ToolResult(text=f"Error: {_first_error(error)}", fault="tool_errors")
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            result = await _result(tool.call, checked)
        return ToolResult(text=_cut(_as_text(result), max_chars=max_chars))
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise
        if limit.expired():
            text = f"Error: {tool.name} took longer than {timeout_s:g} s and was given up."
            return ToolResult(text=text, fault="tool_timeouts")
        kind = "" if isinstance(error, ToolError) else f"{type(error).__name__}: "
        text = _cut(f"Error: {kind}{error}", max_chars=max_chars)
        return ToolResult(text=text, fault="tool_errors")


async def _result(call: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    if is_async(call):
        return await call(**arguments)
    # Not in a pool: a few calls that hang would fill it, and keep the process from ending.
    future: Future[Any] = Future()
    job = partial(contextvars.copy_context().run, call, **arguments)
    name = f"tool {call!r:.40}"
    threading.Thread(target=complete_future, args=(future, job), name=name, daemon=True).start()
    result = await asyncio.wrap_future(future)
    return await result if isinstance(result, Awaitable) else result


def _arguments_model(function: Callable[..., Any], *, name: str) -> type[BaseModel]:
    try:
        signature = inspect.signature(function, eval_str=True)
    except (NameError, TypeError, ValueError) as error:
        raise TaskError(f"Tool {name!r}: its signature cannot be read ({error}).") from error
    fields: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TaskError(
                f"Tool {name!r} takes {parameter}; a model passes arguments by name only."
            )
        if parameter.annotation is parameter.empty:
            raise TaskError(f"Tool {name!r}: {parameter.name!r} has no type hint; add one.")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (parameter.annotation, default)
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except (PydanticSchemaGenerationError, PydanticUserError, NameError) as error:
        raise TaskError(f"Tool {name!r}: a type hint has no JSON schema ({error}).") from error


def _parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the summary, and the descriptions of arguments in an Args: section."""
    summary, _, rest = text.partition("\nArgs:")
    described: dict[str, str] = {}
    last = None
    for line in rest.splitlines():
        if re.match(r"\S", line):
            break  # another section
        if found := re.match(r"\s+(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line):
            last, described[found[1]] = found[1], found[2]
        elif last is not None and line.strip():
            described[last] = f"{described[last]} {line.strip()}"
    return summary.strip(), described


def _untitled(schema: Any) -> Any:
    """Remove the titles that pydantic adds, which are useless to a model."""
    if isinstance(schema, list):
        return [_untitled(row) for row in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _untitled(row) for name, row in value.items()}
        if key in ("properties", "$defs")
        else _untitled(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
        and not (key == "additionalProperties" and value is False)
    }


def _first_error(error: ValidationError) -> str:
    detail = error.errors()[0]
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"there is no argument {where!r}."
    if detail["type"] == "missing":
        return f"the argument {where!r} is missing."
    return f"the argument {where!r} does not fit: {detail['msg']}."


def _as_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    if result is None:
        return "Done."
    return json.dumps(result, ensure_ascii=False, default=str)


def _cut(text: str, *, max_chars: int) -> str:
    """Return at most `max_chars` of a text, as text that every tokenizer takes: file names and
    parsed JSON may have surrogates."""
    kept = text[:max_chars].encode(errors="replace").decode()
    if len(text) <= max_chars:
        return kept
    return f"{kept}\n[cut: the first {max_chars} of {len(text)} characters]"
