"""AdamW with 8-bit state, which torchao computes; `make test-adapters` installs it."""

import copy
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from millrace.bench.rank_processes import run_ranks
from millrace.config.training import ADAMW, ADAMW_8BIT
from millrace.core.microbatch import MeshSizes
from millrace.models.sharding import local_part, shard_like, whole
from millrace.training.checkpoints.shards import (
    load_named_state,
    named_state,
    own_parts,
    sharded_tensors,
)
from millrace.training.checkpoints.snapshot import (
    OPTIMIZER,
    TrainerSnapshot,
    host_copy,
    load_state,
)
from millrace.training.offload import OffloadedOptimizer
from millrace.training.optimizer import TrainSettings, build_optimizer
from millrace.training.parallel.ranks import Ranks

pytest.importorskip("torchao")


def model_of(rows=128) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(64, rows, bias=False)


def optimizer_of(model, name=ADAMW_8BIT, *, offload=False):
    settings = TrainSettings(optimizer=name, weight_decay=0.1, offload_optimizer=offload)
    return build_optimizer(model, settings)


def train(model, optimizer, *, seeds, learning_rate=1e-3):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = shard_like(
                torch.randn(parameter.shape, generator=generator), parameter
            )
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()


def test_updates_are_close_to_those_of_adamw_and_follow_the_learning_rate():
    model, other = model_of(), model_of()
    before = copy.deepcopy(model)
    optimizer = optimizer_of(model)
    train(model, optimizer, seeds=range(5))
    train(other, optimizer_of(other, ADAMW), seeds=range(5))
    moved = (other.weight - before.weight).norm()
    assert (model.weight - other.weight).norm() < 0.05 * moved
    unchanged = copy.deepcopy(model)
    train(model, optimizer, seeds=[5], learning_rate=0.0)
    assert torch.equal(model.weight, unchanged.weight)


def test_state_takes_8_bits_and_resumes_from_a_checkpoint(tmp_path):
    straight, resumed = model_of(), model_of()
    train(straight, optimizer_of(straight), seeds=range(4))
    first = optimizer_of(resumed)
    train(resumed, first, seeds=range(2))
    weights = copy.deepcopy(resumed.state_dict())
    snapshot = TrainerSnapshot(state=host_copy({"optimizer": first.state_dict()}), writers=())
    train(resumed, first, seeds=[9])  # the snapshot has the state before this
    snapshot.write(tmp_path)
    resumed.load_state_dict(weights)
    moments = load_state(tmp_path)["optimizer"]["state"][0]
    assert moments["exp_avg"].codes.dtype == moments["exp_avg_sq"].codes.dtype == torch.uint8
    second = optimizer_of(resumed)
    second.load_state_dict(load_state(tmp_path)["optimizer"])
    train(resumed, second, seeds=range(2, 4))
    assert torch.equal(resumed.weight, straight.weight)


def test_offloading_changes_nothing():
    plain, offloaded = model_of(), model_of()
    train(plain, optimizer_of(plain), seeds=range(3))
    train(offloaded, OffloadedOptimizer(optimizer_of(offloaded)), seeds=range(3))
    assert torch.equal(offloaded.weight, plain.weight)


def train_on_ranks(ranks: Ranks, folder: Path, start: int, offload: bool) -> None:
    """Two steps that continue from step `start`, and a checkpoint."""
    model = model_of(rows=256)
    if not ranks.is_alone:
        fully_shard(model, mesh=ranks.sharding_meshes.fsdp)
    optimizer = optimizer_of(model, offload=offload)
    if start:
        state = load_state(folder / str(start))
        with torch.no_grad():
            model.weight.copy_(shard_like(state["weight"], model.weight))
        shards = folder / str(start) / OPTIMIZER
        load_named_state(optimizer, model, state["optimizer"], shards=shards)
    train(model, optimizer, seeds=range(start, start + 2))
    for moment in ("exp_avg", "exp_avg_sq"):
        assert local_part(optimizer.state[model.weight][moment]).codes.dtype == torch.uint8
    state = {"optimizer": named_state(optimizer, model), "weight": whole(model.weight.detach())}
    parts = {OPTIMIZER: own_parts(sharded_tensors(state["optimizer"]))}
    snapshot = TrainerSnapshot(state=host_copy(state), writers=(), parts=parts)
    end = folder / str(start + 2)
    end.mkdir(exist_ok=True)
    snapshot.write(end, ranks)


def check_ranks(folder, *, offload):
    straight = model_of(rows=256)
    before, optimizer = copy.deepcopy(straight), optimizer_of(straight)
    for start, num_ranks in ((0, 2), (2, 1), (4, 4)):
        train(straight, optimizer, seeds=range(start, start + 2))
        sizes = MeshSizes(dp_shard=num_ranks)
        run_ranks(train_on_ranks, folder, start, offload, sizes=sizes)
        found = load_state(folder / str(start + 2))["weight"]
        if start == 0:  # ranks have whole blocks of numbers
            assert torch.equal(found, straight.weight)
        # A checkpoint for another number of ranks rounds the moments once more.
        moved = (straight.weight - before.weight).norm()
        assert (found - straight.weight).norm() < 0.02 * moved


@pytest.mark.timeout(600)  # every rank compiles the update
def test_ranks_quantize_their_shards_and_resume_on_another_number_of_ranks(tmp_path):
    for offload in (False, True):
        (tmp_path / str(offload)).mkdir()
        check_ranks(tmp_path / str(offload), offload=offload)
