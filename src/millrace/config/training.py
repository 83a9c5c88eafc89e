"""Settings of training: buffer, trainer, optimizer, critic, LoRA, checkpoints and journal.
Torch-free."""

from dataclasses import replace
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from millrace.config.section import (
    Beta,
    Dtype,
    Float,
    GroupCount,
    Int,
    NonNegativeFloat,
    NonNegativeInt,
    OneOrMore,
    Plugin,
    PositiveFloat,
    PositiveFloatOrAuto,
    PositiveInt,
    PositiveIntOrAuto,
    Section,
    Share,
    forbid,
)
from millrace.core.errors import suggestion
from millrace.core.microbatch import MeshSizes
from millrace.core.staleness import Measure, StalenessLimit

ALL_LINEAR = "all-linear"
ADAMW = "adamw"
MUON = "muon"
ADAMW_8BIT = "adamw8bit"
OPTIMIZERS = (ADAMW, MUON, ADAMW_8BIT)


class FidelityConfig(Section):
    mode: Literal["fast", "exact"] = "fast"
    """Agreement of engine and trainer logprobs for the same weights: "fast" = up to rounding,
    "exact" = bit for bit, at a cost in speed, and a step with a differing bit stops the run; see
    docs/explanation/exact.md."""


class ReplayConfig(Section):
    share: Annotated[Float, Field(gt=0, lt=1)] = 0.25
    """Maximum share of a batch that is replayed, between 0 and 1."""
    max_staleness: Annotated[Int, Field(ge=2)] = 8
    """Maximum staleness of a replayed group in versions, at least 2: a group can return in the
    second batch after its own at the earliest."""

    def groups_of(self, num_groups: int) -> int:
        """Number of groups in a batch of `num_groups` that may be replayed."""
        return int(self.share * num_groups + 1e-9)  # 0.29 * 100 is slightly less than 29


ENFORCE = ("wait", "cancel", "take")
_STALE_SHARE = TypeAdapter[float](Annotated[Float, Field(ge=0, lt=1)])


class BufferConfig(Section):
    capacity: GroupCount = 64
    """Maximum number of groups that wait for the trainer, at least trainer.groups_per_step: a
    number, "2 batches" for twice trainer.groups_per_step, or "unbounded"."""
    max_staleness: NonNegativeInt = 2
    """Maximum staleness of a trained token: the trainer's version minus the version that sampled
    it. 0 = strictly on-policy."""
    staleness: Plugin = Field(default={"type": "oldest"})
    """Tokens of a group to which buffer.max_staleness applies: "oldest" = every token, "mean" =
    their average, {type = "share", max_share = 0.1} = all but this share of them, from 0 to below
    1. The key enforce says what happens to groups that run for too long: "wait" (the default) = a
    batch waits for them, "cancel" = they are cancelled and tried again, "take" = they are dropped
    from the buffer when a batch is taken; see docs/explanation/buffer.md."""
    order: Plugin = Field(default={"type": "oldest"})
    """Order in which waiting groups are trained: "oldest", "freshest", "ready" (first come, first
    served), "in_order" (by task; a batch waits for earlier groups that still run), "difficulty"
    (half solved first), or "module:Name"."""
    replay: ReplayConfig | None = None
    """Replay of trained groups, such as {share = 0.25, max_staleness = 8}. By default every group
    is trained once."""

    @property
    def limit(self) -> StalenessLimit:
        limit = StalenessLimit(
            max_staleness=self.max_staleness,
            measure=self.staleness["type"],
            max_stale_share=self.staleness.get("max_share", 0.0),
            only_at_take=self.enforce == "take",
        )
        return replace(limit, waits=self.enforce == "wait" and limit.one_token_decides)

    @property
    def enforce(self) -> str:
        return self.staleness.get("enforce", ENFORCE[0])

    @field_validator("staleness")
    @classmethod
    def _is_a_measure(cls, table: dict[str, Any]) -> dict[str, Any]:
        table = {"type": "oldest", **table}
        measure, keys = table.get("type"), table.keys() - {"type", "enforce"}
        if measure not in get_args(Measure):
            hint = suggestion(str(measure), get_args(Measure), otherwise="there are")
            raise ValueError(f"type = {measure!r} is not a staleness measure; {hint}")
        if (enforce := table.get("enforce", ENFORCE[0])) not in ENFORCE:
            hint = suggestion(str(enforce), ENFORCE, otherwise="there are")
            raise ValueError(f"enforce = {enforce!r} is unknown; {hint}")
        if measure == "share" and keys == {"max_share"}:
            try:
                return {**table, "max_share": _STALE_SHARE.validate_python(table["max_share"])}
            except ValidationError as error:
                raise ValueError(f"max_share: {error.errors()[0]['msg']}") from None
        if measure == "share":
            raise ValueError(
                "type 'share' has one key, max_share: the share of a group's tokens that may exceed"
                " max_staleness, such as {type = 'share', max_share = 0.1}"
            )
        if keys:
            raise ValueError(f"type {measure!r} has no key {min(keys)!r}; remove it")
        return table


