"""Messages between the controller and environment workers; part of the union of all messages."""

from typing import Any

import numpy as np

from millrace.cluster.messages.message import Message, Part
from millrace.core.records import Branching, Completion, Episode, Sampling, Task


class StartEnvironment(Message, frozen=True):
    """Load the environment and the tokenizers of its models. -> Done"""

    config: dict[str, Any]  # RunConfig as plain data
    # Reference "module:name", or path of a file this run pickled; None = as the config says.
    function: str | None = None


class PlayEpisode(Message, frozen=True):
    """Play one episode. Parts: TurnWanted, TurnDropped. -> EpisodePlayed"""

    key: int  # by which TurnSampled and CancelEpisode name it
    settings: dict[str, Any]  # EpisodeSettings as plain data
    task: Task
    is_trained: bool
    branching: Branching | None = None
    # Of a branch:
    parent: bytes | None = None  # recording of the parent episode, as JSON
    turn: int = 0  # number of the parent's turn that it shares in part
    at: int = 0  # sampled tokens of that turn that are shared
    root: int = 0  # number of the root episode


class TurnWanted(Part, frozen=True):
    """The environment wants a reply of a model: the arguments of GroupPolicy.sample. TurnSampled
    follows as an event."""

    prompt: np.ndarray  # [P] int32
    call: int
    sampling: Sampling
    session: str
    adapter: str | None = None
    model: str | None = None
    is_trained: bool = True
    pinned: bool = False
    partial: Completion | None = None
    routes_from: int = 0


class TurnDropped(Part, frozen=True):
    """The environment no longer waits for the reply to this call."""

    call: int


class TurnSampled(Message, frozen=True):
    """Event for a worker: the reply to a TurnWanted, or why there is none."""

    key: int
    call: int
    completion: Completion | None
    error: str = ""


class CancelEpisode(Message, frozen=True):
    """Event for a worker: end this episode without a reply."""

    key: int


class EpisodePlayed(Message, frozen=True):
    episode: Episode
    recording: bytes | None  # as JSON
