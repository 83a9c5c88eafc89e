"""Engine backends: the plug-ins behind `[engine] type`.

A backend states its capabilities and loads an EngineCore inside an engine's worker process. The
worker, the pool and the controller are the same for every backend. capabilities.py refuses what a
backend does not offer. Torch-free: a backend imports its libraries in load().
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from millrace.config import EngineConfig, LoraConfig, RunConfig
from millrace.config.section import PositiveInt
from millrace.core.errors import ConfigError, suggestion
from millrace.core.plugins import build_plugin, plugin
from millrace.core.protocols import Capability
from millrace.core.records import Completion, CompletionChunk, Request, ScoreRequest, TokenLogprobs
from millrace.core.secrets import VARIABLE, Secrets


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """The model that an engine serves, and its settings."""

    config: EngineConfig
    model_path: str
    version: int  # of the weights at model_path, with the adapter on top if there is one
    device: str = "auto"
    devices: tuple[str, ...] = ()  # all of an engine with tp above 1; the first is `device`
    trust_remote_code: bool = False
    lora: LoraConfig | None = None  # updates bring adapters of this kind instead of all weights
    adapter_path: Path | None = None
    # Further policies on the same base, by name: the folders of their adapters, and their versions.
    policies: Mapping[str, tuple[str | None, int]] = field(
        default_factory=dict[str, tuple[str | None, int]]
    )
    records_routes: bool = False  # record the experts of each token of a mixture of experts
    sleeps: bool = False  # sleep() will be called
    trainer_bytes: int = 0  # of the device that the trainer needs while the engine is awake
    exact: bool = False  # logprobs are bit for bit those of the trainer
    reproducible: bool = False  # the same requests get the same bits, whatever was served before
    on_warm_up: Callable[[], None] = lambda: None  # called before compilation, if there is any


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FinishedCompletions:
    """The completions of one request that ended since the last call."""

    id: str  # of the request
    completions: dict[int, Completion]  # by member
    is_last: bool  # all n completions of the request have ended


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    running: int  # sequences in the batch
    waiting: int  # sequences in the wait queue
    free_blocks: int | None = None  # of KV; None = unknown
    generated_tokens: int  # since the start, as all below
    prefill_tokens: int
    cached_tokens: int = 0  # found in the prefix cache, so not prefilled
    preemptions: int = 0
    drafted_tokens: int = 0  # computed by speculation
    accepted_tokens: int = 0  # of these, the tokens that were drawn


class EngineCore(Protocol):
    """A synchronous engine inside its worker process. One thread calls all methods except
    prepare(), which a staging thread may call at the same time. Weights change only in commit(),
    which runs between two steps."""

    @property
    def version(self) -> int | None:
        """The served version; None after a commit that failed half-way."""
        ...

    @property
    def has_work(self) -> bool:
        """True if step() would make progress."""
        ...

    @property
    def has_held(self) -> bool:
        """True if requests wait only because hold_new() was called."""
        ...

    def stats(self) -> EngineStats: ...

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that an update must bring."""
        ...

    def add_request(self, request: Request, *, stream: bool = False) -> None:
        """Queue a request; TaskError if it can never be served. `stream`: for take_chunks()."""

    def step(self, *, should_stop: Callable[[], bool] = ...) -> list[FinishedCompletions]:
        """Run one forward pass, or several until should_stop() returns True."""
        ...

    def take_chunks(self, *, coalesced: bool = False) -> dict[str, list[CompletionChunk]]:
        """New tokens of streaming requests, by id. Called after each method that returns
        completions, for requests without `coalesce`; `coalesced`: for running ones with it."""
        ...

    def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        """Score given tokens between two steps. Needs Capability.SCORING."""
        ...

    def abort(self, ids: Iterable[str]) -> list[FinishedCompletions]:
        """End these requests with the tokens they have; unknown ids are ignored."""
        ...

    def expire(
        self, before: int, adapters: Mapping[str, int] | None = None
    ) -> list[FinishedCompletions]:
        """End requests with `expires` set that have an older token, now and when they arrive. An
        engine with several policies also gets the versions of those that are `adapters`."""
        ...

    def interrupt(self) -> list[FinishedCompletions]:
        """End all running requests as "interrupt", to be resumed. Needs Capability.PARTIALS."""
        ...

    def preempt_all(self) -> list[FinishedCompletions]:
        """Move all running sequences to the wait queue. Needs Capability.TOKEN_VERSIONS."""
        ...

    def hold_new(self) -> None:
        """Start no new sequence until release_new(); running sequences continue."""

    def release_new(self) -> None:
        """Undo hold_new()."""

    def prepare(self, tensors: Mapping[str, Any], *, version: int) -> Any:
        """Make new weights ready for commit() while decoding continues. Raises WeightError if they
        do not fit. The tensors stay unchanged until the commit."""
        ...

    def commit(self, prepared: Any) -> None:
        """Replace the weights by what prepare() returned. Raises WeightError on failure."""

    def pause(self) -> None:
        """Compute nothing until the next step(), also outside of it; nothing to do by default."""

    def close(self) -> None:
        """End what the engine has started outside of its process; nothing by default."""

    def sleep(self) -> None:
        """Give back the memory of weights and KV until wake(), before which neither prepare() nor
        anything that computes is called. Needs Capability.SLEEP."""

    def wake(self) -> None:
        """Undo sleep()."""


