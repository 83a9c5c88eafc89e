"""A run with an order, a limit on the stale share, several epochs and replay."""

import pytest
from digits import TASKS, share_of_digits
from tiny_model import make_tiny_model

import millrace as mr
from millrace.monitoring.files.metrics import read_metrics, table
from millrace.monitoring.report.summary import summary_rows


@pytest.mark.slow  # test_staleness_flow.py and tests/controller/ are its short version
def test_run_combines_order_epochs_and_replay(tmp_path):
    result = mr.train(
        model=str(make_tiny_model(tmp_path / "model")),
        run_dir=str(tmp_path / "run"),
        tasks=TASKS,
        scorers=[share_of_digits],
        sampling={"max_new_tokens": 24},
        rollout={"group_size": 4},
        buffer={
            "max_staleness": 3,
            "order": "freshest",
            "staleness": {"type": "share", "max_share": 0.5},
            "replay": {"share": 0.25, "max_staleness": 8},
        },
        trainer={"steps": 8, "groups_per_step": 4, "epochs": 2, "minibatches": 2},
        loss={"type": "decoupled_ppo"},
        engine={"max_sequences": 32},
        cluster={"threads": 1},
        scoring={"workers": 1},
        monitoring={"progress": "off"},
    )
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    assert result.steps == 8
    replayed = [row["groups/replayed"] for row in rows]
    assert replayed[:2] == [0, 0]  # the second batch is taken before the first is trained
    assert replayed[2:] == [1] * 6
    assert all(row["batch/proximal_microbatches"] == 2 for row in rows)
    assert max(row["staleness/max"] for row in rows) >= 2
    assert result.episodes == (8 * 4 - 6) * 4
    for row in rows:
        histogram = table(row, "staleness/share")
        mean = sum(int(age) * share for age, share in histogram.items())
        assert abs(sum(histogram.values()) - 1) < 1e-9
        assert abs(mean - row["staleness/mean"]) < 1e-9
        assert row["version_spread/group_max"] >= row["version_spread/rollout_max"]
    summary = dict(summary_rows(result.run_dir))
    assert summary["groups replayed"] == "6"
    assert summary["steps"].startswith("8 in ")
