"""Whole runs over each transport: two real engines, a trainer that publishes every step."""

from pathlib import Path

import pytest
from digits import TASKS, share_of_digits
from tiny_model import make_tiny_model

import millrace as mr
from millrace.watch.metrics import read_metrics


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("transport", "payload"),
    [pytest.param("disk", "full", marks=pytest.mark.slow), ("collective", "delta")],
)
def test_a_run_learns_over(transport: str, payload: str, model: Path, tmp_path: Path):
    result = mr.train(
        model=str(model),
        run_dir=str(tmp_path / "run"),
        tasks=TASKS,
        scorers=[share_of_digits],
        sampling={"max_new_tokens": 8},
        rollout={"group_size": 2},
        # Staleness 0: a step is only possible once the version before it is in both engines.
        buffer={"max_staleness": 0},
        trainer={"steps": 4, "groups_per_step": 2, "threads": 1, "device": "cpu"},
        engine={"count": 2, "threads": 1, "max_sequences": 8, "device": "cpu"},
        scoring={"workers": 1},
        weights={"transport": transport, "payload": payload},
        watch={"progress": "off"},
    )
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    assert [row["staleness_max"] for row in rows] == [0] * 4
    assert not (result.run_dir / "weights").exists()
