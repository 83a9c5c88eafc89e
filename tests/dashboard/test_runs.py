"""Run directories that grow, are replaced, were copied or are not there yet."""

import json
import os
import time

import pytest
from synthetic_run import make_run

from millrace.config import load_config
from millrace.core.errors import ConfigError
from millrace.dashboard.diagnosis import MetricColumns
from millrace.dashboard.runs import RunReader
from millrace.monitoring.run_dir import RunDir


def reader_of(path) -> RunReader:
    reader = RunReader(path, id="0")
    reader.refresh()
    return reader


def append(path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_rows_are_read_as_they_are_written(tmp_path):
    run_dir = make_run(tmp_path, steps=3, finished=False)
    reader = reader_of(tmp_path)
    assert reader.metrics.num_rows == 3  # not the row that is cut in the middle

    append(run_dir.metrics, ', "reward/mean": 0.5}\n{"step": 5, "reward/mean": 0.6}\n')

    assert reader.refresh()
    assert reader.metrics.column("step").tolist() == [1, 2, 3, 4, 5]
    assert not reader.refresh()


def test_metrics_of_a_resumed_run_replace_the_rows_that_it_repeats(tmp_path):
    run_dir = make_run(tmp_path, steps=6)
    reader = reader_of(tmp_path)
    lines = run_dir.metrics.read_text().splitlines(keepends=True)

    other = tmp_path / "other"
    other.write_text("".join(lines[:2]) + '{"step": 3, "reward/mean": 0.25}\n')
    other.replace(run_dir.metrics)
    reader.refresh()

    assert reader.metrics.column("step").tolist() == [1, 2, 3]
    assert reader.metrics.last["reward/mean"] == 0.25


def test_a_damaged_line_is_counted_and_the_rest_is_shown(tmp_path):
    run_dir = make_run(tmp_path, steps=2)
    append(run_dir.metrics, 'not JSON\n{"step": 3}\n')

    reader = reader_of(tmp_path)

    assert reader.metrics.num_rows == 3
    assert [alert["kind"] for alert in reader.overview()["alerts"]] == ["file"]


def test_state_tells_live_finished_stopped_and_copied_runs(tmp_path):
    assert RunReader(tmp_path / "none", id="0").state == "waiting"
    run_dir = make_run(tmp_path / "run", steps=2)
    reader = reader_of(tmp_path / "run")
    assert reader.state == "finished"

    run_dir.summary.unlink()
    assert reader.state == "copied"  # its files are new, and no process holds its lock
    for path in (run_dir.metrics, run_dir.trace):
        os.utime(path, (time.time() - 3600,) * 2)
    assert reader.state == "stopped"

    live = RunDir(tmp_path / "run")
    live.open(load_config({"model": "m", "run_dir": str(tmp_path / "run")}), resume=True)
    assert reader.state == "running"
    live.close()


def test_a_folder_without_files_has_an_overview(tmp_path):
    overview = reader_of(tmp_path).overview()

    assert overview["state"] == "waiting"
    assert overview["row"] == {}
    assert "has not finished a step" in overview["diagnosis"]["sentence"]


def test_overview_of_a_run_is_complete_and_becomes_json(tmp_path):
    make_run(tmp_path)
    overview = json.loads(json.dumps(reader_of(tmp_path).overview()))

    assert overview["step"] == 40
    assert overview["settings"]["buffer.capacity"] == 64
    assert overview["checkpoints"] == [40]
    assert overview["summary"]["accuracy_after"] == 0.94


def test_logs_lose_control_characters_and_stay_in_their_folder(tmp_path):
    run_dir = make_run(tmp_path, steps=1)
    (run_dir.logs / "engine-0.log").write_text("\x1b[31mred\x1b[0m\x07\nplain\ttext\n")
    reader = reader_of(tmp_path)

    assert reader.log(name="engine-0.log") == "red\nplain\ttext\n"
    for name in ("../config.toml", "/etc/passwd", ""):
        with pytest.raises(ConfigError, match="has no log"):
            reader.log(name=name)


def test_curves_are_means_of_equally_many_steps_and_keep_gaps():
    metrics = MetricColumns()
    for step in range(1, 101):
        metrics.append({"step": step, "even": step} if step % 2 == 0 else {"step": step})

    curves = metrics.curves(["step", "even", "unknown"], points=10)

    assert curves["step"][0] == 5.5
    assert curves["even"][0] == 6.0
    assert curves["unknown"] == [None] * 10
    part = metrics.curves(["even"], points=10, start=3, end=6)
    assert part["even"] == [None, 4.0, None, 6.0]
