import json
import os
import platform
import sys

import pytest
from synthetic_run import make_run

from millrace.config import load_config
from millrace.core.errors import ConfigError
from millrace.monitoring.files.metrics import read_metrics
from millrace.monitoring.monitor import RunMonitor
from millrace.monitoring.report.summary import summary_rows, summary_text
from millrace.monitoring.run_dir import RunDir
from millrace.monitoring.terminal.progress import ProgressDisplay


def test_rows_of_a_finished_run(tmp_path):
    path = tmp_path / "x"
    make_run(path, steps=40)
    rows = list(summary_rows(path))
    summary = dict(rows)
    assert summary["run"] == f"{path} (finished)"
    assert summary["steps"] == "40 in 0:20"
    assert summary["held-out accuracy"] == "0.310 → 0.940"
    first, _, last, _ = summary["reward"].split()
    assert float(first) < 0.3 < 0.8 < float(last)
    assert summary["throughput"] == "128 samples/s, 2.00k tokens/s"
    assert summary["staleness"] == "mean 0.80, max 2"
    assert summary["groups dropped"] == "4 (too_stale 4)"
    assert summary["groups cancelled"] == "5 (generating 5)"
    assert summary["groups failed"] == "2 (reward_raised 2)"
    assert summary["trainer"].startswith("50% busy")
    assert rows[-1] == ("", str(path / "checkpoints" / "step_40"))


def test_summary_text_has_every_row(tmp_path):
    make_run(tmp_path / "x", steps=40)
    text = summary_text(tmp_path / "x")
    for expected in (
        "(finished)",
        "40 in 0:20",
        "0.310 → 0.940",
        "128 samples/s, 2.00k tokens/s",
        "mean 0.80, max 2",
        "5 (generating 5)",
        "0.25 per rollout, 0.75 per group",
        "520 (cancelled 400, dropped 120)",
        "mean staleness: dropped 3.00, cancelled 2.50",
        "cancelling saved about 800 tokens",
        "75% busy (generate 70%, swap 5%), waits: buffer full 25%",
        "50% busy (step 40%, publish 10%), waits: generation 30%, scores 20%",
        "4 (too_stale 4)",
        "2 (reward_raised 2)",
    ):
        assert expected in text
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_killed_run_is_summarised_up_to_its_last_step(tmp_path):
    make_run(tmp_path / "x", steps=40, finished=False)
    summary = dict(summary_rows(tmp_path / "x"))
    assert summary["run"].endswith(" (stopped)")
    assert summary["steps"].startswith("40 ")
    assert summary["held-out accuracy"].endswith(" at step 40")


def test_running_run_differs_from_a_killed_one(tmp_path):
    make_run(tmp_path / "x", finished=False)
    holder = RunDir(tmp_path / "x")
    holder.open(load_config({"model": "m"}), resume=True)
    assert dict(summary_rows(tmp_path / "x"))["run"].endswith(" (running)")
    holder.close()
    assert dict(summary_rows(tmp_path / "x"))["run"].endswith(" (stopped)")


def test_a_run_without_a_step_has_a_summary(tmp_path):
    run_dir = RunDir(tmp_path / "x")
    run_dir.open(load_config({"model": "m"}))
    assert dict(summary_rows(tmp_path / "x"))["steps"] == "0"
    assert "running" in summary_text(tmp_path / "x")


def test_summary_has_what_a_bug_report_needs(tmp_path):
    run_dir = RunDir(tmp_path / "x")
    config = load_config(
        {"model": "m", "loss": "grpo", "rollout": {"group_size": 4}, "scorers": ["exact"]}
    )
    run_dir.open(config)
    monitor = RunMonitor(config, run_dir=run_dir, resume_from=None, progress=ProgressDisplay())
    for number in range(12):
        monitor.warn(f"engine-{number} died\x1b[2J")
    monitor.close()
    text = summary_text(tmp_path / "x")
    assert f"Python {sys.version_info.major}.{sys.version_info.minor}, millrace " in text
    assert platform.machine() in text
    assert f"{os.cpu_count()} CPUs" in text
    assert "rollout.group_size = 4" in text
    assert "loss.type = 'grpo'" in text
    assert "'type': 'exact'" in text
    assert "trainer.steps" not in text  # has its default
    assert "12, in " in text
    assert "engine-2 died\\x1b[2J" in text
    assert "engine-1 died" not in text  # only the newest


def test_summary_of_a_run_without_losses_has_no_rows_of_zeros(tmp_path):
    make_run(tmp_path / "x", steps=4)
    rows = read_metrics(tmp_path / "x" / "metrics.jsonl")
    for row in rows:
        for key in row:
            if key.startswith(("dropped/", "cancelled/", "failed/", "tokens/wasted/")):
                row[key] = 0
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "x" / "metrics.jsonl").write_text(lines)
    labels = [label for label, _ in summary_rows(tmp_path / "x")]
    assert "throughput" in labels
    assert [label for label in labels if label.startswith(("groups", "tokens"))] == []


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_folder_without_a_run_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"{name} is not a run directory"):
        summary_text(tmp_path / name)
