"""After failure, kills and Ctrl-C, only the run directory is left."""

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from project import Command, make_project, steps_in

from millrace.cli.main import main
from millrace.monitoring.files.metrics import read_metrics
from millrace.monitoring.report.summary import read_report


@pytest.fixture
def project(tmp_path) -> Path:
    return make_project(tmp_path, trainer={"steps": 100000}, checkpoint={"every_steps": 5})


class TrainCommand(Command):
    """`millrace train`, with its workers by name."""

    def __init__(self, project: Path, *arguments: str) -> None:
        super().__init__("train", "run.toml", *arguments, folder=project)
        self.metrics = project / "run" / "metrics.jsonl"
        self.workers: dict[str, psutil.Process] = {}

    def wait_for_step(self, step: int) -> None:
        self.wait_for(self.metrics, lines=step)
        for process in psutil.Process(self.process.pid).children(recursive=True):
            command = process.cmdline()
            if "--name" in command:
                self.workers[command[command.index("--name") + 1]] = process
        assert {"engine-0", "trainer", "scorer-0"} <= self.workers.keys()

    def assert_left_nothing(self) -> None:
        assert not [p for p in self.workers.values() if p.is_running()]
        assert list(self.temp.iterdir()) == []


@pytest.fixture
def start(project) -> Iterator[Callable[..., TrainCommand]]:
    """Starts runs with further arguments. No run outlives the test."""
    runs: list[TrainCommand] = []

    def start(*arguments: str) -> TrainCommand:
        runs.append(TrainCommand(project, *arguments))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.communicate()


def learned_in(metrics: Path) -> list[tuple[float, ...]]:
    """Metrics that are equal if two steps are bitwise equal."""
    names = ("step", "loss", "grad_norm", "reward/mean", "staleness/mean", "batch/trained_tokens")
    return [tuple(row[name] for name in names) for row in read_metrics(metrics)]


def shared_memory() -> set[str]:
    """Without semaphores of multiprocessing, which runs do not use and other programs do."""
    names = {path.name for path in Path("/dev/shm").glob("*")}
    return {name for name in names if not name.startswith("sem.mp-")}


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["engine-0", "trainer"])
def test_death_without_restarts_ends_the_run_and_leaves_no_orphans(start, victim):
    before = shared_memory()
    run = start("--supervision.max_restarts", "0")
    run.wait_for_step(2)
    run.workers[victim].send_signal(signal.SIGKILL)
    code, _, stderr = run.finish()
    assert code == 1
    assert f"Worker '{victim}' failed once" in stderr
    assert "was killed by SIGKILL; its log is" in stderr
    run.assert_left_nothing()
    assert shared_memory() <= before


@pytest.mark.slow
def test_sigterm_writes_a_checkpoint_the_requeued_job_resumes_and_ctrl_c_leaves_no_processes(start):
    before = shared_memory()
    run = start("--auto-resume", "--checkpoint.every_steps", "0")  # there is no run to resume yet
    run.wait_for_step(2)
    for process in run.workers.values():  # systemd and some settings of SLURM do so
        process.send_signal(signal.SIGTERM)
    run.process.send_signal(signal.SIGTERM)
    run.process.send_signal(signal.SIGTERM)  # schedulers repeat it
    code, _, stderr = run.finish()
    assert code == 75
    (saved,) = (run.metrics.parent / "checkpoints").iterdir()
    assert "stopped by SIGTERM; metrics, trace and logs so far are in" in stderr
    assert f"--resume continues from {saved.name}\n" in stderr
    run.assert_left_nothing()
    done = steps_in(run.metrics)
    assert saved.name == f"step_{done[-1]}"

    requeued = start("--auto-resume", "--checkpoint.every_steps", "1")
    requeued.wait_for_step(done[-1] + 2)
    requeued.process.send_signal(signal.SIGINT)
    code, _, stderr = requeued.finish()
    assert code == 130
    assert "--resume continues from step_" in stderr
    assert f"--resume continues from {saved.name}\n" not in stderr
    requeued.assert_left_nothing()
    assert shared_memory() <= before
    steps = steps_in(requeued.metrics)
    assert steps == list(range(1, len(steps) + 1))
    assert read_report(requeued.metrics.parent).check() == []


