"""Runs with and without cluster.share_gpu = "take_turns"."""

from pathlib import Path

import pytest
from digits import TASKS, share_of_digits
from overlap import first_halves, generating_in, overlap, steps_of
from tiny_model import make_tiny_model

import millrace as mr
from millrace.monitoring.files.metrics import read_metrics
from millrace.monitoring.files.trace import read_trace

pytestmark = pytest.mark.slow


def train(folder: Path, *, take_turns: bool) -> mr.RunResult:
    """Batches are so large that the trace records spans in order."""
    return mr.train(
        model=str(make_tiny_model(folder / "model")),
        run_dir=str(folder / "run"),
        tasks=TASKS,
        eval_tasks=TASKS[:16],
        scorers=[share_of_digits],
        sampling={"max_new_tokens": 48},
        rollout={"group_size": 8},
        trainer={"steps": 6, "groups_per_step": 8},
        engine={"count": 2},
        scoring={"workers": 1},
        evaluate={"every_steps": 1},
        monitoring={"progress": "off"},
        cluster={"threads": 1, "share_gpu": "take_turns" if take_turns else "auto"},
    )


@pytest.fixture(scope="module")
def in_turns(tmp_path_factory) -> mr.RunResult:
    """A finished run that several tests share."""
    return train(tmp_path_factory.mktemp("in-turns"), take_turns=True)


def test_two_engines_share_the_work(in_turns):
    generating = generating_in(read_trace(in_turns.run_dir / "trace.json"))
    assert {span.worker for span in generating} == {"engine-0", "engine-1"}


def overlap_of(run: mr.RunResult) -> float:
    spans = read_trace(run.run_dir / "trace.json")
    assert len(steps_of(spans)) >= run.steps
    return overlap(first_halves(steps_of(spans)), generating_in(spans))


def test_engines_pause_while_the_trainer_steps_with_take_turns(in_turns):
    assert overlap_of(in_turns) < 0.02
    waits = [span for span in read_trace(in_turns.run_dir / "trace.json") if span.name == "paused"]
    assert {span.worker for span in waits} == {"engine-0", "engine-1"}
    assert not any(span.busy for span in waits)


@pytest.mark.slow  # tests/e2e/test_train.py checks this in an ordinary run
def test_engines_generate_while_the_trainer_steps_without_take_turns(tmp_path):
    assert overlap_of(train(tmp_path, take_turns=False)) > 0.1


def test_training_stays_asynchronous_with_take_turns(in_turns):
    rows = read_metrics(in_turns.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert max(row["staleness/max"] for row in rows) > 0


def test_evaluations_run_with_take_turns(in_turns):
    rows = read_metrics(in_turns.run_dir / "metrics.jsonl")
    assert sum("eval/accuracy" in row for row in rows) >= 2
    assert in_turns.accuracy_after is not None
