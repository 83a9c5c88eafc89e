"""Runs with reward models in their own processes; they differ only in their [[scorers]]."""

import json
import os
import signal
from typing import Any

import psutil
import pytest
from digits import TASKS
from tiny_classifier import make_tiny_classifier
from tiny_model import make_tiny_model

import millrace as mr
from millrace.monitoring.files.metrics import read_metrics

MODULE = "millrace.scoring.reward_models.worker"


def train(folder, scorer: dict[str, Any], *, scorers=None, **settings):
    return mr.train(
        {
            "model": str(make_tiny_model(folder / "model")),
            "run_dir": str(folder / "run"),
            "sampling": {"max_new_tokens": 12},
            "rollout": {"group_size": 4},
            "trainer": {"steps": 2, "groups_per_step": 2},
            "cluster": {"threads": 1},
            "scoring": {"workers": 1},
            "monitoring": {"progress": "off"},
            "scorers": [scorer],
            **settings,
        },
        tasks=TASKS,
        scorers=scorers,
    )


@pytest.mark.slow
def test_run_trains_on_a_reward_model(tmp_path):
    model = make_tiny_classifier(tmp_path / "judge", head="sequence", architecture="bert")
    train(tmp_path, {"type": "reward_model", "model": str(model), "name": "quality"})
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["rewards/quality/mean"] != 0 for row in rows)


@pytest.mark.slow
def test_run_trains_on_a_process_reward_model(tmp_path):
    model = make_tiny_classifier(tmp_path / "judge", head="token", num_labels=2)
    train(
        tmp_path,
        {
            "type": "process_reward_model",
            "model": str(model),
            "label": 1,
            "steps": {"by": "delimiter", "delimiter": "="},
            "score": "mean",
        },
        scoring={"workers": 1, "advantages": {"type": "returns"}},
    )
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 < row["rewards/process_reward_model/mean"] < 1 for row in rows)


@pytest.mark.slow
def test_run_survives_a_killed_reward_model(tmp_path):
    model = make_tiny_classifier(tmp_path / "judge", head="sequence")
    killed: list[int] = []

    def kill_once(completions, **columns):
        if not killed:
            victims = [p for p in psutil.Process(os.getppid()).children() if MODULE in p.cmdline()]
            killed.extend(p.pid for p in victims)
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        return [0.0] * len(completions)

    scorer = {"type": "reward_model", "model": str(model)}
    result = train(tmp_path, scorer, scorers=[kill_once])
    assert result.steps == 2
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["restarts"] == {"reward_model-0": 1}
