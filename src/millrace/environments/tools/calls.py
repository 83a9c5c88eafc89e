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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

from millrace.core.records import Message

ToolFormatName = Literal["auto", "hermes", "llama3", "mistral", "gemma"]
Schemas = Sequence[Mapping[str, Any]]
NamedArguments = tuple[str, dict[str, Any]]  # of a call


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


class ToolFormat:
    """The format of one model family; the defaults are for chat templates that render tools."""

    name: ClassVar[str]
    marker: ClassVar[str]  # text by which the chat templates of the family are recognised
    example: ClassVar[str]  # of a call
    openers: ClassVar[tuple[str, ...]] = ()  # texts that begin a call
    # Text before and after a JSON call, and the key of its arguments. None if a grammar over text
    # cannot write a call: calls are not JSON, or need a special token.
    frame: ClassVar[tuple[str, str, str] | None] = None

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

    def _parse_bodies(
        self, content: str, bodies: Sequence[str], read: Callable[[str], Iterable[NamedArguments]]
    ) -> Parsed:
        calls: list[ToolCall] = []
        problems: list[str] = []
        for body in bodies:
            try:
                for name, arguments in read(body):
                    json.dumps([name, arguments], ensure_ascii=False).encode()  # no half characters
                    id = f"call{len(calls):05d}"  # nine characters, which some templates require
                    calls.append(ToolCall(id=id, name=name, arguments=arguments))
            except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
                problems.append(f"A tool call cannot be read ({error}); write {self.example}.")
        return Parsed(content=content, calls=tuple(calls), problems=tuple(problems))


class Hermes(ToolFormat):
    name = "hermes"
    marker = "<tool_call>"
    openers = (marker,)
    frame = ("<tool_call>\n", "\n</tool_call>", "arguments")
    example = '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'

    def parse(self, text: str, schemas: Schemas) -> Parsed:
        # A call inside the model's thinking is not made.
        begin = text.find("<tool_call>", max(text.rfind("</think>"), 0))
        if begin < 0:
            return Parsed(content=text)
        bodies = re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text[begin:], re.DOTALL)
        return self._parse_bodies(text[:begin].strip(), bodies, _json_calls)


class Llama3(ToolFormat):
    name = "llama3"
    marker = "<|start_header_id|>"
    openers = ("<|python_tag|>", "{")
    frame = ("", "", "parameters")
    example = '{"name": "...", "parameters": {...}}'

    def parse(self, text: str, schemas: Schemas) -> Parsed:
        before, tag, body = text.partition("<|python_tag|>")
        if not tag:
            before, body = "", text
            if not re.match(r'\s*\{.*"name"', text, re.DOTALL):
                return Parsed(content=text)
        is_python = re.match(r"\s*[A-Za-z_][\w.]*\(", body)
        read = partial(_python_calls, schemas=schemas) if is_python else _json_calls
        parsed = self._parse_bodies(before.strip(), [body], read)
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
        return self._parse_bodies(before.strip(), [body], _json_calls)


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
        read = partial(_python_calls, schemas=schemas)
        return self._parse_bodies(text[:begin].strip(), bodies, read)

    def shown(
        self, messages: Sequence[Message], schemas: Schemas
    ) -> tuple[list[Message], list[dict[str, Any]]]:
        first = next((i for i, row in enumerate(messages) if row.get("role") == "user"), None)
        if not schemas or first is None:
            return list(messages), []
        rows = "\n".join(json.dumps(schema.get("function", schema)) for schema in schemas)
        introduction = (
            "You can call these functions, each described by a line of JSON:\n"
            f"{rows}\nTo call one, write\n{self.example}\nand you get its result."
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


def _json_calls(body: str) -> Iterator[NamedArguments]:
    """Yield the calls of a JSON object, or of a list of them."""
    rows = json.loads(body)
    for row in rows if isinstance(rows, list) else [rows]:
        if not isinstance(row, dict) or not isinstance(row.get("name"), str):
            raise ValueError('it needs a "name"')
        arguments = row.get("arguments", row.get("parameters", {}))
        if isinstance(arguments, str):  # JSON within JSON, as in the OpenAI API
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            raise ValueError("its arguments must be an object")
        yield row["name"], arguments


def _python_calls(body: str, *, schemas: Schemas) -> Iterator[NamedArguments]:
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
        yield name, _as_json({**positional, **keywords})


def _as_json(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return Python literals as what JSON has for them: messages and recordings are JSON."""

    def as_list(value: Any) -> list[Any]:
        if isinstance(value, set):
            return list(value)
        raise ValueError(f"{value!r:.40} cannot be an argument")

    try:
        return json.loads(json.dumps(arguments, default=as_list))
    except TypeError as error:  # a key of a dict
        raise ValueError(str(error)) from None
