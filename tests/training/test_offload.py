import copy

import pytest
import torch
from architectures import tiny_model

from millrace.config.training import ADAMW, MUON
from millrace.core.errors import ConfigError
from millrace.training.checkpoints.snapshot import host_copy
from millrace.training.offload import OffloadedOptimizer
from millrace.training.optimizer import TrainSettings, build_optimizer

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


def optimizer_of(model, name, *, bucket_bytes=None):
    made = build_optimizer(model, TrainSettings(optimizer=name, weight_decay=0.1))
    return made if bucket_bytes is None else OffloadedOptimizer(made, bucket_bytes=bucket_bytes)


def train(model, optimizer, *, seeds):
    """One update per seed, with gradients that depend on the seed alone."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.device)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 / (1 + seed)
        optimizer.step()


def assert_same(model, other):
    for (name, weight), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(weight, expected), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bucket_bytes", [1, 100_000, 2**30])
@pytest.mark.parametrize("name", [ADAMW, MUON, "torch.optim:Adagrad"])
def test_updates_are_bit_for_bit_those_without_offloading(name, bucket_bytes, device):
    plain = tiny_model("qwen3").to(device)
    offloaded = copy.deepcopy(plain)
    train(plain, optimizer_of(plain, name), seeds=range(3))
    optimizer = optimizer_of(offloaded, name, bucket_bytes=bucket_bytes)
    train(offloaded, optimizer, seeds=range(3))
    assert_same(offloaded, plain)
    moments = [v for s in optimizer.state.values() for v in s.values() if v.numel() > 1]
    assert moments
    assert all(value.device.type == "cpu" for value in moments)
    assert all(value.is_pinned() for value in moments) == (device == "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [ADAMW, MUON])
@pytest.mark.parametrize(("before", "after"), [(None, 100_000), (100_000, 100_000), (1, None)])
def test_a_checkpoint_resumes_with_or_without_offloading(name, before, after, device):
    straight = tiny_model("qwen3").to(device)
    resumed = copy.deepcopy(straight)
    train(straight, optimizer_of(straight, name), seeds=range(4))
    first = optimizer_of(resumed, name, bucket_bytes=before)
    train(resumed, first, seeds=range(2))
    second = optimizer_of(resumed, name, bucket_bytes=after)
    second.load_state_dict(host_copy(first.state_dict()))
    train(resumed, second, seeds=range(2, 4))
    assert_same(resumed, straight)


def test_a_parameter_without_a_gradient_is_left_alone():
    model = torch.nn.Sequential(torch.nn.Linear(80, 80), torch.nn.Linear(80, 80))
    before = copy.deepcopy(model)
    optimizer = optimizer_of(model, ADAMW, bucket_bytes=1)
    train(model[1], optimizer, seeds=[0])
    assert_same(model[0], before[0])
    assert not torch.equal(next(model[1].parameters()), next(before[1].parameters()))
    optimizer.zero_grad()
    optimizer.step()
    assert set(optimizer.state) == set(model[1].parameters())


class CountingSGD(torch.optim.SGD):
    """Counts its steps per group of parameters."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


def test_an_optimizer_with_state_per_group_is_refused():
    model = torch.nn.Linear(3, 3)
    optimizer = OffloadedOptimizer(CountingSGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="does not fit CountingSGD, which keeps state for all"):
        train(model, optimizer, seeds=[0])


def test_the_setting_offloads():
    settings = TrainSettings(offload_optimizer=True)
    assert isinstance(build_optimizer(torch.nn.Linear(2, 2), settings), OffloadedOptimizer)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_device_holds_two_buckets_of_state():
    size = 2048 * 2048 * 4  # bytes of one matrix; AdamW's state has twice as many
    peaks = []
    for bucket_bytes in (None, size):
        model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(12)))
        optimizer = optimizer_of(model.to("cuda"), ADAMW, bucket_bytes=bucket_bytes)
        train(model, optimizer, seeds=range(2))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        peaks.append((before, torch.cuda.max_memory_allocated()))
        assert torch.cuda.memory_allocated() == before
        del model, optimizer
    (held, _), (held_offloaded, peak_offloaded) = peaks
    assert held - held_offloaded >= 24 * size
    assert peak_offloaded - held_offloaded <= 5 * size
