"""All settings of a run together, and which of them go together. Torch-free."""

from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from millrace.config.environment import EnvironmentConfig
from millrace.config.journal import JournalConfig
from millrace.config.scorer import ScorerConfig
from millrace.config.sections import (
    BufferConfig,
    CheckpointConfig,
    ClusterConfig,
    CriticConfig,
    Dtype,
    EngineConfig,
    Int,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    ScoringConfig,
    Section,
    TrainerConfig,
    WatchConfig,
    WeightsConfig,
)
from millrace.config.supervision import SupervisionConfig
from millrace.config.tasks import EvaluateConfig, TasksConfig


class RunConfig(Section):
    run_dir: str = "runs/run"
    """Where everything the run leaves behind goes; never written over."""
    seed: Int = 0
    """Fixes the order of tasks and every draw."""
    model: ModelConfig
    tasks: TasksConfig = TasksConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    sampling: SamplingConfig = SamplingConfig()
    scorer: tuple[ScorerConfig, ...] = ()
    scoring: ScoringConfig = ScoringConfig()
    rollout: RolloutConfig = RolloutConfig()
    buffer: BufferConfig = BufferConfig()
    trainer: TrainerConfig = TrainerConfig()
    loss: dict[str, Any] = Field(default={"type": "clipped"})
    """The objective: a built-in name or "module:Name", and its fields; with a critic the default is
    "ppo"."""
    critic: CriticConfig | None = None
    """Judge tokens by a critic that learns what to expect, instead of comparing episodes; see
    docs/reference/losses.md."""
    lora: LoraConfig | None = None
    """Train a LoRA adapter instead of all weights; needs the extra millrace[lora]."""
    engine: EngineConfig = EngineConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    journal: JournalConfig = JournalConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    watch: WatchConfig = WatchConfig()
    cluster: ClusterConfig = ClusterConfig()
    supervision: SupervisionConfig = SupervisionConfig()

    @property
    def travel_dtype(self) -> Dtype:
        """Weights travel as what engines compute with; adapters as they are trained."""
        return "float32" if self.lora is not None else self.engine.dtype

    @model_validator(mode="before")
    @classmethod
    def _model_may_be_a_path(cls, data: dict[str, Any]) -> dict[str, Any]:
        model = data.get("model")
        return {**data, "model": {"path": model}} if isinstance(model, str) else data

    @model_validator(mode="before")
    @classmethod
    def _ppo_goes_with_a_critic(cls, data: dict[str, Any]) -> dict[str, Any]:
        loss = data.get("loss", {})
        if data.get("critic") is None or not isinstance(loss, dict):
            return data
        return {**data, "loss": {"type": "ppo", **loss}}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.buffer.capacity < self.trainer.groups_per_step:
            raise ValueError(
                f"buffer.capacity = {self.buffer.capacity} can never hold the"
                f" trainer.groups_per_step = {self.trainer.groups_per_step} that a step takes;"
                " raise buffer.capacity"
            )
        if self.trainer.minibatches > self.trainer.groups_per_step:
            raise ValueError(
                f"trainer.minibatches = {self.trainer.minibatches} leaves some of them without any"
                f" of the trainer.groups_per_step = {self.trainer.groups_per_step}; lower it"
            )
        self._tasks_come_from_one_place()
        self._can_be_evaluated()
        self._staleness_is_consistent()
        if self.engine.count + self.engine.remote < 1:
            raise ValueError(
                "engine.count = 0 and engine.remote = 0 leave nobody to generate; raise one"
            )
        if self.weights.interrupt == "barrier" and self.buffer.max_staleness != 0:
            raise ValueError(
                "weights.interrupt = 'barrier' makes generation and training take turns, which"
                f" buffer.max_staleness = {self.buffer.max_staleness} does not; set"
                " buffer.max_staleness to 0, or choose another weights.interrupt"
            )
        self._adapters_can_be_told_apart()
        if self.engine.remote > 0:
            self._can_be_joined()
        if self.weights.notify and self.weights.transport != "disk":
            raise ValueError(
                f"weights.notify tells of files, and weights.transport = {self.weights.transport!r}"
                " writes none; set it to 'disk'"
            )
        return self

    def _tasks_come_from_one_place(self) -> None:
        tables = [("tasks", self.tasks), ("evaluate", self.evaluate)]
        for section, place in [*tables, *(("tasks.source", row) for row in self.tasks.source)]:
            place.check(section)
        if self.tasks.source and self.tasks.is_named:
            raise ValueError(
                "tasks.source is set beside tasks.path, function or generator; make that one a"
                " [[tasks.source]], too"
            )
        if not all(row.is_named for row in self.tasks.source):
            raise ValueError(
                "a [[tasks.source]] has neither path nor function nor generator; set one of them"
            )

    def _can_be_evaluated(self) -> None:
        """Raise ValueError if evaluation is asked for what it cannot give."""
        samples, engines = self.evaluate.samples, self.evaluate.engines
        if samples > 1 and self.evaluate.temperature == 0:
            raise ValueError(
                f"evaluate.samples = {samples} at evaluate.temperature = 0 are all the same; raise"
                " the temperature, or set evaluate.samples to 1"
            )
        transport = self.weights.transport
        by_broadcast = transport == "auto" and self.engine.remote > 0
        if engines > 0 and (transport == "collective" or by_broadcast):
            raise ValueError(
                f"evaluate.engines = {engines} take single versions, but weights.transport ="
                f" {transport!r} broadcasts each of them to the same engines; use another, or set"
                " evaluate.engines to 0"
            )

    def _staleness_is_consistent(self) -> None:
        buffer, groups = self.buffer, self.trainer.groups_per_step
        if buffer.staleness == "share" and buffer.max_stale_share is None:
            raise ValueError(
                "buffer.staleness = 'share' needs to know how many tokens may be too stale; set"
                " buffer.max_stale_share"
            )
        if buffer.staleness != "share" and buffer.max_stale_share is not None:
            raise ValueError(
                f"buffer.max_stale_share = {buffer.max_stale_share} says nothing with"
                f" buffer.staleness = {buffer.staleness!r}; set that to 'share', or leave it out"
            )
        if buffer.replay is None:
            return
        num_replayed = buffer.replay.groups_of(groups)
        if self.weights.interrupt == "barrier":
            raise ValueError(
                "weights.interrupt = 'barrier' is strictly on-policy, which buffer.replay is not;"
                " leave out buffer.replay, or choose another weights.interrupt"
            )
        if num_replayed == 0:
            raise ValueError(
                f"buffer.replay.share = {buffer.replay.share} of trainer.groups_per_step ="
                f" {groups} is less than one group; raise it to {1 / groups:.3g} or more"
            )
        if num_replayed > buffer.replay.capacity:
            raise ValueError(
                f"buffer.replay.capacity = {buffer.replay.capacity} can never hold the"
                f" {num_replayed} groups that a batch replays; raise it"
            )

    def _adapters_can_be_told_apart(self) -> None:
        adapters = self.engine.adapters
        if "base" in adapters or "" in adapters:
            raise ValueError(
                "engine.adapters has an adapter named 'base', which stands for the model without"
                " one, or with no name at all; choose another"
            )
        if adapters and self.lora is not None and self.lora.apply == "merged":
            raise ValueError(
                "lora.apply = 'merged' leaves no weights for engine.adapters"
                f" ({', '.join(adapters)}) to be applied to; set it to 'unmerged'"
            )

    def _can_be_joined(self) -> None:
        """Raise ValueError unless engines on other hosts could take part."""
        remote, cluster = f"engine.remote = {self.engine.remote}", self.cluster
        if cluster.address == "auto":
            raise ValueError(
                f"{remote}, but cluster.address = 'auto' is a local socket that no other host"
                " reaches; set cluster.address to 'tcp://HOST:PORT'"
            )
        if cluster.ticket is None:
            raise ValueError(
                f"{remote}, but no cluster.ticket says where to write the file that"
                " `millrace join` needs; set it to a path outside run_dir"
            )
        if Path(cluster.ticket).resolve().is_relative_to(Path(self.run_dir).resolve()):
            raise ValueError(
                f"cluster.ticket = {cluster.ticket!r} is a secret and lies in run_dir ="
                f" {self.run_dir!r}, which is for keeping and sharing; choose another path"
            )
        if self.weights.transport in ("shm", "ipc"):
            raise ValueError(
                f"{remote}, but weights.transport = {self.weights.transport!r} reaches engines on"
                " this host only; use 'collective', or 'disk' with a directory that all hosts share"
            )
