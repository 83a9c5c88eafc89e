"""Grammar-constrained replies of a real engine with a random model."""

import asyncio
import json
import sys
from contextlib import asynccontextmanager

import numpy as np
import openai
import pytest
import torch
from chat_engine import user
from engine_rig import Collected
from in_process_engine import InProcessEngine
from talking_model import (
    END,
    TOKENIZER,
    agent_on,
    assert_says_the_same,
    make_engine,
    make_model,
    make_trainer,
)

from millrace.core.errors import TaskError
from millrace.core.records import Completion, Episode, Group, Request, Sampling, Score, Task
from millrace.environments.tools.calls import FORMATS
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.models.grammars import GrammarCompiler, grammar_of
from millrace.serving.api.openapi import Health
from millrace.serving.metrics import ServerMetrics
from millrace.serving.options import ServerLimits
from millrace.serving.served_model import ServedModel
from millrace.serving.server import http_listener, make_app
from millrace.training.packing.packer import pack

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

HEALTH = Health(status="ok", engines=1, serving=1)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ann", "bob"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["name", "age", "notes"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
PROMPT = np.array(TOKENIZER.encode("Who is it?"), np.int32)


def request(id: str, *, guided: bool = True, n: int = 1, partial=None, **sampling) -> Request:
    grammar = grammar_of(FORMAT) if guided else None
    settings = Sampling(**{"max_new_tokens": 300, **sampling}, grammar=grammar)
    return Request(id=id, prompt=PROMPT, sampling=settings, n=n, seed=3, partial=partial)


def finish(engine: EmbeddedEngine, *requests: Request) -> dict[str, list[Completion]]:
    for one in requests:
        engine.add_request(one)
    collected = Collected()
    while engine.has_work:
        collected.add(engine.step())
    return collected.by_request()


def assert_valid(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def assert_same(ours: Completion, theirs: Completion) -> None:
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_k": 4}, {"top_p": 0.5}])
def test_completions_follow_their_schema(sampling):
    done = finish(make_engine(), request("a", n=3, **sampling))
    for completion in done["a"]:
        assert completion.finish == "stop"
        assert_valid(completion.text)


def test_grammars_do_not_affect_other_sequences():
    free = request("free", guided=False, max_new_tokens=40)
    (alone,) = finish(make_engine(), free)["free"]
    together = finish(make_engine(), free, request("guided", n=2))
    assert_same(together["free"][0], alone)


@pytest.mark.parametrize("sampling", [{}, {"top_k": 4}])
def test_multi_step_decoding_follows_the_same_grammar(sampling):
    requests = [request("guided", n=2, **sampling), request("free", guided=False, **sampling)]
    expected = finish(make_engine(), *requests)
    done = finish(make_engine(decode_steps=4), *requests)
    for id, completions in expected.items():
        for ours, theirs in zip(done[id], completions, strict=True):
            assert_same(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [{}, {"top_k": 4}])
def test_gpu_engine_follows_a_schema_beside_multi_step_decoding(sampling):
    requests = [request("guided", n=4, **sampling), request("free", guided=False, n=4, **sampling)]
    done = finish(make_engine(device="cuda", decode_steps=8), *requests)
    for completion in done["guided"]:
        assert completion.finish == "stop"
        assert np.isfinite(completion.logprobs).all()
        assert_valid(completion.text)


def test_interrupted_completion_resumes_its_grammar():
    (whole,) = finish(make_engine(), request("a"))["a"]
    at = len(whole.tokens) // 2
    partial = Completion(
        tokens=whole.tokens[:at],
        logprobs=whole.logprobs[:at],
        versions=whole.versions[:at],
        finish="interrupt",
        text="",
    )
    (resumed,) = finish(make_engine(), request("a", partial=partial))["a"]
    assert_same(resumed, whole)


def test_logprobs_are_restricted_to_the_grammar():
    (done,) = finish(make_engine(), request("a", temperature=0.7))["a"]
    model = make_model()
    ids = torch.from_numpy(np.concatenate([PROMPT, done.tokens]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(ids).logits[0, len(PROMPT) - 1 : -1].float() / 0.7
    compiler = GrammarCompiler(TOKENIZER, vocab_size=len(TOKENIZER), eos_ids=[END])
    guide = compiler.matcher(grammar_of(FORMAT))
    assert guide is not None
    for place, token in enumerate(done.tokens.tolist()):
        allowed = torch.from_numpy(guide.allowed(done.tokens[:place]))
        left = logits[place].masked_fill(~allowed, -torch.inf).log_softmax(-1)
        assert done.logprobs[place] == pytest.approx(float(left[token]), abs=1e-5)


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


@asynccontextmanager
async def client_of(engine: EmbeddedEngine, *, form: str = "hermes"):
    remote = InProcessEngine(engine, receiver=None)  # type: ignore[arg-type]
    running = asyncio.create_task(remote.run())
    model = ServedModel(
        remote,
        tokenizer=TOKENIZER,
        name="tiny",
        max_context=2048,
        tool_format=FORMATS[form],
        metrics=ServerMetrics(),
    )
    app = make_app(model, limits=ServerLimits(), health=lambda: HEALTH)
    async with http_listener(app, host="127.0.0.1", port=0) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client
    model.close()
    running.cancel()


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
