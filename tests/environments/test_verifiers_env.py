"""Real environments of the verifiers package; `make test-adapters` has it in a venv of its own.

Its pins do not go with those of the other tests, so here these are skipped.
"""

import sys

import pytest
from chat_engine import ChatEngine, player_of

from millrace.core.errors import ConfigError, TaskError
from millrace.core.records import Task
from millrace.environments.function_environment import lifetime
from millrace.environments.replay.schema import EpisodeLimits
from millrace.environments.rollouts.partial_rollouts import Attempt
from millrace.environments.threads import LoopThread
from millrace.serving.programs.verifiers_env import VerifiersEnvironment


def test_missing_verifiers_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ConfigError, match=r"install millrace\[verifiers-envs\]"):
        VerifiersEnvironment(None)


def environment_of(**harness) -> VerifiersEnvironment:
    vf = pytest.importorskip("verifiers.v1")
    from verifiers_sums import SumConfig, TwoTurnsConfig

    seat = vf.AgentConfig(
        runtime=vf.SubprocessConfig(), harness=TwoTurnsConfig(id="verifiers_sums", **harness)
    )
    config = vf.SingleAgentEnvConfig(taskset=SumConfig(id="verifiers_sums"), agent=seat)
    return VerifiersEnvironment(vf.load_environment(config))


async def play(environment, answer, task, *, group_size=2, **rules):
    engine = ChatEngine(answer)
    with LoopThread("environments") as thread:
        async with lifetime(environment, thread=thread):
            player = player_of(environment, engine, thread=thread, **rules)
            group = await player.play_for_training(task, attempt=Attempt(0), group_size=group_size)
    return group.episodes, engine


async def test_verifiers_environment_plays_through_the_gateway_with_its_own_rewards():
    environment = environment_of()
    tasks = environment.tasks()
    assert [task.prompt[-1]["content"] for task in tasks] == ["0+1=", "1+1=", "2+1="]
    episodes, engine = await play(
        environment, lambda prompt: "It is 3." if "sure" in prompt else "2?", tasks[2], group_size=3
    )
    assert [episode.reward for episode in episodes] == [2.0] * 3
    for episode in episodes:
        assert [turn.completion for turn in episode.turns] == ["2?", "It is 3."]
        assert len(episode.rollouts) == 1  # the second turn continues the first
    assert any("2+1=" in prompt for prompt in engine.prompts)
    assert all(request.sampling.temperature == 1.0 for request in engine.requests)
    (wrong, _), _engine = await play(environment, lambda _: "4", tasks[2])
    assert wrong.reward == 0.0


async def test_verifiers_episode_at_a_limit_is_marked():
    environment = environment_of()
    (episode, _), _engine = await play(
        environment, lambda _: "2?", environment.tasks()[0], limits=EpisodeLimits(max_turns=1)
    )
    assert (episode.ending, episode.reward) == ("turns", 0.0)


async def test_failure_before_the_first_call_raises_task_error():
    environment = environment_of(fails=True)
    with pytest.raises(TaskError, match=r"failed before it called the model: .*no luck"):
        await play(environment, lambda _: "2", environment.tasks()[0])


async def test_tasks_must_come_from_the_taskset():
    with pytest.raises(TaskError, match="verifiers_task = None, which is not in the"):
        await play(environment_of(), lambda _: "2", Task(prompt="?"))
