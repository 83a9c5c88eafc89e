"""A run on a disk that becomes full and later has room again."""

import resource
import sys
from pathlib import Path

import pytest
from killable_run import KillableRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="limits of another process"),
]


@pytest.fixture
def run(tmp_path: Path):
    run = KillableRun(tmp_path, steps=10, checkpoint={"every_steps": 4})
    yield run
    run.close()


def fill_disk_of(process, *, room_bytes: int) -> None:
    """Limit the size of files that the process writes from now on."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (room_bytes, resource.RLIM_INFINITY))


def test_full_disk_of_journal_ends_the_run_which_resumes(run):
    run.start()
    run.until(lambda: run.step >= 2)
    (log,) = (run.path / "journal").glob("*-wal")
    fill_disk_of(run.controller, room_bytes=log.stat().st_size + 10)
    assert run.finish() == 1
    last = run.output.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "the disk is full" in last
    assert "--resume" in last
    assert "Traceback" not in run.output
    run.start("--resume")
    run.summary()


def test_failed_checkpoints_warn_and_a_failed_last_one_ends_the_run(run):
    run.start()
    run.until(lambda: run.step >= 1)
    trainer = run.worker("trainer")
    # Room for the weights that it publishes, but not for the state of the optimizer.
    weights = (run.project / "model" / "model.safetensors").stat().st_size
    fill_disk_of(trainer, room_bytes=weights * 3 // 2)
    assert run.finish() == 1
    output = " ".join(run.output.split())  # undo the wrapping of lines
    assert "step_4' could not be written (" in output
    assert "The run continues without the checkpoint of step 4." in output
    assert run.output.strip().splitlines()[-1].startswith("error: Checkpoint")
    assert list((run.path / "checkpoints").iterdir()) == []
    run.start("--resume")  # all of its steps are redone from the journal
    run.summary()
