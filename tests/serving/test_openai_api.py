"""The official client against the endpoints, with a scripted engine."""

import asyncio
import hashlib
import json

import aiohttp
import openai
import pytest
from chat_model import IM_END, chat_tokenizer
from writing_engine import WritingEngine, served, until

from millrace.core.errors import TaskError, WorkerError
from millrace.serving.api.openapi import Health
from millrace.serving.options import ServerLimits

ASK = [{"role": "user", "content": "What is 2 + 3?"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def root_of(client: openai.AsyncOpenAI) -> str:
    return str(client.base_url).removesuffix("v1/")


async def test_a_chat_is_rendered_answered_and_counted():
    engine = WritingEngine("5, I think.")
    async with served(engine) as client:
        reply = await client.chat.completions.create(model="tiny", messages=ASK)
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "5, I think.")
    assert choice.finish_reason == "stop"
    (request,) = engine.requests
    prompt = chat_tokenizer().apply_chat_template(
        ASK, add_generation_prompt=True, return_dict=False
    )
    assert request.prompt.tolist() == prompt
    assert request.sampling.max_new_tokens == 512 - len(prompt)
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), 12)


async def test_settings_of_a_request_reach_the_engine():
    engine = WritingEngine("x")
    async with served(engine) as client:
        await client.chat.completions.create(
            model="side",
            messages=ASK,
            n=3,
            seed=7,
            temperature=0.5,
            top_p=0.9,
            stop=["END", "\n"],
            max_completion_tokens=20,
            user="somebody",
            prompt_cache_key="conversation",
            extra_body={"top_k": 5, "min_p": 0.1, "chat_template_kwargs": {"prefix": "Well"}},
        )
    (request,) = engine.requests
    sampling = request.sampling
    assert (request.n, request.seed, request.adapter) == (3, 7, "side")
    assert request.session == hashlib.sha256(b"conversation").hexdigest()
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.5, 0.9, 20)
    assert (sampling.top_k, sampling.min_p, sampling.stop) == (5, 0.1, ("END", "\n"))
    assert chat_tokenizer().decode(request.prompt[-4:]) == "Well"


async def test_without_a_seed_each_request_draws_its_own():
    engine = WritingEngine("x")
    async with served(engine) as client:
        for _ in range(2):
            await client.chat.completions.create(model="tiny", messages=ASK)
    assert len({request.seed for request in engine.requests}) == 2


async def test_stream_sends_text_as_it_is_generated():
    async with served(WritingEngine("one", "three")) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=ASK, n=2, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    *most, last = chunks
    deltas = [chunk.choices[0] for chunk in most]
    texts = {i: [d.delta.content or "" for d in deltas if d.index == i] for i in (0, 1)}
    assert {i: "".join(parts) for i, parts in texts.items()} == {0: "one", 1: "three"}
    assert [part for part in texts[1] if part] == list("three")
    ends = [(d.index, d.finish_reason) for d in deltas if d.finish_reason]
    assert ends == [(0, "stop"), (1, "stop")]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 4 + 6
    assert len({chunk.id for chunk in chunks}) == 1


async def test_logprobs_of_sampled_tokens_are_the_same_when_streamed():
    async with served(WritingEngine("abc")) as client:
        ask = {"model": "tiny", "messages": ASK, "logprobs": True}
        whole = await client.chat.completions.create(**ask)
        stream = await client.chat.completions.create(**ask, stream=True)
        parts = [c.choices[0].logprobs async for c in stream if c.choices[0].logprobs]
    assert whole.choices[0].logprobs is not None
    rows = whole.choices[0].logprobs.content or []
    assert [row.token for row in rows] == ["a", "b", "c", "<|im_end|>"]
    assert [row.logprob for row in rows] == [0.0, -0.125, -0.25, -0.375]
    assert rows[1].bytes == [ord("b")]
    assert [row for part in parts for row in part.content or []] == rows


async def test_stop_strings_are_never_sent_even_partially():
    engine = WritingEngine("say STO no STOP")
    async with served(engine) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=ASK, stop="STOP", stream=True
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(parts) == "say STO no "
    assert "S" not in parts


