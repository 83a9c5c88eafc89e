"""What two real ranks of a trainer publish together, as the controller gets it."""

import asyncio
import dataclasses
import socket
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import batch_of, random_rollout
from tiny_model import ALPHABET, make_tiny_model

from millrace.cluster.hub import Hub
from millrace.cluster.messages import Published, StartTrainer
from millrace.cluster.worker import Worker
from millrace.config import RunConfig, load_config
from millrace.core.microbatch import Batch
from millrace.training.build import build_trainer
from millrace.training.group import StepsInMemory, TrainerGroup
from millrace.weights.transport import make_receiver


def make_config(folder: Path, **settings: object) -> RunConfig:
    return load_config(
        {
            "model": str(make_tiny_model(folder / "model")),
            "run_dir": str(folder / "run"),
            "cluster": {"threads": 1},
            "placement": {"trainer": "cpu", "engines": "cpu"},
            "trainer": {"ranks": 2},
            "weights": {"payload": "delta"},
            **settings,
        }
    )


def batch_of_two_ranks() -> Batch:
    rng = np.random.default_rng(0)
    batch = batch_of([random_rollout(rng, sampled=5, vocab=len(ALPHABET)) for _ in range(4)])
    return dataclasses.replace(batch, microbatches=batch.microbatches * 2, num_ranks=2)


def flat(weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in weights.values()])


async def start_ranks(hub: Hub, config: RunConfig) -> list[Worker]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        rendezvous = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    module = "millrace.training.worker"
    ranks = await asyncio.gather(*(hub.launch(f"trainer-{i}", module) for i in range(2)))
    settings = config.model_dump(mode="json")
    await asyncio.gather(
        *(
            worker.call(
                StartTrainer(config=settings, checkpoint=None, rank=i, rendezvous=rendezvous)
            )
            for i, worker in enumerate(ranks)
        )
    )
    return ranks


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"lora": {"rank": 2}}], ids=["full", "lora"])
async def test_every_loan_and_every_step_of_two_ranks_can_be_read_and_released(tmp_path, settings):
    config = make_config(tmp_path, **settings)
    published: asyncio.Queue = asyncio.Queue()

    def on_event(name, message):
        if isinstance(message, Published):
            published.put_nowait((name, message.update))

    receiver = make_receiver("auto", payload="delta")
    async with Hub(log_dir=tmp_path, on_event=on_event) as hub:
        ranks = await start_ranks(hub, config)
        group = TrainerGroup(ranks, past=StepsInMemory(version=0), sizes=config.trainer.mesh_sizes)
        expected = build_trainer(config, path=config.model.path).policy.weights()
        # The second loan is of bytes that are still readable, the third of released ones.
        first, second = await group.borrow(), await group.borrow()
        await group.release(first)
        await group.release(second)
        third = await group.borrow()
        assert [update.version for update in (first, second, third)] == [0, 0, 0]
        received = receiver.stage(third)
        assert list(received) == list(expected)
        if config.lora is None:  # an adapter begins with values of its own
            for name, tensor in expected.items():
                assert torch.equal(received[name], tensor.to(received[name].dtype)), name
        newest = flat(received)
        for version in (1, 2, 3):
            await group.step(batch_of_two_ranks(), version=version)
            name, update = await asyncio.wait_for(published.get(), 30)
            assert (name, update.version) == ("trainer-0", version)
            group.published(update)
            previous, newest = newest, flat(receiver.stage(update))
            assert not torch.equal(newest, previous)
            await group.release(update)
            lent = await group.borrow()
            assert lent.version == version
            assert torch.equal(newest, flat(receiver.stage(lent)))
            await group.release(lent)
        await asyncio.gather(*(worker.stop() for worker in ranks))
    assert published.empty()  # the other rank announces nothing
    assert all((tmp_path / f"trainer-{i}.log").read_text() == "" for i in range(2))
