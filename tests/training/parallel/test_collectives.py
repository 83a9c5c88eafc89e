"""Ranks with different work make the same collectives in the same order; otherwise they hang."""

import copy
import functools
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from test_rank_checkpoints import save
from torch import nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
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
from millrace.training.losses.recipes import SUPERVISED
from millrace.training.optimizer import Schedule, TrainSettings
from millrace.training.parallel.ranks import Ranks, sum_unsharded
from millrace.training.policy_model import PolicyModel
from millrace.training.trainer import Trainer
from millrace.weights.gathering import GatheringSender
from millrace.weights.transport import make_sender

GATHER, SCATTER, SUM = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
GATHER_ONE = "all_gather_into_tensor"  # of one tensor, by whole()
EXCHANGES = {"alltoall_base_", "all_to_all_single"}
TRANSFERS = {"send", "recv_"}  # of a rank to rank 0, which gathers weights to be published
LEFT_OUT = "a collective that rank 1 leaves out"
PUBLISHED, SAVED = "weights that are published", "a checkpoint"


class RecordedCollectives(TorchDispatchMode):
    """Records each collective of this thread, and so of its backward passes: its name, the sizes of
    its tensors and its ranks. Below the functions of torch.distributed, no caller is missed. Both
    ends of a transfer are recorded in the same way."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[tuple[int, ...]], list[int]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            leaves = tree_leaves((args, kwargs))
            if (group := group_of(leaves)) is not None:
                name = func.name().partition("::")[2]
                sizes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]
                if name in EXCHANGES:  # each rank has as many rows as it sends or gets
                    sizes = [size[1:] for size in sizes]
                ranks = dist.get_process_group_ranks(group)
                if name in TRANSFERS:
                    other, tag = (leaf for leaf in leaves if isinstance(leaf, int))
                    name, ranks = f"transfer {tag}", sorted((dist.get_rank(), ranks[other]))
                self.calls.append((name, sizes, ranks))
        return func(*args, **(kwargs or {}))


def group_of(arguments: list) -> dist.ProcessGroup | None:
    """The group of a collective; functional ones have its name, last. None for operators that send
    nothing, such as a wait."""
    for value in arguments:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    names = [value for value in arguments if isinstance(value, str)]
    return _resolve_process_group(names[-1]) if names else None


def first_mismatch(of_ranks: list[list[tuple]]) -> tuple | None:
    """Two ranks, and the first calls, of those that concern both, that differ."""
    for pair in itertools.combinations(range(len(of_ranks)), 2):
        both = ([call for call in of_ranks[rank] if set(pair) <= set(call[2])] for rank in pair)
        for calls in itertools.zip_longest(*both):
            if calls[0] != calls[1]:
                return pair, *calls
    return None


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


def check_buckets(ranks) -> None:
    """Gradients that FSDP does not sum are copied a few at a time."""
    gradients = [torch.full((size,), ranks.rank + 1.0) for size in (3, 5, 2, 9)]
    with RecordedCollectives() as recorded:
        sum_unsharded(gradients, ranks, bucket_bytes=24)
    assert [sizes for _, sizes, _ in recorded.calls] == [[(3,)], [(7,)], [(9,)]]
    assert all((gradient == 3).all() for gradient in gradients)


def gathered_calls(ranks, recorded: RecordedCollectives) -> list[list[tuple]]:
    found = [[]] * ranks.sizes.num_ranks
    dist.all_gather_object(found, recorded.calls)
    return found


def published_calls(ranks, trainer) -> list[list[tuple]]:
    make = functools.partial(make_sender, "shm", dtype=torch.float32)
    sender = GatheringSender(make, bucket_bytes=2**14)
    with RecordedCollectives() as recorded:
        sender.publish(1, trainer.policy.weights())
    sender.release(1)
    sender.close()
    return gathered_calls(ranks, recorded)


def saved_calls(ranks, trainer, folder, *, merged_into) -> list[list[tuple]]:
    with RecordedCollectives() as recorded:
        save(trainer, folder / "step_1", ranks.for_thread(), merged_into=merged_into)
    return gathered_calls(ranks, recorded)


def sequences(ranks, features, folder) -> dict[str, list[list[tuple]]]:
    """The collectives of every rank, by feature."""
    found = {}
    for name, feature in features.items():
        shares = ranks.sizes.num_data_ranks
        with RecordedCollectives() as recorded, warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # of functions that torch will remove
            bench.train(feature, ranks, folder, num_shares=shares, device="cpu")
        found[name] = gathered_calls(ranks, recorded)
    first, *_, last = [*features.values(), *features.values()]
    trainer, _ = bench.make_trainer(first, ranks, folder, device="cpu")
    found[PUBLISHED] = published_calls(ranks, trainer)
    trainer, config = bench.make_trainer(last, ranks, folder, device="cpu")
    trainer.step(*bench._shares(last, config, ranks, step=0, num_shares=shares))
    merged_into = "merged" if config.lora else None
    found[SAVED] = saved_calls(ranks, trainer, folder, merged_into=merged_into)
    if "minibatches" in features:
        compare_listed_experts(ranks, folder)
        check_buckets(ranks)
        with pytest.raises(
            RunFailed, match=r"rank 0 has torch 2\.0, and rank 1 has 2\.1; give all"
        ):
            ranks.check_equal({"millrace": "1", "torch": f"2.{ranks.rank}"})
        with RecordedCollectives() as recorded:
            ranks.sum([1.0])
            if ranks.rank == 0:
                dist.all_reduce(torch.zeros(7), async_op=True)
        if ranks.rank == 1:  # after it left that out, so that rank 0 does not wait for ever
            dist.all_reduce(torch.zeros(7))
        found[LEFT_OUT] = gathered_calls(ranks, recorded)
    return found


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        (
            MeshSizes(dp_shard=2),
            (
                *("grpo", "critic", "lora", "minibatches", "one group", "baseline", "muon"),
                *("dora", SUPERVISED, "teacher's top k", "router loss"),
            ),
        ),
        (MeshSizes(dp_replicate=2, dp_shard=2), ("grpo", "lora")),
        (MeshSizes(cp=2), ("grpo", "critic", "lora")),
        (MeshSizes(dp_shard=2, ep=2), ("lora of experts",)),
        (MeshSizes(cp=2, ep=2), ("lora of experts", "route replay")),
        pytest.param(
            MeshSizes(cp=2, tp=2),
            ("lora", "dora", "muon", SUPERVISED, "teacher's top k", "critic"),
            marks=pytest.mark.slow,
        ),
        pytest.param(MeshSizes(dp_shard=2, ep=2), ("route replay",), marks=pytest.mark.slow),
        pytest.param(
            MeshSizes(dp_shard=2, tp=2),
            ("critic", "lora", "muon", "one group", "dora"),  # the last one is saved
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_make_the_same_collectives(tmp_path, sizes, names):
    features = {name: bench.FEATURES[name] for name in names}
    for is_mixture in {feature.is_mixture for feature in features.values()}:
        bench._make_model(tmp_path, is_mixture=is_mixture)
    found = run_ranks(sequences, features, tmp_path, sizes=sizes)
    if LEFT_OUT in found:
        pair, first, second = first_mismatch(found.pop(LEFT_OUT))
        assert pair == (0, 1)
        assert first == (SUM, [(7,)], [0, 1])
        assert second is None
    published, saved = found.pop(PUBLISHED), found.pop(SAVED)
    assert first_mismatch(published) is None
    assert any(call[0].startswith("transfer") for call in published[0])
    assert first_mismatch(saved) is None
    assert saved[0]
    assert (tmp_path / "step_1").is_dir()
    gathers: dict[str, int] = {}
    for name, of_ranks in found.items():
        assert len(of_ranks) == sizes.num_ranks
        gathers[name] = [call[0] for call in of_ranks[0]].count(GATHER_ONE)
        kinds = {call[0] for call in of_ranks[0]}
        assert {GATHER, SUM} <= kinds, name
        # FSDP sums the gradients of the weights that it shards; no others are trained here.
        assert (SCATTER in kinds) == ("lora" not in features[name].settings), name
        assert bool(EXCHANGES & kinds) == (sizes.cp * sizes.ep > 1), name
        assert first_mismatch(of_ranks) is None, name
    if {"grpo", "muon"} <= gathers.keys():  # whose steps gather each matrix
        assert gathers["muon"] > gathers["grpo"]
