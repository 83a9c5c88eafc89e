"""Weights that tensor and expert parallelism divide are published whole."""

import functools
import itertools

import numpy as np
import pytest
import torch

from millrace.bench import ranks as bench
from millrace.bench.rank_processes import run_ranks
from millrace.models.sharding import local_part
from millrace.training.parallel.ranks import Ranks
from millrace.weights.gathering import GatheringSender
from millrace.weights.transport import make_receiver, make_sender

FEATURES = ("mixture", "lora of experts")
TRANSPORTS, PAYLOADS = ("shm", "disk", "collective"), ("full", "delta")
Received = dict[tuple[str, str, str], dict[str, np.ndarray]]


def published(ranks: Ranks, folder) -> Received:
    """What an engine receives, by feature, transport and payload; on rank 0."""
    received = {}
    for name in FEATURES:
        trainer, _ = bench.make_trainer(bench.FEATURES[name], ranks, folder, device="cpu")
        for transport, payload in itertools.product(TRANSPORTS, PAYLOADS):
            directory = folder / name / transport / payload
            make = functools.partial(
                make_sender, transport, dtype=torch.float32, payload=payload, directory=directory
            )
            sender = GatheringSender(make)
            receiver = make_receiver(transport, payload=payload) if ranks.rank == 0 else None
            weights = {n: w.clone() for n, w in trainer.policy.weights().items()}
            for version in (1, 2):
                update = sender.publish(version, weights)
                if receiver is not None:
                    assert (update.delta is not None) == (payload == "delta" and version == 2)
                    staged = receiver.stage(update)
                    found = {key: tensor.numpy().copy() for key, tensor in staged.items()}
                    received[name, transport, payload] = found
                ranks.most(version)  # the engine has it
                sender.release(version)
                local_part(weights[min(weights)]).add_(1)  # a small change, sent as a delta
            if receiver is not None:
                receiver.close()
            sender.close()
    return received


@pytest.mark.slow
def test_divided_weights_are_published_as_those_of_one_rank(tmp_path):
    bench._make_model(tmp_path, is_mixture=True)
    received = run_ranks(published, tmp_path, sizes=bench.MESHES["tp 2 ep 2"])
    assert len(received) == len(FEATURES) * len(TRANSPORTS) * len(PAYLOADS)
    for (name, *_), found in received.items():
        trainer, _ = bench.make_trainer(bench.FEATURES[name], Ranks(), tmp_path, device="cpu")
        expected = trainer.policy.weights()
        assert list(found) == list(expected)
        for key, weight in expected.items():
            change = 1 if key == min(expected) else 0
            assert torch.equal(torch.from_numpy(found[key]), weight + change), key
