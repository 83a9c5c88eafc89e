"""`millrace serve` as real processes, with the official client."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import openai
import pytest
from chat_model import chat_tokenizer, make_chat_model
from fake_vllm import serving
from server_process import HEADERS, KEY, server_process

ASK = [{"role": "user", "content": "Count."}]
TOKENS = "millrace_completion_tokens_total"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server whose engine runs up to 16 sequences."""
    logs = tmp_path_factory.mktemp("logs")
    with server_process(model, "--engine.max_sequences", "16", logs=logs) as server:
        yield server.url


@pytest.fixture
async def client(server: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key=KEY, max_retries=0) as client:
        yield client


async def gauge(server: str, name: str) -> float:
    async with aiohttp.ClientSession(headers=HEADERS) as http:
        text = await (await http.get(f"{server}/metrics")).text()
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else -1.0


async def test_seeded_replies_are_equal_for_all_endpoints(client):
    ask = {"model": "tiny", "messages": ASK, "n": 3, "seed": 11, "max_tokens": 40, "top_p": 0.9}
    whole = await client.chat.completions.create(**ask, logprobs=True)
    texts, rows = [""] * 3, [[] for _ in range(3)]
    async for chunk in await client.chat.completions.create(**ask, logprobs=True, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        rows[choice.index] += (choice.logprobs and choice.logprobs.content) or []
    assert texts == [choice.message.content for choice in whole.choices]
    for own, choice in zip(rows, whole.choices, strict=True):
        assert [row.token for row in own] == [row.token for row in choice.logprobs.content]
    prompt = chat_tokenizer().apply_chat_template(
        ASK, add_generation_prompt=True, return_dict=False
    )
    del ask["messages"]
    answer = await client.completions.create(
        **ask, prompt=prompt, logprobs=0, extra_body={"return_token_ids": True}
    )
    assert [done.text for done in answer.choices] == texts
    for done, own in zip(answer.choices, rows, strict=True):
        expected = pytest.approx([row.logprob for row in own], abs=1e-5)
        assert done.logprobs.token_logprobs == expected
        assert done.versions == [0] * len(done.token_ids) == [0] * len(own)


@pytest.mark.slow
async def test_256_concurrent_streams_all_finish(client):
    async def stream(seed: int) -> tuple[str, int]:
        text, num_chunks = "", 0
        asked = await patient.completions.create(
            model="tiny", prompt="abc", seed=seed, max_tokens=24, stream=True
        )
        async for chunk in asked:
            text += chunk.choices[0].text
            num_chunks += 1
        assert chunk.choices[0].finish_reason in ("stop", "length")
        return text, num_chunks

    patient = client.with_options(timeout=120)  # connecting may take 5 s by default
    streamed = await asyncio.gather(*(stream(seed) for seed in range(256)))
    assert len({text for text, _ in streamed}) > 200
    assert max(num_chunks for _, num_chunks in streamed) > 10
    alone = await client.completions.create(model="tiny", prompt="abc", seed=200, max_tokens=24)
    assert alone.choices[0].text == streamed[200][0]


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnected_client_frees_its_engine_slots(client, server, stream):
    running = 'millrace_engine_running{engine="engine-0"}'
    before = await gauge(server, TOKENS)
    ask = {"model": "tiny", "prompt": "abc", "n": 16, "max_tokens": 500}
    asking = asyncio.create_task(client.completions.create(**ask, temperature=0, stream=stream))
    while await gauge(server, running) < 12:  # a request leaves a quarter of the slots free
        assert not asking.done() or stream, "it was answered before the test could leave"
        await asyncio.sleep(0.02)
    if stream:
        await (await asking).close()
    else:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    made = await gauge(server, TOKENS) - before
    while await gauge(server, running) > 0:  # noqa: ASYNC110 - it is another process
        await asyncio.sleep(0.02)
    assert made < 16 * 490, "it had come to its end by itself"


async def test_a_wrong_key_and_malformed_json_are_refused_and_others_served(client, server: str):
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()
    headers = {**HEADERS, "Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as http:
        response = await http.post(f"{server}/v1/completions", data=b'{"model": "tiny"')
        assert response.status == 400
        assert "not valid JSON" in json.loads(await response.read())["error"]["message"]
        body = {"model": "tiny", "prompt": [9999]}
        response = await http.post(f"{server}/v1/completions", json=body)
        assert response.status == 400
        assert "outside 0..127" in (await response.json())["error"]["message"]
    assert [model.id async for model in client.models.list()] == ["tiny"]


@pytest.mark.slow
async def test_each_engine_attaches_to_a_server_of_its_own_with_its_key(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SERVER_KEY", "right")
    with (
        serving(model, api_key="right") as (first, one),
        serving(model, api_key="right") as (second, other),
        server_process(
            model,
            *("--engines", "2", "--engine.type", "vllm"),
            *("--engine.options.attach", json.dumps([first, second])),
            *("--engine.options.api_key", "env:SERVER_KEY"),
            logs=tmp_path,
        ) as server,
        contextlib.closing(openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY)) as client,
    ):
        ask = {"model": "tiny", "messages": ASK, "max_tokens": 4}
        answer = await asyncio.to_thread(client.chat.completions.create, **ask)
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
        assert one.calls.count("/resume") == other.calls.count("/resume") == 1