@runtime_checkable
class HasPolicies(Protocol):
    """An EngineCore that may serve adapters of several policies."""

    def version_of(self, policy: str) -> int | None: ...

    def prepare(self, tensors: Mapping[str, Any], *, version: int, policy: str = ...) -> Any:
        """EngineCore.prepare() for one of the policies."""

    def unchanged(self, *, version: int, policy: str) -> Any:
        """What prepare() returns, for a version with the weights that the engine has."""


@runtime_checkable
class UsesIdleTime(Protocol):
    """An EngineCore with work that can wait until there are no requests."""

    def use_idle_time(self) -> None:
        """Do a part of it; called again while the engine is idle."""


class AdapterLoader(Protocol):
    """The adapters of an engine that can be replaced, by name."""

    def load(self, name: str, folder: Path) -> None:
        """Replace an adapter, which no running request uses, by that of a PEFT folder."""


@runtime_checkable
class HasAdapters(Protocol):
    """An EngineCore that may serve adapters besides those of policies."""

    @property
    def bank(self) -> AdapterLoader | None:
        """None if the engine was started without adapters."""
        ...


class EngineBackend(Protocol):
    """What `[engine] type` names: a class whose fields are the keys of [engine.options]."""

    @property
    def capabilities(self) -> frozenset[Capability]: ...

    def load(self, spec: EngineSpec) -> EngineCore:
        """Load the model; runs in the engine's worker process. Raises ConfigError."""
        ...


