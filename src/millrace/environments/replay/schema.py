"""The contents of a recorded episode, written as one JSON object.

Promise: a recording is read exactly as it was written, arrays bit for bit, or refused with one
ConfigError sentence: unknown keys, wrong types and other schema versions are errors. An array is
{"dtype": ..., "shape": [...], "data": base64 of its little-endian values in row-major order}.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from millrace.core.records import (
    DEFAULT_POLICY,
    Branching,
    Completion,
    Ending,
    Message,
    Sampling,
    Task,
)
from millrace.environments.tools.functions import Fault

SCHEMA = 2
SCORED_ENDINGS = ("turns", "length")  # limits at which adapters still score an episode
T = TypeVar("T")


class EpisodeOver(Exception):
    """The episode reached a limit. An environment may catch this to return a reward."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(f"the episode has ended: {ending}")
        self.ending: Ending = ending


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeLimits:
    max_turns: int = 32  # all agents together
    episode_timeout_s: float | None = None
    turn_timeout_s: float | None = None
    tool_timeout_s: float = 30.0


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object in the file; unknown keys are an error."""


class AgentRow(Row, frozen=True, kw_only=True):
    name: str = ""
    adapter: str | None = None
    model: str | None = None  # one of Recording.models; None = the policy
    is_trained: bool = True


class ModelRow(Row, frozen=True, kw_only=True):
    path: str  # empty for the policy
    max_context: int
    tool_format: str
    template: dict[str, Any]  # settings of the chat template


class TurnRow(Row, frozen=True, kw_only=True, tag="turn"):
    """A reply of the model."""

    number: int  # of turns, in the order in which they began
    agent: str
    prompt: str | list[Message]
    parent: int | None  # number of the turn that it continues
    start: int  # tokens of the branch before this turn
    given: np.ndarray  # [G] int32; new prompt tokens
    completion: Completion
    sampling: Sampling

    @property
    def is_recorded(self) -> bool:
        """False after an edit: the model never saw this prompt, and its tokens have no version."""
        versions = self.completion.versions
        return bool((versions >= 0).any()) or not len(versions)


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


class EpisodeSettings(Row, frozen=True, kw_only=True):
    """What an episode depends on, besides its environment, task and replies."""

    name: str  # of the group
    index: int  # within the group
    seed: int = 0  # of the group
    random_index: int  # episode whose draws of agent.rng it has: itself, or its parent
    limits: EpisodeLimits
    ended_reward: float = 0.0  # reward of an episode that reached a limit
    history: Literal["template", "sampled"] = "template"
    policy: ModelRow
    sampling: Sampling
    # Roles that are policies of their own, if there are several; `policy` is the first.
    policies: tuple[str, ...] = ()
    lagged: dict[str, tuple[str, int]] = {}  # adapters that are earlier versions: policy and lag

    def policy_of(self, agent: AgentRow) -> str:
        """The name of the policy that samples and trains a role."""
        return agent.model or agent.adapter or (self.policies or (DEFAULT_POLICY,))[0]


class Recording(EpisodeSettings, frozen=True, kw_only=True):
    schema: Literal[2] = SCHEMA
    task: Task
    left_out: list[str]  # columns of the task that JSON cannot hold
    agents: list[AgentRow]
    models: dict[str, ModelRow]  # besides the policy, by name
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


class ArrayRow(Row, frozen=True, kw_only=True):
    dtype: Literal["int32", "int64", "float32", "float64", "uint8", "uint16"]
    shape: tuple[int, ...]
    data: bytes


def encode(value: Any) -> bytes:
    """Encode as JSON; a value that JSON cannot hold is written as its repr."""
    return msgspec.json.encode(value, enc_hook=_array_row)


def decode(data: bytes, kind: type[T]) -> T:
    return msgspec.json.decode(data, type=kind, dec_hook=_array)


def _array_row(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return repr(value)
    data = value.astype(value.dtype.newbyteorder("<")).tobytes()
    return {"dtype": value.dtype.name, "shape": value.shape, "data": data}


def _array(_kind: type, value: Any) -> np.ndarray:
    row = msgspec.convert(value, ArrayRow)
    dtype = np.dtype(row.dtype)
    if min(row.shape, default=0) < 0 or math.prod(row.shape) * dtype.itemsize != len(row.data):
        raise ValueError(f"an array of shape {row.shape} has {len(row.data)} bytes")
    return np.frombuffer(row.data, dtype.newbyteorder("<")).astype(dtype).reshape(row.shape)
