"""A run whose longest completions exceed the staleness limit."""

import pytest
from tiny_model import make_tiny_model

import millrace as mr
from millrace.monitoring.files.metrics import read_metrics, table
from millrace.monitoring.report.summary import summary_rows
from millrace.monitoring.terminal.text import counts

TASKS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]


def share_of_digits(completions, **columns):
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


@pytest.mark.slow  # test_staleness_flow.py and tests/controller/ are its short version
def test_groups_beyond_the_staleness_limit_are_cancelled_and_retried(tmp_path):
    result = mr.train(
        model=str(make_tiny_model(tmp_path / "model", max_context=1024)),
        run_dir=str(tmp_path / "run"),
        tasks=TASKS,
        scorers=[share_of_digits],
        sampling={"max_new_tokens": 600},
        rollout={"group_size": 2},
        buffer={"max_staleness": 1, "staleness": {"type": "oldest", "enforce": "cancel"}},
        trainer={"steps": 10, "groups_per_step": 2},
        engine={"max_sequences": 16},
        cluster={"threads": 1},
        weights={"interrupt": "abort"},
        scoring={"workers": 1},
        monitoring={"progress": "off"},
    )
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    assert result.steps == 10
    assert max(row["staleness/max"] for row in rows) <= 1
    assert rows[-1]["cancelled/generating"] > 0
    assert rows[-1]["tokens/wasted/cancelled"] > 0
    summary = dict(summary_rows(result.run_dir))
    assert summary["groups cancelled"] == counts(table(rows[-1], "cancelled"))