async def test_tool_calls_are_parsed_and_their_results_reach_the_model():
    engine = WritingEngine(f"Let me see.{CALL}")
    async with served(engine) as client:
        reply = await client.chat.completions.create(model="tiny", messages=ASK, tools=[ADD])
        (choice,) = reply.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        (call,) = choice.message.tool_calls or []
        assert (call.type, call.function.name) == ("function", "add")
        assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
        engine.texts = ("It is 5.",)
        result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
        second = await client.chat.completions.create(
            model="tiny", messages=[*ASK, choice.message, result], tools=[ADD]
        )
    assert second.choices[0].message.content == "It is 5."
    first, after = (chat_tokenizer().decode(request.prompt) for request in engine.requests)
    assert '"name": "add", "description": "Add two numbers."' in first
    assert '{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call><|im_end|>' in after
    assert "<|im_start|>tool\n5<|im_end|>" in after


@pytest.mark.parametrize("text", ["I add < them.", "I add < them.\n"])
async def test_stream_holds_a_tool_call_until_it_is_complete(text):
    async with served(WritingEngine(f"{text}{CALL}{CALL}")) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=ASK, tools=[ADD], stream=True
        )
        deltas = [chunk.choices[0] async for chunk in stream]
    assert "".join(d.delta.content or "" for d in deltas) == text
    calls = [call for d in deltas for call in d.delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, "add"), (1, "add")]
    assert json.loads(calls[0].function.arguments) == {"a": 2, "b": 3}
    assert deltas[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("text", ["<tool_call>{oops</tool_call>", "<tool_call> is a tag"])
async def test_invalid_tool_call_is_returned_as_text(text):
    async with served(WritingEngine(text)) as client:
        ask = {"model": "tiny", "messages": ASK, "tools": [ADD]}
        whole = await client.chat.completions.create(**ask)
        stream = await client.chat.completions.create(**ask, stream=True)
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert (whole.choices[0].message.content, whole.choices[0].message.tool_calls) == (text, None)
    assert "".join(parts) == text


async def test_formats_without_template_support_keep_calls_and_results_in_the_text():
    text = "So:\n```tool_code\nadd(a=2, b=3)\n```"
    engine = WritingEngine(text)
    async with served(engine, form="gemma") as client:
        ask = {"model": "tiny", "messages": ASK, "tools": [ADD]}
        message = (await client.chat.completions.create(**ask)).choices[0].message
        stream = await client.chat.completions.create(**ask, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        (call,) = message.tool_calls or []
        result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
        await client.chat.completions.create(**{**ask, "messages": [*ASK, message, result]})
    assert message.content == "".join(delta.content or "" for delta in deltas) == text
    assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
    prompt = chat_tokenizer().decode(engine.requests[-1].prompt)
    assert "You can call these functions" in prompt
    assert prompt.count(f"<|im_start|>assistant\n{text}<|im_end|>") == 1
    assert "<|im_start|>user\n```tool_output\n5\n```<|im_end|>" in prompt


async def test_call_like_text_without_tools_is_returned_as_text():
    async with served(WritingEngine(CALL)) as client:
        ask = {"model": "tiny", "messages": ASK}
        reply = await client.chat.completions.create(**ask)
        declined = await client.chat.completions.create(**ask, tools=[ADD], tool_choice="none")
    for each in (reply, declined):
        assert each.choices[0].message.content == CALL


@pytest.mark.parametrize("form", ["mistral", "gemma"])
async def test_required_call_is_refused_without_a_tool_format(form):
    async with served(WritingEngine("x"), form=form) as client:
        with pytest.raises(openai.BadRequestError, match="The tool format of this model"):
            await client.chat.completions.create(
                model="tiny", messages=ASK, tools=[ADD], tool_choice="required"
            )


@pytest.mark.parametrize("stream", [False, True])
async def test_parallel_tool_calls_false_returns_the_first_call(stream):
    async with served(WritingEngine(f"So.{CALL}{CALL}")) as client:
        ask = {"model": "tiny", "messages": ASK, "tools": [ADD], "parallel_tool_calls": False}
        if stream:
            chunks = await client.chat.completions.create(**ask, stream=True)
            calls = [c for chunk in [c async for c in chunks] for c in _calls_of(chunk)]
        else:
            calls = (await client.chat.completions.create(**ask)).choices[0].message.tool_calls
    (call,) = calls
    assert call.function.name == "add"


def _calls_of(chunk):
    return chunk.choices[0].delta.tool_calls or []


async def test_completions_continue_texts_and_tokens():
    engine = WritingEngine("one", "two")
    async with served(engine) as client:
        texts = await client.completions.create(model="tiny", prompt=["a", "bc"], n=2, logprobs=0)
        tokens = await client.completions.create(model="tiny", prompt=[97, 98], max_tokens=5)
        stream = await client.completions.create(model="tiny", prompt=["a", "b"], stream=True)
        chunks = [chunk async for chunk in stream]
    assert [(c.index, c.text) for c in texts.choices] == [*enumerate(["one", "two"] * 2)]
    assert texts.choices[2].logprobs is not None
    assert texts.choices[2].logprobs.tokens == ["o", "n", "e", "<|im_end|>"]
    assert texts.choices[2].logprobs.text_offset == [0, 1, 2, 3]
    assert [r.prompt.tolist() for r in engine.requests[:3]] == [[97], [98, 99], [97, 98]]
    assert [(r.index, r.sampling.max_new_tokens) for r in engine.requests[:3]] == [
        (0, 16),
        (2, 16),
        (0, 5),
    ]
    assert engine.requests[0].seed == engine.requests[1].seed
    assert tokens.choices[0].text == "one"
    for index in (0, 1):
        own = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(choice.text for choice in own) == "one"
        assert own[-1].finish_reason == "stop"


async def test_return_token_ids_adds_tokens_and_versions():
    body = {"model": "tiny", "prompt": [97, 98], "n": 2, "seed": 5, "max_tokens": 9}
    body |= {"temperature": 0, "logprobs": 0, "return_token_ids": True, "prompt_cache_key": "talk"}
    engine = WritingEngine("hi", "you")
    async with served(engine) as client, aiohttp.ClientSession() as http:
        url = f"{root_of(client)}v1/completions"
        async with http.post(url, json=body) as response:
            whole = await response.json()
        async with http.post(url, json={**body, "stream": True}) as response:
            events = (await response.text()).split("\n\n")
    assert whole["choices"][0] == {
        "index": 0,
        "text": "hi",
        "logprobs": {
            "tokens": ["h", "i", "<|im_end|>"],
            "token_logprobs": [0.0, -0.125, -0.25],
            "text_offset": [0, 1, 2],
            "top_logprobs": None,
        },
        "token_ids": [ord("h"), ord("i"), IM_END],
        "versions": [3, 3, 3],
        "finish_reason": "stop",
    }
    request = engine.requests[0]
    assert (request.prompt.tolist(), request.seed) == ([97, 98], 5)
    assert events[-2:] == ["data: [DONE]", ""]
    pieces = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    second = [choice for piece in pieces for choice in piece["choices"] if choice["index"] == 1]
    for key in ("token_ids", "versions"):
        assert [each for choice in second for each in choice[key]] == whole["choices"][1][key]
    assert [choice["finish_reason"] for choice in second] == [None, None, None, "stop"]


async def test_models_are_the_model_and_its_adapters():
    async with served(WritingEngine("x")) as client:
        assert [model.id async for model in client.models.list()] == ["tiny", "side"]
        assert (await client.models.retrieve("side")).id == "side"
        with pytest.raises(openai.NotFoundError, match="Model 'large' does not exist"):
            await client.models.retrieve("large")
        with pytest.raises(
            openai.NotFoundError, match=r"Model 'large' does not exist; .* tiny, side"
        ):
            await client.chat.completions.create(model="large", messages=ASK)


def with_parameters(parameters) -> dict:
    return {"type": "function", "function": {"name": "add", "parameters": parameters}}


def named(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("field", "settings", "words"),
    [
        ("temperature", {"temperature": -1}, "greater than or equal to 0"),
        ("n", {"n": 1000}, "less than or equal to 128"),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 50}, "less than or equal to 20"),
        (None, {"top_logprobs": 5}, "need logprobs = true"),
        ("frequency_penalty", {"frequency_penalty": 2.5}, "less than or equal to 2"),
        ("logit_bias.5", {"logit_bias": {"5": 101}}, "less than or equal to 100"),
        ("tools.0", {"tools": [{"type": "function"}]}, "a function with a name"),
        ("tools.1", {"tools": [ADD, {"type": "web_search"}]}, "a function with a name"),
        ("tools.0", {"tools": [with_parameters({"properties": 5})]}, "which are a JSON schema"),
        ("tool_choice", {"tools": [ADD], "tool_choice": "always"}, "only 'auto', 'none' or 'req"),
        ("tool_choice", {"tool_choice": "required"}, "not in tools"),
        ("tool_choice", {"tools": [ADD], "tool_choice": named("sub")}, "not in tools"),
        (
            "response_format.type",
            {"response_format": {"type": "xml"}},
            "only 'text', 'json_object' or 'json_schema' is supported",
        ),
        ("reasoning_effort", {"reasoning_effort": "low"}, "Unknown field"),
        ("stop.1", {"stop": ["a", ""]}, "at least 1 character"),
        ("stop", {"stop": ["a"] * 20}, "at most 16 items"),
        (None, {"stream_options": {"include_usage": True}}, "need stream = true"),
    ],
)
async def test_unsupported_fields_are_refused_by_name(field, settings, words):
    engine = WritingEngine("x")
    async with served(engine) as client:
        with pytest.raises(openai.BadRequestError, match=words) as info:
            await client.chat.completions.create(model="tiny", messages=ASK, **settings)
    assert info.value.param == field
    assert info.value.type == "invalid_request_error"
    assert not engine.requests


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("prompt", [], "at least 1 item"),
        ("prompt.0", [-1], "greater than or equal to 0"),
        (None, {"max_tokens": 0}, "= 0 needs echo = true"),
        (None, {"echo": True, "stream": True}, "not possible with stream"),
        ("suffix", "end", "only null is supported"),
        ("best_of", 3, "only 1 is supported"),
    ],
)
async def test_unsupported_completion_fields_are_refused_by_name(field, value, words):
    changes = value if field is None else {field.partition(".")[0]: value}
    ask = {"model": "tiny", "prompt": "x", **changes}
    async with served(WritingEngine("x")) as client:
        with pytest.raises(openai.BadRequestError, match=words) as info:
            await client.completions.create(**ask)
    assert info.value.param == field


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least 1 item"),
        ([{"role": "robot", "content": "x"}], "'robot' is not one of"),
        ([{"role": "user"}], "content' is missing"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "is not text"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"arguments": "["}}]}],
            "an invalid call",
        ),
        ([{"role": "user", "content": "x" * 600}], "context is limited to 512"),
    ],
)
async def test_invalid_messages_are_refused(messages, words):
    async with served(WritingEngine("x")) as client:
        with pytest.raises(openai.BadRequestError, match=words) as info:
            await client.chat.completions.create(model="tiny", messages=messages)
    is_too_long = "context is limited" in words
    assert info.value.code == ("context_length_exceeded" if is_too_long else None)


