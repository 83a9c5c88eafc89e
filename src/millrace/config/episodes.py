"""Settings of episodes: tasks, the environment, scorers and evaluation. Torch-free."""

from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from millrace.config.generation import EngineConfig, ModelConfig
from millrace.config.section import (
    Float,
    NonNegativeFloat,
    NonNegativeInt,
    Plugin,
    PositiveFloat,
    PositiveInt,
    Section,
    forbid,
)

HUB = "hub:"
ToolFormatName = Literal["auto", "hermes", "llama3", "mistral", "gemma"]
# Keys of [engine] that only the policy's engines have.
OF_POLICY = ("max_count", "remote", "kv", "adapters")


def _columns(value: Any) -> Any:
    if isinstance(value, list | tuple):
        names = cast(list[Any], value)
        value = {name: name for name in names if isinstance(name, str)}
        if len(value) < len(names):
            raise ValueError("a list of columns holds different texts")
    return {"prompt": "prompt", **cast(dict[Any, Any], value)} if isinstance(value, dict) else value


class TaskPlace(Section):
    """Where tasks come from: keys of every table that names tasks."""

    path: str | None = None
    """Path of the tasks: a JSONL file (one task per line: "prompt", a text or chat messages, and
    further columns), a Parquet file or a folder of them, a folder of a Hugging Face dataset, or
    "hub:NAME:SUBSET:SPLIT" with a dataset on the hub, such as "hub:openai/gsm8k:main:train"; see
    docs/how-to/tasks.md."""
    generator: Plugin | None = None
    """Source of tasks instead of a path: a function that returns a list of tasks, as "module:name"
    or "file.py:name", or a table such as {type = "reasoning_gym", dataset = "leg_counting"}; see
    docs/how-to/tasks.md."""
    columns: Annotated[dict[str, str] | None, BeforeValidator(_columns)] = None
    """Names of the task's columns, each with the column of the path that it is read from, such as
    {prompt = "question", answer = "answer"}; other columns are not read. A list names columns
    besides "prompt" that keep their names. By default all columns are kept."""

    @property
    def is_named(self) -> bool:
        return self.path is not None or self.generator is not None


class TaskSourceConfig(TaskPlace):
    weight: PositiveFloat = 1.0
    """Weight of the source, above 0. Its share of all groups is its weight over the sum of all
    weights."""


