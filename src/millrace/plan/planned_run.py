"""A run that is planned, and a split of its GPUs: the settings, the costs and the prediction of it.

Promise: the settings of a split pass the checks of a run, or ConfigError says why they do not.
"""

from dataclasses import dataclass, replace
from typing import Any

from millrace.config import RunConfig, load_config
from millrace.config.training import MeshConfig
from millrace.core.microbatch import MeshSizes
from millrace.plan.lengths import Lengths
from millrace.plan.model_costs import HOST_GPUS, SCORE_S, DeviceCosts, Gpu, ModelShape
from millrace.plan.simulation import Prediction, simulate
from millrace.run.checks import check_settings
from millrace.run.mesh_checks import check_model_mesh

SEARCHED = ("dp_replicate", "cp", "tp", "ep")  # sizes of the trainer's mesh
ENOUGH_GROUPS = 64  # per step, of the copy of a large run that is simulated for its result


@dataclass(frozen=True, kw_only=True)
class Split:
    engines: int
    tp: int  # GPUs of one engine
    ranks: int
    trainer_dp_replicate: int  # copies of the sharded model
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
        return {name: getattr(self, f"trainer_{name}") for name in SEARCHED}


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

    @property
    def adapter_weights(self) -> tuple[int, int] | None:
        """Of linear layers and of experts; None without [lora]."""
        lora = self.config.lora
        return None if lora is None else self.shape.adapter_weights(lora.rank)

    @property
    def update_bytes(self) -> int:
        """The bytes of one version. Engines compute in 16 bits; DoRA's adapters are float32."""
        lora, factors = self.config.lora, self.adapter_weights
        if lora is None or factors is None:
            return 2 * self.shape.num_weights
        return (4 if lora.dora else 2) * sum(factors)

    @property
    def stages_on_gpu(self) -> bool:
        """Whether versions are in the memory of GPUs until engines have copied them. Servers read
        files, and the other transports keep versions in the host's memory or on disk."""
        in_host = self.config.weights.transport in ("shm", "disk")
        return not (in_host or self.config.engine.has_servers)

    def costs(self, split: Split) -> DeviceCosts:
        trainer, factors = self.config.trainer, self.adapter_weights
        return DeviceCosts(
            shape=self.shape,
            gpu=self.gpu,
            tp=split.tp,
            ranks=split.ranks,
            mesh=MeshSizes(**split.mesh),
            microbatch_tokens=trainer.microbatch_tokens,
            minibatches=trainer.minibatches,
            epochs=trainer.epochs,
            recomputes=split.gradient_checkpointing,
            adapter_weights=None if factors is None else sum(factors),
            update_bytes=self.update_bytes,
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
        if max(split.trainer_cp, split.trainer_tp, split.trainer_ep) > 1:
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

    def predict(self, split: Split, *, num_groups: int = ENOUGH_GROUPS) -> Prediction:
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
