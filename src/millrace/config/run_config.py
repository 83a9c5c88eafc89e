"""RunConfig, all settings of a run, and those of its operation: placement, monitoring, cluster and
supervision. Checks between sections are in millrace.run.checks. Torch-free."""

from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator

from millrace.config import episodes, generation, training
from millrace.config.section import (
    Device,
    Devices,
    Dtype,
    Int,
    NonNegativeInt,
    OneOrMore,
    Plugin,
    PositiveFloat,
    PositiveInt,
    Section,
    num_groups,
)
from millrace.core.errors import ConfigError

ShareGpu = Literal["auto", "mps", "time_slices", "take_turns", "sleep"]

MIN_JOIN_TIMEOUT_S = 600.0  # people start `millrace join` by hand, on one host after the other
# A lost trainer is found within hang_timeout_s, starts again, and redoes its steps; only then is a
# run that completes no step stuck.
MIN_STALL_TIMEOUT_S = 600.0
TRANSFER_TIMEOUT_S = 60.0  # of a weight update; a whole model must pass a slow network or disk
FULL_LEARNING_RATE = 1e-6
LORA_LEARNING_RATE = 1e-4


class PlacementConfig(Section):
    """Each value is "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N"."""

    trainer: Devices = ("auto",)
    """Device of the trainer and of its critic, or a list with one device for each of trainer.ranks
    on this host; other hosts choose the devices of theirs. "auto" or "cuda" alone gives each rank a
    GPU of its own; a GPU listed twice is shared."""
    engines: Devices = ("auto",)
    """Device of the engines, or a list of devices that the engines, and after them those of
    evaluate.engines, use in turn. "auto" is the GPUs that nothing else uses, and those of the
    trainer if there are none."""
    models: dict[str, Devices] = Field(default={})
    """Device or devices of each model besides the policy, by name: of environment.models, and of
    scorers that are models. By default "auto": a GPU of its own if there are enough."""

    def rank(self, rank: int) -> Device:
        return self.trainer[rank % len(self.trainer)]

    def engine(self, index: int) -> Device:
        return self.engines[index % len(self.engines)]

    def model(self, name: str, index: int = 0) -> Device:
        devices = self.models.get(name, ("auto",))
        return devices[index % len(devices)]

    def engine_devices(self, index: int, *, tp: int) -> tuple[Device, ...]:
        """The devices of one engine; raises ConfigError if it cannot compute on them together."""
        return _of_engine("engines", self.engines, index, tp)

    def model_devices(self, name: str, index: int, *, tp: int) -> tuple[Device, ...]:
        return _of_engine(f"models.{name}", self.models.get(name, ("auto",)), index, tp)


def _of_engine(
    setting: str, devices: tuple[Device, ...], index: int, tp: int
) -> tuple[Device, ...]:
    own = tuple(devices[(index * tp + part) % len(devices)] for part in range(tp))
    gpus = [device for device in own if ":" in device]
    if gpus and (len(devices) % tp or len({*gpus}) < tp):
        raise ConfigError(
            f"An engine with tp = {tp} needs {tp} different GPUs, and placement.{setting} is"
            f" {', '.join(devices)}; list {tp} of them for each engine, or lower tp."
        )
    return own


class MonitoringConfig(Section):
    progress: Literal["auto", "live", "lines", "off"] = "auto"
    """Progress display in the terminal: "live" = a view that is redrawn, "lines" = one line per
    step. "auto" is live in a terminal and lines elsewhere."""
    samples_per_step: NonNegativeInt = 4
    """Number of episodes written to rollouts/ at each step, with logprobs, advantages and versions
    of their tokens. 0 also turns off lifecycle/, the times of all groups."""
    record_episodes: NonNegativeInt = 0
    """Number of episodes of an environment written to episodes/ at each step, in full, for
    `millrace replay`."""


