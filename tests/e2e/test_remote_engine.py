"""Runs with an engine that joins as if from another host, on one machine."""

import json
import time
from pathlib import Path

import psutil
import pytest
from project import Command, make_project, steps_in


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(
        tmp_path / "controller",
        trainer={"steps": 5},
        optimizer={"learning_rate": 1e-3},
        engine={"count": 0, "remote": 1},
        cluster={"address": "tcp://127.0.0.1:0", "ticket": "secret/ticket.json"},
    )


def start(project: Path, commands: list[Command], *settings: str) -> tuple[Command, Command]:
    """Start the run and the host that joins it."""
    ticket = project / "secret" / "ticket.json"
    run = Command("train", "run.toml", *settings, folder=project)
    commands.append(run)
    run.wait_for(ticket)
    host = Command("join", ticket, folder=project.parent / "elsewhere")
    commands.append(host)
    return run, host


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_run_trains_with_a_joined_engine_alone(project, commands, transport):
    ticket = project / "secret" / "ticket.json"
    run, host = start(project, commands, "--weights.transport", transport)
    secrets = json.loads(ticket.read_text())
    code, stdout, stderr = run.finish()
    assert code == 0, stderr
    assert "Waiting for 1 engine from other hosts" in stdout
    assert f"millrace join {ticket}" in stdout
    host_code, host_stdout, host_stderr = host.finish()
    assert (host_code, host_stderr) == (0, "")
    assert steps_in(project / "run" / "metrics.jsonl") == [1, 2, 3, 4, 5]
    assert list(ticket.parent.iterdir()) == []

    everything = [stdout, stderr, host_stdout]
    for folder in (project / "run", project.parent / "elsewhere"):
        files = (path for path in folder.rglob("*") if path.is_file())
        everything += [path.read_bytes().decode(errors="replace") for path in files]
    for secret in (secrets["keys"]["secret"], secrets["token"]):
        assert not [text for text in everything if secret in text]


@pytest.mark.slow
def test_dead_joined_engine_is_replaced_by_its_host_and_a_dead_host_by_another(project, commands):
    run, host = start(project, commands, "--weights.transport", "disk", "--trainer.steps", "8")
    run.wait_for(project / "run" / "metrics.jsonl", lines=2)
    children = psutil.Process(host.process.pid).children()
    (engine,) = [child for child in children if "--name" in child.cmdline()]
    engine.kill()
    run.wait_for(project / "run" / "metrics.jsonl", lines=5)
    host.process.kill()
    # A host that joins before the run has noticed the loss, and has paused, finds no free place.
    run.wait_for(project / "run" / "logs" / "warnings.log", lines=2)
    ticket = project / "secret" / "ticket.json"
    while run.process.poll() is None:
        if commands[-1].process.poll():
            commands.append(Command("join", ticket, folder=project.parent / "elsewhere"))
        time.sleep(0.1)
    code, stdout, stderr = run.finish()
    assert code == 0, stderr
    assert "'engine-0' was killed by SIGKILL" in stdout + stderr
    assert "Its host starts another; if that has left, run `millrace join`" in stdout + stderr
    assert steps_in(project / "run" / "metrics.jsonl") == list(range(1, 9))


@pytest.mark.slow
def test_engine_that_cannot_start_is_reported_with_its_host(project, commands):
    settings = ["--weights.transport", "disk", "--engine.options.kv_bytes", "10"]
    run, host = start(project, commands, *settings)
    code, _, stderr = run.finish()
    assert code == 2
    assert "error: On " in stderr
    assert ", for engine-0: " in stderr
    assert len(stderr.strip().splitlines()) == 1
    assert host.finish()[0] == 0
