"""A run with a mixture of experts and real processes."""

import pytest
from digits import TASKS, share_of_digits
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM

import millrace as mr
from millrace.monitoring.files.metrics import read_metrics


@pytest.mark.slow
def test_mixture_of_experts_trains_with_replayed_routes_and_resumes(tmp_path):
    settings = {
        "model": str(make_tiny_model(tmp_path / "model", num_experts=8)),
        "run_dir": str(tmp_path / "run"),
        "sampling": {"max_new_tokens": 12},
        "rollout": {"group_size": 4},
        "buffer": {"max_staleness": 0},
        "trainer": {"steps": 3, "groups_per_step": 4},
        "optimizer": {"learning_rate": 1e-3},
        "engine": {"count": 2},
        "cluster": {"threads": 1},
        "scoring": {"workers": 1},
        "monitoring": {"progress": "off"},
    }
    mr.train(settings, tasks=TASKS, scorers=[share_of_digits])
    further = {**settings, "trainer": {**settings["trainer"], "steps": 5}}
    result = mr.train(further, tasks=TASKS, scorers=[share_of_digits], resume=True)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    # Strictly on-policy, so engine and trainer compute the same logprobs.
    assert all(row["mismatch/logprob"] < 1e-5 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    assert all(row["routing/replayed_share"] == 1 for row in rows)
    model = AutoModelForCausalLM.from_pretrained(result.checkpoint)
    assert model.config.num_experts == 8
