"""A run over a base in 4 bits, with real processes: it learns, resumes, and exports its model."""

import shutil

import pytest
import torch
from digits import TASKS, share_of_digits
from peft import PeftModel
from test_lora_run import logits, make_model, settings
from transformers import AutoModelForCausalLM

import millrace as mr
from millrace.models.lora.quantized import round_base
from millrace.monitoring.files.metrics import read_metrics
from millrace.training.checkpoints.directory import read_run_state

pytestmark = pytest.mark.slow


def quantized(model, run_dir, **lora) -> dict:
    """A reference compares with the base; a self-teacher serves adapters over it."""
    start = settings(model, run_dir)
    start["lora"] |= {"dora": False, "quantization": "nf4", **lora}
    scorers = [{"type": "reference"}, {"type": "self_teacher", "lag": 1}]
    return {**start, "scorers": scorers, "loss": {"kl": 1e-4, "distil_weight": 1e-3}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    return mr.train(quantized(model, run_dir), tasks=TASKS, scorers=[share_of_digits])


def test_rewards_rise_and_all_processes_compute_over_one_base(finished):
    rows = read_metrics(finished.run_dir / "metrics.jsonl")
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3])
    assert max(row["mismatch/logprob"] for row in rows) < 1e-5
    # The adapter is 0 until the first update.
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert rows[0]["teacher/kl"] == pytest.approx(0, abs=1e-6)


def test_the_merged_model_is_the_adapter_over_the_quantized_base(finished, model):
    base = AutoModelForCausalLM.from_pretrained(model)
    round_base(base)
    adapted = logits(PeftModel.from_pretrained(base, finished.checkpoint), model)
    merged = AutoModelForCausalLM.from_pretrained(finished.checkpoint / "merged")
    torch.testing.assert_close(logits(merged, model), adapted, rtol=0, atol=1e-5)
    full = AutoModelForCausalLM.from_pretrained(model)
    over_full = logits(PeftModel.from_pretrained(full, finished.checkpoint), model)
    assert (over_full - adapted).abs().max() > 1e-2


def test_a_resumed_run_continues_over_the_same_base(model, finished, tmp_path):
    assert read_run_state(finished.checkpoint)["quantization"] == "nf4"
    shutil.copytree(finished.run_dir, tmp_path / "run")
    options = {"tasks": TASKS, "scorers": [share_of_digits], "resume": True}
    more = {"trainer": {"steps": 14}, **options}
    with pytest.raises(mr.MillraceError, match=r"was trained with lora\.quantization = 'nf4'"):
        mr.train(quantized(model, tmp_path / "run", quantization=None), **more)
    result = mr.train(quantized(model, tmp_path / "run", apply="unmerged"), **more)
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 15))
    assert max(row["mismatch/logprob"] for row in rows) < 1e-5
