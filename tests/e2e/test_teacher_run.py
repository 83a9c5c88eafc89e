"""Runs that learn from teachers, with real processes."""

import threading
import time
from typing import Any

import psutil
import pytest
from digits import TASKS, share_of_digits
from metrics_page import unknown_metrics
from tiny_model import make_tiny_model

import millrace as mr
from millrace.monitoring.files.metrics import read_metrics, table


def settings_of(tmp_path, **sections: Any) -> dict[str, Any]:
    return {
        "model": str(make_tiny_model(tmp_path / "model")),
        "run_dir": str(tmp_path / "run"),
        "sampling": {"max_new_tokens": 12},
        "rollout": {"group_size": 4},
        "trainer": {"steps": 3, "groups_per_step": 4},
        "optimizer": {"learning_rate": 1e-3},
        "cluster": {"threads": 1},
        "scoring": {"workers": 1},
        "monitoring": {"progress": "off"},
        **sections,
    }


@pytest.mark.slow
def test_run_trains_on_a_teacher_without_rewards(tmp_path):
    teacher = str(make_tiny_model(tmp_path / "teacher", seed=7))
    settings = settings_of(
        tmp_path, scorers=[{"type": "teacher", "model": teacher, "loss": "jsd", "top_k": 4}]
    )
    mr.train(settings, tasks=TASKS)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert unknown_metrics(rows[-1]) == []
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["teacher/divergence"] > 0 for row in rows)
    assert rows[-1]["teacher/divergence"] < rows[0]["teacher/divergence"]
    assert all(row["reward/mean"] == 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_run_stays_close_to_its_reference(tmp_path, lora):
    sections = {"scorers": [{"type": "reference"}], "loss": {"kl": 0.1}, "lora": lora}
    mr.train(settings_of(tmp_path, **sections), tasks=TASKS, scorers=[share_of_digits])
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert abs(rows[0]["kl"]) < 1e-6  # before the first update
    assert rows[-1]["kl"] > 1e-9
    logs = {path.name for path in (tmp_path / "run" / "logs").iterdir()}
    assert any("reference" in name for name in logs) == (lora is None)  # no second copy


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
@pytest.mark.parametrize("follows", [{"lag": 1}, {"ema": 0.5, "every": 2}])
def test_run_trains_on_a_self_teacher_and_reports_its_version(tmp_path, follows, lora):
    sections = {
        "scorers": [{"type": "self_teacher", **follows}],
        "lora": lora,
        "trainer": {"steps": 8, "groups_per_step": 4},
        "optimizer": {"learning_rate": 1e-3},
        "loss": {"distil_weight": 0.1},
    }
    mr.train(settings_of(tmp_path, **sections), tasks=TASKS, scorers=[share_of_digits])
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    versions = [row["teacher/version"] for row in rows]
    assert versions[0] == 0
    assert versions[-1] > 0
    assert versions == sorted(versions)


@pytest.mark.slow
def test_killed_self_teacher_is_replaced(tmp_path):
    metrics = tmp_path / "run" / "metrics.jsonl"

    def kill_one() -> None:
        while not metrics.exists() or len(read_metrics(metrics)) < 2:
            time.sleep(0.05)
        children = psutil.Process().children(recursive=True)
        (teacher,) = [c for c in children if "millrace.scoring.teachers.worker" in c.cmdline()]
        teacher.kill()

    sections = {
        "scorers": [{"type": "self_teacher", "ema": 0.5}],
        "weights": {"transport": "collective"},
        "trainer": {"steps": 8, "groups_per_step": 4},
        "optimizer": {"learning_rate": 1e-3},
        "loss": {"distil_weight": 0.1},
    }
    killing = threading.Thread(target=kill_one)
    killing.start()
    mr.train(settings_of(tmp_path, **sections), tasks=TASKS, scorers=[share_of_digits])
    killing.join()
    rows = read_metrics(metrics)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[-1]["scorer/self_teacher/lost"] == 1
    assert rows[-1]["teacher/version"] > rows[1]["teacher/version"]
    assert table(rows[-1], "rewards", suffix="/share") == {}
    assert table(rows[-1], "failed") == {}
