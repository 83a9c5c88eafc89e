"""Tool calls in the text of a model, in the formats of the common model families.

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>      (Qwen, Hermes)
    llama3   {"name": ..., "parameters": {...}}, optionally after <|python_tag|>
    mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}]
    gemma    a fenced block of tool_code with Python calls

A format also defines how calls and results are written as messages, so that a chat template, or
plain text for a template without tools, renders them.

Promise: any text parses to calls, to problems that are reported to the model, or to neither.
Nothing raises, and no code of the model is run.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from millrace.core.records import Message

ToolFormatName = Literal["auto", "hermes", "llama3", "mistral", "gemma"]
Schemas = Sequence[Mapping[str, Any]]


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
    content: str  # text outside the calls
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()  # malformed calls, described for the model


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """The text around a JSON call."""

    before: str
    after: str
    arguments: str  # key of the function's arguments


class ToolFormat:
    """The format of one model family; the defaults are for chat templates that render tools."""

    name: ClassVar[str]
    marker: ClassVar[str]  # text by which the chat templates of the family are recognised
    example: ClassVar[str]  # of a call
    openers: ClassVar[tuple[str, ...]] = ()  # texts that begin a call
    # None if a grammar over text cannot write a call: calls are not JSON, or need a special token.
    frame: ClassVar[Frame | None] = None

    def parse(self, text: str, schemas: Schemas) -> Parsed:
        raise NotImplementedError

    def shown(
        self, messages: Sequence[Message], schemas: Schemas
    ) -> tuple[list[Message], list[dict[str, Any]]]:
        """Return the messages and schemas for the chat template."""
        return list(messages), [dict(schema) for schema in schemas]

    def reply(self, text: str, parsed: Parsed) -> Message:
        if not parsed.calls:
            return {"role": "assistant", "content": text}
        calls = [call.as_message() for call in parsed.calls]
        return {"role": "assistant", "content": parsed.content, "tool_calls": calls}

    def result(self, call: ToolCall, text: str) -> Message:
        return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text}

    def _parse_json(self, content: str, bodies: Sequence[str], *, key: str) -> Parsed:
        calls: list[ToolCall] = []
        problems: list[str] = []
        for body in bodies:
            found = self._json_call(body, key=key)
            if isinstance(found, str):
                problems.append(found)
            else:
                name, arguments = found
                calls.append(ToolCall(id=_call_id(len(calls)), name=name, arguments=arguments))
        return Parsed(content=content, calls=tuple(calls), problems=tuple(problems))

    def _json_call(self, body: str, *, key: str) -> tuple[str, dict[str, Any]] | str:
        """Return the name and arguments, or a problem."""
        try:
            row = json.loads(body)
            if not isinstance(row, dict) or not isinstance(row.get("name"), str):
                return f'A tool call needs a "name"; write {self.example}.'
            arguments = row.get(key, row.get("arguments", row.get("parameters", {})))
            if isinstance(arguments, str):  # JSON within JSON, as in the OpenAI API
                arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return self._unreadable(error)
        if not isinstance(arguments, dict):
            return f'The "{key}" of a tool call must be an object; write {self.example}.'
        return row["name"], arguments

    def _parse_python(self, content: str, bodies: Sequence[str], schemas: Schemas) -> Parsed:
        calls: list[ToolCall] = []
        problems: list[str] = []
        for body in bodies:
            try:
                for name, arguments in _python_calls(body, schemas):
                    calls.append(ToolCall(id=_call_id(len(calls)), name=name, arguments=arguments))
            except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
                problems.append(self._unreadable(error))
        return Parsed(content=content, calls=tuple(calls), problems=tuple(problems))

    def _unreadable(self, error: BaseException) -> str:
        return f"A tool call cannot be read ({error}); write {self.example}."


class Hermes(ToolFormat):
    name = "hermes"
    marker = "<tool_call>"
    openers = (marker,)
    frame = Frame(before="<tool_call>\n", after="\n</tool_call>", arguments="arguments")
    example = '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'

    def parse(self, text: str, schemas: Schemas) -> Parsed:
        # A call inside the model's thinking is not made.
        begin = text.find("<tool_call>", max(text.rfind("</think>"), 0))
        if begin < 0:
            return Parsed(content=text)
        bodies = re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text[begin:], re.DOTALL)
        return self._parse_json(text[:begin].strip(), bodies, key="arguments")


class Llama3(ToolFormat):
    name = "llama3"
    marker = "<|start_header_id|>"
    openers = ("<|python_tag|>", "{")
    frame = Frame(before="", after="", arguments="parameters")
    example = '{"name": "...", "parameters": {...}}'

    def parse(self, text: str, schemas: Schemas) -> Parsed:
        before, tag, body = text.partition("<|python_tag|>")
        if not tag:
            before, body = "", text
            if not re.match(r'\s*\{.*"name"', text, re.DOTALL):
                return Parsed(content=text)
        if re.match(r"\s*[A-Za-z_][\w.]*\(", body):
            parsed = self._parse_python(before.strip(), [body], schemas)
        else:
            parsed = self._parse_json(before.strip(), [body], key="parameters")
        if len(parsed.calls) < 2:
            return parsed
        # The template renders only one call per message.
        problem = "Only the first of several tool calls was made; write one at a time."
        return replace(parsed, calls=parsed.calls[:1], problems=(*parsed.problems, problem))


class Mistral(ToolFormat):
    name = "mistral"
    marker = "[TOOL_CALLS]"
    openers = (marker,)
    example = '[TOOL_CALLS][{"name": "...", "arguments": {...}}]'

    def parse(self, text: str, schemas: Schemas) -> Parsed:
        before, tag, body = text.partition("[TOOL_CALLS]")
        if not tag:
            return Parsed(content=text)
        try:
            rows = json.loads(body)
        except ValueError as error:
            return Parsed(content=before.strip(), problems=(self._unreadable(error),))
        rows = rows if isinstance(rows, list) else [rows]
        return self._parse_json(before.strip(), list(map(json.dumps, rows)), key="arguments")


class Gemma(ToolFormat):
    """Its template has no tools: the first user message introduces them, results are user messages,
    and calls stay in the text."""

    name = "gemma"
    marker = "<start_of_turn>"
    example = "```tool_code\nname(key=value)\n```"

    def parse(self, text: str, schemas: Schemas) -> Parsed:
        begin = text.find("```tool_code")
        if begin < 0:
            return Parsed(content=text)
        bodies = re.findall(r"```tool_code\s*?\n(.*?)(?:```|\Z)", text[begin:], re.DOTALL)
        return self._parse_python(text[:begin].strip(), bodies, schemas)

    def shown(
        self, messages: Sequence[Message], schemas: Schemas
    ) -> tuple[list[Message], list[dict[str, Any]]]:
        first = next((i for i, row in enumerate(messages) if row.get("role") == "user"), None)
        if not schemas or first is None:
            return list(messages), []
        rows = "\n".join(json.dumps(schema.get("function", schema)) for schema in schemas)
        introduction = (
            "You can call these functions, each described by a line of JSON:\n"
            f"{rows}\nTo call one, write\n{self.example}\nand you are told what it returned."
        )
        content = f"{introduction}\n\n{messages[first].get('content', '')}"
        changed = {**messages[first], "content": content}
        return [*messages[:first], changed, *messages[first + 1 :]], []

    def reply(self, text: str, parsed: Parsed) -> Message:
        return {"role": "assistant", "content": text}

    def result(self, call: ToolCall, text: str) -> Message:
        return {"role": "user", "content": f"```tool_output\n{text}\n```"}


FORMATS: dict[str, ToolFormat] = {f.name: f for f in (Hermes(), Mistral(), Llama3(), Gemma())}


def format_of(name: ToolFormatName, *, template: str) -> ToolFormat:
    """Return the format; "auto" recognises it by markers in the template, else takes hermes."""
    if name != "auto":
        return FORMATS[name]
    return next((f for f in FORMATS.values() if f.marker in template), FORMATS["hermes"])


def _python_calls(body: str, schemas: Schemas) -> Iterator[tuple[str, dict[str, Any]]]:
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
        positional = dict(zip(named.get(name, []), map(ast.literal_eval, call.args), strict=False))
        if len(positional) < len(call.args):
            raise ValueError(f"{name} takes fewer arguments")
        keywords = {row.arg: ast.literal_eval(row.value) for row in call.keywords if row.arg}
        yield name, {**positional, **keywords}


def _call_id(number: int) -> str:
    return f"call{number:05d}"  # nine characters, which some templates require
