"""Generated sbatch scripts under a real SLURM: `make test-slurm`."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from project import REPOSITORY, make_project, steps_in
from slurm_rig import Slurm, wait_until

from millrace.cli.main import main

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
ENVIRONMENT = """
async def play(task, agent):
    return float("1" in (await agent.complete(task.prompt)).text)
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "src"))
    slurm = Slurm(tmp_path / "slurm", num_nodes=2)
    yield slurm
    slurm.close()


def submit(slurm: Slurm, folder: Path, monkeypatch, *arguments: str) -> str:
    monkeypatch.chdir(folder)
    assert main(["launch", "slurm", "run.toml", "--output", "job.sh", *arguments]) == 0
    return slurm.submit(folder / "job.sh")


def wait_for_step(folder: Path, step: int) -> None:
    metrics = folder / "run" / "metrics.jsonl"
    wait_until(
        lambda: metrics.exists() and steps_in(metrics)[-1:] >= [step],
        what=f"step {step}",
        timeout_s=120,
    )


def test_job_on_two_nodes_is_signalled_requeued_and_finishes(slurm, tmp_path, monkeypatch):
    project = make_project(
        tmp_path / "project",
        trainer={"steps": 40},
        engine={"count": 0, "remote": 1},
        environment={"function": "play.py:play", "remote": 1},  # beside the engine
    )
    (project / "play.py").write_text(ENVIRONMENT)
    job = submit(slurm, project, monkeypatch, "--nodes", "2")
    wait_for_step(project, 3)
    (ticket,) = project.glob("run.ticket-*")
    assert ticket.stat().st_mode & 0o777 == 0o600
    assert slurm.field(job, "CPUs/Task") == "2"  # of the first node, and of the second
    assert slurm.field(job, "NumCPUs") == "4"
    slurm.run("scancel", "--batch", "--signal=TERM", job)
    wait_until(lambda: slurm.field(job, "Restarts") == "1", what="requeue")
    (saved,) = (project / "run" / "checkpoints").iterdir()
    assert 3 <= int(saved.name.removeprefix("step_")) < 40
    wait_until(lambda: slurm.field(job, "JobState") == "COMPLETED", what="end", timeout_s=180)
    assert steps_in(project / "run" / "metrics.jsonl") == list(range(1, 41))
    assert not list(project.glob("run.ticket-*"))
    log = (project / f"run.slurm-{job}.log").read_text()
    assert f"--resume continues from {saved.name}" in log
    for worker in ("engine-0", "environment-0"):
        assert sum("Joined the run at" in line and worker in line for line in log.splitlines()) == 2


def visible_gpus(job: str) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of the steps of a job, by what they bring."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[1:3] != ["-m", "millrace"]:
            continue
        env = process.environ()
        if env.get("SLURM_JOB_ID") == job:
            role = words[words.index("--role") + 1] if "--role" in words else words[3]
            found[role] = env.get("CUDA_VISIBLE_DEVICES", "")
    return found


def test_steps_of_a_job_see_the_gpus_of_their_roles_alone(slurm, tmp_path, monkeypatch):
    """The run computes on CPUs, because PyTorch finds no GPU behind these numbers."""
    project = make_project(
        tmp_path / "project",
        trainer={"steps": 100000},
        engine={"count": 0, "remote": 1},
        environment={"function": "play.py:play", "remote": 1},
    )
    (project / "play.py").write_text(ENVIRONMENT)
    gpus = ("--gpus", "controller=2", "--gpus", "engines=1")
    job = submit(slurm, project, monkeypatch, "--nodes", "2", *gpus)
    wait_for_step(project, 1)
    assert visible_gpus(job) == {"train": "0,1", "join": "0", "environment": ""}


def test_job_that_a_more_urgent_one_preempts_resumes_after_it(slurm, tmp_path, monkeypatch):
    project = make_project(tmp_path / "project", trainer={"steps": 100000})
    job = submit(slurm, project, monkeypatch, "--", "--exclusive")
    wait_for_step(project, 1)
    urgent = ("--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 1")
    slurm.run("sbatch", *urgent, f"--output={tmp_path}/urgent.log")
    wait_until(lambda: slurm.field(job, "Restarts") == "1", what="requeue")
    done = steps_in(project / "run" / "metrics.jsonl")[-1]
    assert (project / "run" / "checkpoints" / f"step_{done}").is_dir()
    wait_for_step(project, done + 1)


def test_job_is_requeued_before_its_time_limit_and_not_after_scancel(slurm, tmp_path, monkeypatch):
    project = make_project(tmp_path / "project", trainer={"steps": 100000})
    job = submit(slurm, project, monkeypatch, "--", "--time=2")  # minutes; SIGTERM 55 s before
    wait_for_step(project, 1)
    wait_until(lambda: slurm.field(job, "Restarts") == "1", what="requeue", timeout_s=150)
    done = steps_in(project / "run" / "metrics.jsonl")[-1]
    assert (project / "run" / "checkpoints" / f"step_{done}").is_dir()
    wait_for_step(project, done + 2)
    slurm.run("scancel", job)
    wait_until(lambda: slurm.field(job, "JobState") == "CANCELLED", what="end")
    assert slurm.field(job, "Restarts") == "1"
    assert slurm.run("squeue", "--noheader") == ""
