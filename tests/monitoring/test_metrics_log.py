import json

import numpy as np
import pytest

from millrace.core.errors import ConfigError
from millrace.monitoring.files.metrics import MetricsLog, read_metrics, table


def test_every_row_is_on_disk_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2):
        log.write({"step": step})
        assert len(read_metrics(path)) == step


def test_rows_are_strict_json_whatever_the_numbers(tmp_path):
    path = tmp_path / "metrics.jsonl"
    row = {
        "step": np.int64(1),
        "loss": np.float32(0.5),
        "mismatch/kl_k1": float("nan"),
        "mismatch/kl_k3": np.float64("inf"),
        "rewards": {"correct": float("-inf"), "length": None},
        "staleness": {"share": {0: 12}},
    }
    MetricsLog(path).write(row)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(path.read_text(), parse_constant=refuse) == {
        "step": 1,
        "loss": 0.5,
        "mismatch/kl_k1": None,
        "mismatch/kl_k3": None,
        "rewards/correct": None,
        "rewards/length": None,
        "staleness/share/0": 12,
    }


def test_a_value_without_json_form_is_an_error(tmp_path):
    with pytest.raises(TypeError, match="object has no JSON form"):
        MetricsLog(tmp_path / "metrics.jsonl").write({"step": 1, "x": object()})


def test_a_row_cut_short_is_ignored(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    assert read_metrics(path) == [{"step": 1}]


def test_a_broken_row_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl line 2 is not JSON"):
        read_metrics(path)


def test_a_missing_file_has_no_rows(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_resume_drops_the_steps_that_are_trained_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    log = MetricsLog(path, resume_from=2)
    log.write({"step": 3, "again": True})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]


def test_a_new_run_starts_with_an_empty_log(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    MetricsLog(path)
    assert read_metrics(path) == []


def test_tables_become_keys_with_slashes_and_are_read_back(tmp_path):
    row = MetricsLog(tmp_path / "metrics.jsonl").write(
        {"step": 1, "dropped": {"stale": 2}, "waiting": {"engine-0": {"no work": 0.5}}}
    )
    assert row == {"step": 1, "dropped/stale": 2, "waiting/engine-0/no_work": 0.5}
    assert table(row, "dropped") == {"stale": 2}
    assert table({"rewards/a/b/mean": 1, "rewards/a/b/share": 2}, "rewards", suffix="/mean") == {
        "a/b": 1
    }


def test_metrics_of_an_older_version_are_refused_with_one_sentence(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "reward_mean": 0.5}\n')
    with pytest.raises(ConfigError, match="was written by an older Millrace"):
        read_metrics(path)