class MeshConfig(Section):
    dp_replicate: PositiveInt = 1
    """Number of copies of the sharded model (HSDP). Each copy trains on its share of a batch."""
    dp_shard: PositiveIntOrAuto = "auto"
    """Number of ranks that FSDP shards weights, gradients and optimizer state over. "auto" is
    trainer.ranks / (dp_replicate * cp * tp); a single rank then does not use FSDP. With 1, a single
    rank uses it, over NCCL on a GPU, which is slower: a way to try both on one GPU."""
    cp: PositiveInt = 1
    """Number of ranks that share the rows of each microbatch (context parallelism), for sequences
    whose activations one GPU cannot hold. tp * cp must divide the number of key-value heads."""
    tp: PositiveInt = 1
    """Number of ranks that share each matrix product (tensor parallelism). tp * cp must divide the
    number of key-value heads."""
    ep: PositiveInt = 1
    """Number of ranks that share the experts of a mixture (expert parallelism). It must divide the
    number of experts, and dp_shard * cp."""


class TrainerConfig(Section):
    steps: PositiveInt = 100
    """Number of training steps. Each step makes one version of the weights."""
    groups_per_step: PositiveInt = 8
    """Number of groups per step; multiplied by rollout.group_size, the number of episodes per step.
    In `millrace sft` it is the number of examples per step."""
    minibatches: PositiveInt = 1
    """Number of optimizer updates per step, each on its share of the groups."""
    epochs: PositiveInt = 1
    """Number of passes over the groups of a step, each in trainer.minibatches updates."""
    microbatch_tokens: PositiveInt = 8192
    """Token budget of one rank in one forward and backward pass; the trainer.mesh.cp ranks that
    share a pass add theirs up. It bounds memory and does not change the result; a longer sequence
    gets a pass of its own."""
    dtype: Dtype = "auto"
    """Data type of the computation; master weights and optimizer state stay float32. "auto" is
    bfloat16 on CUDA, which is several times as fast as float32, and float32 on a CPU. With
    "float16" the loss is scaled; see docs/performance.md."""
    gradient_checkpointing: bool = False
    """Recomputation of activations in the backward pass. It saves memory and costs about a third
    more computation."""
    compile: bool = False
    """Compilation of the layers with torch.compile: a slower start and faster steps. It needs g++,
    and Triton on a GPU."""
    replay_routes: bool = True
    """Replay of expert routes in a mixture of experts: the trainer sends each token to the experts
    that the engine chose; see docs/explanation/expert-routing.md."""
    router_aux_loss: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss of routers in a mixture of experts, such as 0.001. 0 =
    no such loss. It needs trainer.replay_routes."""
    router_bias_rate: NonNegativeFloat = 0.0
    """Change per step of the biases by which routers of DeepSeek-V3, GLM-4.5 and similar models
    balance their experts, such as 0.001. 0 = biases stay as they are. It needs
    trainer.replay_routes."""
    ranks: PositiveIntOrAuto = 1
    """Number of processes that train together, one per GPU (placement.trainer). "auto" is half of
    the GPUs of this host, or more if the model needs them."""
    remote: NonNegativeInt = 0
    """Number of ranks, the last ones of trainer.ranks, that other hosts bring with `millrace join
    --role trainer`; see docs/how-to/join-hosts.md."""
    mesh: MeshConfig = MeshConfig()
    """Division of the work among the ranks. dp_replicate * dp_shard * cp * tp must be
    trainer.ranks."""

    @property
    def num_ranks(self) -> int:
        """`ranks`, which is 1 before "auto" is resolved."""
        return 1 if self.ranks == "auto" else self.ranks

    @property
    def is_sharded(self) -> bool:
        """Whether ranks use FSDP."""
        return self.num_ranks > 1 or self.mesh.dp_shard != "auto"

    @property
    def mesh_sizes(self) -> MeshSizes:
        mesh, sizes = self.mesh, self.mesh.model_dump()
        if mesh.dp_shard == "auto":
            sizes["dp_shard"] = max(1, self.num_ranks // (mesh.dp_replicate * mesh.cp * mesh.tp))
        return MeshSizes(**sizes)


class OptimizerConfig(Section):
    model_config = ConfigDict(extra="allow")

    type: str = ADAMW
    """Optimizer: "adamw", "muon" (Muon for the matrices of the layers, AdamW for the rest),
    "adamw8bit" (AdamW with 8-bit state, from torchao), or "module:Class" of a
    torch.optim.Optimizer, whose further arguments are keys of this table."""
    learning_rate: PositiveFloatOrAuto = "auto"
    """Peak learning rate, above 0. "auto" is 1e-6 for all weights, where reinforcement learning
    needs small steps (`millrace sft`: 1e-5), and 1e-4 with [lora], whose low-rank factors start at
    zero and need larger ones."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after optimizer.warmup_steps: it stays at its peak ("constant"),
    or falls until the end of trainer.steps, evenly ("linear") or along a cosine ("cosine")."""
    warmup_steps: NonNegativeInt = 0
    """Number of first steps in which the learning rate rises linearly to its peak."""
    min_lr_ratio: Share = 0.0
    """Learning rate at the end of a linear or cosine schedule, as a share of
    optimizer.learning_rate from 0 to 1."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment, each from 0 to below 1."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of matrices, at least 0. Norms and biases have none."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum norm of the gradient, above 0. Larger gradients are scaled down."""
    offload: bool = False
    """Optimizer state in host memory instead of GPU memory. Each update copies it to the GPU and
    back, a few hundred megabytes at a time, and gives the same result."""

    @property
    def type_arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _built_in_ones_have_no_further_keys(self) -> Self:
        if self.type in OPTIMIZERS and self.model_extra:
            forbid(type(self).__name__, self.model_extra)
        if self.type not in OPTIMIZERS and ":" not in self.type:
            hint = suggestion(self.type, OPTIMIZERS, otherwise="built in")
            raise ValueError(f"type = {self.type!r} is not a built-in optimizer; {hint}")
        return self


