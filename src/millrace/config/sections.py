"""Every setting by section: name, type, default, and what it does. Torch-free."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
)

from millrace.core.staleness import Measure, StalenessLimit

# Strict: true is no number, and "8" is no 8.
Int = Annotated[int, Field(strict=True)]
PositiveInt = Annotated[Int, Field(gt=0)]
NonNegativeInt = Annotated[Int, Field(ge=0)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
PositiveFloat = Annotated[Float, Field(gt=0)]
NonNegativeFloat = Annotated[Float, Field(ge=0)]
Share = Annotated[Float, Field(ge=0, le=1)]
Beta = Annotated[Float, Field(ge=0, lt=1)]
Dtype = Literal["float32", "bfloat16", "float16"]
Interrupt = Literal["swap", "abort", "save", "drain", "barrier"]
ALL_LINEAR = "all-linear"


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",  # inf is a value here, and not null to a worker
    )


class ModelConfig(Section):
    path: str
    """Hugging Face model directory or hub name."""
    trust_remote_code: bool = False
    """Run Python code that the model directory brings along."""


class SamplingConfig(Section):
    max_new_tokens: PositiveInt = 256
    temperature: PositiveFloat = 1.0
    top_k: NonNegativeInt = 0
    """0 = off."""
    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end a completion; the eos token always does."""


class ScoringConfig(Section):
    workers: PositiveInt = 2
    """Processes that run reward functions; a hung or crashed one is replaced."""
    advantages: dict[str, Any] = {"type": "auto"}
    """How scores become advantages: "auto" (what belongs to the loss, mostly "group"), "group"
    (minus the group's mean, over its std), "leave_one_out", "batch", "returns", "best_worst",
    "tree" (of environment.recipe), "gae" (with a critic, which has no other), or yours; see
    docs/reference/losses.md."""
    penalty: tuple[dict[str, Any], ...] = ()
    """Length penalties, each a table and a part of the score: "soft_overlong", "linear", "cosine",
    or yours; see docs/how-to/shape-training-data.md."""


