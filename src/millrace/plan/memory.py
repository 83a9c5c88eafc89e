"""What fits into the memory of GPUs: engines with their KV, and ranks of the trainer.

Counted are the bytes that docs/how-to/share-one-gpu.md and docs/explanation/ranks.md list. Promise:
nothing depends on the devices of this host, which need not be those that are planned for.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

from millrace.config.training import MeshConfig
from millrace.core.microbatch import MeshSizes
from millrace.plan.model_costs import GIB, HOST_GPUS, ModelShape
from millrace.plan.planned_run import SEARCHED, PlannedRun

RUNTIME_BYTES = 2 * GIB  # CUDA context, graphs and fragmentation, of each process
_ROOM = 0.95  # share of a GPU that may be used
_MAX_SEQUENCES = 256  # of one engine, if engine.max_sequences is not set


def fitting(run: PlannedRun) -> Iterator[dict[str, Any]]:
    """Splits whose memory fits, with the fewest GPUs per engine."""
    tps = (1,) if run.config.engine.type == "embedded" else (1, 2, 4, 8)
    engine = next((fit for tp in tps if (fit := engine_fit(run, tp))), None)
    if engine is None:
        return
    wanted = {run.num_gpus * part // 16 for part in range(1, 16)} | {1, 2, 4}
    whole = {n if n <= HOST_GPUS else n - n % HOST_GPUS for n in wanted}  # hosts of ranks are full
    for ranks in sorted(whole - {0}):
        engines = _num_engines(run.num_gpus, ranks=ranks, tp=engine["tp"])
        # Sharded over all hosts, or over each: then weights stay within it, and take more memory.
        for copies in sorted({1, max(1, ranks // HOST_GPUS)}) if engines > 0 else ():
            if (trainer := trainer_fit(run, ranks, copies=copies)) is not None:
                yield {"engines": engines, "ranks": ranks, **engine, **trainer}


def _num_engines(num_gpus: int, *, ranks: int, tp: int) -> int:
    """The number of engines beside the ranks; hosts without ranks have equally many."""
    if num_gpus <= HOST_GPUS:
        return (num_gpus - ranks) // tp
    here = max(0, HOST_GPUS - ranks) // tp
    hosts = -(-num_gpus // HOST_GPUS) - max(1, ranks // HOST_GPUS)
    remote = (num_gpus - ranks) // tp - here
    return here + remote // hosts * hosts if hosts else here


def engine_fit(run: PlannedRun, tp: int) -> dict[str, int] | None:
    """Returns None if the weights and one sequence do not fit."""
    # GPUs beyond the number of key-value heads have copies of them.
    token_bytes, longest = run.shape.kv_bytes // min(tp, run.shape.kv_heads), run.lengths.longest
    fixed = weights_bytes(run) // tp + RUNTIME_BYTES
    room = int(_ROOM * run.memory_bytes) - fixed
    if room < token_bytes * longest:
        return None
    mean = run.lengths.prompt_tokens + run.lengths.mean
    engine = run.config.engine
    most = engine.max_sequences if "max_sequences" in engine.model_fields_set else _MAX_SEQUENCES
    sequences = max(1, min(most, int(room / token_bytes / mean)))
    kv_bytes = min(room, int(max(sequences * mean * 1.25, longest) * token_bytes))
    sizes = {"kv_bytes": kv_bytes, "engine_bytes": fixed + kv_bytes}
    return {"tp": tp, "max_sequences": sequences, **sizes}


def weights_bytes(run: PlannedRun) -> int:
    """What an engine holds of the model, as docs/how-to/share-one-gpu.md counts it: its weights and
    two staged versions; of an adapter also what it changes, twice (docs/how-to/lora.md)."""
    config, shape, versions = run.config, run.shape, run.update_bytes
    weights = 2 * shape.num_weights
    if config.engine.has_servers:  # these have no second copy
        return weights
    staged = 2 * versions if run.stages_on_gpu else versions  # of others while it is copied
    if config.lora is None:
        return weights + staged
    is_merged = config.lora.apply == "merged" or (
        config.lora.apply == "auto" and not config.engine.adapters and not config.adapter_policies
    )
    # Merged: the weights of the base model, and new ones. Unmerged: those in use, and new ones.
    changed = 2 * (shape.num_weights - shape.table_weights) if is_merged else versions
    return weights + staged + 2 * changed


def trainer_fit(run: PlannedRun, ranks: int, *, copies: int = 1) -> dict[str, Any] | None:
    """Returns None if the state and the activations of a microbatch do not fit."""
    ways = (False, True) if not run.config.trainer.gradient_checkpointing else (True,)
    for mesh, recomputes in product(_meshes(run.shape, ranks, copies=copies), ways):
        needed = trainer_bytes(run, ranks=ranks, mesh=mesh, recomputes=recomputes)
        if needed <= _ROOM * run.memory_bytes:
            sizes = {f"trainer_{name}": getattr(mesh, name) for name in SEARCHED}
            return {**sizes, "gradient_checkpointing": recomputes, "trainer_bytes": needed}
    return None


def _meshes(shape: ModelShape, ranks: int, *, copies: int = 1) -> Iterator[MeshSizes]:
    """Meshes that divide the ranks of each copy and the model, within a host; those with tp, or ep
    of a mixture, come after those with cp alone. tp does not divide experts."""
    ranks //= copies
    for more, cp in product((1, 2, 4, 8), (1, 2, 4, 8)):
        tp, ep = (1, more) if shape.experts else (more, 1)
        shared = [(n, tp * cp) for n in (HOST_GPUS, ranks, shape.heads, shape.kv_heads)]
        alone = [(shape.mlp, tp), (shape.vocab, tp), (shape.experts, ep), (ranks // tp, ep)]
        if not any(number % parts for number, parts in [*shared, *alone]):
            sizes = {"dp_shard": ranks // (tp * cp), "cp": cp, "tp": tp, "ep": ep}
            yield MeshSizes(dp_replicate=copies, **sizes)


def trainer_bytes(
    run: PlannedRun, *, ranks: int, mesh: MeshSizes | None = None, recomputes: bool = True
) -> int:
    """State, what FSDP gathers of it, the activations of one microbatch, and published weights."""
    from millrace.models.devices import ModelSize, rank_bytes  # imports torch

    mesh = mesh or MeshSizes(dp_shard=ranks)
    dtype, replicated = run.config.trainer.dtype, MeshConfig(dp_replicate=mesh.dp_replicate)
    dtype = "bfloat16" if dtype == "auto" else dtype  # as on GPUs
    trainer = {"ranks": ranks, "mesh": replicated, "dtype": dtype}
    config = run.config.updated(trainer=trainer, placement={"trainer": ("cpu",)})
    shape = run.shape
    tokens = max(config.trainer.microbatch_tokens, -(-run.lengths.longest // mesh.cp))
    # Two layers in 16 bits, tables in float32, and without [lora] a gradient in float32 of each.
    per_weight = 8 if config.lora is None else 4
    gathered = (
        per_weight * (shape.table_weights + shape.layer_weights(shape.experts / mesh.ep)) / mesh.tp
    )
    linear, experts = run.adapter_weights or (0, 0)
    size = ModelSize(
        num_weights=shape.num_weights,
        num_outside=shape.table_weights,
        linear_factors=linear // mesh.tp,
        expert_factors=experts,
        critic=shape.num_weights if config.critic else 0,
    )
    activations = tokens * shape.activation_bytes(checkpointing=recomputes, tp=mesh.tp)
    # A snapshot of each rank's shards; rank 0 also has the version that engines copy.
    published = run.update_bytes * mesh.dp_replicate // ranks
    published += run.update_bytes if run.stages_on_gpu else 0
    needed = rank_bytes(config, size) + activations + int(gathered) * (ranks > 1)
    return needed + published + RUNTIME_BYTES
