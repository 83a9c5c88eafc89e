import io

import pytest
from rich.console import Console
from synthetic_run import make_run

from millrace.config import load_config
from millrace.core.errors import ConfigError
from millrace.monitoring.report.summary import summarise, summary_table
from millrace.monitoring.run_dir import RunDir


def text_of(path, *, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(summary_table(summarise(path)))
    return console.export_text()


def test_a_finished_run(tmp_path):
    make_run(tmp_path / "x", steps=40)
    summary = summarise(tmp_path / "x")
    assert summary.state == "finished"
    assert summary.steps == 40
    assert (summary.accuracy_before, summary.accuracy_after) == (0.31, 0.94)
    assert summary.rewards[0] < 0.3 < 0.8 < summary.rewards[-1]
    assert (summary.samples_per_s, summary.tokens_per_s) == (128.0, 2000.0)
    assert summary.staleness_mean == pytest.approx(0.8)
    assert summary.staleness_max == 2
    assert summary.dropped == {"too_stale": 4}
    assert summary.cancelled == {"generating": 5}
    assert summary.failed == {"reward_raised": 2}
    trainer = summary.workers["trainer"]
    assert trainer is not None
    assert trainer.busy == pytest.approx(0.5)
    assert summary.files[-1].name == "step_40"


def test_summary_table_has_all_facts(tmp_path):
    make_run(tmp_path / "x", steps=40)
    text = text_of(tmp_path / "x", width=120)
    for fact in (
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
        assert fact in text
    assert {len(line) for line in text_of(tmp_path / "x", width=80).splitlines()} <= set(range(81))


def test_killed_run_is_summarised_up_to_its_last_step(tmp_path):
    make_run(tmp_path / "x", steps=40, finished=False)
    summary = summarise(tmp_path / "x")
    assert summary.state == "stopped"
    assert summary.steps == 40
    assert summary.accuracy_after is None
    assert "at step 40" in text_of(tmp_path / "x")


def test_running_run_differs_from_a_killed_one(tmp_path):
    make_run(tmp_path / "x", finished=False)
    holder = RunDir(tmp_path / "x")
    holder.open(load_config({"model": "m"}), resume=True)
    assert summarise(tmp_path / "x").state == "running"
    holder.close()
    assert summarise(tmp_path / "x").state == "stopped"


def test_a_run_without_a_step_has_a_summary(tmp_path):
    run_dir = RunDir(tmp_path / "x")
    run_dir.open(load_config({"model": "m"}))
    assert summarise(tmp_path / "x").steps == 0
    assert "running" in text_of(tmp_path / "x")


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_folder_without_a_run_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"{name} is not a run directory"):
        summarise(tmp_path / name)