@pytest.mark.slow  # tests/chaos/test_short_soak.py is its short version
def test_run_survives_a_killed_scorer_and_resumes_after_all_processes_are_killed(start):
    run = start()
    run.wait_for_step(2)
    run.workers["scorer-0"].send_signal(signal.SIGKILL)
    done = len(steps_in(run.metrics))
    run.wait_for_step(done + 8)  # more than the dead scorer could have scored
    run.process.send_signal(signal.SIGKILL)
    run.process.wait(timeout=10)
    assert not psutil.wait_procs(list(run.workers.values()), timeout=10)[1]
    before = learned_in(run.metrics)  # the steps since the newest checkpoint are lost

    assert list(run.temp.iterdir())  # the next run cleans up
    resumed = start("--resume")
    resumed.wait_for_step(done + 20)
    resumed.process.send_signal(signal.SIGINT)
    assert resumed.finish()[0] == 130
    resumed.assert_left_nothing()
    steps = steps_in(resumed.metrics)
    assert steps == list(range(1, len(steps) + 1))
    # The steps since the checkpoint were repeated with the same groups.
    assert learned_in(resumed.metrics)[: len(before)] == before
    report = read_report(resumed.metrics.parent)
    assert report.check() == []
    assert len(report.closed["trained"]) == 4 * len(steps)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["--optimizer.lerning_rate", "1"], "did you mean 'learning_rate'"),
        (["--trainer.steps", "many"], "'trainer.steps' = 'many'"),
        (["--model.path", "./nowhere"], "Model './nowhere' does not exist"),
        (["--model.path", "bare"], "Model 'bare' has no tokenizer"),
        (["--placement.engines", "cuda:99"], "Device 'cuda:99' does not exist"),
        (["--tasks.path", "chat.jsonl"], "Task 0: its prompt is a list of messages, but"),
        (["--tasks.path", "empty.jsonl"], "is empty"),
        (["--tasks.path", "bad.jsonl"], "line 2 has no 'prompt'"),
        (["--engine.max_context", "3"], "raise engine.max_context"),
        (["--loss.type", "cliped"], "did you mean 'clipped'"),
        (["--loss.hihg", "0.3"], "did you mean 'high'"),
        (["--buffer.capacity", "1"], "buffer.capacity"),
    ],
)
def test_bad_input_is_reported_before_any_worker_starts(
    project, change, sentence, monkeypatch, capsys
):
    (project / "empty.jsonl").write_text("\n")
    (project / "bad.jsonl").write_text('{"prompt": "1+1="}\n{"question": "1+1="}\n')
    message = {"role": "user", "content": "1+1="}
    (project / "chat.jsonl").write_text(json.dumps({"prompt": [message]}))
    (project / "bare").mkdir()
    shutil.copy(project / "model" / "config.json", project / "bare")
    monkeypatch.chdir(project)
    assert main(["train", "run.toml", *change]) == 2
    stderr = capsys.readouterr().err
    assert sentence in stderr
    assert len(stderr.strip().splitlines()) == 1
    assert not (project / "run" / "logs" / "trainer.log").exists()


@pytest.mark.slow  # the test above covers the same without a process
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["--engine.max_context", "3"], "raise engine.max_context"),
        pytest.param(
            ["--cluster.launcher", "ray"],
            "needs Ray, which is not installed here; run: pip install 'ray>=2.40'",
            marks=pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed"),
        ),
    ],
    ids=["context", "ray"],
)
def test_command_prints_one_line_for_bad_input(start, change, sentence):
    run = start(*change)
    code, stdout, stderr = run.finish()
    assert code == 2
    assert sentence in stderr
    assert "step" not in stdout
    assert "Traceback" not in stdout + stderr
    assert len(stderr.strip().splitlines()) == 1
    assert run.left() == []
    run.assert_left_nothing()