class TrackerConfig(Section):
    model_config = ConfigDict(extra="allow")

    type: str = "tensorboard"
    """Metrics tracker: "tensorboard", "trackio", "wandb", "mlflow" (each needs the extra of its
    name, such as millrace[wandb]), or "module:Class". Further arguments are keys of the table."""

    @property
    def type_settings(self) -> dict[str, Any]:
        """The name and the keys of the type."""
        return {"type": self.type, **(self.model_extra or {})}

    @model_validator(mode="before")
    @classmethod
    def _may_be_a_name(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value


class ClusterConfig(Section):
    launcher: Plugin = Field(default={"type": "local"})
    """Launcher of the trainer's ranks and of the engines: "local" (processes of this host), "ray"
    (a Ray cluster, whose address is the key address; see docs/how-to/ray.md), or "module:Class"."""
    address: str = "auto"
    """Address at which the controller listens: "auto" (a private local socket) or
    "tcp://HOST:PORT", where HOST is a name or interface of this machine, or * for all. TCP is
    always encrypted, and only workers with the run's keys can connect."""
    advertise: str | None = None
    """Host name by which other hosts reach the controller. By default the HOST of
    cluster.address, and with * this machine's own name."""
    ticket: str | None = None
    """Path of the file that `millrace join` needs, written while the run lasts. It is a secret and
    must be outside run_dir."""
    start_timeout_s: PositiveFloat = 180.0
    """Time limit in seconds for a worker to start and load its model. Other hosts have at least
    600 seconds to join."""
    threads: PositiveInt | None = None
    """Number of CPU threads of each rank of the trainer and of each engine. By default they share
    the cores of their host evenly."""
    share_gpu: ShareGpu = "auto"
    """Sharing of a GPU by engines and trainer: "mps" = concurrent kernels through NVIDIA MPS, whose
    daemon the run starts and stops; "time_slices" = without MPS; "auto" = MPS where it is installed
    and several workers use a GPU; "take_turns" = as auto, and engines on GPUs of the trainer pause
    while it steps; "sleep" = as take_turns, and paused engines free the GPU memory of their weights
    and KV, which host memory holds meanwhile, with new versions; see
    docs/how-to/share-one-gpu.md."""

    @property
    def is_local(self) -> bool:
        """Whether the launcher starts processes of this host."""
        return self.launcher.get("type", "local") == "local"

    @property
    def join_timeout_s(self) -> float:
        return max(MIN_JOIN_TIMEOUT_S, self.start_timeout_s)


class SupervisionConfig(Section):
    max_restarts: NonNegativeInt = 5
    """Maximum number of restarts of one worker within 10 minutes. One more failure ends the run.
    For scorers, environment workers, reward models and teachers, only failed starts count."""
    hang_timeout_s: PositiveFloat = 300.0
    """Time limit in seconds for a worker with work to do to make progress. A worker that exceeds it
    writes its stacks to its log, is killed, and counts as dead. Until its first progress, the limit
    is at least cluster.start_timeout_s. The run ends after twice this time, and at least 600
    seconds, without a completed step. Stalled weight updates, and those for which the disk is full,
    fail after 60 seconds, or after a fifth of this time if that is longer, but never later than
    this time."""

    @property
    def transfer_timeout_s(self) -> float:
        return max(min(TRANSFER_TIMEOUT_S, self.hang_timeout_s), self.hang_timeout_s / 5)

    @property
    def stall_timeout_s(self) -> float:
        return max(MIN_STALL_TIMEOUT_S, 2 * self.hang_timeout_s)


def _optimizer_keys(value: dict[str, Any]) -> dict[str, Any]:
    training.OptimizerConfig.model_validate(value)
    return value


class PolicyConfig(Section):
    """A policy of a run with several. What its table leaves out is that of the run."""

    model: str | None = None
    """Model that this policy starts from, as in model.path. By default that of the run."""
    optimizer: Annotated[dict[str, Any], AfterValidator(_optimizer_keys)] = Field(default={})
    """Keys of [optimizer] that differ for this policy, such as {learning_rate = 1e-5}."""
    loss: Plugin = Field(default={})
    """Objective of this policy, as in [loss]. By default that of the run."""
    lags: tuple[PositiveInt, ...] = ()
    """Earlier versions that roles may play against, as `agent.role(..., model="NAME", lag=4)`, each
    as the number of versions behind the newest. Needs [lora]."""


class RunConfig(Section):
    run_dir: str = "runs/run"
    """Directory for everything that the run writes. A finished run is never overwritten."""
    seed: Int = 0
    """Seed of the task order and of all sampling."""
    model: generation.ModelConfig
    """Model to train. A path alone stands for this table."""
    tasks: episodes.TasksConfig = episodes.TasksConfig()
    """Tasks to train on."""
    environment: episodes.EnvironmentConfig = episodes.EnvironmentConfig()
    """Environment that plays episodes: its function or program, tools, limits and other models."""
    sampling: generation.SamplingConfig = generation.SamplingConfig()
    """Sampling of completions."""
    scorers: Annotated[tuple[episodes.ScorerConfig, ...], OneOrMore] = ()
    """Scorers of episodes. Their weighted scores add up. A name alone stands for a table: "exact"
    for a built-in type, "rewards.py:NAME" for a function."""
    scoring: episodes.ScoringConfig = episodes.ScoringConfig()
    """Advantages, length penalties, and the processes that run reward functions."""
    rollout: generation.RolloutConfig = generation.RolloutConfig()
    """Groups of episodes: their size, selection and filters."""
    buffer: training.BufferConfig = training.BufferConfig()
    """Buffer of groups that wait for the trainer, and the limit of their staleness."""
    trainer: training.TrainerConfig = training.TrainerConfig()
    """Training steps: their number, batches, data type and memory."""
    optimizer: training.OptimizerConfig = training.OptimizerConfig()
    """Optimizer, its learning rate, and gradient clipping."""
    loss: Plugin = Field(default={"type": "clipped"})
    """Objective: the name of a built-in ("clipped", "grpo", "dapo", "gspo", ...) or "module:Name",
    alone or in a table with its own keys. With [critic] the default is "ppo"; see
    docs/reference/losses.md."""
    fidelity: training.FidelityConfig = training.FidelityConfig()
    """Agreement of engine and trainer logprobs."""
    critic: training.CriticConfig | None = None
    """Critic that estimates the value of each token, instead of comparing the episodes of a
    group; see docs/reference/losses.md."""
    lora: training.LoraConfig | None = None
    """Training of a LoRA adapter instead of all weights. It needs the extra millrace[lora]."""
    policies: dict[str, PolicyConfig] = Field(default={})
    """Policies of a run that trains several, by the role that each plays: `[policies.solver]` is
    what `agent.role("solver")` samples and trains. By default one policy plays all roles; see
    docs/how-to/several-policies.md."""
    engine: generation.EngineConfig = generation.EngineConfig()
    """Engines: the processes that generate."""
    weights: generation.WeightsConfig = generation.WeightsConfig()
    """Weight updates from the trainer to the engines."""
    placement: PlacementConfig = PlacementConfig()
    """Device of each worker: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N"."""
    checkpoint: training.CheckpointConfig = training.CheckpointConfig()
    """Checkpoints: their interval and number."""
    journal: training.JournalConfig = training.JournalConfig()
    """Journal from which an interrupted run resumes."""
    evaluate: episodes.EvaluateConfig = episodes.EvaluateConfig()
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
    def in_nf4(self) -> bool:
        """Whether the trainer holds the matrices beneath its adapters in 4 bits."""
        return self.lora is not None and self.lora.quantization == "nf4"

    @property
    def spans_hosts(self) -> bool:
        """Whether some rank or engine may be on another host than the controller."""
        return self.engine.remote + self.trainer.remote > 0 or not self.cluster.is_local

    @property
    def engine_sections(self) -> dict[str, generation.EngineConfig]:
        """The settings of the policy's engines and of those of other models, by their section."""
        models = self.environment.models.items()
        return {"engine": self.engine} | {f"environment.models.{k}": v.engine for k, v in models}

    @property
    def adapter_policies(self) -> tuple[str, ...]:
        """Policies besides the first that are adapters of the run's model: they share its trainer
        and engines."""
        return tuple(self.policies)[1:] if self.lora is not None else ()

    @property
    def lagged(self) -> dict[str, tuple[str, int]]:
        """Adapters that are an earlier version of a policy: the policy, and its lag."""
        tables = self.policies.items()
        return {f"{name}@{lag}": (name, lag) for name, own in tables for lag in own.lags}

    @property
    def further_adapters(self) -> tuple[str, ...]:
        """All that engines receive from the trainer, besides that of the first policy."""
        return (*self.adapter_policies, *self.lagged)

    @property
    def probes_weights(self) -> bool:
        """weights.probe, with its default resolved."""
        if self.weights.probe is None:
            return self.engine.has_servers
        return self.weights.probe

    def updated(self, **changes: Any) -> Self:
        """The settings with other values, unchecked. The keys that a dict has replace those of its
        section."""
        update = dict(changes)
        for name, value in changes.items():
            if isinstance(section := getattr(self, name), Section) and isinstance(value, dict):
                update[name] = section.model_copy(update=cast(dict[str, Any], value))
        return self.model_copy(update=update)

    def placed_on(self, *devices: str) -> Self:
        """The settings of an engine process on these devices, of which it has engine.tp."""
        return self.updated(placement={"engines": devices})

    def trained_on(self, device: str) -> Self:
        """The settings of a rank of the trainer on this device."""
        return self.updated(placement={"trainer": (device,)})

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
