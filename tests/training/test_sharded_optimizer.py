"""Optimizers over the shards of two ranks, against one rank with the same gradients."""

import itertools
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from architectures import MIXTURE, tiny_model
from full_disk import files_of_at_most
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from millrace.bench.rank_processes import run_ranks
from millrace.config.training import ADAMW, MUON
from millrace.core.errors import CheckpointError
from millrace.core.microbatch import MeshSizes
from millrace.training.checkpoints.directory import write_checkpoint
from millrace.training.checkpoints.shards import (
    load_named_state,
    named_state,
    own_parts,
    sharded_tensors,
    write_parts,
)
from millrace.training.checkpoints.snapshot import TrainerSnapshot, host_copy, model_writer
from millrace.training.layers import decoder_layers
from millrace.training.optimizer import TrainSettings, build_optimizer
from millrace.training.parallel.ranks import Ranks

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


def compare(ranks: Ranks, folder: Path) -> None:
    for name, offload in itertools.product((ADAMW, MUON), (False, True)):
        settings = TrainSettings(optimizer=name, weight_decay=0.1, offload_optimizer=offload)
        compare_updates(settings, rank=ranks.rank, folder=folder / "state")
    compare_directories(ranks, folder / "checkpoints")


def compare_updates(settings: TrainSettings, *, rank: int, folder: Path) -> None:
    whole, model = model_of(), sharded_model()
    expected, optimizer = build_optimizer(whole, settings), build_optimizer(model, settings)
    for seed in range(4):
        if seed == 2:  # resume from a copy of the state
            state = named_state(optimizer, model)
            write_parts(folder, own_parts(sharded_tensors(state)), rank=rank)
            dist.barrier()
            optimizer = build_optimizer(model, settings)
            load_named_state(optimizer, model, host_copy(state), shards=folder)
            dist.barrier()  # the next test replaces the files
        update(whole, expected, seed)
        update(model, optimizer, seed)
    for (name, shard), weight in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(shard, DTensor)
        assert is_close(shard.full_tensor(), weight), (name, settings)
        for key, value in optimizer.state[shard].items():
            if value.numel() > 1:
                size = shard.to_local().nbytes
                assert value.to_local().untyped_storage().nbytes() == size, (name, settings)
                assert is_close(value.full_tensor(), expected.state[weight][key]), name


def is_close(value: torch.Tensor, expected: torch.Tensor) -> bool:
    """To the last bits: vector instructions round other than those for the rest of a tensor."""
    return torch.allclose(value, expected, rtol=1e-6, atol=1e-9)


def compare_directories(ranks: Ranks, folder: Path) -> None:
    """Of a model that no rank holds as a whole, and of one that a rank cannot write."""
    model = sharded_model()

    def save(directory: Path) -> None:
        parts: dict = {}
        writer = model_writer(model, model.state_dict(keep_vars=True), parts)
        own, total = (
            sum(map(count, tensors))
            for count, tensors in (
                (lambda tensor: tensor.to_local().numel(), parts["weights"].values()),
                (torch.numel, model.parameters()),
            )
        )
        assert own < 0.6 * total
        snapshot = TrainerSnapshot(state={}, writers=(writer,), parts=parts)
        write_checkpoint(
            directory,
            write=lambda unfinished: snapshot.write(unfinished, ranks),
            run_state={},
            needed_bytes=0,
            ranks=ranks,
        )

    save(folder / "step_1")
    is_full = ranks.rank == 1
    with files_of_at_most(1000) if is_full else nullcontext(), pytest.raises(CheckpointError) as e:
        save(folder / "step_2")
    assert ("(file too large)" if is_full else "(file too large, on rank 1)") in str(e.value)
    if ranks.rank == 0:
        assert [path.name for path in folder.iterdir()] == ["step_1"]
        assert not (folder / "step_1" / "weights").exists()
        expected = dict(model_of().named_parameters())
        loaded = AutoModelForCausalLM.from_pretrained(folder / "step_1")
        for name, weight in loaded.named_parameters():
            assert torch.equal(weight, expected[name]), name


def test_updates_of_shards_are_those_of_one_rank(tmp_path):
    run_ranks(compare, tmp_path, sizes=MeshSizes(dp_shard=NUM_RANKS))  # raises if a rank does
