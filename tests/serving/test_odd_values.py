"""Values in requests and completions that JSON or Python cannot always handle: very deep ones,
halves of characters, and values of Python. None of them is an error of the server."""

import json

import aiohttp
import pytest
from writing_engine import WritingEngine, served

LOOKUP = {"type": "function", "function": {"name": "lookup", "parameters": {}}}
JSON = {"Content-Type": "application/json"}
USER = '{"role": "user", "content": "Hi"}'


def deep(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def fields_with(value: str) -> dict[str, str]:
    """Fields of a chat request as JSON. `value`: JSON in one of them."""
    form = f'{{"type": "json_schema", "json_schema": {{"name": "x", "schema": {value}}}}}'
    tools = f'[{{"type": "function", "function": {{"name": "x", "parameters": {value}}}}}]'
    fields = {
        "metadata": value,
        "chat_template_kwargs": value,
        "response_format": form,
        "tools": tools,
    }
    for name, arguments in (("call", value), ("call as text", json.dumps(value))):
        call = f'{{"id": "1", "function": {{"name": "x", "arguments": {arguments}}}}}'
        fields[name] = f'[{USER}, {{"role": "assistant", "tool_calls": [{call}]}}]'
    return fields


# From about 1000 levels, the body is refused as a whole, but not a text that it contains.
@pytest.mark.parametrize("depth", [300, 5000])
async def test_very_deep_values_are_accepted_or_refused(depth: int):
    async with served(WritingEngine("x")) as client, aiohttp.ClientSession() as http:
        for name, value in fields_with(deep(depth)).items():
            is_message = name.startswith("call")
            more = f'"messages": {value if is_message else f"[{USER}]"}'
            more += "" if is_message else f', "{name}": {value}'
            body = f'{{"model": "tiny", {more}}}'.encode()
            url = f"{client.base_url}chat/completions"
            async with http.post(url, data=body, headers=JSON) as response:
                assert response.status in (200, 400), (name, await response.text())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        ("hermes", r'<tool_call>{"name": "lookup", "arguments": {"k": "\ud800"}}', None),
        ("gemma", "```tool_code\nlookup(k=b'x')\n```", None),
        ("gemma", "```tool_code\nlookup(k={(1, 2): 3, 4: 5})\n```", None),
        ("gemma", "```tool_code\nlookup(s={1}, t=(1, 2))\n```", {"s": [1], "t": [1, 2]}),
    ],
)
async def test_arguments_are_sent_as_json_or_their_call_stays_a_text(
    form: str, text: str, arguments: dict | None, stream: bool
):
    ask = {"model": "tiny", "messages": [json.loads(USER)], "tools": [LOOKUP]}
    async with served(WritingEngine(text), form=form) as client:
        reply = await client.chat.completions.create(**ask, stream=stream)
        calls = (
            [call async for chunk in reply for call in chunk.choices[0].delta.tool_calls or []]
            if stream
            else reply.choices[0].message.tool_calls or []
        )
    sent = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
    assert sent == ([] if arguments is None else [("lookup", arguments)])
