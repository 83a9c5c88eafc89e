"""Optimizers over the shards of two ranks, against one rank with the same gradients."""

import itertools
from pathlib import Path

import torch
import torch.distributed as dist
from architectures import MIXTURE, tiny_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.multiprocessing.spawn import spawn
from transformers import PreTrainedModel

from millrace.config.training import ADAMW, MUON
from millrace.training.checkpoints.optimizer_state import load_named_state, named_state
from millrace.training.checkpoints.snapshot import host_copy
from millrace.training.layers import decoder_layers
from millrace.training.optimizer import TrainSettings, build_optimizer

NUM_RANKS = 2


def model_of() -> PreTrainedModel:
    model = tiny_model(MIXTURE)
    torch.manual_seed(0)
    model.add_module("odd", nn.Linear(5, 3))  # two ranks cannot share three rows equally
    return model


def sharded_model() -> nn.Module:
    """A model whose layers are on two meshes, as experts may have one of their own."""
    model = model_of()
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    other = init_device_mesh("cpu", (1, NUM_RANKS), mesh_dim_names=("replicate", "shard"))
    for layer, own in zip(decoder_layers(model), (mesh, other), strict=True):
        fully_shard(layer, mesh=own)
    fully_shard(model, mesh=mesh)
    return model


def update(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(
                gradient, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        parameter.grad = gradient
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    optimizer.step()


def compare(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    for name, offload in itertools.product((ADAMW, MUON), (False, True)):
        settings = TrainSettings(optimizer=name, weight_decay=0.1, offload_optimizer=offload)
        compare_updates(settings, rank=rank, file=Path(f"{store}.state"))
    dist.destroy_process_group()


def compare_updates(settings: TrainSettings, *, rank: int, file: Path) -> None:
    whole, model = model_of(), sharded_model()
    expected, optimizer = build_optimizer(whole, settings), build_optimizer(model, settings)
    for seed in range(4):
        if seed == 2:  # resume from a copy of the state
            state = host_copy(named_state(optimizer, model))
            if rank == 0:
                torch.save(state, file)
            dist.barrier()
            optimizer = build_optimizer(model, settings)
            load_named_state(optimizer, model, torch.load(file, weights_only=True))
            dist.barrier()  # the next test replaces the file
        update(whole, expected, seed)
        update(model, optimizer, seed)
    for (name, shard), weight in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(shard, DTensor)
        assert torch.equal(shard.full_tensor(), weight), (name, settings)
        for key, value in optimizer.state[shard].items():
            if value.numel() > 1:
                size = shard.to_local().nbytes
                assert value.to_local().untyped_storage().nbytes() == size, (name, settings)
                assert torch.equal(value.full_tensor(), expected.state[weight][key]), name


def test_updates_of_shards_are_bit_for_bit_those_of_one_rank(tmp_path):
    # Raises what a rank raised.
    spawn(compare, (str(tmp_path / "store"),), nprocs=NUM_RANKS)
