"""The contents of a recorded episode, written as one JSON object.

Promise: a recording is read exactly as it was written, float32 values included, or refused with one
ConfigError sentence: unknown keys, wrong types and other schema versions are errors.

N = sampled tokens of a turn, G = new prompt tokens before them.
"""

from typing import Any, Literal

import msgspec

from millrace.core.records import Branching, Ending, Finish, KVOrigin, Message, Sampling
from millrace.environments.limits import EpisodeLimits
from millrace.environments.tools.functions import Fault

SCHEMA = 1


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object in the file; unknown keys are an error."""


class TaskRow(Row, frozen=True, kw_only=True):
    prompt: str | list[Message]
    columns: dict[str, Any]
    left_out: list[str] = msgspec.field(default_factory=list)  # columns that JSON cannot hold
    source: str = ""


class AgentRow(Row, frozen=True, kw_only=True):
    name: str
    adapter: str | None
    model: str | None = None  # one of Recording.models; None = the policy
    is_trained: bool


class ModelRow(Row, frozen=True, kw_only=True):
    """A model besides the policy."""

    path: str
    max_context: int
    tool_format: str
    template: dict[str, Any]


class KeptRow(Row, frozen=True):
    ids: list[int]
    offsets: list[int]


class RoutesRow(Row, frozen=True, kw_only=True):
    shape: tuple[int, int, int]
    dtype: Literal["uint8", "uint16"]
    data: bytes  # base64 in the file; row-major, little-endian


class TurnRow(Row, frozen=True, kw_only=True, tag="turn"):
    """A reply of the model."""

    number: int  # of turns, in the order in which they began
    agent: str
    prompt: str | list[Message]
    parent: int | None  # number of the turn that it continues
    start: int  # tokens of the branch before this turn
    given: list[int]  # [G]
    tokens: list[int]  # [N], as the next two
    logprobs: list[float]
    versions: list[int]
    kept: KeptRow | None = None
    routes: RoutesRow | None = None
    finish: Finish
    text: str
    kv: KVOrigin | None = None
    num_shared: int = 0
    sampling: Sampling
    is_recorded: bool = True  # False = after an edit: the model never saw this prompt


class CutRow(Row, frozen=True, kw_only=True, tag="cut"):
    """A turn that began and got no reply: the environment stopped waiting, or time was up."""

    number: int
    agent: str
    ending: Ending | None  # that this turn caused; None = it did not end the episode


class ToolRow(Row, frozen=True, kw_only=True, tag="tool"):
    number: int  # of tool calls, in the order in which they began
    name: str
    arguments: dict[str, Any]
    text: str | None  # result for the model; None = the environment did not wait for it
    fault: Fault | None = None
    has_turns: bool = False  # an agent took turns in it: a replay runs it again on these turns
    is_recorded: bool = True  # False = after an edit


Entry = TurnRow | CutRow | ToolRow


class Recording(Row, frozen=True, kw_only=True):
    schema: Literal[1] = SCHEMA
    name: str  # of the group
    index: int  # within the group
    seed: int  # of the group
    random_index: int  # episode whose draws of agent.rng it has: itself, or its parent
    task: TaskRow
    limits: EpisodeLimits
    max_context: int
    ended_reward: float
    tool_format: str
    history: Literal["template", "sampled"]
    template: dict[str, Any]  # settings of the chat template
    sampling: Sampling
    agents: list[AgentRow]
    models: dict[str, ModelRow] = msgspec.field(default_factory=dict)  # by name
    entries: list[Entry]  # in the order in which they ended
    reward: float | dict[str, float] | None
    ending: Ending
    counts: dict[str, int]
    branching: Branching | None = None

    @property
    def turns(self) -> list[TurnRow]:
        return [entry for entry in self.entries if isinstance(entry, TurnRow)]

    @property
    def tool_runs(self) -> list[ToolRow]:
        return [entry for entry in self.entries if isinstance(entry, ToolRow)]


def encode(value: Any) -> bytes:
    """Encode as JSON; a value that JSON cannot hold is written as its repr."""
    return msgspec.json.encode(value, enc_hook=repr)
