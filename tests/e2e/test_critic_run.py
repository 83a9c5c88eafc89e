"""A run with a critic and real processes."""

import pytest
from digits import TASKS, share_of_digits
from metrics_page import unknown_metrics
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM

import millrace as mr
from millrace.core.errors import ConfigError
from millrace.monitoring.files.metrics import read_metrics
from millrace.training.checkpoints.directory import CRITIC


@pytest.mark.slow
def test_run_trains_and_saves_policy_and_critic(tmp_path):
    settings = {
        "model": str(make_tiny_model(tmp_path / "model")),
        "run_dir": str(tmp_path / "run"),
        "critic": {"learning_rate": 1e-2, "warmup_steps": 1},
        "sampling": {"max_new_tokens": 12},
        "rollout": {"group_size": 4},
        "trainer": {"steps": 3, "groups_per_step": 4, "minibatches": 2},
        "cluster": {"threads": 1},
        "scoring": {"workers": 1, "advantages": {"type": "gae", "gae_lambda": 0.95}},
        "monitoring": {"progress": "off"},
    }
    result = mr.train(settings, tasks=TASKS, scorers=[share_of_digits])
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert unknown_metrics(rows[-1]) == []
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["critic/value_mean"] != 0 for row in rows] == [False, True, True]
    assert [row["learning_rate"] > 0 for row in rows] == [False, True, True]
    assert all(row["critic/loss"] > 0 for row in rows)
    assert AutoModelForCausalLM.from_pretrained(result.checkpoint)
    assert (result.checkpoint / CRITIC).is_dir()
    without = {**settings, "critic": None, "trainer": {"steps": 4}, "scoring": {"workers": 1}}
    with pytest.raises(ConfigError, match="trained with a critic; to resume, add the"):
        mr.train(without, tasks=TASKS, scorers=[share_of_digits], resume=True)
