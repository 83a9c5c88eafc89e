"""Tool calls in what a model wrote, in the formats of the common model families.

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>      (Qwen, Hermes)
    llama3   {"name": ..., "parameters": {...}}, perhaps after <|python_tag|>
    mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}]
    gemma    a fenced block of tool_code with Python calls

A format also says how calls and their results stand in messages, so that a chat template renders
them, or text does where a template knows nothing of tools.

Promise: whatever a model writes is calls, problems to be told to the model, or neither; nothing
raises, and no written code is run.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from millrace.core.records import Message

ToolFormatName = Literal["auto", "hermes", "llama3", "mistral", "gemma"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: dict[str, Any]

    def as_message(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"type": "function", "id": self.id, "function": function}


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    content: str  # what was written besides
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()  # sentences for the model about calls that cannot be read


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """How a call that is JSON is written."""

    before: str
    after: str
    arguments: str  # the key of what the function is given


class ToolFormat(Protocol):
    @property
    def frame(self) -> Frame | None:
        """None where text alone does not make a call: it is no JSON, or begins with a token that
        no text is."""
        ...

    @property
    def openers(self) -> tuple[str, ...]:
        """What a call begins with: from there on, a text is not for reading."""
        ...

    def parse(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> Parsed: ...

    def shown(
        self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Message], list[dict[str, Any]]]:
        """What a template is given: messages and, if it knows of tools, schemas."""
        ...

    def reply(self, text: str, parsed: Parsed) -> Message: ...

    def result(self, call: ToolCall, text: str) -> Message: ...


class _InTemplate:
    """For models whose chat template renders tools, calls and results."""

    def shown(
        self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Message], list[dict[str, Any]]]:
        return list(messages), [dict(schema) for schema in schemas]

    def reply(self, text: str, parsed: Parsed) -> Message:
        if not parsed.calls:
            return {"role": "assistant", "content": text}
        calls = [call.as_message() for call in parsed.calls]
        return {"role": "assistant", "content": parsed.content, "tool_calls": calls}

    def result(self, call: ToolCall, text: str) -> Message:
        return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text}


class Hermes(_InTemplate):
    openers = ("<tool_call>",)
    frame = Frame(before="<tool_call>\n", after="\n</tool_call>", arguments="arguments")
    _form = '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'

    def parse(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> Parsed:
        begin = text.find("<tool_call>", _after_thinking(text))
        if begin < 0:
            return Parsed(content=text)
        bodies = re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text[begin:], re.DOTALL)
        return _gathered(text[:begin].strip(), bodies, key="arguments", form=self._form)


class Llama3(_InTemplate):
    openers = ("<|python_tag|>", "{")
    frame = Frame(before="", after="", arguments="parameters")
    _form = '{"name": "...", "parameters": {...}}'

    def parse(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> Parsed:
        before, tag, body = text.partition("<|python_tag|>")
        if not tag:
            before, body = "", text
            if not re.match(r'\s*\{.*"name"', text, re.DOTALL):
                return Parsed(content=text)
        if re.match(r"\s*[A-Za-z_][\w.]*\(", body):
            parsed = _python_calls(before.strip(), [body], schemas, form=self._form)
        else:
            parsed = _gathered(before.strip(), [body], key="parameters", form=self._form)
        if len(parsed.calls) < 2:
            return parsed
        # The template knows no more than one call in a message.
        problem = "Only the first of several tool calls was made; write one at a time."
        return replace(parsed, calls=parsed.calls[:1], problems=(*parsed.problems, problem))


class Mistral(_InTemplate):
    openers = ("[TOOL_CALLS]",)
    frame = None
    _form = '[TOOL_CALLS][{"name": "...", "arguments": {...}}]'

    def parse(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> Parsed:
        before, tag, body = text.partition("[TOOL_CALLS]")
        if not tag:
            return Parsed(content=text)
        try:
            rows = json.loads(body)
        except ValueError as error:
            return Parsed(content=before.strip(), problems=(_unread(error, self._form),))
        rows = rows if isinstance(rows, list) else [rows]
        bodies = [json.dumps(row) for row in rows]
        return _gathered(before.strip(), bodies, key="arguments", form=self._form)


class Gemma:
    """Its template knows nothing of tools: they are introduced in the first message of the user,
    and results are messages of the user. Calls stay in the text."""

    openers = ()
    frame = None
    _form = "```tool_code\nname(key=value)\n```"

    def parse(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> Parsed:
        begin = text.find("```tool_code")
        if begin < 0:
            return Parsed(content=text)
        bodies = re.findall(r"```tool_code\s*?\n(.*?)(?:```|\Z)", text[begin:], re.DOTALL)
        return _python_calls(text[:begin].strip(), bodies, schemas, form=self._form)

    def shown(
        self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Message], list[dict[str, Any]]]:
        first = next((i for i, row in enumerate(messages) if row.get("role") == "user"), None)
        if not schemas or first is None:
            return list(messages), []
        introduced = f"{_introduction(schemas)}\n\n{messages[first].get('content', '')}"
        changed = {**messages[first], "content": introduced}
        return [*messages[:first], changed, *messages[first + 1 :]], []

    def reply(self, text: str, parsed: Parsed) -> Message:
        return {"role": "assistant", "content": text}

    def result(self, call: ToolCall, text: str) -> Message:
        return {"role": "user", "content": f"```tool_output\n{text}\n```"}


FORMATS: dict[str, ToolFormat] = {
    "hermes": Hermes(),
    "llama3": Llama3(),
    "mistral": Mistral(),
    "gemma": Gemma(),
}


def format_of(name: ToolFormatName, *, template: str) -> ToolFormat:
    """With "auto", the one whose marks the chat template bears; else that of most models."""
    if name != "auto":
        return FORMATS[name]
    marks = {
        "hermes": "<tool_call>",
        "mistral": "[TOOL_CALLS]",
        "llama3": "<|start_header_id|>",
        "gemma": "<start_of_turn>",
    }
    return FORMATS[next((key for key, mark in marks.items() if mark in template), "hermes")]


def name_of(form: ToolFormat) -> str:
    return next(name for name, known in FORMATS.items() if known is form)


def _after_thinking(text: str) -> int:
    """Where the answer begins: a call that is only thought of is none."""
    end = text.rfind("</think>")
    return 0 if end < 0 else end


def _gathered(content: str, bodies: Sequence[str], *, key: str, form: str) -> Parsed:
    """Calls written as JSON objects, one in each body."""
    calls: list[ToolCall] = []
    problems: list[str] = []
    for body in bodies:
        found = _json_call(body, key=key, form=form)
        if isinstance(found, str):
            problems.append(found)
        else:
            name, arguments = found
            calls.append(ToolCall(id=_call_id(len(calls)), name=name, arguments=arguments))
    return Parsed(content=content, calls=tuple(calls), problems=tuple(problems))


def _json_call(body: str, *, key: str, form: str) -> tuple[str, dict[str, Any]] | str:
    """Name and arguments, or what is wrong."""
    try:
        row = json.loads(body)
    except (ValueError, RecursionError) as error:
        return _unread(error, form)
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        return f'A tool call needs a "name"; write {form}.'
    arguments = row.get(key, row.get("arguments", row.get("parameters", {})))
    if isinstance(arguments, str):  # JSON within JSON, as in the OpenAI API
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return _unread(error, form)
    if not isinstance(arguments, dict):
        return f'The "{key}" of a tool call are an object; write {form}.'
    return row["name"], arguments


def _python_calls(
    content: str, bodies: Sequence[str], schemas: Sequence[Mapping[str, Any]], *, form: str
) -> Parsed:
    """Calls written as Python, which is read and never run."""
    calls: list[ToolCall] = []
    problems: list[str] = []
    for body in bodies:
        try:
            for name, arguments in _python_rows(body, schemas):
                calls.append(ToolCall(id=_call_id(len(calls)), name=name, arguments=arguments))
        except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
            problems.append(_unread(error, form))
    return Parsed(content=content, calls=tuple(calls), problems=tuple(problems))


def _python_rows(
    body: str, schemas: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    functions = [schema.get("function", {}) for schema in schemas]
    named = {f.get("name"): list(f.get("parameters", {}).get("properties", {})) for f in functions}
    for statement in ast.parse(body.strip()).body:
        call = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
        is_print = isinstance(call, ast.Call) and ast.unparse(call.func) == "print"
        if isinstance(call, ast.Call) and is_print and len(call.args) == 1:
            call = call.args[0]
        if not isinstance(call, ast.Call):
            raise ValueError(f"{ast.unparse(statement)!r} is not a call")
        name = ast.unparse(call.func).removesuffix(".call")
        by_place = dict(zip(named.get(name, []), map(ast.literal_eval, call.args), strict=False))
        if len(by_place) < len(call.args):
            raise ValueError(f"{name} takes fewer arguments")
        by_name = {row.arg: ast.literal_eval(row.value) for row in call.keywords if row.arg}
        yield name, {**by_place, **by_name}


def _unread(error: BaseException, form: str) -> str:
    return f"A tool call cannot be read ({error}); write {form}."


def _call_id(number: int) -> str:
    return f"call{number:05d}"  # nine characters, as some templates insist on


def _introduction(schemas: Sequence[Mapping[str, Any]]) -> str:
    rows = "\n".join(json.dumps(schema.get("function", schema)) for schema in schemas)
    return (
        "You can call these functions, each described by a line of JSON:\n"
        f"{rows}\nTo call one, write\n{Gemma._form}\nand you are told what it returned."
    )