async def test_text_parts_are_joined_and_developer_means_system():
    engine = WritingEngine("x")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    async with served(engine) as client:
        await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "developer", "content": "be"}, {"role": "user", "content": parts}],
        )
    prompt = chat_tokenizer().decode(engine.requests[0].prompt)
    assert prompt.startswith("<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nab<|im_end|>")


@pytest.mark.parametrize(
    ("body", "type", "status", "words"),
    [
        (b'{"model": ', "application/json", 400, "not valid JSON"),
        (b"\xff\xfe", "application/json", 400, "not valid JSON"),
        (b"[" * 60000, "application/json", 400, "not valid JSON"),
        (b"[]", "application/json", 400, "not an object: []"),
        (b'{"model": "\\ud83d"}', "application/json", 400, "not valid JSON"),
        (b'{"temperature": NaN}', "application/json", 400, "not valid JSON"),
        (b"{}", "text/plain", 415, "Content-Type: application/json"),
        (b"x" * 3000, "application/json", 413, "Too Large"),
    ],
    ids=["cut", "binary", "deep", "list", "half", "nan", "type", "large"],
)
async def test_invalid_body_gets_an_api_error(body, type, status, words):
    limits = ServerLimits(body_bytes=2048) if len(body) == 3000 else None
    async with served(WritingEngine("x"), limits=limits) as client:
        url, headers = f"{client.base_url}chat/completions", {"Content-Type": type}
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, data=body, headers=headers) as response,
        ):
            assert response.status == status
            assert words in (await response.json())["error"]["message"]


