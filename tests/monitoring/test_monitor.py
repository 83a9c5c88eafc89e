import asyncio
from dataclasses import replace
from pathlib import Path

import file_tracker
import pytest
from fakes import make_group
from file_tracker import read_lines
from full_disk import files_of_at_most
from metrics_page import unknown_metrics

from millrace.config import load_config
from millrace.core.files import is_full
from millrace.core.records import Score, Task
from millrace.core.spans import Span
from millrace.monitoring.files.metrics import read_metrics, table
from millrace.monitoring.files.trace import read_trace
from millrace.monitoring.monitor import RunMonitor
from millrace.monitoring.run_dir import RunDir
from millrace.monitoring.terminal.snapshot import RunGauges


def make_monitor(tmp_path, *, resume_from=None, progress="off", tracker=()):
    watch = {"progress": progress}
    settings = {"model": "m", "run_dir": str(tmp_path), "monitoring": watch, "tracker": tracker}
    config = load_config(settings)
    run_dir = RunDir(tmp_path)
    for folder in (run_dir.rollouts, run_dir.logs):
        folder.mkdir(parents=True, exist_ok=True)
    monitor = RunMonitor(config, run_dir=run_dir, resume_from=resume_from)
    return monitor, run_dir


def make_gauges(version=3, **changes):
    settings = {
        "version": version,
        "buffer_depth": 4,
        "groups_running": 2,
        "groups_dropped": {"stale": 1},
        "groups_cancelled": {"generating": 2},
        "tokens_saved": 70,
        "tokens_wasted": {"dropped": 30, "zero_variance": 8},
        "wasted_staleness": {"dropped": 2.5},
        "groups_failed": {},
        "steps_skipped": 2,
        "last_failure": "",
        "engine_waits_for": "staleness limit",
        "trainer_waits_for": "generation",
        "scorers": {},
    }
    return RunGauges(**{**settings, **changes})


def test_row_has_rewards_and_staleness_of_its_groups(tmp_path):
    monitor, run_dir = make_monitor(tmp_path)
    groups = [make_group(0, versions=[1, 1, 2, 3]), make_group(1, versions=3)]
    monitor.step(make_gauges(version=3), groups=groups, trainer_metrics={"loss": 0.5})
    monitor.close()
    (row,) = read_metrics(run_dir.metrics)
    assert unknown_metrics(row) == []
    assert row["step"] == 4
    assert row["reward/mean"] == 0.5
    assert table(row, "staleness/share") == {"0": 10 / 16, "1": 2 / 16, "2": 4 / 16}
    assert row["staleness/max"] == 2
    assert (row["version_spread/rollout_mean"], row["version_spread/rollout_max"]) == (1.0, 2)
    assert row["loss"] == 0.5
    assert table(row, "dropped") == {"stale": 1}
    assert table(row, "cancelled") == {"generating": 2}
    assert (table(row, "tokens/wasted"), row["tokens/saved"]) == (
        {"dropped": 30, "zero_variance": 8},
        70,
    )
    assert table(row, "tokens/wasted_staleness") == {"dropped": 2.5}
    assert row["groups/replayed"] == 0
    assert table(row, "reward/source") == {}
    assert row["skipped/steps"] == 2


def test_replayed_groups_count_for_staleness_but_not_as_results(tmp_path):
    monitor, run_dir = make_monitor(tmp_path)
    groups = [make_group(0, versions=1, size=3), make_group(1, versions=3)]
    monitor.step(make_gauges(version=3), groups=groups, replayed={0}, trainer_metrics={})
    monitor.close()
    (row,) = read_metrics(run_dir.metrics)
    assert row["groups/replayed"] == 1
    assert row["reward/mean"] == 0.5  # that of group 0 is 1
    assert row["staleness/max"] == 2
    assert monitor.episodes == 2


