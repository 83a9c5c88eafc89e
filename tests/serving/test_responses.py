"""The official client against /v1/responses, with a scripted engine."""

import json
from dataclasses import replace

import aiohttp
import openai
import pytest
from chat_model import chat_tokenizer
from openai.types.responses import ResponseFunctionToolCall
from writing_engine import WritingEngine, served

from millrace.core.errors import WorkerError

ADD = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
TEXT_EVENTS = """output_item.added content_part.added output_text.delta output_text.done
content_part.done output_item.done"""
CALL_EVENTS = """output_item.added function_call_arguments.delta function_call_arguments.done
output_item.done"""


def prompts(engine: WritingEngine) -> list[str]:
    return [chat_tokenizer().decode(request.prompt) for request in engine.requests]


async def test_instructions_and_input_become_a_chat_with_the_same_settings():
    engine = WritingEngine("5, I think.")
    async with served(engine) as client:
        reply = await client.responses.create(
            model="tiny",
            instructions="Be brief.",
            input="What is 2 + 3?",
            max_output_tokens=20,
            temperature=0.5,
            top_p=0.9,
        )
    assert (reply.output_text, reply.status, reply.error) == ("5, I think.", "completed", None)
    assert (reply.instructions, reply.temperature, reply.tools) == ("Be brief.", 0.5, [])
    messages = [("system", "Be brief."), ("user", "What is 2 + 3?")]
    rows = [{"role": role, "content": content} for role, content in messages]
    tokenizer = chat_tokenizer()
    prompt = tokenizer.apply_chat_template(rows, add_generation_prompt=True, tokenize=False)
    assert prompts(engine) == [prompt]
    sampling = engine.requests[0].sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p) == (20, 0.5, 0.9)
    assert reply.usage is not None
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (
        len(engine.requests[0].prompt),
        12,
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_reply_that_is_sent_back_becomes_the_same_message(stream: bool):
    engine = WritingEngine(f"Let me see.{CALL}{CALL}")
    first = {"role": "user", "content": [{"type": "input_text", "text": "2 + 2?"}]}
    async with served(engine) as client:
        ask = {"model": "tiny", "tools": [ADD]}
        if stream:
            async with client.responses.stream(**ask, input=[first]) as events:
                reply = await events.get_final_response()
        else:
            reply = await client.responses.create(**ask, input=[first])
        message, *calls = reply.output
        assert reply.output_text == "Let me see."
        assert all(isinstance(call, ResponseFunctionToolCall) for call in calls)
        assert len(calls) == 2
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": str(number)}
            for number, call in enumerate(calls)
        ]
        sent_back = [item.to_dict() for item in (message, *calls)]
        await client.responses.create(**ask, input=[first, *sent_back, *results])
        chat = {"name": "add", "arguments": '{"a": 2}'}
        tool_calls = [{"id": str(i), "type": "function", "function": chat} for i in range(2)]
        await client.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "user", "content": "2 + 2?"},
                {"role": "assistant", "content": "Let me see.", "tool_calls": tool_calls},
                {"role": "tool", "tool_call_id": "0", "content": "0"},
                {"role": "tool", "tool_call_id": "1", "content": "1"},
            ],
            tools=[{"type": "function", "function": {k: ADD[k] for k in list(ADD)[1:4]}}],
        )
    _, after, of_chat = prompts(engine)
    assert after == of_chat


async def test_events_have_the_order_and_numbers_of_the_official_api():
    engine = WritingEngine(f"I add.{CALL}")
    async with served(engine) as client:
        stream = await client.responses.create(model="tiny", input="Hi", tools=[ADD], stream=True)
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
    assert names == list(
        dict.fromkeys(["created", "in_progress", *f"{TEXT_EVENTS} {CALL_EVENTS} completed".split()])
    )
    counts = [event.type.removeprefix("response.") for event in events]
    assert [name for name in counts if name != "output_text.delta"] == (
        ["created", "in_progress"]
        + [name for name in TEXT_EVENTS.split() if name != "output_text.delta"]
        + [*CALL_EVENTS.split(), "completed"]
    )
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == "I add."
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    last = events[-1]
    assert last.type == "response.completed"
    assert [item.id for item in added] == [item.id for item in done]
    assert last.response.output == done
    assert json.loads(done[1].arguments) == {"a": 2}
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == len(f"I add.{CALL}") + 1