@plugin
class EmbeddedBackend:
    """Millrace's own engine: continuous batching over a transformers model."""

    kv_bytes: PositiveInt | None = None
    """Maximum size of the KV cache in bytes. By default 1 GiB on a CPU, and 40 % of the free memory
    on a GPU, so that a trainer can share it."""
    prefix_cache: bool = True
    """Reuse of the KV cache for known prefixes. Only KV of the current weights is reused, and with
    engine.kv = "keep" also that of earlier turns of the same episode."""
    compile: bool = True
    """Fast layers on a GPU: kernels of Millrace where they cover the model, and torch.compile
    otherwise. The engine starts some seconds later and decodes faster. It has no effect on a
    CPU."""
    prefill_tokens: PositiveInt | None = None
    """Maximum number of prompt tokens in one forward pass; longer prompts are prefilled in chunks.
    By default 2048 on a CPU and 16384 on a GPU."""
    block_tokens: PositiveInt = 16
    """Number of tokens in a KV block. Smaller blocks let more prompts share a prefix, larger ones
    need fewer lookups."""
    decode_steps: PositiveInt | None = None
    """Maximum number of decode steps per launch on the device. More steps hide the latency of
    launches; with fewer, the engine notices new requests and new weights sooner. By default 1 on a
    CPU and 32 on a GPU."""
    quantization: Literal["fp8"] | None = None
    """Quantization of the layers: "fp8" computes their matrix products with FP8 weights and
    activations, which decodes faster and gives logprobs that differ from the trainer's. On a GPU it
    needs Hopper or newer. By default layers are not quantized; see docs/explanation/weights.md."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Data type of the KV cache: "auto" = engine.dtype; "fp8" = 8 bits, which take about half the
    memory of 16, so that nearly twice as many sequences fit. See docs/explanation/weights.md."""
    speculation: Literal["auto", "on", "off"] = "auto"
    """Speculative decoding with drafts from known text, which changes tokens by rounding at most:
    "auto" = on a CPU, "on" = also on a GPU, which then decodes in single steps (not measured),
    "off" = never; see docs/architecture.md."""
    capabilities: ClassVar[frozenset[Capability]] = frozenset(Capability)

    def __post_init__(self) -> None:
        if self.speculation == "on" and (self.decode_steps or 1) > 1:
            raise ValueError(
                f"decode_steps = {self.decode_steps} excludes speculation = 'on', because the"
                " decode loop never speculates; leave decode_steps out, or set it to 1"
            )

    @property
    def launch_steps(self) -> int | None:
        """Decode steps per launch that the options ask for; None = the default of the device."""
        return 1 if self.speculation == "on" else self.decode_steps

    def load(self, spec: EngineSpec) -> EngineCore:
        from millrace.inference.embedded.build import build_engine

        return build_engine(spec, options=self)


@plugin
class VllmBackend:
    """A vLLM server for each engine, which Millrace starts and replaces, or to which it connects.
    It does not offer kept ids and routes, which the API lacks on many devices; seeds and
    reproducible bits, because a resumed sequence draws other tokens; entropies; adapters besides
    that of the policy; grammars, because vLLM loads no tokenizer; penalties, logit biases and top
    logprobs."""

    python: str | None = None
    """Python interpreter of the environment in which vLLM or SGLang is installed. By default that
    of Millrace."""
    attach: list[str] = field(default_factory=list[str])
    """URLs of running servers, one for each engine. By default Millrace starts a server for each
    engine."""
    arguments: list[str] = field(default_factory=list[str])
    """Further arguments of the command that starts a server."""
    api_key: str | None = None
    """API key of the servers of attach, as "env:NAME": the variable NAME holds it. By default
    requests carry no key."""
    directory: str | None = None
    """Folder for new weights, which the servers must be able to read. By default a folder in the
    shared memory of this host."""
    dialect: ClassVar[str] = "vllm"
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.PARTIALS, Capability.TOKEN_VERSIONS, Capability.LORA}
    )

    def __post_init__(self) -> None:
        if self.attach and (self.python or self.arguments):
            raise ValueError("python and arguments are of servers that Millrace starts, not attach")
        if self.api_key is not None and not (self.attach and VARIABLE.fullmatch(self.api_key)):
            raise ValueError("api_key is 'env:NAME', and belongs to the servers of attach")

    def load(self, spec: EngineSpec) -> EngineCore:
        from millrace.inference.servers.build import build_server_engine

        return build_server_engine(spec, options=self)


@plugin
class SglangBackend(VllmBackend):
    """An SGLang server for each engine, in place of a vLLM server. It was never run against a real
    server. It offers what vLLM's offers."""

    dialect: ClassVar[str] = "sglang"


BACKENDS: dict[str, type] = {
    "embedded": EmbeddedBackend,
    "vllm": VllmBackend,
    "sglang": SglangBackend,
}


