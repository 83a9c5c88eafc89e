"""All settings of a run. Checks between sections are in millrace.run.checks. Torch-free."""

from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from millrace.config.episodes import (
    EnvironmentConfig,
    EvaluateConfig,
    ScorerConfig,
    ScoringConfig,
    TasksConfig,
)
from millrace.config.generation import (
    EngineConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    WeightsConfig,
)
from millrace.config.operations import (
    ClusterConfig,
    MonitoringConfig,
    PlacementConfig,
    SupervisionConfig,
    TrackerConfig,
)
from millrace.config.section import Dtype, Int, OneOrMore, Plugin, Section, num_groups
from millrace.config.training import (
    BufferConfig,
    CheckpointConfig,
    CriticConfig,
    FidelityConfig,
    JournalConfig,
    LoraConfig,
    OptimizerConfig,
    TrainerConfig,
)

FULL_LEARNING_RATE = 1e-6
LORA_LEARNING_RATE = 1e-4


class RunConfig(Section):
    run_dir: str = "runs/run"
    """Directory for everything that the run writes. A finished run is never overwritten."""
    seed: Int = 0
    """Seed of the task order and of all sampling."""
    model: ModelConfig
    """Model to train. A path alone stands for this table."""
    tasks: TasksConfig = TasksConfig()
    """Tasks to train on."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """Environment that plays episodes: its function or program, tools, limits and other models."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of completions."""
    scorers: Annotated[tuple[ScorerConfig, ...], OneOrMore] = ()
    """Scorers of episodes. Their weighted scores add up. A name alone stands for a table: "exact"
    for a built-in type, "rewards.py:NAME" for a function."""
    scoring: ScoringConfig = ScoringConfig()
    """Advantages, length penalties, and the processes that run reward functions."""
    rollout: RolloutConfig = RolloutConfig()
    """Groups of episodes: their size, selection and filters."""
    buffer: BufferConfig = BufferConfig()
    """Buffer of groups that wait for the trainer, and the limit of their staleness."""
    trainer: TrainerConfig = TrainerConfig()
    """Training steps: their number, batches, data type and memory."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer, its learning rate, and gradient clipping."""
    loss: Plugin = Field(default={"type": "clipped"})
    """Objective: the name of a built-in ("clipped", "grpo", "dapo", "gspo", ...) or "module:Name",
    alone or in a table with its own keys. With [critic] the default is "ppo"; see
    docs/reference/losses.md."""
    fidelity: FidelityConfig = FidelityConfig()
    """Agreement of engine and trainer logprobs."""
    critic: CriticConfig | None = None
    """Critic that estimates the value of each token, instead of comparing the episodes of a
    group; see docs/reference/losses.md."""
    lora: LoraConfig | None = None
    """Training of a LoRA adapter instead of all weights. It needs the extra millrace[lora]."""
    engine: EngineConfig = EngineConfig()
    """Engines: the processes that generate."""
    weights: WeightsConfig = WeightsConfig()
    """Weight updates from the trainer to the engines."""
    placement: PlacementConfig = PlacementConfig()
    """Device of each worker: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N"."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints: their interval and number."""
    journal: JournalConfig = JournalConfig()
    """Journal from which an interrupted run resumes."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Evaluation on held-out tasks."""
    monitoring: MonitoringConfig = MonitoringConfig()
    """Progress display, and records of episodes."""
    tracker: Annotated[tuple[TrackerConfig, ...], OneOrMore] = ()
    """Further destinations of the metrics, besides metrics.jsonl. A name alone stands for a
    table."""
    cluster: ClusterConfig = ClusterConfig()
    """Workers: their connections, start and sharing of a GPU."""
    supervision: SupervisionConfig = SupervisionConfig()
    """Supervision of workers: detection of hung ones, and the limit of restarts."""

    @property
    def learning_rate(self) -> float:
        """optimizer.learning_rate, with "auto" resolved."""
        if self.optimizer.learning_rate != "auto":
            return self.optimizer.learning_rate
        return FULL_LEARNING_RATE if self.lora is None else LORA_LEARNING_RATE

    @property
    def buffer_capacity(self) -> int:
        """buffer.capacity in groups; UNBOUNDED without a bound."""
        return num_groups(self.buffer.capacity, groups_per_step=self.trainer.groups_per_step)

    @property
    def max_running_groups(self) -> int:
        """rollout.max_running_groups in groups."""
        limit = self.rollout.max_running_groups
        return num_groups(limit, groups_per_step=self.trainer.groups_per_step)

    @property
    def transfer_dtype(self) -> Dtype:
        """Data type of weight updates: that of the engines. DoRA's magnitudes need float32."""
        return "float32" if self.lora is not None and self.lora.dora else self.engine.dtype

    @property
    def is_exact(self) -> bool:
        return self.fidelity.mode == "exact"

    @property
    def spans_hosts(self) -> bool:
        """Whether some rank or engine may be on another host than the controller."""
        return self.engine.remote + self.trainer.remote > 0 or not self.cluster.is_local

    @property
    def probes_weights(self) -> bool:
        """weights.probe, with its default resolved."""
        if self.weights.probe is None:
            return self.engine.type == "vllm"
        return self.weights.probe

    def placed_on(self, device: str) -> Self:
        """The settings of an engine process on this device."""
        placement = self.placement.model_copy(update={"engines": (device,)})
        return self.model_copy(update={"placement": placement})

    def trained_on(self, device: str) -> Self:
        """The settings of a rank of the trainer on this device."""
        placement = self.placement.model_copy(update={"trainer": (device,)})
        return self.model_copy(update={"placement": placement})

    @field_validator("model", mode="before")
    @classmethod
    def _model_may_be_a_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _critic_implies_ppo(cls, data: dict[str, Any]) -> dict[str, Any]:
        loss = data.get("loss", {})
        if data.get("critic") is None or not isinstance(loss, dict):
            return data
        return {**data, "loss": {"type": "ppo", **loss}}