async def test_raw_stream_names_its_events_and_ends_without_done():
    async with served(WritingEngine("a")) as client, aiohttp.ClientSession() as http:
        body = {"model": "tiny", "input": "Hi", "stream": True}
        async with http.post(f"{client.base_url}responses", json=body) as response:
            text = await response.text()
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert name == "event: response.completed"


async def test_reply_at_its_token_limit_is_incomplete():
    class Cut(WritingEngine):
        async def generate(self, request, on_tokens=None, on_completion=None):
            def cut(chunk):
                on_tokens(replace(chunk, finish=chunk.finish and "length"))

            done = await super().generate(request, on_tokens and cut)
            return [replace(completion, finish="length") for completion in done]

    async with served(Cut("abc")) as client:
        ask = {"model": "tiny", "input": "Hi", "max_output_tokens": 3}
        reply = await client.responses.create(**ask)
        *_, last = [event async for event in await client.responses.create(**ask, stream=True)]
    assert last.type == "response.incomplete"
    for response in (reply, last.response):
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[0].status == "incomplete"


async def test_logprobs_are_included_on_request():
    async with served(WritingEngine("ab")) as client:
        ask = {"model": "tiny", "input": "Hi", "include": ["message.output_text.logprobs"]}
        reply = await client.responses.create(**ask)
        stream = await client.responses.create(**ask, stream=True)
        events = [event async for event in stream if event.type == "response.output_text.delta"]
    (part,) = reply.output[0].content
    assert [row.token for row in part.logprobs] == ["a", "b", "<|im_end|>"]
    streamed = [row.logprob for event in events for row in event.logprobs]
    assert streamed == [row.logprob for row in part.logprobs]


async def test_empty_reply_is_an_empty_message():
    async with served(WritingEngine("")) as client:
        reply = await client.responses.create(model="tiny", input="Hi")
        stream = await client.responses.create(model="tiny", input="Hi", stream=True)
        *_, last = [event async for event in stream]
    for response in (reply, last.response):
        assert [item.type for item in response.output] == ["message"]
        assert response.output_text == ""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"store": True}, "'store': this server stores no responses"),
        ({"previous_response_id": "resp_1"}, "send the whole conversation as input"),
        ({"conversation": "c"}, "stores no responses"),
        ({"tools": [{"type": "web_search"}]}, "only tools of type 'function' are supported"),
        ({"tools": [{"type": "function"}]}, "a function with a name"),
        ({"background": True}, "'background' = true: only false is supported"),
        ({"reasoning": {"effort": "high"}}, "'reasoning'"),
        ({"text": {"format": {"type": "grammar"}}}, "'text.format'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'input.0' is no message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "not text"),
        ({"input": [{"role": "robot", "content": "x"}]}, "'robot' is not one of"),
        ({"top_logprobs": 2}, "top_logprobs need include"),
        ({"tool_choice": "required"}, "tool_choice requires a tool"),
        ({"extra_body": {"stop": "x"}}, "Unknown field 'stop'"),
    ],
)
async def test_unsupported_settings_are_refused_by_name(settings, words: str):
    async with served(WritingEngine("x")) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(**{"model": "tiny", "input": "Hi", **settings})
    assert words in refused.value.body["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_error_before_the_first_event_has_a_status(stream: bool):
    async with served(WritingEngine("x")) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.responses.create(model="other", input="Hi", stream=stream)
        with pytest.raises(openai.BadRequestError, match="context"):
            await client.responses.create(model="tiny", input="x" * 600, stream=stream)


async def test_engine_that_fails_in_a_stream_ends_it_with_a_failed_response():
    class Failing(WritingEngine):
        async def generate(self, request, on_tokens=None, on_completion=None):
            await super().generate(request, on_tokens)
            raise WorkerError("a secret", worker="engine-0")

    async with served(Failing("abc")) as client:
        stream = await client.responses.create(model="tiny", input="Hi", stream=True)
        *_, last = [event async for event in stream]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert last.response.error.message == "The engine failed."
