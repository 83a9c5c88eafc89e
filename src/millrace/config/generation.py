"""Settings of generation: the model, sampling, rollouts, engines and weight updates. Torch-free."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from millrace.config.section import (
    Dtype,
    Float,
    GroupCount,
    Int,
    NonNegativeInt,
    NonNegativeIntOrAuto,
    Plugin,
    PositiveFloat,
    PositiveInt,
    Section,
)
from millrace.core.errors import suggestion

FASTEST = "fastest"
Interrupt = Literal["swap", "abort", "save", "drain", "barrier"]


class ModelConfig(Section):
    path: str
    """Hugging Face model directory, or the name of a model on the hub."""
    trust_remote_code: bool = False
    """Permission to run Python code from the model directory. Enable it only for models whose
    code you have read."""


class SamplingConfig(Section):
    max_new_tokens: PositiveInt = 256
    """Maximum number of tokens in one completion."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature, above 0. Lower values favour likelier tokens."""
    top_k: NonNegativeInt = 0
    """Number of likeliest tokens to sample from; 0 = all tokens."""
    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """Probability mass to sample from, above 0 and up to 1: the likeliest tokens that reach it
    together. 1 = all tokens."""
    min_p: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Minimum probability of a sampled token, as a share of the likeliest token's probability,
    from 0 to below 1. 0 = no minimum."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, besides the end-of-sequence token, which always ends it."""


class RolloutConfig(Section):
    group_size: Annotated[Int, Field(ge=2)] = 8
    """Number of episodes trained per task, at least 2. They are compared with each other."""
    oversample: NonNegativeInt = 0
    """Number of additional episodes started per task. rollout.selection chooses which
    rollout.group_size of them are trained."""
    longest_first: NonNegativeInt = 0
    """Number of queued requests that a request may skip if earlier episodes of its task were
    long. Starting long episodes early shortens the tail of a step. 0 = first come, first
    served."""
    selection: Plugin = Field(default={"type": "roc"})
    """Method that selects episodes if rollout.oversample starts additional ones: "roc" (failures at
    random, the cleanest successes), "first", "fastest" (those of an environment that finish first;
    the others are cancelled), or "module:Name"; see docs/how-to/shape-training-data.md."""
    filter: tuple[Plugin, ...] = ()
    """Filters that drop or mask groups before training: "zero_variance", "overlong", or
    "module:Name"; see docs/how-to/shape-training-data.md."""
    max_running_groups: GroupCount = 64
    """Maximum number of groups that are played or scored at the same time: a number, or "2
    batches" for twice trainer.groups_per_step."""

    @property
    def num_cancelled(self) -> int:
        """Episodes of a group that are cancelled, because others have finished first."""
        return self.oversample if self.selection.get("type") == FASTEST else 0

    @property
    def num_scored(self) -> int:
        """Episodes of a group that are played to the end."""
        return self.group_size + self.oversample - self.num_cancelled


class EngineConfig(Section):
    type: str = "embedded"
    """Engine backend: "embedded" (Millrace's own engine), "vllm" or "sglang" (servers of vLLM or
    SGLang; see docs/how-to/vllm.md), or "module:Class"."""
    options: dict[str, Any] = Field(default={})
    """Options of the engine backend: those of engine.type = "embedded", "vllm" and "sglang" are
    listed in docs/reference/configuration.md, and those of a class are its fields."""
    count: NonNegativeIntOrAuto = "auto"
    """Number of engine processes on this host. "auto" is one for each GPU that the trainer and
    other models leave free, and 1 if they leave none."""
    max_count: PositiveInt | None = None
    """Maximum number of engines while the run lasts: one is added when the trainer has waited for
    more than 30 % of the last 30 seconds, and removed again when a whole batch waits all the time.
    By default the run neither adds nor removes engines."""
    remote: NonNegativeInt = 0
    """Number of additional engines that other hosts bring with `millrace join`; see
    docs/how-to/join-hosts.md."""
    tp: PositiveInt = 1
    """Number of GPUs that hold one engine's model together, by tensor parallelism. Only vLLM
    and SGLang offer more than 1."""
    dtype: Dtype = "auto"
    """Data type of the engine's weights and KV cache. "auto" is bfloat16 on CUDA, which decodes
    at twice the speed of float32 in half the memory, and float32 on a CPU."""
    max_sequences: PositiveInt = 64
    """Maximum number of sequences that one engine decodes in a batch."""
    max_context: PositiveInt | None = None
    """Maximum length of a sequence in tokens, prompt included. By default the limit of the
    model."""

    kv: Literal["keep", "recompute"] = "keep"
    """Treatment of the KV cache when new weights arrive: "keep" continues with it, "recompute"
    prefills running sequences again under the new weights."""

    adapters: dict[str, str] = Field(default={})
    """Additional LoRA adapters by name: PEFT folders that requests can select and that are never
    trained; see docs/how-to/lora.md."""

    @property
    def has_servers(self) -> bool:
        """Whether each engine passes its requests to an HTTP server."""
        return self.type in ("vllm", "sglang")

    @property
    def attached(self) -> tuple[str, ...]:
        """URLs of the servers that run already; the engines' processes need no GPU then."""
        return tuple(self.options.get("attach", ()))

    @property
    def in_fp8(self) -> tuple[str, ...]:
        """The options that make the embedded engine compute in FP8."""
        options = ("quantization", "kv_cache_dtype")
        return tuple(name for name in options if self.options.get(name) == "fp8")

    @property
    def num_local(self) -> int:
        """`count`, which is 1 before "auto" is resolved."""
        return 1 if self.count == "auto" else self.count


TRANSPORTS = ("auto", "shm", "ipc", "collective", "disk")


class WeightsConfig(Section):
    transport: str = "auto"
    """Transport of new weights to the engines: "shm" = shared memory of one host, "ipc" = GPU
    memory of one host, "collective" = one broadcast to all engines, "disk" = files in a shared
    directory, or "module:Class" for one of your own (docs/explanation/weights.md). "auto" is ipc
    between GPUs of one host, shm on one host otherwise, for servers and for engines that sleep, and
    collective with ranks or engines on other hosts."""
    payload: Literal["full", "delta"] = "full"
    """Content of an update: "full" = every value, "delta" = only the values that changed in
    engine.dtype since the last version."""
    interrupt: Interrupt = "swap"
    """Treatment of running sequences when new weights arrive: "swap" = they continue under the
    new weights, "abort" = they resume on any engine, "save" = they pause during the transfer,
    "drain" = they finish first, "barrier" = as drain, and generation and training alternate; see
    docs/explanation/weights.md."""
    probe: bool | None = None
    """Check of every swap: the engine scores a fixed passage, and is replaced if its logprobs are
    not those of the trainer. By default only engines of type "vllm" or "sglang" are checked."""
    directory: str | None = None
    """Directory for transport "disk" and for one of your own, under the same path on all hosts. By
    default weights/ in run_dir."""
    notify: tuple[Annotated[str, Field(pattern=r"^https?://[^/\s]+\S*$")], ...] = ()
    """URLs of external engines that receive {"version", "path"} by POST for every version, with
    transport "disk". The files of a version stay until all URLs have answered, for at most 60
    seconds by default (see supervision.hang_timeout_s)."""

    @field_validator("transport")
    @classmethod
    def _transport_is_known(cls, value: str) -> str:
        if ":" not in value and value not in TRANSPORTS:
            hint = suggestion(value, TRANSPORTS, otherwise="write 'module:Class', or one of")
            raise ValueError(f"not known; {hint.rstrip('?.')}")
        return value