class TasksConfig(TaskPlace):
    source: dict[str, TaskSourceConfig] = Field(default={})
    """Task sources by their names in metrics, mixed by their weights, instead of one path or
    generator; see docs/how-to/shape-training-data.md."""
    order: Literal["shuffle", "sequential", "curriculum"] = "shuffle"
    """Order of tasks: "shuffle" = a new order each epoch, fixed by the seed; "sequential" = as
    given; "curriculum" = tasks whose recent solve rate is near a half more often."""

    epochs: PositiveFloat | None = None
    """Number of passes over the examples of `millrace sft`, above 0; it replaces trainer.steps.
    `millrace train` refuses it."""

    @field_validator("source", mode="before")
    @classmethod
    def _sources_have_names(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            raise ValueError(
                "sources are tables by name; write [tasks.source.NAME] instead of [[tasks.source]]"
            )
        return value


class McpConfig(Section):
    command: tuple[str, ...] = ()
    """Program and its arguments that speak MCP over standard input and output. Each server has
    either a command or a url."""
    url: str | None = None
    """URL of a server that speaks MCP over streamable HTTP."""
    env: dict[str, str] = Field(default={})
    """Environment variables of the MCP server's program, besides PATH, HOME and the like.
    "env:NAME" in a value stands for the variable NAME of the run, so that the settings hold no
    secret."""
    headers: dict[str, str] = Field(default={})
    """HTTP headers of requests to the MCP server's url, such as {Authorization = "Bearer
    env:TOKEN"}, where env:TOKEN stands for the variable TOKEN of the run."""
    tools: tuple[str, ...] | None = None
    """Names of the MCP server's tools that the model may call. By default all of them."""


class _RoleEngineConfig(EngineConfig):
    # Its engines are all on this host, and their number is not chosen by the run.
    count: PositiveInt = 1  # pyright: ignore[reportIncompatibleVariableOverride]


class RoleModelConfig(Section):
    """A model besides the policy. Its table also takes the keys of [engine]."""

    model_config = ConfigDict(extra="allow")

    path: str
    """Hugging Face model directory, or the name of a model on the hub. The table of a model also
    takes the keys of [engine], such as count and options, except max_count, remote, kv and
    adapters."""
    trust_remote_code: bool = False
    """Permission to run Python code from this model's directory. Enable it only for models whose
    code you have read."""
    template: dict[str, Any] = Field(default={})
    """Variables of this model's chat template, such as {enable_thinking = false}."""

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(path=self.path, trust_remote_code=self.trust_remote_code)

    @property
    def engine(self) -> EngineConfig:
        return _RoleEngineConfig.model_validate(self.model_extra)

    @model_validator(mode="after")
    def _further_keys_are_of_an_engine(self) -> Self:
        further = self.model_extra or {}
        if refused := {key: further[key] for key in OF_POLICY if key in further}:
            forbid(type(self).__name__, refused)
        _RoleEngineConfig.model_validate(further)
        return self


class EnvironmentConfig(Section):
    function: str | None = None
    """Coroutine `play(task, agent)`, as "module:name" or "file.py:name". By default an episode is
    one prompt and one completion; see docs/how-to/environments.md."""
    command: tuple[str, ...] = ()
    """Program, with its arguments, that plays an episode through the OpenAI API, instead of a
    function; see docs/how-to/serve.md."""
    score: str | None = None
    """Function `score(task, result)` that rewards an episode of environment.command, as
    "module:name" or "file.py:name". By default the scorers reward it."""
    columns: tuple[str, ...] = ()
    """Names of task columns that environment.command receives besides the prompt. By default it
    receives none, so that it cannot read the answer."""
    max_programs: PositiveInt = 32
    """Maximum number of programs of environment.command that run at the same time, in all
    environment processes together."""
    mcp: tuple[McpConfig, ...] = ()
    """MCP servers whose tools are `agent.tools`. Without environment.function, the model chats and
    calls these tools until a reply calls none, and the scorers reward the episode. MCP needs the
    extra millrace[mcp]."""
    external: str | None = None
    """Address "HOST:PORT" at which external programs fetch tasks and post groups, instead of a
    function or a command; see docs/how-to/external-environments.md."""
    workers: NonNegativeInt = 0
    """Number of processes on this host that run the environment. If this and environment.remote
    are 0, a thread of the controller runs it; see docs/how-to/environments.md."""
    remote: NonNegativeInt = 0
    """Number of processes that run the environment on other hosts, which bring them with
    `millrace join --role environment`, or where cluster.launcher places them."""
    max_turns: PositiveInt = 32
    """Maximum number of model replies in an episode."""
    episode_timeout_s: PositiveFloat | None = None
    """Time limit for an episode in seconds. A longer episode is ended and marked. By default 600
    with environment.command, and no limit otherwise."""
    turn_timeout_s: PositiveFloat | None = None
    """Time limit for one model reply in seconds. A longer reply ends its episode, which is marked.
    By default there is no limit."""
    ended_reward: Float = 0.0
    """Reward of an episode that reached its limit of turns or time, or the end of the context."""
    tool_timeout_s: PositiveFloat = 30.0
    """Time limit for one tool call in seconds. The model gets an error if it is exceeded."""
    tool_format: ToolFormatName = "auto"
    """Format of the model's tool calls. "auto" recognises it by the chat template, and takes
    "hermes" if it recognises none."""
    history: Literal["template", "sampled"] = "template"
    """Treatment of earlier turns that the chat template renders differently later (some templates
    drop reasoning): "template" starts a new branch with that rendering, "sampled" continues after
    the tokens that were sampled."""
    template: dict[str, Any] = Field(default={})
    """Variables of the chat template besides messages and tools, such as {enable_thinking =
    false}."""
    models: dict[str, RoleModelConfig] = Field(default={})
    """Models besides the policy, by name, for `agent.role("judge", model="NAME")`. They are never
    trained; see docs/how-to/environments.md."""
    recipe: Plugin | None = None
    """Branching scheme of a group: "pivot" (branches at the tokens that matter most), "tree", or
    "module:Name". By default the episodes of a group are independent; see
    docs/how-to/environments.md."""

    @property
    def num_workers(self) -> int:
        return self.workers + self.remote

    @property
    def may_reward(self) -> bool:
        """True if the environment itself can give rewards."""
        return self.function is not None or bool(self.command) or self.external is not None

    @model_validator(mode="after")
    def _is_one_environment(self) -> Self:
        if self.external is not None:
            refused = ("function", "command", "mcp", "recipe", "models", "workers")
            if given := [key for key in (*refused, "remote") if getattr(self, key)]:
                raise ValueError(f"external programs play the episodes; remove {given[0]}")
            host, _, port = self.external.rpartition(":")
            if not host or not port.isdecimal() or int(port) > 65535:
                raise ValueError(f"external = {self.external!r} is not HOST:PORT")
        if self.command and self.function is not None:
            raise ValueError("a command and a function cannot both be the environment; keep one")
        if self.command and self.mcp:
            raise ValueError("a command runs its own tools; remove mcp, or the command")
        for server in self.mcp:
            if bool(server.command) == (server.url is not None):
                raise ValueError("each server of mcp has either a command or a url; set one")
        for key in ("score", "columns"):
            if getattr(self, key) and not self.command:
                raise ValueError(f"{key} needs a command, and there is none; remove it")
        return self


class ScorerConfig(Section):
    model_config = ConfigDict(extra="allow")

    function: str | None = None
    """Reward function with TRL's signature, sync or async: "module:name" or "file.py:name". A
    scorer has either a function or a type."""
    type: str | None = None
    """Built-in scorer: a verifier ("exact", "numeric", "regex", "json_schema", "math",
    "python_tests", "reasoning_gym"), a service ("http", "judge"), a model ("reward_model",
    "process_reward_model", "teacher", "self_teacher", "reference"), or "module:Name". Its own
    settings are keys of the same table; see docs/how-to/verifiers.md, docs/how-to/scorers.md,
    docs/how-to/reward-models.md and docs/how-to/teachers.md."""
    name: str | None = None
    """Name in metrics and in placement.models. By default the name of the function, or the
    type."""
    weight: Float = 1.0
    """Factor of the scorer's score in the total reward."""
    when: str | None = None
    """Condition on another scorer's score, such as "format >= 1". Only episodes that meet it are
    scored."""
    timeout_s: PositiveFloat | None = None
    """Time limit in seconds for one call of the scorer; for a function from the moment a scorer
    process is free. By default 30, and 300 for models."""
    concurrency: PositiveInt | None = None
    """Maximum number of calls of this scorer at the same time. By default 64; for a function
    scoring.workers, and 64 times that if it is async."""
    batch: NonNegativeInt | None = None
    """Maximum number of episodes of a group per call of the scorer; 0 = the whole group. By default
    0 for functions and 1 for services."""
    retries: NonNegativeInt | None = None
    """Number of retries of a scorer's call that failed temporarily. By default 5, and 1 for
    functions, where it covers a lost process."""

    @property
    def type_settings(self) -> dict[str, Any]:
        """The name and the keys of the type."""
        return {"type": self.type, **(self.model_extra or {})}

    @property
    def call_settings(self) -> dict[str, Any]:
        """The keys of CallSettings that are set."""
        names = {"timeout_s", "concurrency", "batch", "retries"}
        return self.model_dump(include=names, exclude_none=True)

    @model_validator(mode="before")
    @classmethod
    def _may_be_a_name(cls, value: Any) -> Any:
        """ "exact" is a type; "rewards.py:digits" is a function."""
        if not isinstance(value, str):
            return value
        return {"function": value} if ":" in value else {"type": value}

    @model_validator(mode="after")
    def _is_a_function_or_a_type(self) -> Self:
        if (self.function is None) == (self.type is None):
            raise ValueError("a scorer has either a function or a type; set one of the two")
        if self.function is not None and self.model_extra:  # those of a type are its own
            forbid(type(self).__name__, self.model_extra)
        return self


class ScoringConfig(Section):
    workers: PositiveInt = 2
    """Number of processes that run reward functions. A hung or crashed one is replaced."""
    advantages: Plugin = Field(default={"type": "auto"})
    """Estimator that turns scores into advantages: "group" (minus the group's mean, over its
    standard deviation), "leave_one_out", "batch", "returns", "best_worst", "tree" (for
    environment.recipe), "gae" (with [critic], such as {type = "gae", gae_lambda = 0.95}), or
    "module:Name". "auto" is the one that belongs to the loss, mostly "group"; see
    docs/reference/losses.md."""
    penalty: tuple[Plugin, ...] = ()
    """Length penalties, each a part of the score: "soft_overlong", "linear", "cosine", or
    "module:Name"; see docs/how-to/shape-training-data.md."""


class EvaluateConfig(TaskPlace):
    every_steps: NonNegativeInt = 0
    """Number of steps between evaluations. Held-out tasks are always evaluated before the first
    and after the last step; 0 = only then."""
    solved_at: Float = 1.0
    """Score at which an episode counts as solved."""
    max_tasks: PositiveInt = 256
    """Maximum number of held-out tasks that are evaluated: the first ones."""
    samples: PositiveInt = 1
    """Number of episodes per held-out task, for mean@k and pass@k."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature of evaluations; 0 = greedy. By default 0 for one sample, and
    sampling.temperature for several."""
    engines: NonNegativeInt = 0
    """Number of additional engine processes that only evaluate, always with exactly one version.
    0 = the engines of the rollouts evaluate, with the versions they have at the time."""
