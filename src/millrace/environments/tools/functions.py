"""Python functions as tools: what a model is told about them, and how its calls are run.

A tool is a function, sync or async, with type hints and a docstring. Its schema comes from these;
so does the check of what a model passes.

Promise: whatever a tool does, the model gets text: the result, or what went wrong. A sync tool runs
in a thread of its own, so one that hangs costs the call its time and no other call anything. An
async one runs on the loop of the environments.
"""

import asyncio
import contextvars
import inspect
import json
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from millrace.core.errors import TaskError

Fault = Literal["tool_errors", "tool_timeouts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema of its arguments
    call: Callable[..., Any] = field(repr=False)  # with checked arguments, by name
    check: Callable[[Mapping[str, Any]], dict[str, Any]] = field(repr=False)
    """The arguments to call it with; raises ValidationError."""

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates and the OpenAI API want it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}


class ToolError(Exception):
    """What a tool tells the model when it fails, in the words it is told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    text: str
    fault: Fault | None = None


def tools_of(given: Sequence[Tool | Callable[..., Any]]) -> dict[str, Tool]:
    """By name; functions are made tools."""
    tools = [tool if isinstance(tool, Tool) else tool_of(tool) for tool in given]
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise TaskError(f"Two tools are named {name!r}; give each a name of its own.")
    return dict(zip(names, tools, strict=True))


def tool_of(function: Callable[..., Any]) -> Tool:
    """A function as a tool; raises TaskError if its signature does not tell what it takes."""
    if not callable(function):
        raise TaskError(f"{function!r} is no tool; give a function.")
    name = getattr(function, "__name__", type(function).__name__)
    model = _arguments_model(function, name=name)
    summary, described = _documented(inspect.getdoc(function) or "")
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
    """What the model is told of a call."""
    try:
        checked = tool.check(arguments)
    except ValidationError as error:
        return ToolResult(text=f"Error: {_first_of(error)}", fault="tool_errors")
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            result = await _result(tool.call, checked)
        return ToolResult(text=_cut(_as_text(result), max_chars=max_chars))
    except Exception as error:  # noqa: BLE001 - the user's own code may raise anything
        if limit.expired():
            text = f"Error: {tool.name} took longer than {timeout_s:g} s and was given up."
            return ToolResult(text=text, fault="tool_timeouts")
        kind = "" if isinstance(error, ToolError) else f"{type(error).__name__}: "
        text = _cut(f"Error: {kind}{error}", max_chars=max_chars)
        return ToolResult(text=text, fault="tool_errors")


async def _result(call: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004 - of an object that can be called
    )
    result = call(**arguments) if is_async else await _in_thread(call, arguments)
    return await result if isinstance(result, Awaitable) else result


async def _in_thread(call: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Not in a pool: a few calls that hang would fill it, and keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def tell(result: Any, error: BaseException | None) -> None:
        if done.done():
            return  # given up meanwhile
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        try:
            result, error = context.run(call, **arguments), None
        except StopIteration as stop:  # no future takes it
            result, error = None, RuntimeError(f"the tool raised {stop!r}")
        except BaseException as raised:  # noqa: BLE001 - SystemExit would end this thread only
            result, error = None, raised if isinstance(raised, Exception) else _tamed(raised)
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name=f"tool {call!r:.40}", daemon=True).start()
    return await done


def _tamed(error: BaseException) -> Exception:
    return RuntimeError(f"the tool raised {type(error).__name__}: {error}")


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
            raise TaskError(
                f"Tool {name!r} does not say what {parameter.name!r} is; add a type hint."
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (parameter.annotation, default)
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except (PydanticSchemaGenerationError, PydanticUserError, NameError) as error:
        raise TaskError(f"Tool {name!r}: a type hint has no JSON schema ({error}).") from error


def _documented(text: str) -> tuple[str, dict[str, str]]:
    """Summary and, from an Args: section, what is said about each argument."""
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
    """Without the titles that pydantic adds, which tell a model nothing."""
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


def _first_of(error: ValidationError) -> str:
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
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut: the first {max_chars} of {len(text)} characters]"
