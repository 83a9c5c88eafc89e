"""The best split of GPUs: engines, trainer ranks and mesh, batch, and staleness limit.

Every split whose memory fits is estimated by its slower stage. The best one of each batch size and
staleness limit is simulated, and again after the simulation has corrected the estimate. Promise: a
run that cannot fit is refused in one sentence that says what is missing and what would fit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from millrace.config import RunConfig, load_config
from millrace.config.training import MeshConfig
from millrace.core.errors import ConfigError
from millrace.core.microbatch import MeshSizes
from millrace.plan.lengths import Lengths
from millrace.plan.model_costs import (
    GIB,
    GPUS,
    HOST_GPUS,
    SCORE_S,
    DeviceCosts,
    Gpu,
    ModelShape,
)
from millrace.plan.simulation import Prediction, simulate
from millrace.run.checks import check_settings
from millrace.run.mesh_checks import check_model_mesh

RUNTIME_BYTES = 2 * GIB  # CUDA context, graphs and fragmentation, of each process
_ROOM = 0.95  # share of a GPU that may be used
_MAX_SEQUENCES = 256  # of one engine, if engine.max_sequences is not set
_STALENESS = (1, 2, 4, 8)
# Groups per step of the copies of a large run that are simulated, in the search and for its result.
_SMALL_GROUPS, _ENOUGH_GROUPS = 16, 64


@dataclass(frozen=True, kw_only=True)
class Split:
    engines: int
    tp: int  # GPUs of one engine
    ranks: int
    trainer_cp: int  # ranks that share long sequences
    trainer_tp: int  # ranks that share each matrix product
    trainer_ep: int  # ranks that share the experts
    groups_per_step: int
    max_staleness: int
    max_sequences: int  # of one engine
    gradient_checkpointing: bool
    kv_bytes: int  # of one GPU of an engine
    engine_bytes: int  # of one GPU
    trainer_bytes: int

    @property
    def mesh(self) -> dict[str, int]:
        return {"cp": self.trainer_cp, "tp": self.trainer_tp, "ep": self.trainer_ep}


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """What is to be trained, on what."""

    config: RunConfig
    shape: ModelShape
    lengths: Lengths
    gpu: Gpu
    gpu_name: str
    num_gpus: int

    @property
    def memory_bytes(self) -> int:
        """The memory of one GPU."""
        return int(self.gpu.memory_gb * 1e9)

    def costs(self, split: Split) -> DeviceCosts:
        lora = self.config.lora
        return DeviceCosts(
            shape=self.shape,
            gpu=self.gpu,
            tp=split.tp,
            ranks=split.ranks,
            mesh=MeshSizes(**split.mesh),
            microbatch_tokens=self.config.trainer.microbatch_tokens,
            recomputes=split.gradient_checkpointing,
            update_bytes=None if lora is None else 4 * sum(self.shape.adapter_weights(lora.rank)),
            num_gpus=self.num_gpus,
            score_s=SCORE_S if self.lengths.score_s is None else self.lengths.score_s,
        )

    def settings(self, split: Split) -> dict[str, dict[str, Any]]:
        """Settings that replace those of the run, by section; `millrace launch` accepts them.
        What a user has set stays if any split can have it."""
        config, cluster = self.config, self.config.cluster
        # A launcher places all workers; otherwise those of other hosts join.
        num_here = min(self.num_gpus, HOST_GPUS) if cluster.is_local else self.num_gpus
        ranks_here = min(split.ranks, num_here)
        engines_here = min(split.engines, (num_here - ranks_here) // split.tp)
        own: dict[str, dict[str, Any]] = {}
        is_embedded = config.engine.type == "embedded"
        options = {"options": {**config.engine.options, "kv_bytes": split.kv_bytes}}
        if split.engines + split.ranks > engines_here + ranks_here:
            address = "tcp://*:0" if cluster.address == "auto" else cluster.address
            ticket = cluster.ticket or f"{config.run_dir}.ticket"
            own["cluster"] = {"address": address, "ticket": ticket}
        if {*config.placement.trainer, *config.placement.engines} != {"auto"}:
            own["placement"] = {"trainer": "auto", "engines": "auto"}
        if "max_running_groups" not in config.rollout.model_fields_set:
            own["rollout"] = {"max_running_groups": f"{split.max_staleness + 1} batches"}
        batch = config.updated(trainer={"groups_per_step": split.groups_per_step})
        is_held = batch.buffer_capacity >= split.groups_per_step
        is_kept = is_held and "capacity" in config.buffer.model_fields_set
        capacity = {} if is_kept else {"capacity": "2 batches"}
        return {
            **own,
            "engine": {
                "count": engines_here,
                "remote": split.engines - engines_here,
                "tp": split.tp,
                "max_sequences": split.max_sequences,
                **(options if is_embedded else {}),
            },
            "trainer": {
                "ranks": split.ranks,
                "remote": split.ranks - ranks_here,
                "groups_per_step": split.groups_per_step,
                "gradient_checkpointing": split.gradient_checkpointing,
                "mesh": {**MeshConfig().model_dump(), **split.mesh},
            },
            "buffer": {"max_staleness": split.max_staleness, **capacity},
        }

    def with_split(self, split: Split) -> RunConfig:
        """The settings to run; raises ConfigError for those that a run refuses."""
        config = load_config(self.config, overrides=self.settings(split))
        check_settings(config)
        if max(split.mesh.values()) > 1:
            from millrace.models.directory import text_config  # imports transformers

            path, trust = config.model.path, config.model.trust_remote_code
            model = text_config(path, trust_remote_code=trust)
            check_model_mesh(config.trainer.mesh_sizes, model, path=path)
        return config

    def rates(self, split: Split) -> tuple[float, float]:
        """Samples per second that the engines and the trainer could make, without stragglers."""
        costs, prompt, mean = self.costs(split), self.lengths.prompt_tokens, self.lengths.mean
        size = self.config.rollout.group_size
        samples = split.groups_per_step * size
        in_flight = samples * (split.max_staleness + 1) / split.engines
        batch = max(1, min(split.max_sequences, int(in_flight)))
        episode_s = mean * costs.decode_s(batch, batch * (prompt + mean / 2))
        episode_s += batch * costs.prefill_s(prompt) / size
        pairs = samples * mean * (mean / 2 + prompt)
        step_s = costs.train_s(samples * (mean + prompt / size), pairs)
        return split.engines * batch / episode_s, samples / step_s

    def predict(self, split: Split, *, num_groups: int = _ENOUGH_GROUPS) -> Prediction:
        """`num_groups` per step are simulated, or a few more: a smaller copy of a large run."""
        config = self.with_split(split)
        parts = (split.engines, split.groups_per_step)
        scale = max(1, min(split.engines, split.groups_per_step // num_groups))
        while any(abs(round(part / scale) * scale / part - 1) > 0.02 for part in parts):
            scale -= 1  # until it divides both almost evenly
        if scale == 1:
            return simulate(config, self.costs(split), self.lengths)
        engine = {"count": round(split.engines / scale), "remote": 0}
        trainer = {"groups_per_step": round(split.groups_per_step / scale)}
        counts = {
            "buffer.capacity": max(trainer["groups_per_step"], config.buffer_capacity // scale),
            "rollout.max_running_groups": max(1, config.max_running_groups // scale),
        }
        small = load_config(config, overrides={"engine": engine, "trainer": trainer, **counts})
        # The trainer and the scorers stay, so each unit of the copy is more work for them.
        costs = self.costs(split)
        costs = replace(costs, train_scale=scale, score_s=costs.score_s * scale)
        found = simulate(small, costs, self.lengths)
        rates = {key: getattr(found, key) * scale for key in ("samples_per_s", "tokens_per_s")}
        return replace(found, **rates)


def search(
    run: PlannedRun, *, batches: Sequence[int] = (), max_staleness: int | None = None
) -> tuple[Split, Prediction]:
    """The split with the most samples per second, and the freshest of those within 2 %."""
    limits = _limits(run.config, max_staleness)
    if not (fitting := list(_fitting(run))):
        raise ConfigError(_missing(run))
    found: list[tuple[Prediction, Split]] = []
    refusals: list[ConfigError] = []
    for groups_per_step, limit in product(batches or (run.config.trainer.groups_per_step,), limits):
        splits: list[Split] = []
        for sizes in fitting:
            split = Split(**sizes, groups_per_step=groups_per_step, max_staleness=limit)
            try:
                run.with_split(split)
                splits.append(split)
            except ConfigError as error:
                refusals.append(error)
        found += _best(run, splits) if splits else ()
    if not found:
        raise ConfigError(f"No split of {run.num_gpus} x {run.gpu_name} can be run: {refusals[0]}")
    most = max(prediction.samples_per_s for prediction, _ in found)
    good = [pair for pair in found if pair[0].samples_per_s >= 0.98 * most]
    _, split = min(good, key=lambda pair: pair[0].staleness_mean)
    return split, run.predict(split)


def _limits(config: RunConfig, most: int | None) -> list[int]:
    """The staleness limits to try. `most`: None = that of the run if it is set."""
    if config.weights.interrupt == "barrier":
        return [0]
    if most is None:
        is_set = "max_staleness" in config.buffer.model_fields_set
        most = config.buffer.max_staleness if is_set else max(_STALENESS)
    return [*(limit for limit in _STALENESS if limit < most), most]


def _best(run: PlannedRun, splits: Sequence[Split]) -> Iterator[tuple[Prediction, Split]]:
    rates = {split: run.rates(split) for split in splits}
    first = max(splits, key=lambda split: min(rates[split]))
    found = run.predict(first, num_groups=_SMALL_GROUPS)
    yield found, first
    if found.trainer_busy < found.engine_busy:  # stragglers make engines slower than estimated
        share = found.samples_per_s / rates[first][0]
        second = max(splits, key=lambda split: min(share * rates[split][0], rates[split][1]))
        if second is not first:
            yield run.predict(second, num_groups=_SMALL_GROUPS), second


def _fitting(run: PlannedRun) -> Iterator[dict[str, Any]]:
    """Splits whose memory fits, with the fewest GPUs per engine."""
    tps = (1,) if run.config.engine.type == "embedded" else (1, 2, 4, 8)
    engine = next((fit for tp in tps if (fit := _engine_fit(run, tp))), None)
    if engine is None:
        return
    wanted = {run.num_gpus * part // 16 for part in range(1, 16)} | {1, 2, 4}
    whole = {n if n <= HOST_GPUS else n - n % HOST_GPUS for n in wanted}  # hosts of ranks are full
    for ranks in sorted(whole - {0}):
        engines = _num_engines(run.num_gpus, ranks=ranks, tp=engine["tp"])
        if engines > 0 and (trainer := _trainer_fit(run, ranks)) is not None:
            yield {"engines": engines, "ranks": ranks, **engine, **trainer}


def _num_engines(num_gpus: int, *, ranks: int, tp: int) -> int:
    """The number of engines beside the ranks; hosts without ranks have equally many."""
    if num_gpus <= HOST_GPUS:
        return (num_gpus - ranks) // tp
    here = max(0, HOST_GPUS - ranks) // tp
    hosts = -(-num_gpus // HOST_GPUS) - max(1, ranks // HOST_GPUS)
    remote = (num_gpus - ranks) // tp - here
    return here + remote // hosts * hosts if hosts else here


def _engine_fit(run: PlannedRun, tp: int) -> dict[str, int] | None:
    """Returns None if the weights and one sequence do not fit."""
    token_bytes, longest = run.shape.kv_bytes // tp, run.lengths.longest
    fixed = run.shape.num_weights * 2 // tp + RUNTIME_BYTES
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


def _trainer_fit(run: PlannedRun, ranks: int) -> dict[str, Any] | None:
    """Returns None if the state and the activations of a microbatch do not fit."""
    ways = (False, True) if not run.config.trainer.gradient_checkpointing else (True,)
    for mesh, recomputes in product(_meshes(run.shape, ranks), ways):
        needed = _rank_bytes(run, ranks=ranks, mesh=mesh, recomputes=recomputes)
        if needed <= _ROOM * run.memory_bytes:
            sizes = {f"trainer_{name}": getattr(mesh, name) for name in ("cp", "tp", "ep")}
            return {**sizes, "gradient_checkpointing": recomputes, "trainer_bytes": needed}
    return None


def _meshes(shape: ModelShape, ranks: int) -> Iterator[MeshSizes]:
    """Meshes that divide the ranks and the model, within a host; those with tp, or ep of a mixture,
    come after those with cp alone. tp does not divide experts."""
    for more, cp in product((1, 2, 4, 8), (1, 2, 4, 8)):
        tp, ep = (1, more) if shape.experts else (more, 1)
        shared = [(n, tp * cp) for n in (HOST_GPUS, ranks, shape.heads, shape.kv_heads)]
        alone = [(shape.mlp, tp), (shape.vocab, tp), (shape.experts, ep), (ranks // tp, ep)]
        if not any(number % parts for number, parts in [*shared, *alone]):
            yield MeshSizes(dp_shard=ranks // (tp * cp), cp=cp, tp=tp, ep=ep)


def _rank_bytes(
    run: PlannedRun, *, ranks: int, mesh: MeshSizes | None = None, recomputes: bool = True
) -> int:
    """State, what FSDP gathers of it, and the activations of one microbatch."""
    from millrace.models.devices import ModelSize, rank_bytes  # imports torch

    mesh = mesh or MeshSizes(dp_shard=ranks)
    config, shape = run.config.updated(trainer={"ranks": ranks, "mesh": MeshConfig()}), run.shape
    tokens = max(config.trainer.microbatch_tokens, -(-run.lengths.longest // mesh.cp))
    # Two layers in 16 bits, tables in float32, and without [lora] a gradient in float32 of each.
    per_weight = 8 if config.lora is None else 4
    gathered = (
        per_weight * (shape.table_weights + shape.layer_weights(shape.experts / mesh.ep)) / mesh.tp
    )
    linear, experts = shape.adapter_weights(config.lora.rank) if config.lora else (0, 0)
    size = ModelSize(
        num_weights=shape.num_weights,
        num_outside=shape.table_weights,
        linear_factors=linear // mesh.tp,
        expert_factors=experts,
        critic=shape.num_weights if config.critic else 0,
    )
    activations = tokens * shape.activation_bytes(checkpointing=recomputes, tp=mesh.tp)
    return rank_bytes(config, size) + activations + int(gathered) * (ranks > 1) + RUNTIME_BYTES


def _missing(run: PlannedRun) -> str:
    """Why no split fits, and what would: more GPUs, larger ones, or a smaller run."""
    fits: list[str] = []
    more = (2**power for power in range(1, 13) if 2**power > run.num_gpus)
    if count := next((n for n in more if any(_fitting(replace(run, num_gpus=n)))), None):
        fits.append(f"{count} x {run.gpu_name}")
    larger = sorted(GPUS.items(), key=lambda item: item[1].memory_gb)
    larger = [item for item in larger if item[1].memory_gb > run.gpu.memory_gb]
    if name := next((n for n, gpu in larger if any(_fitting(replace(run, gpu=gpu)))), None):
        fits.append(f"{run.num_gpus} x {name}")
    lora = load_config(run.config, overrides={"lora": {}})
    if run.config.lora is None and any(_fitting(replace(run, config=lora))):
        fits.append("[lora]")
    has = f"one {run.gpu_name} has {run.memory_bytes / GIB:.0f} GiB"
    if run.num_gpus < 2:
        what = "one GPU generates and another one trains"
    elif _engine_fit(run, 1) is None and run.config.engine.type == "embedded":
        needed = run.shape.num_weights * 2 + run.shape.kv_bytes * run.lengths.longest
        what = f"an engine needs {needed / GIB:.0f} GiB for weights and one sequence, and {has}"
        fits.append("engine.type = 'vllm', whose engines may span GPUs,")
    else:
        needed = _rank_bytes(run, ranks=run.num_gpus - 1)
        what = f"each of {run.num_gpus - 1} ranks needs {needed / GIB:.0f} GiB, and {has}"
    hint = f"{' or '.join(fits)} would fit" if fits else "train a smaller model"
    return f"{run.num_gpus} x {run.gpu_name} cannot hold this run: {what}; {hint}."
