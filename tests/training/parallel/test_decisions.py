"""What one rank finds is decided on all ranks: otherwise some would update and others would not."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants

from millrace.bench import ranks as bench
from millrace.bench.rank_processes import run_ranks
from millrace.core.errors import RunFailed
from millrace.core.microbatch import Batch, MeshSizes
from millrace.models.sharding import local_part
from millrace.training.parallel.ranks import Ranks
from millrace.training.trainer import Trainer
from millrace.training.worker import _check_equal


def start(name: str, ranks: Ranks, folder: Path, *, factor: float) -> tuple[Trainer, Batch]:
    """A trainer and its share of a batch; the advantages of rank 1 are multiplied by `factor`."""
    feature = bench.FEATURES[name]
    trainer, config = bench.make_trainer(feature, ranks, folder, device="cpu")
    (batch,) = bench._batches(feature, config, step=0, num_ranks=ranks.sizes.num_ranks)
    batch = batch.of_rank(ranks.data_rank)
    if ranks.rank == 1:
        parts = [
            dataclasses.replace(part, advantages=part.advantages * np.float32(factor))
            for part in batch.microbatches
        ]
        batch = dataclasses.replace(batch, microbatches=tuple(parts))
    return trainer, batch


def own_weights(trainer: Trainer) -> list[torch.Tensor]:
    return [local_part(weight).clone() for weight in trainer.policy.weights().values()]


def has_changed(trainer: Trainer, before: list[torch.Tensor]) -> bool:
    return any(not torch.equal(*pair) for pair in zip(own_weights(trainer), before, strict=True))


def decide(ranks: Ranks, folder: Path) -> None:
    trainer, batch = start("grpo", ranks, folder, factor=np.nan)
    before = own_weights(trainer)
    assert trainer.step(batch)["skipped/updates"] == 1
    assert trainer.skipped == (0,)
    assert not has_changed(trainer, before)

    trainer, batch = start("float16", ranks, folder, factor=1e4)
    before, scale = own_weights(trainer), trainer.policy.loss_scale
    metrics = trainer.step(batch)
    assert metrics["skipped/updates"] == 0
    assert has_changed(trainer, before)
    assert metrics["loss_scale"] < scale
    assert len(set(ranks.gather(metrics["loss_scale"], float))) == 1

    with pytest.raises(RunFailed, match=r"rank 0 has model config \w+, and rank 1 has \w+; give"):
        _check_equal(ranks, str(folder / ("mixture" if ranks.rank else "dense")), trusts=False)
    with pytest.raises(RunFailed, match=r"rank 0 has model weights \w+, and rank 1 has \w+; give"):
        _check_equal(ranks, str(folder / ("other" if ranks.rank else "dense")), trusts=False)
    _check_equal(ranks, str(folder / "dense"), trusts=False)

    # As on hosts whose caches have different versions of a model of the hub.
    constants.HF_HUB_OFFLINE = True
    constants.HF_HUB_CACHE = str(folder / "caches" / str(ranks.rank))
    with pytest.raises(RunFailed, match=r"rank 0 has model weights 0{12}, and rank 1 has 1{12}; g"):
        _check_equal(ranks, "an/example", trusts=False)
    constants.HF_HUB_CACHE = str(folder / "caches" / "0")
    _check_equal(ranks, "an/example", trusts=False)


def make_cache(folder: Path, *, commit: str, model: Path) -> None:
    """A cache of the hub with the configuration of the model "an/example"."""
    repository = folder / "models--an--example"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    shutil.copy(model / "config.json", snapshot)


def overflow_alone(ranks: Ranks, folder: Path) -> float:
    """The loss scale of a rank that computes what rank 0 does in decide()."""
    trainer, batch = start("float16", ranks, folder, factor=1.0)
    scale = trainer.policy.loss_scale
    assert trainer.step(batch)["loss_scale"] == scale
    return scale


def test_ranks_skip_updates_and_lower_the_loss_scale_together(tmp_path):
    for is_mixture in (False, True):
        bench._make_model(tmp_path, is_mixture=is_mixture)
    shutil.copytree(tmp_path / "dense", tmp_path / "other")  # of the same shape
    weights = tmp_path / "other" / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for rank in range(2):
        cache = tmp_path / "caches" / str(rank)
        make_cache(cache, commit=str(rank) * 40, model=tmp_path / "dense")
    assert overflow_alone(Ranks(), tmp_path) > 1  # so rank 1 is the reason
    run_ranks(decide, tmp_path, sizes=MeshSizes(dp_shard=2))
