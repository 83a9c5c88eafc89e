"""Whole runs on one GPU, with real processes."""

import json

import pytest
import torch
from digits import TASKS, share_of_digits

import millrace as mr

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_engine_and_trainer_share_a_gpu_however_it_is_named(model, tmp_path, device):
    run_dir = tmp_path / "run"
    mr.train(
        model=str(model),
        run_dir=str(run_dir),
        tasks=TASKS,
        scorers=share_of_digits,
        placement={"trainer": device, "engines": device},
        sampling={"max_new_tokens": 8},
        rollout={"group_size": 2},
        trainer={"steps": 2, "groups_per_step": 2},
        scoring={"workers": 1},
        monitoring={"progress": "off"},
    )
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
