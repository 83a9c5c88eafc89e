import asyncio
from dataclasses import replace

import pytest
from fakes import make_group
from full_disk import files_of_at_most

from millrace.config import load_config
from millrace.core.files import is_full
from millrace.core.records import Score, Task
from millrace.core.spans import Span
from millrace.monitoring.files.metrics import read_metrics
from millrace.monitoring.files.trace import read_trace
from millrace.monitoring.monitor import RunGauges, RunMonitor
from millrace.monitoring.run_dir import RunDir


def make_watcher(tmp_path, *, resume_from=None, progress="off"):
    watch = {"progress": progress}
    config = load_config({"model": "m", "run_dir": str(tmp_path), "watch": watch})
    run_dir = RunDir(tmp_path)
    for folder in (run_dir.rollouts, run_dir.logs):
        folder.mkdir(parents=True, exist_ok=True)
    return RunMonitor(config, run_dir=run_dir, resume_from=resume_from), run_dir


def make_moment(version=3, **changes):
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
        "engine_waits_for": "the trainer (staleness limit)",
        "trainer_waits_for": "generation",
        "scorers": {},
    }
    return RunGauges(**{**settings, **changes})


def test_a_row_tells_rewards_and_staleness_of_its_own_groups(tmp_path):
    watcher, run_dir = make_watcher(tmp_path)
    groups = [make_group(0, versions=[1, 1, 2, 3]), make_group(1, versions=3)]
    watcher.step(make_moment(version=3), groups=groups, trainer_metrics={"loss": 0.5})
    watcher.close()
    (row,) = read_metrics(run_dir.metrics)
    assert row["step"] == 4
    assert row["reward_mean"] == 0.5
    assert row["staleness_histogram"] == {"0": 10 / 16, "1": 2 / 16, "2": 4 / 16}
    assert row["staleness_max"] == 2
    assert (row["rollout_spread_mean"], row["rollout_spread_max"]) == (1.0, 2)
    assert row["loss"] == 0.5
    assert row["groups_dropped"] == {"stale": 1}
    assert row["groups_cancelled"] == {"generating": 2}
    assert (row["tokens_wasted"], row["tokens_saved"]) == (
        {"dropped": 30, "zero_variance": 8},
        70,
    )
    assert row["wasted_staleness"] == {"dropped": 2.5}
    assert row["replayed_groups"] == 0
    assert "reward_by_source" not in row
    assert row["steps_skipped"] == 2


def test_groups_that_are_replayed_count_for_staleness_and_not_again_as_results(tmp_path):
    watcher, run_dir = make_watcher(tmp_path)
    groups = [make_group(0, versions=1, size=3), make_group(1, versions=3)]
    watcher.step(make_moment(version=3), groups=groups, replayed={0}, trainer_metrics={})
    watcher.close()
    (row,) = read_metrics(run_dir.metrics)
    assert row["replayed_groups"] == 1
    assert row["reward_mean"] == 0.5  # that of group 0 is 1
    assert row["staleness_max"] == 2
    assert watcher.episodes == 2


def test_a_row_tells_the_reward_of_each_source(tmp_path):
    watcher, run_dir = make_watcher(tmp_path)
    groups = [
        replace(make_group(n, size=n + 1), task=Task(prompt="p", source="ab"[n // 2]))
        for n in (1, 2, 3)
    ]
    watcher.step(make_moment(version=3), groups=groups, trainer_metrics={})
    watcher.close()
    (row,) = read_metrics(run_dir.metrics)
    assert row["reward_by_source"] == {
        "a": 0.5,
        "b": pytest.approx((0 + 1 + 2 + 0 + 1 + 2 + 3) / 7),
    }


async def test_an_idle_worker_is_shown_with_the_reason_only_the_controller_knows(tmp_path):
    watcher, run_dir = make_watcher(tmp_path)
    watching = asyncio.create_task(watcher.run(make_moment))
    await asyncio.sleep(0)
    for worker, name in (("engine-0", "no work"), ("trainer", "a batch"), ("scorer-0", "no work")):
        span = Span(worker=worker, name=name, busy=False, start_s=1.0, end_s=2.0)
        watcher.heard(worker, spans=[span], counters={})
    watching.cancel()
    watcher.close()
    reasons = {span.worker: span.name for span in read_trace(run_dir.trace)}
    assert reasons["engine-0"] == "the trainer (staleness limit)"
    assert reasons["trainer"] == "generation"
    assert reasons["scorer-0"] == "no work"


def test_a_resumed_run_goes_on_in_the_same_files(tmp_path):
    first, run_dir = make_watcher(tmp_path)
    for version in range(3):
        first.step(make_moment(version), groups=[make_group(version)], trainer_metrics={})
    first.close()
    second, _ = make_watcher(tmp_path, resume_from=2)
    second.step(make_moment(2), groups=[make_group(9)], trainer_metrics={})
    second.close()
    rows = read_metrics(run_dir.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[2]["time_s"] >= rows[1]["time_s"]


def test_a_trace_that_cannot_be_written_is_done_without_and_a_row_is_not(tmp_path, capsys):
    watcher, run_dir = make_watcher(tmp_path, progress="lines")
    span = Span(worker="engine-0", name="generate", busy=True, start_s=1.0, end_s=2.0)
    with files_of_at_most(run_dir.trace.stat().st_size):
        for _ in range(2):
            watcher.heard("engine-0", spans=[span], counters={})
        with pytest.raises(OSError, match="File too large") as caught:
            watcher.step(make_moment(), groups=[make_group(0)], trainer_metrics={})
        watcher.close()
    assert is_full(caught.value)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("trace.json cannot be written any more (file too large)") == 1


def test_parts_that_did_not_apply_to_all_say_to_how_many_they_did(tmp_path):
    watcher, run_dir = make_watcher(tmp_path)
    scores = [
        Score(total=1.0, parts={"format": 1.0, "judge": 0.5, "never": None}),
        Score(total=0.0, parts={"format": 0.0, "judge": None, "never": None}),
    ]
    group = replace(make_group(0, size=2), scores=tuple(scores))
    watcher.step(make_moment(), groups=[group], trainer_metrics={})
    watcher.close()
    (row,) = read_metrics(run_dir.metrics)
    assert row["score_parts"] == {"format": 0.5, "judge": 0.5}
    assert row["score_shares"] == {"judge": 0.5, "never": 0.0}
