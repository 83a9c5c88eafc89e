"""Whole runs over each transport: two real engines, a trainer that publishes every step."""

from pathlib import Path
from typing import Any

import pytest
from digits import TASKS, share_of_digits
from http_engine import HttpEngine

import millrace as mr
from millrace.monitoring.files.metrics import read_metrics


@pytest.mark.parametrize(
    ("transport", "payload"),
    [("disk", "full"), ("collective", "delta")],
)
@pytest.mark.slow  # the contracts hold them to more, and other runs go by shm and disk
def test_run_learns_over(transport: str, payload: str, model: Path, tmp_path: Path):
    result = run_over(model, tmp_path, weights={"transport": transport, "payload": payload})
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    assert [row["staleness/max"] for row in rows] == [0] * 4
    assert not (result.run_dir / "weights").exists()


@pytest.mark.slow
def test_run_notifies_an_external_engine_of_every_version_and_survives_an_unreachable_one(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    with HttpEngine() as engine, HttpEngine() as gone:
        urls = [engine.url, gone.url]
        gone.close()
        result = run_over(model, tmp_path, weights={"transport": "disk", "notify": urls})
    assert 4 in engine.versions
    assert engine.versions == sorted(set(engine.versions))
    assert all(engine.had_marker)
    assert "weights/notify_failures" in read_metrics(result.run_dir / "metrics.jsonl")[-1]
    output = "".join(capfd.readouterr())
    assert f"warning: {gone.url} could not be notified" in output
    assert "posts to weights.notify failed" in output


def run_over(model: Path, tmp_path: Path, *, weights: dict[str, Any]) -> mr.RunResult:
    return mr.train(
        model=str(model),
        run_dir=str(tmp_path / "run"),
        tasks=TASKS,
        scorers=[share_of_digits],
        sampling={"max_new_tokens": 8},
        rollout={"group_size": 2},
        # Staleness 0: a step is only possible once the version before it is in both engines.
        buffer={"max_staleness": 0},
        trainer={"steps": 4, "groups_per_step": 2},
        engine={"count": 2, "max_sequences": 8},
        cluster={"threads": 1},
        placement={"trainer": "cpu", "engines": "cpu"},
        scoring={"workers": 1},
        weights=weights,
        monitoring={"progress": "lines"},
    )
