"""Settings of operation: placement, monitoring, trackers, cluster and supervision. Torch-free."""

from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from millrace.config.section import (
    Device,
    Devices,
    NonNegativeInt,
    Plugin,
    PositiveFloat,
    PositiveInt,
    Section,
)

ShareGpu = Literal["auto", "mps", "time_slices", "take_turns", "sleep"]

MIN_JOIN_TIMEOUT_S = 600.0  # people start `millrace join` by hand, on one host after the other
# A lost trainer is found within hang_timeout_s, starts again, and redoes its steps; only then is a
# run that completes no step stuck.
MIN_STALL_TIMEOUT_S = 600.0


class PlacementConfig(Section):
    """Each value is "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N"."""

    trainer: Devices = ("auto",)
    """Device of the trainer and of its critic, or a list with one device for each of trainer.ranks.
    "auto" or "cuda" alone gives each rank a GPU of its own; a GPU listed twice is shared."""
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


class MonitoringConfig(Section):
    progress: Literal["auto", "live", "lines", "off"] = "auto"
    """Progress in the terminal: "live" = a view that is redrawn, "lines" = one line per step.
    "auto" is live in a terminal and lines elsewhere."""
    samples_per_step: NonNegativeInt = 4
    """Number of episodes written to rollouts/ at each step, with the numbers of their tokens.
    0 also turns off lifecycle/, the times of all groups."""
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
    (a Ray cluster; key address; see docs/how-to/ray.md), or "module:Class"."""
    address: str = "auto"
    """Address at which the controller listens: "auto" (a private local socket) or
    "tcp://HOST:PORT", where HOST is a name or interface of this machine, or * for all. TCP is
    always encrypted, and only workers with the run's keys can connect."""
    advertise: str | None = None
    """Host name by which other hosts reach the controller. By default the HOST of address, and
    with * this machine's own name."""
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
    and several workers use a GPU; "take_turns" = as auto, and engines pause while the trainer
    steps; "sleep" = as take_turns, and paused engines give the memory of their weights and KV back,
    which needs as much host memory. See docs/how-to/share-one-gpu.md."""

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
    Of scorers, reward models and teachers only failed starts count."""
    hang_timeout_s: PositiveFloat = 300.0
    """Time in seconds without progress after which a worker with work to do counts as dead; its
    stacks are written to its log. Before its first computation, cluster.start_timeout_s is
    added. The run stops after twice this time, and at least 600 seconds, without a completed
    step."""

    @property
    def stall_timeout_s(self) -> float:
        return max(MIN_STALL_TIMEOUT_S, 2 * self.hang_timeout_s)
