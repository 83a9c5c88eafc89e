"""Runs whose trainer has several ranks, with real processes."""

import shutil

import pytest
from digits import TASKS, share_of_digits
from tiny_model import ALPHABET, make_tiny_model
from transformers import AutoModelForCausalLM

import millrace as mr
from millrace.monitoring.files.metrics import read_metrics
from millrace.monitoring.files.samples import read_samples
from millrace.monitoring.run_dir import RunDir


def settings_of(tmp_path, *, mesh: dict, steps: int) -> dict:
    return {
        "model": str(tmp_path / "model"),
        "run_dir": str(tmp_path / "run"),
        "sampling": {"max_new_tokens": 12},
        "rollout": {"group_size": 4},
        "trainer": {"steps": steps, "groups_per_step": 4, **mesh},
        "optimizer": {"learning_rate": 1e-3},
        "buffer": {"max_staleness": 0},
        "checkpoint": {"every_steps": 1, "path": f"file://{tmp_path}/store"},
        "cluster": {"threads": 1},
        "scoring": {"workers": 1},
        "monitoring": {"progress": "off"},
    }


FSDP_AND_CP = ({"ranks": 2}, {"ranks": 1}, {"ranks": 4, "mesh": {"cp": 2}})
TP_AND_EP = ({"ranks": 4, "mesh": {"tp": 2, "ep": 2}}, {"ranks": 1})


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("extra", "num_experts", "meshes"),
    [
        ({}, 0, FSDP_AND_CP),
        ({}, 0, ({"mesh": {"dp_shard": 1}}, {"ranks": 1})),  # FSDP on one rank, and without
        ({}, 4, TP_AND_EP),
        ({"lora": {"rank": 4}}, 0, FSDP_AND_CP),
        ({"lora": {"rank": 4}}, 4, TP_AND_EP),  # of experts, too
        ({"critic": {"learning_rate": 1e-3}}, 0, FSDP_AND_CP),
    ],
)
def test_run_continues_on_another_number_of_ranks(tmp_path, extra, num_experts, meshes):
    # tp divides the vocabulary: an even number of letters, and two more tokens.
    make_tiny_model(tmp_path / "model", num_experts=num_experts, alphabet=f"{ALPHABET}k")
    if "critic" in extra:
        extra = {**extra, "scoring": {"workers": 1, "advantages": {"type": "gae"}}}
    first_step = 1
    for steps, mesh in enumerate(meshes, start=2):
        if steps == 4:  # on another machine, from the copy of the checkpoint
            shutil.rmtree(tmp_path / "run")
            first_step = 4
        settings = {**settings_of(tmp_path, mesh=mesh, steps=steps), **extra}
        result = mr.train(settings, tasks=TASKS, scorers=[share_of_digits], resume=steps > 2)
        rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(first_step, steps + 1))
        assert rows[-1]["checkpoint/upload_failures"] == 0
        # The engines have the weights that the ranks trained; older ones would differ by 0.01.
        assert all(row["mismatch/logprob"] < 1e-5 for row in rows), rows
        samples = read_samples(RunDir(tmp_path / "run"), steps)  # of all ranks
        assert len(samples) == 4
        assert all(rollout.trainer_logprobs for one in samples for rollout in one.rollouts)
    if "lora" not in extra:
        assert AutoModelForCausalLM.from_pretrained(result.checkpoint)
