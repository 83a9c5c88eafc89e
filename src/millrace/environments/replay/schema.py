"""What a recording of an episode holds, and how it is written: one JSON object.

Promise: what is read is what was written, bit for bit, or one ConfigError sentence: unknown keys,
wrong types and another schema are refused. Numbers are written so that they come back the same,
float32 included. N = sampled tokens of a turn, G = tokens given before them.
"""

from typing import Any, Literal

import msgspec

from millrace.core.records import Branching, Ending, Finish, KVOrigin, Message, Sampling
from millrace.environments.limits import EpisodeLimits
from millrace.environments.tools.functions import Fault

SCHEMA = 1


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a file; unknown keys are an error."""


class TaskRow(Row, frozen=True, kw_only=True):
    prompt: str | list[Message]
    columns: dict[str, Any]
    left_out: list[str] = msgspec.field(default_factory=list)  # columns that JSON cannot say
    source: str = ""


class AgentRow(Row, frozen=True, kw_only=True):
    name: str
    adapter: str | None
    model: str | None = None  # one of the recording's models; None = the run's
    is_trained: bool


class ModelRow(Row, frozen=True, kw_only=True):
    """A model besides the run's that roles were."""

    path: str
    max_context: int
    tool_format: str
    template: dict[str, Any]


class KeptRow(Row, frozen=True, kw_only=True):
    ids: list[int]
    offsets: list[int]


class RoutesRow(Row, frozen=True, kw_only=True):
    shape: tuple[int, int, int]
    dtype: Literal["uint8", "uint16"]
    data: bytes  # base64 in the file; rows one after the other, little-endian


class TurnRow(Row, frozen=True, kw_only=True, tag="turn"):
    """A reply of the model."""

    number: int  # of the turns, by their beginning
    agent: str
    prompt: str | list[Message]
    parent: int | None  # number of the turn that it goes on from
    start: int  # after so many tokens of its branch
    given: list[int]  # [G]
    tokens: list[int]  # [N], as the three below
    logprobs: list[float]
    versions: list[int]
    kept: KeptRow | None = None
    routes: RoutesRow | None = None
    finish: Finish
    text: str
    kv: KVOrigin | None = None
    num_shared: int = 0
    sampling: Sampling
    is_recorded: bool = True  # False = behind an edit: nobody knows what the model would have said


class CutRow(Row, frozen=True, kw_only=True, tag="cut"):
    """A turn that was begun and never answered."""

    number: int
    agent: str
    ending: Ending | None  # to which it brought the episode


class ToolRow(Row, frozen=True, kw_only=True, tag="tool"):
    number: int  # of the calls of tools, by their beginning
    name: str
    arguments: dict[str, Any]
    text: str | None  # that the model was told; None = the call was not waited for
    fault: Fault | None = None
    has_turns: bool = False  # an agent spoke within: it is run again, on the recorded turns
    is_recorded: bool = True


Entry = TurnRow | CutRow | ToolRow


class Recording(Row, frozen=True, kw_only=True):
    schema: Literal[1] = SCHEMA
    name: str  # of its group
    index: int  # within the group
    seed: int  # of the group
    random_index: int  # whose draws of agent.rng it has: its own, or those of what it branched off
    task: TaskRow
    limits: EpisodeLimits
    max_context: int
    ended_reward: float
    tool_format: str
    history: Literal["template", "sampled"]
    template: dict[str, Any]  # what the chat template was told besides messages and tools
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
    """As JSON; what that cannot say is written as its repr."""
    return msgspec.json.encode(value, enc_hook=repr)
