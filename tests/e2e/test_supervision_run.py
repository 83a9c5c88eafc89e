"""Runs whose workers are killed, stopped, added and removed."""

import contextlib
import json
import signal
import time
from pathlib import Path

import psutil
import pytest
from project import Command, make_project, steps_in

from millrace.run.scaling import ask

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

    def wait_for_engines(self, *names: str) -> None:
        deadline = time.monotonic() + 120
        while ask(self.path) != [*names]:
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)

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
@pytest.mark.timeout(300)
def test_engine_is_added_while_the_trainer_waits_and_removed_while_batches_wait(start):
    """The policy decides every 30 s."""
    run = start(
        trainer={"steps": 100000, "groups_per_step": 2},
        engine={"count": 1, "max_count": 2},
        supervision={"hang_timeout_s": 1000.0},  # a fifth of it is the limit of a transfer
    )
    run.wait_for_step(1)
    run.wait_for_engines("engine-0", "engine-1")
    done = len(steps_in(run.path / "metrics.jsonl"))
    run.wait_for_step(done + 2)
    added, trainer = run.worker("engine-1"), run.worker("trainer")
    trainer.suspend()  # so whole batches wait for it
    run.wait_for_engines("engine-0")
    assert psutil.wait_procs([added], timeout=60)[1] == []
    assert not (run.path / "logs" / "engine-2.log").exists()
    trainer.resume()
    done = len(steps_in(run.path / "metrics.jsonl"))
    run.wait_for_step(done + 8)  # more than had been sampled when it was removed
    run.process.send_signal(signal.SIGINT)
    code, stdout, _ = run.finish()
    assert code == 130
    changes = ("adding an engine", "removing ")
    adding, removing = [
        line for line in stdout.splitlines() if any(change in line for change in changes)
    ][:2]
    assert "The trainer waited for " in adding
    assert "Whole batches waited for the trainer: removing engine-1." in removing
    assert "is being restarted" not in stdout, "it was removed, and did not die"
