"""Programs that call the agent of their episode over HTTP with the official client."""

import asyncio
import json

import numpy as np
import openai
import pytest
from chat_engine import ChatEngine, player_of
from families import FAMILIES

from millrace.core.errors import WorkerError
from millrace.core.records import Task
from millrace.environments.replay.schema import EpisodeLimits
from millrace.environments.rollouts.partial_rollouts import Attempt
from millrace.serving.programs.gateway import Gateway

TASK = Task(prompt="How much is it?")
ASK = [{"role": "user", "content": TASK.prompt}]
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "The value of a key.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
CALLS = {
    "chatml": 'I look.\n<tool_call>\n{"name": "lookup", "arguments": {"key": "a"}}\n</tool_call>',
    "llama3": '{"name": "lookup", "parameters": {"key": "a"}}',
    "mistral": '[TOOL_CALLS][{"name": "lookup", "arguments": {"key": "a"}}]',
    "gemma": '```tool_code\nlookup(key="a")\n```',
}


def client_of(session, **settings) -> openai.AsyncOpenAI:
    key = settings.pop("key", session.key)
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=key, max_retries=0, **settings)


def environment(playing):
    """An environment that plays with a client of the episode's session."""
    gateway = Gateway()

    async def play(task, agent):
        async with gateway.open(agent) as session, client_of(session) as client:
            return await session.guard(playing(client, session))

    return play


async def play_group(function, engine, *, thread, group_size=1, **settings):
    player = player_of(function, engine, thread=thread, **settings)
    return await player.play_for_training(TASK, attempt=Attempt(3), group_size=group_size)


@pytest.mark.parametrize("family", CALLS)
async def test_tool_turns_through_the_gateway_form_one_rollout(family, thread):
    async def playing(client, _session) -> float:
        messages: list = list(ASK)
        for _ in range(3):
            reply = await client.chat.completions.create(
                model="gpt-whatever", messages=messages, tools=[LOOKUP], temperature=0.1
            )
            message = reply.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return float(message.content == "It is 12.")
            (call,) = message.tool_calls
            assert json.loads(call.function.arguments) == {"key": "a"}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "12"})
        return -1.0

    answers = iter([CALLS[family], "It is 12."])
    engine = ChatEngine(lambda _: next(answers), family=family)
    group = await play_group(environment(playing), engine, thread=thread, family=family)
    (episode,) = group.episodes
    assert (episode.reward, len(episode.turns), episode.counts) == (1.0, 2, {})
    (rollout,) = episode.rollouts
    first, second = engine.requests
    assert rollout.tokens[: len(second.prompt)].tolist() == second.prompt.tolist()
    sampled = np.flatnonzero(rollout.mask)
    assert sampled[0] == len(first.prompt)
    assert sampled[-1] == len(rollout.tokens) - 1
    assert 0 < rollout.mask.sum() < len(sampled) + len(first.prompt)
    assert {request.sampling.temperature for request in engine.requests} == {1.0}


async def test_streams_choices_and_logprobs_work_through_the_gateway(thread):
    async def playing(client, _session) -> float:
        ask = {"model": "x", "messages": ASK, "logprobs": True, "n": 2, "stop": "END"}
        whole = await client.chat.completions.create(**ask, max_tokens=20)
        options = {"include_usage": True}
        stream = await client.chat.completions.create(**ask, stream=True, stream_options=options)
        *chunks, last = [chunk async for chunk in stream]
        texts = ["", ""]
        for chunk in chunks:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert [choice.message.content for choice in whole.choices] == texts == ["hi", "hi"]
        assert {row.logprob for row in whole.choices[0].logprobs.content} == {-0.5}
        assert last.usage.completion_tokens == whole.usage.completion_tokens > 0
        completion = await client.completions.create(model="x", prompt="So", max_tokens=5)
        assert completion.choices[0].text == "hi"
        assert [model.id async for model in client.models.list()] == ["policy"]
        return 0.5

    engine = ChatEngine(lambda _: "hi")
    (episode,) = (await play_group(environment(playing), engine, thread=thread)).episodes
    assert (episode.reward, len(episode.turns)) == (0.5, 5)
    assert engine.requests[0].sampling.max_new_tokens == 20
    assert engine.requests[0].sampling.stop == ("END",)
    assert engine.requests[-1].sampling.max_new_tokens == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_through_the_gateway_form_the_rollout_of_a_chat(stream, thread):
    async def playing(client, _session) -> float:
        items: list = list(ASK)
        tool = {"type": "function", **LOOKUP["function"]}
        for _ in range(2):
            ask = {"model": "x", "input": items, "tools": [tool], "temperature": 0.1}
            if stream:
                async with client.responses.stream(**ask) as events:
                    reply = await events.get_final_response()
            else:
                reply = await client.responses.create(**ask)
            items += [item.to_dict() for item in reply.output]
            for call in (item for item in reply.output if item.type == "function_call"):
                result = {"type": "function_call_output", "call_id": call.call_id, "output": "12"}
                items.append(result)
        return float(reply.output_text == "It is 12.")

    answers = iter([CALLS["chatml"], "It is 12."])
    engine = ChatEngine(lambda _: next(answers))
    (episode,) = (await play_group(environment(playing), engine, thread=thread)).episodes
    assert (episode.reward, len(episode.turns), episode.counts) == (1.0, 2, {})
    (rollout,) = episode.rollouts  # the second turn extends the tokens of the first
    assert rollout.tokens[: len(engine.requests[1].prompt)].tolist() == list(
        engine.requests[1].prompt
    )
    assert {request.sampling.temperature for request in engine.requests} == {1.0}
    assert (rollout.versions[rollout.mask] >= 0).all()


