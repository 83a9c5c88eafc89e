"""Runs whose episodes are played in other processes: workers of the run, and external programs."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from project import Command, make_project, steps_in

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "external-environments.md"
ENVIRONMENT = """
import asyncio


async def play(task, agent):
    first = await agent.complete(task.prompt)
    await asyncio.sleep(0.05)
    second = await agent.complete(f"{task.prompt}{first.text}+1=")
    return float("1" in second.text)
"""


def worker_named(name: str, parent: Command) -> psutil.Process:
    for child in psutil.Process(parent.process.pid).children(recursive=True):
        if name in child.cmdline():
            return child
    raise AssertionError(f"no {name}")


@pytest.mark.slow
def test_run_trains_on_episodes_of_workers_that_are_killed(tmp_path, commands):
    project = make_project(
        tmp_path / "controller",
        trainer={"steps": 6},
        environment={"function": "play.py:play", "workers": 1, "remote": 1},
        cluster={"address": "tcp://127.0.0.1:0", "ticket": "secret/ticket.json"},
    )
    (project / "play.py").write_text(ENVIRONMENT)
    ticket = project / "secret" / "ticket.json"
    run = Command("train", "run.toml", folder=project)
    commands.append(run)
    run.wait_for(ticket)
    host = Command("env-worker", ticket, folder=tmp_path / "elsewhere")
    commands.append(host)
    run.wait_for(project / "run" / "metrics.jsonl", lines=1)
    worker_named("environment-0", run).send_signal(signal.SIGKILL)
    run.wait_for(project / "run" / "metrics.jsonl", lines=3)
    worker_named("environment-1", host).send_signal(signal.SIGKILL)
    code, stdout, stderr = run.finish()
    assert code == 0, stderr
    assert "Waiting for 1 environment worker from other hosts" in stdout
    assert "if that has left, run `millrace join --role environment` on any host" in stdout + stderr
    assert "environment-1 was killed by SIGKILL" in host.finish()[1]  # and asked for its place
    assert steps_in(project / "run" / "metrics.jsonl") == [1, 2, 3, 4, 5, 6]
    summary = json.loads((project / "run" / "summary.json").read_text())
    assert summary["restarts"] == {"environment-0": 1, "environment-1": 1}
    inspected = Command("inspect", "run", "--ledger", folder=project)
    commands.append(inspected)
    code, stdout, stderr = inspected.finish()  # fails if a task was lost or trained twice
    assert (code, stderr) == (0, "")


@pytest.mark.slow
def test_run_trains_on_groups_of_the_program_in_the_guide(tmp_path, commands):
    project = make_project(
        tmp_path / "run", trainer={"steps": 3}, environment={"external": "127.0.0.1:0"}
    )
    run = Command("train", "run.toml", folder=project, env={"PYTHONUNBUFFERED": "1"})
    commands.append(run)
    assert run.process.stdout is not None
    for line in run.process.stdout:
        if found := re.search(r"post groups at (http://\S+)", line):
            break
    else:
        assert run.process.stderr is not None
        pytest.fail(f"the run ended: {run.process.stderr.read()}")
    (program,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    playing = subprocess.Popen(
        [sys.executable, "-c", program],
        env={"RUN_URL": found[1]},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        code, _, stderr = run.finish()
        assert code == 0, stderr
        _, complaint = playing.communicate(timeout=30)
        assert (playing.returncode, complaint) == (0, "")
    finally:
        playing.kill()
    assert steps_in(project / "run" / "metrics.jsonl") == [1, 2, 3]
