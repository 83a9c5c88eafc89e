"""Ranks with different work make the same collectives in the same order; otherwise they hang."""

import copy
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from millrace.bench import ranks as bench
from millrace.bench.rank_processes import run_ranks
from millrace.config import LoraConfig, load_config
from millrace.core.errors import RunFailed
from millrace.core.microbatch import MeshSizes
from millrace.models.attention.packed import PACKED_ATTENTION
from millrace.models.lora.trained import TrainedAdapter
from millrace.models.sharding import shard, whole
from millrace.training.build import seed_everything
from millrace.training.losses.policy_loss import PolicyLoss
from millrace.training.optimizer import Schedule, TrainSettings
from millrace.training.parallel.ranks import Ranks
from millrace.training.policy_model import PolicyModel
from millrace.training.trainer import Trainer

# FSDP's names for gathering and scattering depend on the version of torch.
GATHER = {"all_gather_single", "all_gather_into_tensor"}
COLLECTIVES = [
    name
    for name in (
        *("all_reduce", "all_gather", "reduce_scatter_tensor", "reduce_scatter_single"),
        "all_to_all_single",
        *GATHER,
    )
    if hasattr(dist, name)
]


def record_collectives(calls: list) -> None:
    """Add each collective of this process to `calls`: its name, sizes and ranks."""

    def recorded(name, function, *args, **kwargs):
        tensors = [value for value in (*args, *kwargs.values()) if hasattr(value, "shape")]
        sizes = [tuple(tensor.shape) for tensor in tensors]
        members = dist.get_process_group_ranks(kwargs.get("group") or dist.group.WORLD)
        calls.append((name, sizes, members))
        return function(*args, **kwargs)

    for name in COLLECTIVES:
        setattr(dist, name, functools.partial(recorded, name, getattr(dist, name)))


class ListedExperts(nn.Module):
    """Experts with weights of their own, one of which computes all tokens."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.experts = nn.ModuleList([mlp, copy.deepcopy(mlp)])
        self.chosen = 0

    def forward(self, x):
        return self.experts[self.chosen](x)


def gradients_of_listed_experts(ranks, folder, **lora) -> dict[str, torch.Tensor]:
    """Gradients of a batch of two shares, each of which uses an expert of its own, by name."""
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32)
    mixtures = [ListedExperts(layer.mlp) for layer in model.model.layers]
    for layer, mixture in zip(model.model.layers, mixtures, strict=True):
        layer.mlp = mixture
    model.eval().set_attn_implementation(PACKED_ATTENTION)
    if not ranks.is_alone:
        shard(model, root=model, meshes=ranks.sharding_meshes)
    seed_everything(0)
    adapter = TrainedAdapter(model, LoraConfig(**lora), model_path=str(folder)) if lora else None
    policy = PolicyModel(model, settings=TrainSettings(), adapter=adapter, ranks=ranks)
    trainer = Trainer(
        policy, loss=PolicyLoss(), schedule=Schedule(learning_rate=0.0, total_steps=1)
    )
    (batch,) = bench._batches(
        bench.FEATURES["grpo"], load_config({"model": "m"}), step=0, num_ranks=2
    )
    total: dict[str, torch.Tensor] = {}
    for share in range(2) if ranks.is_alone else [ranks.data_rank]:
        for mixture in mixtures:
            mixture.chosen = share
        trainer.accumulate(batch.of_rank(share))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] = total.get(name, 0) + whole(parameter.grad)
    return total


def compare_listed_experts(ranks, folder) -> None:
    for lora in ({}, {"rank": 4}):
        found = gradients_of_listed_experts(ranks, folder, **lora)
        expected = gradients_of_listed_experts(Ranks(), folder, **lora)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-7), name
            # B is 0 at first, so A has no gradient yet.
            assert gradient.any() or "lora_A" in name, name


def sequences(ranks, features, folder) -> dict[str, list[list[tuple]]]:
    """The collectives of every rank, by feature."""
    calls: list = []
    record_collectives(calls)
    found = {}
    for name, feature in features.items():
        calls.clear()
        shares = ranks.sizes.num_data_ranks
        bench.train(feature, ranks, folder, num_shares=shares, device="cpu")
        found[name] = [[]] * ranks.sizes.num_ranks
        dist.all_gather_object(found[name], list(calls))
    if "minibatches" in features:
        compare_listed_experts(ranks, folder)
        with pytest.raises(
            RunFailed, match=r"rank 0 has torch 2\.0, and rank 1 has 2\.1; give all"
        ):
            ranks.check_equal({"millrace": "1", "torch": f"2.{ranks.rank}"})
    return found


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        (MeshSizes(dp_shard=2), ("grpo", "critic", "lora", "minibatches", "one group")),
        (MeshSizes(cp=2), ("grpo", "critic", "lora")),
        (MeshSizes(dp_shard=2, ep=2), ("lora of experts",)),
        pytest.param(
            MeshSizes(dp_shard=2, tp=2), ("critic", "lora", "one group"), marks=pytest.mark.slow
        ),
    ],
)
def test_ranks_make_the_same_collectives(tmp_path, sizes, names):
    bench._make_model(tmp_path, is_mixture=sizes.ep > 1)
    features = {name: bench.FEATURES[name] for name in names}
    found = run_ranks(sequences, features, tmp_path, sizes=sizes)
    for name, of_ranks in found.items():
        assert len(of_ranks) == sizes.num_ranks
        kinds = {call[0] for call in of_ranks[0]}
        assert kinds & GATHER, name
        assert "all_reduce" in kinds, name
        assert ("all_to_all_single" in kinds) == (sizes.cp * sizes.ep > 1), name
        for pair in itertools.combinations(range(sizes.num_ranks), 2):
            first, second = (
                [call for call in of_ranks[rank] if set(pair) <= set(call[2])] for rank in pair
            )
            assert first, name
            assert first == second, (name, pair)
