"""[environment]: what is played, and when an episode ends. Torch-free."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from millrace.config.role_model import RoleModelConfig, ToolFormatName
from millrace.config.sections import Float, PositiveFloat, PositiveInt, Section


class McpConfig(Section):
    command: tuple[str, ...] = ()
    """A program and its arguments, which speaks MCP by its input and output."""
    url: str | None = None
    """Or where one listens, by streamable HTTP."""
    name: str | None = None
    """In messages and logs; by default the url, or what the command ends with."""
    env: dict[str, str] = Field(default={})
    """What the program finds in its environment besides PATH, HOME and the like; values may hold
    "env:NAME"."""
    headers: dict[str, str] = Field(default={})
    """Of requests to the url; values may hold "env:NAME"."""
    tools: tuple[str, ...] | None = None
    """Which of its tools are offered; by default all."""


class EnvironmentConfig(Section):
    function: str | None = None
    """ "module:name" or "file.py:name" of a coroutine `play(task, agent)`; by default one prompt
    and one completion. See docs/how-to/environments.md."""
    command: tuple[str, ...] = ()
    """Or a program and its arguments, which speaks to the OpenAI API; see docs/how-to/serve.md."""
    score: str | None = None
    """Of a command: "module:name" or "file.py:name" of a function `score(task, result)` that judges
    what the program did; by default that is left to the scorers."""
    columns: tuple[str, ...] = ()
    """Of a command: columns of the task that the program is told besides the prompt."""
    max_programs: PositiveInt = 32
    """Of a command: how many run at once; the others wait."""
    mcp: tuple[McpConfig, ...] = ()
    """MCP servers, whose tools are `agent.tools`; without a function, the model chats and calls
    them until it calls none, and the scorers judge. Needs the extra millrace[mcp]."""
    max_turns: PositiveInt = 32
    """Replies of the model in an episode, at most."""
    episode_timeout_s: PositiveFloat | None = None
    """An episode that takes longer is ended and marked; with a command 600 if nothing is said."""
    turn_timeout_s: PositiveFloat | None = None
    """So is one in which a single reply does."""
    ended_reward: Float = 0.0
    """Reward of an episode that came to one of these limits, or to the end of the context."""
    tool_timeout_s: PositiveFloat = 30.0
    """A tool call that takes longer is given up, and the model is told."""
    tool_result_chars: PositiveInt = 16384
    """What is longer is cut, and the model is told."""
    tool_format: ToolFormatName = "auto"
    """How the model writes tool calls; "auto" sees it by the chat template."""
    history: Literal["template", "sampled"] = "template"
    """Where the chat template would render earlier turns otherwise than before (some drop their
    thinking): do so in a new branch, or go on after what was sampled all the same."""
    template: dict[str, Any] = Field(default={})
    """What the chat template is told besides messages and tools, such as {enable_thinking =
    false}."""
    models: dict[str, RoleModelConfig] = Field(default={})
    """Models besides the policy, by name, which roles may be: `agent.role("judge", model="NAME")`.
    They are never trained; see docs/how-to/environments.md."""

    recipe: dict[str, Any] | None = None
    """How a group is played, where not n times side by side: "pivot" (branches at the tokens
    that matter most), "tree", or {type = "module:Name", ...} of yours; see
    docs/how-to/environments.md."""

    @property
    def may_reward(self) -> bool:
        """True if there is someone besides the scorers who can."""
        return self.function is not None or bool(self.command)

    @field_validator("recipe", mode="before")
    @classmethod
    def _may_be_a_name(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        if self.command and self.function is not None:
            raise ValueError("a command and a function cannot both be the environment; keep one")
        if self.command and self.mcp:
            raise ValueError("a command runs its tools itself; leave out mcp, or the command")
        for server in self.mcp:
            if bool(server.command) == (server.url is not None):
                raise ValueError("each of mcp has either a command or a url; set one of the two")
        for key in ("score", "columns"):
            if getattr(self, key) and not self.command:
                raise ValueError(f"{key} is for a command, and there is none; leave it out")
        return self
