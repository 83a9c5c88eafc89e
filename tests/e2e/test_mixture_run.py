"""A run with a mixture of experts and real processes."""

import pytest
from digits import TASKS, share_of_digits
from peft import PeftModel
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM

import millrace as mr
from millrace.monitoring.files.metrics import read_metrics


@pytest.mark.slow
@pytest.mark.parametrize("adapts", [False, True], ids=["all weights", "adapters of experts"])
def test_mixture_of_experts_trains_with_replayed_routes_and_resumes(adapts, tmp_path):
    settings = {
        "lora": {"rank": 4} if adapts else None,
        "model": str(make_tiny_model(tmp_path / "model", num_experts=8)),
        "run_dir": str(tmp_path / "run"),
        "sampling": {"max_new_tokens": 12},
        "rollout": {"group_size": 4},
        "buffer": {"max_staleness": 0},
        "trainer": {"steps": 3, "groups_per_step": 4, "router_aux_loss": 0.01},
        "optimizer": {"learning_rate": 1e-3},
        "engine": {"count": 2},
        "cluster": {"threads": 1},
        "scoring": {"workers": 1},
        "monitoring": {"progress": "off"},
    }
    mr.train(settings, tasks=TASKS, scorers=[share_of_digits])
    further = {**settings, "trainer": {**settings["trainer"], "steps": 5}}
    if adapts:
        further["lora"] = {"rank": 4, "apply": "unmerged"}
    result = mr.train(further, tasks=TASKS, scorers=[share_of_digits], resume=True)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    # Strictly on-policy, so engine and trainer compute the same logprobs.
    assert all(row["mismatch/logprob"] < 1e-5 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    assert all(row["routing/replayed_share"] == 1 for row in rows)
    assert all(row["moe/aux_loss"] > 0 and row["moe/load_max"] >= 1 for row in rows)
    model = AutoModelForCausalLM.from_pretrained(settings["model"] if adapts else result.checkpoint)
    assert model.config.num_experts == 8
    if adapts:
        names = dict(PeftModel.from_pretrained(model, result.checkpoint).named_parameters())
        assert any("mlp.experts.lora_B" in name for name in names)
