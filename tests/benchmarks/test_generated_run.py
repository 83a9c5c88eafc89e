"""The synthetic run directory can be read as a real one."""

import runpy
from pathlib import Path

import pytest

from millrace.journal import read_journal
from millrace.monitoring.files.episodes import read_lifecycle
from millrace.monitoring.files.metrics import read_metrics
from millrace.monitoring.files.samples import read_samples
from millrace.monitoring.files.trace import read_trace
from millrace.monitoring.run_dir import steps_in

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "generated_run.py"))


@pytest.mark.parametrize("finished", [True, False])
def test_every_file_of_a_synthetic_run_is_read(tmp_path, finished):
    run_dir = SCRIPT["write_run"](tmp_path / "run", steps=6, spans=300, finished=finished)
    assert [row["step"] for row in read_metrics(run_dir.metrics)] == list(range(1, 7))
    spans = read_trace(run_dir.trace)
    assert len(spans) == 300
    assert {span.name for span in spans if span.worker == "engine-3"} >= {"swap", "buffer full"}
    assert steps_in(run_dir.rollouts) == steps_in(run_dir.lifecycle) == list(range(1, 7))
    hostile = read_samples(run_dir, 2)
    assert {one.completion for one in hostile} == set(SCRIPT["HOSTILE"].values())
    step = read_lifecycle(run_dir, 5)
    assert step is not None
    journal = read_journal(run_dir.journal, verify=True)
    assert journal is not None
    assert journal.ledger.check() == []
    assert {group.number for group in step.groups} <= set(range(journal.ledger.next_number))
    assert run_dir.is_finished == finished
