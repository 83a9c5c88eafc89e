"""Ranks with different work make the same collectives in the same order; otherwise they hang."""

import functools

import pytest
import torch.distributed as dist

from millrace.bench import ranks as bench
from millrace.bench.rank_processes import run_ranks
from millrace.core.mesh import MeshSizes

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
    """Add each collective of this process to `calls`."""

    def recorded(name, function, *args, **kwargs):
        tensors = [value for value in (*args, *kwargs.values()) if hasattr(value, "shape")]
        sizes = [tuple(tensor.shape) for tensor in tensors]
        calls.append((name, sizes, dist.get_world_size(kwargs.get("group"))))
        return function(*args, **kwargs)

    for name in COLLECTIVES:
        setattr(dist, name, functools.partial(recorded, name, getattr(dist, name)))


def sequences(ranks, features, folder) -> dict[str, list[list]]:
    """The collectives of every rank, by feature."""
    calls: list = []
    record_collectives(calls)
    found = {}
    for name, feature in features.items():
        calls.clear()
        shares = ranks.sizes.num_data_ranks
        bench.train(feature, ranks, folder, num_shares=shares, device="cpu")
        found[name] = [[]] * ranks.sizes.num_ranks
        dist.all_gather_object(found[name], [str(call) for call in calls])
    return found


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        (MeshSizes(dp_shard=2), ("grpo", "critic", "lora", "minibatches", "one group")),
        (MeshSizes(cp=2), ("grpo", "critic", "lora")),
        (MeshSizes(dp_shard=2, ep=2), ("lora of experts",)),
    ],
)
def test_ranks_make_the_same_collectives(tmp_path, sizes, names):
    bench._make_model(tmp_path, is_mixture=sizes.ep > 1)
    features = {name: bench.FEATURES[name] for name in names}
    found = run_ranks(sequences, features, tmp_path, sizes=sizes)
    for name, (first, second) in found.items():
        assert any(kind in call for call in first for kind in GATHER), name
        assert any("all_reduce" in call for call in first), name
        assert any("all_to_all" in call for call in first) == (sizes.cp * sizes.ep > 1), name
        assert first == second, name
