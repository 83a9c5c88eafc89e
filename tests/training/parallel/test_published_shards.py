"""Weights that tensor and expert parallelism divide are published whole."""

import pytest
import torch

from millrace.bench import ranks as bench
from millrace.bench.rank_processes import run_ranks
from millrace.training.parallel.ranks import Ranks
from millrace.weights.gathering import GatheringSender
from millrace.weights.transport import make_receiver, make_sender

FEATURES = ("mixture", "lora of experts")


def published(ranks: Ranks, folder) -> dict[str, dict[str, torch.Tensor]]:
    """What an engine receives, by feature; on rank 0."""
    received = {}
    sender = GatheringSender(lambda: make_sender("shm", dtype=torch.float32))
    for version, name in enumerate(FEATURES):
        trainer, _ = bench.make_trainer(bench.FEATURES[name], ranks, folder, device="cpu")
        update = sender.publish(version, trainer.policy.weights())
        if ranks.rank == 0:
            receiver = make_receiver("shm")
            staged = receiver.stage(update)
            received[name] = {key: tensor.numpy().copy() for key, tensor in staged.items()}
            receiver.close()
        sender.release(version)
    sender.close()
    return received


@pytest.mark.slow
def test_divided_weights_are_published_as_those_of_one_rank(tmp_path):
    bench._make_model(tmp_path, is_mixture=True)
    found = run_ranks(published, tmp_path, sizes=bench.MESHES["tp 2 ep 2"])
    for name in FEATURES:
        trainer, _ = bench.make_trainer(bench.FEATURES[name], Ranks(), tmp_path, device="cpu")
        expected = trainer.policy.weights()
        assert list(found[name]) == list(expected)
        for key, weight in expected.items():
            assert torch.equal(torch.from_numpy(found[name][key]), weight), key
