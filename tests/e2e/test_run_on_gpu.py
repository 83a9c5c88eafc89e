"""Whole runs on one GPU, with real processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from digits import TASKS, share_of_digits

import millrace as mr
from millrace.monitoring.files.metrics import read_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def trained(model: Path, run_dir: Path, **settings: Any) -> list[dict[str, Any]]:
    """The metrics of a run of two steps."""
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
    return read_metrics(run_dir / "metrics.jsonl")


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_engine_and_trainer_share_a_gpu_however_it_is_named(model, tmp_path, device):
    placement = {"trainer": device, "engines": device}
    assert len(trained(model, tmp_path / "run", placement=placement)) == 2


@pytest.mark.parametrize("share_gpu", ["auto", "take_turns", "sleep"])
def test_two_engines_share_a_gpu_with_the_trainer(model, tmp_path, share_gpu):
    engine = {"count": 2, "options": {"kv_bytes": 2**28}}
    rows = trained(model, tmp_path / "run", engine=engine, cluster={"share_gpu": share_gpu})
    assert len(rows) == 2


def test_two_ranks_share_a_gpu(model, tmp_path):
    placement = {"trainer": ["cuda:0", "cuda:0"], "engines": "cuda:0"}
    rows = trained(
        model,
        tmp_path / "run",
        placement=placement,
        trainer={"ranks": 2},
        # The second step is sampled with the first version, which differs much from the model. An
        # engine is replaced unless it computes the trainer's logprobs with it.
        optimizer={"learning_rate": 1e-2},
        buffer={"max_staleness": 0},
        weights={"probe": True},
    )
    assert len(rows) == 2
    assert not any(name.startswith("restarts") for name in rows[-1])


def test_one_rank_trains_with_fsdp_over_nccl(model, tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "VERSION")
    run_dir = tmp_path / "run"
    rows = trained(
        model,
        run_dir,
        trainer={"mesh": {"dp_shard": 1}},
        optimizer={"learning_rate": 1e-2},
        buffer={"max_staleness": 0},
        weights={"probe": True},  # an engine with other weights would be replaced
    )
    assert len(rows) == 2
    assert not any(name.startswith("restarts") for name in rows[-1])
    assert "NCCL version" in "".join(log.read_text() for log in (run_dir / "logs").iterdir())


def test_exact_mode_finds_no_differing_logprob(model, tmp_path):
    """A differing bit would end the run."""
    rows = trained(model, tmp_path / "run", fidelity={"mode": "exact"})
    assert len(rows) == 2
    assert rows[0]["mismatch/compared_logprobs"] > 0
    assert all(row["mismatch/differing_logprobs"] == 0 for row in rows)