def load_backend(config: EngineConfig, *, section: str = "engine") -> EngineBackend:
    """The backend that the type in this section names: a built-in, or "package.module:Class"."""
    if config.type not in BACKENDS and ":" not in config.type:
        hint = suggestion(config.type, BACKENDS, otherwise="built in")
        raise ConfigError(f"Setting '{section}.type' = {config.type!r} is not known; {hint}")
    if config.tp > 1 and config.type == "embedded":
        raise ConfigError(
            f"Setting '{section}.tp' = {config.tp}: the embedded engine computes on one GPU; set it"
            f" to 1, or {section}.type to 'vllm'."
        )
    options, section = {**config.options, "type": config.type}, f"{section}.options"
    return build_plugin(options, builtins=BACKENDS, default="embedded", section=section)


def load_backends(config: RunConfig) -> dict[str, EngineBackend]:
    """The backends of the policy's engines and of those of other models, by their section."""
    sections = config.engine_sections.items()
    return {section: load_backend(engine, section=section) for section, engine in sections}


def check_servers(config: RunConfig) -> None:
    """Refuse settings that do not fit the servers: number, key, transport, adapters and KV."""
    of_url: dict[str, str] = {}  # the setting that lists each server
    for section, engine in config.engine_sections.items():
        setting = f"{section}.options.attach"
        for url in (url.rstrip("/") for url in engine.attached):
            if url in of_url:
                where = " twice" if of_url[url] == setting else f", and so does {of_url[url]}"
                raise ConfigError(
                    f"{setting} lists {url!r}{where}, but a server has the weights of one engine;"
                    " list another server."
                )
            of_url[url] = setting
        servers, num_engines = engine.attached, engine.num_local + engine.remote
        remedy = f"list one for each of {section}.count"
        if section == "engine":
            num_engines += config.evaluate.engines
            remedy += " and evaluate.engines, and set engine.remote to 0"
        if servers and (engine.remote or len(servers) != num_engines):
            raise ConfigError(
                f"{setting} has {len(servers)} servers, and the run has"
                f" {num_engines} engines of [{section}]; {remedy}."
            )
        if servers and (most := engine.max_count or 0) > engine.num_local:
            raise ConfigError(
                f"{section}.max_count = {most} adds engines, and {setting} has no servers for them;"
                " leave it out."
            )
        server_secrets(engine, section=section)
    transport, kind = config.weights.transport, config.engine.type
    if config.engine.has_servers and transport not in ("auto", "shm", "collective", "disk"):
        raise ConfigError(
            f"weights.transport = {transport!r} is not possible with engine.type = {kind!r}, whose"
            " servers do not know it; set it to 'auto'."
        )
    if config.engine.has_servers and config.lora is not None and config.lora.apply == "merged":
        raise ConfigError(
            f"lora.apply = 'merged' is not possible with engine.type = {kind!r}, which applies"
            " adapters beside the weights; set it to 'auto'."
        )
    if kind == "sglang" and config.engine.kv == "keep":
        raise ConfigError(
            "engine.kv = 'keep' is not possible with engine.type = 'sglang', which prefills running"
            " sequences again after an update; set it to 'recompute'."
        )


def of_engine(config: EngineConfig, index: int) -> EngineConfig:
    """The settings of one of several engines, which has its own server to attach to."""
    if not (servers := config.attached):
        return config
    if index >= len(servers):
        raise ConfigError(
            f"Each of the {len(servers)} servers of engine.options.attach has an engine already, so"
            " none is left for another one; start a run with more of them."
        )
    own = {**config.options, "attach": [servers[index]]}
    return config.model_copy(update={"options": own})


def server_secrets(config: EngineConfig, *, section: str = "engine") -> dict[str, str]:
    """The variable that holds the key of servers to attach to: the only secret of engines."""
    key = config.options.get("api_key")
    if not isinstance(key, str) or (found := VARIABLE.fullmatch(key)) is None:
        return {}
    return {found[1]: Secrets({"key": key}, owner=f"{section}.options.api_key").filled(key)}
