"""Ranks with different work make the same collectives in the same order; otherwise they hang."""

import functools

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
        bench.train(feature, ranks, folder, num_shares=2, device="cpu")
        found[name] = ranks.gather([str(call) for call in calls], list[str])
    return found


def test_ranks_make_the_same_collectives(tmp_path):
    bench._make_model(tmp_path, is_mixture=False)
    names = ("grpo", "critic", "lora", "minibatches", "one group")
    features = {name: bench.FEATURES[name] for name in names}
    found = run_ranks(sequences, features, tmp_path, sizes=MeshSizes(dp_shard=2))
    for name, (first, second) in found.items():
        assert any(kind in call for call in first for kind in GATHER), name
        assert any("all_reduce" in call for call in first), name
        assert first == second, name