class RolloutConfig(Section):
    group_size: Annotated[Int, Field(ge=2)] = 8
    """Episodes per task."""
    oversample: NonNegativeInt = 0
    """Further episodes played per task, of all of which group_size are trained."""
    redundancy: NonNegativeInt = 0
    """Further episodes begun per task with environment.function, of all of which those that come
    last are given up."""
    longest_first: NonNegativeInt = 0
    """Requests that one of a task whose episodes were long so far may overtake where they wait for
    a place in an engine, so that the longest begin first."""
    selection: dict[str, Any] = {"type": "roc"}
    """Which of them: "roc" (failures at random, the cleanest successes), "first", or yours; see
    docs/how-to/shape-training-data.md."""
    filter: tuple[dict[str, Any], ...] = ()
    """What is not worth training, each a table: "zero_variance", "overlong", or yours; see
    docs/how-to/shape-training-data.md."""
    max_filtered_share: Share = 0.9
    """The run warns when filters drop more than this share of the last 100 groups."""
    max_running_groups: PositiveInt = 64
    """Groups being played or scored at once."""
    max_failure_share: Share = 0.5
    """The run stops when more than this share of the last 100 groups failed."""

    @field_validator("selection", mode="before")
    @classmethod
    def _may_be_a_name(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value


class ReplayConfig(Section):
    share: Annotated[Float, Field(gt=0, lt=1)] = 0.25
    """Of each batch, at most."""
    capacity: PositiveInt = 64
    """Trained groups that are kept."""
    max_staleness: Annotated[Int, Field(ge=2)] = 8
    """As buffer.max_staleness, for these. The first batch that can hold a group again is the second
    after its own."""

    def groups_of(self, num_groups: int) -> int:
        """How many of a batch of so many may be replayed."""
        return int(self.share * num_groups + 1e-9)  # 0.29 * 100 is a little less than 29


class BufferConfig(Section):
    capacity: PositiveInt = 64
    """Groups that may wait for the trainer; at least trainer.groups_per_step."""
    max_staleness: NonNegativeInt = 2
    """Trainer version minus the version of a token, at most. 0 = strictly on-policy."""
    staleness: Measure = "oldest"
    """Which of a group's trained tokens max_staleness holds for: "oldest" = all, "mean" = their
    average, "share" = all but max_stale_share of them; see docs/explanation/buffer.md."""
    max_stale_share: Annotated[Float, Field(ge=0, lt=1)] | None = None
    """With "share": how many tokens may be staler, as a share of the group's."""
    order: dict[str, Any] = {"type": "oldest"}
    """Which of the waiting groups are trained first: "oldest", "freshest", "ready" (as they came),
    "difficulty" (half solved), or {type = "module:Name", ...} of yours."""
    replay: ReplayConfig | None = None
    """Train some groups a second time, such as {share = 0.25, capacity = 64, max_staleness = 8}."""

    @field_validator("order", mode="before")
    @classmethod
    def _may_be_a_name(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value

    @property
    def limit(self) -> StalenessLimit:
        return StalenessLimit(
            max_staleness=self.max_staleness,
            measure=self.staleness,
            max_stale_share=self.max_stale_share or 0.0,
        )


class DecodingConfig(Section):
    """Of any process that generates."""

    device: str = "auto"
    dtype: Dtype = "float32"
    threads: PositiveInt | None = None
    """CPU threads per engine; by default the cores are shared out evenly."""
    max_sequences: PositiveInt = 64
    """Sequences decoded together."""
    block_tokens: PositiveInt = 16
    """Tokens per KV block."""
    num_blocks: PositiveInt | None = None
    """KV blocks; by default enough for max_sequences at full context, within kv_bytes."""
    kv_bytes: PositiveInt | None = None
    """Upper bound of the KV cache when num_blocks is not given; by default 1 GiB on a CPU and 40 %
    of what is free on a GPU."""
    prefill_tokens: PositiveInt | None = None
    """Prompt tokens computed per forward pass; longer prompts are prefilled in chunks. By default
    2048 on a CPU, 16384 on a GPU."""
    round_steps: PositiveInt | None = None
    """Tokens each sequence decodes per round trip to the device, at most: a round is shorter while
    requests wait, and ends early when new weights are there. By default 1 on a CPU, 32 on a GPU."""
    compile: bool = True
    """On a GPU, fuse each decoder layer with torch.compile; it takes some seconds at the start."""
    max_context: PositiveInt | None = None
    """Longest sequence; the model's own limit if not given."""
    prefix_cache: bool = True
    """Take the KV of a known prefix from memory that is free at the moment, instead of computing
    it; only KV of the version served, but with kv = "keep" also what earlier turns of the same
    session left."""


class EngineConfig(DecodingConfig):
    type: str = "embedded"
    """Backend that generates: "embedded" (Millrace's own engine), or "package.module:Class"."""
    options: dict[str, Any] = {}
    """Keys of a backend of your own: the fields of its class."""
    count: NonNegativeInt = 1
    """Engine processes on this host."""
    remote: NonNegativeInt = 0
    """Further engines, which other hosts bring with `millrace join`; see
    docs/how-to/join-hosts.md."""
    adapters: dict[str, str] = {}
    """Further LoRA adapters that requests may choose by name: PEFT folders, never trained. See
    docs/how-to/lora.md."""
    kv: Literal["keep", "recompute"] = "keep"
    """On a weight swap: go on with the KV of the old weights, or recompute it under the new
    ones."""


class TrainerConfig(Section):
    steps: PositiveInt = 100
    groups_per_step: PositiveInt = 8
    """Groups per step; times rollout.group_size = episodes per step."""
    minibatches: PositiveInt = 1
    """Optimizer updates per step, each with its share of the groups; a step makes one version."""
    epochs: PositiveInt = 1
    """Times a step goes through its minibatches; still one version."""
    microbatch_tokens: PositiveInt = 8192
    """Token budget of one forward pass; one longer sequence still gets a pass of its own."""
    learning_rate: PositiveFloat = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    min_learning_rate_share: Share = 0.0
    """Where linear and cosine schedules end, as a share of learning_rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    device: str = "auto"
    dtype: Dtype = "float32"
    """Compute type; master weights and optimizer state stay float32. With "float16" the loss is
    scaled; see docs/performance.md for why one might want it."""
    threads: PositiveInt | None = None
    """CPU threads; by default the cores are shared out evenly."""
    logprob_chunk: PositiveInt = 1024
    """Tokens whose logits exist at one time."""
    replay_routes: bool = True
    """Of a mixture of experts: send each token to the experts that the engine sent it to; see
    docs/explanation/expert-routing.md. False: nobody notes where they went."""
    gradient_checkpointing: bool = False
    """Compute each layer twice to keep less for the backward pass."""
    compile: bool = False
    """Compile the layers (torch.compile): slower to start, faster steps. Needs g++, and Triton on
    a GPU."""


class CriticConfig(Section):
    path: str | None = None
    """Model that the critic starts from, with the policy's vocabulary; by default model.path."""
    learning_rate: PositiveFloat = 1e-5
    warmup_steps: NonNegativeInt = 0
    """First steps, in which the critic learns and the policy does not."""
    discount: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """Of rewards, per token (gamma)."""
    decay: Share = 1.0
    """Of surprises, per token, in generalized advantage estimation (lambda): 1 trusts what
    happened, 0 what the critic says about the next token."""
    normalize: bool = True
    """Advantages minus their mean over all tokens of a step, over their std."""
    value_clip: PositiveFloat | None = None
    """How far a value may move within a step before it learns no more; by default as far as it
    likes."""
    loss_weight: PositiveFloat = 0.5
    """Of the mean squared error; AdamW feels it only where trainer.max_grad_norm cuts the
    gradient."""


class LoraConfig(Section):
    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    """The update is scaled by alpha / rank."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] = (ALL_LINEAR,)
    """Names of the layers to adapt, such as "q_proj"; "all-linear" = all but the head."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, so that a higher rank does not learn more slowly."""
    dora: bool = False
    """Also learn the length of each row of the updated weights (DoRA)."""
    apply: Literal["auto", "merged", "unmerged"] = "auto"
    """How engines apply it: written into their weights at each version, or computed beside them at
    each token. "auto" is merged, unless engine.adapters are there."""
    export_merged: bool = False
    """With the last checkpoint, also write the whole model with the adapter merged into it."""

    @field_validator("target_modules", mode="before")
    @classmethod
    def _may_be_one_name(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class WeightsConfig(Section):
    transport: Literal["auto", "shm", "ipc", "collective", "disk"] = "auto"
    """How new weights reach the engines: "shm" = shared memory on one host, "ipc" = GPU memory on
    one host, "collective" = one broadcast to all, "disk" = files in a directory that all share.
    "auto" is ipc between GPUs of one host, else shm there, and collective with remote engines."""
    payload: Literal["full", "delta"] = "full"
    """What travels: every value, or those that changed in engine.dtype since the last version."""
    interrupt: Interrupt = "swap"
    """What new weights do to sequences in flight: "swap" = they go on, "abort" = they are resumed
    on any engine, "save" = they wait while the weights arrive, "drain" = they are finished first,
    "barrier" = and generation and training take turns; see docs/explanation/weights.md."""
    directory: str | None = None
    """Where "disk" writes, under the same path on all hosts; weights/ in run_dir if not given."""
    address: str = "auto"
    """Host name or address at which the trainer's host listens for "collective": "auto" is
    loopback or, with remote engines, that of cluster.advertise or cluster.address."""
    bucket_bytes: PositiveInt = 2**26
    """How much "collective" sends at a time; two such buckets are under way."""
    timeout_s: PositiveFloat = 60.0
    """How long a broadcast may hang, or a full disk stay full, before it counts as failed."""
    notify: tuple[Annotated[str, Field(pattern=r"^https?://[^/\s]+\S*$")], ...] = ()
    """With "disk": http URLs to which {"version", "path"} is posted for each version, for engines
    that are not Millrace's; its files stay until they answer, for timeout_s at most."""


class CheckpointConfig(Section):
    every_steps: NonNegativeInt = 100
    """0 = only at the end."""
    keep: PositiveInt = 3


class WatchConfig(Section):
    progress: Literal["auto", "live", "lines", "off"] = "auto"
    """Terminal progress: "auto" is live in a terminal and lines elsewhere."""
    tensorboard: bool = False
    """Also write TensorBoard files (needs the extra millrace[tensorboard])."""
    samples_per_step: NonNegativeInt = 1
    """Episodes written to rollouts/ each step, for reading."""
    record_episodes: NonNegativeInt = 0
    """Episodes of an environment written to episodes/ each step, whole, for `millrace replay`."""


class ClusterConfig(Section):
    address: str = "auto"
    """Where the controller listens: "auto" (a private local socket) or "tcp://HOST:PORT", where
    HOST is a name or interface of this machine, or * for all. TCP is always encrypted, and only
    workers with the run's keys get in."""
    advertise: str | None = None
    """Host name by which other hosts reach the controller; by default the HOST of address, or with
    * this machine's own name."""
    ticket: str | None = None
    """File written for `millrace join` while the run lasts; a secret, so never in run_dir."""
    join_timeout_s: PositiveFloat = 600.0
    """How long the run waits for engines from other hosts."""
    heartbeat_timeout_s: Annotated[Float, Field(ge=1, le=3600)] = 30.0
    """A worker on another host that is silent for this long is taken for dead; so is the controller
    by that host."""
    start_timeout_s: PositiveFloat = 180.0
    """How long a worker may take to come up."""
    stop_timeout_s: PositiveFloat = 10.0
    """How long a worker may take to stop before it is killed."""
    stall_timeout_s: PositiveFloat = 600.0
    """The run stops if no step completes for this long, saying what waits for what."""
    mps: Literal["auto", "on", "off"] = "auto"
    """Share the GPU through NVIDIA MPS, whose daemon the run starts and stops: "auto" where it is
    installed and several workers use a GPU, "on" = or fail; see docs/how-to/share-one-gpu.md."""
    take_turns: bool = False
    """Engines pause while the trainer steps, and the trainer waits for their pause: one GPU at a
    time belongs to one of them."""
