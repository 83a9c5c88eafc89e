"""Episodes of several turns that resume after a crash of the controller."""

import asyncio
from contextlib import suppress

import numpy as np
import pytest
from chat_engine import ChatEngine, player_of
from tool_user import caller, user, with_a_tool

from millrace.core.records import Task
from millrace.environments.rollouts.partial_rollouts import Attempt, PartialRollout
from millrace.environments.threads import LoopThread

TASK = Task(prompt="a", columns={"value": "12"})


@pytest.fixture(scope="module")
def thread():
    with LoopThread("environments") as thread:
        yield thread


class Guess:
    """Each turn shows what came before it; the third ends the episode. `calls` counts what the
    environment does besides."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, task, agent):
        messages = [user(f"{task.prompt} {agent.rng.integers(1000)}")]
        for _ in range(3):
            self.calls += 1
            reply = await agent.chat(messages)
            messages += [reply, user(f"{reply.text}?")]
        return float(len(messages))


async def crash(function, answer, *, thread, done):
    """The saved tokens of a group whose controller dies once `done` returns True."""
    engine = ChatEngine(answer)
    attempt = Attempt(3)
    attempt.partial = PartialRollout()
    playing = asyncio.create_task(
        player_of(function, engine, thread=thread).play_for_training(
            TASK, attempt=attempt, group_size=2
        )
    )
    while not done(engine):  # noqa: ASYNC110 - the environments have a loop of their own
        await asyncio.sleep(0.001)
    playing.cancel()
    with suppress(asyncio.CancelledError):
        await playing
    return attempt.partial.take_new()


async def resume(function, answer, *, thread, saved):
    engine = ChatEngine(answer)
    attempt = Attempt(3)
    attempt.partial = PartialRollout(saved)
    player = player_of(function, engine, thread=thread)
    return (
        await player.play_for_training(TASK, attempt=attempt, group_size=2),
        engine,
        attempt.partial,
    )


def holding(answer, *, after):
    """Answers `after` prompts, and then none."""
    num_answered = 0

    async def held(prompt):
        nonlocal num_answered
        num_answered += 1
        if num_answered > after:
            await asyncio.Event().wait()
        return answer(prompt)

    return held


def assert_same_group(group, other):
    for mine, theirs in zip(group.rollouts, other.rollouts, strict=True):
        np.testing.assert_array_equal(mine.tokens, theirs.tokens)
        np.testing.assert_array_equal(mine.mask, theirs.mask)
        np.testing.assert_array_equal(mine.engine_logprobs, theirs.engine_logprobs)
    assert [e.reward for e in group.episodes] == [e.reward for e in other.episodes]


async def test_saved_turns_are_not_sampled_again(thread):
    def answer(prompt):
        return str(len(prompt))

    undisturbed, engine, _ = await resume(Guess(), answer, thread=thread, saved=[])
    assert len(engine.requests) == 6
    saved = await crash(
        Guess(), holding(answer, after=3), thread=thread, done=lambda e: len(e.requests) == 5
    )
    group, engine, partial = await resume(Guess(), answer, thread=thread, saved=saved)
    assert len(engine.requests) == 3
    assert partial.num_resumed > 0
    assert partial.unused.num_tokens == 0
    assert_same_group(group, undisturbed)


async def test_tools_run_again_and_saved_turns_are_used_while_their_results_match(thread):
    undisturbed, _, _ = await resume(with_a_tool, caller, thread=thread, saved=[])
    saved = await crash(
        with_a_tool, holding(caller, after=3), thread=thread, done=lambda e: len(e.requests) == 4
    )
    group, engine, _ = await resume(with_a_tool, caller, thread=thread, saved=saved)
    assert len(engine.requests) == 1
    assert [episode.counts for episode in group.episodes] == [{"tool_calls": 1}] * 2
    assert_same_group(group, undisturbed)


async def test_diverging_resumed_environment_is_answered_by_the_engine(thread):
    clock = iter(range(100))

    async def by_the_clock(task, agent):
        first = await agent.chat([user(task.prompt)])
        second = await agent.chat([user(f"{first.text} {next(clock)}")])
        return float(len(second.text))

    def say(prompt):
        return str(len(prompt))

    saved = await crash(
        by_the_clock, holding(say, after=3), thread=thread, done=lambda e: len(e.requests) == 4
    )
    group, engine, partial = await resume(by_the_clock, say, thread=thread, saved=saved)
    assert len(engine.requests) == 2
    assert partial.unused.num_tokens > 0
    assert all(len(episode.turns) == 2 for episode in group.episodes)