async def test_wrong_keys_and_late_calls_are_refused_without_affecting_others(thread):
    gateway, sessions, told = Gateway(), [], []

    async def play(task, agent):
        async with gateway.open(agent) as session, client_of(session) as client:
            sessions.append(session)
            while len(sessions) < 2:  # noqa: ASYNC110 - the other episode's turn
                await asyncio.sleep(0.01)
            other = sessions[0] if sessions[1] is session else sessions[1]
            for key in ("wrong", other.key):
                with pytest.raises(openai.AuthenticationError):
                    await client_of(session, key=key).chat.completions.create(
                        model="x", messages=ASK
                    )
            await client.chat.completions.create(model="x", messages=ASK)
        with pytest.raises(openai.APIStatusError, match="episode is over") as info:
            await client_of(session).chat.completions.create(model="x", messages=ASK)
        told.append(info.value.status_code)
        with pytest.raises(openai.AuthenticationError):
            await client_of(session, key="wrong").chat.completions.create(model="x", messages=ASK)
        return 1.0

    engine = ChatEngine(lambda _: "hi")
    group = await play_group(play, engine, thread=thread, group_size=2)
    assert told == [410, 410]
    assert [len(episode.turns) for episode in group.episodes] == [1, 1]
    assert len(engine.requests) == 2


async def test_episode_at_its_limit_is_marked_and_its_program_gets_410(thread):
    told = []

    async def playing(client, _session) -> float:
        for _ in range(3):
            try:
                await client.chat.completions.create(model="x", messages=ASK)
            except openai.APIStatusError as error:
                told.append(error.status_code)
                raise
        return 1.0

    group = await play_group(
        environment(playing),
        ChatEngine(lambda _: "hi"),
        thread=thread,
        limits=EpisodeLimits(max_turns=2),
        ended_reward=-1.0,
    )
    (episode,) = group.episodes
    assert (episode.ending, episode.reward, len(episode.turns)) == ("turns", -1.0, 2)
    assert told in ([410], [])  # the episode does not wait for the response to be read


async def test_invalid_request_is_reported_to_the_program(thread):
    async def playing(client, _session) -> float:
        for messages in ([{"role": "user"}], [{"role": "robot", "content": "x"}]):
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="x", messages=messages)
        with pytest.raises(openai.BadRequestError, match="takes one text prompt"):
            await client.completions.create(model="x", prompt=[1, 2])
        await client.chat.completions.create(model="x", messages=ASK)
        return 1.0

    engine = ChatEngine(lambda _: "hi")
    (episode,) = (await play_group(environment(playing), engine, thread=thread)).episodes
    assert (episode.reward, len(episode.turns)) == (1.0, 1)


async def test_settings_of_a_program_are_applied_or_refused(thread):
    async def playing(client, _session) -> float:
        ask = {"model": "x", "messages": ASK, "tools": [LOOKUP]}
        both = await client.chat.completions.create(**ask)
        one = await client.chat.completions.create(**ask, parallel_tool_calls=False)
        counts = [len(reply.choices[0].message.tool_calls or ()) for reply in (both, one)]
        assert counts == [2, 1]
        kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
        with pytest.raises(openai.BadRequestError, match=r"set environment\.template"):
            await client.chat.completions.create(**ask, extra_body=kwargs)
        return 1.0

    engine = ChatEngine(lambda _: CALLS["chatml"] * 2)
    (episode,) = (await play_group(environment(playing), engine, thread=thread)).episodes
    assert (episode.reward, len(episode.turns)) == (1.0, 2)


async def test_penalties_are_refused_where_tokens_are_trained(thread):
    async def playing(client, _session) -> float:
        for settings in ({"presence_penalty": 1.0}, {"logit_bias": {"5": -100}}):
            with pytest.raises(openai.BadRequestError, match="cannot be trained"):
                await client.chat.completions.create(model="x", messages=ASK, **settings)
        await client.chat.completions.create(model="x", messages=ASK, presence_penalty=0)
        return 1.0

    engine = ChatEngine(lambda _: "hi")
    (episode,) = (await play_group(environment(playing), engine, thread=thread)).episodes
    assert (episode.reward, len(episode.turns), len(engine.requests)) == (1.0, 1, 1)


async def test_lost_engine_ends_the_episode_even_if_the_program_continues(thread):
    async def playing(client, _session) -> float:
        with pytest.raises(openai.InternalServerError, match="has failed"):
            await client.chat.completions.create(model="x", messages=ASK)
        await asyncio.Event().wait()
        return 1.0

    class DeadEngine(ChatEngine):
        async def generate(self, request, on_tokens=None):
            raise WorkerError("Worker 'engine-0' died.", worker="engine-0")

    with pytest.raises(WorkerError):
        await play_group(environment(playing), DeadEngine(lambda _: ""), thread=thread)


def test_all_tool_formats_are_tested():
    assert set(CALLS) <= set(FAMILIES)