class CriticConfig(Section):
    path: str | None = None
    """Model that the critic starts from, with the policy's vocabulary. By default model.path."""
    learning_rate: PositiveFloat = 1e-5
    """Learning rate of the critic, above 0 and constant."""
    warmup_steps: NonNegativeInt = 0
    """Number of first steps in which only the critic is trained."""
    value_clip: PositiveFloat | None = None
    """PPO value clip: maximum change of a value within a step, above 0. By default values are not
    clipped."""


class LoraConfig(Section):
    rank: PositiveInt = 16
    """Rank of the adapter matrices."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapter, above 0: its product is multiplied by lora.alpha / lora.rank."""
    target_modules: Annotated[tuple[str, ...], OneOrMore, Field(min_length=1)] = (ALL_LINEAR,)
    """Names of the layers to adapt, such as "q_proj" or "experts.down_proj". "all-linear" = every
    linear layer except the head, and in a mixture of experts the weights of all experts."""
    rslora: bool = False
    """Rank-stabilized scaling: lora.alpha / sqrt(lora.rank) instead of lora.alpha / lora.rank, so
    that a higher rank does not learn more slowly."""
    dora: bool = False
    """Weight-decomposed adaptation (DoRA): the length of each row of the updated weights is
    trained too."""
    apply: Literal["auto", "merged", "unmerged"] = "auto"
    """Application in the engines: "merged" into the weights at each version, or "unmerged" beside
    them at each token. "auto" is merged, but unmerged with engine.adapters, with [policies], and on
    servers of vLLM or SGLang."""
    export_merged: bool = False
    """Export of the whole model, with the adapter merged into it, beside the last checkpoint."""
    quantization: Literal["nf4"] | None = None
    """Quantization of the frozen matrices beneath the adapter: "nf4" = 4 bits per weight in the
    trainer (QLoRA), and the same values in the engines. By default none; see
    docs/how-to/lora.md."""


class JournalConfig(Section):
    max_bytes: NonNegativeInt = 4 * 2**30
    """Size of the journal in bytes beyond which an extra checkpoint is made, so that the journal
    can shrink. 0 = no journal: `--resume` then samples the work since the newest checkpoint again
    (docs/explanation/reliability.md)."""
    partial_every_s: NonNegativeFloat = 5.0
    """Interval in seconds at which the tokens of unfinished groups are saved. These groups resume
    from the saved tokens after a crash. With 0 they start again, as they do with weights.interrupt
    = "barrier", whose runs are reproducible."""

    @property
    def is_on(self) -> bool:
        return self.max_bytes > 0


class CheckpointConfig(Section):
    every_steps: NonNegativeInt = 100
    """Number of steps between checkpoints. 0 = only after the last step."""
    keep: PositiveInt = 3
    """Number of newest checkpoints that are kept."""
    grace_s: PositiveFloat = 25.0
    """Time in seconds that a run has after SIGTERM, which schedulers send at preemption and before
    a time limit, to finish its step and write a checkpoint. The scheduler must wait longer before
    it kills the run; see docs/how-to/slurm.md and docs/how-to/kubernetes.md."""
    path: str | None = None
    """URL of a folder that finished checkpoints are also copied to, in any store that fsspec
    reaches, such as "s3://bucket/run", "gs://bucket/run" or "file:///mnt/run". Credentials come
    from the environment. `--resume` finds checkpoints there if run_dir has none or older ones."""

    @field_validator("path")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        if url is not None and "://" not in url:
            raise ValueError(f"{url!r} is not a URL, such as s3://bucket/run or file:///mnt/run")
        return url
