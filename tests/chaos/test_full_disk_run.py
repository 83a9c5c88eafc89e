"""A whole run on a disk that becomes full, and has room again."""

import resource
import sys
from pathlib import Path

import pytest
from torn_run import TornRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="limits of another process"),
]


@pytest.fixture
def run(tmp_path: Path):
    run = TornRun(tmp_path, steps=10, checkpoint={"every_steps": 4})
    yield run
    run.close()


def fill_disk_of(process, *, room_bytes: int) -> None:
    """No file that it writes may be larger from now on."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (room_bytes, resource.RLIM_INFINITY))


def test_a_journal_that_cannot_be_written_ends_the_run_with_a_sentence_and_the_run_resumes(run):
    run.start()
    run.until(lambda: run.step >= 2)
    (log,) = (run.path / "journal").glob("*-wal")
    fill_disk_of(run.controller, room_bytes=log.stat().st_size + 10)
    assert run.finish() == 1
    last = run.said.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "the disk is full" in last
    assert "--resume" in last
    assert "Traceback" not in run.said
    run.start("--resume")
    run.summary()


def test_checkpoints_that_cannot_be_written_cost_a_warning_each_and_the_last_one_the_run(run):
    run.start()
    run.until(lambda: run.step >= 1)
    trainer = run.worker("trainer")
    fill_disk_of(trainer, room_bytes=1000)
    assert run.finish() == 1
    said = " ".join(run.said.split())  # lines are as wide as the terminal
    assert "step_4' could not be written (" in said
    assert "The run continues without the checkpoint of step 4." in said
    assert run.said.strip().splitlines()[-1].startswith("error: Checkpoint")
    assert list((run.path / "checkpoints").iterdir()) == []
    run.start("--resume")  # all of its steps are redone from the journal
    run.summary()
