"""Classes for TRL's environment_factory with a scripted model."""

import asyncio
import sqlite3
import threading

import pytest
from chat_engine import ChatEngine, player_of

from millrace.core.errors import ConfigError, TaskError
from millrace.core.records import Task
from millrace.environments.adapters import (
    EnvironmentFactory,
    split_rewards,
)
from millrace.environments.replay.schema import EpisodeLimits
from millrace.environments.rollouts.partial_rollouts import Attempt
from millrace.environments.threads import LoopThread
from millrace.environments.tools.functions import tool_of
from millrace.scoring.pool import function_scorer

TASK = Task(prompt="Count to 2.", columns={"goal": 2})


class Counter:
    """Count in a database that only its own thread can use."""

    def __init__(self) -> None:
        self._database = sqlite3.connect(":memory:")
        self._database.execute("create table clicks (at int)")
        self.num_resets = 0

    def reset(self, goal: int, **row) -> str:
        self._database.execute("delete from clicks")
        self.goal = goal
        self.num_resets += 1
        return f" The goal is {goal}."

    def click(self, times: int) -> int:
        """Click.

        Args:
            times: how often
        """
        self._database.executemany("insert into clicks values (?)", [(1,)] * times)
        return self.clicks

    async def wait(self) -> str:
        """Do nothing."""
        await asyncio.sleep(0)
        return "waited"

    @property
    def clicks(self) -> int:
        return self._database.execute("select count(*) from clicks").fetchone()[0]

    def _hidden(self) -> None:
        raise AssertionError("not a tool")


class Judging(Counter):
    def get_reward(self) -> float:
        return 10.0 * (self.clicks == self.goal)


def reached(completions, environments, goal, **columns):
    assert all(messages[0]["role"] == "assistant" for messages in completions)
    return [float(env.clicks == g) for env, g in zip(environments, goal, strict=True)]


async def patience(environments, prompts):
    return [0.25 * len(environments) if "The goal is 2." in prompts[0][-1]["content"] else None]


def length(completions, **columns):
    return [0.0] * len(completions)


@pytest.fixture
def play():
    with LoopThread("environments") as thread:

        async def play(environment, answer, task=TASK, *, group_size=1, **rules):
            engine = ChatEngine(answer)
            player = player_of(environment, engine, thread=thread, **rules)
            group = await player.play_for_training(task, attempt=Attempt(0), group_size=group_size)
            return group.episodes, engine

        yield play


async def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


async def test_tools_of_the_run_are_offered_beside_the_methods(play):
    class Served(EnvironmentFactory):
        async def __call__(self, task, agent):
            agent.tools = (tool_of(double),)  # as environment.mcp does
            return await super().__call__(task, agent)

    _, engine = await play(Served(Counter), clicking(2))
    assert '"name": "double"' in engine.prompts[0]
    assert '"name": "click"' in engine.prompts[0]


def with_scorers(environment, *functions):
    specs = [function_scorer(function) for function in functions]
    return split_rewards(specs, environment, tasks=[TASK])


def clicking(times: int):
    call = f'<tool_call>\n{{"name": "click", "arguments": {{"times": {times}}}}}\n</tool_call>'
    return lambda prompt: "Done." if "<tool_response>" in prompt else call


async def test_public_methods_are_tools_and_reset_extends_the_prompt(play):
    (episode,), engine = await play(EnvironmentFactory(Judging), clicking(2))
    assert episode.reward == 10.0
    assert episode.counts == {"tool_calls": 1}
    assert "Count to 2. The goal is 2.<|im_end|>" in engine.prompts[0]
    for name, is_tool in {"click": 1, "wait": 1, "reset": 0, "get_reward": 0, "_hidden": 0}.items():
        assert (f'"name": "{name}"' in engine.prompts[0]) == bool(is_tool)
    assert "how often" in engine.prompts[0]


async def test_reward_functions_with_environments_run_in_the_object_thread(play):
    others, environment = with_scorers(EnvironmentFactory(Counter), reached, patience, length)
    assert [spec.name for spec in others] == ["length"]
    right, _ = await play(environment, clicking(2), group_size=2)
    wrong, _ = await play(environment, clicking(3))
    assert [episode.reward for episode in (*right, *wrong)] == [1.25, 1.25, 0.25]


async def test_objects_are_reset_and_reused_in_their_own_thread(play):
    made: list[Counter] = []

    def make() -> Counter:
        made.append(Judging())
        return made[-1]

    environment = EnvironmentFactory(make)
    for _ in range(3):
        await play(environment, clicking(2))
    (only,) = made
    assert only.num_resets == 3


async def test_object_with_a_hanging_tool_is_discarded_without_waiting(play):
    class Hanging(Judging):
        gate = threading.Event()

        def click(self, times: int) -> int:
            """Hang."""
            self.gate.wait()
            return 0

    environment = EnvironmentFactory(Hanging)
    limits = EpisodeLimits(tool_timeout_s=0.1, episode_timeout_s=1.0)
    (episode,), engine = await play(environment, clicking(1), limits=limits)
    assert "took longer than 0.1 s" in engine.prompts[-1]
    assert episode.ending == "timeout"  # get_reward waits behind the tool
    Hanging.gate.set()


async def test_episode_at_the_turn_limit_is_still_scored(play):
    call = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
    _, environment = with_scorers(EnvironmentFactory(Counter), reached)
    (episode,), _ = await play(
        environment,
        lambda _: call,
        Task(prompt="?", columns={"goal": 0}),
        limits=EpisodeLimits(max_turns=2),
    )
    assert (episode.reward, episode.ending) == (1.0, "turns")


async def test_task_column_selects_one_of_several_environments(play):
    environment = EnvironmentFactory({"count": Counter, "judge": Judging})
    task = Task(prompt="?", columns={"goal": 2, "environment": "judge"})
    (episode,), _ = await play(environment, clicking(2), task)
    assert episode.reward == 10.0
    with pytest.raises(TaskError, match=r"environment = None, which is none of .* count, judge"):
        await play(environment, clicking(2))


def test_invalid_factories_and_scorers_raise_config_error():
    with pytest.raises(ConfigError, match="'object' has no reset"):
        EnvironmentFactory(object)
    with pytest.raises(ConfigError, match="'reached' needs the column 'goal', which task 0"):
        split_rewards(
            [function_scorer(reached)], EnvironmentFactory(Counter), tasks=[Task(prompt="?")]
        )
    (spec,), _ = with_scorers(None, reached)
    with pytest.raises(ConfigError, match=r"needs 'environments', which only"):
        spec.type.check([TASK], name="reached")
