"""AdamW with 8-bit state, which torchao computes; `make test-adapters` installs it."""

import copy

import pytest
import torch

from millrace.config.training import ADAMW, ADAMW_8BIT
from millrace.training.checkpoints.snapshot import TrainerSnapshot, host_copy, load_state
from millrace.training.offload import OffloadedOptimizer
from millrace.training.optimizer import TrainSettings, build_optimizer

pytest.importorskip("torchao")


def model_of() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(64, 128, bias=False)


def optimizer_of(model, name=ADAMW_8BIT):
    return build_optimizer(model, TrainSettings(optimizer=name, weight_decay=0.1))


def train(model, optimizer, *, seeds, learning_rate=1e-3):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
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
