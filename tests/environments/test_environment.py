import asyncio
import itertools
import json
import threading
import time

import numpy as np
import pytest
from chat_engine import TOKENIZERS, ChatEngine, player_of, user
from tool_user import caller, lookup, with_a_tool

from millrace.core.errors import ConfigError, TaskError
from millrace.core.records import Task
from millrace.environments.function_environment import check_function
from millrace.environments.replay.schema import EpisodeLimits, EpisodeOver
from millrace.environments.rollouts.partial_rollouts import Attempt, Expired
from millrace.journal.database import decode_group, encode_group

TASK = Task(prompt="a", columns={"value": "12"})


async def play(function, answer, *, thread, group_size=2, task=TASK, **settings):
    family = settings.get("family", "chatml")
    engine = ChatEngine(answer, family=family)
    player = player_of(function, engine, thread=thread, **settings)
    return await player.play_for_training(task, attempt=Attempt(3), group_size=group_size), engine


async def once(task, agent):
    reply = await agent.chat([user(task.prompt)])
    return float(reply.text == task.columns["value"])


async def test_environment_runs_once_per_episode_and_returns_its_reward(thread):
    answers = itertools.cycle(["12", "1"])
    group, engine = await play(once, lambda _: next(answers), thread=thread, group_size=4)
    assert sorted(episode.reward for episode in group.episodes) == [0.0, 0.0, 1.0, 1.0]
    assert [request.n for request in engine.requests] == [1] * 4
    assert len({request.session for request in engine.requests}) == 4
    assert len({(request.seed, request.index) for request in engine.requests}) == 4


async def test_tool_result_is_sent_to_the_model(thread):
    group, engine = await play(with_a_tool, caller, thread=thread)
    assert [episode.reward for episode in group.episodes] == [1.0, 1.0]
    for episode in group.episodes:
        assert episode.counts == {"tool_calls": 1}
        assert len(episode.turns) == 2
        (rollout,) = episode.rollouts
        sampled = TOKENIZERS["chatml"].decode(rollout.tokens[rollout.mask])
        assert sampled.endswith("</tool_call><|im_end|>12<|im_end|>")
    assert len({request.session for request in engine.requests}) == 2


async def test_group_with_a_tool_call_of_a_large_number_can_be_journaled(thread):
    asked = []

    def half(of: int) -> int:
        """Half of a number."""
        asked.append(of)
        return of // 2

    async def compute(task, agent):
        await agent.run([user("Half of 10^30?")], tools=[half])
        return 1.0

    def answer(prompt):
        arguments = {"name": "half", "arguments": {"of": 10**30}}
        is_first = "<tool_response>" not in prompt
        return f"<tool_call>\n{json.dumps(arguments)}\n</tool_call>" if is_first else "Done."

    group, _engine = await play(compute, answer, thread=thread, group_size=1)
    assert asked == [10**30]
    read = decode_group(encode_group(group), task=TASK)
    (call,) = read.episodes[0].turns[1].prompt[1]["tool_calls"]
    assert call["function"]["arguments"] == {"of": str(10**30)}


@pytest.mark.parametrize(
    ("written", "told", "counts"),
    [
        ("<tool_call>lookup(a)</tool_call>", "cannot be read", {"malformed_calls": 1}),
        (
            '<tool_call>{"name": "loup", "arguments": {}}</tool_call>',
            "Error: there is no tool 'loup'; available tools: lookup.",
            {"tool_calls": 1, "tool_errors": 1},
        ),
        (
            '<tool_call>{"name": "lookup", "arguments": {"key": "broken"}}</tool_call>',
            "Error: KeyError: 'broken'",
            {"tool_calls": 1, "tool_errors": 1},
        ),
    ],
)
async def test_failed_tool_calls_are_reported_to_the_model_and_counted(
    written, told, counts, thread
):
    replies = iter([written, "12"])
    group, engine = await play(with_a_tool, lambda _: next(replies), thread=thread, group_size=1)
    assert told in engine.prompts[1]
    assert group.episodes[0].counts == counts
    assert group.episodes[0].reward == 1.0


async def test_context_overflow_in_a_later_turn_ends_the_episode(thread):
    async def endless(task, agent):
        messages = [user("start")]
        while True:
            reply = await agent.chat(messages)
            messages += [reply, user("more " * 15)]

    size = len(TOKENIZERS["chatml"].encode("more " * 15))
    group, _engine = await play(endless, lambda _: "ok", thread=thread, max_context=6 * (size + 25))
    for episode in group.episodes:
        assert (episode.ending, episode.reward, episode.was_cut) == ("length", 0.0, True)
        assert len(episode.turns) == 6  # the seventh prompt did not fit
        assert len(episode.rollouts) == 1


