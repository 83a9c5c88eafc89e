"""The code of several ranks on a single one, over gloo on a CPU and over NCCL on a GPU."""

import functools

import pytest
import torch
import torch.distributed as dist
from test_rank_checkpoints import assert_equal, contents, save, trainer_of

from millrace.bench import ranks as bench
from millrace.bench.rank_processes import run_ranks
from millrace.core.microbatch import MeshSizes
from millrace.models.sharding import whole
from millrace.weights.gathering import GatheringSender
from millrace.weights.transport import make_receiver, make_sender


def check_one_rank(ranks, name, folder, device) -> None:
    """A step, and what becomes of its weights: an engine receives them, a checkpoint keeps them."""
    assert dist.get_backend() == ("nccl" if device == "cuda" else "gloo")
    feature = bench.FEATURES[name]
    trainer, config = bench.make_trainer(feature, ranks, folder, device=device)
    before = contents(trainer)
    metrics = trainer.step(*bench._batches(feature, config, step=0, num_ranks=1))
    assert metrics["grad_norm"] > 0
    weights = trainer.policy.weights()
    assert any(not torch.equal(whole(w), before[f"PolicyModel {n}"]) for n, w in weights.items())

    sender = GatheringSender(functools.partial(make_sender, "shm", dtype=torch.float32))
    receiver = make_receiver("shm")
    received = receiver.stage(sender.publish(1, weights))
    assert_equal(received, {name: whole(weight).cpu() for name, weight in weights.items()})
    receiver.close()
    sender.release(1)
    sender.close()

    save(trainer, folder / "step_1", ranks.for_thread())
    for others in (ranks, None):  # None: the code of a single rank
        restored = trainer_of(config, others, checkpoint=folder / "step_1")
        assert_equal(contents(restored), contents(trainer))


@pytest.mark.parametrize("name", ["critic", "lora of experts"])
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
            ],
        ),
    ],
)
def test_one_sharded_rank_trains_publishes_and_restores_its_checkpoint(tmp_path, name, device):
    bench._make_model(tmp_path, is_mixture=bench.FEATURES[name].is_mixture)
    arguments = (name, tmp_path, device)
    run_ranks(check_one_rank, *arguments, sizes=MeshSizes(), device=device, sharded=True)
