"""A run with one engine on the trainer's device and one elsewhere, as if on another host."""

from pathlib import Path

import pytest
from overlap import first_halves, generating_in, overlap, steps_of
from project import Command, make_project, steps_in

from millrace.cli.main import main
from millrace.monitoring.files.trace import read_trace

pytestmark = pytest.mark.slow


@pytest.fixture
def run_dir(tmp_path: Path, commands: list[Command]) -> Path:
    """Of a finished run; batches are so large that the trace records spans in order."""
    project = make_project(
        tmp_path / "controller",
        sampling={"max_new_tokens": 48},
        rollout={"group_size": 8},
        trainer={"steps": 6, "groups_per_step": 8},
        engine={"count": 1, "remote": 1},
        weights={"transport": "disk"},
        cluster={
            "address": "tcp://127.0.0.1:0",
            "ticket": "secret/ticket.json",
            "share_gpu": "sleep",
            "threads": 1,
        },
    )
    ticket = project / "secret" / "ticket.json"
    run = Command("train", "run.toml", folder=project)
    commands.append(run)
    run.wait_for(ticket)
    host = Command("join", ticket, folder=tmp_path / "elsewhere")
    commands.append(host)
    code, _, stderr = run.finish()
    assert code == 0, stderr
    return project / "run"


def test_lent_engine_generates_between_steps_only_and_the_other_all_the_time(run_dir):
    spans = read_trace(run_dir / "trace.json")
    steps = steps_of(spans)
    lent = [span for span in generating_in(spans) if span.worker == "engine-0"]
    other = [span for span in generating_in(spans) if span.worker == "engine-1"]
    assert sum(span.end_s - span.start_s for span in lent) > 0.1
    assert overlap(first_halves(steps), lent) < 0.02
    assert overlap(steps, other) > 0.1
    paused = {span.worker for span in spans if span.name in ("paused", "sleep")}
    assert paused == {"engine-0"}
    assert steps_in(run_dir / "metrics.jsonl") == [*range(1, 7)]
    assert main(["inspect", str(run_dir), "--ledger"]) == 0  # no group is lost
