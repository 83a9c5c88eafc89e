"""Runs whose trainer has several ranks, with real processes."""

import shutil

import pytest
from digits import TASKS, share_of_digits
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM

import millrace as mr
from millrace.monitoring.files.metrics import read_metrics


def settings_of(tmp_path, *, ranks: int, cp: int, steps: int) -> dict:
    return {
        "model": str(tmp_path / "model"),
        "run_dir": str(tmp_path / "run"),
        "sampling": {"max_new_tokens": 12},
        "rollout": {"group_size": 4},
        "trainer": {"steps": steps, "groups_per_step": 4, "ranks": ranks, "mesh": {"cp": cp}},
        "checkpoint": {"every_steps": 1, "path": f"file://{tmp_path}/store"},
        "cluster": {"threads": 1},
        "scoring": {"workers": 1},
        "monitoring": {"progress": "off"},
    }


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("extra", [{}, {"lora": {"rank": 4}}, {"critic": {"learning_rate": 1e-3}}])
def test_run_continues_on_another_number_of_ranks(tmp_path, extra):
    make_tiny_model(tmp_path / "model")
    if "critic" in extra:
        extra = {**extra, "scoring": {"workers": 1, "advantages": {"type": "gae"}}}
    first_step = 1
    for steps, ranks, cp in [(2, 2, 1), (3, 1, 1), (4, 4, 2)]:
        if steps == 4:  # on another machine, from the copy of the checkpoint
            shutil.rmtree(tmp_path / "run")
            first_step = 4
        settings = {**settings_of(tmp_path, ranks=ranks, cp=cp, steps=steps), **extra}
        result = mr.train(settings, tasks=TASKS, scorers=[share_of_digits], resume=steps > 2)
        rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(first_step, steps + 1))
        assert rows[-1]["checkpoint/upload_failures"] == 0
        # The engines have the weights that the ranks trained.
        assert all(row["mismatch/logprob"] < 0.05 for row in rows), rows
    if "lora" not in extra:
        assert AutoModelForCausalLM.from_pretrained(result.checkpoint)
