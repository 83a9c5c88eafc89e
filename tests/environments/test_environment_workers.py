"""Environments in worker processes: the same episodes as in a thread, also when a worker dies."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from chat_engine import TOKENIZERS, ChatEngine, player_of
from tool_user import caller

from millrace.cluster.fork_server import PRELOAD
from millrace.cluster.hub import Hub
from millrace.cluster.launchers.launcher import Launcher, WorkerProcess, WorkerSpec
from millrace.cluster.supervision.pool import RestartPolicy, WorkerPool
from millrace.config import load_config
from millrace.core.errors import ConfigError, TaskError
from millrace.core.records import Group, Task
from millrace.environments.branching import Pivot
from millrace.environments.function_environment import FunctionEnvironment
from millrace.environments.replay.schema import EpisodeLimits
from millrace.environments.rollouts.partial_rollouts import Attempt, Expired
from millrace.environments.threads import LoopThread
from millrace.environments.workers import EnvironmentWorkers
from millrace.run.environment import build_workers

ENVIRONMENTS = Path(__file__).with_name("worker_environments.py")

pytestmark = pytest.mark.usefixtures("warm_fork_server")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZERS["chatml"].save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return folder


@asynccontextmanager
async def open_workers(
    function: str, *, tokenizer: Path, tmp_path: Path, count: int = 1, record: int = 0
) -> AsyncIterator[EnvironmentWorkers]:
    config = load_config(
        {
            "model": str(tokenizer),
            "environment": {"function": f"{ENVIRONMENTS}:{function}", "workers": count},
            "monitoring": {"record_episodes": record},
        }
    )
    async with contextlib.AsyncExitStack() as stack:
        hub = Hub(log_dir=tmp_path / "logs", on_event=lambda *_: None, preload=PRELOAD)
        await stack.enter_async_context(hub)
        policy = RestartPolicy(max_restarts=3, backoff_s=0.0)
        pool = await stack.enter_async_context(WorkerPool(hub.launch, policy=policy))
        parts = {"worker_pool": pool, "hub": hub, "launcher": hub.local, "private": tmp_path}
        workers = build_workers(config, None, **parts)
        await workers.start()
        stack.push_async_callback(workers.close)
        yield workers


async def play(workers, engine, task, *, group_size=2, recipe=None, **rules) -> Group:
    """Play a group in the workers."""
    with LoopThread("unused") as thread:
        player = player_of(None, engine, thread=thread, **rules)
    environment = player.environment
    assert isinstance(environment, FunctionEnvironment)
    player.environment = replace(environment, host=workers.play, recipe=recipe)
    return await player.play_for_training(task, attempt=Attempt(3), group_size=group_size)


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - another process decides
        await asyncio.sleep(0.01)


def assert_same_group(group: Group, other: Group) -> None:
    for mine, theirs in zip(group.episodes, other.episodes, strict=True):
        assert (mine.reward, mine.counts, mine.recording) == (
            theirs.reward,
            theirs.counts,
            theirs.recording,
        )
        assert [*map(asdict, mine.turns)] == [*map(asdict, theirs.turns)]
    for mine, theirs in zip(group.rollouts, other.rollouts, strict=True):
        for name in ("tokens", "mask", "engine_logprobs", "versions"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))


async def test_episodes_in_workers_equal_those_in_a_thread(thread, tokenizer, tmp_path):
    from worker_environments import with_a_tool

    task = Task(prompt="a", columns={"value": "12", "grid": np.arange(4)})
    local = player_of(with_a_tool, ChatEngine(caller), thread=thread, records=True)
    here = await local.play_for_training(task, attempt=Attempt(3), group_size=4)
    opened = open_workers("with_a_tool", tokenizer=tokenizer, tmp_path=tmp_path, count=2, record=1)
    async with opened as workers:
        there = await play(workers, ChatEngine(caller), task, group_size=4)
        pivot = Pivot(branches=3)
        trees = await play(workers, ChatEngine(caller), task, group_size=4, recipe=pivot)
    assert [episode.reward for episode in there.episodes] == [1.0] * 4
    assert there.episodes[0].recording is not None
    assert_same_group(there, here)
    assert [e.branching.parent for e in trees.episodes if e.branching] == [None, 0, 0, 0]


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "processes"
    path.touch()
    return path


async def test_killed_worker_costs_no_episode_and_no_sampled_turn(tokenizer, tmp_path, file):
    task = Task(prompt="a", columns={"file": str(file)})
    gate = asyncio.Event()

    async def answer(prompt: str) -> str:
        if prompt.count("assistant") == 3:  # the last turn
            await gate.wait()
        return str(len(prompt))

    opened = open_workers("three_turns", tokenizer=tokenizer, tmp_path=tmp_path, count=2)
    async with opened as workers:
        engine = ChatEngine(answer)
        playing = asyncio.create_task(play(workers, engine, task, group_size=4))
        await until(lambda: len(engine.requests) == 12)
        first = {int(line) for line in file.read_text().split()}
        assert len(first) == 2
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: len(file.read_text().split()) == 24)
        gate.set()
        group = await playing
        assert len(engine.requests) == 12  # nothing was sampled twice
        again = await play(workers, ChatEngine(answer), task, group_size=4)
    assert first.isdisjoint(int(line) for line in file.read_text().split()[12:])
    assert_same_group(group, again)


async def test_errors_of_an_environment_fail_its_group_with_one_sentence(tokenizer, tmp_path, file):
    def stale(_prompt: str) -> str:
        raise Expired("group 3")

    def refuse(_prompt: str) -> str:
        raise TaskError("The engine refuses the grammar.")

    opened = open_workers("misbehaving", tokenizer=tokenizer, tmp_path=tmp_path)
    async with opened as workers:
        for prompt, sentence in [
            ("raise", r"'misbehaving' raised ValueError: no such move \(episode 0, .*\); fix the"),
            ("exit", r"'misbehaving' raised SystemExit: 3 \(episode 0, .*\); fix the"),
            (
                "object",
                r"group 3: its episode cannot be sent to the controller: .* builtins\.object",
            ),
            ("die", r"episode 0 lost its environment worker 3 times, .*exited with code 3"),
        ]:
            with pytest.raises(TaskError, match=sentence):
                await play(workers, ChatEngine(str), Task(prompt=prompt), group_size=1)
        recipe = Pivot(branches=2)  # its episodes are recorded
        with pytest.raises(TaskError, match=r"group 3: its episode cannot be sent .* surrogates"):
            await play(workers, ChatEngine(str), Task(prompt="surrogate"), recipe=recipe)
        with pytest.raises(TaskError, match="group 3: A PlayEpisode holds a value that cannot"):
            await play(workers, ChatEngine(str), Task(prompt="a", columns={"x": object()}))
        with pytest.raises(Expired):
            await play(workers, ChatEngine(stale), Task(prompt="a"))
        with pytest.raises(TaskError, match="The engine refuses the grammar"):
            await play(workers, ChatEngine(refuse), Task(prompt="a"))
        group = await play(workers, ChatEngine(lambda _: "ab"), Task(prompt="a"))
        assert [episode.reward for episode in group.episodes] == [2.0, 2.0]


async def test_cancelled_turns_and_episodes_end_on_both_sides(tokenizer, tmp_path, file):
    num_cancelled = 0

    async def answer(prompt: str) -> str:
        nonlocal num_cancelled
        if "again" in prompt:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                num_cancelled += 1
                raise
        return "ab"

    task = Task(prompt="wait", columns={"file": str(file)})
    opened = open_workers("misbehaving", tokenizer=tokenizer, tmp_path=tmp_path)
    async with opened as workers:
        engine = ChatEngine(answer)
        limits = EpisodeLimits(turn_timeout_s=0.2)
        group = await play(workers, engine, task, group_size=1, limits=limits)
        assert group.episodes[0].ending == "timeout"
        assert num_cancelled == 1
        file.write_text("")
        playing = asyncio.create_task(play(workers, engine, task, group_size=1))
        await until(lambda: len(engine.requests) == 4)
        playing.cancel()
        await asyncio.wait({playing})
        await until(lambda: file.read_text() == "ended" and num_cancelled == 2)


class RecordingLauncher(Launcher):
    """Starts workers on this host and keeps what it was asked for."""

    def __init__(self, local: Launcher) -> None:
        self.local = local
        self.started: list[tuple[str, bool]] = []

    async def start(self, spec: WorkerSpec) -> WorkerProcess:
        self.started.append((spec.name, spec.has_secrets))
        return await self.local.start(spec)


async def test_remote_workers_are_started_by_the_launcher_of_the_run(tokenizer, tmp_path):
    function = f"{ENVIRONMENTS}:misbehaving"
    config = load_config(
        {
            "model": str(tokenizer),
            "environment": {"function": function, "workers": 1, "remote": 1},
            "cluster": {"launcher": "my_package:MyCluster"},
        }
    )
    hub = Hub(log_dir=tmp_path / "logs", on_event=lambda *_: None, preload=PRELOAD)
    async with hub, WorkerPool(hub.launch) as pool:
        launcher = RecordingLauncher(hub.local)
        parts = {"worker_pool": pool, "hub": hub, "launcher": launcher, "private": tmp_path}
        workers = build_workers(config, None, **parts)
        await workers.start()
        group = await play(workers, ChatEngine(lambda _: "ab"), Task(prompt="a"))
        await workers.close()
    assert [episode.reward for episode in group.episodes] == [2.0, 2.0]
    assert launcher.started == [("environment-1", True)]


async def test_remote_workers_need_an_importable_environment(tokenizer, tmp_path):
    async def play(task, agent):
        return 1.0

    config = load_config({"model": str(tokenizer), "environment": {"remote": 1}})
    pool = WorkerPool(lambda *_: asyncio.sleep(0))
    hub = Hub(log_dir=tmp_path, on_event=lambda *_: None)
    parts = {"launcher": Launcher(), "private": tmp_path / "private"}
    with pytest.raises(ConfigError, match=r"environment.remote = 1, but other hosts cannot import"):
        build_workers(config, play, worker_pool=pool, hub=hub, **parts)
