"""Recorded episodes: restored, replayed, edited and refused."""

import asyncio
import itertools
import json

import msgspec
import numpy as np
import pytest
from chat_engine import TOKENIZERS, ChatEngine, player_of, user
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tool_user import caller, lookup, with_a_tool

from millrace.core.errors import ConfigError, ReplayError
from millrace.core.records import Completion, Episode, Kept, Task
from millrace.environments.function_environment import rerun
from millrace.environments.replay.recordings import (
    Line,
    episode_of,
    read_recordings,
    with_tool_results,
    write_recordings,
)
from millrace.environments.replay.schema import (
    EpisodeLimits,
    EpisodeOver,
    Recording,
    decode,
    encode,
)
from millrace.environments.rollouts.partial_rollouts import Attempt
from millrace.environments.tools.calls import ToolCall
from millrace.environments.tools.functions import tool_of

TASK = Task(prompt="a", columns={"value": "12"})
TOKENIZER = TOKENIZERS["chatml"]


CALL = ToolCall(id="call00000", name="lookup", arguments={"key": "a"})
TOOL = tool_of(lookup)


class RandomEngine(ChatEngine):
    """Return random tokens, logprobs, versions, kept ids and routes after a random delay."""

    def __init__(self, seed: int) -> None:
        super().__init__(lambda _: "")
        self._rng = np.random.default_rng(seed)

    async def generate(self, request, on_tokens=None, on_completion=None):
        rng, size = self._rng, int(self._rng.integers(1, 6))
        tokens = rng.integers(5, 60, size).astype(np.int32)
        await asyncio.sleep(float(rng.random()) / 500)
        rows = rng.integers(1, 4, size)
        return [
            Completion(
                tokens=tokens,
                logprobs=-rng.random(size).astype(np.float32),
                versions=rng.integers(0, 3, size).astype(np.int32),
                kept=Kept(
                    ids=rng.integers(0, 60, rows.sum()).astype(np.int32),
                    offsets=np.cumsum([0, *rows]).astype(np.int64),
                )
                if request.sampling.truncates
                else None,
                routes=rng.integers(0, 300, (size, 2, 3)).astype(np.uint16),
                finish="length",
                text=TOKENIZER.decode(tokens),
            )
        ]


async def wander(task, agent):
    """Take random turns, forks, tool calls and roles, some of them concurrently."""
    messages = [user(task.prompt)]
    for _ in range(agent.rng.integers(1, 5)):
        match agent.rng.integers(5):
            case 0:
                replies = await asyncio.gather(
                    agent.role("left").chat(messages),
                    agent.role("right", trained=False).chat(messages, temperature=0.5),
                    agent.complete("and "),
                )
                messages = [*messages, user(replies[0].text)]
            case 1:
                reply = await agent.chat(messages, top_k=3)
                await asyncio.gather(*(agent.fork(reply, at=0) for _ in range(2)))
            case 2:
                told = await agent._state.call_tool(CALL, {"lookup": TOOL})
                messages = [*messages, user(told)]
            case 3:
                messages = [user(f"So far {len(messages)}.")]
            case _:
                messages = [*messages, await agent.chat(messages), user("more")]
    await agent.chat(messages)
    return float(agent.rng.random())


async def recorded(function, engine, *, thread, **rules) -> Episode:
    player = player_of(function, engine, thread=thread, records=True, **rules)
    group = await player.play_for_training(TASK, attempt=Attempt(3), group_size=1)
    return group.episodes[0]


def read(episode: Episode) -> Recording:
    assert episode.recording is not None
    return decode(episode.recording, Recording)


