"""Runs whose workers are killed, stopped, added and removed."""

import contextlib
import json
import signal
from pathlib import Path

import psutil
import pytest
from project import Command, make_project, steps_in

SETTINGS = {
    "sampling": {"max_new_tokens": 150},
    "journal": {"partial_every_s": 0.05},
    "weights": {"payload": "delta"},
}


class SupervisedRun(Command):
    def __init__(self, project: Path) -> None:
        super().__init__("train", "run.toml", folder=project)
        self.path = project / "run"

    def wait_for_step(self, step: int) -> None:
        self.wait_for(self.path / "metrics.jsonl", lines=step)

    def worker(self, name: str) -> psutil.Process:
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
                command = process.cmdline()
                if name in command and "--name" in command:
                    return process
        raise AssertionError(f"no {name}")

    def assert_finished(self, *, steps: int) -> dict:
        code, _, stderr = self.finish()
        assert code == 0, stderr
        assert steps_in(self.path / "metrics.jsonl") == list(range(1, steps + 1))
        return json.loads((self.path / "summary.json").read_text())


@pytest.fixture
def start(tmp_path):
    runs: list[SupervisedRun] = []

    def start(**sections) -> SupervisedRun:
        runs.append(SupervisedRun(make_project(tmp_path, **{**SETTINGS, **sections})))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.communicate()


@pytest.mark.slow  # tests/chaos/test_short_soak.py kills them in the default run
def test_run_survives_killed_engine_and_trainer_and_keeps_sampled_tokens(start):
    run = start(trainer={"steps": 8, "groups_per_step": 2}, checkpoint={"every_steps": 2})
    run.wait_for_step(3)
    # Both at once: they restart concurrently, and the engine needs weights of the new trainer.
    for name in ("engine-0", "trainer"):
        run.worker(name).send_signal(signal.SIGKILL)
    summary = run.assert_finished(steps=8)
    assert summary["restarts"] == {"engine-0": 1, "trainer": 1}
    assert summary["sequences_resumed"] > 0
    assert Path(summary["checkpoint"]).name == "step_8"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_replaced_engine_and_trainer_reconnect_over_each_transport(start, transport):
    run = start(
        trainer={"steps": 12, "groups_per_step": 2},
        checkpoint={"every_steps": 5},
        weights={"transport": transport, "payload": "delta"},
        supervision={"hang_timeout_s": 25.0},  # and of a broadcast
        engine={"count": 2},
    )
    for step, victim in ((2, "engine-1"), (5, "trainer"), (8, "engine-0")):
        run.wait_for_step(step)
        run.worker(victim).send_signal(signal.SIGKILL)
    summary = run.assert_finished(steps=12)
    assert summary["restarts"] == {"engine-1": 1, "trainer": 1, "engine-0": 1}


@pytest.mark.slow
def test_stopped_engine_is_replaced_and_its_sequences_resume(start):
    run = start(
        trainer={"steps": 8, "groups_per_step": 2},
        supervision={"hang_timeout_s": 3.0},
        cluster={"start_timeout_s": 60.0},
    )
    run.wait_for_step(3)
    stopped = run.worker("engine-0")
    stopped.send_signal(signal.SIGSTOP)
    code, stdout, stderr = run.finish()
    assert code == 0, stderr
    assert not stopped.is_running()
    assert "'engine-0' made no progress for 3 s" in stdout + stderr
    assert "it is stopped (SIGSTOP), so its stacks are not in its log" in stdout + stderr
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["restarts"] == {"engine-0": 1}
    assert summary["sequences_resumed"] > 0


@pytest.mark.slow
def test_engines_can_be_added_and_removed(start, tmp_path):
    run = start(trainer={"steps": 100000, "groups_per_step": 2})
    run.wait_for_step(2)

    def engines(*arguments: str) -> tuple[int, str]:
        code, stdout, stderr = Command("engines", "run", *arguments, folder=tmp_path).finish()
        return code, stdout + stderr

    assert engines("--add", "1") == (0, "engine-0\nengine-1\n")
    first, second = run.worker("engine-0"), run.worker("engine-1")
    assert engines("--remove", "engine-0") == (0, "engine-1\n")
    assert not first.is_running()
    done = len(steps_in(run.path / "metrics.jsonl"))
    run.wait_for_step(done + 8)  # more than the removed engine could have generated for
    assert second.is_running()
    refusal = "error: 'engine-1' is the last engine of the run; add another first.\n"
    assert engines("--remove", "engine-1") == (2, refusal)
    run.process.send_signal(signal.SIGINT)
    assert run.finish()[0] == 130
    assert engines()[0] == 2


@pytest.mark.slow
def test_engine_is_added_while_the_trainer_waits(start):
    """The policy decides every 30 s."""
    run = start(
        trainer={"steps": 100000, "groups_per_step": 2}, engine={"count": 1, "max_count": 2}
    )
    run.wait_for(run.path / "logs" / "engine-1.log")
    done = len(steps_in(run.path / "metrics.jsonl"))
    run.wait_for_step(done + 2)
    run.process.send_signal(signal.SIGINT)
    code, stdout, _ = run.finish()
    assert code == 130
    (line,) = [line for line in stdout.splitlines() if "adding an engine" in line]
    assert "The trainer waited for " in line
    assert not (run.path / "logs" / "engine-2.log").exists()
