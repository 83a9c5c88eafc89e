"""LoRA runs with real processes: they learn, resume, and write checkpoints that PEFT loads."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from digits import TASKS, share_of_digits
from peft import PeftModel
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import millrace as mr
from millrace.monitoring.files.metrics import read_metrics


def make_model(directory: Path) -> Path:
    """A tiny model whose frozen head can distinguish tokens."""
    make_tiny_model(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(10)  # tied to the head
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def settings(model: Path, run_dir: Path) -> dict:
    return {
        "model": str(model),
        "run_dir": str(run_dir),
        "lora": {"rank": 4, "alpha": 16, "dora": True, "export_merged": True},
        "sampling": {"max_new_tokens": 24},
        "rollout": {"group_size": 4},
        "buffer": {"max_staleness": 0},
        "trainer": {"steps": 12, "groups_per_step": 4},
        "optimizer": {"learning_rate": 1e-2},
        "engine": {"max_sequences": 32},
        "cluster": {"threads": 1},
        "placement": {"trainer": "cpu", "engines": "cpu"},
        "weights": {"transport": "shm"},
        "scoring": {"workers": 1},
        "checkpoint": {"every_steps": 6},
        "monitoring": {"progress": "off"},
    }


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    return mr.train(settings(model, run_dir), tasks=TASKS, scorers=[share_of_digits])


@torch.no_grad()
def logits(model, path: Path) -> torch.Tensor:
    tokens = AutoTokenizer.from_pretrained(path)("1+2=3")["input_ids"]
    return model.eval()(torch.tensor([tokens])).logits


@pytest.mark.slow
def test_rewards_rise_and_logprobs_of_engine_and_trainer_agree(finished):
    rows = read_metrics(finished.run_dir / "metrics.jsonl")
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3])
    assert max(row["mismatch/logprob"] for row in rows) < 1e-5


@pytest.mark.slow
def test_checkpoint_is_a_peft_directory_and_the_last_has_a_merged_model(finished, model):
    checkpoint = finished.checkpoint
    assert {path.name for path in checkpoint.parent.iterdir()} == {"step_6", "step_12"}
    assert not (checkpoint.parent / "step_6" / "merged").exists()
    base = AutoModelForCausalLM.from_pretrained(model)
    before = logits(base, model)
    adapted = logits(PeftModel.from_pretrained(base, checkpoint), checkpoint)
    merged = AutoModelForCausalLM.from_pretrained(checkpoint / "merged")
    torch.testing.assert_close(logits(merged, checkpoint / "merged"), adapted, rtol=0, atol=1e-5)
    assert not torch.allclose(adapted, before, atol=1e-2)


@pytest.mark.slow
def test_logs_of_workers_are_empty(finished):
    logs = finished.run_dir / "logs"
    assert {path.name: path.read_text() for path in logs.glob("*.log") if path.stat().st_size} == {}


@pytest.mark.slow
def test_resumed_run_continues_with_its_adapter(model, finished, tmp_path):
    """The resumed run applies its adapter unmerged, next to the adapter of another run."""
    shutil.copytree(finished.run_dir, tmp_path / "run")
    start = settings(model, tmp_path / "run")
    start["lora"]["apply"] = "unmerged"
    start["engine"]["adapters"] = {"earlier": str(finished.checkpoint)}
    result = mr.train(
        start, tasks=TASKS, scorers=[share_of_digits], resume=True, trainer={"steps": 14}
    )
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 15))
    # Strictly on-policy: an engine without the adapter would differ at once.
    assert max(row["mismatch/logprob"] for row in rows) < 1e-5
    with pytest.raises(mr.MillraceError, match=r"lora\.rank = 8, but .* trained with 4"):
        mr.train(
            start,
            tasks=TASKS,
            scorers=[share_of_digits],
            resume=True,
            trainer={"steps": 15},
            lora={"rank": 8},
        )


def test_missing_peft_is_reported_before_the_run(model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(mr.MillraceError, match=r"install millrace\[lora\]"):
        mr.train(settings(model, tmp_path / "run"), tasks=TASKS, scorers=[share_of_digits])
    assert not (tmp_path / "run").exists()


def test_invalid_adapter_is_reported_before_the_run(model, tmp_path):
    with pytest.raises(
        mr.MillraceError, match=r"engine\.adapters\.judge = .* has no adapter_config"
    ):
        mr.train(
            settings(model, tmp_path / "run"),
            tasks=TASKS,
            scorers=[share_of_digits],
            engine={"adapters": {"judge": str(model)}},
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow  # tests/models/test_adapters.py checks the message
def test_wrong_target_module_is_reported(model, tmp_path):
    with pytest.raises(mr.MillraceError, match=r"lora\.target_modules has 'qproj'"):
        mr.train(
            settings(model, tmp_path / "run"),
            tasks=TASKS,
            scorers=[share_of_digits],
            lora={"target_modules": "qproj"},
        )
