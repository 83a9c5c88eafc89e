"""Programs as environments: real processes that call the model over HTTP without any package."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from chat_engine import ChatEngine, player_of

from millrace.core.errors import TaskError
from millrace.core.records import Task
from millrace.environments.rollouts.partial_rollouts import Attempt
from millrace.environments.threads import LoopThread
from millrace.serving.programs.command_environment import CommandEnvironment

TASK = Task(prompt="2+3=", columns={"answer": "5", "hint": "small"})
AGENT = """
import json, os, sys, urllib.request

task = json.loads(sys.stdin.readline())

def ask(text):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "x", "messages": [{"role": "user", "content": text}]}).encode(),
        {
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]
"""


def program(folder: Path, body: str) -> list[str]:
    (folder / "agent.py").write_text(AGENT + body)
    return ["python", str(folder / "agent.py")]


async def play(
    environment: CommandEnvironment, engine: ChatEngine, *, thread, group_size=2, **settings
):
    player = player_of(environment, engine, thread=thread, **settings)
    return await player.play_for_training(TASK, attempt=Attempt(0), group_size=group_size)


async def test_program_result_is_scored_and_its_calls_are_trained(tmp_path, thread):
    seen = []

    def score(task, result) -> float:
        seen.append(result.exit_code)
        return float(result.stdout.strip() == task.columns["answer"])

    command = program(
        tmp_path, "print(ask(task['prompt']), end='')\nassert set(task) == {'prompt'}"
    )
    answers = iter(["5", "6"])
    engine = ChatEngine(lambda _: next(answers))
    group = await play(CommandEnvironment(command, score=score), engine, thread=thread)
    assert sorted(episode.reward for episode in group.episodes) == [0.0, 1.0]
    assert seen == [0, 0]
    assert {len(episode.rollouts) for episode in group.episodes} == {1}
    assert "2+3=" in engine.prompts[0]


async def test_program_gets_selected_columns_and_scorers_reward_it(tmp_path, thread):
    command = program(tmp_path, "assert task['hint'] == 'small' and 'answer' not in task\nask('x')")
    engine = ChatEngine(lambda _: "hi")
    group = await play(
        CommandEnvironment(command, columns=["hint"]), engine, thread=thread, group_size=1
    )
    assert [(e.reward, e.ending) for e in group.episodes] == [(None, "done")]


async def test_crashed_program_marks_only_its_episode_and_its_stderr_is_logged(tmp_path, thread):
    command = program(tmp_path, "if ask('x') == 'bad':\n    raise ValueError('it said \\x1b[2J')")
    answers = iter(["good", "bad"])
    log = tmp_path / "logs" / "programs.log"

    async def score(task, result) -> float:
        return 1.0

    environment = CommandEnvironment(command, score=score, log=log)
    engine = ChatEngine(lambda _: next(answers))
    group = await play(environment, engine, thread=thread, ended_reward=-1.0)
    ended = sorted((e.ending, e.reward) for e in group.episodes)
    assert ended == [("crash", -1.0), ("done", 1.0)]
    assert not any(episode.was_cut for episode in group.episodes)
    assert "exited with code 1" in log.read_text()
    assert r"ValueError: it said \x1b[2J" in log.read_text()  # not the control character


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("", "exited with code 0 without calling the model"),
        ("os.environ['OPENAI_API_KEY'] = 'wrong'\nask('x')", "HTTP Error 401: Unauthorized"),
        ("sys.exit('no luck')", "no luck"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    ],
    ids=["silent", "key", "exit", "killed"],
)
async def test_program_that_never_calls_the_model_fails_with_the_reason(
    body, words, tmp_path, thread
):
    environment = CommandEnvironment(program(tmp_path, body))
    with pytest.raises(TaskError, match=words):
        await play(environment, ChatEngine(lambda _: "hi"), thread=thread, group_size=1)


async def test_missing_program_is_an_error(thread):
    with pytest.raises(TaskError, match=r"nothing-here cannot be run: No such file"):
        await play(
            CommandEnvironment(["nothing-here"]), ChatEngine(str), thread=thread, group_size=1
        )


async def test_program_is_killed_at_its_time_limit(tmp_path, thread):
    environment = CommandEnvironment(
        program(tmp_path, "import time\ntime.sleep(1000)"), timeout_s=0.1
    )
    with pytest.raises(
        TaskError, match=r"ended \(timeout\) before the model sampled any trained token"
    ):
        await play(environment, ChatEngine(lambda _: "hi"), thread=thread, group_size=1)


async def test_program_and_its_children_end_with_the_episode(tmp_path, thread):
    body = """
import subprocess, time
child = subprocess.Popen(["sleep", "1000"])
pathlib.Path(task["file"]).write_text(f"{os.getpid()} {child.pid} .")
time.sleep(1000)
"""
    pids = tmp_path / "pids"
    task = Task(prompt="x", columns={"file": str(pids)})
    environment = CommandEnvironment(program(tmp_path, f"import pathlib{body}"), columns=["file"])
    player = player_of(environment, ChatEngine(lambda _: "hi"), thread=thread)
    playing = asyncio.create_task(player.play_for_training(task, attempt=Attempt(0), group_size=1))
    await until(lambda: pids.exists() and pids.read_text().endswith("."))
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    started = [int(pid) for pid in pids.read_text().split()[:2]]
    await until(lambda: not any(map(is_alive, started)))


async def test_running_programs_end_cleanly_with_their_thread(tmp_path, caplog):
    file = tmp_path / "pid"
    body = "import pathlib, time\npathlib.Path(task['file']).write_text(f'{os.getpid()} .')\n"
    environment = CommandEnvironment(program(tmp_path, body + "time.sleep(1000)"), columns=["file"])
    task = Task(prompt="x", columns={"file": str(file)})
    with LoopThread("environments") as thread:
        player = player_of(environment, ChatEngine(lambda _: "hi"), thread=thread)
        playing = asyncio.create_task(
            player.play_for_training(task, attempt=Attempt(0), group_size=1)
        )
        await until(lambda: file.exists() and file.read_text().endswith("."))
    with pytest.raises(asyncio.CancelledError):
        await playing
    gc.collect()  # unclosed resources would warn now
    assert not is_alive(int(file.read_text().split()[0]))
    assert not caplog.records


async def test_child_processes_do_not_delay_the_result(tmp_path, thread):
    body = "import subprocess\nask('x')\nsubprocess.Popen(['sleep', '1000'])"
    group = await play(
        CommandEnvironment(program(tmp_path, body)),
        ChatEngine(lambda _: "hi"),
        thread=thread,
        group_size=1,
    )
    assert [episode.ending for episode in group.episodes] == ["done"]


def test_programs_die_with_the_process_that_runs_them(tmp_path: Path):
    script = """
import asyncio
from millrace.serving.programs.command_environment import run_program
asyncio.run(run_program(["sh", "-c", "echo $$ > pid; sleep 1000"]))
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    pid = int((tmp_path / "pid").read_text())
    assert is_alive(pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while is_alive(pid):
        time.sleep(0.05)


async def until(condition) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for is another process
        await asyncio.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