def assert_same(left: Episode, right: Episode) -> None:
    """Assert that two episodes are equal bit for bit."""
    assert (left.reward, left.ending, left.counts) == (right.reward, right.ending, right.counts)
    assert [(t.prompt, t.completion, t.finish, t.agent) for t in left.turns] == [
        (t.prompt, t.completion, t.finish, t.agent) for t in right.turns
    ]
    assert len(left.rollouts) == len(right.rollouts)
    for mine, other in zip(left.rollouts, right.rollouts, strict=True):
        assert (mine.sampling, mine.agent) == (other.sampling, other.agent)
        arrays = [(r.tokens, r.mask, r.engine_logprobs, r.versions) for r in (mine, other)]
        if mine.routes is not None or other.routes is not None:
            arrays = [(*a, r.routes) for a, r in zip(arrays, (mine, other), strict=True)]
        if mine.kept is not None or other.kept is not None:
            arrays = [
                (*a, r.kept.ids, r.kept.offsets) for a, r in zip(arrays, (mine, other), strict=True)
            ]
        for a, b in zip(*arrays, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
def test_replayed_episode_equals_the_recorded_one(seed: int, thread):
    async def check():
        player = player_of(wander, RandomEngine(seed), thread=thread, records=True, max_context=900)
        player.seed = seed
        group = await player.play_for_training(TASK, attempt=Attempt(3), group_size=2)
        for episode in group.episodes:
            recording = read(episode)
            assert_same(episode_of(recording), episode)
            again = await rerun(recording, wander, tokenizer=TOKENIZER)
            assert_same(again, episode)
            assert again.recording == episode.recording

    asyncio.run(check())


async def test_replay_does_not_run_tools(thread):
    calls = itertools.count()

    def count(key: str) -> int:
        """Counts."""
        return next(calls)

    async def counted(task, agent):
        await agent.run([user("Go.")], tools=[count])
        return 1.0

    answers = iter(['<tool_call>{"name": "count", "arguments": {"key": "a"}}</tool_call>', "ok"])
    episode = await recorded(counted, ChatEngine(lambda _: next(answers)), thread=thread)
    again = await rerun(read(episode), counted, tokenizer=TOKENIZER)
    assert_same(again, episode)
    assert next(calls) == 1


async def test_replay_reruns_tools_in_which_agents_took_turns(thread):
    async def delegating(task, agent):
        async def ask(question: str) -> str:
            """Asks an expert, who asks another."""

            async def deeper(question: str) -> str:
                """Asks the other."""
                return (await agent.role("expert").role("other").chat([user(question)])).text

            messages = await agent.role("expert").run([user(question)], tools=[deeper])
            return messages[-1]["content"]

        messages = await agent.run([user("Begin.")], tools=[ask, lookup])
        return float(messages[-1]["content"] == "12")

    def call(name: str, **arguments: str) -> str:
        written = json.dumps({"name": name, "arguments": arguments})
        return f"<tool_call>{written}</tool_call>"

    answers = iter(
        [
            call("ask", question="What is a?"),
            call("deeper", question="And a?"),
            "twelve",
            "it is twelve",
            call("lookup", key="a"),
            "12",
        ]
    )
    episode = await recorded(delegating, ChatEngine(lambda _: next(answers)), thread=thread)
    assert [turn.agent for turn in episode.turns] == ["", "expert", "other", "expert", "", ""]
    assert episode.counts == {"tool_calls": 3}
    assert {rollout.agent for rollout in episode.rollouts} == {"", "expert", "other"}
    recording = read(episode)
    assert [row.has_turns for row in recording.tool_runs] == [True, True, False]
    assert_same(await rerun(recording, delegating, tokenizer=TOKENIZER), episode)
    with pytest.raises(ConfigError, match=r"result can be replaced; choose one of 2\."):
        with_tool_results(recording, {0: "no"})


async def test_diverging_environment_raises_replay_error_with_its_turn(thread):
    episode = await recorded(with_a_tool, ChatEngine(caller), thread=thread)

    async def otherwise(task, agent):
        messages = await agent.run([user(f"What is {task.prompt}?")], tools=[lookup])
        await agent.chat([*messages, user("sure?")])
        return 1.0

    async def worded(task, agent):
        await agent.chat([user("What was that?")])

    async def short(task, agent):
        await agent.chat([user(f"What is {task.prompt}?")], tools=[lookup])
        return 1.0

    recording = read(episode)
    for function, sentence in [
        (otherwise, "came to turn 2 which is not in the recording"),
        (worded, r"came to turn 0 with another prompt: from token \d+ on it is .*was that"),
        (short, r"came to the end before tool call 0 \(lookup\), which the recording has"),
    ]:
        with pytest.raises(ReplayError, match=rf"group 3, episode 0: .*{sentence}"):
            await rerun(recording, function, tokenizer=TOKENIZER)


async def test_turns_after_an_edited_tool_result_are_not_trained(thread):
    episode = await recorded(with_a_tool, ChatEngine(caller), thread=thread)
    edited = with_tool_results(read(episode), {0: "13"})
    again = await rerun(edited, with_a_tool, tokenizer=TOKENIZER)
    assert [turn.completion for turn in again.turns] == [t.completion for t in episode.turns]
    assert "13" in str(again.turns[1].prompt)
    (before,), (after,) = episode.rollouts, again.rollouts
    first = len(read(episode).turns[0].completion.tokens)
    assert after.num_sampled == first < before.num_sampled
    assert [row.is_recorded for row in read(again).turns] == [True, False]
    assert episode_of(msgspec.structs.replace(edited, reward=0.25)).reward == 0.25
    with pytest.raises(ConfigError, match=r"recording of group 3, episode 0, has no tool call 7"):
        with_tool_results(edited, {7: None})


async def test_replay_reaches_recorded_limits_at_once(thread):
    async def stuck(task, agent):
        await agent.complete("x")
        try:
            await agent.complete("stuck?")
        except EpisodeOver:
            return 0.5

    async def answer(prompt):
        if prompt == "stuck?":
            await asyncio.sleep(30)
        return "1"

    for limits in (
        EpisodeLimits(turn_timeout_s=0.2),
        EpisodeLimits(episode_timeout_s=0.2),
        EpisodeLimits(max_turns=1),
    ):
        episode = await recorded(stuck, ChatEngine(answer), thread=thread, limits=limits)
        recording = read(episode)
        slower = msgspec.structs.replace(
            recording, limits=EpisodeLimits(max_turns=limits.max_turns, episode_timeout_s=60)
        )
        async with asyncio.timeout(10):
            assert_same(await rerun(slower, stuck, tokenizer=TOKENIZER), episode)


async def test_invalid_recording_files_raise_config_error(tmp_path, thread):
    episode = await recorded(with_a_tool, ChatEngine(caller), thread=thread)
    line = Line(group=3, score=1.0, model="here", episode=read(episode))
    path = tmp_path / "episodes.jsonl"
    write_recordings(path, [line, line])
    assert [encode(each) for each in read_recordings(path)] == [encode(line)] * 2
    text = path.read_text()
    for wrong, sentence in [
        (
            text.replace('"schema":2', '"schema":1', 1),
            r"jsonl:1 is not a recorded episode",
        ),
        (text.replace('"ending"', '"end"'), r"unknown field `end` - at `\$.episode"),
        (
            text.replace('"shape":[', '"shape":[7,', 1),
            r"an array of shape \(7, \d+\) has \d+ bytes - at `\$.episode.entries",
        ),
        (text[:-9], r"episodes.jsonl:2 is not a recorded episode: Input data was truncated"),
    ]:
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=sentence):
            list(read_recordings(path))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        list(read_recordings(tmp_path / "none.jsonl"))


async def test_columns_that_json_cannot_hold_must_be_passed_again(thread):
    task = Task(prompt="a", columns={"value": "12", "grid": np.zeros(3)})
    player = player_of(with_a_tool, ChatEngine(caller), thread=thread, records=True)
    group = await player.play_for_training(task, attempt=Attempt(3), group_size=1)
    recording = read(group.episodes[0])
    with pytest.raises(ReplayError, match="columns grid of the task could not be recorded"):
        await rerun(recording, with_a_tool, tokenizer=TOKENIZER)
    assert_same(
        await rerun(recording, with_a_tool, tokenizer=TOKENIZER, task=task), group.episodes[0]
    )
