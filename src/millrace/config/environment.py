"""Settings of [environment]: the environment, its limits, and models besides the policy.

Torch-free.
"""

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from millrace.config.generation import EngineConfig, ModelConfig
from millrace.config.section import (
    Float,
    NonNegativeInt,
    Plugin,
    PositiveFloat,
    PositiveInt,
    Section,
    forbid,
)

ToolFormatName = Literal["auto", "hermes", "llama3", "mistral", "gemma"]
# Keys of [engine] that only the policy's engines have.
OF_POLICY = ("max_count", "remote", "kv", "adapters")


class McpConfig(Section):
    command: tuple[str, ...] = ()
    """Program and its arguments that speak MCP over standard input and output. Each server has
    either a command or a url."""
    url: str | None = None
    """URL of a server that speaks MCP over streamable HTTP."""
    env: dict[str, str] = Field(default={})
    """Environment variables of the program, besides PATH, HOME and the like. Values may hold
    "env:NAME"."""
    headers: dict[str, str] = Field(default={})
    """HTTP headers of requests to the url. Values may hold "env:NAME"."""
    tools: tuple[str, ...] | None = None
    """Names of the server's tools that are offered. By default all of them."""


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
    """Permission to run Python code from this model's directory."""
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
    """Program and its arguments that play an episode through the OpenAI API, instead of a
    function; see docs/how-to/serve.md."""
    score: str | None = None
    """Function `score(task, result)` that rewards what a command did, as "module:name" or
    "file.py:name". By default the scorers do."""
    columns: tuple[str, ...] = ()
    """Names of task columns that a command receives besides the prompt."""
    max_programs: PositiveInt = 32
    """Maximum number of commands that run at the same time."""
    mcp: tuple[McpConfig, ...] = ()
    """MCP servers whose tools are `agent.tools`. Without a function, the model chats and calls
    them until it calls none, and the scorers reward. It needs the extra millrace[mcp]."""
    external: str | None = None
    """Address "HOST:PORT" at which external programs fetch tasks and post groups, instead of a
    function or a command; see docs/how-to/external-environments.md."""
    workers: NonNegativeInt = 0
    """Number of processes on this host that run the environment. With 0, and no remote ones,
    a thread of the controller runs it; see docs/how-to/environments.md."""
    remote: NonNegativeInt = 0
    """Number of processes that run the environment on other hosts, which bring them with
    `millrace join --role environment`."""
    max_turns: PositiveInt = 32
    """Maximum number of model replies in an episode."""
    episode_timeout_s: PositiveFloat | None = None
    """Time limit for an episode in seconds. A longer episode is ended and marked. By default
    there is none, and 600 for a command."""
    turn_timeout_s: PositiveFloat | None = None
    """Time limit for one model reply in seconds. By default there is none."""
    ended_reward: Float = 0.0
    """Reward of an episode that reached a limit or the end of the context."""
    tool_timeout_s: PositiveFloat = 30.0
    """Time limit for one tool call in seconds. The model gets an error if it is exceeded."""
    tool_format: ToolFormatName = "auto"
    """Format of the model's tool calls. "auto" detects it from the chat template."""
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
    """Branching recipe of a group: "pivot" (branches at the tokens that matter most), "tree", or
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