async def test_first_prompt_beyond_the_context_raises_task_error(thread):
    with pytest.raises(
        TaskError, match=r"group 3: (its|the) prompt has \d+ tokens, but the context"
    ):
        await play(once, lambda _: "1", thread=thread, max_context=5)


async def test_environment_can_return_a_reward_after_the_turn_limit(thread):
    async def generous(task, agent):
        try:
            while True:
                await agent.complete("again ")
        except EpisodeOver:
            with pytest.raises(EpisodeOver):
                await agent.complete("and again")
            return 0.5

    group, _engine = await play(
        generous, lambda _: "1", thread=thread, limits=EpisodeLimits(max_turns=3)
    )
    assert [(e.ending, e.reward, len(e.turns)) for e in group.episodes] == [("turns", 0.5, 3)] * 2


async def test_limit_that_agents_reach_in_a_task_group_ends_the_episode(thread):
    async def debate(task, agent):
        await agent.complete("x")
        async with asyncio.TaskGroup() as speaking:
            for name in ("left", "right"):
                speaking.create_task(agent.role(name).complete(name))
        return 1.0

    limits = EpisodeLimits(max_turns=1)
    group, _engine = await play(debate, lambda _: "1", thread=thread, limits=limits)
    assert [(e.ending, e.reward, len(e.turns)) for e in group.episodes] == [("turns", 0.0, 1)] * 2


async def test_timeouts_mark_only_the_slow_episode(thread):
    async def slow_tool(task, agent):
        first = await agent.complete("x")
        if first.text == "slow":
            await asyncio.sleep(30)
        if first.text == "stuck":
            await agent.complete("stuck?")
        return 1.0

    async def answer(prompt):
        if prompt == "stuck?":
            await asyncio.sleep(30)
        return next(texts)

    texts = iter(["slow", "stuck", "quick"])
    limits = EpisodeLimits(episode_timeout_s=1.0, turn_timeout_s=0.2)
    group, _engine = await play(slow_tool, answer, thread=thread, group_size=3, limits=limits)
    outcomes = {e.turns[0].completion: (e.ending, e.reward) for e in group.episodes}
    assert outcomes == {
        "slow": ("timeout", 0.0),
        "stuck": ("timeout", 0.0),
        "quick": ("done", 1.0),
    }


async def test_redundant_group_keeps_the_episodes_that_finish_first(thread):
    async def answer(_):
        if next(numbers) in (1, 3):
            await asyncio.sleep(30)
        return "12"

    numbers = itertools.count()
    group, engine = await play(once, answer, thread=thread, group_size=3, redundancy=2)
    assert len(engine.requests) == 5
    assert [episode.reward for episode in group.episodes] == [1.0] * 3


async def test_tokens_of_cancelled_redundant_episodes_are_counted(thread):
    async def chain(task, agent):
        first = await agent.complete("x")
        await agent.complete(f"{first.text}: slow?")
        return 1.0

    async def answer(prompt):
        if "slow?" in prompt and next(seconds) in (1, 3):
            await asyncio.sleep(30)
        return "12"

    seconds = itertools.count()
    player = player_of(chain, ChatEngine(answer), thread=thread, redundancy=2)
    attempt = Attempt(3)
    group = await player.play_for_training(TASK, attempt=attempt, group_size=3)
    per_turn = len(TOKENIZERS["chatml"].encode("12<|im_end|>"))
    assert attempt.given_up.num_tokens == 2 * per_turn  # the first turns of two episodes
    assert attempt.token_versions.num_tokens - attempt.given_up.num_tokens == group.num_sampled


async def test_raising_environment_fails_its_group_unless_redundant_episodes_remain(thread):
    async def fragile(task, agent):
        reply = await agent.complete("x")
        return 1 / len(reply.text.strip("0"))

    numbers = iter(["0", "1", "1", "0", "1"])
    with pytest.raises(TaskError, match=r"'fragile' raised ZeroDivisionError.*\.py:\d+\); fix"):
        await play(fragile, lambda _: next(numbers), thread=thread, group_size=2)
    group, _ = await play(
        fragile, lambda _: next(numbers), thread=thread, group_size=2, redundancy=1
    )
    assert len(group.episodes) == 2


