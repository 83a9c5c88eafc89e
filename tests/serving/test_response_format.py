"""Replies that follow a JSON schema: agents that train, and the API."""

import json
import sys

import numpy as np
import openai
import pytest
from chat_engine import user
from in_process_client import client_of
from person_schema import FORMAT, SCHEMA, assert_valid
from talking_model import agent_on, assert_says_the_same, make_engine, make_trainer

from millrace.core.errors import TaskError
from millrace.core.records import Episode, Group, Score, Task
from millrace.training.packing.packer import pack

pytest.importorskip("llguidance")


async def test_trainer_logprobs_equal_engine_logprobs_with_kept_ids():
    async with agent_on(make_engine(), max_new_tokens=200, top_k=8) as (agent, cast):
        messages = [user("Who?")]
        reply = await agent.chat(messages, response_format=FORMAT)
        assert_valid(reply.text)
        await agent.chat([*messages, reply, user("And now freely.")])
        rollouts = cast.rollouts()
    group = Group(
        number=0,
        task=Task(prompt=""),
        episodes=(Episode(turns=(), rollouts=rollouts),),
        scores=(Score(total=0.0, parts={}),),
        advantages=np.zeros(1, np.float32),
    )
    assert_says_the_same(make_trainer(), pack([group], microbatch_tokens=4096))


async def test_grammar_that_cannot_be_trained_is_refused():
    async with agent_on(make_engine()) as (agent, _cast):
        with pytest.raises(TaskError, match=r"too many candidate ids per token to train on; set"):
            await agent.chat([user("Who?")], response_format=FORMAT)
        judge = agent.role("judge", trained=False)
        reply = await judge.chat([user("Who?")], response_format=FORMAT, max_new_tokens=200)
        assert_valid(reply.text)
        with pytest.raises(TaskError, match=r"response_format = {'type': 'xml'} is unknown"):
            await judge.chat([user("Who?")], response_format={"type": "xml"})


async def test_the_official_client_gets_json_that_fits_its_schema():
    ask = {"model": "tiny", "messages": [user("Who?")], "seed": 1}
    async with client_of(make_engine()) as client:
        strict = {"type": "json_schema", "json_schema": {**FORMAT["json_schema"], "strict": True}}
        reply = await client.chat.completions.create(
            **ask, n=2, max_tokens=400, response_format=strict
        )
        for choice in reply.choices:
            assert choice.finish_reason == "stop"
            assert_valid(choice.message.content)
        text = ""
        stream = await client.chat.completions.create(
            **ask, max_tokens=400, response_format=strict, stream=True
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        assert_valid(text)
        cut = await client.chat.completions.create(
            **ask, max_tokens=5, response_format={"type": "json_object"}
        )
        assert cut.choices[0].finish_reason == "length"
        assert cut.choices[0].message.content.startswith("{")


NOTE = {"type": "object", "properties": {"who": {"$ref": "#/$defs/Who"}}, "required": ["who"]}
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "Looks."}},
    {
        "type": "function",
        "function": {
            "name": "note",
            "parameters": {**NOTE, "$defs": {"Who": SCHEMA}, "additionalProperties": False},
        },
    },
]


@pytest.mark.parametrize("form", ["hermes", "llama3"])
async def test_required_call_is_returned(form):
    named = {"type": "function", "function": {"name": "note"}}
    ask = {"model": "tiny", "messages": [user("Who?")], "max_tokens": 200, "tools": TOOLS}
    async with client_of(make_engine(), form=form) as client:
        some = await client.chat.completions.create(
            **ask, n=3, seed=1, top_p=0.9, tool_choice="required"
        )
        chunks = await client.chat.completions.create(**ask, tool_choice=named, stream=True)
        deltas = [chunk.choices[0] async for chunk in chunks]
    whole = [choice for choice in some.choices if choice.finish_reason != "length"]
    assert {choice.finish_reason for choice in whole} == {"tool_calls"}
    names = {call.function.name for choice in whole for call in choice.message.tool_calls}
    assert names <= {"look", "note"}
    (call,) = [call for delta in deltas for call in delta.delta.tool_calls or []]
    assert call.function.name == "note"
    assert_valid(json.dumps(json.loads(call.function.arguments)["who"]))
    assert deltas[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "with a json_schema that has a schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "person"}},
                }
            },
            "cannot be compiled: Invalid type: person",
        ),
        (
            {
                "response_format": {"type": "json_object"},
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
            "cannot call tools",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"type": "person"}},
                    }
                ],
            },
            r"cannot be compiled: .* Invalid type: person\.$",
        ),
    ],
)
async def test_unsupported_response_formats_are_refused_by_name(settings, words):
    async with client_of(make_engine()) as client:
        with pytest.raises(openai.BadRequestError, match=words) as info:
            await client.chat.completions.create(model="tiny", messages=[user("?")], **settings)
    assert info.value.param == next(iter(settings))


async def test_missing_grammar_library_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    async with client_of(make_engine()) as client:
        with pytest.raises(openai.BadRequestError, match=r"install millrace\[structured\]"):
            await client.chat.completions.create(
                model="tiny", messages=[user("?")], response_format={"type": "json_object"}
            )