async def test_unknown_paths_and_methods_get_an_api_error():
    async with served(WritingEngine("x")) as client, aiohttp.ClientSession() as http:
        async with http.get(f"{root_of(client)}v2") as response:
            assert (response.status, (await response.json())["error"]["type"]) == (
                404,
                "not_found_error",
            )
        async with http.get(f"{client.base_url}completions") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"


async def test_requests_need_the_key():
    async with served(WritingEngine("x"), key="secret") as client:
        await client.models.list()
        with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
            await client.with_options(api_key="secre").models.list()
        async with aiohttp.ClientSession() as http:
            for path, status in (("health", 200), ("metrics", 401), ("v1/models", 401)):
                async with http.get(f"{root_of(client)}{path}") as response:
                    assert response.status == status, path


class FailingEngine(WritingEngine):
    def __init__(self, error: Exception, *, after: int) -> None:
        super().__init__("abc")
        self._error = error
        self._after = after

    async def generate(self, request, on_tokens=None):
        def tell(piece):
            if on_tokens:
                on_tokens(piece)

        if self._after:
            await super().generate(request, tell)
        raise self._error


async def test_refusal_is_a_client_error_and_engine_death_a_server_error():
    refusal = TaskError("Token ids outside 0..9.")
    death = WorkerError("Worker died.", worker="engine-0", traceback="/home/secret.py")
    for stream in (False, True):
        async with served(FailingEngine(refusal, after=0)) as client:
            with pytest.raises(openai.BadRequestError, match="outside 0"):
                await client.chat.completions.create(model="tiny", messages=ASK, stream=stream)
        async with served(FailingEngine(death, after=0)) as client:
            with pytest.raises(openai.InternalServerError, match="engine failed") as info:
                await client.chat.completions.create(model="tiny", messages=ASK, stream=stream)
            assert "secret" not in str(info.value)