async def test_environment_that_leaves_by_a_cancelled_task_or_exit_fails_its_group(thread):
    async def cancelled(task, agent):
        await agent.complete("x")
        waiting = asyncio.create_task(asyncio.sleep(30))
        waiting.cancel()
        await waiting

    async def leaving(task, agent):
        await agent.complete("x")
        raise SystemExit(2)

    with pytest.raises(TaskError, match=r"'cancelled' raised CancelledError.*; fix"):
        await play(cancelled, lambda _: "1", thread=thread)
    with pytest.raises(TaskError, match=r"'leaving' raised SystemExit: 2 .*; fix"):
        await play(leaving, lambda _: "1", thread=thread)
    group, _engine = await play(once, lambda _: "12", thread=thread)  # the thread still runs
    assert len(group.episodes) == 2


@pytest.mark.parametrize("returned", ["1.0", float("nan"), [1.0]])
async def test_invalid_reward_raises_task_error(returned, thread):
    async def odd(task, agent):
        await agent.complete("x")
        return returned

    with pytest.raises(TaskError, match=r"'odd' returned .*; return a finite number as the reward"):
        await play(odd, lambda _: "1", thread=thread)


async def test_environment_that_never_samples_raises_task_error(thread):
    async def silent(task, agent):
        return 1.0

    with pytest.raises(
        TaskError, match=r"'silent' ended .* before the model sampled any trained token"
    ):
        await play(silent, lambda _: "1", thread=thread)


async def test_calls_after_the_episode_raise_episode_over(thread):
    late = []

    async def hasty(task, agent):
        async def after():
            await asyncio.sleep(0.05)
            try:
                await agent.complete("y")
            except EpisodeOver:
                late.append("over")

        agent.left_behind = asyncio.create_task(after())
        await agent.complete("x")
        return 1.0

    _group, engine = await play(hasty, lambda _: "1", thread=thread, group_size=1)
    await asyncio.sleep(0.2)
    assert late == ["over"]
    assert len(engine.requests) == 1


async def test_expired_tokens_end_the_whole_group(thread):
    class Expiring(ChatEngine):
        async def generate(self, request, on_tokens=None, on_completion=None):
            raise Expired("group 3")

    player = player_of(once, Expiring(lambda _: "1"), thread=thread)
    with pytest.raises(Expired):
        await player.play_for_training(TASK, attempt=Attempt(3), group_size=2)


async def test_cancelling_a_group_cancels_its_environments(thread):
    ended = threading.Event()

    async def patient(task, agent):
        try:
            await agent.complete("x")
            await asyncio.sleep(30)
        finally:
            ended.set()

    playing = asyncio.create_task(play(patient, lambda _: "1", thread=thread, group_size=1))
    await asyncio.sleep(0.1)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert await asyncio.to_thread(ended.wait, 5)


async def test_blocking_environment_does_not_block_the_controller(thread):
    async def blocking(task, agent):
        await agent.complete("x")
        time.sleep(0.3)  # noqa: ASYNC251 - that is the point
        return 1.0

    playing = asyncio.create_task(play(blocking, lambda _: "1", thread=thread, group_size=1))
    turns = 0
    while not playing.done():
        await asyncio.sleep(0.01)
        turns += 1
    assert turns > 5


async def test_evaluation_has_no_redundant_episodes_and_no_expiry(thread):
    engine = ChatEngine(lambda _: "12")
    player = player_of(once, engine, thread=thread, redundancy=3)
    greedy = player.evaluating(engine=engine, temperature=0.0)
    group = await greedy.play_for_evaluation(TASK, number=0, group_size=1, name="evaluation")
    assert [request.expires for request in engine.requests] == [False]
    assert group.episodes[0].rollouts[0].sampling.temperature == 0


async def test_chat_accepts_sampling_settings_and_refuses_unknown_ones(thread):
    async def warm(task, agent):
        await agent.complete("x", temperature=0.5, max_new_tokens=7, stop="\n")
        with pytest.raises(TaskError, match="got tempratur, which is not a"):
            await agent.complete("x", tempratur=1)
        with pytest.raises(TaskError, match="temperature = 0, but greedy tokens cannot be trained"):
            await agent.complete("x", temperature=0)
        for row in ("hello", {"role": "user"}, {"role": "tool", "content": 5}, {"content": "x"}):
            with pytest.raises(TaskError, match=r"Message 1 is .*; a message is a dict"):
                await agent.chat([user("x"), row])
        return 1.0

    _group, engine = await play(warm, lambda _: "1", thread=thread, group_size=1)
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.max_new_tokens, sampling.stop) == (0.5, 7, ("\n",))