def test_row_has_the_reward_of_each_source(tmp_path):
    monitor, run_dir = make_monitor(tmp_path)
    groups = [
        replace(make_group(n, size=n + 1), task=Task(prompt="p", source="ab"[n // 2]))
        for n in (1, 2, 3)
    ]
    monitor.step(make_gauges(version=3), groups=groups, trainer_metrics={})
    monitor.close()
    (row,) = read_metrics(run_dir.metrics)
    assert table(row, "reward/source") == {
        "a": 0.5,
        "b": pytest.approx((0 + 1 + 2 + 0 + 1 + 2 + 3) / 7),
    }


async def test_idle_worker_is_shown_with_the_reason_from_the_controller(tmp_path):
    monitor, run_dir = make_monitor(tmp_path)
    running = asyncio.create_task(monitor.run(make_gauges))
    await asyncio.sleep(0)
    for worker, name in (("engine-0", "no work"), ("trainer", "a batch"), ("scorer-0", "no work")):
        span = Span(worker=worker, name=name, busy=False, start_s=1.0, end_s=2.0)
        monitor.on_progress(worker, spans=[span], counters={})
    running.cancel()
    monitor.close()
    reasons = {span.worker: span.name for span in read_trace(run_dir.trace)}
    assert reasons["engine-0"] == "staleness limit"
    assert reasons["trainer"] == "generation"
    assert reasons["scorer-0"] == "no work"


async def test_report_builds_the_gauges_once_and_only_to_explain_a_wait(tmp_path):
    num_built = 0

    def gauges():
        nonlocal num_built
        num_built += 1
        return make_gauges()

    monitor, _ = make_monitor(tmp_path)
    running = asyncio.create_task(monitor.run(gauges))
    await asyncio.sleep(0)
    first = num_built
    busy = Span(worker="engine-0", name="generate", busy=True, start_s=1.0, end_s=2.0)
    wait = Span(worker="engine-0", name="no work", busy=False, start_s=2.0, end_s=3.0)
    monitor.on_progress("engine-0", spans=[busy, busy], counters={})
    assert num_built == first
    monitor.on_progress("engine-0", spans=[busy, wait, busy, wait], counters={})
    assert num_built == first + 1
    running.cancel()
    monitor.close()


def test_resumed_run_continues_its_files_and_totals(tmp_path):
    first, run_dir = make_monitor(tmp_path)
    for version in range(3):
        first.step(make_gauges(version), groups=[make_group(version)], trainer_metrics={})
    first.close()
    second, _ = make_monitor(tmp_path, resume_from=2)
    second.step(make_gauges(2), groups=[make_group(9)], trainer_metrics={})
    second.close()
    rows = read_metrics(run_dir.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[2]["time_s"] >= rows[1]["time_s"]
    assert rows[2]["throughput/time_s"] >= rows[1]["throughput/time_s"]
    assert rows[2]["throughput/samples"] == 3 * rows[0]["throughput/samples"]


def test_run_survives_a_trace_that_cannot_be_written_but_not_a_metrics_row(tmp_path, capsys):
    monitor, run_dir = make_monitor(tmp_path, progress="lines")
    span = Span(worker="engine-0", name="generate", busy=True, start_s=1.0, end_s=2.0)
    with files_of_at_most(run_dir.trace.stat().st_size):
        for _ in range(2):
            monitor.on_progress("engine-0", spans=[span], counters={})
        with pytest.raises(OSError, match="File too large") as caught:
            monitor.step(make_gauges(), groups=[make_group(0)], trainer_metrics={})
        monitor.close()
    assert is_full(caught.value)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("trace.json cannot be written any more (file too large)") == 1


def test_reward_part_of_some_episodes_has_the_share_it_scored(tmp_path):
    monitor, run_dir = make_monitor(tmp_path)
    scores = [
        Score(total=1.0, parts={"format": 1.0, "judge": 0.5, "never": None}),
        Score(total=0.0, parts={"format": 0.0, "judge": None, "never": None}),
    ]
    group = replace(make_group(0, size=2), scores=tuple(scores))
    monitor.step(make_gauges(), groups=[group], trainer_metrics={})
    monitor.close()
    (row,) = read_metrics(run_dir.metrics)
    assert table(row, "rewards", suffix="/mean") == {"format": 0.5, "judge": 0.5}
    assert table(row, "rewards", suffix="/share") == {"judge": 0.5, "never": 0.0}


def test_trackers_receive_the_finite_numbers_of_each_row(tmp_path):
    tracker = f"{Path(file_tracker.__file__)}:FileTracker"
    monitor, run_dir = make_monitor(tmp_path, tracker=[{"type": tracker, "label": "x"}])
    metrics = {"loss": float("nan"), "grad_norm": 2.0}
    monitor.step(make_gauges(), groups=[make_group(0)], trainer_metrics=metrics)
    monitor.warn("Something is odd.")
    monitor.close()
    opened, (_, step, row), alert, closed = read_lines(run_dir.path / "x.jsonl")
    assert opened == ["open", "m", None]
    assert step == 4
    assert (row["reward/mean"], row["grad_norm"], row["dropped/stale"]) == (0.5, 2.0, 1.0)
    assert "loss" not in row
    assert alert == ["alert", "Something is odd."]
    assert closed == ["close"]


def test_worker_reports_its_startup_phases(tmp_path, capsys):
    monitor, _ = make_monitor(tmp_path, progress="lines")
    monitor.starting("engine-0", "starting the process")
    for name in ("load", "load", "compile", "generate"):
        span = Span(worker="engine-0", name=name, busy=True, start_s=1.0, end_s=2.0)
        monitor.on_progress("engine-0", spans=[span], counters={})
    monitor.starting("engine-0", None)
    monitor.close()
    assert capsys.readouterr().out.splitlines() == [
        "engine-0: starting the process",
        "engine-0: loading",
        "engine-0: compiling and warming up",
        "engine-0: ready",
    ]
