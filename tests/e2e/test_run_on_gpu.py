"""Whole runs on one GPU, with real processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from digits import TASKS, share_of_digits

import millrace as mr

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def trained_steps(model: Path, run_dir: Path, **settings: Any) -> list[int]:
    trainer = {"steps": 2, "groups_per_step": 2, **settings.pop("trainer", {})}
    mr.train(
        model=str(model),
        run_dir=str(run_dir),
        tasks=TASKS,
        scorers=share_of_digits,
        sampling={"max_new_tokens": 8},
        rollout={"group_size": 2},
        trainer=trainer,
        scoring={"workers": 1},
        monitoring={"progress": "off"},
        **settings,
    )
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_engine_and_trainer_share_a_gpu_however_it_is_named(model, tmp_path, device):
    placement = {"trainer": device, "engines": device}
    assert trained_steps(model, tmp_path / "run", placement=placement) == [1, 2]


def test_two_ranks_share_a_gpu(model, tmp_path):
    placement = {"trainer": ["cuda:0", "cuda:0"], "engines": "cuda:0"}
    run_dir = tmp_path / "run"
    assert trained_steps(model, run_dir, placement=placement, trainer={"ranks": 2}) == [1, 2]


def test_exact_mode_finds_no_differing_logprob(model, tmp_path):
    """A differing bit would end the run."""
    run_dir = tmp_path / "run"
    assert trained_steps(model, run_dir, fidelity={"mode": "exact"}) == [1, 2]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["mismatch/compared_logprobs"] > 0
    assert all(row["mismatch/differing_logprobs"] == 0 for row in rows)