async def test_truncated_reply_is_not_trained_if_the_engine_reports_no_kept_ids(thread):
    """As servers of vLLM and SGLang; the scripted engine reports none either."""

    async def narrow(task, agent):
        judge = agent.role("judge", trained=False)
        assert (await judge.complete("x", top_k=2)).text == "1"
        with pytest.raises(
            TaskError, match=r"top_k, top_p or min_p cannot be trained, because this"
        ):
            await agent.complete("x", top_p=0.5)
        await agent.complete("x")
        return 1.0

    group, _engine = await play(narrow, lambda _: "1", thread=thread, group_size=1)
    assert len(group.episodes[0].rollouts) == 1


async def test_agent_run_calls_tools_until_a_reply_calls_none(thread):
    async def solve(task, agent):
        messages = await agent.run([user("What is a?")], tools=[lookup])
        return float(messages[-1]["content"] == "12")

    group, _ = await play(solve, caller, thread=thread)
    assert [episode.reward for episode in group.episodes] == [1.0, 1.0]


async def test_gemma_tools_are_introduced_as_text(thread):
    def answer(prompt):
        if "tool_output" not in prompt:
            return '```tool_code\nlookup(key="a")\n```'
        return prompt.rpartition("```tool_output\n")[2].partition("\n```")[0]

    group, _engine = await play(with_a_tool, answer, thread=thread, family="gemma")
    assert [episode.reward for episode in group.episodes] == [1.0, 1.0]
    assert all(len(episode.rollouts) == 1 for episode in group.episodes)


def test_invalid_environment_function_raises_config_error():
    def plain(task, agent):
        return 1.0

    async def alone(task):
        return 1.0

    with pytest.raises(ConfigError, match="'plain' is not a coroutine; define it with `async def"):
        check_function(plain)
    with pytest.raises(ConfigError, match="'alone' cannot be called with a task and an agent"):
        check_function(alone)
    assert check_function(once) is once


async def test_sampling_seeds_depend_only_on_group_episode_and_turn(thread):
    runs = []
    for _ in range(2):
        _, engine = await play(with_a_tool, caller, thread=thread, group_size=3)
        runs.append(sorted((r.id, r.seed, r.index) for r in engine.requests))
    assert runs[0] == runs[1]
    assert np.unique([(seed, index) for _, seed, index in runs[0]], axis=0).shape == (6, 2)


async def debate(task, agent):
    proposer, solver = agent.role("proposer"), agent.role("solver")
    judge = agent.role("judge", adapter="base")
    question = await proposer.complete("ask ")
    answer = await solver.complete(question.text)
    verdict = await judge.complete(answer.text)
    assert agent.role("solver") is solver
    return {"proposer": 0.0, "solver": 1.0, "judge": float(len(verdict.text))}


async def test_roles_have_own_conversations_and_only_the_policy_is_trained(thread):
    group, engine = await play(debate, lambda _: "12", thread=thread, group_size=1)
    (episode,) = group.episodes
    assert [rollout.agent for rollout in episode.rollouts] == ["proposer", "solver"]
    assert [turn.agent for turn in episode.turns] == ["proposer", "solver", "judge"]
    assert episode.reward == {"proposer": 0.0, "solver": 1.0, "judge": 2.0}
    assert [request.adapter for request in engine.requests] == [None, None, "base"]
    assert [request.expires for request in engine.requests] == [True, True, False]
    assert len({request.session for request in engine.requests}) == 3


async def test_role_of_the_policy_can_be_untrained(thread):
    async def rehearse(task, agent):
        await agent.role("opponent", trained=False).complete("x")
        await agent.complete("y")
        with pytest.raises(
            TaskError, match="'opponent' exists with adapter = None, model = None and trained"
        ):
            agent.role("opponent")
        with pytest.raises(TaskError, match="adapter 'base', which is never trained; remove"):
            agent.role("other", adapter="base", trained=True)
        return 1.0

    group, _ = await play(rehearse, lambda _: "1", thread=thread, group_size=1)
    assert [rollout.agent for rollout in group.rollouts] == [""]


async def test_every_trained_role_needs_a_reward(thread):
    async def forgetful(task, agent):
        await agent.role("a").complete("x")
        await agent.role("b").complete("x")
        return {"a": 1.0}

    with pytest.raises(TaskError, match="a dict with a number for each trained role"):
        await play(forgetful, lambda _: "1", thread=thread)