async def test_broken_stream_sends_an_error_event():
    async with served(FailingEngine(WorkerError("Died.", worker="e"), after=3)) as client:
        stream = await client.chat.completions.create(model="tiny", messages=ASK, stream=True)
        with pytest.raises(openai.APIError, match="engine failed"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnected_client_ends_its_request(stream):
    engine = WritingEngine("a long story")
    async with served(engine) as client:
        engine.gate.clear()
        asking = asyncio.create_task(
            client.chat.completions.create(model="tiny", messages=ASK, stream=stream)
        )
        await until(lambda: engine.requests)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: engine.cancelled)
        assert engine.cancelled == [engine.requests[0].id]
        async with aiohttp.ClientSession() as http:
            metrics = await (await http.get(f"{root_of(client)}metrics")).text()
    assert "millrace_requests_running 0" in metrics
    assert "millrace_disconnects_total 1" in metrics


async def test_requests_above_the_limit_get_429():
    engine = WritingEngine("x")
    async with served(engine, limits=ServerLimits(requests=2)) as client:
        engine.gate.clear()
        ask = {"model": "tiny", "messages": ASK}
        waiting = [asyncio.create_task(client.chat.completions.create(**ask)) for _ in range(2)]
        await until(lambda: len(engine.requests) == 2)
        with pytest.raises(openai.RateLimitError, match="busy with 2 requests"):
            await client.chat.completions.create(**ask)
        engine.gate.set()
        await asyncio.gather(*waiting)
        await client.chat.completions.create(**ask)


async def test_metrics_count_requests_and_tokens():
    async with served(WritingEngine("abc")) as client, aiohttp.ClientSession() as http:
        await client.chat.completions.create(model="tiny", messages=ASK)
        stream = await client.chat.completions.create(model="tiny", messages=ASK, stream=True)
        async for _ in stream:
            pass
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("large")
        async with http.get(f"{root_of(client)}metrics") as response:
            assert response.content_type == "text/plain"
            lines = (await response.text()).splitlines()
    assert 'millrace_requests_total{path="/v1/chat/completions",status="200"} 2' in lines
    assert 'millrace_requests_total{path="/v1/models/{name}",status="404"} 1' in lines
    assert "millrace_completion_tokens_total 8" in lines
    assert 'millrace_time_to_first_token_seconds_bucket{le="+Inf"} 1' in lines
    assert "millrace_request_seconds_count 2" in lines


@pytest.mark.parametrize(
    ("health", "status"),
    [
        (Health(status="ok", engines=2, serving=2), 200),
        (Health(status="degraded", engines=2, serving=1), 200),
        (Health(status="down", engines=2, serving=0), 503),
    ],
)
async def test_health_is_ok_while_an_engine_serves(health: Health, status: int):
    async with (
        served(WritingEngine("x"), health=lambda: health) as client,
        aiohttp.ClientSession() as http,
        http.get(f"{root_of(client)}health") as response,
    ):
        assert response.status == status
        assert await response.json() == health.model_dump()
