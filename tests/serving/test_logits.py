"""Top logprobs, penalties, biases and echoed prompts through the API."""

import numpy as np
import openai
import pytest
import torch
from chat_engine import user
from in_process_client import client_of
from talking_model import TOKENIZER, agent_on, make_engine, make_model

from millrace.core.errors import TaskError

PROMPT = np.array(TOKENIZER.encode("Who is it?"), np.int32)


async def test_penalties_are_for_agents_that_are_not_trained():
    async with agent_on(make_engine()) as (agent, _cast):
        with pytest.raises(TaskError, match=r"presence_penalty.* cannot be trained"):
            await agent.chat([user("Who?")], presence_penalty=1.0)
        await agent.role("judge", trained=False).chat([user("Who?")], presence_penalty=1.0)


async def test_top_logprobs_of_chats_are_the_same_when_streamed():
    ask = {"model": "tiny", "messages": [user("Who?")], "seed": 1, "max_tokens": 8}
    ask |= {"logprobs": True, "top_logprobs": 3, "presence_penalty": 0.5}
    async with client_of(make_engine()) as client:
        whole = await client.chat.completions.create(**ask)
        stream = await client.chat.completions.create(**ask, stream=True)
        chunks = [c.choices[0].logprobs async for c in stream if c.choices[0].logprobs]
    assert whole.choices[0].logprobs is not None
    rows = whole.choices[0].logprobs.content or []
    assert len(rows) == 8
    streamed = [row for chunk in chunks for row in chunk.content or []]
    for row, other in zip(rows, streamed, strict=True):
        assert row.token == other.token
        assert row.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [each.token for each in row.top_logprobs] == [
            each.token for each in other.top_logprobs
        ]
        logprobs = [each.logprob for each in row.top_logprobs]
        assert len(logprobs) == 3
        assert logprobs == sorted(logprobs, reverse=True)
        assert row.logprob <= logprobs[0]


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("as_tokens", [False, True])
async def test_echoed_prompt_comes_with_its_logprobs(max_tokens: int, as_tokens: bool):
    text = "Who is it?"
    prompt = TOKENIZER.encode(text) if as_tokens else text
    ask = {"model": "tiny", "prompt": [prompt, prompt[:1]], "temperature": 0, "echo": True}
    async with client_of(make_engine()) as client:
        reply = await client.completions.create(**ask, max_tokens=max_tokens, logprobs=2)
        plain = await client.completions.create(**ask, max_tokens=max_tokens)
    assert [choice.text for choice in plain.choices] == [choice.text for choice in reply.choices]
    choice, short = reply.choices
    assert choice.text.startswith(text)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 2 * max_tokens
    assert choice.logprobs is not None
    rows, tops = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
    assert rows is not None
    assert tops is not None
    assert len(rows) == len(tops) == len(PROMPT) + max_tokens
    assert rows[0] is tops[0] is None
    with torch.no_grad():
        ids = torch.from_numpy(PROMPT.astype(np.int64))[None]
        logprobs = make_model()(ids).logits[0, :-1].float().log_softmax(-1)
    expected = logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1)
    np.testing.assert_allclose(rows[1 : len(PROMPT)], expected, atol=1e-4)
    best = [max(top.values()) for top in tops[1 : len(PROMPT)]]
    np.testing.assert_allclose(best, logprobs.amax(-1), atol=1e-4)
    # Greedy tokens are the likeliest ones, in exactly the same number.
    assert rows[len(PROMPT) :] == [max(top.values()) for top in tops[len(PROMPT) :]]
    assert short.logprobs is not None
    assert (short.logprobs.token_logprobs or [])[:1] == [None]


async def test_biases_reach_the_engine_through_the_api():
    letter = TOKENIZER.encode("x")[0]
    async with client_of(make_engine()) as client:
        reply = await client.completions.create(
            model="tiny", prompt="Who?", max_tokens=5, logit_bias={str(letter): 100}
        )
        with pytest.raises(openai.BadRequestError, match="outside"):
            await client.completions.create(model="tiny", prompt="x", logit_bias={"999999": 1})
    assert reply.choices[0].text == "xxxxx"
